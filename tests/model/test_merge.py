"""The merge of bubbles: the weighted sum and its gradients, against plain formulas and differences."""

import pytest
import torch

from helpers import SAME_FUNCTION
from thoughtbubbles.model import gradients
from thoughtbubbles.model.head import merge_residual, rows_to_decode
from thoughtbubbles.model.streams import Streams

# Rows of three tokens, of two, and of one; 3 marks unused slots.
TOKEN = torch.tensor([[0, 1, 1, 1, 2, 2], [0, 0, 1, 3, 3, 3], [0, 3, 3, 3, 3, 3]])
LENGTHS = (3, 2, 1)


def streams() -> Streams:
    x = torch.randn(3, 6, 5, dtype=torch.float64, requires_grad=True)
    log_score = (-3 * torch.rand(3, 6, dtype=torch.float64)).requires_grad_()
    return Streams(x, log_score, TOKEN)


def plain(by: Streams, n_tokens: int = 3) -> torch.Tensor:
    """Σ_j w_j x_j, bubble by bubble."""
    merged = torch.zeros(by.x.shape[0], n_tokens, by.x.shape[2], dtype=by.x.dtype)
    for row in range(by.x.shape[0]):
        for t in range(n_tokens):
            bubble = by.token[row] == t
            if bubble.any():
                merged[row, t] = by.log_score[row, bubble].softmax(0) @ by.x[row, bubble]
    return merged


@pytest.mark.parametrize("unrolled", [16, 2], ids=["one by one", "scan"])
def test_residual_merge_and_its_gradients(unrolled, monkeypatch):
    monkeypatch.setattr(gradients, "UNROLLED", unrolled)
    by = streams()
    merged, expected = merge_residual(by, n_tokens=3, max_bubble=8), plain(by)
    torch.testing.assert_close(merged, expected, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    upstream = torch.randn_like(merged)
    pairs = (torch.autograd.grad(out, by[:2], upstream) for out in (merged, expected))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
        assert (ours[TOKEN == 3] == 0).all()
    run = lambda x, score: merge_residual(Streams(x, score, TOKEN), n_tokens=3, max_bubble=8)  # noqa: E731
    assert torch.autograd.gradcheck(run, by[:2])


@pytest.mark.parametrize("only_forks", [False, True])
@pytest.mark.parametrize("scores", [False, True])
def test_a_row_of_one_token_is_merged_as_in_a_longer_row(scores, only_forks):
    """Decoding takes a shorter way. A fork layer without scores leaves log scores of 0."""
    token = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]])
    x = torch.randn(3, 4, 5, dtype=torch.float64).masked_fill(token[..., None] == 1, torch.nan).requires_grad_()
    log_score = (-3 * torch.rand(3, 4, dtype=torch.float64) * scores).requires_grad_()
    options = {"max_bubble": 4, "only_forks": only_forks, "scores": scores}
    merged = merge_residual(Streams(x, log_score, token), n_tokens=1, **options)
    longer = merge_residual(Streams(x.nan_to_num(), log_score, token), n_tokens=2, **options)[:, :1]
    torch.testing.assert_close(merged, longer, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    if not only_forks:
        equal = torch.stack([each[own].mean(0) for each, own in zip(x, token == 0, strict=True)])
        assert scores or torch.allclose(merged[:, 0], equal, atol=SAME_FUNCTION)
    upstream = torch.randn_like(merged)
    for ours, theirs in zip(
        *(torch.autograd.grad(out, (x, log_score), upstream, allow_unused=True) for out in (merged, longer)),
        strict=True,
    ):
        if ours is not None or scores:
            torch.testing.assert_close(ours[token == 0], theirs[token == 0], atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


def test_original_merge_and_its_gradients():
    by = streams()

    def run(x: torch.Tensor) -> torch.Tensor:
        return rows_to_decode(Streams(x, by.log_score, TOKEN), "original", lambda h: h, n_tokens=3, max_bubble=8).x

    originals = [[0, 3, 5], [1, 2], [0]]
    merged = run(by.x)
    for row, slots in enumerate(originals):
        assert torch.equal(merged[row, : len(slots)], by.x[row, slots])
        assert (merged[row, len(slots) :] == 0).all()
    assert torch.autograd.gradcheck(run, by.x)


@pytest.mark.parametrize("merge", ["residual", "original"])
def test_tokens_of_the_rows(merge):
    by = streams()
    rows = rows_to_decode(by, merge, lambda h: h, n_tokens=3, max_bubble=8)
    assert rows.token.tolist() == [[0, 1, 2], [0, 1, 3], [0, 3, 3]]
    one = Streams(by.x[:, :2], by.log_score[:, :2], torch.tensor([[0, 0], [0, 1], [0, 0]]))  # a step of decoding
    rows = rows_to_decode(one, merge, lambda h: h, n_tokens=1, max_bubble=8)
    expected = plain(one, 1) if merge == "residual" else torch.stack([one.x[0, 1], one.x[1, 0], one.x[2, 1]])[:, None]
    torch.testing.assert_close(rows.x, expected, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


def test_scores_that_underflow_still_share():
    """Log scores of −2000: relative to the best of the bubble nothing underflows."""
    by = streams()
    low = Streams(by.x, by.log_score - 2000, TOKEN)
    expected = merge_residual(by, n_tokens=3, max_bubble=8)
    torch.testing.assert_close(merge_residual(low, n_tokens=3, max_bubble=8), expected, atol=1e-9, rtol=0)
