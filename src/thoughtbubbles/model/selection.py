"""Which candidates survive a fork layer: the rules `block` (the paper's) and `causal` (ours).

Candidates are compared by one integer key, (round(log score × 4096), earlier first), with the keep candidate of an
original above all others. All keys of a row differ, so every device ranks alike and equal scores do not hang on noise.

block   The ceil(r·T) largest keys of the whole row survive. Not causal: later tokens decide which earlier forks live.
causal  Token t decides with what is known at t, and no decision is ever revised:
        1. a candidate of token t passes if fewer than cap_t = floor(r·(t+1)) candidates of tokens ≤ t have a larger key;
        2. with s_t the number that pass and A_t = min(A_{t−1} + s_t, cap_t), token t keeps its best A_t − A_{t−1}.
        In closed form A_t = S_t + min(0, min_{j≤t}(cap_j − S_j)), where S is the running sum of s: no loop over tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import Selection
from thoughtbubbles.model.streams import slots, streams_up_to, take

LEVELS = 4096  # scores closer than 1/4096 in log space count as equal, and the earlier candidate wins
ORIGINAL = 1  # the level of an original's keep candidate: log scores are ≤ 0, so above every other
UNUSED = -(2**30)  # the level of unused slots: below every other
STRIDE = 2**32  # levels are this far apart, which leaves room for the candidate's index


class Rule(NamedTuple):
    """A selection rule with its budget: all that a fork layer needs to know."""

    selection: Selection
    budget: Budget
    fixed_tokens: int | None = None  # the block size, if the cap is that of a full block whatever the row's length

    def n_slots(self, n_streams: int, n_tokens: int) -> int:
        """Slots that hold the survivors of any row: a Python number, known without looking at a score."""
        if self.selection == "causal":
            most = self.budget.largest_floor(n_tokens)
        elif self.fixed_tokens is None:
            most = self.budget.largest_ceil(n_tokens)
        else:
            most = max(n_tokens, self.budget.largest_ceil(self.fixed_tokens))
        return min(2 * n_streams, most)

    def survives(
        self, key: Int[Tensor, "B C"], token: Int[Tensor, "B C"], lengths: Int[Tensor, "B"], n_tokens: int
    ) -> Bool[Tensor, "B C"]:
        if self.selection == "causal":
            tokens_seen = torch.arange(1, n_tokens + 1, device=key.device)[None]
            return select_causal(key, token, self.budget.floor(tokens_seen))
        cap = self.budget.ceil(lengths[:, None])
        if self.fixed_tokens is not None:
            cap = torch.maximum(lengths[:, None], self.budget.ceil(torch.full_like(lengths, self.fixed_tokens)[:, None]))
        return select_block(key, cap) & (token < n_tokens)


def candidate_keys(
    log_score: Float[Tensor, "B C"], token: Int[Tensor, "B C"], forced: Bool[Tensor, "B C"], n_tokens: int
) -> Int[Tensor, "B C"]:
    level = (log_score.detach() * LEVELS).round().long()
    level = torch.where(forced, ORIGINAL, level)
    level = torch.where(token < n_tokens, level, UNUSED)
    return level * STRIDE - slots(token)


def select_block(key: Int[Tensor, "B C"], cap: Int[Tensor, "B 1"]) -> Bool[Tensor, "B C"]:
    ranked = key.sort(dim=-1, descending=True).values
    smallest_survivor = ranked.gather(-1, (cap - 1).clamp(max=key.shape[1] - 1))
    return key >= smallest_survivor


def select_causal(
    key: Int[Tensor, "B C"], token: Int[Tensor, "B C"], cap: Int[Tensor, "#B T"]
) -> Bool[Tensor, "B C"]:
    batch, n_tokens = key.shape[0], cap.shape[1]
    # Line the candidates up by token as before, but best first within a token. Then all rivals of a candidate, those of
    # tokens ≤ t with a larger key, stand before it, and its place in the bubble is its rank there.
    by_key = key.argsort(dim=-1, descending=True)
    line = by_key.gather(-1, token.gather(-1, by_key).argsort(dim=-1, stable=True))
    rank = larger_before(key.gather(-1, line))
    rank_in_bubble = slots(token) - torch.searchsorted(token, token)

    passes = rank < take(_with_unused(cap.expand(batch, -1)), token)
    passed = F.pad(passes.cumsum(-1), (1, 0))
    passed_up_to = take(passed, streams_up_to(token, n_tokens))  # S_t
    kept_up_to = passed_up_to + (cap - passed_up_to).cummin(-1).values.clamp(max=0)  # A_t
    quota = torch.diff(kept_up_to, prepend=kept_up_to.new_zeros(batch, 1))
    # A better candidate of the same token passes too, so the rank among those that pass is the rank in the bubble.
    survives = passes & (rank_in_bubble < take(_with_unused(quota), token))
    return survives.gather(-1, line.argsort(dim=-1))


def larger_before(key: Int[Tensor, "B C"]) -> Int[Tensor, "B C"]:
    """For each entry the number of larger ones before it: merge sort's way of counting, log2(C) rounds in parallel.

    In each round the row is cut into pairs of blocks, and every entry of a right block looks its key up in the sorted
    left block. Memory stays linear in C; comparing all pairs would take C² and, on a CPU, ten times as long.
    """
    n = key.shape[1]
    size, padded = 1, 1 << (n - 1).bit_length()
    key = F.pad(key, (0, padded - n))
    count = torch.zeros_like(key)
    while size < padded:
        left, right = key.unflatten(-1, (-1, 2, size)).unbind(-2)
        larger = size - torch.searchsorted(left.sort(dim=-1).values, right.contiguous(), right=True)
        count = count + torch.stack([torch.zeros_like(larger), larger], dim=-2).flatten(1)
        size *= 2
    return count[:, :n]


def _with_unused(per_token: Int[Tensor, "B T"]) -> Int[Tensor, "B T+1"]:
    """A column for token = T, the mark of unused slots: nothing is allowed to them."""
    return F.pad(per_token, (0, 1))


def pack(survives: Bool[Tensor, "B C"], n_slots: int) -> Int[Tensor, "B n"]:
    """The surviving candidates in their order, one a slot; C (no candidate) in the slots left over at the right."""
    nth = torch.arange(1, n_slots + 1, device=survives.device).repeat(survives.shape[0], 1)
    return torch.searchsorted(survives.cumsum(-1), nth)
