"""Hand-written gradients, where autograd's own would be slower, take more memory, or differ from run to run.

Each function computes what its docstring says; autograd of the plain formula gives the same gradients, and the tests
compare the two.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from thoughtbubbles.model.streams import at_least_float32, bubble_scan, bubble_sizes, streams_up_to, take, take_or_zero

UNROLLED = 16  # bubbles up to this size are summed stream by stream; larger ones by a scan over the row

# The score heads of a fork layer


def norm_and_project(
    x: Float[Tensor, "B S D"], norm: nn.LayerNorm, weight: Float[Tensor, "2 D"]
) -> Float[Tensor, "B S 2"]:
    """LayerNorm(x) · Wᵀ, in at least float32."""
    parts = (at_least_float32(tensor) for tensor in (x, norm.weight, norm.bias, weight))
    return _NormAndProject.apply(*parts, norm.eps)


class _NormAndProject(torch.autograd.Function):
    """z_k = Σ_d W_kd (γ_d x̂_d + β_d) with x̂ = (x − mean) / deviation, for k = fork, keep.

    Its gradient needs no new sum over the width: with u_k = γ W_k, and Σ_d u_kd x̂_d = z_k − Σ_d W_kd β_d known,

        ∂/∂x = Σ_k g_k (u_k − mean(u_k) − x̂ (Σ_d u_kd x̂_d) / D) / deviation,

    and those of γ, β and W follow from Σ g_k x̂ and Σ g_k over all streams. x is read twice, and its gradient is the
    only tensor of its size that is written; autograd would write two more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, mean, inverse = torch.native_layer_norm(x, (x.shape[-1],), scale, shift, eps)
        # Not a matrix product: autocast and TF32 cannot round these products and sums, and they fuse with the norm.
        z = torch.stack([(normed * weight[0]).sum(-1), (normed * weight[1]).sum(-1)], dim=-1)
        ctx.save_for_backward(x, scale, shift, weight, mean, inverse, z)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, weight, mean, inverse, z = ctx.saved_tensors
        unit = (x - mean) * inverse  # x̂
        along = (upstream * (z - (weight * shift).sum(-1))).sum(-1, keepdim=True) / x.shape[-1]
        centred = scale * weight - (scale * weight).mean(-1, keepdim=True)
        fork, keep = upstream[..., :1], upstream[..., 1:]
        x_gradient = (fork * centred[0] + keep * centred[1] - unit * along) * inverse
        by_unit = torch.stack([(fork * unit).sum((0, 1)), (keep * unit).sum((0, 1))])
        total = upstream.sum((0, 1))[:, None]
        return x_gradient, (weight * by_unit).sum(0), (weight * total).sum(0), scale * by_unit + shift * total, None


# Moving streams to other slots


def gather_with_inverse(values: Tensor, source: Int[Tensor, "B n"], places: Int[Tensor, "B S k"]) -> Tensor:
    """`take_or_zero(values, source)`, given the at most k slots (`places`) that each value goes to (n: no slot).

    The gradient is then a gather as well, of at most k slots per value. Autograd would use a scatter-add with atomics:
    slower, and not deterministic in the last bits of sums of three or more.
    """
    return _GatherWithInverse.apply(values, source, places)


class _GatherWithInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return take_or_zero(values, source)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        gradient = take_or_zero(upstream, places[..., 0])
        for k in range(1, places.shape[-1]):
            gradient = gradient + take_or_zero(upstream, places[..., k])
        return gradient, None, None


# The residual merge


def weighted_sum(
    x: Float[Tensor, "B S D"],
    log_score: Float[Tensor, "B S"],
    weight: Float[Tensor, "B S"],
    token: Int[Tensor, "B S"],
    start: Int[Tensor, "B S"],
    *,
    n_tokens: int,
    max_bubble: int,
) -> Float[Tensor, "B T D"]:
    """m_t = Σ_j w_j x_j over the bubble of each token t, in at least float32; w is the softmax of its log scores."""
    return _WeightedSum.apply(x, log_score, weight, token, start, n_tokens, max_bubble)


class _WeightedSum(torch.autograd.Function):
    """The weighted sum. Both gradients are gathers from the token's gradient g_t, without a scatter of residuals:

    ∂/∂x_j = w_j g_t,    ∂/∂(log score)_j = w_j (x_j − m_t)·g_t    (through the softmax, whose weights are an input).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, log_score: Tensor, weight: Tensor, token: Tensor, start: Tensor, n_tokens: int, most: int
    ) -> Tensor:
        up_to, sizes = streams_up_to(token, n_tokens), bubble_sizes(token, n_tokens)
        if most <= UNROLLED:
            merged = weight.new_zeros(())
            for j in range(most):
                slot = (up_to - 1 - j).clamp(min=0)
                share = torch.where(j < sizes, take(weight, slot), 0)
                merged = merged + share[..., None] * at_least_float32(take(x, slot))
        else:
            merged = bubble_scan(weight[..., None] * at_least_float32(x), start, torch.add, max_bubble=most)
            merged = take_or_zero(merged, torch.where(sizes > 0, up_to - 1, x.shape[1]))
        ctx.save_for_backward(x, weight, token, merged)
        return merged

    @staticmethod
    @once_differentiable  # the weights are constants here
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, token, merged = ctx.saved_tensors
        upstream = take_or_zero(upstream, token)  # unused slots (token = T) get 0
        away = at_least_float32(x) - take(merged, token.clamp(max=merged.shape[1] - 1))
        x_gradient = (weight[..., None] * upstream).to(x.dtype)
        return x_gradient, weight * (away * upstream).sum(-1), None, None, None, None, None


# Mixed precision: products with a low-precision copy of the weight


def product_with_copy(
    x: Float[Tensor, "*rows K"],
    weight: Float[Tensor, "M K"],
    bias: Float[Tensor, "M"] | None,
    copy: Float[Tensor, "M K"],
) -> Float[Tensor, "*rows M"]:
    """x Wᵀ + b with a lower-precision copy of W; the gradient of W is computed in W's own dtype, without rounding."""
    return _ProductWithCopy.apply(x.to(copy.dtype), weight, bias, copy)


class _ProductWithCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor) -> Tensor:
        ctx.save_for_backward(x, copy)
        ctx.weight_dtype, ctx.has_bias = weight.dtype, bias is not None
        return F.linear(x, copy, None if bias is None else bias.to(copy.dtype))

    @staticmethod
    @once_differentiable  # the copy is a constant: a second derivative would miss the weight
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, copy = ctx.saved_tensors
        rows, x = upstream.reshape(-1, upstream.shape[-1]), x.reshape(-1, x.shape[-1])
        bias = rows.sum(0, dtype=ctx.weight_dtype) if ctx.has_bias else None
        return upstream @ copy, _product_in(rows.T, x, ctx.weight_dtype), bias, None


def _product_in(a: Float[Tensor, "M K"], b: Float[Tensor, "K N"], dtype: torch.dtype) -> Float[Tensor, "M N"]:
    """a @ b in `dtype`; only the CPU rounds to the factors' own dtype first."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
