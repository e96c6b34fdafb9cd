"""A decoding step whose shapes are all known in advance: what a CUDA graph needs (graph.py).

    ids → embedding → [fork: rank against the levels of all earlier candidates → gather] block … → merge → logits

The streams of a step, the bubble of one token per row, are a `Streams` of one token (token 0; unused slots have token
1), so all functions for bubbles apply. Every bubble has room for as many streams as it can have. No tensor value is
read by the host. Steps of other shapes are those of packed.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.generate.cache import Cache, Span
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.model import head
from thoughtbubbles.model.attention import AttentionPath, gated
from thoughtbubbles.model.block import Residual
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.layout import Layout, attenuating, attenuation, layout_at
from thoughtbubbles.model.selection import NextToken
from thoughtbubbles.model.streams import (
    Streams,
    accumulation_dtype,
    at_least_float32,
    find_bubbles,
    positions,
)
from thoughtbubbles.model.transformer import Thoughtbubbles


class NearForks(NamedTuple):
    """Forks that fall out of the cache (reach.py): of the new streams, the original is in slot `ring + used`."""

    ring: int
    before: Int[Tensor, "B"]  # forks that the row has had
    reach: int


class View(NamedTuple):
    """What the blocks of a span need in a step: the new streams, and the cached ones that they attend to."""

    layout: Layout
    place: Int[Tensor, "B W"]  # the slot of each new stream
    used: Int[Tensor, "B"]  # slots used before; a new stream attends to them, and to new streams up to itself
    added: Int[Tensor, "B"]  # new streams that are kept
    unread: int  # the slot that is never read
    key_bias: Float[Tensor, "B S"] | None
    near: NearForks | None = None  # if forks fall out of the cache
    sees_forks: bool = True  # the original; not with `feedback`


def embed_next(model: Thoughtbubbles, ids: Int[Tensor, "B"]) -> Streams:
    """One token per row: its original, or its copies."""
    x = model.embedding(ids)[:, None].repeat(1, model.config.copies, 1)
    token = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    return Streams(x, torch.zeros_like(token, dtype=accumulation_dtype(x.dtype)), token)


def enter(
    config: ModelConfig,
    fork: nn.Module | None,
    streams: Streams,
    cache: Cache,
    index: int,
    active: Bool[Tensor, "B"],
    width: int,
) -> tuple[Streams, View, Int[Tensor, "B"]]:
    """Enters span `index`, through its fork layer if it has one. Also returns how many streams the span then has.

    Caches log scores, tokens and levels of the new streams; each block then caches their keys and values.
    """
    span, n_tokens = cache.spans[index], cache.n_tokens
    if fork is not None:
        n_earlier = 2 * (n_tokens if index == 0 else cache.spans[index - 1].used)
        rule = None if span.level is None else NextToken(span.level, n_earlier, span.used, cache.next_cap(), width)
        added = 2 * (streams.token == 0).sum(1) * active
        streams, record = fork(streams, n_earlier, n_tokens=1, rule=rule)
        if span.level is not None:
            _append(span.level, n_earlier, added, record.level)  # of dropped candidates too
        if cache.last is not None:
            before = _at(cache.last, (n_tokens - 1).clamp(min=0))
            said = fork.feed_back(before.to(streams.x.dtype))  # type: ignore[operator]
            said = torch.where(record.is_fork[..., None] & (n_tokens > 0)[:, None, None], said[:, None], 0)
            streams = Streams(streams.x + said, streams.log_score, streams.token)
    n_streams, position = sizes_and_positions(streams, config)
    added = n_streams * active
    log_p = attenuating(streams.log_score, streams.token, config, n_tokens=1)
    own = torch.arange(streams.token.shape[1], device=active.device)
    unread, near = span.token.shape[1] - 1, None
    if span.kept is not None:
        used, original = n_tokens, n_streams[:, None] - 1
        near = NearForks(span.ring, span.used - n_tokens, span.reach)
        _append(span.kept, used, active.long(), (span.used + added)[:, None])
        place = torch.where((own == original) & active[:, None], near.ring + used[:, None], unread)
        if near.ring:
            is_fork = (own < original) & active[:, None]
            place = torch.where(is_fork, (near.before[:, None] + own) % near.ring, place)
        _put(span.token, place, n_tokens[:, None])
        if config.scores:
            _put(span.log_score, place, log_p)
    else:
        used = span.used
        if config.scores:  # else zeros for ever
            _append(span.log_score, used, added, log_p)
        _append(span.token, used, added, n_tokens[:, None].expand_as(streams.token))
        place = torch.where(own < added[:, None], used[:, None] + own, unread)
    position = position + n_tokens[:, None]
    key_bias = None if fork is None else attenuation(span.log_score, config)[0]
    layout = layout_at(position, None if fork is None else log_p, config)
    view = View(layout, place, used, added, unread, key_bias, near, not config.feedback)
    return streams, view, span.used + added


def sizes_and_positions(streams: Streams, config: ModelConfig) -> tuple[Int[Tensor, "B"], Float[Tensor, "B W"]]:
    """Of the bubbles of one token in each row, with positions relative to it."""
    (rows, width), dtype = streams.token.shape, streams.log_score.dtype
    if config.scores:
        return (streams.token == 0).sum(1), positions(streams.token, find_bubbles(streams.token, 1), dtype)
    # Every bubble is full: known without looking, so a compiled step has fewer kernels.
    from_the_right = torch.arange(width - 1, -1, -1, device=streams.token.device).to(dtype)
    return streams.token.new_full((rows,), width), (-from_the_right / width).expand(rows, width)


def _at(storage: Float[Tensor, "B T D"], token: Int[Tensor, "B"]) -> Float[Tensor, "B D"]:
    return storage.gather(1, token[:, None, None].expand(-1, 1, storage.shape[2]))[:, 0]


def finish(
    model: Thoughtbubbles, cache: Cache, streams: Streams, active: Bool[Tensor, "B"]
) -> tuple[Float[Tensor, "B V"], Int[Tensor, "B"]]:
    """The next token's logits, and the streams that predict it. With `feedback`, keeps the last state of originals."""
    n_streams = (streams.token == 0).sum(1)
    if cache.last is not None:
        slot = torch.where(active, cache.n_tokens, cache.last.shape[1] - 1)  # the last is never read
        _put(cache.last, slot[:, None], _at(streams.x, n_streams - 1)[:, None])
    return head.logits(model.rows_to_decode(streams, 1), model.embedding.weight)[:, 0], n_streams


def _put(storage: Tensor, slot: Int[Tensor, "B n"], values: Tensor) -> None:
    """Writes each row's values into its slots. In place when compiled too, which a scatter would not be."""
    row = torch.arange(slot.shape[0], device=slot.device)[:, None]
    storage[row, slot] = values.to(storage.dtype).expand(*slot.shape, *storage.shape[2:])


def _append(storage: Tensor, begin: Int[Tensor, "B"], n: Int[Tensor, "B"], values: Tensor) -> None:
    """Writes the first n values of each row into its slots from `begin` on."""
    index = torch.arange(storage.shape[1], device=storage.device) - begin[:, None]
    inside = (index >= 0) & (index < n[:, None])
    new = values.to(storage.dtype).gather(1, index.clamp(0, values.shape[1] - 1))
    storage.copy_(torch.where(inside, new, storage))


def run_blocks(
    blocks: Sequence[nn.Module], x: Float[Tensor, "B W D"], span: Span, view: View
) -> Float[Tensor, "B W D"]:
    """Runs the blocks of a span, over all of its slots."""
    slot, own = (torch.arange(n, device=x.device) for n in (span.token.shape[1], x.shape[1]))
    before, causal = view.used[:, None, None, None], own <= own[:, None]
    bias = torch.zeros_like(span.log_score) if view.key_bias is None else view.key_bias
    if not view.sees_forks:
        last = view.added[:, None, None, None] - 1  # the original
        causal = causal & ((own[:, None] != last) | (own == own[:, None]))
    if view.near is not None:  # slots before, then the new streams
        visible = (slot >= view.near.ring) & (slot < view.near.ring + before)
        held = view.used[:, None] - span.token  # how many tokens ago; new forks are in the ring already
        is_near = (slot < view.near.ring) & (held > 0) & (held <= view.near.reach)
        visible = visible | is_near[:, None, None]
        if not view.sees_forks:
            visible = visible & ((own[:, None] != last) | (slot >= view.near.ring))
        mask = torch.where(visible, bias[:, None, None], -math.inf).expand(-1, -1, len(own), -1)
        new = bias.new_zeros(len(x), len(own)) if view.layout.key_bias is None else view.layout.key_bias
        mask = torch.cat([mask, torch.where(causal, new[:, None, None], -math.inf)], dim=-1)
    else:
        mask = torch.where(slot <= before + own[:, None], bias[:, None, None], -math.inf)
    residual = Residual(x)
    for block, key, value in zip(blocks, span.key, span.value, strict=True):
        residual = block(residual, view.layout, cached_attention(key, value, view, mask))
    return residual.total(view.layout.gate)


def cached_attention(
    key: Float[Tensor, "B N S H"], value: Float[Tensor, "B N S H"], view: View, mask: Float[Tensor, "B 1 W n"]
) -> AttentionPath:
    """Caches the new streams' keys and values, then attends over all slots; `mask` is added to the logits.

    If forks fall out of the cache, also over the new streams themselves.
    """

    def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        index, k, v = view.place[:, None, :, None].expand_as(k), k.to(key.dtype), gated(v, layout).to(value.dtype)
        key.scatter_(2, index, k)
        value.scatter_(2, index, v)
        with torch.autocast(q.device.type, enabled=False):
            keys = key if view.near is None else torch.cat([key, k], dim=2)
            values = value if view.near is None else torch.cat([value, v], dim=2)
            keys, values = at_least_float32(keys), at_least_float32(values)
            return F.scaled_dot_product_attention(at_least_float32(q), keys, values, attn_mask=mask).to(q.dtype)

    return path


class Parts(NamedTuple):
    """The parts of a step, which faster ones can replace."""

    enter: Callable[..., tuple[Streams, View, Tensor]] = enter
    blocks: Callable[[Sequence[nn.Module], Tensor, Span, View], Tensor] = run_blocks
    finish: Callable[[Thoughtbubbles, Cache, Streams, Tensor], tuple[Tensor, Tensor]] = finish


PLAIN = Parts()


@torch.no_grad()
def advance(
    model: Thoughtbubbles,
    cache: Cache,
    ids: Int[Tensor, "B"],
    active: Bool[Tensor, "B"],
    *,
    widths: Sequence[int],
    parts: Parts = PLAIN,
) -> tuple[Prediction, Cache]:
    """One more token of each active row. `widths`: of the bubbles in each span, at most."""
    streams, spans = embed_next(model, ids), []
    for index, (start, span) in enumerate(zip(sorted({0, *model.config.fork_layers}), cache.spans, strict=True)):
        fork = model.forks[str(start)] if start in model.config.fork_layers else None
        streams, view, used = parts.enter(model.config, fork, streams, cache, index, active, widths[index])
        blocks = list(model.blocks)[start : start + span.key.shape[0]]
        x = parts.blocks(blocks, streams.x, span, view)
        streams = Streams(x, streams.log_score, streams.token)
        spans.append(span._replace(used=used))
    logits, n_streams = parts.finish(model, cache, streams, active)
    return Prediction(logits, n_streams), cache._replace(spans=tuple(spans), n_tokens=cache.n_tokens + active)
