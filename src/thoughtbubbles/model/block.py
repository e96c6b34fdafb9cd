"""The transformer block: GPT-2's, with rotary positions and score-attenuated writes.

    x ← x + P · Attention(LayerNorm(x)),    x ← x + P · MLP(LayerNorm(x))

Before the first fork layer every score P is 1 and this is exactly a plain GPT block.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thoughtbubbles.model import kernels
from thoughtbubbles.model.attention import Attention, AttentionPath, Attenuation
from thoughtbubbles.model.linear import Linear, product_dtype
from thoughtbubbles.model.rope import Rotation


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        if kernels.serve(x, product_dtype(x)):
            from thoughtbubbles.model.kernels.gelu import gelu

            return self.down(gelu(self.up.product(x), self.up.bias))
        return self.down(F.gelu(self.up(x)))


class Norm(nn.LayerNorm):
    """LayerNorm in the streams' own dtype, whatever its weights are held in (bfloat16 in a sharded model)."""

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    def __init__(self, width: int, n_head: int):
        super().__init__()
        self.attention_norm = Norm(width)
        self.attention = Attention(width, n_head)
        self.mlp_norm = Norm(width)
        self.mlp = MLP(width)

    def forward(
        self, x: Float[Tensor, "B S D"], turn: Rotation, by: Attenuation, path: AttentionPath
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B N S S"] | None]:
        """The streams after the block, and the attention weights if the path keeps them."""
        update, weights = self.attention(self.attention_norm(x), turn, by, path)
        x = write(x, update, by)
        x = write(x, self.mlp(self.mlp_norm(x)), by)
        return x, weights


def write(x: Float[Tensor, "B S D"], update: Float[Tensor, "B S D"], by: Attenuation) -> Float[Tensor, "B S D"]:
    return x + (update if by.write is None else (update * by.write[..., None]).to(x.dtype))
