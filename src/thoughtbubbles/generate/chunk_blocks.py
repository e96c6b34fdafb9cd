"""The blocks of a span for chunks of several rows, on kernels: launched one by one, or as CUDA graphs.

Chunks have another size each time, so a graph has room for more: it is for 64, 128, 256 … streams. What is past the
last real stream is computed too, and stored in the slot that is never read.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from thoughtbubbles.generate.cache import Cache, Span
from thoughtbubbles.generate.fast_blocks import fast_blocks
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.layout import Layout, attenuation
from thoughtbubbles.model.transformer import Thoughtbubbles

SMALLEST, LARGEST = 64, 4096  # packed streams of a graph; the kernels of more take longer than their launch


class Chunk(NamedTuple):
    """What the blocks of a span need: packed streams of several rows, and where they are stored."""

    layout: Layout
    span: Span
    where: tuple[Int[Tensor, "M"], Int[Tensor, "M"]]  # row and slot of each stream
    rows: list[list[int]]  # the rows, how many slots each has used before, and how many streams it has here
    token: Int[Tensor, "M"] | None = None  # of each stream, in its row; only with private forks


RunChunk = Callable[[Sequence[Any], Tensor, Chunk], Tensor]


class Flat(NamedTuple):
    """The tensors of a chunk, all of which have M rows."""

    x: Float[Tensor, "M D"]
    cos: Float[Tensor, "M H/2"]
    sin: Float[Tensor, "M H/2"]
    value_gate: Float[Tensor, "M"] | None
    gate: Float[Tensor, "M"] | None
    row: Int[Tensor, "M"]
    slot: Int[Tensor, "M"]  # after those of a ring
    token: Int[Tensor, "M"] | None = None  # these two only with private forks
    key_bias: Float[Tensor, "M"] | None = None


def supports(config: ModelConfig) -> bool:
    """Whether the kernel has the model's reach: all forks, or private ones in bubbles that fit in its blocks. With
    `feedback`, it is for originals alone."""
    if config.fork_reach is None or not config.fork_layers:
        return True
    from thoughtbubbles.kernels.chunk import WIDEST_PRIVATE

    return (config.fork_reach == 0 or config.feedback) and config.max_bubble <= WIDEST_PRIVATE


def run_chunk(
    config: ModelConfig, blocks: Sequence[Any], x: Float[Tensor, "M D"], chunk: Chunk
) -> Float[Tensor, "M D"]:
    return _run(config, blocks, _flat(x, chunk), chunk.span, _table(chunk).to(x.device))


def _table(chunk: Chunk) -> Int[Tensor, "n 4"]:
    from thoughtbubbles.kernels.chunk import blocks_of, blocks_of_bubbles

    rows, used, counts = chunk.rows
    if chunk.token is None:
        return torch.tensor(blocks_of(rows, used, counts), dtype=torch.int32)
    return torch.tensor(blocks_of_bubbles(rows, counts, chunk.token.tolist()), dtype=torch.int32)


def _flat(x: Float[Tensor, "M D"], chunk: Chunk) -> Flat:
    layout = chunk.layout
    cos, sin = (angle[0, 0].contiguous() for angle in layout.rotary)
    first = lambda of_streams: None if of_streams is None else of_streams[0]  # noqa: E731
    flat = Flat(x, cos, sin, first(layout.value_gate), first(layout.gate), *chunk.where)
    if chunk.token is None:
        return flat
    slot = chunk.where[1] - chunk.span.ring
    return flat._replace(slot=slot, token=chunk.token.int(), key_bias=first(layout.key_bias))


def _run(
    config: ModelConfig, blocks: Sequence[Any], flat: Flat, span: Span, table: Int[Tensor, "n 4"]
) -> Float[Tensor, "M D"]:
    from thoughtbubbles.kernels.chunk import Private, attend

    key_bias = None if span.level is None else attenuation(span.log_score, config)[0]
    private = None if flat.token is None else Private(flat.token, flat.key_bias)

    def attention(qkv: Tensor, key: Tensor, value: Tensor, head_gate: Tensor | None) -> Tensor:
        where, given = (flat.row, flat.slot), (flat.cos, flat.sin, flat.value_gate)
        bias = key_bias, head_gate
        return attend(qkv, *given, key, value, *bias, where, table, private=private, first=span.ring)

    return fast_blocks(blocks, flat.x, span, flat.gate, attention)


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    flat: Flat
    table: Int[Tensor, "n 4"]
    out: Float[Tensor, "M D"]


class ChunkGraphs:
    """`run_chunk` as graphs over a cache that stays where it is. They are made when they are first needed."""

    def __init__(self, config: ModelConfig, cache: Cache):
        self.config, self.cache = config, cache
        self._captured: dict[tuple[int, int], Captured] = {}
        self._pool: Any = None  # memory that all graphs share

    def __call__(self, blocks: Sequence[Any], x: Float[Tensor, "M D"], chunk: Chunk) -> Float[Tensor, "M D"]:
        m, flat = x.shape[0], _flat(x, chunk)
        if m > LARGEST:
            return run_chunk(self.config, blocks, x, chunk)
        size = max(SMALLEST, 1 << (m - 1).bit_length())
        of_span = next(i for i, span in enumerate(self.cache.spans) if span.key is chunk.span.key)
        captured = self._of(of_span, size, blocks, flat)
        for kept, new in zip(captured.flat, flat, strict=True):
            if kept is not None and new is not None:
                kept[:m].copy_(new)
        captured.flat.slot[m:] = _unread(chunk.span)
        table = _table(chunk)
        captured.table.zero_()  # blocks of no stream
        captured.table[: len(table)].copy_(table)
        captured.graph.replay()
        return captured.out[:m].clone()

    def warm_up(self, model: Thoughtbubbles) -> None:
        """Makes all graphs."""
        weight, config = model.embedding.weight, self.config
        starts = sorted({0, *config.fork_layers})
        for index, (start, span) in enumerate(zip(starts, self.cache.spans, strict=True)):
            angle = span.log_score.new_zeros(1, config.head_size // 2)
            score = span.log_score.new_zeros(1) if span.level is not None else None
            gates = score if config.gate_v else None, score if config.gate_residual else None
            place = span.used.new_zeros(1)
            like = Flat(weight.new_zeros(1, config.width), angle, angle, *gates, place, place)
            if span.kept is not None:
                like = like._replace(token=place.int(), key_bias=score if config.gate_qk else None)
            size = SMALLEST
            while size <= LARGEST:
                self._of(index, size, list(model.blocks[start : start + span.key.shape[0]]), like)
                size *= 2

    def _of(self, index: int, size: int, blocks: Sequence[Any], like: Flat) -> Captured:
        """The graph of a span for so many streams."""
        if (index, size) not in self._captured:
            with torch.cuda.device_of(like.x):
                self._captured[index, size] = self._capture(blocks, like, self.cache.spans[index], size)
        return self._captured[index, size]

    def _capture(self, blocks: Sequence[Any], like: Flat, span: Span, size: int) -> Captured:
        from thoughtbubbles.kernels.chunk import CHUNK, WIDEST_PRIVATE

        room: list[Any] = [None if each is None else each.new_zeros(size, *each.shape[1:]) for each in like]
        flat = Flat(*room)
        flat.slot.fill_(_unread(span))
        least = WIDEST_PRIVATE if span.kept is not None else CHUNK.streams  # of all blocks but the last of a row
        table = torch.zeros(size // least + self.cache.rows, 4, dtype=torch.int32, device=flat.x.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _run(self.config, blocks, flat, span, table)  # compiles the kernels
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = _run(self.config, blocks, flat, span, table)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return Captured(graph, flat, table, out)


def _unread(span: Span) -> int:
    """The slot of every row that is never read, after those of a ring."""
    return span.token.shape[1] - 1 - span.ring
