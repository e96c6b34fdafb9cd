"""The second pass of forks (model/second_pass.py) over a KV cache: the keys of originals are those that are cached."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from thoughtbubbles.generate.cache import Span
from thoughtbubbles.model.attention import PATHS
from thoughtbubbles.model.layout import Layout, attenuation
from thoughtbubbles.model.second_pass import KeysValues, Seen, forks_again, layout_of
from thoughtbubbles.model.streams import Streams
from thoughtbubbles.model.transformer import Thoughtbubbles


def cached_second_pass(
    model: Thoughtbubbles,
    streams: Streams,
    layout: Layout,
    span: Span,
    fork: Int[Tensor, "F"],
    row: Int[Tensor, "M"],
    number: Int[Tensor, "M"],
    n_tokens: Mapping[int, int],
) -> Streams:
    """The packed streams (packed.py) after it.

    fork      the streams that go through it: forks whose tokens predict
    row       of each stream: an index into the rows of `n_tokens`
    number    of each stream: of its token in that row
    n_tokens  of the rows of the cache: each has as many originals in its first slots
    """
    if len(fork) == 0:
        return streams
    config, device = model.config, fork.device

    def of_rows(kept: Float[Tensor, "R N S H"]) -> Float[Tensor, "1 N K H"]:
        return torch.cat([kept[each, :, :n] for each, n in n_tokens.items()], dim=1)[None]

    blocks = model.blocks[config.second_pass :]
    log_p = torch.cat([span.log_score[each, :n] for each, n in n_tokens.items()])[None]
    counts = torch.tensor(list(n_tokens.values()), device=device)
    of_row = torch.arange(len(n_tokens), device=device).repeat_interleave(counts)
    earlier = torch.cat([torch.arange(n, device=device) for n in n_tokens.values()])
    seen = Seen(
        [KeysValues(of_rows(span.key[i]), of_rows(span.value[i])) for i in range(-len(blocks), 0)],
        attenuation(log_p, config)[0],
        ((row[fork, None] == of_row) & (number[fork, None] > earlier))[None],
    )
    place = torch.full_like(row, len(fork)).index_put_((fork,), torch.arange(len(fork), device=device))
    own = layout_of(layout, fork[None], place[None])
    x = forks_again(blocks, streams.x[:, fork], streams.token[:, fork], own, seen, PATHS["reference"])
    return Streams(streams.x.index_copy(1, fork, x), streams.log_score, streams.token)
