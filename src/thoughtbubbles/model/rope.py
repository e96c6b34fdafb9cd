"""Rotary position embedding (RoPE) at real-valued positions (the paper's partial rotation).

Channel i is paired with channel i + H/2 and the pair is rotated by the angle position · 10000^(−2i/H). Positions in a
plain GPT are integers; a fork of token k is at k − p/q, between token k − 1 and token k.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

BASE = 10000.0


class Rotary(NamedTuple):
    """Cosines and sines for given positions."""

    cos: Float[Tensor, "B 1 S H/2"]
    sin: Float[Tensor, "B 1 S H/2"]


def rotary(position: Float[Tensor, "B S"], head_size: int) -> Rotary:
    channel = torch.arange(0, head_size, 2, device=position.device, dtype=position.dtype)
    frequency = BASE ** (-channel / head_size)
    angle = position[:, None, :, None] * frequency
    return Rotary(angle.cos(), angle.sin())


def rotate(x: Float[Tensor, "B N S H"], tables: Rotary) -> Float[Tensor, "B N S H"]:
    left, right = x.chunk(2, dim=-1)
    cos, sin = tables
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
