"""Feedback: a fork also starts from what the previous token came to.

    originals   go through all blocks first, and see originals only, as if there were no forks
    forks       then start from x + e + W · LayerNorm(y) and go through the blocks from the fork layer on, where they
                see the originals of earlier tokens as these entered each block

x is the parent's state at the fork layer, e the learned embedding, and y the last state of the previous token's
original (token 0 has none).

So a fork reads, at its first block, what took the previous token all blocks. Nobody else sees forks, so all tokens are
computed in parallel, two passes deep, and nothing of the future is in y. When decoding, y is known from the step
before: then original and fork of a token go through the blocks together.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from thoughtbubbles.model.attention import AttentionPath
from thoughtbubbles.model.block import Residual
from thoughtbubbles.model.gradients import gather_with_inverse
from thoughtbubbles.model.layout import Beside, Layout
from thoughtbubbles.model.rope import Rotary
from thoughtbubbles.model.selection import pack
from thoughtbubbles.model.streams import Streams, is_original, take_or_zero

if TYPE_CHECKING:
    from thoughtbubbles.model.transformer import Thoughtbubbles


def originals_first(
    model: "Thoughtbubbles",
    layer: int,
    streams: Streams,
    layout: Layout,
    path: AttentionPath,
    path_of_forks: AttentionPath,
    *,
    n_tokens: int,
    n_forks: int,
) -> Streams:
    """The streams after the last block, given those after the fork layer before block `layer`.

    n_forks  at most, in a row
    """
    blocks = model.blocks[layer:]
    original = is_original(streams.token, n_tokens)
    # In a padded row there are fewer originals than columns: then the last columns belong to nothing.
    own, place_of_own = pack(original, n_tokens)
    state, alone = some_of(streams, own, place_of_own, n_tokens), layout_of(layout, own, place_of_own)
    entered = []  # each block
    for block in blocks:
        entered.append(state.x)
        state = model.apply_update(state, block(Residual(state.x), alone, path), alone)
    last = gather_with_inverse(state.x, place_of_own, own[..., None])
    if n_forks == 0:
        return Streams(last, streams.log_score, streams.token)

    fork, place_of_fork = pack(~original & (streams.token < n_tokens), n_forks)
    said = F.pad(model.forks[str(layer)].feed_back(state.x)[:, :-1], (0, 0, 1, 0))  # type: ignore[operator]
    said = gather_with_inverse(said, place_of_own, own[..., None])
    said = F.pad(said[:, 1:], (0, 0, 0, 1))  # a token has at most one fork, in the slot left of its original
    begun = Streams(streams.x + said.to(streams.x.dtype), streams.log_score, streams.token)
    forks, of_forks = some_of(begun, fork, place_of_fork, n_tokens), layout_of(layout, fork, place_of_fork)
    if layout.visible is not None:  # what originals see here is used by nothing, but it may be recorded
        layout = layout._replace(visible=layout.visible & (original[:, None] | ~original[..., None]))
    residual = Residual(forks.x)
    place = torch.where(place_of_fork < n_forks, place_of_fork, n_forks + place_of_own)
    if model.config.forks_see_forks_alone:
        for block in blocks:
            residual = block(residual, of_forks, path_of_forks)
        after = model.apply_update(forks, residual, of_forks)
        back = gather_with_inverse(after.x, place_of_fork, fork[..., None])
        return Streams(torch.where(original[..., None], last, back), streams.log_score, streams.token)
    for block, x in zip(blocks, entered, strict=True):
        beside = Beside(x, layout, place, torch.cat([fork, own], dim=1), fork, place_of_fork)
        residual = block(residual, of_forks, path_of_forks, beside)
    after = model.apply_update(forks, residual, of_forks)
    back = gather_with_inverse(after.x, place_of_fork, fork[..., None])
    return Streams(torch.where(original[..., None], last, back), streams.log_score, streams.token)


def some_of(streams: Streams, chosen: Int[Tensor, "B n"], place: Int[Tensor, "B S"], n_tokens: int) -> Streams:
    token = torch.where(chosen < streams.token.shape[1], take_or_zero(streams.token, chosen), n_tokens)
    x, log_score = (gather_with_inverse(each, chosen, place[..., None]) for each in (streams.x, streams.log_score))
    return Streams(x, log_score, token)


def layout_of(layout: Layout, chosen: Int[Tensor, "B F"], place: Int[Tensor, "B S"]) -> Layout:
    """Of some of the streams; without their reach."""

    def some(values: Tensor | None) -> Tensor | None:
        return None if values is None else gather_with_inverse(values, chosen, place[..., None])

    cos, sin = (take_or_zero(table[:, 0], chosen)[:, None] for table in layout.rotary)
    bias, value_gate, gate = map(some, (layout.key_bias, layout.value_gate, layout.gate))
    return Layout(Rotary(cos, sin), bias, value_gate, gate, layout.least_bias)
