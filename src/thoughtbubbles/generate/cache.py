"""The KV cache: what the next token needs of the tokens read so far, in storage of fixed capacity (`grown` adds more).

With causal selection no decision is ever revised, so nothing here is ever recomputed: each token only adds its streams.
The blocks between two fork layers work on the same streams and form a span; a row's streams are in the order of the
tokens, without gaps:

    span 0   a b c d · · ·              blocks 0 … 2, one stream per token           a' is a fork of a,
    span 1   a' a b c' c d · · ·        blocks 3 … 6, after the first fork layer  · an unused slot
    span 2   a' a b c″ c' c d · · ·     …

To rank a new token, a fork layer needs the levels of all earlier candidates, including dropped ones, and A_{t−1}, the
number of streams kept so far, which is the number of streams in the span. Every row has one extra slot at its end that
is never read: values that must not be kept are written to it. With `fork_reach` the slots are others (reach.py), and
with `feedback` the last states of all tokens are kept too.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from thoughtbubbles.generate.reach import NEVER, ring_size
from thoughtbubbles.model.budget import Budget, brief
from thoughtbubbles.model.config import MOST, ModelConfig, is_whole
from thoughtbubbles.model.inputs import whole_numbers
from thoughtbubbles.model.selection import Rule
from thoughtbubbles.model.streams import accumulation_dtype


class Span(NamedTuple):
    """The cache of the blocks from one fork layer up to the next, which work on the same streams."""

    key: Float[Tensor, "L B N S H"]  # rotated
    value: Float[Tensor, "L B N S H"]  # attenuated
    log_score: Float[Tensor, "B S"]  # as it attenuates: `attenuating` in model/layout.py
    token: Int[Tensor, "B S"]
    used: Int[Tensor, "B"]  # streams so far; in a span after a fork layer this is A_{t−1}
    level: Int[Tensor, "B C"] | None  # of every candidate of the span's fork layer; None if it has none, or no scores
    kept: Int[Tensor, "B T"] | None = None  # A_t of each token; only if forks fall out of the cache (reach.py)
    reach: int = 0  # `fork_reach`, if so

    @property
    def ring(self) -> int:
        """Slots for forks before those of the originals, if forks fall out of the cache."""
        return 0 if self.kept is None else self.token.shape[1] - 1 - self.kept.shape[1]

    def streams_up_to(self, n_tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
        """A of the last of so many tokens, if forks fall out of the cache; 0 of none."""
        assert self.kept is not None
        found = self.kept.gather(1, (n_tokens - 1).clamp(min=0)[:, None])[:, 0].long()
        return torch.where(n_tokens > 0, found, 0)


class Cache(NamedTuple):
    """Steps return a new Cache, but they share its storage: to continue from an old one, `clone` it first."""

    spans: tuple[Span, ...]
    n_tokens: Int[Tensor, "B"]  # tokens read so far
    numerator: Int[Tensor, "B"]  # of each row's budget
    denominator: Int[Tensor, "B"]
    capacity: int  # tokens that a row can hold
    last: Float[Tensor, "B T D"] | None = None  # of each token's original after the last block; only with `feedback`

    @property
    def rows(self) -> int:
        return self.n_tokens.shape[0]

    def reorder(self, rows: Int[Tensor, "n"]) -> "Cache":
        """The given rows, in their order: to drop finished ones, repeat one for several samples, or follow beams."""
        wanted = f"a tensor of row indices, from 0 to {self.rows - 1}"
        rows = whole_numbers("rows", rows, wanted)
        if rows.ndim != 1 or (rows.device.type == "cpu" and not all(0 <= row < self.rows for row in rows.tolist())):
            raise ValueError(f"rows = {brief(rows)}: give {wanted}")
        index = rows.to(self.n_tokens.device, torch.int64)
        return self._map(lambda tensor, batch: tensor.index_select(batch, index))

    def clone(self) -> "Cache":
        return self._map(lambda tensor, _: tensor.clone())

    def with_own_counts(self) -> "Cache":
        """The same contents in the same storage, to which tokens can be added without changing this one."""
        spans = tuple(span._replace(used=span.used.clone()) for span in self.spans)
        return self._replace(spans=spans, n_tokens=self.n_tokens.clone())

    def crop(self, n_tokens: "int | Int[Tensor, 'B']") -> "Cache":
        """The cache as it was when each row had at most `n_tokens` tokens (at least one)."""
        right = "a whole number of 1 or more, or one for each row; a row keeps at least its first token"
        wanted = whole_numbers("n_tokens", n_tokens, right).to(self.n_tokens.device)
        if wanted.shape not in ((), (self.rows,)) or bool((wanted < 1).any()):
            raise ValueError(f"n_tokens = {brief(n_tokens)}: give {right}")
        keep = torch.minimum(self.n_tokens, wanted)
        spans = []
        for span in self.spans:
            if span.kept is not None:
                spans.append(self._crop_near(span, keep))
                continue
            slot = torch.arange(span.token.shape[1], device=keep.device)
            left = (span.token < keep[:, None]) & (slot < span.used[:, None])
            spans.append(span._replace(used=left.sum(1)))
        return self._replace(spans=tuple(spans), n_tokens=keep)

    def _crop_near(self, span: Span, keep: Int[Tensor, "B"]) -> Span:
        ring, reach = span.ring, span.reach
        used, token = span.streams_up_to(keep), span.token.clone()
        first_seen = span.streams_up_to(keep - reach) - (keep - reach).clamp(min=0)  # of the forks that can be seen
        is_seen = (token[:, :ring] >= (keep - reach)[:, None]) & (token[:, :ring] < keep[:, None])
        if bool(((keep < self.n_tokens) & (is_seen.sum(1) < used - keep - first_seen)).any()):
            raise ValueError(
                "forks that the next tokens would see are no longer in this cache, since only near tokens see them "
                "(fork_reach): clone the cache at the place that you want to return to, or decode without a cache"
            )
        token[:, :ring].masked_fill_(token[:, :ring] >= keep[:, None], NEVER)
        return span._replace(used=used, token=token)

    def streams(self, n_tokens: int) -> Int[Tensor, "B T"]:
        """The number of streams of each of the first tokens, in the last span; 0 past a row's end."""
        if not is_whole(n_tokens) or not 0 <= n_tokens <= MOST["block_size"]:
            raise ValueError(f"n_tokens = {brief(n_tokens)}: give a whole number, such as {self.capacity}")
        last = self.spans[-1]
        if last.kept is not None:
            n = min(n_tokens, self.capacity)
            counts = last.kept[:, :n].long().diff(prepend=self.n_tokens.new_zeros(self.rows, 1), dim=1)
            counts = torch.where(torch.arange(n, device=counts.device) < self.n_tokens[:, None], counts, 0)
            return torch.cat([counts, counts.new_zeros(self.rows, n_tokens - n)], dim=1)
        slot = torch.arange(last.token.shape[1], device=last.token.device)
        token = torch.where(slot < last.used[:, None], last.token, n_tokens).clamp(max=n_tokens).long()
        counts = token.new_zeros(self.rows, n_tokens + 1).scatter_add(1, token, torch.ones_like(token))
        return counts[:, :n_tokens]

    def clear(self, row: int, budget: Budget) -> None:
        """Empties a row in place, for a new text with this budget. Its slots stay: unused ones are never read."""
        self.n_tokens[row] = 0
        self.numerator[row], self.denominator[row] = budget.numerator[0], budget.denominator[0]
        for span in self.spans:
            span.used[row] = 0
            if span.kept is not None:
                span.token[row, : span.ring] = NEVER

    def copy_prefix(self, source: int, row: int, n_tokens: int) -> None:
        """Copies the first tokens of another row with the same budget in place. What a row had is lost.

        With `fork_reach` only if it is 0: else forks of the last of these tokens may be gone.
        """
        self.n_tokens[row] = n_tokens
        if self.last is not None:
            self.last[row, :n_tokens] = self.last[source, :n_tokens]
        earlier = n_tokens  # streams of the span before, whose candidates have levels
        for span in self.spans:
            if span.level is not None:
                span.level[row, : 2 * earlier] = span.level[source, : 2 * earlier]
            if span.kept is not None:
                assert span.ring == 0
                span.kept[row, :n_tokens] = span.kept[source, :n_tokens]
                n, streams = n_tokens, int(span.kept[source, n_tokens - 1])
            else:  # in the order of the tokens
                n = streams = int((span.token[source, : int(span.used[source])] < n_tokens).sum())
            for kept in (span.key, span.value):
                kept[:, row, :, :n] = kept[:, source, :, :n]
            for kept in (span.log_score, span.token):
                kept[row, :n] = kept[source, :n]
            span.used[row] = earlier = streams

    def next_cap(self) -> Int[Tensor, "B"]:
        """floor(r·(t+1)) of the next token t."""
        return (self.n_tokens + 1) * self.numerator // self.denominator

    def has_room_for(self, config: ModelConfig, budget: Budget) -> bool:
        shapes = span_shapes(config, capacity=self.capacity, budget=budget)
        return len(shapes) == len(self.spans) and all(
            span.token.shape[1] > shape.slots and (span.level is None or span.level.shape[1] > shape.candidates)
            for span, shape in zip(self.spans, shapes, strict=True)
        )

    def fits(self, config: ModelConfig, weight: Tensor) -> bool:
        """Whether it can belong to a model with this config and these weights, judging by shapes."""
        starts = sorted({0, *config.fork_layers})
        return (
            self.capacity <= config.block_size
            and (self.last is not None) == config.feedback
            and len(self.spans) == len(starts)
            and all(
                span.key.shape[0] == end - start
                and span.key.shape[2] == config.n_head
                and span.key.shape[4] == config.head_size
                and (span.level is not None) == (start in config.fork_layers and config.scores)
                and (span.kept is not None) == (start in config.fork_layers and config.fork_reach is not None)
                and (span.kept is None or span.reach == config.fork_reach)
                and span.key.device == weight.device
                and span.log_score.dtype == accumulation_dtype(weight.dtype)
                for span, start, end in zip(self.spans, starts, [*starts[1:], config.n_layer], strict=True)
            )
        )

    def grown(self, config: ModelConfig, capacity: int, *, budget: Budget | None = None) -> "Cache":
        """The same contents in new storage for `capacity` tokens per row; the slot that is never read is not copied.

        budget  the largest one that a row can have, which determines the size of that storage; by default the largest
                that a row has now (this synchronises with a GPU)
        """
        held = int(self.n_tokens.max())
        if not is_whole(capacity) or not held <= capacity <= config.block_size:
            raise ValueError(
                f"capacity = {brief(capacity)}: give a whole number from {held}, the tokens in the cache, "
                f"to block_size = {config.block_size}"
            )
        if budget is None:
            budget = Budget(tuple(self.numerator.tolist()), tuple(self.denominator.tolist()))
        key = self.spans[0].key
        fresh = new_cache(config, rows=self.rows, capacity=capacity, budget=budget, dtype=key.dtype, device=key.device)
        spans = []
        for now, room in zip(self.spans, fresh.spans, strict=True):
            # A ring is as large as before, or has never been full: its slots stay where they are.
            rings = now.ring, room.ring
            for name, slots in (("key", 3), ("value", 3), ("log_score", 1), ("token", 1), ("level", 1), ("kept", 1)):
                kept, new = getattr(now, name), getattr(room, name)
                if kept is not None:
                    begin = (0, 0) if name in ("level", "kept") else rings
                    n = min(kept.shape[slots] - begin[0], new.shape[slots] - begin[1]) - (name != "kept")
                    new.narrow(slots, 0, min(begin)).copy_(kept.narrow(slots, 0, min(begin)))
                    new.narrow(slots, begin[1], n).copy_(kept.narrow(slots, begin[0], n))
            spans.append(room._replace(used=now.used))
        if self.last is not None and fresh.last is not None:
            fresh.last[:, :held] = self.last[:, :held]
        return self._replace(spans=tuple(spans), capacity=capacity, last=fresh.last)

    def memory(self) -> "CacheMemory":
        """The size of the storage, counted on the tensors themselves; `cache_memory` predicts it."""
        bytes_of = lambda *names: sum(  # noqa: E731
            t.untyped_storage().nbytes() for span in self.spans for n in names if (t := getattr(span, n)) is not None
        )
        row = sum(t.untyped_storage().nbytes() for t in (self.n_tokens, self.numerator, self.denominator))
        return CacheMemory(
            keys=bytes_of("key"),
            values=bytes_of("value"),
            streams=bytes_of("log_score", "token", "kept"),
            levels=bytes_of("level"),
            counts=bytes_of("used") + row,
            states=0 if self.last is None else self.last.untyped_storage().nbytes(),
        )

    def _map(self, change: Callable[[Tensor, int], Tensor]) -> "Cache":
        """Applies `change(tensor, batch dimension)` to every tensor."""
        spans = [
            Span(
                key=change(span.key, 1),
                value=change(span.value, 1),
                log_score=change(span.log_score, 0),
                token=change(span.token, 0),
                used=change(span.used, 0),
                level=None if span.level is None else change(span.level, 0),
                kept=None if span.kept is None else change(span.kept, 0),
                reach=span.reach,
            )
            for span in self.spans
        ]
        return Cache(
            tuple(spans),
            n_tokens=change(self.n_tokens, 0),
            numerator=change(self.numerator, 0),
            denominator=change(self.denominator, 0),
            capacity=self.capacity,
            last=None if self.last is None else change(self.last, 0),
        )


class CacheMemory(NamedTuple):
    """Bytes by purpose."""

    keys: int
    values: int
    streams: int  # log score and token of each stream, and how many each token has where forks fall out
    levels: int  # of candidates, for causal selection
    counts: int
    states: int = 0  # of all tokens after the last block, with `feedback`

    @property
    def total(self) -> int:
        return sum(self)

    def report(self) -> str:
        parts = ", ".join(f"{name} {size / 2**20:,.2f}" for name, size in self._asdict().items())
        return f"{self.total / 2**20:,.2f} MiB: {parts}"


class SpanShape(NamedTuple):
    layers: int
    slots: int  # streams that a row can hold, without the slot that is never read
    candidates: int  # of the span's fork layer, which have levels; 0 if it has none, or no scores
    forks_fall_out: bool = False  # then there are as many slots as tokens, and a ring for forks of the last ones


def span_shapes(config: ModelConfig, *, capacity: int, budget: Budget) -> list[SpanShape]:
    """Shapes that suffice for any row of `capacity` tokens under the largest of the budgets."""
    rule = Rule("causal", budget)
    starts = sorted({0, *config.fork_layers})
    streams, max_bubble, shapes = config.copies * capacity, 1, []
    for start, end in zip(starts, [*starts[1:], config.n_layer], strict=True):
        if start not in config.fork_layers:
            shapes.append(SpanShape(end - start, streams, 0))
            continue
        candidates, max_bubble = 2 * streams * config.scores, 2 * max_bubble
        streams = rule.n_slots(streams, capacity)
        slots, forks_fall_out = streams, config.fork_reach is not None
        if forks_fall_out:
            slots = capacity + ring_size(config, streams - capacity, max_bubble=max_bubble)
        shapes.append(SpanShape(end - start, slots, candidates, forks_fall_out))
    return shapes


def new_cache(
    config: ModelConfig, *, rows: int, capacity: int, budget: Budget, dtype: torch.dtype, device: torch.device | str
) -> Cache:
    """An empty cache for `rows` rows of `capacity` tokens."""
    spans = []
    for shape in span_shapes(config, capacity=capacity, budget=budget):
        slots = shape.slots + 1
        kept = (shape.layers, rows, config.n_head, slots, config.head_size)
        spans.append(
            Span(
                key=torch.zeros(kept, dtype=dtype, device=device),
                value=torch.zeros(kept, dtype=dtype, device=device),
                log_score=torch.zeros(rows, slots, dtype=accumulation_dtype(dtype), device=device),
                token=torch.full((rows, slots), NEVER if shape.forks_fall_out else 0, dtype=torch.int32, device=device),
                used=torch.zeros(rows, dtype=torch.int64, device=device),
                level=torch.zeros(rows, shape.candidates + 1, dtype=torch.int32, device=device)
                if shape.candidates
                else None,
                kept=torch.zeros(rows, capacity, dtype=torch.int32, device=device) if shape.forks_fall_out else None,
                reach=config.fork_reach or 0,
            )
        )
    n_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    wide = accumulation_dtype(dtype)
    last = torch.zeros(rows, capacity + 1, config.width, dtype=wide, device=device) if config.feedback else None
    return Cache(tuple(spans), n_tokens, *budget_of_rows(budget, rows, device=device), capacity, last)


def budget_of_rows(budget: Budget, rows: int, *, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of each row's budget."""
    repeats = rows if budget.rows == 1 else 1
    return (
        torch.tensor(budget.numerator * repeats, device=device),
        torch.tensor(budget.denominator * repeats, device=device),
    )


def cache_memory(
    config: ModelConfig, *, rows: int, capacity: int, budget: Budget, dtype: torch.dtype = torch.bfloat16
) -> CacheMemory:
    """The size of such a cache, without allocating it."""
    shapes = span_shapes(config, capacity=capacity, budget=budget)
    vectors = rows * config.width * dtype.itemsize * sum(s.layers * (s.slots + 1) for s in shapes)
    return CacheMemory(
        keys=vectors,
        values=vectors,
        streams=rows * (accumulation_dtype(dtype).itemsize + 4) * sum(s.slots + 1 for s in shapes)
        + rows * 4 * capacity * sum(s.forks_fall_out for s in shapes),
        levels=rows * 4 * sum(s.candidates + 1 for s in shapes if s.candidates),
        counts=rows * 8 * (len(shapes) + 3),
        states=rows * (capacity + 1) * config.width * accumulation_dtype(dtype).itemsize * config.feedback,
    )
