"""Kernels for a decoding step: with few rows, the time goes into reading weights, keys and values once.

    add_norm          x ← x + gate · (sum of partial products + bias),  h = LayerNorm(x)
    linear            h · Wᵀ + bias, optionally followed by GELU
    two_linear        the same of two layers, the second of which is narrow: queries, keys and values, and head gates
    partial_linear    products over parts of the channels, for `add_norm` to sum
    attend            rotates, stores the new keys and values, attends over all that are stored (of few rows)

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
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from thoughtbubbles.kernels.chunk import NOTHING, add_to_softmax, angles, gated, rotated
from thoughtbubbles.kernels.launch import ahead

FEW_ROWS = 32  # up to here an extra row costs almost nothing; beyond, the library's matrix products are as fast
CHANNELS = 256  # of a tile of weights; fewer if the width requires it
SLOTS, WARPS, STAGES = 64, 4, 3  # cached streams that a program of `attend` reads at a time, and how it loads them
PROGRAMS = 272  # of `attend`, two per multiprocessor, if there are fewer heads than that


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


@triton.jit
def _sees(w, n, slot, token, now, reach, RING: tl.constexpr, ALONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether each new stream of a row sees each slot: of the ring, forks of at most `reach` tokens before token `now`.
    Those of `now` itself may be there already, in slots that nobody sees."""
    in_ring = slot < RING
    ago = now - tl.load(token + slot, mask=in_ring, other=0).to(tl.int32)
    near = in_ring & (ago > 0) & (ago <= reach)
    sees = (slot >= RING)[None, :] | (near[None, :] & (w[:, None] == w[:, None]))
    if ALONE:
        sees = (slot >= RING)[None, :] | (near[None, :] & (w[:, None] != n - 1))
    return sees


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv, cos, sin, value_score, key, value, key_bias, own_bias, head_gate, first, count, used, forks, token, out,
    stats, arrived, heads, scale, reach, M, S,
    N: tl.constexpr, ROOM: tl.constexpr, BIAS: tl.constexpr, VALUE: tl.constexpr, HEAD: tl.constexpr,
    NEAR: tl.constexpr, RING: tl.constexpr, ALONE: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr,
    ONCE: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Of few rows: one head of one row over one part of the cached slots; the last part has the new streams too.

    The part that ends last joins all of them. NEAR: forks fall out of the cache, which has the last ones in a RING
    before the originals; without one, of the new streams only the last, the original, is stored. ALONE: it sees no
    forks.
    """
    bn, part = tl.program_id(0), tl.program_id(1)
    b, head = bn // N, bn % N
    dtype: tl.constexpr = key.dtype.element_ty
    w, h, s = tl.arange(0, BW), tl.arange(0, H), tl.arange(0, BS)
    n, begin_of_row = tl.load(count + b).to(tl.int32), tl.load(first + b).to(tl.int32)
    kept = tl.load(used + b).to(tl.int32)
    seen = tl.where(n > 0, RING + kept, 0)
    per_part = tl.cdiv(tl.cdiv(seen, BS), PARTS) * BS
    begin = part * per_part
    end = tl.minimum(begin + per_part, seen)
    key += bn.to(tl.int64) * S * H
    value += bn.to(tl.int64) * S * H
    slot = begin + s
    here = slot < end
    at = slot[:, None] * H + h[None, :]
    if ONCE:  # the cached keys and values do not depend on the kernel before
        keys = tl.load(key + at, mask=here[:, None], other=0.0)
        values = tl.load(value + at, mask=here[:, None], other=0.0)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    stream = begin_of_row + w
    real = (w < n) & (stream < M)
    row = stream * 3 * N * H + head * H
    c, t = angles(cos, sin, stream, h, real, H)
    q = rotated(qkv, row, h, c, t, real, H).to(dtype)

    most = tl.full((BW,), NOTHING, tl.float32)
    total = tl.zeros((BW,), tl.float32)
    summed = tl.zeros((BW, H), tl.float32)
    if ONCE:
        bias = tl.load(key_bias + b * S + slot, mask=here, other=0.0) if BIAS else 0.0 * slot
        logits = tl.where(here[None, :], tl.dot(q, tl.trans(keys)) * scale + bias[None, :], NOTHING)
        if RING:
            logits = tl.where(_sees(w, n, slot, token + b * S, kept, reach, RING, ALONE), logits, NOTHING)
        most, total, summed = add_to_softmax(logits, values, most, total, summed)
    else:
        for start in tl.range(begin, end, BS, num_stages=STAGES):
            slot = start + s
            here = slot < end
            at = slot[:, None] * H + h[None, :]
            keys = tl.load(key + at, mask=here[:, None], other=0.0)
            bias = tl.load(key_bias + b * S + slot, mask=here, other=0.0) if BIAS else 0.0 * slot
            logits = tl.where(here[None, :], tl.dot(q, tl.trans(keys)) * scale + bias[None, :], NOTHING)
            if RING:
                logits = tl.where(_sees(w, n, slot, token + b * S, kept, reach, RING, ALONE), logits, NOTHING)
            values = tl.load(value + at, mask=here[:, None], other=0.0)
            most, total, summed = add_to_softmax(logits, values, most, total, summed)
    if part == PARTS - 1:
        new_k = rotated(qkv + N * H, row, h, c, t, real, H).to(dtype)
        new_v = tl.load(qkv + 2 * N * H + row[:, None] + h[None, :], mask=real[:, None], other=0.0)
        if VALUE:
            by = tl.load(value_score + stream, mask=real, other=0.0)[:, None]
            new_v = (new_v.to(tl.float32) * by).to(dtype)
        stored, place = real, kept + w
        if NEAR:
            is_original, place = w == n - 1, RING + kept + 0 * w
            if RING:  # over a fork that nobody sees any more
                place = tl.where(is_original, place, (tl.load(forks + b).to(tl.int32) + w) % RING)
            else:
                stored = real & is_original
        into = place[:, None] * H + h[None, :]
        tl.store(key + into, new_k, mask=stored[:, None])
        tl.store(value + into, new_v, mask=stored[:, None])
        new_bias = tl.load(own_bias + stream, mask=real, other=0.0) if BIAS else 0.0 * w
        new_logits = tl.dot(q, tl.trans(new_k)) * scale + new_bias[None, :]
        visible = (w[None, :] <= w[:, None]) & real[None, :]
        if ALONE:
            visible &= (w[:, None] != n - 1) | (w[None, :] == w[:, None])
        new_logits = tl.where(visible, new_logits, NOTHING)
        most, total, summed = add_to_softmax(new_logits, new_v, most, total, summed)
    written = (w < tl.maximum(n, ROOM)) & (stream < M)
    into = heads + stream[:, None] * N * H + head * H + h[None, :]
    entry = (stream * N + head) * PARTS
    tl.store(out + (entry + part)[:, None] * H + h[None, :], summed, mask=written[:, None])
    tl.store(stats + (entry + part) * 2, most, mask=written)
    tl.store(stats + (entry + part) * 2 + 1, total, mask=written)
    tl.debug_barrier()  # all threads have written before the program counts as arrived
    if tl.atomic_add(arrived + bn, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived + bn, 0)
        most = tl.full((BW,), NOTHING, tl.float32)
        total = tl.zeros((BW,), tl.float32)
        summed = tl.zeros((BW, H), tl.float32)
        for each in tl.static_range(PARTS):
            theirs = tl.load(stats + (entry + each) * 2, mask=written, other=0.0, cache_modifier=".cg")
            parts = tl.load(stats + (entry + each) * 2 + 1, mask=written, other=1.0, cache_modifier=".cg")
            sums = tl.load(
                out + (entry + each)[:, None] * H + h[None, :], mask=written[:, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            highest = tl.maximum(most, theirs)
            fade, weight = tl.exp(most - highest), tl.exp(theirs - highest)
            total = total * fade + parts * weight
            summed = summed * fade[:, None] + sums * weight[:, None]
            most = highest
        summed = summed / total[:, None]
        if HEAD:
            summed = gated(summed, head_gate, stream * N + head, written)
        tl.store(into, summed.to(heads.dtype.element_ty), mask=written[:, None])


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


class Rows(NamedTuple):
    """Which of the M streams belong to each row of the cache, and how many slots the row has used before."""

    first: Int[Tensor, "B"]
    n: Int[Tensor, "B"]
    used: Int[Tensor, "B"]
    most: int  # streams of a row
    has_gaps: bool  # every row has room for `most` streams; without gaps, the next row's follow directly
    arrived: Int[Tensor, "B*N"]  # zeros, and zeros again after each call


class Near(NamedTuple):
    """Forks that fall out of the cache: the last ones of each row are in a ring before its originals."""

    ring: int  # slots, perhaps none
    before: Int[Tensor, "B"]  # forks that the row has had
    reach: int
    token: Int[Tensor, "B S"]  # of what each slot holds


def are_few(rows: int, heads: int) -> bool:
    """Whether a program for each head of each row would leave a part of the GPU idle, so that `attend` is faster."""
    return 2 * rows * heads <= PROGRAMS


def attend(
    qkv: Float[Tensor, "M 3D"],
    cos: Float[Tensor, "M H/2"],
    sin: Float[Tensor, "M H/2"],
    value_score: Float[Tensor, "M"] | None,
    key: Float[Tensor, "B N S H"],
    value: Float[Tensor, "B N S H"],
    key_bias: Float[Tensor, "B S"] | None,
    own_bias: Float[Tensor, "*M"] | None,
    head_gate: Float[Tensor, "M N"] | None,
    rows: Rows,
    *,
    near: Near | None = None,
    sees_forks: bool = True,
) -> Float[Tensor, "M D"]:
    """Causal attention of the new streams over all cached streams of their row and over each other.

    With gaps, the streams in them get something finite; without, streams past the last row's are not written.
    head_gate   logits of the gates of heads
    near        if forks fall out of the cache
    sees_forks  whether the last new stream of each row, its original, sees forks
    """
    (batch, heads, slots, size), m = key.shape, qkv.shape[0]
    parts = max(1, min(triton.cdiv(slots, SLOTS), PROGRAMS // (batch * heads)))
    out = torch.empty(m * heads, parts, size, dtype=torch.float32, device=key.device)
    stats = torch.empty(m * heads, parts, 2, dtype=torch.float32, device=key.device)
    joined = torch.empty(m, heads * size, dtype=qkv.dtype, device=qkv.device)
    _attend[batch * heads, parts](
        qkv, cos, sin, cos if value_score is None else value_score, key, value,
        cos if key_bias is None else key_bias, cos if own_bias is None else own_bias,
        cos if head_gate is None else head_gate, rows.first, rows.n, rows.used,
        *((rows.n, rows.n) if near is None else (near.before, near.token)),
        out, stats, rows.arrived, joined, 1 / math.sqrt(size), 0 if near is None else near.reach, m, slots,
        N=heads, ROOM=rows.most if rows.has_gaps else 0, BIAS=key_bias is not None, VALUE=value_score is not None,
        HEAD=head_gate is not None, NEAR=near is not None, RING=0 if near is None else near.ring,
        ALONE=not sees_forks, H=size, PARTS=parts,
        ONCE=parts * SLOTS >= slots, BW=max(16, triton.next_power_of_2(rows.most)), BS=SLOTS, STAGES=STAGES,
        num_warps=WARPS, **ahead(key.device),
    )  # fmt: skip
    return joined
