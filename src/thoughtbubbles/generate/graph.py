"""A decoding step as CUDA graphs: all shapes fixed, the small parts compiled, the blocks on kernels for few rows.

On a GPU a step is hundreds of small kernels, and launching them one by one takes longer than running them. A graph
replays many in one launch. It needs fixed addresses and shapes: the cache is allocated once at full capacity, and every
bubble has the largest width that the budgets and the fork layers allow (1, 2, 4, 8 with three). Most of that is gaps,
since a row has r streams per token in the mean. So the blocks run on the streams of all rows packed without gaps:

    width 4   a · · · │ b' b · · │ c″ c' c ·        packed   a b' b c″ c' c · ·

A graph has a fixed size for that too, and a step whose streams are more than that is repeated with a larger graph: it
has changed nothing that counts, since what a row has read is written last.
"""

import math
from collections.abc import Sequence
from functools import cache as once
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles.generate.cache import Cache, Span
from thoughtbubbles.generate.fast_blocks import fast_blocks, has_kernels
from thoughtbubbles.generate.prediction import Likeliest, Prediction
from thoughtbubbles.generate.step import Parts, View, advance, enter, finish, run_blocks
from thoughtbubbles.kernels import CHOSEN_BY_RULE
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.layout import Layout
from thoughtbubbles.model.rope import Rotary
from thoughtbubbles.model.streams import at_least_float32
from thoughtbubbles.model.transformer import Thoughtbubbles

WIDEST = 16  # four fork layers
FEW_STREAMS = 32  # up to here an extra stream costs almost nothing
MARGIN = 1.25  # rows have more or fewer streams than in the mean; of many rows, the sum hardly


class Packing(NamedTuple):
    """Where the streams of a batch are if its gaps are left out."""

    source: Int[Tensor, "M"]  # the slot of each packed stream, one of B·W
    first: Int[Tensor, "B"]  # packed stream of each row
    slot: Int[Tensor, "B*W"]  # the packed stream of each slot; in gaps, of another slot
    is_real: Bool[Tensor, "M"]  # those past the last row's are copies


def find_packing(added: Int[Tensor, "B"], width: int, size: int) -> Packing:
    end = added.cumsum(0)
    first, last = end - added, (end[-1:] - 1).clamp(min=0)
    index = torch.arange(size, device=added.device)
    packed = index.minimum(last)
    row = (packed[:, None] >= end).sum(1).clamp(max=added.shape[0] - 1)
    place = torch.arange(width, device=added.device).minimum((added[:, None] - 1).clamp(min=0)) + first[:, None]
    slot = place.minimum(last).clamp(max=size - 1).flatten()
    return Packing(row * width + packed - first[row], first, slot, index < end[-1:])


def pack_streams(x: Tensor, layout: Layout, packing: Packing) -> tuple[Tensor, Layout]:
    take = lambda kept: None if kept is None else kept.flatten(0, -1)[packing.source]  # noqa: E731
    cos, sin = (angle.flatten(0, -2)[packing.source] for angle in layout.rotary)
    gates = Layout(Rotary(cos, sin), take(layout.key_bias), take(layout.value_gate), take(layout.gate))
    return x.flatten(0, 1)[packing.source], gates


def unpack_streams(x: Tensor, packing: Packing) -> Tensor:
    return x[packing.slot].unflatten(0, (packing.first.shape[0], -1))


def run_packed(blocks: Sequence[Any], x: Tensor, span: Span, view: View, *, size: int | None = None) -> Tensor:
    """`run_blocks` on the kernels of kernels/decode.py and decode_attention.py, which read only the used slots.

    size  packed streams; None: with gaps
    """
    from thoughtbubbles.kernels import chunk
    from thoughtbubbles.kernels.decode_attention import Near, Rows, are_few, attend

    (batch, width, _), heads = x.shape, span.key.shape[2]
    packing, layout, functions = None, view.layout, packing_functions()
    first = torch.arange(0, batch * width, width, device=x.device)
    if size is not None and size < batch * width:
        packing = functions.find(view.added, width, size)
        x, layout = functions.pack(x, layout, packing)
        first = packing.first
    given = *layout.rotary, layout.value_gate
    if are_few(batch, heads) or view.near is not None:
        arrived = torch.zeros(batch * heads, dtype=torch.int32, device=x.device)
        rows = Rows(first, view.added, view.used, width, packing is None, arrived)
        near = None if view.near is None else Near(*view.near, span.token)

        def attention(qkv: Tensor, key: Tensor, value: Tensor, head_gate: Tensor | None) -> Tensor:
            bias = view.key_bias, layout.key_bias
            return attend(qkv, *given, key, value, *bias, head_gate, rows, near=near, sees_forks=view.sees_forks)

    else:
        where, table = functions.place(view, first, packing)

        def attention(qkv: Tensor, key: Tensor, value: Tensor, head_gate: Tensor | None) -> Tensor:
            fill = packing is None and width > 1  # in gaps: what follows must be finite
            bias = view.key_bias
            return chunk.attend(qkv, *given, key, value, bias, head_gate, where, table, most=width, fill=fill)

    gate = None if layout.gate is None else layout.gate.reshape(-1)
    x = fast_blocks(blocks, x.reshape(-1, x.shape[-1]), span, gate, attention)
    return x.unflatten(0, (batch, width)) if packing is None else functions.unpack(x, packing)


def find_places(
    view: View, first: Int[Tensor, "B"], packing: Packing | None
) -> tuple[tuple[Int[Tensor, "M"], Int[Tensor, "M"]], Int[Tensor, "B 4"]]:
    """Row and slot of each stream in the cache; and row, first stream, number of streams and first slot of each row."""
    batch, width = view.place.shape
    row = torch.arange(batch, device=first.device)
    of_stream, slot, n = row[:, None].expand(-1, width).flatten(), view.place.flatten(), view.added
    if packing is not None:
        of_stream = of_stream[packing.source]
        slot = torch.where(packing.is_real, slot[packing.source], view.unread)
        n = (packing.source.shape[0] - first).clamp(min=0).minimum(n)  # others have no room: the step is repeated
    return (of_stream, slot), torch.stack((row, first, n, view.used), dim=1).int()


class PackingFunctions(NamedTuple):
    find: Any
    pack: Any
    unpack: Any
    place: Any


@once
def packing_functions() -> PackingFunctions:
    functions = (find_packing, pack_streams, unpack_streams, find_places)
    if not torch.cuda.is_available():
        return PackingFunctions(*functions)
    return PackingFunctions(*map(compiled_whole, functions))


def compiled_whole(function: Any) -> Any:
    """Fuses small kernels too: by default, sharing less than 10 bytes is no reason to, but a launch takes longer."""
    options = {**CHOSEN_BY_RULE, "score_fusion_memory_threshold": 1}
    return torch.compile(function, dynamic=False, fullgraph=True, options=options)


def find_likeliest(logits: Float[Tensor, "B V"], n_ids: int) -> Likeliest:
    """Among the first `n_ids` tokens, as in greedy decoding."""
    token = logits[:, :n_ids].argmax(-1)
    return Likeliest(token, at_least_float32(logits).log_softmax(-1).gather(1, token[:, None])[:, 0])


def keep_counts(cache: Cache, after: Cache, fits: Bool[Tensor, ""], size: int | None) -> None:
    """Writes how much each row has read, if all new streams had room.

    size  the most packed streams that there was room for; None: all had room
    """
    spans = [(old.used, new.used) for old, new in zip(cache.spans, after.spans, strict=True)]
    if size is not None:
        fits.copy_(torch.stack([new.sum() - old.sum() for old, new in spans]).max() <= size)
    for old, new in (*spans, (cache.n_tokens, after.n_tokens)):
        old.copy_(new if size is None else torch.where(fits, new, old))


class Compiled(NamedTuple):
    enter: Any
    finish: Any
    likeliest: Any
    keep_counts: Any


@once
def compiled() -> Compiled:
    functions = (enter, finish, find_likeliest, keep_counts)
    return Compiled(*map(compiled_whole, functions))


class Captured(NamedTuple):
    """A step is split into one graph per span, and one for the head: a long graph takes a while to launch, and this way
    the later ones are launched while the first runs."""

    graphs: list[torch.cuda.CUDAGraph]
    prediction: Prediction


class GraphStep:
    """Replays a step over a cache that it owns: fill `ids` and `active`, call, and read the returned prediction.

    The returned tensors are the graph's own, and the next call overwrites them.
    """

    def __init__(self, model: Thoughtbubbles, cache: Cache, *, budget: Budget, n_ids: int | None = None):
        """
        budget  the largest one that a row can have
        n_ids   how many of the ids can be the likeliest one; by default all
        """
        self.model, self.cache = model, cache
        self.n_ids = model.config.vocab_size if n_ids is None else n_ids
        self.widths = widths_within(model.config, most_streams(budget, cache.capacity))
        if max(self.widths) > WIDEST:
            raise ValueError(
                f"with {len(model.config.fork_layers)} fork layers a compiled step is {max(self.widths)} streams wide, "
                f"and beyond {WIDEST} that takes far longer than a token needs: decode without compiling"
            )
        self.on_kernels = has_kernels(model)
        mean = cache.rows * mean_streams(model.config, budget)
        self.sizes = packed_sizes(mean, self.largest) if self.on_kernels else [self.largest]
        self.ids = torch.zeros_like(cache.n_tokens)
        self.active = torch.zeros_like(cache.n_tokens, dtype=torch.bool)
        self.fits = torch.ones((), dtype=torch.bool, device=self.ids.device)
        self._captured: dict[int, Captured] = {}
        self._size = self.largest  # of the step that was launched last
        self._pool: Any = None  # memory that all graphs share

    @property
    def largest(self) -> int:
        return self.cache.rows * max(self.widths)

    def __call__(self, streams: int | float | None = None) -> Prediction:
        self.launch(streams)
        return self.result()

    def launch(self, streams: int | float | None = None) -> None:
        """`streams`: as many as the active rows have together in the mean; by default as many as they can have."""
        self._replay(self.largest if streams is None else self.size_for(streams))

    def result(self) -> Prediction:
        """Of the step that was launched last. Before that, `ids`, `active` and the cache must not be changed."""
        while self._size < self.largest and not self.fits.item():
            self._replay(self.size_for(self._size))
        return self.captured(self._size).prediction

    def _replay(self, size: int) -> None:
        self._size = size
        for graph in self.captured(size).graphs:
            graph.replay()

    def size_for(self, streams: int | float) -> int:
        """Packed streams of the graph for this many in the mean."""
        return next((size for size in self.sizes if size >= MARGIN * streams), self.largest)

    def captured(self, size: int) -> Captured:
        """The graphs for this many packed streams; they are made when they are first needed."""
        if size not in self._captured:
            active = self.active.clone()
            self.active.zero_()  # then a step changes nothing
            try:
                with torch.cuda.device_of(self.ids):
                    self._captured[size] = self._capture(size)
            finally:
                self.active.copy_(active)
        return self._captured[size]

    def parts(self, size: int) -> Parts:
        blocks = partial(run_packed, size=size) if self.on_kernels else run_blocks
        return Parts(compiled().enter, blocks, compiled().finish)

    def _capture(self, size: int) -> Captured:
        graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = self._pool or torch.cuda.graph_pool_handle()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def blocks_and_cut(*given: Any) -> Tensor:
            x: Tensor = parts.blocks(*given)
            if graphs:  # while capturing
                graphs[-1].capture_end()
                begin()
            return x

        parts = self.parts(size)
        cut = parts._replace(blocks=blocks_and_cut)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Every span, batch size and model compiles separately, and none may fall back to running uncompiled.
        with torch.cuda.stream(stream), torch._dynamo.config.patch(recompile_limit=1024):
            for _ in range(2):
                self._step(cut, size)  # compiles
            torch.cuda.synchronize()
            begin()
            try:
                prediction = self._step(cut, size)
            finally:
                graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return Captured(graphs, prediction)

    def _step(self, parts: Parts, size: int) -> Prediction:
        """Writes what each row has read, if all streams had room."""
        cache = self.cache
        prediction, after = advance(self.model, cache, self.ids, self.active, widths=self.widths, parts=parts)
        compiled().keep_counts(cache, after, self.fits, size if size < self.largest else None)
        return prediction._replace(likeliest=compiled().likeliest(prediction.logits, self.n_ids))


def packed_sizes(mean: int | float, largest: int) -> list[int]:
    """What graphs have room for: all rows with as many streams as they have in the mean and a margin; half of that, and
    so on, for fewer rows or smaller budgets; twice that, and so on, for steps that need more."""
    size = math.ceil(MARGIN * mean)
    while size > 2 * FEW_STREAMS:
        size = math.ceil(size / 2)
    sizes = []
    while size < largest and largest > FEW_STREAMS:  # with few streams, gaps cost nothing
        sizes.append(-(-size // 16) * 16)
        size *= 2
    return [size for size in sizes if size < largest] + [largest]


def mean_streams(config: ModelConfig, budget: Budget) -> float:
    """Of a token, at most."""
    return min(float(budget.largest), float(config.max_bubble)) if config.fork_layers else float(config.copies)


def most_streams(budget: Budget, capacity: int) -> int:
    """The most streams of a bubble within `capacity` tokens: with a budget of 1 no fork ever survives."""
    return 1 if budget == Budget.of(1) else budget.largest_floor(capacity)


def widths_within(config: ModelConfig, most: int) -> tuple[int, ...]:
    """The width of a step in each span, a power of two, if no bubble has more than `most` streams."""
    bound = 1 << (max(most, 1) - 1).bit_length()
    forks_passed = range(1 if config.fork_layers[:1] == (0,) else 0, len(config.fork_layers) + 1)
    return tuple(min(config.copies * 2**n, max(bound, config.copies)) for n in forks_passed)
