"""A decoding step as CUDA graphs: all shapes fixed, the small parts compiled, the blocks on kernels for few rows.

On a GPU a step is hundreds of small kernels, and launching them one by one takes longer than running them. A graph
replays many in one launch. It needs fixed addresses and shapes: the cache is allocated once at full capacity, and every
bubble has the largest width that the budgets and the fork layers allow (1, 2, 4, 8 with three). That costs little: most
of a step's time goes into reading the weights, once for all streams.
"""

from collections.abc import Sequence
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from thoughtbubbles import kernels
from thoughtbubbles.generate.cache import Cache, Span
from thoughtbubbles.generate.decode import Parts, Prediction, View, advance, enter, next_logits, run_blocks
from thoughtbubbles.model.config import OURS, ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

WIDEST = 16  # four fork layers


def fast_blocks(blocks: Sequence[Any], x: Tensor, span: Span, view: View, seen: int) -> Tensor:
    """`run_blocks` on the kernels of kernels/decode.py, which read only the used slots."""
    from thoughtbubbles.kernels.decode import add_norm, attend, linear, partial_linear

    batch, width, channels = x.shape
    x, parts, bias = x.reshape(batch * width, channels), None, blocks[0].mlp.down.bias
    layout = view.layout
    gate = None if layout.gate is None else layout.gate.reshape(-1)
    for block, key, value in zip(blocks, span.key, span.value, strict=True):
        attention, mlp = block.attention, block.mlp
        x, h = add_norm(x, parts, bias, gate, block.attention_norm)
        qkv = linear(h, attention.qkv.weight, attention.qkv.bias)
        heads = attend(qkv, *layout.rotary, layout.value_gate, key, value, view.key_bias, view.place, view.used)
        parts = partial_linear(attention.gate_heads(heads, h), attention.out.weight)
        x, h = add_norm(x, parts, attention.out.bias, gate, block.mlp_norm)
        hidden = linear(h, mlp.up.weight, mlp.up.bias, gelu=True)
        parts, bias = partial_linear(hidden, mlp.down.weight), mlp.down.bias
    x, _ = add_norm(x, parts, bias, gate, blocks[-1].mlp_norm)
    return x.view(batch, width, channels)


def has_kernels(model: Thoughtbubbles) -> bool:
    """Whether the decoding kernels support this model: they have our attention and GELU, not the authors'."""
    weight, config = model.embedding.weight, model.config
    is_available = kernels.for_decoding(weight.device, weight.dtype, width=config.width, head_size=config.head_size)
    return is_available and config.form == OURS


@once
def fast_parts(*, on_kernels: bool) -> Parts:
    compiled: list[Any] = [torch.compile(part, dynamic=False, fullgraph=True) for part in (enter, next_logits)]
    return Parts(enter=compiled[0], blocks=fast_blocks if on_kernels else run_blocks, logits=compiled[1])


class GraphStep:
    """Replays a step over a cache that it owns: fill `ids` and `active`, call, and read the returned prediction.

    The returned tensors are the graph's own, and the next call overwrites them. A step is split into one graph per
    span: a long graph takes a while to launch, and this way the later ones are launched while the first runs.
    """

    def __init__(self, model: Thoughtbubbles, cache: Cache, *, most: int):
        """`most`: the most streams that a bubble can have under the budgets."""
        self.model, self.cache = model, cache
        self.widths = widths_within(model.config, most)
        if max(self.widths) > WIDEST:
            raise ValueError(
                f"with {len(model.config.fork_layers)} fork layers a compiled step is {max(self.widths)} streams wide, "
                f"and beyond {WIDEST} that takes far longer than a token needs: decode without compiling"
            )
        fast = fast_parts(on_kernels=has_kernels(model))
        self._blocks, self.parts = fast.blocks, Parts(fast.enter, self._blocks_and_cut, fast.logits)
        self.ids = torch.zeros_like(cache.n_tokens)
        self.active = torch.zeros_like(cache.n_tokens, dtype=torch.bool)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Every span, batch size and model compiles separately, and none may fall back to running uncompiled.
        with torch.cuda.stream(stream), torch._dynamo.config.patch(recompile_limit=1024):
            for _ in range(2):
                self._step()  # compiles; with no active row it changes nothing
            torch.cuda.synchronize()
            self._begin_graph()
            try:
                self._prediction = self._step()
            finally:
                self._graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self) -> Prediction:
        for graph in self._graphs:
            graph.replay()
        return self._prediction

    def _begin_graph(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        self._graphs[-1].capture_begin(pool=self._pool)

    def _blocks_and_cut(self, blocks: Sequence[Any], x: Tensor, span: Span, view: View, seen: int) -> Tensor:
        x = self._blocks(blocks, x, span, view, seen)
        if self._graphs:  # while capturing
            self._graphs[-1].capture_end()
            self._begin_graph()
        return x

    def _step(self) -> Prediction:
        cache = self.cache
        prediction, after = advance(self.model, cache, self.ids, self.active, widths=self.widths, parts=self.parts)
        for span, new in zip(cache.spans, after.spans, strict=True):
            torch.add(new.used, 0, out=span.used)  # a kernel: a copy would be a slower kind of node
        torch.add(after.n_tokens, 0, out=cache.n_tokens)
        return prediction


def widths_within(config: ModelConfig, most: int) -> tuple[int, ...]:
    """The width of a step in each span, a power of two, if no bubble has more than `most` streams."""
    bound = 1 << (max(most, 1) - 1).bit_length()
    forks_passed = range(1 if config.fork_layers[:1] == (0,) else 0, len(config.fork_layers) + 1)
    return tuple(min(config.copies * 2**n, max(bound, config.copies)) for n in forks_passed)
