"""Decoding: `prefill` reads a prompt in parallel, `decode_step` reads one more token with the KV cache.

Both run the model's own blocks, fork layers and head, with another attention path: in `prefill` one that also caches
keys and values, in a step one that attends over the cached ones (packed.py).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from thoughtbubbles.generate.cache import Cache, Span, budget_of_rows, new_cache
from thoughtbubbles.generate.packed import Batch, read
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.generate.reach import NEVER, slots_in_ring, slots_of_prompts
from thoughtbubbles.model import inputs
from thoughtbubbles.model.attention import PATHS, gated
from thoughtbubbles.model.budget import Budget, BudgetLike, brief
from thoughtbubbles.model.config import is_whole
from thoughtbubbles.model.layout import Layout, attenuating
from thoughtbubbles.model.streams import originals, slots, streams_up_to, take
from thoughtbubbles.model.transformer import Thoughtbubbles


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
    n_tokens, row = given.ids.shape[1], torch.arange(cache.rows, device=given.ids.device)[:, None]
    storage = iter([(span, i) for span in cache.spans for i in range(span.key.shape[0])])

    def slots_of(span: Span, token: Tensor) -> Tensor:
        if span.kept is None:
            return torch.arange(token.shape[1], device=token.device).expand_as(token)
        assert model.config.fork_reach is not None
        return slots_of_prompts(
            token,
            given.lengths,
            n_tokens=n_tokens,
            reach=model.config.fork_reach,
            ring=span.ring,
            unread=span.token.shape[1] - 1,
        )

    def store(span: Span, i: int, slot: Tensor, k: Tensor, v: Tensor) -> None:
        span.key[i][row, :, slot] = k.transpose(1, 2).to(span.key.dtype)
        span.value[i][row, :, slot] = v.transpose(1, 2).to(span.value.dtype)

    def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        span, i = next(storage)
        if layout.reach is None:
            first = span.ring  # with `feedback`, originals are alone
            span.key[i, :, :, first : first + k.shape[2]] = k
            span.value[i, :, :, first : first + v.shape[2]] = gated(v, layout)
        else:
            store(span, i, slots_of(span, layout.reach.token), k, gated(v, layout))
        return PATHS[model.attention](q, k, v, layout)

    last = cache.spans[-1]
    blocks_of_forks = iter(range(last.key.shape[0]))

    def path_of_forks(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """With `feedback`: keys and values of originals, then those of the forks, whose values are gated already."""
        assert layout.reach is not None
        token, unread = layout.reach.token, last.token.shape[1] - 1
        slot = slots_in_ring(
            token,
            slots(token).expand_as(token),
            token < n_tokens,
            n_tokens=given.lengths[:, None],
            reach=last.reach,
            ring=last.ring,
            unread=unread,
        )
        store(last, next(blocks_of_forks), slot, *(each[:, :, -token.shape[1] :] for each in (k, v)))
        return PATHS[model.attention](q, k, v, layout)

    streams, forks = model.run_layers(given, path, path_of_forks if last.ring else PATHS[model.attention])
    if cache.last is not None:
        cache.last[:, :n_tokens] = take(streams.x, originals(streams.token, n_tokens))
    spans = []
    records = dict(zip(model.config.fork_layers, forks, strict=True))
    for start, span in zip(sorted({0, *model.config.fork_layers}), cache.spans, strict=True):
        token = records[start].token if start in records else model.embed(given).token
        slot = slots_of(span, token)
        if start in records:
            record = records[start]
            log_score = take(record.log_score, (2 * record.parent + ~record.is_fork).clamp(min=0))
            log_p = attenuating(log_score, token, model.config, n_tokens=n_tokens)
            span.log_score[row, slot] = log_p.to(span.log_score.dtype)
            if span.level is not None:
                span.level[:, : record.level.shape[1]] = record.level
        if span.kept is not None:
            span.token[:, : span.ring] = NEVER
            span.kept[:, :n_tokens] = streams_up_to(token, n_tokens)
        span.token[row, slot] = token.to(span.token.dtype)
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
    after = cache.with_own_counts()
    rows = active.nonzero()[:, 0]
    if not len(rows):
        return Prediction(
            ids.new_zeros(len(ids), model.config.vocab_size, dtype=torch.float32), torch.zeros_like(ids)
        ), after
    batch = Batch.of(rows.tolist(), [1] * len(rows), device=ids.device)
    prediction = read(model, after, ids[rows].long(), batch)
    if len(rows) < cache.rows:
        logits = prediction.logits.new_zeros(cache.rows, model.config.vocab_size)
        streams = prediction.streams.new_zeros(cache.rows)
        prediction = Prediction(
            logits.index_copy(0, rows, prediction.logits), streams.index_copy(0, rows, prediction.streams)
        )
    return prediction, after


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
