"""All operators that models call, registered with torch, with shapes for the compiler and gradients for autograd.

To torch.compile an operator is one opaque call. Files with Triton code are imported when an operator first runs, so a
model can be built and loaded without Triton.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST_APART = -40.0  # key biases above this may be left out of a key's weights until the end without overflow


def register(
    name: str,
    compute: Callable[..., Any],
    *,
    shapes: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Registers `compute` as an operator. `shapes` creates empty results; `save` stores what `backward` needs."""
    operator = torch.library.custom_op(f"thoughtbubbles::{name}", compute, mutates_args=())
    operator.register_fake(shapes)
    if backward is not None:
        operator.register_autograd(backward, setup_context=save)
    return operator


# Attention: rotary embedding, key bias and value scores in one operator


def attention(
    qkv: Float[Tensor, "B S E"],
    bias: Float[Tensor, "E"],
    cos: Float[Tensor, "B 1 S half"],
    sin: Float[Tensor, "B 1 S half"],
    *,
    key_bias: Float[Tensor, "B S"] | None,
    value_gate: Float[Tensor, "B S"] | None,
    n_head: int,
    least_bias: float = -math.inf,
    token: Int[Tensor, "B S"] | None = None,
    up_to: Int[Tensor, "B T"] | None = None,
    reach: int | None = None,
    far: Float[Tensor, "3 B N T H"] | None = None,
    far_bias: Float[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "3 B N S H"]]:
    """Concatenated heads, from the projections of one matrix product: [q | k | v], heads contiguous in each; and
    queries, keys and values as they were used. Gradients are taken of those keys and values only, and without a reach.

    least_bias  a lower bound of the key biases, if known: the backward is faster if it is not too low
    reach       of forks, in tokens, if it is limited: then also the token of each stream, and for each token the number
                of streams of tokens up to it
    far         queries (not used), keys and values of originals, of which a stream sees those of tokens before its own,
                and their key biases; with a reach, if originals are not among the streams
    """
    is_bounded = least_bias > LEAST_APART and qkv.dtype != torch.float16  # whose range is small
    given = key_bias, value_gate, token, up_to, far, far_bias
    return _attention(qkv, bias, cos, sin, *given, n_head, reach, is_bounded)[:2]  # type: ignore[no-any-return]


def _attention_forward(
    qkv: Tensor,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_bias: Tensor | None,
    value: Tensor | None,
    token: Tensor | None,
    up_to: Tensor | None,
    far: Tensor | None,
    far_bias: Tensor | None,
    n_head: int,
    reach: int | None,
    is_bounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from thoughtbubbles.kernels import attention
    from thoughtbubbles.kernels import reach as of_near_forks

    given = (qkv, bias, cos, sin, key_bias, value)
    if reach is None:
        return attention.forward(*given, n_head=n_head)
    return of_near_forks.forward(*given, token, up_to, far, far_bias, n_head=n_head, reach=reach)  # type: ignore[arg-type]


def _attention_shapes(  # type: ignore[no-untyped-def]
    qkv, bias, cos, sin, key_bias, value, token, up_to, far, far_bias, n_head, reach, is_bounded
):
    batch, streams, head = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * n_head)
    return (
        qkv.new_empty(batch, streams, n_head * head),
        qkv.new_empty(3, batch, n_head, streams, head),
        qkv.new_empty(batch, n_head, streams, dtype=torch.float32),
    )


def _attention_save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, bias, cos, sin, key_bias, value, token, up_to, far, far_bias, _, ctx.reach, ctx.is_bounded = inputs
    out, rotated, lse = output
    ctx.set_materialize_grads(False)  # else torch creates zeros for all that is saved here, as large as the projections
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(rotated, out, lse, cos, sin, key_bias, value, token, up_to, far, far_bias)


def _attention_backward(ctx, dout, drotated, _):  # type: ignore[no-untyped-def]
    kept = ctx.saved_tensors  # read once: activation checkpointing provides them only once
    out, (key_bias, value, _, _, far, far_bias) = kept[1], kept[5:]
    dout = torch.zeros_like(out) if dout is None else dout
    dqkv, dqkv_bias, (dbias, dvalue), dfar, dfar_bias = _attention_gradients(
        dout, drotated, *kept, ctx.reach, ctx.is_bounded
    )
    of_scores = None if key_bias is None else dbias, None if value is None else dvalue
    of_far = None if far is None else dfar, None if far_bias is None else dfar_bias
    return dqkv, dqkv_bias.to(ctx.bias_dtype), None, None, *of_scores, None, None, *of_far, None, None, None


def _attention_gradients_forward(
    dout: Tensor, drotated: Tensor | None, rotated: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor,
    key_bias: Tensor | None, value: Tensor | None, token: Tensor | None, up_to: Tensor | None,
    far: Tensor | None, far_bias: Tensor | None, reach: int | None, is_bounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from thoughtbubbles.kernels import attention
    from thoughtbubbles.kernels import reach as of_near_forks

    kept = (dout, rotated, out, lse, cos, sin, key_bias, value)
    if reach is None:
        nothing = lse.new_empty(0)
        return *attention.backward(*kept, drotated, is_bounded=is_bounded), nothing, nothing.clone()
    given = token, up_to, far, far_bias
    return of_near_forks.backward(*kept, *given, reach=reach, is_bounded=is_bounded)  # type: ignore[arg-type]


def _attention_gradients_shapes(  # type: ignore[no-untyped-def]
    dout, drotated, rotated, out, lse, cos, sin, key_bias, value, token, up_to, far, far_bias, reach, is_bounded
):
    _, batch, n_head, streams, head = rotated.shape
    return (
        rotated.new_empty(batch, streams, 3 * n_head * head),
        lse.new_empty(3 * n_head * head),
        lse.new_empty(2, batch, streams if key_bias is not None or value is not None else 0),
        lse.new_empty(0) if far is None else torch.empty_like(far, memory_format=torch.contiguous_format),
        lse.new_empty(0) if far_bias is None else torch.empty_like(far_bias, memory_format=torch.contiguous_format),
    )


_attention = register(
    "attention", _attention_forward, shapes=_attention_shapes, backward=_attention_backward, save=_attention_save
)
_attention_gradients = register("attention_backward", _attention_gradients_forward, shapes=_attention_gradients_shapes)


# GELU after a bias


def gelu(x: Float[Tensor, "*rows M"], bias: Float[Tensor, "M"]) -> Float[Tensor, "*rows M"]:
    """GELU(x + bias)."""
    return _gelu(x, bias)


def _gelu_forward(x: Tensor, bias: Tensor) -> Tensor:
    from thoughtbubbles.kernels.gelu import forward

    return forward(x, bias)


def _gelu_gradients_forward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from thoughtbubbles.kernels.gelu import backward

    return backward(dy, x, bias)


def _gelu_backward(ctx, dy):  # type: ignore[no-untyped-def]
    x, bias = ctx.saved_tensors
    dx, dbias = _gelu_gradients(dy, x, bias)
    return dx, dbias.to(bias.dtype)


def _contiguous(x, dtype=None):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


_gelu = register(
    "gelu",
    _gelu_forward,
    shapes=lambda x, bias: _contiguous(x),
    backward=_gelu_backward,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
_gelu_gradients = register(
    "gelu_backward",
    _gelu_gradients_forward,
    shapes=lambda dy, x, bias: (_contiguous(x), x.new_empty(x.shape[-1], dtype=torch.float32)),
)


# Residual add, and the LayerNorm after it


def add_norm(
    x: Float[Tensor, "*rows D"],
    update: Float[Tensor, "*rows D"] | None,
    *,
    update_bias: Float[Tensor, "D"] | None,
    gate: Float[Tensor, "*rows"] | None,
    weight: Float[Tensor, "D"],
    bias: Float[Tensor, "D"],
    eps: float,
    dtype: torch.dtype,
    save_sum: bool,
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows D"]]:
    """x' = x + gate · (update + update_bias), and LayerNorm(x') in `dtype`.

    save_sum  whether x' is saved for the backward, or x instead, which takes no memory if another norm has saved x
    """
    if update is None:
        update_bias = gate = None
    return _AddNorm.apply(x, update, update_bias, gate, weight, bias, eps, dtype, save_sum)


class _AddNorm(torch.autograd.Function):
    """Not the operator's own gradient: an operator may not return its input, but without an update the streams are
    returned as they are. So their gradients are added here, at no cost."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, update_bias: Tensor | None, gate: Tensor | None, weight: Tensor,
        bias: Tensor, eps: float, dtype: torch.dtype, save_sum: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        summed, h, mean, rstd = _add_norm(x, update, update_bias, gate, weight, bias, eps, dtype)
        summed = x if update is None else summed
        ctx.has_sum = save_sum or update is None
        ctx.dtype, ctx.update_dtype = dtype, None if update is None else update.dtype
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias, update_bias)]
        needs_update = gate is not None or not ctx.has_sum
        kept_update = update if needs_update else None
        ctx.save_for_backward(summed if ctx.has_sum else x, kept_update, update_bias, gate, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        return summed, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsummed: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, update, update_bias, gate, weight, mean, rstd = ctx.saved_tensors
        if dh is None:
            dh = torch.zeros_like(x, dtype=ctx.dtype)
        dx, dupdate, dgate, sums = _add_norm_gradients(
            dh, dsummed, x, update, update_bias, gate, weight, mean, rstd, ctx.has_sum, ctx.update_dtype
        )
        dweight, dbias, dupdate_bias = (
            None if dtype is None else part.to(dtype) for dtype, part in zip(ctx.dtypes, sums, strict=True)
        )
        return (
            dx, None if ctx.update_dtype is None else dupdate, dupdate_bias, None if gate is None else dgate,
            dweight, dbias, None, None, None,
        )  # fmt: skip


def _add_norm_forward(
    x: Tensor,
    update: Tensor | None,
    update_bias: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from thoughtbubbles.kernels.norm import forward

    return forward(x, update, update_bias, gate, weight, bias, eps=eps, dtype=dtype)


def _add_norm_shapes(x, update, update_bias, gate, weight, bias, eps, dtype):  # type: ignore[no-untyped-def]
    rows = x.numel() // x.shape[-1]
    summed = x.new_empty(0) if update is None else _contiguous(x)
    return summed, _contiguous(x, dtype), *(x.new_empty(rows, dtype=torch.float32) for _ in range(2))


def _add_norm_gradients_forward(
    dh: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    update: Tensor | None,
    update_bias: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    has_sum: bool,
    update_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from thoughtbubbles.kernels.norm import backward

    return backward(
        dh, dsummed, x, update, update_bias, gate, weight, mean, rstd, has_sum=has_sum, update_dtype=update_dtype
    )


def _add_norm_gradients_shapes(  # type: ignore[no-untyped-def]
    dh, dsummed, x, update, update_bias, gate, weight, mean, rstd, has_sum, update_dtype
):
    return (
        _contiguous(x),
        x.new_empty(0) if update_dtype is None else _contiguous(x, update_dtype),
        mean.new_empty(0 if gate is None else x.shape[:-1]),
        mean.new_empty(3, x.shape[-1]),
    )


_add_norm = register("add_norm", _add_norm_forward, shapes=_add_norm_shapes)
_add_norm_gradients = register("add_norm_backward", _add_norm_gradients_forward, shapes=_add_norm_gradients_shapes)


# Decisions of a fork layer: integers, no gradients


def _ranks(key: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    from thoughtbubbles.kernels.fork import ranks

    return ranks(key, token)


def _rank_in_row(key: Tensor) -> Tensor:
    from thoughtbubbles.kernels.fork import rank_in_row

    return rank_in_row(key)


def _pack(survives: Tensor, n_slots: int) -> tuple[Tensor, Tensor]:
    from thoughtbubbles.kernels.fork import pack

    return pack(survives, n_slots)


def _int32(key):  # type: ignore[no-untyped-def]
    return key.new_empty(key.shape, dtype=torch.int32)


def _pack_shapes(survives, n_slots):  # type: ignore[no-untyped-def]
    slot = survives.new_empty(survives.shape, dtype=torch.int64)
    return slot.new_empty(survives.shape[0], n_slots), slot


ranks: Callable[[Int[Tensor, "B C"], Int[Tensor, "B C"]], tuple[Int[Tensor, "B C"], Int[Tensor, "B C"]]]
ranks = register("ranks", _ranks, shapes=lambda key, token: (_int32(key), _int32(key)))
rank_in_row: Callable[[Int[Tensor, "B C"]], Int[Tensor, "B C"]]
rank_in_row = register("rank_in_row", _rank_in_row, shapes=_int32)
pack: Callable[[Bool[Tensor, "B C"], int], tuple[Int[Tensor, "B n"], Int[Tensor, "B C"]]]
pack = register("pack", _pack, shapes=_pack_shapes)
