"""Score-attenuated causal attention: one clear path and one fused path, with the same signature.

    weights = softmax over keys of (c · q·k + bias_key),    out = Σ weights · (P_key · v),    c = 1/√H

The paper's bias is c · log P. `reference` writes the matrix out. `fused` runs on a stock flash kernel, which takes no
bias: q and k grow by 8 channels, two of which carry the bias as a high and a low part (so that bfloat16 keeps it), with
ones on the query's side. No channel of q·k is lost, and nothing of size S × S is stored. In half precision on a GPU the
fused path is a kernel of our own, which adds the bias in registers (model/kernels/attention.py).

The authors' code carries log P in the last channel of k, with a 1 in that of q: there the bias does cost a channel of
q·k. `score_channel` is that form. It leaves the last channel out of q·k, and the bias is added as always.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from thoughtbubbles.model import kernels
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.fork import FLOOR
from thoughtbubbles.model.linear import Linear, product_dtype
from thoughtbubbles.model.rope import Rotation, rotate
from thoughtbubbles.model.streams import wide

EXTRA_CHANNELS = 8  # two are needed; kernels want head sizes in eighths
KERNEL_HEAD_SIZES = (16, 32, 64, 128)  # that our own kernel takes


class Attenuation(NamedTuple):
    """How the scores weaken a block; it serves every block up to the next fork layer. None: not at all."""

    key_bias: Float[Tensor, "B S"] | None = None  # added to the scaled logits
    value: Float[Tensor, "B S"] | None = None  # multiplies the values
    write: Float[Tensor, "B S"] | None = None  # multiplies what is written into the stream
    least_bias: float = -math.inf  # a lower bound of key_bias that is known from the config


class Update(NamedTuple):
    """What attention or an MLP has to write into the streams, before the scores weaken it."""

    value: Float[Tensor, "B S D"]
    shift: Float[Tensor, "D"] | None = None  # still to be added everywhere: a bias that is left to the writing kernel


def attenuation(log_score: Float[Tensor, "B S"], config: ModelConfig) -> Attenuation:
    score = log_score.exp()
    scale = 1 / math.sqrt(config.head_size) if config.score_scale == "head" else 1.0
    return Attenuation(
        key_bias=log_score * scale if config.gate_qk else None,
        value=score if config.gate_v else None,
        write=score if config.gate_residual else None,
        least_bias=FLOOR * len(config.fork_layers) * scale,
    )


def reference_attention(
    q: Float[Tensor, "B N S H"],
    k: Float[Tensor, "B N S H"],
    v: Float[Tensor, "B N S H"],
    by: Attenuation,
) -> tuple[Float[Tensor, "B N S H"], Float[Tensor, "B N S S"] | None]:
    """The explicit matrix, and the attention weights as second result."""
    with torch.autocast(q.device.type, enabled=False):
        logits = wide(q) @ wide(k).mT / math.sqrt(q.shape[-1])
        if by.key_bias is not None:
            logits = logits + by.key_bias[:, None, None, :]
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = logits.masked_fill(future, -math.inf).softmax(dim=-1)
        return (weights @ wide(attenuated(v, by))).to(v.dtype), weights


def fused_attention(
    q: Float[Tensor, "B N S H"],
    k: Float[Tensor, "B N S H"],
    v: Float[Tensor, "B N S H"],
    by: Attenuation,
) -> tuple[Float[Tensor, "B N S H"], Float[Tensor, "B N S S"] | None]:
    """The same on `scaled_dot_product_attention`'s flash kernel; it keeps no weights."""
    head_size = q.shape[-1]
    v = attenuated(v, by)
    if by.key_bias is not None:
        bias = by.key_bias * math.sqrt(head_size)  # the kernel will divide by √H
        carried = F.pad(torch.stack(_in_two(bias, k.dtype), dim=-1), (0, EXTRA_CHANNELS - 2))
        k = torch.cat([k, carried[:, None].expand(-1, k.shape[1], -1, -1)], dim=-1)
        q = F.pad(F.pad(q, (0, 2), value=1.0), (0, EXTRA_CHANNELS - 2))
        v = F.pad(v, (0, EXTRA_CHANNELS))  # flash kernels want one head size for all three
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(head_size))
    return out[..., :head_size], None


def _in_two(bias: Float[Tensor, "B S"], dtype: torch.dtype) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """The bias as a sum of two numbers of a narrower dtype: its leading bits, and the rest (which has the gradient).

    The bits are cut off as integers. A cast to bfloat16 and back would do in eager mode, but compiled code may skip it,
    and then nothing is left for the rest.
    """
    if bias.dtype == dtype:
        return torch.zeros_like(bias), bias
    high = (bias.detach().view(torch.int32) & -(1 << 16)).view(torch.float32)
    return high.to(dtype), (bias - high).to(dtype)


def attenuated(v: Float[Tensor, "B N S H"], by: Attenuation) -> Float[Tensor, "B N S H"]:
    return v if by.value is None else (v * by.value[:, None, :, None]).to(v.dtype)


AttentionPath = Callable[[Tensor, Tensor, Tensor, Attenuation], tuple[Tensor, Tensor | None]]
PATHS: dict[str, AttentionPath] = {"reference": reference_attention, "fused": fused_attention}


class Attention(torch.nn.Module):
    """Projections around an attention path. Heads are contiguous in the width."""

    def __init__(self, width: int, n_head: int, *, score_channel: bool = False):
        super().__init__()
        self.n_head, self.head_size, self.score_channel = n_head, width // n_head, score_channel
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)

    def has_kernel(self, x: Float[Tensor, "B S D"]) -> bool:
        has_shape = self.head_size in KERNEL_HEAD_SIZES and not self.score_channel
        return has_shape and kernels.serve(x, product_dtype(x))

    def forward(
        self, x: Float[Tensor, "B S D"], turn: Rotation, by: Attenuation, path: AttentionPath
    ) -> tuple[Update, Float[Tensor, "B N S S"] | None]:
        """What to write into the streams, and the attention weights if the path keeps them."""
        if path is fused_attention and self.has_kernel(x):
            from thoughtbubbles.model.kernels.attention import attend

            heads = attend(
                self.qkv.product(x), self.qkv.bias, *turn, key_bias=by.key_bias, value=by.value, n_head=self.n_head,
                least_bias=by.least_bias,
            )  # fmt: skip
            return Update(self.out.product(heads), self.out.bias), None
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        q, k = rotate(q, turn), rotate(k, turn)
        if self.score_channel:
            q = F.pad(q[..., :-1], (0, 1))
        heads, weights = path(q, k, v, by)
        return Update(self.out(heads.transpose(1, 2).flatten(2))), weights
