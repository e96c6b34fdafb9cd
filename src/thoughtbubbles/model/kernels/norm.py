"""The residual write and the norm behind it as one pass over the streams, forward and backward.

    x' = x + P · (update + shift),    h = LayerNorm(x') = x̂ · weight + bias,    x̂ = (x' − mean) · rstd

`shift` is the bias of the linear map that made the update. With dh the gradient of h and dx' that of x' from all that
comes later, g = dh · weight and averages over the channels,

    dx = dx' + rstd · (g − avg(g) − x̂ · avg(g · x̂)),    dupdate = P · dx,    dP = Σ dx · (update + shift),

and sums over the streams for weight, bias and shift, which a program keeps for its rows and which are added up at the
end: no atomics. The plain twin is what `Norm` in model/block.py does without this.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from thoughtbubbles.model.kernels import on_its_device
from thoughtbubbles.model.kernels.sums import column_sums, programs_for

# Measured on an H200 (docs/guides/speed.md).
FORWARD_WARPS = {1024: 2, 2048: 8}  # by channels, rounded up
BACKWARD_WARPS = {1024: 2, 2048: 4}
RESIDENT_WARPS = 12  # of the backward, side by side on a multiprocessor: its sums need many registers


@triton.jit
def _write_norm(  # type: ignore[no-untyped-def]
    x, update, shift, score, weight, bias, x_after, h, mean, rstd, eps,
    D: tl.constexpr, BD: tl.constexpr, UPDATE: tl.constexpr, SHIFT: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    at = row * D + d
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if UPDATE:
        u = tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        if SHIFT:
            u += tl.load(shift + d, mask=inside, other=0.0).to(tl.float32)
        if SCORE:
            u *= tl.load(score + row)
        v = (v + u).to(x_after.dtype.element_ty)
        tl.store(x_after + at, v, mask=inside)
        v = v.to(tl.float32)
    m = tl.sum(v, 0) / D
    centred = tl.where(inside, v - m, 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    normed = centred * r * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    normed += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + at, normed.to(h.dtype.element_ty), mask=inside)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)


@triton.jit(do_not_specialize=["programs"])
def _write_norm_backward(  # type: ignore[no-untyped-def]
    dh, dx_after, x, update, shift, score, weight, mean, rstd, dx, dupdate, dscore, sums, R, programs,
    D: tl.constexpr, BD: tl.constexpr, UPDATE: tl.constexpr, SHIFT: tl.constexpr, SCORE: tl.constexpr,
    WRITTEN: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """`x` is x' if WRITTEN, else x, and x' is made again. LATER: something else has read x' too."""
    d = tl.arange(0, BD)
    inside = d < D
    dweight = tl.zeros((BD,), tl.float32)
    dbias = tl.zeros((BD,), tl.float32)
    dshift = tl.zeros((BD,), tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for i in range(tl.cdiv(R - tl.program_id(0), programs)):
        row = first + i * programs  # rows that are read at a time lie side by side
        at = row * D + d
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
        if UPDATE and (SCORE or not WRITTEN):
            u = tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
            if SHIFT:
                u += tl.load(shift + d, mask=inside, other=0.0).to(tl.float32)
        if SCORE:
            p = tl.load(score + row)
        if not WRITTEN:
            v = (v + (u * p if SCORE else u)).to(x.dtype.element_ty).to(tl.float32)
        r = tl.load(rstd + row)
        xhat = tl.where(inside, (v - tl.load(mean + row)) * r, 0.0)
        g = upstream * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        average = tl.sum(g, 0) / D
        slope = tl.sum(g * xhat, 0) / D
        whole = r * (g - average - xhat * slope)
        if LATER:
            whole += tl.load(dx_after + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, whole.to(dx.dtype.element_ty), mask=inside)
        if UPDATE:
            du = whole
            if SCORE:
                tl.store(dscore + row, tl.sum(tl.where(inside, whole * u, 0.0), 0))
                du = whole * p
            tl.store(dupdate + at, du.to(dupdate.dtype.element_ty), mask=inside)
            if SHIFT:
                dshift += du
        dweight += upstream * xhat
        dbias += upstream
    sums += first * 3 * D
    tl.store(sums + d, dweight, mask=inside)
    tl.store(sums + D + d, dbias, mask=inside)
    tl.store(sums + 2 * D + d, dshift, mask=inside)


def _warps(table: dict[int, int], width: int) -> int:
    return table[min(table, key=lambda size: abs(size - width))]


@torch.library.custom_op("thoughtbubbles::write_norm", mutates_args=())
@on_its_device
def _forward(
    x: Tensor,
    update: Tensor | None,
    shift: Tensor | None,
    score: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x' (empty if nothing is written), h, and what the backward needs of the norm."""
    x = x.contiguous()
    channels = x.shape[-1]
    rows, width = x.numel() // channels, triton.next_power_of_2(channels)
    x_after = x.new_empty(0) if update is None else torch.empty_like(x)
    h = torch.empty_like(x, dtype=dtype)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    _write_norm[(rows,)](
        x, x if update is None else update.contiguous(), weight if shift is None else shift,
        mean if score is None else score.contiguous(), weight, bias, x_after, h, mean, rstd, eps,
        D=channels, BD=width, UPDATE=update is not None, SHIFT=shift is not None, SCORE=score is not None,
        num_warps=_warps(FORWARD_WARPS, width),
    )  # fmt: skip
    return x_after, h, mean, rstd


@_forward.register_fake
def _(x, update, shift, score, weight, bias, eps, dtype):  # type: ignore[no-untyped-def]
    x_after = x.new_empty(0) if update is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    h = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    rows = x.numel() // x.shape[-1]
    return x_after, h, *(x.new_empty(rows, dtype=torch.float32) for _ in range(2))


@torch.library.custom_op("thoughtbubbles::write_norm_backward", mutates_args=())
@on_its_device
def _backward(
    dh: Tensor,
    dx_after: Tensor | None,
    x: Tensor,
    update: Tensor | None,
    shift: Tensor | None,
    score: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    is_written: bool,
    update_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the update (if it has a dtype) and of the score; and the sums for weight, bias and shift."""
    x = x.contiguous()
    channels, rows = x.shape[-1], mean.numel()
    dx = torch.empty_like(x)
    dupdate = x.new_empty(0) if update_dtype is None else torch.empty_like(x, dtype=update_dtype)
    dscore = mean.new_empty(0 if score is None else rows)
    width = triton.next_power_of_2(channels)
    warps = _warps(BACKWARD_WARPS, width)
    programs = programs_for(x, rows, each=max(1, RESIDENT_WARPS // warps))
    sums = mean.new_empty(programs, 3, channels)
    _write_norm_backward[(programs,)](
        dh.contiguous(), x if dx_after is None else dx_after.contiguous(), x,
        x if update is None else update.contiguous(), weight if shift is None else shift,
        mean if score is None else score.contiguous(), weight, mean, rstd,
        dx, dupdate, dscore, sums, rows, programs,
        D=channels, BD=width, UPDATE=update_dtype is not None, SHIFT=shift is not None, SCORE=score is not None,
        WRITTEN=is_written, LATER=dx_after is not None, num_warps=warps,
    )  # fmt: skip
    return (
        dx,
        dupdate,
        dscore.view(x.shape[:-1] if score is not None else -1),
        column_sums(sums.flatten(1)).view(3, channels),
    )


@_backward.register_fake
def _(dh, dx_after, x, update, shift, score, weight, mean, rstd, is_written, update_dtype):  # type: ignore[no-untyped-def]
    def like(dtype: torch.dtype) -> Tensor:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    return (
        like(x.dtype),
        x.new_empty(0) if update_dtype is None else like(update_dtype),
        mean.new_empty(0 if score is None else x.shape[:-1]),
        mean.new_empty(3, x.shape[-1]),
    )


class _WriteNorm(torch.autograd.Function):
    """Not the operator's own gradient: an operator may not return its input, and the norm of streams into which nothing
    is written passes them on. So their gradients meet here, where adding them costs nothing."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, shift: Tensor | None, score: Tensor | None, weight: Tensor,
        bias: Tensor, eps: float, dtype: torch.dtype, keep_written: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x_after, h, mean, rstd = _forward(x, update, shift, score, weight, bias, eps, dtype)
        written = x if update is None else x_after
        ctx.is_written = keep_written or update is None
        ctx.dtype, ctx.update_dtype = dtype, None if update is None else update.dtype
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias, shift)]
        needs_update = score is not None or not ctx.is_written
        kept_update = update if needs_update else None
        ctx.save_for_backward(written if ctx.is_written else x, kept_update, shift, score, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        return written, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_after: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, update, shift, score, weight, mean, rstd = ctx.saved_tensors
        if dh is None:
            dh = torch.zeros_like(x, dtype=ctx.dtype)
        dx, dupdate, dscore, sums = _backward(
            dh, dx_after, x, update, shift, score, weight, mean, rstd, ctx.is_written, ctx.update_dtype
        )
        dweight, dbias, dshift = (
            None if dtype is None else part.to(dtype) for dtype, part in zip(ctx.dtypes, sums, strict=True)
        )
        return (
            dx, None if ctx.update_dtype is None else dupdate, dshift, None if score is None else dscore,
            dweight, dbias, None, None, None,
        )  # fmt: skip


def write_norm(
    x: Float[Tensor, "*rows D"],
    update: Float[Tensor, "*rows D"] | None,
    *,
    shift: Float[Tensor, "D"] | None,
    score: Float[Tensor, "*rows"] | None,
    weight: Float[Tensor, "D"],
    bias: Float[Tensor, "D"],
    eps: float,
    dtype: torch.dtype,
    keep_written: bool,
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows D"]]:
    """x' and its norm in `dtype`.

    keep_written  whether the backward keeps x', or x in its place: no memory at all, where x is the x' of another norm
    """
    if update is None:
        shift = score = None
    return _WriteNorm.apply(x, update, shift, score, weight, bias, eps, dtype, keep_written)
