"""The transformer block: GPT-2's pre-norm block with rotary positions, whose updates are gated by the scores P.

    x ← x + P · Attention(LayerNorm(x)),    x ← x + P · MLP(LayerNorm(x))

P is one number from 0 to 1 per stream, given by the fork layers (fork.py). Before the first of them every score is 1,
and this is exactly a plain GPT block. Each addition is fused with the LayerNorm after it (on a GPU, into one kernel):
an update stays pending in `Residual` until the next norm adds it. The last update of a block is added by the next
block; before a fork layer, and after the last block, the model adds it (`apply_update`), so it meets its own scores.

`block="modern"` has RMSNorm, SwiGLU and normalised queries and keys instead: a stronger baseline, without kernels of
ours.
"""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thoughtbubbles import kernels
from thoughtbubbles.kernels import ops
from thoughtbubbles.model.attention import EPSILON, Attention, AttentionPath, Update
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.layout import Layout, Originals
from thoughtbubbles.model.linear import Linear, product_dtype


class Residual(NamedTuple):
    """The residual streams x, and the pending update of attention or MLP, which has not been added yet."""

    x: Float[Tensor, "B S D"]
    update: Update | None = None
    # Only every second norm saves its sum for the backward; the one between finds it again as x + P · update.
    is_saved: bool = False
    kept: Float[Tensor, "3 B N S H"] | None = None  # queries, keys and values of the block before, if asked for

    def add(self, update: Update) -> "Residual":
        """Pending: the next norm adds it."""
        assert self.update is None, "a norm comes between two updates"
        return Residual(self.x, update, self.is_saved)

    def total(self, gate: Float[Tensor, "B S"] | None) -> Float[Tensor, "B S D"]:
        if self.update is None:
            return self.x
        update = self.update.with_bias()
        return self.x + (update if gate is None else update * gate[..., None]).to(self.x.dtype)


class AddNorm(nn.LayerNorm):
    """Adds the pending update, then applies LayerNorm; both are computed in at least the dtype of the streams."""

    def forward(  # type: ignore[override]
        self, residual: Residual, gate: Float[Tensor, "B S"] | None
    ) -> tuple[Float[Tensor, "B S D"], Residual]:
        """Returns LayerNorm(x) (from the kernel, in the dtype of the products) and x, with the update added."""
        x, dtype = residual.x, product_dtype(residual.x)
        if kernels.for_blocks(x.device, dtype):
            update, update_bias = (None, None) if residual.update is None else residual.update
            x, normed = ops.add_norm(
                x, update, update_bias=update_bias, gate=gate, weight=self.weight, bias=self.bias, eps=self.eps,
                dtype=dtype, save_sum=not residual.is_saved,
            )  # fmt: skip
            return normed, Residual(x, is_saved=not residual.is_saved)
        x = residual.total(gate)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps), Residual(x)


class AddRMSNorm(nn.RMSNorm):
    """Adds the pending update, then applies RMSNorm."""

    def forward(  # type: ignore[override]
        self, residual: Residual, gate: Float[Tensor, "B S"] | None
    ) -> tuple[Float[Tensor, "B S D"], Residual]:
        x = residual.total(gate)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps), Residual(x)


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = Linear(config.width, 2 * config.hidden)  # the gate, then what it multiplies
        self.down = Linear(config.hidden, config.width)

    def forward(self, x: Float[Tensor, "B S D"]) -> Update:
        gate, hidden = self.up(x).chunk(2, dim=-1)
        return Update(self.down(F.silu(gate) * hidden))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.form = config.form
        self.up = Linear(config.width, config.hidden)
        self.down = Linear(config.hidden, config.width)

    def forward(self, x: Float[Tensor, "B S D"]) -> Update:
        if self.form.tanh_gelu:
            return Update(self.down(F.gelu(self.up(x), approximate="tanh")))
        if kernels.for_blocks(x.device, product_dtype(x)):
            # A copy of the bias: the next block uses it, when a sharded model may have freed this block's weights.
            return Update(self.down.product(ops.gelu(self.up.product(x), self.up.bias)), self.down.bias.clone())
        return Update(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        is_modern = config.block == "modern"
        self.attention_norm = AddRMSNorm(config.width, eps=EPSILON) if is_modern else AddNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = AddRMSNorm(config.width, eps=EPSILON) if is_modern else AddNorm(config.width)
        self.mlp = SwiGLU(config) if is_modern else MLP(config)

    def forward(
        self,
        residual: Residual,
        layout: Layout,
        path: AttentionPath,
        originals: Originals | None = None,
        *,
        keep: bool = False,
    ) -> Residual:
        """`originals`, `keep`: for forks that go through the block after its originals (feedback.py)."""
        normed, residual = self.attention_norm(residual, layout.gate)
        update, kept = self.attention(normed, layout, path, originals, keep=keep)
        normed, residual = self.mlp_norm(residual.add(update), layout.gate)
        return Residual(residual.x, self.mlp(normed), residual.is_saved, kept)
