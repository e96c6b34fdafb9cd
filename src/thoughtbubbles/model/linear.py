"""A linear map y = x Wᵀ + b for mixed precision.

Under autocast both factors are rounded to bfloat16 first. With a bfloat16 copy of W at hand, two things are better than
what autocast does by itself: the copy serves many calls, until the weights change; and the gradient of W, a sum over
all streams, leaves its product in W's own dtype instead of being rounded on the way.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thoughtbubbles.model.gradients import product_with_copy


class Linear(nn.Linear):
    bf16_copy: Tensor | None = None  # kept and renewed by whoever trains (train/precision.py); never saved

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"]:
        if self.bf16_copy is None:
            return super().forward(x)
        return product_with_copy(x, self.weight, self.bias, self.bf16_copy)

    def product(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"]:
        """x Wᵀ alone, for a kernel that adds the bias while it does something else."""
        if self.bf16_copy is None:
            return F.linear(x, self.weight)
        return product_with_copy(x, self.weight, None, self.bf16_copy)


def product_dtype(x: Tensor) -> torch.dtype:
    """Of matrix products with x: they follow autocast, which leaves float64 alone everywhere."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype
