"""GPU kernels, each beside a plain twin that says what it computes. Nothing here is needed to run a model.

attention, gelu, loss, fork    for a step of training
decode                         for a step of writing
"""

from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None


def serve(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether our kernels take what products with x give: half precision (`dtype`) on a GPU."""
    return x.is_cuda and HAS_TRITON and dtype in (torch.bfloat16, torch.float16)
