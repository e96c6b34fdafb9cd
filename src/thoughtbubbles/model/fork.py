"""The fork layer: score → candidates → select → gather.

Each stream i gets two scores, σ(f(x_i)) = [fork_i, keep_i], which multiply the score it arrives with. In log space,

    log score of a candidate = log score of its parent + max(logsigmoid(z), −20),    z = W · LayerNorm(x) + b;

with `own_scores` the parent's is left out.

Candidates are ordered [fork_0, keep_0, fork_1, keep_1, …] and survivors keep this order, so a fork is directly left of
its parent. A surviving fork starts as its parent's x plus a learned embedding; with `feedback` more is added to it
later (feedback.py). Selection has no gradient: scores are learned through the attenuation of attention and of residual
updates, and through the merge. With `score_noise`, training chooses by noisy scores. Without `scores`, all candidates
survive, and every score is 1.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.model.config import OURS
from thoughtbubbles.model.gradients import gather_with_inverse, norm_and_project
from thoughtbubbles.model.linear import Linear
from thoughtbubbles.model.selection import AnyRule, candidate_keys, candidate_levels, pack
from thoughtbubbles.model.streams import (
    Streams,
    accumulation_dtype,
    at_least_float32,
    bubble_sizes,
    is_original,
    slots,
    take,
)

FLOOR = -20.0  # lower bound of one log score: a score of exp(−20) is effectively 0, and gradients stay finite


class ForkRecord(NamedTuple):
    """What one fork layer did (`trace=True`): S streams → C = 2S candidates → n slots."""

    own_log_score: Float[Tensor, "B S 2"]  # [fork, keep], before the parent's score is added
    log_score: Float[Tensor, "B C"]  # of every candidate: cumulative, except with `own_scores`
    level: Int[Tensor, "B C"]  # the rounded log score used for ranking; originals rank above all others
    selected: Bool[Tensor, "B C"]
    parent: Int[Tensor, "B n"]  # the stream that a survivor continues or is forked from; −1 in unused slots
    is_fork: Bool[Tensor, "B n"]
    token: Int[Tensor, "B n"]
    bubble_size: Int[Tensor, "B T"]
    layer: int = -1  # the block that follows; set by the model: a constant here would compile each layer separately


class ScoreHead(nn.Module):
    """Fork and keep scores of each stream, always in at least float32: in bfloat16 many scores would tie."""

    def __init__(self, width: int, *, bias: int | float | None):
        super().__init__()
        self.initial_bias = bias
        self.weight = nn.Parameter(torch.empty(2, width))  # row 0 fork, row 1 keep
        self.bias = nn.Parameter(torch.empty(2)) if bias is not None else None

    def forward(self, x: Float[Tensor, "B S D"], norm: nn.LayerNorm) -> Float[Tensor, "B S 2"]:
        z = norm_and_project(x, norm, self.weight)
        if self.bias is not None:
            z = z + at_least_float32(self.bias)
        return F.logsigmoid(z).clamp(min=FLOOR)


class ForkLayer(nn.Module):
    def __init__(
        self,
        width: int,
        *,
        score_bias: int | float | None,
        score_noise: int | float = 0,
        levels: int = OURS.levels,
        scores: bool = True,
        own_scores: bool = False,
        feedback: bool = False,
    ):
        super().__init__()
        self.levels, self.own_scores, self.score_noise = levels, own_scores, score_noise
        self.norm = nn.LayerNorm(width) if scores else None
        self.score = ScoreHead(width, bias=score_bias) if scores else None
        self.embedding = nn.Parameter(torch.empty(width))
        self.feedback_norm = nn.LayerNorm(width) if feedback else None
        self.feedback = Linear(width, width) if feedback else None

    def log_scores(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S 2"]:
        if self.score is None:
            return x.new_zeros(*x.shape[:2], 2, dtype=accumulation_dtype(x.dtype))
        with torch.autocast(x.device.type, enabled=False):
            return self.score(x, self.norm)

    def feed_back(self, last: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """What forks get of the previous token's last state (feedback.py)."""
        assert self.feedback is not None
        assert self.feedback_norm is not None
        norm = self.feedback_norm
        weight, bias = norm.weight.to(last.dtype), norm.bias.to(last.dtype)
        return self.feedback(F.layer_norm(last, norm.normalized_shape, weight, bias, norm.eps)).to(last.dtype)

    def forward(
        self, streams: Streams, lengths: Int[Tensor, "B"], *, n_tokens: int, rule: AnyRule | None
    ) -> tuple[Streams, ForkRecord]:
        """`rule`: None only without `scores`."""
        own = self.log_scores(streams.x)
        before = streams.log_score[..., None].expand_as(own)
        log_score = (own if self.own_scores else before if self.score is None else before + own).flatten(1)
        token = streams.token[..., None].expand(-1, -1, 2).flatten(1)  # of one stream in each row a view: never written
        original = is_original(streams.token, n_tokens)
        forced = torch.stack([torch.zeros_like(original), original], dim=-1).flatten(1)

        ranked = log_score
        if self.training and torch.is_grad_enabled() and self.score_noise:
            # Never above 0, so that an original stays above all other candidates.
            ranked = log_score.detach() - self.score_noise * torch.randn_like(log_score).abs()
        level = candidate_levels(ranked, token, forced, n_tokens, levels=self.levels)
        n_streams = streams.token.shape[1]
        if self.score is None or rule is None:  # every candidate stays in its place
            survives, parent = token < n_tokens, slots(token) // 2
            is_fork = (slots(token) % 2 == 0) & survives
            x, kept_log_score, kept_token = streams.x[:, :, None].expand(-1, -1, 2, -1).flatten(1, 2), log_score, token
        else:
            survives = rule.survives(candidate_keys(level), token, lengths, n_tokens)
            chosen, place = pack(survives, rule.n_slots(n_streams, n_tokens))
            used = chosen < 2 * n_streams
            parent, is_fork = chosen // 2, (chosen % 2 == 0) & used  # unused slots: parent = S, past the end
            # Each stream goes to at most two slots: one for its fork, one for itself.
            x = gather_with_inverse(streams.x, parent, place.unflatten(1, (n_streams, 2)))
            kept_log_score = gather_with_inverse(log_score, chosen, place[..., None])
            kept_token = torch.where(used, take(streams.token, parent.clamp(max=n_streams - 1)), n_tokens)
        x = x + torch.where(is_fork[..., None], self.embedding, 0).to(x.dtype)
        after = Streams(x, kept_log_score, kept_token)
        record = ForkRecord(
            own_log_score=own,
            log_score=log_score,
            level=level,
            selected=survives,
            parent=torch.where(after.token < n_tokens, parent, -1),
            is_fork=is_fork,
            token=after.token,
            bubble_size=bubble_sizes(after.token, n_tokens),
        )
        return after, record
