"""The cache of a model whose forks are visible to near tokens only (`ModelConfig.fork_reach`): forks fall out of it.

After a fork layer, a row of the cache has a ring for forks of the last tokens, then one slot per original:

    ring of 3    originals             reach 2, bubbles of two: when e is read, the forks of c and d can still be
    a' c' d' │ a b c d · · ·           seen, so they are held; e' will replace a', which nobody sees any more

The f-th fork of a row is in slot f mod R of the ring, which has room for the forks of one token more than the reach
has: a step never writes over what it reads itself. With a reach of 0 there is no ring, and the cache is as large as
that of a model without forks. The new streams of a step attend to each other directly: what nobody will see afterwards
is never stored.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles.model.attention import AttentionPath, gated
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.layout import Layout, attenuation
from thoughtbubbles.model.streams import at_least_float32, is_original, slots

NEVER = -(2**30)  # the token of a slot of the ring that holds nothing


def ring_size(config: ModelConfig, n_forks: int, *, max_bubble: int) -> int:
    """Forks that a row has room for, and never more than it can have."""
    reach = config.fork_reach
    return min(n_forks, (reach + 1) * (max_bubble - 1)) if reach else 0


def slots_of(
    token: Int[Tensor, "*n"],
    nth_fork: Int[Tensor, "*n"],
    is_fork: Bool[Tensor, "*n"],
    *,
    n_tokens: Int[Tensor, "*#n"],
    reach: int,
    ring: int,
    unread: int,
) -> Int[Tensor, "*n"]:
    """Where streams are stored, of a row that then has `n_tokens`; many forks go to the slot that is never read."""
    in_ring = slots_in_ring(token, nth_fork, is_fork, n_tokens=n_tokens, reach=reach, ring=ring, unread=unread)
    return torch.where(is_fork, in_ring, ring + token)


def slots_in_ring(
    token: Int[Tensor, "*n"],
    nth_fork: Int[Tensor, "*n"],
    is_fork: Bool[Tensor, "*n"],
    *,
    n_tokens: Int[Tensor, "*#n"],
    reach: int,
    ring: int,
    unread: int,
) -> Int[Tensor, "*n"]:
    """Where forks are stored: those of as many tokens as the ring has room for."""
    if not ring:
        return torch.full_like(nth_fork, unread)
    return torch.where(is_fork & (token >= n_tokens - reach - 1), nth_fork % ring, unread)


def slots_of_prompts(
    token: Int[Tensor, "B S"], lengths: Int[Tensor, "B"], *, n_tokens: int, reach: int, ring: int, unread: int
) -> Int[Tensor, "B S"]:
    """The same for whole rows that begin with token 0; unused slots are not stored."""
    is_fork, nth_fork = ~is_original(token, n_tokens), slots(token) - token
    kept = slots_of(
        token, nth_fork, is_fork, n_tokens=lengths[:, None], reach=reach, ring=ring, unread=unread
    )  # fmt: skip
    return torch.where(token < n_tokens, kept, unread)


class Group(NamedTuple):
    """Rows that attend in one call."""

    rows: Int[Tensor, "B"]  # of the cache
    block: slice | None  # the same rows, if they are next to each other
    streams: slice  # of the packed ones
    place: Int[Tensor, "M"]  # of each of them among B · W
    width: int  # W: the most new streams of a row
    held: int  # slots that are read: the ring, and as many originals as the longest row has
    mask: Float[Tensor, "B 1 W n"]  # added to the logits: of the slots, then of the new streams


def groups_of(
    config: ModelConfig,
    cached_token: Int[Tensor, "R slots"],
    cached_log_score: Float[Tensor, "R slots"],
    *,
    ring: int,
    rows: Int[Tensor, "B"],
    n_tokens: Int[Tensor, "B"],
    counts: Int[Tensor, "B"],
    place: Int[Tensor, "M"],
    number: Int[Tensor, "M"],
    is_fork: Bool[Tensor, "M"],
    log_score: Float[Tensor, "M"],
    together: bool,
) -> list[Group]:
    """How the new streams of each row attend: all rows together, or one by one.

    n_tokens  of each row, before this step
    counts    the number of new streams of each row
    place, number, is_fork, log_score
              of each new stream: its place among those of its row, its token in the row, and so on
    """
    assert config.fork_reach is not None
    parts = [range(len(rows))] if together else [range(i, i + 1) for i in range(len(rows))]
    ends, sizes, numbers = counts.cumsum(0).tolist(), counts.tolist(), rows.tolist()
    found = []
    for part in parts:
        streams = slice(ends[part[0]] - sizes[part[0]], ends[part[-1]])
        chosen = slice(part[0], part[-1] + 1)
        width, held = max(sizes[chosen]), ring + int(n_tokens[chosen].max())
        index = torch.arange(len(part), device=rows.device).repeat_interleave(counts[chosen]) * width + place[streams]
        spread = lambda values, fill: (  # noqa: E731
            values.new_full((len(part) * width,), fill).index_copy_(0, index, values[streams]).view(-1, width)  # noqa: B023
        )
        new_token, new_fork = spread(number, -1), spread(is_fork, False)
        here = cached_token[rows[chosen], :held].long()
        old = torch.arange(held, device=rows.device) - ring  # the originals' tokens
        is_near = new_token[..., None] - here[:, None, :] <= config.fork_reach
        is_old = (old >= 0) & (old < n_tokens[chosen, None])
        sees_old = torch.where(old < 0, is_near, is_old[:, None])
        own = torch.arange(width, device=rows.device)
        near = new_token[..., None] - new_token[:, None] <= config.fork_reach
        sees_new = (own[:, None] >= own) & (near | ~new_fork[:, None]) | (own[:, None] == own)
        if config.feedback:  # originals see no forks
            sees_old &= new_fork[..., None] | (old >= 0)
            sees_new &= new_fork[..., None] | ~new_fork[:, None]
        scores = torch.cat([cached_log_score[rows[chosen], :held], spread(log_score, 0)], dim=1)
        bias = attenuation(scores, config)[0]
        bias = scores.new_zeros(1, 1) if bias is None else bias
        mask = torch.where(torch.cat([sees_old, sees_new], dim=-1), bias[:, None], -math.inf)[:, None]
        first, last = numbers[part[0]], numbers[part[-1]]
        is_block = numbers[chosen] == list(range(first, last + 1))
        block = slice(first, last + 1) if is_block else None
        found.append(Group(rows[chosen], block, streams, index, width, held, mask))
    return found


def near_attention(
    key: Float[Tensor, "R N S H"],
    value: Float[Tensor, "R N S H"],
    where: tuple[Int[Tensor, "M"], Int[Tensor, "M"]],
    groups: Sequence[Group],
) -> AttentionPath:
    """Each row attends over its slots and its new streams; then what may be seen later is cached."""

    def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        row, slot = where
        new_keys, new_values = k[0].transpose(0, 1).to(key.dtype), gated(v, layout)[0].transpose(0, 1).to(value.dtype)
        with torch.autocast(q.device.type, enabled=False):
            q = at_least_float32(q)[0].transpose(0, 1)
            heads = torch.cat([_attend(q, new_keys, new_values, key, value, group) for group in groups])
        key[row, :, slot] = new_keys
        value[row, :, slot] = new_values
        return heads.transpose(0, 1)[None].to(v.dtype)

    return path


def _attend(
    q: Float[Tensor, "M N H"],
    new_keys: Float[Tensor, "M N H"],
    new_values: Float[Tensor, "M N H"],
    key: Float[Tensor, "R N S H"],
    value: Float[Tensor, "R N S H"],
    group: Group,
) -> Float[Tensor, "m N H"]:
    def spread(values: Tensor) -> Tensor:
        room = values.new_zeros(len(group.rows) * group.width, *values.shape[1:])
        room.index_copy_(0, group.place, values[group.streams])
        return room.unflatten(0, (-1, group.width)).transpose(1, 2)

    rows = group.block if group.block is not None else group.rows  # a slice copies nothing
    keys, values = (
        torch.cat([at_least_float32(cached[rows, :, : group.held]), at_least_float32(spread(new))], dim=2)
        for cached, new in ((key, new_keys), (value, new_values))
    )
    heads = F.scaled_dot_product_attention(spread(q), keys, values, attn_mask=group.mask)
    return heads.transpose(1, 2).flatten(0, 1)[group.place]
