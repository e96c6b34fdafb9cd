"""The blocks of a span on the kernels for decoding: of a step in a graph (graph.py), and of chunks (packed.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from thoughtbubbles import kernels
from thoughtbubbles.generate.cache import Span
from thoughtbubbles.model.config import OURS
from thoughtbubbles.model.transformer import Thoughtbubbles

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def has_kernels(model: Thoughtbubbles) -> bool:
    """Whether the decoding kernels support this model: they have GPT-2's blocks in our form."""
    weight, config = model.embedding.weight, model.config
    is_available = kernels.for_decoding(weight.device, weight.dtype, width=config.width, head_size=config.head_size)
    return is_available and config.form == OURS and config.block == "gpt2"


def fast_blocks(
    blocks: Sequence[Any], x: Float[Tensor, "M D"], span: Span, gate: Float[Tensor, "M"] | None, attend: Attend
) -> Float[Tensor, "M D"]:
    """`attend(qkv, key, value, head_gate)` gives the heads' outputs of a block, over its part of the cache."""
    with torch.cuda.device_of(x):  # kernels launch on the current GPU
        return _run(blocks, x, span, gate, attend)


def _run(blocks: Sequence[Any], x: Tensor, span: Span, gate: Tensor | None, attend: Attend) -> Tensor:
    from thoughtbubbles.kernels.decode import add_norm, linear, partial_linear, two_linear

    parts, bias = None, blocks[0].mlp.down.bias
    for block, key, value in zip(blocks, span.key, span.value, strict=True):
        attention, mlp = block.attention, block.mlp
        x, h = add_norm(x, parts, bias, gate, block.attention_norm)
        qkv, head_gate = two_linear(h, attention.qkv, attention.gate)
        parts = partial_linear(attend(qkv, key, value, head_gate), attention.out.weight)
        x, h = add_norm(x, parts, attention.out.bias, gate, block.mlp_norm)
        hidden = linear(h, mlp.up.weight, mlp.up.bias, gelu=True)
        parts, bias = partial_linear(hidden, mlp.down.weight), mlp.down.bias
    x, _ = add_norm(x, parts, bias, gate, blocks[-1].mlp_norm)
    return x
