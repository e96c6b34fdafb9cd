"""What is derived from streams, on the example of the module's own picture and on random rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thoughtbubbles.model.gradients import gather_with_inverse
from thoughtbubbles.model.streams import (
    bubble_scan,
    bubble_sizes,
    find_bubbles,
    is_original,
    originals,
    positions,
    streams_up_to,
    take,
)

TOKEN = torch.tensor([[0, 1, 1, 2, 2, 2]])  # the last token has three streams
PADDED = torch.tensor([[0, 0, 1, 3, 3, 3]])  # T = 3, a row of two tokens and three unused slots


def test_a_small_row():
    bubbles = find_bubbles(TOKEN, 3)
    assert bubbles.start.tolist() == [[0, 1, 1, 3, 3, 3]]
    assert bubbles.end.tolist() == [[0, 2, 2, 5, 5, 5]]
    assert is_original(TOKEN, 3).tolist() == [[True, False, True, False, False, True]]
    assert originals(TOKEN, 3).tolist() == [[0, 2, 5]]
    assert bubble_sizes(TOKEN, 3).tolist() == [[1, 2, 3]]


def test_positions_are_exact():
    """k − p/q computed directly: thirds come out as the nearest float32, not as a drifting sum."""
    found = positions(TOKEN + 500, find_bubbles(TOKEN, 3), torch.float32)
    expected = torch.tensor([[500, 501 - 1 / 2, 501, 502 - 2 / 3, 502 - 1 / 3, 502]])
    assert torch.equal(found, expected)


def test_unused_slots_are_separate_bubbles():
    bubbles = find_bubbles(PADDED, 3)
    assert bubbles.start.tolist() == [[0, 0, 2, 3, 4, 5]]
    assert bubbles.end.tolist() == [[1, 1, 2, 3, 4, 5]]
    assert bubble_sizes(PADDED, 3).tolist() == [[2, 1, 0]]
    assert not is_original(PADDED, 3)[0, 3:].any()


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.sampled_from(["add", "maximum", "logaddexp"]))
def test_scan_gives_the_original_its_full_bubble(sizes, operation):
    token = torch.tensor([[t for t, size in enumerate(sizes) for _ in range(size)]])
    values = torch.randn(1, token.shape[1], 2, dtype=torch.float64)
    bubbles = find_bubbles(token, len(sizes))
    scanned = bubble_scan(values, bubbles.start, getattr(torch, operation), max_bubble=8)
    whole = {"add": torch.sum, "maximum": torch.amax, "logaddexp": torch.logsumexp}[operation]
    for t, original in enumerate(originals(token, len(sizes))[0].tolist()):
        torch.testing.assert_close(scanned[0, original], whole(values[0, token[0] == t], dim=0))


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=3), st.integers(0, 3))
def test_counts_of_streams_in_padded_rows(rows, padding):
    n_tokens, width = max(map(len, rows)), max(map(sum, rows)) + padding
    owners = [[t for t, size in enumerate(sizes) for _ in range(size)] for sizes in rows]
    token = torch.tensor([owner + [n_tokens] * (width - len(owner)) for owner in owners])
    expected = torch.tensor([[owner.count(t) for t in range(n_tokens)] for owner in owners])
    assert torch.equal(bubble_sizes(token, n_tokens), expected)
    assert torch.equal(streams_up_to(token, n_tokens), expected.cumsum(1))


# ---- taking values whose places are known ---------------------------------------------------------------------------

SOURCE = torch.tensor([[0, 0, 2, 4], [3, 1, 1, 4]])  # of 4 values: one goes nowhere, one twice; 4 is none
PLACES = torch.tensor([[[0, 1], [4, 4], [2, 4], [4, 4]], [[4, 4], [1, 2], [4, 4], [0, 4]]])


@pytest.mark.parametrize("trailing", [(), (3,)])
def test_relocated_values_and_their_gradient(trailing):
    values = torch.randn(2, 4, *trailing, dtype=torch.float64, requires_grad=True)
    moved = gather_with_inverse(values, SOURCE, PLACES)
    none = (SOURCE == 4).reshape(2, 4, *(1 for _ in trailing))
    expected = torch.where(none, 0, take(values, SOURCE.clamp(max=3)))
    upstream = torch.randn_like(moved)
    assert torch.equal(moved, expected)
    assert torch.equal(*(torch.autograd.grad(out, values, upstream)[0] for out in (moved, expected)))
    assert torch.autograd.gradcheck(lambda v: gather_with_inverse(v, SOURCE, PLACES), values)
    assert torch.autograd.gradgradcheck(lambda v: gather_with_inverse(v, SOURCE, PLACES), values)
