"""Score-attenuated causal attention: a reference path, and a fused path that computes the same function.

    weights = softmax over keys of (c · q·k + bias_key),    out = Σ weights · (P_key · v),    c = 1/√H

The paper's bias is c · log P. `reference_attention` materialises the matrix. `fused_attention` uses a stock flash
kernel, which takes no bias: q and k get 8 extra channels, two of which hold the bias in k, as a high and a low part so
that bfloat16 keeps it, and ones in q. No channel of q·k is lost, and nothing of size S × S is stored. In half precision
on a GPU the fused path is our own kernel, which adds the bias in registers (kernels/attention.py).

The authors' code puts log P in the last channel of k, and 1 in the last channel of q, so their bias replaces a channel
of q·k. `Form.score_channel` reproduces this: the last channel is left out of q·k, and the bias is added as usual.

With `fork_reach`, a stream sees forks of near tokens only: both paths then take an explicit mask (`Layout.visible`).

With `head_gate`, each head's output is multiplied by σ(w·x + b) before the output projection: one number per head and
stream, where x is the block's normalised input ("Gated Attention for Large Language Models", Qiu et al. 2025).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from thoughtbubbles import kernels
from thoughtbubbles.kernels import ops
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.layout import Layout, Originals
from thoughtbubbles.model.linear import Linear, product_dtype
from thoughtbubbles.model.rope import rotate
from thoughtbubbles.model.streams import at_least_float32

EPSILON = 1e-5  # of RMSNorm, as of LayerNorm
EXTRA_CHANNELS = 8  # two are needed; flash kernels require head sizes that are multiples of 8


class Update(NamedTuple):
    """What attention or an MLP adds to the residual, before it is multiplied by the score."""

    value: Float[Tensor, "B S D"]
    bias: Float[Tensor, "D"] | None = None  # not added to `value` yet, if a kernel adds it later

    def with_bias(self) -> Float[Tensor, "B S D"]:
        return self.value if self.bias is None else self.value + self.bias


def attention_weights(
    q: Float[Tensor, "B N S H"], k: Float[Tensor, "B N K H"], layout: Layout
) -> Float[Tensor, "B N S K"]:
    """The explicit matrix, in at least float32."""
    assert layout.reach is None or layout.visible is not None
    with torch.autocast(q.device.type, enabled=False):
        logits = at_least_float32(q) @ at_least_float32(k).mT / math.sqrt(q.shape[-1])
        if layout.key_bias is not None:
            logits = logits + layout.key_bias[:, None, None, :]
        if layout.visible is not None:
            hidden = ~layout.visible[:, None]
        else:  # streams are ordered by token, so what is causal in streams is causal in tokens
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return logits.masked_fill(hidden, -math.inf).softmax(dim=-1)


def reference_attention(
    q: Float[Tensor, "B N S H"], k: Float[Tensor, "B N K H"], v: Float[Tensor, "B N K H"], layout: Layout
) -> Float[Tensor, "B N S H"]:
    weights = attention_weights(q, k, layout)
    with torch.autocast(q.device.type, enabled=False):
        return (weights @ at_least_float32(gated(v, layout))).to(v.dtype)


def fused_attention(
    q: Float[Tensor, "B N S H"], k: Float[Tensor, "B N K H"], v: Float[Tensor, "B N K H"], layout: Layout
) -> Float[Tensor, "B N S H"]:
    """The same function on the flash kernel of `scaled_dot_product_attention`."""
    head_size = q.shape[-1]
    assert layout.reach is None or layout.visible is not None
    v = gated(v, layout)
    if layout.key_bias is not None:
        bias = layout.key_bias * math.sqrt(head_size)  # the kernel divides by √H
        carried = F.pad(torch.stack(_in_two(bias, k.dtype), dim=-1), (0, EXTRA_CHANNELS - 2))
        k = torch.cat([k, carried[:, None].expand(-1, k.shape[1], -1, -1)], dim=-1)
        q = F.pad(F.pad(q, (0, 2), value=1.0), (0, EXTRA_CHANNELS - 2))
        v = F.pad(v, (0, EXTRA_CHANNELS))  # flash kernels require one head size for q, k and v
    visible = None if layout.visible is None else layout.visible[:, None]
    scale = 1 / math.sqrt(head_size)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale)
    return out[..., :head_size]


def _in_two(bias: Float[Tensor, "B S"], dtype: torch.dtype) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """The bias as a sum of two low-precision numbers: its leading bits, and the remainder, which has the gradient.

    Bits are cut off as integers. A cast to bfloat16 and back would do in eager mode, but compiled code may skip it,
    and the remainder would be 0.
    """
    if bias.dtype == dtype:
        return torch.zeros_like(bias), bias
    high = (bias.detach().view(torch.int32) & -(1 << 16)).view(torch.float32)  # the 16 bits of a bfloat16
    return high.to(dtype), (bias - high).to(dtype)


def recording_attention(kept: list[Tensor]) -> "AttentionPath":
    """The reference path, which also appends each block's attention weights to `kept`."""

    def path(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        kept.append(attention_weights(q, k, layout))
        return reference_attention(q, k, v, layout)

    return path


def gated(v: Float[Tensor, "B N S H"], layout: Layout) -> Float[Tensor, "B N S H"]:
    return v if layout.value_gate is None else (v * layout.value_gate[:, None, :, None]).to(v.dtype)


def with_originals(layout: Layout, originals: Originals) -> Layout:
    """Of forks, whose keys come after those of the originals; all values are gated already."""
    key_bias = None
    if layout.key_bias is not None and originals.key_bias is not None:
        key_bias = torch.cat([originals.key_bias, layout.key_bias], dim=1)
    return Layout(layout.rotary, key_bias, None, layout.gate, layout.least_bias, layout.reach, layout.visible)


AttentionPath = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]
PATHS: dict[str, AttentionPath] = {"reference": reference_attention, "fused": fused_attention}


class Attention(torch.nn.Module):
    """Input and output projections around an attention path. Each head is a contiguous slice of the width."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_head, self.head_size, self.form = config.n_head, config.head_size, config.form
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)
        self.gate = Linear(config.width, config.n_head) if config.head_gate else None
        is_modern = config.block == "modern"
        self.query_norm = torch.nn.RMSNorm(config.head_size, eps=EPSILON) if is_modern else None
        self.key_norm = torch.nn.RMSNorm(config.head_size, eps=EPSILON) if is_modern else None

    def has_kernel(self, x: Float[Tensor, "B S D"]) -> bool:
        is_available = kernels.for_attention(x.device, product_dtype(x), head_size=self.head_size)
        return is_available and not self.form.score_channel and self.query_norm is None

    def takes_kernel(self, x: Float[Tensor, "B S D"], path: AttentionPath) -> bool:
        return path is fused_attention and self.has_kernel(x)

    def forward(
        self,
        x: Float[Tensor, "B S D"],
        layout: Layout,
        path: AttentionPath,
        originals: Originals | None = None,
        *,
        keep: bool = False,
    ) -> tuple[Update, Float[Tensor, "3 B N S H"] | None]:
        """The update, and with `keep` also queries, keys and values. With `originals`, x are forks, which see them."""
        heads, kept = self.heads(x, layout, path, originals, keep=keep)
        heads = self.gate_heads(heads, x)
        if self.takes_kernel(x, path):
            return Update(self.out.product(heads), self.out.bias), kept
        return Update(self.out(heads)), kept

    def heads(
        self, x: Float[Tensor, "B S D"], layout: Layout, path: AttentionPath, originals: Originals | None, *, keep: bool
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "3 B N S H"] | None]:
        if self.takes_kernel(x, path):
            # Our kernel also adds the bias of the projection (`product` is without it) and rotates q and k.
            token, up_to, reach = layout.reach or (None, None, None)
            far, far_bias = originals or (None, None)
            assert reach is None or not keep, "the kernels with a reach take no gradient of what is kept"
            heads, rotated = ops.attention(
                self.qkv.product(x), self.qkv.bias, *layout.rotary, key_bias=layout.key_bias,
                value_gate=layout.value_gate, n_head=self.n_head, least_bias=layout.least_bias,
                token=token, up_to=up_to, reach=reach, far=far, far_bias=far_bias,
            )  # fmt: skip
            return heads, rotated if keep else None
        q_and_k, v = (
            self.qkv(x)
            .unflatten(-1, (3 * self.n_head, -1))
            .transpose(1, 2)
            .split((2 * self.n_head, self.n_head), dim=1)
        )
        if self.query_norm is not None and self.key_norm is not None:
            both = zip(q_and_k.chunk(2, dim=1), (self.query_norm, self.key_norm), strict=True)
            normed = [F.rms_norm(x, x.shape[-1:], norm.weight.to(x.dtype), EPSILON) for x, norm in both]
            q_and_k = torch.cat(normed, dim=1)
        q, k = rotate(q_and_k, layout.rotary).chunk(2, dim=1)
        if self.form.score_channel:
            q = F.pad(q[..., :-1], (0, 1))  # zero, so that it is left out of q·k
        kept = torch.stack([q, k, gated(v, layout)]) if keep else None
        if originals is not None:
            _, keys, values = originals.kept
            k, v = torch.cat([keys, k], dim=2), torch.cat([values, gated(v, layout)], dim=2)
            layout = with_originals(layout, originals)
        return path(q, k, v, layout).transpose(1, 2).flatten(2), kept

    def gate_heads(self, heads: Float[Tensor, "*rows D"], x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """The heads times their gates, which are computed from x; unchanged without `head_gate`."""
        if self.gate is None:
            return heads
        gate = self.gate(x).sigmoid()
        return (heads.unflatten(-1, (self.n_head, -1)) * gate[..., None]).flatten(-2)
