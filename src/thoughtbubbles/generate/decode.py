"""Reading token by token: `prefill` takes a prompt in parallel, `decode_step` one more token through the cache.

    ids → embedding → [fork: rank against the levels of all earlier candidates → gather] block … → merge → logits

Both run the model's own blocks, fork layers and head. A block is given another attention path: in `prefill` one that
also keeps keys and values, in a step one that attends over the kept ones. A step's streams, the bubble of one token in
each row, are a `Streams` of one token (token 0; unused slots are token 1), so all that is known of bubbles holds there.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.generate.cache import Cache, Span, new_cache
from thoughtbubbles.model import head, inputs
from thoughtbubbles.model.attention import PATHS, AttentionPath, Attenuation, attenuated, attenuation
from thoughtbubbles.model.budget import Budget, BudgetLike
from thoughtbubbles.model.rope import Rotation, rotation
from thoughtbubbles.model.selection import NextToken
from thoughtbubbles.model.streams import Streams, find_bubbles, positions, take, wide, wide_dtype
from thoughtbubbles.model.transformer import Thoughtbubbles


class Prediction(NamedTuple):
    """Of the next token of each row."""

    logits: Float[Tensor, "B V"]  # for a mixture of streams: its log-probabilities
    streams: Int[Tensor, "B"]  # the size of the bubble that predicts


@torch.no_grad()
def recompute(
    model: Thoughtbubbles,
    ids: Int[Tensor, "B T"],
    *,
    lengths: Int[Tensor, "B"] | Sequence[int] | None = None,
    budget: BudgetLike | Budget | None = None,
    selection: str | None = None,
    budget_mode: str | None = None,
) -> Prediction:
    """Reads all of every row anew: no cache, and exact for every rule, also for one that revises its decisions."""
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
) -> tuple[Prediction, Cache]:
    """Reads prompts in parallel, under the causal rule; what they predict, and the cache to go on from.

    lengths   real tokens of each row, if rows are padded on the right
    budget    streams per token in place of the config's: a number, or one for each row
    capacity  tokens that a row can ever hold, the model's block size by default
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
    capacity = model.config.block_size if capacity is None else capacity
    if not ids.shape[1] <= capacity <= model.config.block_size:
        raise ValueError(
            f"capacity = {capacity}: give from {ids.shape[1]}, the tokens of the prompts, "
            f"to block_size = {model.config.block_size}"
        )
    weight = model.embedding.weight
    cache = new_cache(
        model.config,
        rows=ids.shape[0],
        capacity=capacity,
        budget=given.rule.budget,
        dtype=torch.get_autocast_dtype(ids.device.type) if torch.is_autocast_enabled(ids.device.type) else weight.dtype,
        device=weight.device,
    )
    return _fill(model, given, cache)


@torch.no_grad()
def _fill(model: Thoughtbubbles, given: inputs.Inputs, cache: Cache) -> tuple[Prediction, Cache]:
    n_tokens = given.ids.shape[1]
    storage = iter([(span.key[i], span.value[i]) for span in cache.spans for i in range(span.key.shape[0])])

    def path(q: Tensor, k: Tensor, v: Tensor, by: Attenuation) -> tuple[Tensor, Tensor | None]:
        key, value = next(storage)
        key[:, :, : k.shape[2]] = k
        value[:, :, : v.shape[2]] = attenuated(v, by)
        return PATHS[model.attention](q, k, v, by)

    streams, forks, _ = model.run_layers(given, path)
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
    """Reads one more token of each row; rows that are not `active` are left as they are, and predict nonsense."""
    if ids.shape != (cache.rows,) or ids.is_floating_point():
        raise ValueError(f"ids of shape {tuple(ids.shape)} and {ids.dtype}: give one id for each of {cache.rows} rows")
    active = torch.ones_like(ids, dtype=torch.bool) if active is None else active
    wrong = active & ((ids < 0) | (ids >= model.config.vocab_size))
    if bool(wrong.any()):
        raise ValueError(
            f"ids has {int(ids[wrong][0])}: the vocabulary has ids from 0 to {model.config.vocab_size - 1}"
        )
    if bool((active & (cache.n_tokens >= cache.capacity)).any()):
        raise ValueError(
            f"the cache is full: its rows hold {cache.capacity} tokens (block_size = {model.config.block_size}); "
            "positions past the block were never trained, so a row cannot slide on: stop, or begin a new one"
        )
    return advance(model, cache, torch.where(active, ids, 0), active)


RunBlock = Callable[[nn.Module, Tensor, Rotation, Attenuation, Tensor, Tensor, Tensor, Tensor], Tensor]


def run_block(
    block: nn.Module,
    x: Float[Tensor, "B W D"],
    turn: Rotation,
    by: Attenuation,
    key: Float[Tensor, "B N S H"],
    value: Float[Tensor, "B N S H"],
    place: Int[Tensor, "B W"],
    bias: Float[Tensor, "B 1 W n"],
) -> Float[Tensor, "B W D"]:
    x, _ = block(x, turn, by, cached_attention(key, value, place, bias))
    return x


@torch.no_grad()
def advance(
    model: Thoughtbubbles,
    cache: Cache,
    ids: Int[Tensor, "B"],
    active: Bool[Tensor, "B"],
    *,
    widths: Sequence[int] | None = None,
    run_block: RunBlock = run_block,
) -> tuple[Prediction, Cache]:
    """`decode_step` behind the door. The widest bubble of the batch sets a step's width, in powers of two.

    With `widths`, one for each span, no value is looked at: every shape is known beforehand, and all storage is read.
    """
    streams = embed_next(model, ids)
    earlier = cache.n_tokens  # how many streams the tokens before have in front of the next fork layer
    spans, starts = [], sorted({0, *model.config.fork_layers})
    for index, (start, span) in enumerate(zip(starts, cache.spans, strict=True)):
        by, width = Attenuation(), None if widths is None else widths[index]
        if span.level is not None:
            rule = NextToken(span.level, 2 * earlier, span.used, cache.next_cap(), width or 2 * streams.token.shape[1])
            streams = fork_next(model.forks[str(start)], streams, rule, active, layer=start)
            streams = _trimmed(streams) if widths is None else streams
            by = attenuation(streams.log_score, model.config)
        place = _places(span.used, streams.token == 0, active, nowhere=span.token.shape[1] - 1)
        span.log_score.scatter_(1, place, streams.log_score)
        span.token.scatter_(1, place, cache.n_tokens[:, None].expand_as(place).to(span.token.dtype))
        seen = span.token.shape[1]
        if widths is None:
            seen = min(seen, int(span.used.max()) + place.shape[1])
        bias = visible_bias(model, span, streams.token.shape[1], seen)
        position = positions(streams.token, find_bubbles(streams.token, 1), streams.log_score.dtype)
        turn = rotation(position + cache.n_tokens[:, None], model.config.head_size)
        x = streams.x
        for i in range(span.key.shape[0]):
            x = run_block(model.blocks[start + i], x, turn, by, span.key[i], span.value[i], place, bias)
        streams = Streams(x, streams.log_score, streams.token)
        added = (streams.token == 0).sum(1) * active
        spans.append(Span(span.key, span.value, span.log_score, span.token, span.used + added, span.level))
        earlier = span.used
    after = Cache(tuple(spans), cache.n_tokens + active, cache.numerator, cache.denominator, cache.capacity)
    logits = head.logits(model.rows_to_decode(streams, 1), model.embedding.weight)[:, 0]
    return Prediction(logits, (streams.token == 0).sum(1)), after


def embed_next(model: Thoughtbubbles, ids: Int[Tensor, "B"]) -> Streams:
    """One token a row: its original, or its copies."""
    x = model.embedding(ids)[:, None].repeat(1, model.config.copies, 1)
    token = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    return Streams(x, torch.zeros_like(token, dtype=wide_dtype(x.dtype)), token)


def fork_next(fork: nn.Module, streams: Streams, rule: NextToken, active: Bool[Tensor, "B"], *, layer: int) -> Streams:
    """The token's streams behind a fork layer. The levels of all its candidates are kept, of the dropped ones too."""
    after, record = fork(streams, rule.n_earlier, n_tokens=1, rule=rule, layer=layer)
    in_use = (streams.token == 0).repeat_interleave(2, dim=1)
    place = _places(rule.n_earlier, in_use, active, nowhere=rule.earlier.shape[1] - 1)
    rule.earlier.scatter_(1, place, record.level.to(rule.earlier.dtype))
    return after


def visible_bias(model: Thoughtbubbles, span: Span, width: int, seen: int) -> Float[Tensor, "B 1 W S"]:
    """What each new stream adds to its attention logits: the key's log score; −inf for slots behind its own."""
    slot, own = (torch.arange(n, device=span.used.device) for n in (seen, width))
    visible = slot <= span.used[:, None, None, None] + own[:, None]
    key_bias = attenuation(span.log_score[:, :seen], model.config).key_bias if span.level is not None else None
    bias = torch.zeros_like(span.log_score[:, :seen]) if key_bias is None else key_bias
    return torch.where(visible, bias[:, None, None], -math.inf)


def cached_attention(
    key: Float[Tensor, "B N S H"],
    value: Float[Tensor, "B N S H"],
    place: Int[Tensor, "B W"],
    bias: Float[Tensor, "B 1 W n"],
) -> AttentionPath:
    """Keeps the new streams' keys and values, then attends over all that are kept."""

    def path(q: Tensor, k: Tensor, v: Tensor, by: Attenuation) -> tuple[Tensor, Tensor | None]:
        index = place[:, None, :, None].expand_as(k)
        key.scatter_(2, index, k)
        value.scatter_(2, index, attenuated(v, by))
        with torch.autocast(q.device.type, enabled=False):
            keys, values = (wide(kept[:, :, : bias.shape[-1]]) for kept in (key, value))
            out = F.scaled_dot_product_attention(wide(q), keys, values, attn_mask=bias)
            return out.to(v.dtype), None

    return path


def _places(
    begin: Int[Tensor, "B"], in_use: Bool[Tensor, "B n"], active: Bool[Tensor, "B"], *, nowhere: int
) -> Int[Tensor, "B n"]:
    """Consecutive slots from `begin` on; the slot that nobody reads for what must not be kept."""
    slot = begin[:, None] + torch.arange(in_use.shape[1], device=begin.device)
    return torch.where(in_use & active[:, None], slot, nowhere)


def _trimmed(streams: Streams) -> Streams:
    """No wider than the widest bubble of the batch, rounded up to a power of two."""
    widest = int((streams.token == 0).sum(1).max())
    width = min(1 << (widest - 1).bit_length(), streams.token.shape[1])
    return Streams(streams.x[:, :width], streams.log_score[:, :width], streams.token[:, :width])
