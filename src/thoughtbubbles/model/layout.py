"""The layout of the streams, shared by all blocks up to the next fork layer: their positions and their attenuation.

A stream is the residual vector of a token, or of a fork of it; S counts streams, T tokens. P is the score of a stream,
and c = 1/√H. The paper adds c · log P_key to the attention logits and multiplies values by P_key and updates by P.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.fork import FLOOR
from thoughtbubbles.model.rope import Rotary, rotary
from thoughtbubbles.model.streams import (
    Streams,
    bubble_scan,
    find_bubbles,
    is_original,
    positions,
    slots,
    streams_up_to,
    take,
)


class Reach(NamedTuple):
    """Which streams see which: a stream sees originals at or left of it, and of forks those of near tokens.

    Example with a reach of 0: originals a b c, forks a' b' b″; rows are queries, columns keys:

            a' a  b″ b' b  c
        a'  x
        a   x  x
        b″     x  x
        b'     x  x  x
        b      x  x  x  x
        c      x        x  x
    """

    token: Int[Tensor, "B S"]
    up_to: Int[Tensor, "B T"]  # for each token, the streams of tokens up to it
    tokens: int  # that see a fork after its own: ModelConfig.fork_reach

    def visible(self) -> Bool[Tensor, "B S S"]:
        """The matrix itself, which our kernels never need."""
        token, slot = self.token, slots(self.token)
        is_near = token[:, :, None] - token[:, None] <= self.tokens
        return (is_near | is_original(token, self.up_to.shape[1])[:, None]) & (slot[:, :, None] >= slot[:, None])


class Layout(NamedTuple):
    """Made by its constructor where it is compiled: PyTorch 2.11 cannot return what `_replace` makes."""

    rotary: Rotary
    key_bias: Float[Tensor, "B S"] | None = None  # added to the scaled attention logits
    value_gate: Float[Tensor, "B S"] | None = None  # multiplies the values
    gate: Float[Tensor, "B S"] | None = None  # multiplies the residual updates
    least_bias: float = -math.inf  # a lower bound of key_bias, which makes the kernel's backward faster
    reach: Reach | None = None  # None: every stream sees all streams at or left of it
    visible: Bool[Tensor, "B S K"] | None = None  # with a reach: what each stream sees, unless a kernel finds it


class Originals(NamedTuple):
    """Seen by forks that go through a block after them (feedback.py)."""

    kept: Float[Tensor, "3 B N T H"]  # queries (not used), keys and values of the block's attention
    key_bias: Float[Tensor, "B T"] | None


def find_layout(streams: Streams, config: ModelConfig, *, n_tokens: int, has_forked: bool = True) -> Layout:
    """`has_forked` is False before the first fork layer, where every score is 1."""
    position = positions(streams.token, find_bubbles(streams.token, n_tokens), streams.log_score.dtype)
    if not has_forked:
        return layout_at(position, None, config)
    log_p, reach = attenuating(streams.log_score, streams.token, config, n_tokens=n_tokens), None
    if config.fork_reach is not None:
        reach = Reach(streams.token, streams_up_to(streams.token, n_tokens), config.fork_reach)
    return layout_at(position, log_p, config, reach)


def layout_at(
    position: Float[Tensor, "B S"],
    log_score: Float[Tensor, "B S"] | None,
    config: ModelConfig,
    reach: Reach | None = None,
) -> Layout:
    tables = rotary(position + config.form.first_position, config.head_size)
    return Layout(tables) if log_score is None else Layout(tables, *attenuation(log_score, config), reach)


def attenuating(
    log_score: Float[Tensor, "B S"], token: Int[Tensor, "B S"], config: ModelConfig, *, n_tokens: int
) -> Float[Tensor, "B S"]:
    """log P: the log score, or with `relative_scores` that minus the largest of the bubble."""
    if not config.relative_scores:
        return log_score
    start, end = find_bubbles(token, n_tokens)
    most = min(config.max_bubble, token.shape[1])
    return log_score - take(bubble_scan(log_score, start, torch.maximum, max_bubble=most), end)


def attenuation(
    log_score: Float[Tensor, "B S"], config: ModelConfig
) -> tuple[Float[Tensor, "B S"] | None, Float[Tensor, "B S"] | None, Float[Tensor, "B S"] | None, float]:
    """Key bias, value gate and update gate (None if the config disables them), and a lower bound of the key bias."""
    if not config.scores:
        return None, None, None, -math.inf
    score = log_score.exp()
    scale = 1 / math.sqrt(config.head_size) if config.score_scale == "head" else 1.0  # "head" is the paper's c
    return (
        log_score * scale if config.gate_qk else None,
        score if config.gate_v else None,
        score if config.gate_residual else None,
        FLOOR * len(config.fork_layers) * scale,  # each fork layer adds FLOOR or more to a log score
    )
