"""The head: merge each bubble into one prediction, then logits or loss. The output projection is the tied embedding.

With w the softmax of the log scores within a bubble, e(·) the final norm followed by the output projection:

    mixture     p(y) = Σ_j w_j · softmax(e(x_j))[y]      every stream is decoded, distributions are averaged
    residual    p(y) = softmax(e(Σ_j w_j x_j))[y]        residuals are averaged, one vector is decoded
    original    p(y) = softmax(e(x_original))[y]         only the original is decoded
    forks       residual without the original, unless it is alone: w is the softmax of the forks' log scores

All are mixtures of decoded rows (`OutputRows`); all but the first have one row per token. The authors' code has
Σ_j P_j x_j in place of the average (`Form.residual_sum`): the final norm removes the difference, up to its epsilon.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from thoughtbubbles.model.config import Merge
from thoughtbubbles.model.gradients import gather_with_inverse, weighted_sum
from thoughtbubbles.model.linear import linear
from thoughtbubbles.model.loss import IGNORED, mean_loss, row_log_prob
from thoughtbubbles.model.streams import (
    Streams,
    at_least_float32,
    bubble_scan,
    bubble_sizes,
    find_bubbles,
    is_original,
    originals,
    streams_up_to,
    take,
    take_or_zero,
)


class OutputRows(NamedTuple):
    """Vectors to decode. The rows of a token are contiguous, and its distribution is their mixture."""

    x: Float[Tensor, "B R D"]  # after the final norm
    log_score: Float[Tensor, "B R"]
    token: Int[Tensor, "B R"]
    n_tokens: int
    most_per_token: int
    is_mixture: bool


def rows_to_decode(
    streams: Streams,
    merge: Merge,
    norm: Callable[[Tensor], Tensor],
    *,
    n_tokens: int,
    max_bubble: int,
    residual_sum: bool = False,
    scores: bool = True,
) -> OutputRows:
    if merge == "mixture":
        most = min(max_bubble, streams.token.shape[1])
        return OutputRows(
            norm(streams.x), streams.log_score, streams.token, n_tokens, most_per_token=most, is_mixture=True
        )
    up_to, sizes = streams_up_to(streams.token, n_tokens), bubble_sizes(streams.token, n_tokens)
    tokens, real = torch.arange(n_tokens, device=sizes.device), sizes > 0  # a padded row has fewer tokens than T
    if merge == "original":
        back = torch.where(is_original(streams.token, n_tokens), streams.token, n_tokens)
        x = gather_with_inverse(streams.x, torch.where(real, up_to - 1, streams.token.shape[1]), back[..., None])
    elif residual_sum:
        x = sum_residual(streams, n_tokens=n_tokens, max_bubble=max_bubble)
    else:
        only_forks = merge == "forks"
        x = merge_residual(streams, n_tokens=n_tokens, max_bubble=max_bubble, only_forks=only_forks, scores=scores)
    token = torch.where(real, tokens, n_tokens)
    alone = torch.zeros_like(token, dtype=streams.log_score.dtype)
    return OutputRows(norm(x), alone, token, n_tokens, most_per_token=1, is_mixture=False)


def bubbles_at(
    streams: Streams, row: Int[Tensor, "n"], token: Int[Tensor, "n"], *, n_tokens: int
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
    """First and last slot of the bubble of each (row, token) pair."""
    end = originals(streams.token, n_tokens)[row, token]
    return find_bubbles(streams.token, n_tokens).start[row, end], end


def gather_bubbles(
    streams: Streams, row: Int[Tensor, "n"], start: Int[Tensor, "n"], end: Int[Tensor, "n"], *, width: int
) -> Streams:
    """Gathers bubbles of at most `width` streams, each into a row of one token."""
    slot = start[:, None] + torch.arange(width, device=end.device)
    used, slot = slot <= end[:, None], slot.clamp(max=streams.token.shape[1] - 1)
    log_score = torch.where(used, streams.log_score[row[:, None], slot], 0)
    return Streams(streams.x[row[:, None], slot], log_score, torch.where(used, 0, 1))


def last_bubbles(streams: Streams, lengths: Int[Tensor, "B"], *, n_tokens: int, max_bubble: int) -> Streams:
    """The bubble of each row's last token, as a row of one token."""
    row = torch.arange(lengths.shape[0], device=lengths.device)
    start, end = bubbles_at(streams, row, lengths - 1, n_tokens=n_tokens)
    return gather_bubbles(streams, row, start, end, width=min(max_bubble, streams.token.shape[1]))


def sum_residual(streams: Streams, *, n_tokens: int, max_bubble: int) -> Float[Tensor, "B T D"]:
    """Σ_j P_j x_j over the bubble of each token; 0 past a padded row's end."""
    start, _ = find_bubbles(streams.token, n_tokens)
    share, most = (
        streams.log_score.exp()[..., None] * at_least_float32(streams.x),
        min(max_bubble, streams.token.shape[1]),
    )
    total = bubble_scan(share, start, torch.add, max_bubble=most)
    up_to, sizes = streams_up_to(streams.token, n_tokens), bubble_sizes(streams.token, n_tokens)
    return take_or_zero(total, torch.where(sizes > 0, up_to - 1, streams.token.shape[1])).to(streams.x.dtype)


def merge_residual(
    streams: Streams, *, n_tokens: int, max_bubble: int, only_forks: bool = False, scores: bool = True
) -> Float[Tensor, "B T D"]:
    """m_t = Σ_j w_j x_j over the bubble of each token t, w = softmax of its log scores; 0 past a padded row's end.

    only_forks  originals have no weight, unless they are alone
    scores      False: all are 1, so the weights are equal
    """
    start, end = find_bubbles(streams.token, n_tokens)
    most, merged = min(max_bubble, streams.token.shape[1]), torch.ones_like(start, dtype=torch.bool)
    if only_forks:
        merged = ~is_original(streams.token, n_tokens) | (start == end)
    if not scores:
        others = end - start + 1 - (start < end).long() * only_forks
        weight = merged / others.to(streams.log_score.dtype)
    elif n_tokens == 1:
        weight = streams.log_score.masked_fill(~merged | (streams.token != 0), -math.inf).softmax(1)
    else:
        log_score = streams.log_score.detach().masked_fill(~merged, -math.inf)
        largest = bubble_scan(log_score, start, torch.maximum, max_bubble=most)
        score = (log_score - take(largest, end)).exp()  # relative to the bubble's best, so the sum is at least 1
        weight = score / take(bubble_scan(score, start, torch.add, max_bubble=most), end)
    if n_tokens == 1:  # a decoding step: the row is one bubble, and its sum a single kernel
        x = torch.where((streams.token == 0)[..., None], at_least_float32(streams.x), 0)
        return (weight[..., None] * x).sum(1, keepdim=True).to(streams.x.dtype)
    total = weighted_sum(streams.x, streams.log_score, weight, streams.token, start, n_tokens=n_tokens, max_bubble=most)
    return total.to(streams.x.dtype)


def logits(rows: OutputRows, weight: Float[Tensor, "V D"]) -> Float[Tensor, "B T V"]:
    """One distribution per token: plain logits, or log-probabilities of a mixture. Matrix products follow autocast."""
    every = at_least_float32(linear(rows.x, weight))
    if not rows.is_mixture:
        return every
    joint = every.log_softmax(-1) + rows.log_score[..., None]
    if rows.n_tokens == 1:  # a decoding step: the row is one bubble
        unused = rows.token != 0
        joint = joint.masked_fill(unused[..., None], -math.inf).logsumexp(1, keepdim=True)
        return joint - rows.log_score.masked_fill(unused, -math.inf).logsumexp(1)[:, None, None]
    start, _ = find_bubbles(rows.token, rows.n_tokens)
    joint = bubble_scan(joint, start, torch.logaddexp, max_bubble=rows.most_per_token)
    total = bubble_scan(rows.log_score, start, torch.logaddexp, max_bubble=rows.most_per_token)
    original = originals(rows.token, rows.n_tokens)
    return take(joint, original) - take(total, original)[..., None]


def token_nll(rows: OutputRows, weight: Float[Tensor, "V D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Negative log-likelihood of each target, 0 where it is ignored; supports any upstream gradient."""
    log_prob = row_log_prob(rows.x.flatten(0, 1), weight, _row_targets(rows, targets).flatten())
    start, _ = find_bubbles(rows.token, rows.n_tokens)
    joint = rows.log_score + log_prob.view_as(rows.log_score)
    joint = bubble_scan(joint, start, torch.logaddexp, max_bubble=rows.most_per_token)
    total = bubble_scan(rows.log_score, start, torch.logaddexp, max_bubble=rows.most_per_token)
    nll = take(total - joint, originals(rows.token, rows.n_tokens))
    return torch.where(targets == IGNORED, 0, nll)


def mean_nll(rows: OutputRows, weight: Float[Tensor, "V D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """The training loss: one mean over all targets of the batch that are not ignored."""
    bubbles = find_bubbles(rows.token, rows.n_tokens)
    first_slot = torch.arange(rows.token.shape[0], device=rows.token.device)[:, None] * rows.token.shape[1]
    return mean_loss(
        rows.x.flatten(0, 1),
        weight,
        _row_targets(rows, targets).flatten(),
        log_score=rows.log_score.flatten(),
        start=(bubbles.start + first_slot).flatten(),
        end=(bubbles.end + first_slot).flatten(),
        max_bubble=rows.most_per_token,
    )


def _row_targets(rows: OutputRows, targets: Int[Tensor, "B T"]) -> Int[Tensor, "B R"]:
    return take(F.pad(targets, (0, 1), value=IGNORED), rows.token)
