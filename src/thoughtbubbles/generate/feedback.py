"""Forks that come after originals (model/feedback.py) over a KV cache, which has the last states of all tokens.

The single next token of a row: the last state of the token before is known, so its fork and its original go through the
blocks together. Several tokens: originals first; then forks. If forks do not see each other (`fork_reach=0`), only
those of tokens that predict are computed, since nothing else depends on forks.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.generate.cache import Cache, Span
from thoughtbubbles.model.attention import PATHS, gated
from thoughtbubbles.model.block import Residual
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.feedback import layout_of
from thoughtbubbles.model.layout import Layout, attenuation
from thoughtbubbles.model.streams import Streams
from thoughtbubbles.model.transformer import Thoughtbubbles


def fed_back(
    fork: nn.Module, cache: Cache, row: Int[Tensor, "M"], number: Int[Tensor, "M"], dtype: torch.dtype
) -> Float[Tensor, "M D"]:
    """What forks of these tokens get: of the one before, which the first of a row does not have."""
    assert cache.last is not None
    before = cache.last[row, (number - 1).clamp(min=0)]
    said = fork.feed_back(before.to(dtype))  # type: ignore[operator]
    return torch.where((number > 0)[:, None], said, 0)


class Ring(NamedTuple):
    """The forks that rows hold (reach.py) before a step stores others in their place."""

    token: Int[Tensor, "B R"]
    log_score: Float[Tensor, "B R"]

    @classmethod
    def of(cls, span: Span, rows: Int[Tensor, "B"]) -> "Ring":
        return cls(span.token[rows, : span.ring].long(), span.log_score[rows, : span.ring])


class Waiting(NamedTuple):
    """The packed streams (packed.py) after the fork layer, of which forks wait for the last states of originals."""

    streams: Streams
    layout: Layout
    row: Int[Tensor, "M"]  # of each stream: an index into the rows of the batch
    number: Int[Tensor, "M"]  # of each stream: of its token in that row
    is_fork: Bool[Tensor, "M"]
    where: tuple[Int[Tensor, "M"], Int[Tensor, "M"]]  # row and slot of each stream in the cache
    ring: Ring

    @property
    def originals(self) -> Int[Tensor, "n"]:
        return (~self.is_fork).nonzero()[:, 0]

    def streams_of(self, chosen: Int[Tensor, "n"]) -> Streams:
        return Streams(*(each[:, chosen] for each in self.streams))

    def layout_of(self, chosen: Int[Tensor, "n"]) -> Layout:
        place = torch.full_like(self.row, len(chosen))
        place[chosen] = torch.arange(len(chosen), device=place.device)
        return layout_of(self.layout, chosen[None], place[None])


def run_waiting(
    model: Thoughtbubbles,
    cache: Cache,
    waiting: Waiting,
    originals: Float[Tensor, "1 n D"],
    chosen: Bool[Tensor, "M"],
    n_tokens: Mapping[int, int],
) -> Streams:
    """All streams after the last block; forks that are neither chosen nor seen by others are not computed.

    originals  after the last block
    n_tokens   of the rows of the cache that are read: each has as many originals
    """
    config, (layer,), span = model.config, model.config.fork_layers, cache.spans[-1]
    size = waiting.ring.token.shape[1]
    fork = (waiting.is_fork & (chosen | (size > 0))).nonzero()[:, 0]
    streams = waiting.streams._replace(x=waiting.streams.x.index_copy(1, waiting.originals, originals))
    if not len(fork):
        return streams
    rows, row, number = torch.tensor(list(n_tokens), device=fork.device), waiting.row[fork], waiting.number[fork]
    x = waiting.streams.x[0, fork]
    x = x + fed_back(model.forks[str(layer)], cache, rows[row], number, x.dtype)
    layout = waiting.layout_of(fork)
    parts, first = [], 0
    counts = torch.bincount(row, minlength=len(rows)).tolist()
    for i, ((each, n), count) in enumerate(zip(n_tokens.items(), counts, strict=True)):
        if count:
            ring = Ring(*(of_rows[i] for of_rows in waiting.ring))
            parts.append(_part(config, span, layout, ring, each, n, number, slice(first, first + count)))
        first += count
    row_in_cache, slot = (each[fork] for each in waiting.where)
    residual = Residual(x[None])
    for i, block in enumerate(model.blocks[layer:]):

        def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout, i: int = i) -> Tensor:
            key, value, v = span.key[i], span.value[i], gated(v, layout)
            heads = []
            for part in parts:
                own, row, n = part.forks, slice(part.row, part.row + 1), size + part.n_tokens
                keys = torch.cat([key[row, :, :n].to(k.dtype), k[:, :, own]], dim=2)
                values = torch.cat([value[row, :, :n].to(v.dtype), v[:, :, own]], dim=2)
                seen = layout._replace(key_bias=part.bias, value_gate=None, visible=part.visible)
                heads.append(PATHS["reference"](q[:, :, own], keys, values, seen))
            if size:
                key[row_in_cache, :, slot] = k[0].transpose(0, 1).to(key.dtype)
                value[row_in_cache, :, slot] = v[0].transpose(0, 1).to(value.dtype)
            return torch.cat(heads, dim=2)

        residual = block(residual, layout, path)
    return streams._replace(x=streams.x.index_copy(1, fork, residual.total(layout.gate)))


class Part(NamedTuple):
    """The forks of one row, and what they see: forks that are held, originals of earlier tokens, and new forks."""

    row: int
    n_tokens: int
    forks: slice
    visible: Bool[Tensor, "1 f R+n+f"]
    bias: Float[Tensor, "1 R+n+f"] | None


def _part(
    config: ModelConfig,
    span: Span,
    layout: Layout,
    ring: Ring,
    row: int,
    n_tokens: int,
    number: Int[Tensor, "F"],
    forks: slice,
) -> Part:
    assert config.fork_reach is not None
    size, own, of_token = len(ring.token), number[forks], number[forks, None]
    held = of_token - ring.token <= config.fork_reach
    earlier = of_token > torch.arange(n_tokens, device=number.device)
    new = (own <= of_token) & (of_token - own <= config.fork_reach)  # a token has one fork
    log_score = torch.cat([ring.log_score, span.log_score[row, size : size + n_tokens]])
    bias = attenuation(log_score[None], config)[0]
    if bias is not None and layout.key_bias is not None:
        bias = torch.cat([bias, layout.key_bias[:, forks]], dim=1)
    return Part(row, n_tokens, forks, torch.cat([held, earlier, new], dim=1)[None], bias)
