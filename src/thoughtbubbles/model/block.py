"""The transformer block: GPT-2's, with rotary positions and score-attenuated writes.

    x ← x + P · Attention(LayerNorm(x)),    x ← x + P · MLP(LayerNorm(x))

Before the first fork layer every score P is 1 and this is exactly a plain GPT block. Each write belongs to the norm
behind it, so that a kernel can do both in one pass over the streams. So a block leaves its last update unwritten
(`pending`) to the next block, and whoever needs the streams themselves writes it (`write`).
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thoughtbubbles.model import kernels
from thoughtbubbles.model.attention import Attention, AttentionPath, Attenuation, Update
from thoughtbubbles.model.linear import Linear, product_dtype
from thoughtbubbles.model.rope import Rotation


class MLP(nn.Module):
    def __init__(self, width: int, *, tanh_gelu: bool = False):
        super().__init__()
        self.tanh_gelu = tanh_gelu
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Float[Tensor, "B S D"]) -> Update:
        if self.tanh_gelu:
            return Update(self.down(F.gelu(self.up(x), approximate="tanh")))
        if kernels.serve(x, product_dtype(x)):
            from thoughtbubbles.model.kernels.gelu import gelu

            # A copy of the bias: the next block uses it, when a sharded model may have let go of this one's weights.
            return Update(self.down.product(gelu(self.up.product(x), self.up.bias)), self.down.bias.clone())
        return Update(self.down(F.gelu(self.up(x))))


class Norm(nn.LayerNorm):
    """A write and the LayerNorm behind it, in the streams' own dtype whatever its weights have (a sharded model's)."""

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "B S D"], update: Update | None, by: Attenuation, *, keep_written: bool = True
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B S D"]]:
        """The streams with the update written into them, and their norm.

        keep_written  what a kernel keeps for its backward: the streams after the write, or before it
        """
        dtype = product_dtype(x)
        if kernels.serve(x, dtype):
            from thoughtbubbles.model.kernels.norm import write_norm

            value, shift = update or (None, None)
            return write_norm(
                x, value, shift=shift, score=by.write, weight=self.weight, bias=self.bias, eps=self.eps,
                dtype=dtype, keep_written=keep_written,
            )  # fmt: skip
        x = write(x, update, by)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return x, F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    def __init__(self, width: int, n_head: int, *, score_channel: bool = False, tanh_gelu: bool = False):
        super().__init__()
        self.attention_norm = Norm(width)
        self.attention = Attention(width, n_head, score_channel=score_channel)
        self.mlp_norm = Norm(width)
        self.mlp = MLP(width, tanh_gelu=tanh_gelu)

    def forward(
        self, x: Float[Tensor, "B S D"], pending: Update | None, turn: Rotation, by: Attenuation, path: AttentionPath
    ) -> tuple[Float[Tensor, "B S D"], Update, Float[Tensor, "B N S S"] | None]:
        """The streams, the update still to be written into them, and the attention weights if the path keeps them."""
        x, h = self.attention_norm(x, pending, by)
        update, weights = self.attention(h, turn, by, path)
        # The streams between the two writes are what this norm starts from, and the first one keeps them.
        x, h = self.mlp_norm(x, update, by, keep_written=False)
        return x, self.mlp(h), weights


def write(x: Float[Tensor, "B S D"], update: Update | None, by: Attenuation) -> Float[Tensor, "B S D"]:
    if update is None:
        return x
    value = update.value if update.shift is None else update.value + update.shift
    return x + (value if by.write is None else value * by.write[..., None]).to(x.dtype)
