"""Residual add fused with the LayerNorm after it: one pass over the streams, forward and backward.

    x' = x + P · (update + update_bias),    h = LayerNorm(x') = x̂ · weight + bias,    x̂ = (x' − mean) · rstd

`update_bias` is the bias of the linear layer that made the update, P the gate. With dh the gradient of h, dx' that of
x' from everything after it, g = dh · weight and averages over the channels,

    dx = dx' + rstd · (g − avg(g) − x̂ · avg(g · x̂)),    dupdate = P · dx,    dP = Σ dx · (update + update_bias),

and sums over the streams for weight, bias and update_bias, which each program computes for its rows and which are added
at the end, without atomics. The reference implementation is the other branch of `AddNorm` in model/block.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thoughtbubbles.kernels.launch import on_its_device, programs_for
from thoughtbubbles.kernels.sums import column_sums

# Measured on an H200 (docs/guides/speed.md).
FORWARD_WARPS = {1024: 2, 2048: 8}  # by channels, rounded up
BACKWARD_WARPS = {1024: 2, 2048: 4}
RESIDENT_WARPS = 12  # of the backward per multiprocessor: its sums need many registers


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, update, update_bias, gate, weight, bias, summed, h, mean, rstd, eps,
    D: tl.constexpr, BD: tl.constexpr, UPDATE: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    at = row * D + d
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if UPDATE:
        u = tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            u += tl.load(update_bias + d, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            u *= tl.load(gate + row)
        v = (v + u).to(summed.dtype.element_ty)
        tl.store(summed + at, v, mask=inside)
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
def _add_norm_backward(  # type: ignore[no-untyped-def]
    dh, dsummed, x, update, update_bias, gate, weight, mean, rstd, dx, dupdate, dgate, sums, R, programs,
    D: tl.constexpr, BD: tl.constexpr, UPDATE: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    SUMMED: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """`x` is x' if SUMMED, else x, and x' is recomputed. LATER: x' has a gradient from elsewhere too."""
    d = tl.arange(0, BD)
    inside = d < D
    dweight = tl.zeros((BD,), tl.float32)
    dbias = tl.zeros((BD,), tl.float32)
    dupdate_bias = tl.zeros((BD,), tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for i in range(tl.cdiv(R - tl.program_id(0), programs)):
        row = first + i * programs  # rows that are read at the same time are adjacent
        at = row * D + d
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
        if UPDATE and (GATE or not SUMMED):
            u = tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
            if BIAS:
                u += tl.load(update_bias + d, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            p = tl.load(gate + row)
        if not SUMMED:
            v = (v + (u * p if GATE else u)).to(x.dtype.element_ty).to(tl.float32)
        r = tl.load(rstd + row)
        xhat = tl.where(inside, (v - tl.load(mean + row)) * r, 0.0)
        g = upstream * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        average = tl.sum(g, 0) / D
        slope = tl.sum(g * xhat, 0) / D
        whole = r * (g - average - xhat * slope)
        if LATER:
            whole += tl.load(dsummed + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, whole.to(dx.dtype.element_ty), mask=inside)
        if UPDATE:
            du = whole
            if GATE:
                tl.store(dgate + row, tl.sum(tl.where(inside, whole * u, 0.0), 0))
                du = whole * p
            tl.store(dupdate + at, du.to(dupdate.dtype.element_ty), mask=inside)
            if BIAS:
                dupdate_bias += du
        dweight += upstream * xhat
        dbias += upstream
    sums += first * 3 * D
    tl.store(sums + d, dweight, mask=inside)
    tl.store(sums + D + d, dbias, mask=inside)
    tl.store(sums + 2 * D + d, dupdate_bias, mask=inside)


def _warps(table: dict[int, int], width: int) -> int:
    return table[min(table, key=lambda size: abs(size - width))]


@on_its_device
def forward(
    x: Tensor,
    update: Tensor | None,
    update_bias: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x' (empty if nothing is added), h, and the mean and rstd for the backward."""
    x = x.contiguous()
    channels = x.shape[-1]
    rows, width = x.numel() // channels, triton.next_power_of_2(channels)
    summed = x.new_empty(0) if update is None else torch.empty_like(x)
    h = torch.empty_like(x, dtype=dtype)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    _add_norm[(rows,)](
        x, x if update is None else update.contiguous(), weight if update_bias is None else update_bias,
        mean if gate is None else gate.contiguous(), weight, bias, summed, h, mean, rstd, eps,
        D=channels, BD=width, UPDATE=update is not None, BIAS=update_bias is not None, GATE=gate is not None,
        num_warps=_warps(FORWARD_WARPS, width),
    )  # fmt: skip
    return summed, h, mean, rstd


@on_its_device
def backward(
    dh: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    update: Tensor | None,
    update_bias: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    has_sum: bool,
    update_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the update (if it has a dtype) and of the gate, and the sums for weight and both biases."""
    x = x.contiguous()
    channels, rows = x.shape[-1], mean.numel()
    dx = torch.empty_like(x)
    dupdate = x.new_empty(0) if update_dtype is None else torch.empty_like(x, dtype=update_dtype)
    dgate = mean.new_empty(0 if gate is None else rows)
    width = triton.next_power_of_2(channels)
    warps = _warps(BACKWARD_WARPS, width)
    programs = programs_for(x, rows, each=max(1, RESIDENT_WARPS // warps))
    sums = mean.new_empty(programs, 3, channels)
    _add_norm_backward[(programs,)](
        dh.contiguous(), x if dsummed is None else dsummed.contiguous(), x,
        x if update is None else update.contiguous(), weight if update_bias is None else update_bias,
        mean if gate is None else gate.contiguous(), weight, mean, rstd,
        dx, dupdate, dgate, sums, rows, programs,
        D=channels, BD=width, UPDATE=update_dtype is not None, BIAS=update_bias is not None, GATE=gate is not None,
        SUMMED=has_sum, LATER=dsummed is not None, num_warps=warps,
    )  # fmt: skip
    return (
        dx,
        dupdate,
        dgate.view(x.shape[:-1] if gate is not None else -1),
        column_sums(sums.flatten(1)).view(3, channels),
    )
