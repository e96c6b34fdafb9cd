"""Forks that come after originals (model/feedback.py) over a KV cache, which has the last states of all tokens.

The single next token of a row: the last state of the token before is known, so its fork and its original go through the
blocks together. Several tokens: originals first; then forks, but only those of tokens that predict, since nothing else
depends on forks.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.generate.cache import Cache
from thoughtbubbles.model.attention import PATHS, gated
from thoughtbubbles.model.block import Residual
from thoughtbubbles.model.feedback import layout_of
from thoughtbubbles.model.layout import Layout, attenuation
from thoughtbubbles.model.streams import Streams
from thoughtbubbles.model.transformer import Thoughtbubbles


def fed_back(
    fork: nn.Module, cache: Cache, row: Int[Tensor, "M"], number: Int[Tensor, "M"], dtype: torch.dtype
) -> Float[Tensor, "M D"]:
    """What forks of these tokens get: of the one before, which the first of a row does not have."""
    assert cache.state is not None
    before = cache.state[row, (number - 1).clamp(min=0)]
    said = fork.feed_back(before.to(dtype))  # type: ignore[operator]
    return torch.where((number > 0)[:, None], said, 0)


class Waiting(NamedTuple):
    """The packed streams (packed.py) after the fork layer, of which forks wait for the last states of originals."""

    streams: Streams
    layout: Layout
    row: Int[Tensor, "M"]  # of each stream: an index into the rows of the batch
    number: Int[Tensor, "M"]  # of each stream: of its token in that row
    is_fork: Bool[Tensor, "M"]

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
    """All streams after the last block; forks that are not chosen are not computed.

    originals  after the last block
    n_tokens   of the rows of the cache that are read: each has as many originals in its first slots
    """
    config, (layer,), span = model.config, model.config.fork_layers, cache.spans[-1]
    fork = (waiting.is_fork & chosen).nonzero()[:, 0]
    streams = waiting.streams._replace(x=waiting.streams.x.index_copy(1, waiting.originals, originals))
    if not len(fork):
        return streams
    row, number = waiting.row[fork], waiting.number[fork]
    rows = torch.tensor(list(n_tokens), device=fork.device)
    x = waiting.streams.x[0, fork]
    x = x + fed_back(model.forks[str(layer)], cache, rows[row], number, x.dtype)

    def of_rows(kept: Float[Tensor, "R N S H"]) -> Float[Tensor, "1 N K H"]:
        return torch.cat([kept[each, :, :n] for each, n in n_tokens.items()], dim=1)[None]

    counts = torch.tensor(list(n_tokens.values()), device=fork.device)
    of_row = torch.arange(len(n_tokens), device=fork.device).repeat_interleave(counts)
    earlier = torch.cat([torch.arange(n, device=fork.device) for n in n_tokens.values()])
    visible = (row[:, None] == of_row) & (number[:, None] > earlier)
    itself = torch.eye(len(fork), dtype=torch.bool, device=fork.device)  # a token has one fork
    visible = torch.cat([visible, itself], dim=1)[None]
    layout = waiting.layout_of(fork)
    log_p = torch.cat([span.log_score[each, :n] for each, n in n_tokens.items()])[None]
    bias = attenuation(log_p, config)[0]
    if bias is not None and layout.key_bias is not None:
        bias = torch.cat([bias, layout.key_bias], dim=1)
    residual = Residual(x[None])
    for i, block in enumerate(model.blocks[layer:]):

        def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout, i: int = i) -> Tensor:
            key = torch.cat([of_rows(span.key[i]).to(k.dtype), k], dim=2)
            value = torch.cat([of_rows(span.value[i]).to(v.dtype), gated(v, layout)], dim=2)
            seen = layout._replace(key_bias=bias, value_gate=None, visible=visible)
            return PATHS["reference"](q, key, value, seen)

        residual = block(residual, layout, path)
    return streams._replace(x=streams.x.index_copy(1, fork, residual.total(layout.gate)))
