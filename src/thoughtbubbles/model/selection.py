"""Which candidates survive a fork layer: the rules `block` (the paper's) and `causal` (ours).

Candidates are compared by one integer key, (round(log score × 4096), earlier first); the keep candidate of an original
ranks above all others. All keys of a row differ, so every device gives the same ranking, even of equal scores.

block   The ceil(r·T) largest keys of the row survive. Not causal: later tokens decide which earlier forks survive.
causal  Token t decides from tokens up to t only, and no decision is ever revised:
        1. a candidate of token t passes if fewer than cap_t = floor(r·(t+1)) candidates of tokens ≤ t have larger keys;
        2. with s_t the number that pass and A_t = min(A_{t−1} + s_t, cap_t), token t keeps its best A_t − A_{t−1}.
        In closed form A_t = S_t + min(0, min_{j≤t}(cap_j − S_j)), where S is the running sum of s: no loop over tokens.
        (Tokens that continue a row start from S = A of the last token before them.)
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles import kernels
from thoughtbubbles.kernels import ops
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import OURS, BudgetMode, ModelConfig, Selection
from thoughtbubbles.model.streams import slots, streams_up_to, take

ORIGINAL = 1  # level of an original's keep candidate: above all others, since log scores are ≤ 0
UNUSED = -(2**30)  # level of unused slots: below all others
RUN = 64  # candidates compared pairwise when counting ranks: about the square root of a row's usual number
STRIDE = 2**32  # distance between levels in a key, which leaves room for the candidate's index


@runtime_checkable
class AnyRule(Protocol):
    """What a fork layer asks for."""

    def n_slots(self, n_streams: int, n_tokens: int) -> int:
        """Number of slots that can hold the survivors of any row."""

    def survives(
        self, key: Int[Tensor, "B C"], token: Int[Tensor, "B C"], lengths: Int[Tensor, "B"], n_tokens: int
    ) -> Bool[Tensor, "B C"]: ...


class Rule(NamedTuple):
    """A selection rule and its budget: all that a fork layer needs."""

    selection: Selection
    budget: Budget
    fixed_tokens: int | None = None  # budget_mode="fixed": block_size, since every row has the cap of a full one

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        budget: Budget | None = None,
        selection: Selection | None = None,
        budget_mode: BudgetMode | None = None,
    ) -> "Rule":
        """The config's rule; budget, selection and budget mode can be overridden."""
        return cls(
            config.selection if selection is None else selection,
            Budget.of(config.budget) if budget is None else budget,
            config.block_size if (budget_mode or config.budget_mode) == "fixed" else None,
        )

    def n_slots(self, n_streams: int, n_tokens: int) -> int:
        """Number of slots that can hold the survivors of any row: a Python int, independent of the scores."""
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
            cap = torch.maximum(
                lengths[:, None], self.budget.ceil(torch.full_like(lengths, self.fixed_tokens)[:, None])
            )
        return select_block(key, cap) & (token < n_tokens)


class NextToken(NamedTuple):
    """The causal rule for one more token per row, from the cached state of the tokens before it.

    This is the rule exactly as stated above, one token at a time. The token's own streams form a row of one token.
    """

    earlier: Int[Tensor, "B C"]  # levels of all candidates of earlier tokens, including dropped ones
    n_earlier: Int[Tensor, "B"]  # how many of these slots are in use
    kept: Int[Tensor, "B"]  # A_{t−1}
    cap: Int[Tensor, "B"]  # floor(r·(t+1))
    width: int  # slots for the survivors

    def n_slots(self, n_streams: int, n_tokens: int) -> int:
        return min(2 * n_streams, self.width)

    def survives(
        self, key: Int[Tensor, "B c"], token: Int[Tensor, "B c"], lengths: Int[Tensor, "B"], n_tokens: int
    ) -> Bool[Tensor, "B c"]:
        in_use = torch.arange(self.earlier.shape[1], device=key.device) < self.n_earlier[:, None]
        # At equal levels the earlier candidate has the larger key.
        larger = (self.earlier.long()[:, None] * STRIDE >= key[..., None]) & in_use[:, None]
        rank_in_bubble = (key[:, None] > key[..., None]).sum(-1)
        passes = (larger.sum(-1) + rank_in_bubble < self.cap[:, None]) & (token < n_tokens)
        quota = torch.minimum(self.kept + passes.sum(-1), self.cap) - self.kept  # A_t − A_{t−1}
        return passes & (rank_in_bubble < quota[:, None])


def candidate_levels(
    log_score: Float[Tensor, "B C"],
    token: Int[Tensor, "B C"],
    forced: Bool[Tensor, "B C"],
    n_tokens: int,
    *,
    levels: int = OURS.levels,
) -> Int[Tensor, "B C"]:
    level = (log_score.detach() * levels).round().long()
    level = torch.where(forced, ORIGINAL, level)
    return torch.where(token < n_tokens, level, UNUSED)


def candidate_keys(level: Int[Tensor, "B C"]) -> Int[Tensor, "B C"]:
    return level * STRIDE - slots(level)


def select_block(key: Int[Tensor, "B C"], cap: Int[Tensor, "B 1"]) -> Bool[Tensor, "B C"]:
    if kernels.available(key.device):
        return ops.rank_in_row(key) < cap
    ranked = key.sort(dim=-1, descending=True).values
    smallest_survivor = ranked.gather(-1, (cap - 1).clamp(max=key.shape[1] - 1))
    return key >= smallest_survivor


def select_causal(
    key: Int[Tensor, "B C"],
    token: Int[Tensor, "B C"],
    cap: Int[Tensor, "#B T"],
    *,
    before: Int[Tensor, "B C"] | None = None,
    kept: Int[Tensor, "B"] | None = None,
) -> Bool[Tensor, "B C"]:
    """The causal rule for the T tokens of a row.

    For tokens that continue a row, `before` counts the candidates of earlier tokens with a larger key than each of
    these, and `kept` is A of the last earlier token.
    """
    batch, n_tokens = key.shape[0], cap.shape[1]
    rank, rank_in_bubble = ops.ranks(key, token) if kernels.available(key.device) else ranks(key, token, n_tokens)
    rank = rank if before is None else rank + before

    passes = rank < take(_with_unused(cap.expand(batch, -1)), token)
    passed = F.pad(passes.cumsum(-1), (1, 0))
    passed_up_to = take(passed, streams_up_to(token, n_tokens))  # S_t
    passed_up_to = passed_up_to if kept is None else passed_up_to + kept[:, None]
    kept_up_to = passed_up_to + (cap - passed_up_to).cummin(-1).values.clamp(max=0)  # A_t
    quota = torch.diff(kept_up_to, prepend=kept_up_to.new_zeros(batch, 1) if kept is None else kept[:, None])
    # Every better candidate of the same token passes too, so the rank among those that pass is the rank in the bubble.
    return passes & (rank_in_bubble < take(_with_unused(quota), token))


def ranks(
    key: Int[Tensor, "B C"], token: Int[Tensor, "B C"], n_tokens: int
) -> tuple[Int[Tensor, "B C"], Int[Tensor, "B C"]]:
    """For each candidate, the number with a larger key among the tokens up to its own, and in its own token.

    In order of keys, largest first, these are the entries before it whose token is ≤ its own, or equal to it. They are
    counted pairwise within short runs, and from a cumulative table of tokens over all earlier runs. Time and memory are
    C · (64 + T/64); comparing all pairs would take C².
    """
    if key.shape[1] <= RUN:  # as in a decoding step: one run, so the order does not matter
        larger, theirs, mine = key[:, None] > key[..., None], token[:, None], token[..., None]
        return (larger & (theirs <= mine)).sum(-1, dtype=torch.int32), (larger & (theirs == mine)).sum(
            -1, dtype=torch.int32
        )
    order = key.argsort(dim=-1, descending=True)
    padding = -key.shape[1] % RUN
    runs = F.pad(token.gather(-1, order), (0, padding), value=n_tokens).unflatten(-1, (-1, RUN))

    before = torch.ones(RUN, RUN, dtype=torch.bool, device=key.device).tril(-1)
    mine, theirs = runs[..., :, None], runs[..., None, :]
    lower_in_run = ((theirs <= mine) & before).sum(-1, dtype=torch.int32)
    equal_in_run = ((theirs == mine) & before).sum(-1, dtype=torch.int32)

    table = lower_in_run.new_zeros(*runs.shape[:2], n_tokens + 1)
    table = table.scatter_add(-1, runs, torch.ones_like(lower_in_run))
    table = table.cumsum(1, dtype=torch.int32) - table  # count per token, in all earlier runs
    lower = lower_in_run + table.cumsum(-1, dtype=torch.int32).gather(-1, runs)
    equal = equal_in_run + table.gather(-1, runs)

    place = order.argsort(dim=-1)
    return lower.flatten(1).gather(-1, place), equal.flatten(1).gather(-1, place)


def _with_unused(per_token: Int[Tensor, "B T"]) -> Int[Tensor, "B T+1"]:
    """Appends a column for token = T, which marks unused slots: they are allowed nothing."""
    return F.pad(per_token, (0, 1))


def pack(survives: Bool[Tensor, "B C"], n_slots: int) -> tuple[Int[Tensor, "B n"], Int[Tensor, "B C"]]:
    """The candidate in each slot (survivors in their order), and the inverse: the slot of each candidate.

    Unused slots, at the right, hold C (no candidate); dropped candidates hold n (no slot).
    """
    if kernels.available(survives.device):
        return ops.pack(survives, n_slots)
    filled = survives.cumsum(-1)
    place = torch.where(survives & (filled <= n_slots), filled - 1, n_slots)
    chosen = place.new_full((place.shape[0], n_slots + 1), place.shape[1])  # last column: the dropped ones
    return chosen.scatter(1, place, slots(place).expand_as(place))[:, :n_slots], place
