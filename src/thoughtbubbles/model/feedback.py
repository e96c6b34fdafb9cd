"""Feedback: a fork also starts from what the previous token came to.

    originals   go through all blocks first, and see originals only, as if there were no forks
    forks       then start from x + e + W · LayerNorm(y) and go through the blocks from the fork layer on, where they
                see the keys and values that originals of earlier tokens had in each block, themselves, and forks of
                at most `fork_reach` tokens before

x is the parent's state at the fork layer, e the learned embedding, and y the last state of the previous token's
original (token 0 has none).

So a fork reads, at its first block, what took the previous token all blocks. Originals never see forks, so all tokens
are computed in parallel, two passes deep, and nothing of the future is in y. When decoding, y is known from the step
before: then original and fork of a token go through the blocks together.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.model.attention import AttentionPath
from thoughtbubbles.model.block import Block, Residual
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.gradients import gather_with_inverse
from thoughtbubbles.model.layout import Layout, Originals, Reach
from thoughtbubbles.model.rope import Rotary
from thoughtbubbles.model.selection import pack
from thoughtbubbles.model.streams import Streams, is_original, streams_up_to, take_or_zero

if TYPE_CHECKING:
    from thoughtbubbles.model.transformer import Thoughtbubbles


class Split(NamedTuple):
    """Which streams are originals and which are forks, and their places among their kind."""

    original: Bool[Tensor, "B S"]
    own: Int[Tensor, "B T"]  # the slot of each original; in a padded row the last columns belong to nothing
    place_of_own: Int[Tensor, "B S"]
    fork: Int[Tensor, "B F"]
    place_of_fork: Int[Tensor, "B S"]


Apart: TypeAlias = tuple[Streams, Layout, Split | None]


def take_apart(streams: Streams, layout: Layout, config: ModelConfig, *, n_tokens: int, n_forks: int) -> Apart:
    """The originals alone, and where they were. Without scores all tokens have a fork, left of it: no need to look."""
    if not config.scores:
        return Streams(*(each[:, 1::2].contiguous() for each in streams)), in_pairs(layout, 1), None
    original = is_original(streams.token, n_tokens)
    split = Split(original, *pack(original, n_tokens), *pack(~original & (streams.token < n_tokens), n_forks))
    chosen = split.own, split.place_of_own
    return some_of(streams, *chosen, n_tokens), layout_of(layout, *chosen), split


def begin_forks(
    layer: nn.Module,
    streams: Streams,
    layout: Layout,
    last: Float[Tensor, "B T D"],
    split: Split | None,
    config: ModelConfig,
) -> tuple[Streams, Layout]:
    """Forks with what they get of the previous token's last state."""
    n_tokens = last.shape[1]
    said = F.pad(layer.feed_back(last)[:, :-1], (0, 0, 1, 0)).to(streams.x.dtype)  # type: ignore[operator]
    up_to = streams_up_to(streams.token, n_tokens)
    if split is None:
        x, log_score, token = (each[:, ::2].contiguous() for each in streams)
        forks = Streams(x + said, log_score, token)
        of_forks, up_to = in_pairs(layout, 0), up_to // 2
    else:
        said = gather_with_inverse(said, split.place_of_own, split.own[..., None])
        said = F.pad(said[:, 1:], (0, 0, 0, 1))  # a token has at most one fork, in the slot left of its original
        begun = Streams(streams.x + said, streams.log_score, streams.token)
        forks = some_of(begun, split.fork, split.place_of_fork, n_tokens)
        of_forks = layout_of(layout, split.fork, split.place_of_fork)
        up_to = forks_up_to(up_to, split.original.sum(1, keepdim=True))
    assert config.fork_reach is not None
    return forks, Layout(*of_forks[:5], Reach(forks.token, up_to, config.fork_reach))


def join(
    streams: Streams,
    originals: Float[Tensor, "B T D"],
    forks: Float[Tensor, "B F D"] | None,
    split: Split | None,
) -> Streams:
    """All streams again, in their order."""
    if split is None:
        assert forks is not None
        return Streams(torch.stack([forks, originals], dim=2).flatten(1, 2), streams.log_score, streams.token)
    x = gather_with_inverse(originals, split.place_of_own, split.own[..., None])
    if forks is not None:
        back = gather_with_inverse(forks, split.place_of_fork, split.fork[..., None])
        x = torch.where(split.original[..., None], x, back)
    return Streams(x, streams.log_score, streams.token)


class Steps(NamedTuple):
    """What happens between the blocks; training replaces them by compiled ones."""

    take_apart: Callable[..., Apart] = take_apart
    begin_forks: Callable[..., tuple[Streams, Layout]] = begin_forks
    join: Callable[..., Streams] = join


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
    blocks, config, steps = model.blocks[layer:], model.config, model.feedback_steps
    state, alone, split = steps.take_apart(streams, layout, config, n_tokens=n_tokens, n_forks=n_forks)
    residual, kept = Residual(state.x), []
    for block in blocks:
        residual = block(residual, alone, path, keep=n_forks > 0)
        kept.append(residual.kept)
    last = model.apply_update(state, residual, alone).x
    if n_forks == 0:
        return steps.join(streams, last, None, split)

    forks, of_forks = steps.begin_forks(model.forks[str(layer)], streams, layout, last, split, config)
    if not cast(Block, blocks[0]).attention.takes_kernel(streams.x, path_of_forks):
        assert of_forks.reach is not None
        of_forks = of_forks._replace(visible=visible_to_forks(of_forks.reach))
    residual = Residual(forks.x)
    for block, of_originals in zip(blocks, kept, strict=True):
        residual = block(residual, of_forks, path_of_forks, Originals(of_originals, alone.key_bias))
    after = model.apply_update(forks, residual, of_forks)
    return steps.join(streams, last, after.x, split)


def forks_up_to(streams_up_to: Int[Tensor, "B T"], length: Int[Tensor, "B 1"]) -> Int[Tensor, "B T"]:
    """For each token, the forks of tokens up to it: its streams without the originals."""
    n_tokens = streams_up_to.shape[1]
    return streams_up_to - torch.arange(1, n_tokens + 1, device=length.device).minimum(length)


def visible_to_forks(reach: Reach) -> Bool[Tensor, "B F K"]:
    """What forks see: originals of earlier tokens, then forks, of which each sees itself and near ones before it."""
    token, n_tokens = reach.token, reach.up_to.shape[1]
    earlier = token[..., None] > torch.arange(n_tokens, device=token.device)
    slot = torch.arange(token.shape[1], device=token.device)
    near = (token[..., None] - token[:, None] <= reach.tokens) & (token < n_tokens)[..., None]
    return torch.cat([earlier, near & (slot[:, None] > slot) | (slot[:, None] == slot)], dim=2)


def among_all_streams(
    of_originals: Float[Tensor, "B N T T"], of_forks: Float[Tensor, "B N F K"], token: Int[Tensor, "B S"]
) -> Float[Tensor, "B N S S"]:
    """Attention weights of a block, recorded in two parts."""
    n_tokens, n_forks = of_originals.shape[-1], of_forks.shape[-2]
    original = is_original(token, n_tokens)
    _, place = pack(original, n_tokens)
    _, place_of_fork = pack(~original & (token < n_tokens), n_forks)
    rows = torch.cat([F.pad(of_originals, (0, n_forks)), of_forks], dim=2)
    place = torch.where(original, place, n_tokens + place_of_fork)
    rows = take_or_zero(rows.transpose(1, 2).flatten(2), place).unflatten(2, (rows.shape[1], -1))
    columns = take_or_zero(rows.permute(0, 3, 1, 2).flatten(2), place).unflatten(2, rows.shape[1:3])
    return columns.permute(0, 3, 2, 1)


def some_of(streams: Streams, chosen: Int[Tensor, "B n"], place: Int[Tensor, "B S"], n_tokens: int) -> Streams:
    token = torch.where(chosen < streams.token.shape[1], take_or_zero(streams.token, chosen), n_tokens)
    x, log_score = (gather_with_inverse(each, chosen, place[..., None]) for each in (streams.x, streams.log_score))
    return Streams(x, log_score, token)


def in_pairs(layout: Layout, place: int) -> Layout:
    """Of the forks (0) or originals (1), if each token has one of both. Such streams are not attenuated."""
    cos, sin = (table[:, :, place::2].contiguous() for table in layout.rotary)
    return Layout(Rotary(cos, sin))


def layout_of(layout: Layout, chosen: Int[Tensor, "B F"], place: Int[Tensor, "B S"]) -> Layout:
    """Of some of the streams; without their reach."""

    def some(values: Tensor | None) -> Tensor | None:
        return None if values is None else gather_with_inverse(values, chosen, place[..., None])

    cos, sin = (take_or_zero(table[:, 0], chosen)[:, None] for table in layout.rotary)
    bias, value_gate, gate = map(some, (layout.key_bias, layout.value_gate, layout.gate))
    return Layout(Rotary(cos, sin), bias, value_gate, gate, layout.least_bias)
