"""Decoding: `prefill` reads a prompt in parallel, `decode_step` reads one more token with the KV cache.

    ids → embedding → [fork: rank against the levels of all earlier candidates → gather] block … → merge → logits

Both run the model's own blocks, fork layers and head, with another attention path: in `prefill` one that also caches
keys and values, in a step one that attends over the cached ones. The streams of a step, the bubble of one token per
row, are a `Streams` of one token (token 0; unused slots have token 1), so all functions for bubbles apply.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.generate.cache import Cache, Span, budget_of_rows, new_cache
from thoughtbubbles.model import head, inputs
from thoughtbubbles.model.attention import PATHS, AttentionPath, gated
from thoughtbubbles.model.block import Residual
from thoughtbubbles.model.budget import Budget, BudgetLike, brief
from thoughtbubbles.model.config import ModelConfig, is_whole
from thoughtbubbles.model.layout import Layout, attenuation, layout_at
from thoughtbubbles.model.selection import NextToken
from thoughtbubbles.model.streams import (
    Streams,
    accumulation_dtype,
    at_least_float32,
    find_bubbles,
    positions,
    take,
)
from thoughtbubbles.model.transformer import Thoughtbubbles


class Likeliest(NamedTuple):
    id: Int[Tensor, "B"]
    log_prob: Float[Tensor, "B"]


class Prediction(NamedTuple):
    """The prediction of each row's next token."""

    logits: Float[Tensor, "B V"]  # with merge="mixture": its log-probabilities
    streams: Int[Tensor, "B"]  # the size of the bubble that predicts it
    likeliest: Likeliest | None = None  # the likeliest token, if the step has looked for it

    def at(self, rows: Int[Tensor, "n"]) -> "Prediction":
        likeliest = None if self.likeliest is None else Likeliest(*(part[rows] for part in self.likeliest))
        return Prediction(self.logits[rows], self.streams[rows], likeliest)


@torch.no_grad()
def predict_uncached(
    model: Thoughtbubbles,
    ids: Int[Tensor, "B T"],
    *,
    lengths: Int[Tensor, "B"] | Sequence[int] | None = None,
    budget: BudgetLike | Budget | None = None,
    selection: str | None = None,
    budget_mode: str | None = None,
) -> Prediction:
    """Reads every row from its beginning, without a cache: exact for every rule, also one that revises decisions."""
    options = {"lengths": lengths, "budget": budget, "selection": selection, "budget_mode": budget_mode}
    out = model(ids, want=("next_logits",), **options)
    last = torch.full((ids.shape[0],), ids.shape[1]) if lengths is None else torch.as_tensor(lengths)
    return Prediction(out.next_logits, (out.streams.token == last.to(ids.device)[:, None] - 1).sum(1))


def prefill(
    model: Thoughtbubbles,
    ids: Int[Tensor, "B T"],
    *,
    lengths: Int[Tensor, "B"] | Sequence[int] | None = None,
    budget: BudgetLike | Budget | None = None,
    capacity: int | None = None,
    into: Cache | None = None,
) -> tuple[Prediction, Cache]:
    """Reads prompts in parallel, under the causal rule. Returns their prediction, and the cache to continue from.

    lengths   real tokens per row, if rows are padded on the right
    budget    streams per token, overrides the config: one number, or one per row
    capacity  the most tokens in a row, by default the context length (`block_size`); `Cache.grown` can raise it
    into      a cache whose storage is reused; its contents are lost
    """
    given = inputs.check(
        model.config,
        ids,
        targets=None,
        lengths=lengths,
        budget=budget,
        selection="causal",
        budget_mode="proportional",
        want=(),
        trace=False,
        training=False,
    )
    if into is not None:
        _check_cache("into", into, model)
    capacity = into.capacity if into is not None else model.config.block_size if capacity is None else capacity
    if not is_whole(capacity) or not ids.shape[1] <= capacity <= model.config.block_size:
        raise ValueError(
            f"capacity = {brief(capacity)}: give a number from {ids.shape[1]}, the tokens of the prompts, "
            f"to block_size = {model.config.block_size}"
        )
    rows, weight, budgets = ids.shape[0], model.embedding.weight, given.rule.budget
    if into is None:
        kind = ids.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        into = new_cache(model.config, rows=rows, capacity=capacity, budget=budgets, dtype=dtype, device=weight.device)
    elif into.rows != rows or not into.has_room_for(model.config, budgets):
        raise ValueError(
            f"into is a cache of {into.rows} rows: give one of {rows}, made for these budgets or larger ones"
        )
    numerator, denominator = budget_of_rows(budgets, rows, device=weight.device)
    return _fill(model, given, into._replace(numerator=numerator, denominator=denominator))


@torch.no_grad()
def _fill(model: Thoughtbubbles, given: inputs.Inputs, cache: Cache) -> tuple[Prediction, Cache]:
    n_tokens = given.ids.shape[1]
    storage = iter([(span.key[i], span.value[i]) for span in cache.spans for i in range(span.key.shape[0])])

    def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        key, value = next(storage)
        key[:, :, : k.shape[2]] = k
        value[:, :, : v.shape[2]] = gated(v, layout)
        return PATHS[model.attention](q, k, v, layout)

    streams, forks = model.run_layers(given, path)
    spans = []
    records = dict(zip(model.config.fork_layers, forks, strict=True))
    for start, span in zip(sorted({0, *model.config.fork_layers}), cache.spans, strict=True):
        if start not in records:
            token = model.embed(given).token
        else:
            record, token = records[start], records[start].token
            log_score = take(record.log_score, (2 * record.parent + ~record.is_fork).clamp(min=0))
            span.log_score[:, : token.shape[1]] = log_score
            assert span.level is not None
            span.level[:, : record.level.shape[1]] = record.level
        span.token[:, : token.shape[1]] = token
        spans.append(span._replace(used=(token < n_tokens).sum(1)))
    prediction = Prediction(
        model.next_logits(streams, given.lengths, n_tokens), (streams.token == given.lengths[:, None] - 1).sum(1)
    )
    return prediction, cache._replace(spans=tuple(spans), n_tokens=given.lengths.clone())


def decode_step(
    model: Thoughtbubbles, cache: Cache, ids: Int[Tensor, "B"], *, active: Bool[Tensor, "B"] | None = None
) -> tuple[Prediction, Cache]:
    """Reads one more token per row. Rows that are not `active` stay unchanged, and their prediction is meaningless."""
    _check_cache("cache", cache, model)
    if not isinstance(ids, Tensor):
        raise ValueError(f"ids is a {type(ids).__name__}: give a tensor of one id for each of {cache.rows} rows")
    if cache.rows == 0 or ids.shape != (cache.rows,) or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids of shape {tuple(ids.shape)} and {ids.dtype}: give one id for each of {cache.rows} rows")
    active = torch.ones_like(ids, dtype=torch.bool) if active is None else active
    if not isinstance(active, Tensor) or active.shape != ids.shape or active.dtype != torch.bool:
        raise ValueError(f"active = {brief(active)}: give a tensor with True or False for each of {cache.rows} rows")
    if not ids.device == active.device == cache.n_tokens.device:
        raise ValueError(f"ids are on {ids.device}, active on {active.device}: the cache is on {cache.n_tokens.device}")
    check_next(model, cache, ids[:, None], active[:, None])
    return advance(model, cache, torch.where(active, ids, 0), active)


def check_next(model: Thoughtbubbles, cache: Cache, ids: Int[Tensor, "B n"], real: Bool[Tensor, "B n"]) -> None:
    """The next tokens of each row, those that are real: are they ids, and does the cache have room for them?"""
    wrong = real & ((ids < 0) | (ids >= model.config.vocab_size))
    if bool(wrong.any()):
        raise ValueError(
            f"ids has {int(ids[wrong][0])}: the vocabulary has ids from 0 to {model.config.vocab_size - 1}"
        )
    if bool((cache.n_tokens + real.sum(1) > cache.capacity).any()):
        raise ValueError(
            f"the cache is full: its rows hold {cache.capacity} tokens (block_size = {model.config.block_size}); "
            "positions past block_size were never trained, so there is no sliding window: stop, or start a new row"
        )


def _check_cache(name: str, cache: Cache, model: Thoughtbubbles) -> None:
    if not isinstance(cache, Cache):
        raise ValueError(f"{name} is a {type(cache).__name__}: give the Cache that prefill or a step returned")
    if not cache.fits(model.config, model.embedding.weight):
        raise ValueError(
            f"{name} is not a cache of this model (other layers, heads, fork layers, dtype or device): "
            "give the one that its own prefill returned"
        )


class View(NamedTuple):
    """What the blocks of a span need in a step: the new streams, and the cached ones that they attend to."""

    layout: Layout
    place: Int[Tensor, "B W"]  # the slot of each new stream
    used: Int[Tensor, "B"]  # streams cached before; new stream i attends to the slots up to used + i
    added: Int[Tensor, "B"]  # new streams that are kept
    unread: int  # the slot that is never read
    key_bias: Float[Tensor, "B S"] | None


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
    width: int | None,
) -> tuple[Streams, View, Int[Tensor, "B"]]:
    """Enters span `index`, through its fork layer if it has one. Also returns how many streams the span then has.

    Caches log scores, tokens and levels of the new streams; each block then caches their keys and values.
    """
    span, n_tokens = cache.spans[index], cache.n_tokens
    if fork is not None:
        assert span.level is not None
        n_earlier = 2 * (n_tokens if index == 0 else cache.spans[index - 1].used)
        most = 2 * streams.token.shape[1]
        rule = NextToken(span.level, n_earlier, span.used, cache.next_cap(), most if width is None else width)
        added = 2 * (streams.token == 0).sum(1) * active
        streams, record = fork(streams, n_earlier, n_tokens=1, rule=rule)
        _append(span.level, n_earlier, added, record.level)  # of dropped candidates too
        streams = _trimmed(streams) if width is None else streams
    added = (streams.token == 0).sum(1) * active
    _append(span.log_score, span.used, added, streams.log_score)
    _append(span.token, span.used, added, n_tokens[:, None].expand_as(streams.token))
    own = torch.arange(streams.token.shape[1], device=active.device)
    position = positions(streams.token, find_bubbles(streams.token, 1), streams.log_score.dtype) + n_tokens[:, None]
    view = View(
        layout=layout_at(position, None if fork is None else streams.log_score, config),
        place=torch.where(own < added[:, None], span.used[:, None] + own, span.token.shape[1] - 1),
        used=span.used,
        added=added,
        unread=span.token.shape[1] - 1,
        key_bias=None if fork is None else attenuation(span.log_score, config)[0],
    )
    return streams, view, span.used + added


def _append(storage: Tensor, begin: Int[Tensor, "B"], n: Int[Tensor, "B"], values: Tensor) -> None:
    """Writes the first n values of each row into its slots from `begin` on."""
    index = torch.arange(storage.shape[1], device=storage.device) - begin[:, None]
    inside = (index >= 0) & (index < n[:, None])
    new = values.to(storage.dtype).gather(1, index.clamp(0, values.shape[1] - 1))
    storage.copy_(torch.where(inside, new, storage))


def run_blocks(
    blocks: Sequence[nn.Module], x: Float[Tensor, "B W D"], span: Span, view: View, seen: int
) -> Float[Tensor, "B W D"]:
    """Runs the blocks of a span over its first `seen` slots."""
    slot, own = (torch.arange(n, device=x.device) for n in (seen, x.shape[1]))
    visible = slot <= view.used[:, None, None, None] + own[:, None]
    bias = torch.zeros_like(span.log_score) if view.key_bias is None else view.key_bias
    mask = torch.where(visible, bias[:, None, None, :seen], -math.inf)
    residual = Residual(x)
    for block, key, value in zip(blocks, span.key, span.value, strict=True):
        residual = block(residual, view.layout, cached_attention(key, value, view.place, mask))
    return residual.total(view.layout.gate)


def cached_attention(
    key: Float[Tensor, "B N S H"],
    value: Float[Tensor, "B N S H"],
    place: Int[Tensor, "B W"],
    mask: Float[Tensor, "B 1 W n"],
) -> AttentionPath:
    """Caches the new streams' keys and values, then attends over the first n slots; `mask` is added to the logits."""

    def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        index = place[:, None, :, None].expand_as(k)
        key.scatter_(2, index, k.to(key.dtype))
        value.scatter_(2, index, gated(v, layout).to(value.dtype))
        with torch.autocast(q.device.type, enabled=False):
            keys, values = (at_least_float32(kept[:, :, : mask.shape[-1]]) for kept in (key, value))
            return F.scaled_dot_product_attention(at_least_float32(q), keys, values, attn_mask=mask).to(v.dtype)

    return path


def next_logits(model: Thoughtbubbles, streams: Streams) -> Float[Tensor, "B V"]:
    return head.logits(model.rows_to_decode(streams, 1), model.embedding.weight)[:, 0]


class Parts(NamedTuple):
    """The parts of a step, which faster ones can replace."""

    enter: Callable[..., tuple[Streams, View, Tensor]] = enter
    blocks: Callable[[Sequence[nn.Module], Tensor, Span, View, int], Tensor] = run_blocks
    logits: Callable[[Thoughtbubbles, Streams], Tensor] = next_logits


PLAIN = Parts()


@torch.no_grad()
def advance(
    model: Thoughtbubbles,
    cache: Cache,
    ids: Int[Tensor, "B"],
    active: Bool[Tensor, "B"],
    *,
    widths: Sequence[int] | None = None,
    parts: Parts = PLAIN,
) -> tuple[Prediction, Cache]:
    """`decode_step` after input validation. The largest bubble of the batch sets a step's width.

    With `widths`, one per span, no tensor value is read: every shape is known in advance.
    """
    streams, spans = embed_next(model, ids), []
    for index, (start, span) in enumerate(zip(sorted({0, *model.config.fork_layers}), cache.spans, strict=True)):
        fork = None if span.level is None else model.forks[str(start)]
        width = None if widths is None else widths[index]
        streams, view, used = parts.enter(model.config, fork, streams, cache, index, active, width)
        seen = span.token.shape[1] if widths else min(span.token.shape[1], int(used.max()))
        blocks = list(model.blocks)[start : start + span.key.shape[0]]
        x = parts.blocks(blocks, streams.x, span, view, seen)
        streams = Streams(x, streams.log_score, streams.token)
        spans.append(Span(span.key, span.value, span.log_score, span.token, used, span.level))
    after = Cache(tuple(spans), cache.n_tokens + active, cache.numerator, cache.denominator, cache.capacity)
    return Prediction(parts.logits(model, streams), (streams.token == 0).sum(1)), after


def _trimmed(streams: Streams) -> Streams:
    """Cuts off the slots beyond the largest bubble of the batch."""
    width = int((streams.token == 0).sum(1).max())
    return Streams(streams.x[:, :width], streams.log_score[:, :width], streams.token[:, :width])
