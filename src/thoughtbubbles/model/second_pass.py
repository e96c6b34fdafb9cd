"""A second pass through the last blocks for forks alone: more depth where a prediction is made, none for the state.

    first pass    all streams through all blocks; a fork sees the originals left of it and the forks of its own bubble
                  up to itself (`fork_reach=0`)
    second pass   forks once more through the blocks from `second_pass` on: they see the keys and values that originals
                  had there in the first pass, and those that the forks of their own bubble have in the second one

Nobody but their own bubble sees forks, and originals do not change, so later tokens do not depend on the second pass
and the KV cache has nothing of it. The blocks are the same: only the keys that their attention is given are others.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.model.attention import AttentionPath, gated
from thoughtbubbles.model.block import Residual
from thoughtbubbles.model.gradients import gather_with_inverse
from thoughtbubbles.model.layout import Layout
from thoughtbubbles.model.rope import Rotary
from thoughtbubbles.model.selection import pack
from thoughtbubbles.model.streams import Streams, is_original, slots, take_or_zero


class KeysValues(NamedTuple):
    """Of one block: keys, rotated, and values, multiplied by their scores."""

    key: Float[Tensor, "B N K H"]
    value: Float[Tensor, "B N K H"]


class Seen(NamedTuple):
    """What forks see of originals."""

    blocks: Sequence[KeysValues]
    bias: Float[Tensor, "B K"] | None
    visible: Bool[Tensor, "B F K"]  # by each fork


def keeping(path: AttentionPath, kept: list[KeysValues], n: int) -> AttentionPath:
    """The path, which also appends the keys and values of the first `n` blocks that call it to `kept`."""

    def keep(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        found = KeysValues(k, gated(v, layout))
        if len(kept) < n:  # activation checkpointing runs a block again, and what it then has must not stay in memory
            kept.append(found)
        return path(q, k, v, layout)

    return keep


def second_pass(
    blocks: Iterable[nn.Module],
    streams: Streams,
    layout: Layout,
    kept: Sequence[KeysValues],
    path: AttentionPath,
    *,
    n_tokens: int,
    n_forks: int,
) -> Streams:
    """The streams after it.

    kept     keys and values of all streams in these blocks, in the first pass
    n_forks  at most, in a row
    """
    original = is_original(streams.token, n_tokens)
    if n_forks == 0:
        return streams
    # In a padded row there are fewer originals than columns: then the last columns belong to nothing.
    own, place_of_original = pack(original, n_tokens)
    fork, place_of_fork = pack(~original & (streams.token < n_tokens), n_forks)

    def of_originals(values: Tensor) -> Tensor:
        found = gather_with_inverse(values.transpose(1, 2), own, place_of_original[..., None])
        return found.transpose(1, 2)

    token = torch.where(fork < streams.token.shape[1], take_or_zero(streams.token, fork), n_tokens)
    seen = Seen(
        [KeysValues(*map(of_originals, each)) for each in kept],
        None if layout.key_bias is None else gather_with_inverse(layout.key_bias, own, place_of_original[..., None]),
        slots(own)[:, None] < torch.where(token < n_tokens, token, 0)[..., None],  # its own is right of it
    )
    x = gather_with_inverse(streams.x, fork, place_of_fork[..., None])
    x = forks_again(blocks, x, token, layout_of(layout, fork, place_of_fork), seen, path)
    back = gather_with_inverse(x, place_of_fork, fork[..., None])
    return Streams(torch.where((place_of_fork < n_forks)[..., None], back, streams.x), streams.log_score, streams.token)


def layout_of(layout: Layout, chosen: Int[Tensor, "B F"], place: Int[Tensor, "B S"]) -> Layout:
    """Of some of the streams; without their reach."""

    def some(values: Tensor | None) -> Tensor | None:
        return None if values is None else gather_with_inverse(values, chosen, place[..., None])

    cos, sin = (take_or_zero(table[:, 0], chosen)[:, None] for table in layout.rotary)
    bias, value_gate, gate = map(some, (layout.key_bias, layout.value_gate, layout.gate))
    return Layout(Rotary(cos, sin), bias, value_gate, gate, layout.least_bias)


def forks_again(
    blocks: Iterable[nn.Module],
    x: Float[Tensor, "B F D"],
    token: Int[Tensor, "B F"],
    layout: Layout,
    seen: Seen,
    path: AttentionPath,
) -> Float[Tensor, "B F D"]:
    """Forks through the blocks, with a layout of their own. Of each other they see those of their own bubble."""
    slot = slots(token)
    own = (token[:, :, None] == token[:, None]) & (slot[:, :, None] >= slot[:, None])
    visible = torch.cat([seen.visible, own], dim=-1)
    bias = None
    if seen.bias is not None and layout.key_bias is not None:
        bias = torch.cat([seen.bias, layout.key_bias], dim=-1)
    residual = Residual(x)
    for block, originals in zip(blocks, seen.blocks, strict=True):

        def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, originals: KeysValues = originals) -> Tensor:
            key = torch.cat([originals.key.to(k.dtype), k], dim=2)
            value = torch.cat([originals.value.to(v.dtype), gated(v, layout)], dim=2)
            return path(q, key, value, layout._replace(key_bias=bias, value_gate=None, visible=visible))

        residual = block(residual, layout, attend)
    return residual.total(layout.gate)
