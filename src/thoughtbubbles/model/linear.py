"""A linear layer y = x Wᵀ + b for mixed precision.

Autocast rounds both factors to bfloat16. A persistent bfloat16 copy of W improves on that in two ways: the copy is
reused until the weights change, and the gradient of W, a sum over all streams, is computed in W's own dtype instead of
being rounded to bfloat16.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thoughtbubbles.model.gradients import product_with_copy

# OpenBLAS, torch's library on ARM, takes longer for one product of 2 or 3 rows than for as many products of one row.
FEW_ROWS = () if torch.backends.mkl.is_available() else (2, 3)


class Linear(nn.Linear):
    bf16_copy: Tensor | None = None  # created and updated in training (train/precision.py); never saved

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"]:
        if self.bf16_copy is None:
            return linear(x, self.weight, self.bias)
        return product_with_copy(x, self.weight, self.bias, self.bf16_copy)

    def product(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"]:
        """x Wᵀ without the bias, for kernels that fuse the bias with other work."""
        if self.bf16_copy is None:
            return F.linear(x, self.weight)
        return product_with_copy(x, self.weight, None, self.bf16_copy)


def linear(
    x: Float[Tensor, "*rows K"], weight: Float[Tensor, "M K"], bias: Float[Tensor, "M"] | None = None
) -> Float[Tensor, "*rows M"]:
    """`F.linear`, faster for the few rows of a decoding step on a CPU."""
    n_rows = x.numel() // x.shape[-1]
    if n_rows in FEW_ROWS and not torch.is_grad_enabled() and x.device.type == "cpu":
        rows = [F.linear(row, weight, bias) for row in x.reshape(n_rows, -1)]
        return torch.stack(rows).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with x: they follow autocast, which never changes float64."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype
