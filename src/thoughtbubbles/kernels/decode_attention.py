"""Attention of a decoding step with few rows: the keys and values of each row are read once.

    attend   rotates, stores the new keys and values, attends over all that are stored

Launches overlap as in decode.py. With many rows chunk.py is faster.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from thoughtbubbles.kernels.chunk import NOTHING, add_to_softmax, angles, gated, rotated
from thoughtbubbles.kernels.launch import ahead

SLOTS, WARPS, STAGES = 64, 4, 3  # cached streams that a program reads at a time, and how it loads them
PROGRAMS = 272  # two per multiprocessor, if there are fewer heads than that


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
