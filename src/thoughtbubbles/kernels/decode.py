"""Kernels for a decoding step (attention: decode_attention.py): with few rows, the time goes into reading weights once.

    add_norm          x ← x + gate · (sum of partial products + bias),  h = LayerNorm(x)
    linear            h · Wᵀ + bias, optionally followed by GELU
    two_linear        the same of two layers, the second of which is narrow: queries, keys and values, and head gates
    partial_linear    products over parts of the channels, for `add_norm` to sum

At these sizes a kernel spends as long on starting and ending as on its work. So each allows the next one to launch as
soon as its own inputs are ready (programmatic dependent launch, on GPUs that support it): the next kernel then starts
early, loads what nobody writes, and waits. The reference implementation is `Block`; rounding to the streams' dtype
happens in the same places.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from thoughtbubbles.kernels.launch import ahead

FEW_ROWS = 32  # up to here an extra row costs almost nothing; beyond, the library's matrix products are as fast
CHANNELS = 256  # of a tile of weights; fewer if the width requires it


@triton.jit
def _prefetch(address):  # type: ignore[no-untyped-def]
    """Asks for these lines to be brought into the L2 cache, and does not wait for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x, w, b, y, w2, b2, y2, M, N, N2, K,
    PART: tl.constexpr, PARTIAL: tl.constexpr, GELU: tl.constexpr, TWO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """TWO: the programs after those of the first layer have the second, whose last tile need not be full."""
    tile = tl.program_id(0)
    if TWO:
        if tile < N // BN:
            _tile(x, w, b, y, tile, M, N, K, PART, PARTIAL, GELU, False, BM, BN, BK, LINES, AHEAD)
        else:
            tile -= N // BN
            _tile(x, w2, b2, y2, tile, M, N2, K, PART, PARTIAL, GELU, True, BM, BN, BK, LINES, AHEAD)
    else:
        _tile(x, w, b, y, tile, M, N, K, PART, PARTIAL, GELU, False, BM, BN, BK, LINES, AHEAD)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    x, w, b, y, tile, M, N, K,
    PART: tl.constexpr, PARTIAL: tl.constexpr, GELU: tl.constexpr, IS_CUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """w · xᵀ rather than x · wᵀ, so that the long side of the product is that of the weights."""
    n = tile * BN + tl.arange(0, BN)
    first = tl.program_id(1) * PART
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    if AHEAD:
        # A quarter of its weights, by lines of 128 bytes; more would come in the way of the kernel before.
        line = tl.arange(0, LINES)
        _prefetch(w + (tl.minimum(n, N - 1) if IS_CUT else n)[:, None] * K + (first + line * 64)[None, :])
        gdc_wait()
        gdc_launch_dependents()
    product = tl.zeros((BN, BM), tl.float32)
    for i in range(0, PART, BK):
        at = w + n[:, None] * K + (first + i + k)[None, :]
        rows = tl.load(at, mask=n[:, None] < N, other=0.0) if IS_CUT else tl.load(at)
        columns = tl.load(x + m[None, :] * K + (first + i + k)[:, None], mask=m[None, :] < M, other=0.0)
        product = tl.dot(rows, columns, product)
    inside = (m[None, :] < M) & (n[:, None] < N) if IS_CUT else m[None, :] < M
    if PARTIAL:
        into = y + (tl.program_id(1) * M + m[None, :]) * N + n[:, None]
        tl.store(into, product, mask=inside)
    else:
        bias = tl.load(b + n, mask=n < N, other=0.0) if IS_CUT else tl.load(b + n)
        product += bias.to(tl.float32)[:, None]
        if GELU:
            product = product.to(y.dtype.element_ty).to(tl.float32)
            product = 0.5 * product * (1.0 + tl.erf(product * 0.7071067811865476))
        tl.store(y + m[None, :] * N + n[:, None], product.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, parts, bias, gate, weight, shift, x_after, h, M, D, eps,
    PARTS: tl.constexpr, GATE: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    d = tl.arange(0, BD)
    inside = d < D
    # Parameters do not depend on the kernel before.
    scaled_by = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    shifted_by = tl.load(shift + d, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        update = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    stream = tl.load(x + row * D + d, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            update += tl.load(parts + (part * M + row) * D + d, mask=inside, other=0.0)
        update = update.to(dtype).to(tl.float32)
        if GATE:
            update = (update * tl.load(gate + row)).to(dtype).to(tl.float32)
        stream = (stream + update).to(dtype)
        tl.store(x_after + row * D + d, stream, mask=inside)
        stream = stream.to(tl.float32)
    mean = tl.sum(stream, 0) / D
    centred = tl.where(inside, stream - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    tl.store(h + row * D + d, (centred * scale * scaled_by + shifted_by).to(dtype), mask=inside)


def _channels(k: int) -> int:
    """Of a tile, such that whole tiles cover k channels: the largest power of two that divides k, up to CHANNELS."""
    return math.gcd(k, CHANNELS)


class Weights(NamedTuple):
    """How `_linear` is cut up: rows of the weights and channels that a program holds at a time, and how it loads."""

    rows: int
    channels: int
    warps: int
    stages: int


def tile_for(m: int, *, has_much_memory: bool) -> Weights:
    """`has_much_memory`: shared memory of a multiprocessor, as from Hopper on; elsewhere a stage less."""
    return Weights(32, 256, 2, 6 if has_much_memory else 5) if m <= 8 else Weights(64, 128, 4, 5)


def linear(
    x: Float[Tensor, "M K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"], *, gelu: bool = False
) -> Float[Tensor, "M N"]:
    if x.shape[0] > FEW_ROWS:
        y = F.linear(x, weight, bias)
        return F.gelu(y) if gelu else y
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch_linear(x, weight, bias, y, parts=1, partial=False, gelu=gelu)
    return y


def two_linear(
    x: Float[Tensor, "M K"], layer: torch.nn.Linear, narrow: torch.nn.Linear | None
) -> tuple[Float[Tensor, "M N"], Float[Tensor, "M N2"] | None]:
    """Both layers in one launch; None if there is no second one."""
    if narrow is None:
        return linear(x, layer.weight, layer.bias), None
    if x.shape[0] > FEW_ROWS:
        return F.linear(x, layer.weight, layer.bias), F.linear(x, narrow.weight, narrow.bias)
    y, y2 = (torch.empty(x.shape[0], each.out_features, dtype=x.dtype, device=x.device) for each in (layer, narrow))
    second = narrow.weight, narrow.bias, y2
    _launch_linear(x, layer.weight, layer.bias, y, second, parts=1, partial=False, gelu=False)
    return y, y2


def partial_linear(x: Float[Tensor, "M K"], weight: Float[Tensor, "N K"]) -> Float[Tensor, "parts M N"]:
    """Products over parts of the channels, in float32, without the bias: `add_norm` sums them."""
    if x.shape[0] > FEW_ROWS:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)[None]
    tiles = x.shape[1] // _channels(x.shape[1])
    parts = max(n for n in range(1, 6) if tiles % n == 0)
    y = torch.empty(parts, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch_linear(x, weight, x, y, parts=parts, partial=True, gelu=False)
    return y


def _launch_linear(
    x: Tensor, w: Tensor, b: Tensor, y: Tensor, second: tuple[Tensor, Tensor, Tensor] | None = None,
    *, parts: int, partial: bool, gelu: bool,
) -> None:  # fmt: skip
    (m, k), n, options = x.shape, w.shape[0], ahead(x.device)
    tile = tile_for(m, has_much_memory=options["AHEAD"])
    w2, b2, y2 = second or (w, b, y)
    n2 = w2.shape[0] if second else 0
    _linear[n // tile.rows + triton.cdiv(n2, tile.rows), parts](
        x, w, b, y, w2, b2, y2, m, n, n2, k,
        PART=k // parts, PARTIAL=partial, GELU=gelu, TWO=second is not None,
        BM=max(8, triton.next_power_of_2(m)), BN=tile.rows, BK=math.gcd(k // parts, tile.channels),
        LINES=1 << max(0, (k // parts // 256).bit_length() - 1),
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip


def add_norm(
    x: Float[Tensor, "M D"],
    parts: Float[Tensor, "parts M D"] | None,
    bias: Float[Tensor, "D"],
    gate: Float[Tensor, "M"] | None,
    norm: torch.nn.LayerNorm,
) -> tuple[Float[Tensor, "M D"], Float[Tensor, "M D"]]:
    """The streams after the update, and their LayerNorm. Without parts nothing is added."""
    m, d = x.shape
    after, h = x if parts is None else torch.empty_like(x), torch.empty_like(x)
    _add_norm[(m,)](
        x, x if parts is None else parts, bias, x if gate is None else gate, norm.weight, norm.bias, after, h,
        m, d, norm.eps,
        PARTS=0 if parts is None else parts.shape[0], GATE=gate is not None, BD=triton.next_power_of_2(d),
        num_warps=8, **ahead(x.device),
    )  # fmt: skip
    return after, h
