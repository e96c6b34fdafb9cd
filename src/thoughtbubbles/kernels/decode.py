"""Kernels for a decoding step: with few rows, the time goes into reading weights, keys and values once.

    add_norm          x ← x + gate · (sum of partial products + bias),  h = LayerNorm(x)
    linear            h · Wᵀ + bias, optionally followed by GELU
    partial_linear    products over parts of the channels, for `add_norm` to sum
    attend            rotates, stores the new keys and values, attends over all that are stored

At these sizes a kernel spends as long on starting and ending as on its work. So each allows the next one to launch as
soon as its own inputs are ready (programmatic dependent launch, on GPUs that support it): the next kernel then starts
early, loads what nobody writes, and waits. The reference implementation is `Block`; rounding to the streams' dtype
happens in the same places.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FEW_ROWS = 32  # up to here an extra row costs almost nothing; beyond, the library's matrix products are as fast
ROWS_OF_W, CHANNELS = 32, 256  # the tile of weights that a program holds at a time; narrower if the width requires it
SLOTS = 64  # cached streams that a program of `attend` reads at a time
PROGRAMS = 272  # of `attend`, two per multiprocessor; but at least 4 per head, so that its slots are read faster
NOTHING = tl.constexpr(-1.0e30)  # a masked logit: its weight is exactly 0


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x, w, b, y, M, N, K,
    PART: tl.constexpr, PARTIAL: tl.constexpr, GELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """w · xᵀ rather than x · wᵀ, so that the long side of the product is that of the weights."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * PART
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    product = tl.zeros((BN, BM), tl.float32)
    for i in range(0, PART, BK):
        rows = tl.load(w + n[:, None] * K + (first + i + k)[None, :])
        columns = tl.load(x + m[None, :] * K + (first + i + k)[:, None], mask=m[None, :] < M, other=0.0)
        product = tl.dot(rows, columns, product)
    if PARTIAL:
        into = y + (tl.program_id(1) * M + m[None, :]) * N + n[:, None]
        tl.store(into, product, mask=m[None, :] < M)
    else:
        product += tl.load(b + n).to(tl.float32)[:, None]
        if GELU:
            product = product.to(y.dtype.element_ty).to(tl.float32)
            product = 0.5 * product * (1.0 + tl.erf(product * 0.7071067811865476))
        tl.store(y + m[None, :] * N + n[:, None], product.to(y.dtype.element_ty), mask=m[None, :] < M)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, parts, bias, gate, weight, shift, x_after, h, M, D, eps,
    PARTS: tl.constexpr, GATE: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    d = tl.arange(0, BD)
    inside = d < D
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    stream = tl.load(x + row * D + d, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    if PARTS > 0:
        update = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
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
    normed = centred * scale * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    normed += tl.load(shift + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + row * D + d, normed.to(dtype), mask=inside)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv, cos, sin, value_score, key, value, key_bias, place, used, out, stats, scale,
    N: tl.constexpr, W, S, BIAS: tl.constexpr, VALUE: tl.constexpr, H: tl.constexpr,
    PARTS: tl.constexpr, TURNS: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One head of one row over one part of the cached slots; the last part is the new streams themselves."""
    bn, part = tl.program_id(0), tl.program_id(1)
    b, head = bn // N, bn % N
    half: tl.constexpr = H // 2
    dtype: tl.constexpr = key.dtype.element_ty
    w, h, s = tl.arange(0, BW), tl.arange(0, half), tl.arange(0, BS)
    kept = tl.load(used + b)
    per_part = tl.cdiv(tl.cdiv(kept, BS), PARTS) * BS
    end = tl.minimum((part + 1) * per_part, kept)
    base = bn.to(tl.int64) * S * H
    slot = part * per_part + s
    here = slot < end  # always False in the last part, which begins after all cached slots
    at = base + slot[:, None] * H + h[None, :]
    if TURNS == 1:  # the cached keys and values do not depend on the previous kernel
        k_left = tl.load(key + at, mask=here[:, None], other=0.0)
        k_right = tl.load(key + at + half, mask=here[:, None], other=0.0)
        v_left = tl.load(value + at, mask=here[:, None], other=0.0)
        v_right = tl.load(value + at + half, mask=here[:, None], other=0.0)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    # The rotated queries
    real = w < W
    row = (b * W + w) * 3 * N * H + head * H
    angle = (b * W + w)[:, None] * half + h[None, :]
    c = tl.load(cos + angle, mask=real[:, None], other=1.0)
    t = tl.load(sin + angle, mask=real[:, None], other=0.0)
    left = tl.load(qkv + row[:, None] + h[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    right = tl.load(qkv + row[:, None] + half + h[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    q_left, q_right = (left * c - right * t).to(dtype), (right * c + left * t).to(dtype)

    most = tl.full((BW,), NOTHING, tl.float32)
    total = tl.zeros((BW,), tl.float32)
    sum_left, sum_right = tl.zeros((BW, half), tl.float32), tl.zeros((BW, half), tl.float32)
    if part < PARTS:
        for _ in range(TURNS):  # enough for a full cache; nothing is loaded past the end
            if TURNS > 1:
                k_left = tl.load(key + at, mask=here[:, None], other=0.0)
                k_right = tl.load(key + at + half, mask=here[:, None], other=0.0)
                v_left = tl.load(value + at, mask=here[:, None], other=0.0)
                v_right = tl.load(value + at + half, mask=here[:, None], other=0.0)
            logits = tl.dot(q_left, tl.trans(k_left))
            logits = tl.dot(q_right, tl.trans(k_right), logits) * scale
            if BIAS:
                logits += tl.load(key_bias + b * S + slot, mask=here, other=0.0)[None, :]
            logits = tl.where(here[None, :], logits, NOTHING)
            highest = tl.maximum(most, tl.max(logits, 1))
            weights = tl.exp(logits - highest[:, None])
            fade = tl.exp(most - highest)
            total = total * fade + tl.sum(weights, 1)
            weights = weights.to(dtype)
            sum_left = tl.dot(weights, v_left, sum_left * fade[:, None])
            sum_right = tl.dot(weights, v_right, sum_right * fade[:, None])
            most = highest
            slot += BS
            here = slot < end
            at += BS * H
    else:
        from_k = qkv + row[:, None] + N * H + h[None, :]
        left = tl.load(from_k, mask=real[:, None], other=0.0).to(tl.float32)
        right = tl.load(from_k + half, mask=real[:, None], other=0.0).to(tl.float32)
        new_k_left, new_k_right = (left * c - right * t).to(dtype), (right * c + left * t).to(dtype)
        new_v_left = tl.load(from_k + N * H, mask=real[:, None], other=0.0)
        new_v_right = tl.load(from_k + N * H + half, mask=real[:, None], other=0.0)
        if VALUE:
            by = tl.load(value_score + b * W + w, mask=real, other=0.0)[:, None]
            new_v_left = (new_v_left.to(tl.float32) * by).to(dtype)
            new_v_right = (new_v_right.to(tl.float32) * by).to(dtype)
        into = base + tl.load(place + b * W + w, mask=real, other=0)[:, None] * H + h[None, :]
        tl.store(key + into, new_k_left, mask=real[:, None])
        tl.store(key + into + half, new_k_right, mask=real[:, None])
        tl.store(value + into, new_v_left, mask=real[:, None])
        tl.store(value + into + half, new_v_right, mask=real[:, None])
        logits = tl.dot(q_left, tl.trans(new_k_left))
        logits = tl.dot(q_right, tl.trans(new_k_right), logits) * scale
        if BIAS:
            new_bias = tl.load(key_bias + b * S + kept + w, mask=real & (kept + w < S), other=0.0)
            logits += new_bias[None, :]
        logits = tl.where((w[None, :] <= w[:, None]) & real[None, :], logits, NOTHING)
        most = tl.max(logits, 1)
        weights = tl.exp(logits - most[:, None])
        total = tl.sum(weights, 1)
        weights = weights.to(dtype)
        sum_left = tl.dot(weights, new_v_left)
        sum_right = tl.dot(weights, new_v_right)
    entry = (bn * (PARTS + 1) + part) * W + w
    tl.store(out + entry[:, None] * H + h[None, :], sum_left, mask=real[:, None])
    tl.store(out + entry[:, None] * H + half + h[None, :], sum_right, mask=real[:, None])
    tl.store(stats + entry * 2, most, mask=real)
    tl.store(stats + entry * 2 + 1, total, mask=real)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    out, stats, heads, W,
    N: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Combines the parts of `_attend`."""
    bn, w = tl.program_id(0), tl.program_id(1)
    part, h = tl.arange(0, BP), tl.arange(0, H)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    real = part <= PARTS
    entry = (bn * (PARTS + 1) + part) * W + w
    most = tl.load(stats + entry * 2, mask=real, other=NOTHING)
    weight = tl.exp(most - tl.max(most, 0))
    total = tl.sum(tl.load(stats + entry * 2 + 1, mask=real, other=0.0) * weight, 0)
    every = tl.load(out + entry[:, None] * H + h[None, :], mask=real[:, None], other=0.0)
    joined = tl.sum(every * weight[:, None], 0) / total
    into = heads + ((bn // N) * W + w) * N * H + (bn % N) * H
    tl.store(into + h, joined.to(heads.dtype.element_ty))


@cache
def _launching(device: torch.device) -> dict[str, bool]:
    """Options of every launch: from Hopper on, a kernel launches before the previous one has ended."""
    ahead = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"AHEAD": ahead, "launch_pdl": ahead}


def _channels(k: int) -> int:
    """Of a tile, such that whole tiles cover k channels: the largest power of two that divides k, up to CHANNELS."""
    return math.gcd(k, CHANNELS)


def linear(
    x: Float[Tensor, "M K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"], *, gelu: bool = False
) -> Float[Tensor, "M N"]:
    if x.shape[0] > FEW_ROWS:
        y = F.linear(x, weight, bias)
        return F.gelu(y) if gelu else y
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch_linear(x, weight, bias, y, parts=1, partial=False, gelu=gelu)
    return y


def partial_linear(x: Float[Tensor, "M K"], weight: Float[Tensor, "N K"]) -> Float[Tensor, "parts M N"]:
    """Products over parts of the channels, in float32, without the bias: `add_norm` sums them."""
    if x.shape[0] > FEW_ROWS:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)[None]
    tiles = x.shape[1] // _channels(x.shape[1])
    parts = max(n for n in range(1, 6) if tiles % n == 0)
    y = torch.empty(parts, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch_linear(x, weight, x, y, parts=parts, partial=True, gelu=False)
    return y


def _launch_linear(x: Tensor, w: Tensor, b: Tensor, y: Tensor, *, parts: int, partial: bool, gelu: bool) -> None:
    (m, k), n = x.shape, w.shape[0]
    _linear[n // ROWS_OF_W, parts](
        x, w, b, y, m, n, k,
        PART=k // parts, PARTIAL=partial, GELU=gelu,
        BM=max(8, triton.next_power_of_2(m)), BN=ROWS_OF_W, BK=_channels(k),
        num_warps=2, num_stages=6 if m <= 8 else 4, **_launching(x.device),
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
        num_warps=8, **_launching(x.device),
    )  # fmt: skip
    return after, h


def attend(
    qkv: Float[Tensor, "M 3D"],
    cos: Float[Tensor, "B 1 W H/2"],
    sin: Float[Tensor, "B 1 W H/2"],
    value_score: Float[Tensor, "B W"] | None,
    key: Float[Tensor, "B N S H"],
    value: Float[Tensor, "B N S H"],
    key_bias: Float[Tensor, "B S"] | None,
    place: Int[Tensor, "B W"],
    used: Int[Tensor, "B"],
) -> Float[Tensor, "M D"]:
    """Causal attention of the new streams over all cached streams and over each other."""
    batch, heads, slots, size = key.shape
    width, options = place.shape[1], _launching(key.device)
    parts = min(triton.cdiv(slots, SLOTS), max(4, PROGRAMS // (batch * heads)))
    out = torch.empty(batch * heads, parts + 1, width, size, dtype=torch.float32, device=key.device)
    stats = torch.empty(batch * heads, parts + 1, width, 2, dtype=torch.float32, device=key.device)
    _attend[batch * heads, parts + 1](
        qkv, cos, sin, cos if value_score is None else value_score, key, value,
        cos if key_bias is None else key_bias, place, used, out, stats, 1 / math.sqrt(size),
        N=heads, W=width, S=slots, BIAS=key_bias is not None, VALUE=value_score is not None, H=size,
        PARTS=parts, TURNS=triton.cdiv(triton.cdiv(slots, SLOTS), parts),
        BW=max(16, triton.next_power_of_2(width)), BS=SLOTS, num_warps=4, num_stages=2, **options,
    )  # fmt: skip
    joined = torch.empty(batch * width, heads * size, dtype=qkv.dtype, device=qkv.device)
    _join[batch * heads, width](
        out, stats, joined, width,
        N=heads, H=size, PARTS=parts, BP=triton.next_power_of_2(parts + 1), num_warps=2, **options,
    )  # fmt: skip
    return joined
