"""Rotary position embedding at real-valued positions (the paper's partial rotation).

Channel i is paired with channel i + H/2 and the pair is turned by the angle position · 10000^(−2i/H). A plain GPT has
whole positions; a fork stands at k − p/q, between its token and the one before. Token 0 stands at 0 (at 1 where the
authors' weights want it so).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

BASE = 10000.0


class Rotation(NamedTuple):
    """Tables for one arrangement of streams; they serve every block up to the next fork layer."""

    cos: Float[Tensor, "B 1 S H/2"]
    sin: Float[Tensor, "B 1 S H/2"]


def rotation(position: Float[Tensor, "B S"], head_size: int, *, first: int = 0) -> Rotation:
    if first:
        position = position + first
    channel = torch.arange(0, head_size, 2, device=position.device, dtype=position.dtype)
    frequency = BASE ** (-channel / head_size)
    angle = position[:, None, :, None] * frequency
    return Rotation(angle.cos(), angle.sin())


def rotate(x: Float[Tensor, "B N S H"], by: Rotation) -> Float[Tensor, "B N S H"]:
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat([left * by.cos - right * by.sin, right * by.cos + left * by.sin], dim=-1)
    return turned.to(x.dtype)
