"""GPU kernels in Triton, and the one place that decides where they are available.

No kernel is needed to run a model: every one has a reference implementation in model/ or train/ that defines what it
computes. ops.py registers the operators that models call.

    attention, rotary, norm, gelu, sums    a block, forward and backward
    reach                                  its attention if forks are visible to near tokens only
    fork, loss                             the decisions of a fork layer; the mixture loss
    adamw                                  the optimizer step
    decode, chunk                          a decoding step: blocks on few rows, over a KV cache; chunks of prompts
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

HAS_TRITON = find_spec("triton") is not None
HALF = (torch.bfloat16, torch.float16)
ATTENTION_HEAD_SIZES = (16, 32, 64, 128)
DECODING_HEAD_SIZES = (32, 64, 128)
DECODING_CHANNELS = 64  # the width must be a multiple of this
MOST_STREAMS_PER_BUBBLE = 1024  # a program of the loss holds a few numbers per stream in registers
# Options of every torch.compile: how sums are computed is chosen by rule. By default each process times several ways,
# takes the fastest, and so differs from others in the last bits. A global setting would not do: Dynamo switches it off
# after the first compilation.
CHOSEN_BY_RULE: dict[str, Any] = {"deterministic": True}
_enabled = True


def available(device: torch.device | str) -> bool:
    """Whether our kernels run on this device at all: a GPU, with Triton, and not disabled."""
    return HAS_TRITON and _enabled and torch.device(device).type == "cuda"


def for_blocks(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Residual add with LayerNorm, and bias with GELU, if matrix products (`dtype`) are in half precision."""
    return available(device) and dtype in HALF


def for_attention(device: torch.device | str, dtype: torch.dtype, *, head_size: int) -> bool:
    return for_blocks(device, dtype) and head_size in ATTENTION_HEAD_SIZES


def for_loss(device: torch.device | str, score_dtype: torch.dtype, *, max_bubble: int) -> bool:
    return available(device) and score_dtype == torch.float32 and max_bubble <= MOST_STREAMS_PER_BUBBLE


def for_adamw(parameters: Iterable[torch.Tensor]) -> bool:
    return all(available(p.device) and p.dtype == torch.float32 and p.is_contiguous() for p in parameters)


def for_decoding(device: torch.device | str, dtype: torch.dtype, *, width: int, head_size: int) -> bool:
    """On NVIDIA GPUs, in half precision, for widths that are multiples of a tile (all of the paper's are)."""
    has_shape = width % DECODING_CHANNELS == 0 and head_size in DECODING_HEAD_SIZES
    return available(device) and torch.version.cuda is not None and dtype in HALF and has_shape


@contextmanager
def disabled() -> Iterator[None]:
    """Uses only reference implementations, for comparison."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before
