"""A linear map y = x Wᵀ + b whose product may be narrower than its weights.

Under autocast both factors are rounded to bfloat16 first. With a rounded copy of W at hand (`narrow`), two things are
better than what autocast does by itself: the copy serves many calls, until the weights change; and the gradient of W,
a sum over all streams, leaves its product in W's own dtype instead of being rounded on the way.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Linear(nn.Linear):
    narrow: Tensor | None = None  # kept and renewed by whoever trains (train/precision.py); never saved

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"]:
        if self.narrow is None:
            return super().forward(x)
        return _NarrowProduct.apply(x.to(self.narrow.dtype), self.weight, self.bias, self.narrow)

    def product(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"]:
        """x Wᵀ alone, for a kernel that adds the bias while it does something else."""
        if self.narrow is None:
            return F.linear(x, self.weight)
        return _NarrowProduct.apply(x.to(self.narrow.dtype), self.weight, None, self.narrow)


def product_dtype(x: Tensor) -> torch.dtype:
    """Of matrix products with x: they follow autocast, which leaves float64 alone everywhere."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _NarrowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, narrow: Tensor) -> Tensor:
        ctx.save_for_backward(x, narrow)
        ctx.wide, ctx.has_bias = weight.dtype, bias is not None
        return F.linear(x, narrow, None if bias is None else bias.to(narrow.dtype))

    @staticmethod
    @once_differentiable  # the copy is a constant: a second derivative would miss the weight
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, narrow = ctx.saved_tensors
        rows, x = upstream.reshape(-1, upstream.shape[-1]), x.reshape(-1, x.shape[-1])
        bias = rows.sum(0, dtype=ctx.wide) if ctx.has_bias else None
        return upstream @ narrow, _wide_product(rows.T, x, ctx.wide), bias, None


def _wide_product(a: Float[Tensor, "M K"], b: Float[Tensor, "K N"], dtype: torch.dtype) -> Float[Tensor, "M N"]:
    """a @ b in `dtype`; only the CPU rounds to the factors' own dtype on the way."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
