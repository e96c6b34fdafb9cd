"""Reads the next tokens of some rows of a cache: pieces of prompts and single tokens together, without gaps.

A batch is *one* packed row of T tokens that belong to different rows of the cache, so its `Streams` have batch size 1
and all functions for bubbles apply. Here two tokens of row 5, one of row 2 and three of row 0:

    row      5 5 2 0 0 0        rows = 5 2 0, lengths = 2 1 3
    packed   0 1 2 3 4 5        the token numbers of the packed row
    number   7 8 3 0 1 2        of each token in its own row: what is cached there, and what positions count
    streams  a b' b c d e f' f  after a fork layer: a step costs as many streams as there are

A row attends to its own slots only. What it computes does not depend on the other rows, except for rounding: a matrix
product of more rows may add in another order.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from thoughtbubbles.generate.cache import Cache, Span
from thoughtbubbles.generate.chunk_blocks import Chunk, RunChunk, run_chunk, supports
from thoughtbubbles.generate.fast_blocks import has_kernels
from thoughtbubbles.generate.feedback import Ring, Waiting, fed_back, run_waiting
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.generate.reach import Group, groups_of, near_attention, slots_of
from thoughtbubbles.model import head
from thoughtbubbles.model.attention import AttentionPath, gated
from thoughtbubbles.model.block import Residual
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.layout import Layout, attenuating, attenuation, layout_at
from thoughtbubbles.model.selection import STRIDE, UNUSED, candidate_keys, select_causal
from thoughtbubbles.model.streams import (
    Streams,
    accumulation_dtype,
    at_least_float32,
    find_bubbles,
    is_original,
    positions,
    slots,
)
from thoughtbubbles.model.transformer import Thoughtbubbles


class Batch(NamedTuple):
    """Which rows a step reads, and how many tokens of each."""

    rows: Int[Tensor, "B"]  # of the cache, each at most once
    lengths: Int[Tensor, "B"]  # tokens, at least 1
    row: Int[Tensor, "T"]  # of each packed token: an index into `rows`
    offset: Int[Tensor, "T"]  # of each packed token: its place among those of its row
    longest: int

    @classmethod
    def of(cls, rows: Sequence[int], lengths: Sequence[int], *, device: torch.device | str = "cpu") -> "Batch":
        assert len(rows) == len(lengths) == len(set(rows)) > 0
        assert min(lengths) > 0
        row = [i for i, n in enumerate(lengths) for _ in range(n)]
        offset = [place for n in lengths for place in range(n)]
        send = partial(torch.tensor, device=device)
        return cls(send(rows), send(lengths), send(row), send(offset), max(lengths))

    @property
    def last(self) -> Int[Tensor, "B"]:
        """The packed token that is the last of each row."""
        return self.lengths.cumsum(0) - 1


class PackedRule(NamedTuple):
    """The causal rule for the next tokens of several rows, from the cached state of the tokens before them."""

    earlier: Int[Tensor, "B E"]  # levels of all candidates of earlier tokens, including dropped ones
    n_earlier: Int[Tensor, "B"]
    kept: Int[Tensor, "B"]  # A of the last token before
    cap: Int[Tensor, "B n"]  # floor(r·(t+1)) of the next tokens
    batch: Batch

    def n_slots(self, n_streams: int, n_tokens: int) -> int:
        return 2 * n_streams

    def survives(
        self, key: Int[Tensor, "1 C"], token: Int[Tensor, "1 C"], lengths: Int[Tensor, "1"], n_tokens: int
    ) -> Bool[Tensor, "1 C"]:
        """Spreads the candidates over their rows, selects in each, and collects the decisions."""
        row, place, counts = by_row(token[0], self.batch)
        level = ((key + slots(key)) // STRIDE)[0]
        shape = (len(counts), int(counts.max()))
        levels = level.new_full(shape, UNUSED).index_put_((row, place), level)
        tokens = token.new_full(shape, self.batch.longest).index_put_((row, place), self.batch.offset[token[0]])
        found = select_causal(candidate_keys(levels), tokens, self.cap, before=self._before(levels), kept=self.kept)
        return found[row, place][None]

    def _before(self, level: Int[Tensor, "B c"]) -> Int[Tensor, "B c"]:
        """How many earlier candidates rank above: at equal levels the earlier one does."""
        n = int(self.n_earlier.max())
        if n == 0:
            return torch.zeros_like(level)
        in_use = torch.arange(n, device=level.device) < self.n_earlier[:, None]
        earlier = torch.where(in_use, self.earlier[:, :n].long(), 2 * UNUSED)
        if self.batch.longest == 1:  # few candidates: comparing is faster than sorting
            return (earlier[:, None] >= level[..., None]).sum(-1)
        return n - torch.searchsorted(earlier.sort(-1).values, level)


def by_row(token: Int[Tensor, "S"], batch: Batch) -> tuple[Int[Tensor, "S"], Int[Tensor, "S"], Int[Tensor, "B"]]:
    """Of each stream (or candidate) its row in the batch and its place among those of its row; and their numbers."""
    row = batch.row[token]
    counts = torch.zeros_like(batch.rows).scatter_add_(0, row, torch.ones_like(row))
    first = counts.cumsum(0) - counts
    return row, torch.arange(len(row), device=row.device) - first[row], counts


@torch.no_grad()
def read(
    model: Thoughtbubbles,
    cache: Cache,
    ids: Int[Tensor, "T"],
    batch: Batch,
    *,
    predict: Int[Tensor, "P"] | None = None,
    run_fast: RunChunk | None = None,
) -> Prediction:
    """Reads the packed tokens, and returns what the packed tokens `predict` predict: by default the last of each row.

    `run_fast` runs the blocks of a span; by default on kernels if there are any for this model.

    The cache is changed in place: its owner must be the caller. There is room for the tokens: that is for the caller
    to check.
    """
    config, rows, n_tokens = model.config, batch.rows, len(ids)
    held = cache.n_tokens[rows]
    number = held[batch.row] + batch.offset
    later = torch.arange(1, batch.longest + 1, device=ids.device)
    cap = (held[:, None] + later) * cache.numerator[rows, None] // cache.denominator[rows, None]

    if run_fast is None and has_kernels(model):
        run_fast = partial(run_chunk, config)
    if run_fast is not None and not supports(config):
        run_fast = None
    waits = config.feedback and batch.longest > 1  # forks, for originals
    if config.feedback and not waits:
        run_fast = None  # the kernel's originals see their forks
    streams, n_earlier, waiting = embed(model, ids), 2 * held, None
    for start, span in zip(sorted({0, *config.fork_layers}), cache.spans, strict=True):
        used = span.used[rows]
        has_forked = start in config.fork_layers
        if has_forked:
            rule = None if span.level is None else PackedRule(span.level[rows], n_earlier, used, cap, batch)
            row, place, _ = by_row(streams.token[0].repeat_interleave(2), batch)
            streams, record = model.forks[str(start)](streams, held[:1], n_tokens=n_tokens, rule=rule)
            if span.level is not None:
                span.level[rows[row], n_earlier[row] + place] = record.level[0].to(span.level.dtype)
            n = int((streams.token < n_tokens).sum())
            streams = Streams(streams.x[:, :n], streams.log_score[:, :n], streams.token[:, :n])
        row, place, counts = by_row(streams.token[0], batch)
        log_p = attenuating(streams.log_score, streams.token, config, n_tokens=n_tokens)
        new = New(row, place, number[streams.token[0]], ~is_original(streams.token, n_tokens)[0], log_p[0])
        position = positions(
            number[streams.token], find_bubbles(streams.token, n_tokens), streams.log_score.dtype
        )  # in the row itself
        layout = layout_at(position, log_p if has_forked else None, config)
        blocks = model.blocks[start : start + len(span.key)]
        n_earlier = 2 * used
        span.used[rows] = used + counts
        groups = where = None
        if has_forked and waits:
            held_forks = Ring.of(span, rows)
            where = _store(config, cache, span, batch, used, new)
            waiting = Waiting(streams, layout, new.row, new.token, new.is_fork, where, held_forks)
            own = waiting.originals
            streams, layout, where = waiting.streams_of(own), waiting.layout_of(own), (where[0][own], where[1][own])
            new = New(new.row[own], batch.offset, new.token[own], new.is_fork[own], new.log_score[own])
            counts = batch.lengths
        elif has_forked and config.feedback:
            said = fed_back(model.forks[str(start)], cache, rows[new.row], new.token, streams.x.dtype)
            streams = streams._replace(x=streams.x + torch.where(new.is_fork[:, None], said, 0))
        if span.kept is not None and run_fast is None:  # before anything is stored: a ring loses its oldest forks then
            groups = near_groups(config, cache, span, batch, counts, new)
        where = where or _store(config, cache, span, batch, used, new)
        if run_fast is not None:
            token = None if span.kept is None else new.token
            chunk = Chunk(layout, span, where, torch.stack((rows, used, counts)).tolist(), token)
            x = run_fast(list(blocks), streams.x[0], chunk)[None]
        elif groups is not None:
            x = run_blocks(blocks, streams.x, span, layout, partial(near_attention, where=where, groups=groups))
        else:
            view = view_of(config, span, batch, used, counts, new.place)
            x = run_blocks(blocks, streams.x, span, layout, partial(packed_attention, where=where, view=view))
        streams = Streams(x, streams.log_score, streams.token)
    predict = batch.last if predict is None else predict
    if cache.last is not None:
        own = (~new.is_fork).nonzero()[:, 0]
        cache.last[rows[new.row[own]], new.token[own]] = streams.x[0, own].to(cache.last.dtype)
    if waiting is not None:
        of_rows = dict(zip(rows.tolist(), (held + batch.lengths).tolist(), strict=True))
        chosen = torch.isin(waiting.streams.token[0], predict)
        streams = run_waiting(model, cache, waiting, streams.x, chosen, of_rows)
    cache.n_tokens[rows] = held + batch.lengths
    return prediction_of(model, streams, predict, n_tokens)


def embed(model: Thoughtbubbles, ids: Int[Tensor, "T"]) -> Streams:
    x = model.embedding(ids)[None].repeat_interleave(model.config.copies, dim=1)
    token = torch.arange(len(ids), device=ids.device)[None].repeat_interleave(model.config.copies, dim=1)
    return Streams(x, torch.zeros_like(token, dtype=accumulation_dtype(x.dtype)), token)


class New(NamedTuple):
    """The new streams of a step."""

    row: Int[Tensor, "M"]  # an index into the rows of the batch
    place: Int[Tensor, "M"]  # among those of its row
    token: Int[Tensor, "M"]  # its number in the row
    is_fork: Bool[Tensor, "M"]
    log_score: Float[Tensor, "M"]


def _store(
    config: ModelConfig, cache: Cache, span: Span, batch: Batch, used: Int[Tensor, "B"], new: New
) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"]]:
    """Stores what is known of the new streams, and returns the row and the slot of each."""
    row, slot = batch.rows[new.row], used[new.row] + new.place
    if span.kept is not None:  # forks fall out of the cache
        before = slot  # streams of the row left of each, of which `token` are originals
        assert config.fork_reach is not None
        slot = slots_of(
            new.token,
            before - new.token,
            new.is_fork,
            n_tokens=(cache.n_tokens[batch.rows] + batch.lengths)[new.row],
            reach=config.fork_reach,
            ring=span.ring,
            unread=span.token.shape[1] - 1,
        )
        last = ~new.is_fork
        span.kept[row[last], new.token[last]] = (before + 1)[last].to(span.kept.dtype)
    span.log_score[row, slot] = new.log_score
    span.token[row, slot] = new.token.to(span.token.dtype)
    return row, slot


PathTo = Callable[[Tensor, Tensor], AttentionPath]  # from the cached keys and values of a block


def run_blocks(
    blocks: Iterable[nn.Module], x: Float[Tensor, "1 M D"], span: Span, layout: Layout, path: PathTo
) -> Float[Tensor, "1 M D"]:
    residual = Residual(x)
    for block, key, value in zip(blocks, span.key, span.value, strict=True):
        residual = block(residual, layout, path(key, value))
    return residual.total(layout.gate)


def near_groups(
    config: ModelConfig, cache: Cache, span: Span, batch: Batch, counts: Int[Tensor, "B"], new: New
) -> list[Group]:
    """How rows attend in a span whose forks fall out of the cache."""
    held = cache.n_tokens[batch.rows]
    lengths = held.tolist()
    return groups_of(
        config, span.token, span.log_score, ring=span.ring, rows=batch.rows, n_tokens=held,
        counts=counts, place=new.place, number=new.token, is_fork=new.is_fork, log_score=new.log_score,
        together=batch.longest == 1 and 2 * sum(lengths) >= len(lengths) * max(lengths),
    )  # fmt: skip


class Together(NamedTuple):
    """Rows next to each other in the cache that attend in one call, over as many slots as the longest one has."""

    rows: slice
    place: Int[Tensor, "M"]  # of each packed stream among rows · W queries
    mask: Float[Tensor, "B 1 W n"]  # added to the logits


class Part(NamedTuple):
    """The streams of one row in a span: which packed streams they are, and which slots they attend to."""

    row: int
    first: int
    n: int
    seen: int  # slots, their own included
    mask: Float[Tensor, "1 1 _ _"] | None  # added to the logits; None: every slot is visible, none is attenuated


View = Together | list[Part]


def view_of(
    config: ModelConfig,
    span: Span,
    batch: Batch,
    used: Int[Tensor, "B"],
    counts: Int[Tensor, "B"],
    place: Int[Tensor, "M"],
) -> View:
    """How the rows of a batch attend: together if that wastes little, as in most decoding steps; else one by one."""
    rows, before, new = batch.rows.tolist(), used.tolist(), counts.tolist()
    seen = [sum(each) for each in zip(before, new, strict=True)]
    is_block = rows == list(range(rows[0], rows[0] + len(rows)))
    if len(rows) == 1 or batch.longest > 1 or not is_block or 2 * sum(seen) < len(rows) * max(seen):
        return parts_of(config, span, rows, before, new)
    own, slot = (torch.arange(n, device=used.device) for n in (max(new), max(seen)))
    visible = slot <= (used[:, None] + own)[..., None]
    chosen = slice(rows[0], rows[0] + len(rows))
    bias = None if span.level is None else attenuation(span.log_score[chosen, : max(seen)], config)[0]
    bias = span.log_score.new_zeros(1, 1) if bias is None else bias
    mask = torch.where(visible, bias[:, None], -math.inf)[:, None]
    index = torch.arange(len(rows), device=used.device).repeat_interleave(counts) * max(new) + place
    return Together(chosen, index, mask)


def parts_of(
    config: ModelConfig, span: Span, rows: Sequence[int], used: Sequence[int], counts: Sequence[int]
) -> list[Part]:
    parts, first = [], 0
    bias = attenuation(span.log_score[rows, : max(map(sum, zip(used, counts, strict=True)))], config)[0]
    for i, (row, before, count) in enumerate(zip(rows, used, counts, strict=True)):
        seen = before + count
        mask = None
        if count > 1 or (span.level is not None and bias is not None):
            mask = span.log_score.new_zeros(count, seen)
            mask += bias[i, :seen] if span.level is not None and bias is not None else 0
            mask[:, before:] += mask.new_full((count, count), -math.inf).triu(1)
            mask = mask[None, None]
        parts.append(Part(row, first, count, seen, mask))
        first += count
    return parts


def packed_attention(
    key: Float[Tensor, "R N S H"],
    value: Float[Tensor, "R N S H"],
    where: tuple[Int[Tensor, "M"], Int[Tensor, "M"]],
    view: View,
) -> AttentionPath:
    """Caches the new keys and values, then each row attends over its own slots."""

    def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        row, slot = where
        key[row, :, slot] = k[0].transpose(0, 1).to(key.dtype)
        value[row, :, slot] = gated(v, layout)[0].transpose(0, 1).to(value.dtype)
        with torch.autocast(q.device.type, enabled=False):
            q = at_least_float32(q)
            if isinstance(view, Together):
                return attend_together(q, key, value, view).to(v.dtype)
            heads = [
                F.scaled_dot_product_attention(
                    q[:, :, part.first : part.first + part.n],
                    at_least_float32(key[part.row : part.row + 1, :, : part.seen]),
                    at_least_float32(value[part.row : part.row + 1, :, : part.seen]),
                    attn_mask=part.mask,
                )
                for part in view
            ]
            return torch.cat(heads, dim=2).to(v.dtype)

    return path


def attend_together(
    q: Float[Tensor, "1 N M H"], key: Float[Tensor, "R N S H"], value: Float[Tensor, "R N S H"], view: Together
) -> Float[Tensor, "1 N M H"]:
    n_rows, _, width, seen = view.mask.shape
    queries = q.new_zeros(n_rows * width, *q.shape[1::2]).index_copy_(0, view.place, q[0].transpose(0, 1))
    heads = F.scaled_dot_product_attention(
        queries.unflatten(0, (n_rows, width)).transpose(1, 2),
        at_least_float32(key[view.rows, :, :seen]),
        at_least_float32(value[view.rows, :, :seen]),
        attn_mask=view.mask,
    )
    return heads.transpose(1, 2).flatten(0, 1)[view.place].transpose(0, 1)[None]


def prediction_of(model: Thoughtbubbles, streams: Streams, token: Int[Tensor, "P"], n_tokens: int) -> Prediction:
    if not len(token):
        return Prediction(streams.x.new_zeros(0, model.config.vocab_size), token)
    row = torch.zeros_like(token)
    start, end = head.bubbles_at(streams, row, token, n_tokens=n_tokens)
    sizes = end - start + 1
    bubbles = head.gather_bubbles(streams, row, start, end, width=int(sizes.max()))
    return Prediction(head.logits(model.rows_to_decode(bubbles, 1), model.embedding.weight)[:, 0], sizes)
