"""The fork layer: score → candidates → select → gather.

Every stream i gets two scores, σ(f(x_i)) = [fork_i, keep_i], which multiply the score it has come with; in log space

    log score of a candidate = log score of its parent + max(logsigmoid(z), −20),    z = W · LayerNorm(x) + b.

Candidates stand in the order [fork_0, keep_0, fork_1, keep_1, …]; survivors keep it, so a fork is directly left of its
parent. A surviving fork is its parent's x plus a learned embedding. Selection has no gradient: scores learn through the
attenuation of attention and residual writes, and through the merge.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.model.selection import NextToken, Rule, candidate_keys, candidate_levels, pack
from thoughtbubbles.model.streams import Streams, bubble_sizes, find_bubbles, is_original, take, wide

FLOOR = -20.0  # of one log score: exp(−20) is as good as deleted, and gradients stay finite


class ForkRecord(NamedTuple):
    """What one fork layer did (`trace=True`): from S streams through C = 2S candidates to n slots."""

    layer: int
    own_log_score: Float[Tensor, "B S 2"]  # [fork, keep], before the parent's score is added
    log_score: Float[Tensor, "B C"]  # cumulative, of every candidate
    level: Int[Tensor, "B C"]  # the log score as it is ranked: rounded, originals above all others
    selected: Bool[Tensor, "B C"]
    parent: Int[Tensor, "B n"]  # the stream that a survivor was or was forked from; −1 in unused slots
    is_fork: Bool[Tensor, "B n"]
    token: Int[Tensor, "B n"]
    bubble_size: Int[Tensor, "B T"]


class ScoreHead(nn.Module):
    """Fork and keep score of each stream, in float32 whatever surrounds it: in bfloat16 scores tie by the dozen."""

    def __init__(self, width: int, *, bias: int | float | None):
        super().__init__()
        self.initial_bias = bias
        self.weight = nn.Parameter(torch.empty(2, width))  # row 0 fork, row 1 keep
        self.bias = nn.Parameter(torch.empty(2)) if bias is not None else None

    def forward(self, normed: Float[Tensor, "B S D"]) -> Float[Tensor, "B S 2"]:
        # Products and a sum, no matrix product: neither autocast nor TF32 can round them, and they fuse with the norm.
        weight = wide(self.weight)
        z = torch.stack([(normed * weight[0]).sum(-1), (normed * weight[1]).sum(-1)], dim=-1)
        if self.bias is not None:
            z = z + wide(self.bias)
        return F.logsigmoid(z).clamp(min=FLOOR)


class ForkLayer(nn.Module):
    def __init__(self, width: int, *, score_bias: int | float | None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = ScoreHead(width, bias=score_bias)
        self.embedding = nn.Parameter(torch.empty(width))

    def log_scores(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S 2"]:
        with torch.autocast(x.device.type, enabled=False):
            norm = self.norm
            normed = F.layer_norm(wide(x), norm.normalized_shape, wide(norm.weight), wide(norm.bias), norm.eps)
            return self.score(normed)

    def forward(
        self, streams: Streams, lengths: Int[Tensor, "B"], *, n_tokens: int, rule: Rule | NextToken, layer: int
    ) -> tuple[Streams, ForkRecord]:
        own = self.log_scores(streams.x)
        log_score = (streams.log_score[..., None] + own).flatten(1)
        token = streams.token.repeat_interleave(2, dim=1)
        original = is_original(streams.token, find_bubbles(streams.token, n_tokens), n_tokens)
        forced = torch.stack([torch.zeros_like(original), original], dim=-1).flatten(1)

        level = candidate_levels(log_score, token, forced, n_tokens)
        survives = rule.survives(candidate_keys(level), token, lengths, n_tokens)
        chosen = pack(survives, rule.n_slots(streams.token.shape[1], n_tokens))

        used = chosen < token.shape[1]
        chosen = chosen.clamp(max=token.shape[1] - 1)
        parent, is_fork = chosen // 2, (chosen % 2 == 0) & used
        x = take(streams.x, parent) + torch.where(is_fork[..., None], self.embedding, 0).to(streams.x.dtype)
        after = Streams(
            x=x,
            log_score=torch.where(used, take(log_score, chosen), 0),
            token=torch.where(used, take(token, chosen), n_tokens),
        )
        record = ForkRecord(
            layer=layer,
            own_log_score=own,
            log_score=log_score,
            level=level,
            selected=survives,
            parent=torch.where(used, parent, -1),
            is_fork=is_fork,
            token=after.token,
            bubble_size=bubble_sizes(after.token, n_tokens),
        )
        return after, record
