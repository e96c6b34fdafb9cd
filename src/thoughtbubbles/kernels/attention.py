"""Rotary embedding and score-attenuated attention on the GPU, from the projections to the heads and back.

    weights = softmax over keys of (c · q·k + bias_key),    out = Σ weights · (P_key · v),    c = 1/√H

The bias, one number per key, is added to the logits in registers: no extra channels, nothing of size S × S. With the
logits s, the weights w and dw = dout · (P v)ᵀ, the backward is

    ds = w · (dw − rowsum(dout · out)),  dq = c · ds k,  dk = c · dsᵀ q,  d(P v) = wᵀ dout,  dbias = column sum of ds.

Each number is written by one program, without atomics, so results are bitwise deterministic. `rotate_qkv` (rotary.py)
adds the projections' bias, rotates q and k, multiplies v by P and makes each head's rows contiguous. `_query_gradient`
loops over the keys of a block of queries; `_key_gradient` loops over the queries of a block of keys and gets the column
sums for free. Both rotate their results back and write them in the layout of the projection; their sums over the
streams are the gradient of its bias. If forks are visible to near tokens only, reach.py has other kernels around the
same loops. The reference implementations are `fused_attention` and `reference_attention` in
model/attention.py, after `rotate`.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from thoughtbubbles.kernels.launch import on_its_device
from thoughtbubbles.kernels.rotary import rotate_back, rotate_qkv
from thoughtbubbles.kernels.sums import column_sums

LOG2E = tl.constexpr(1.4426950408889634)  # logits are in base 2, like the GPU's exponential


class Tile(NamedTuple):
    """Queries and keys that a program handles at a time, and launch options."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None  # per thread, at most: fewer let more programs run concurrently

    def launch(self) -> dict[str, int]:
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"BM": self.queries, "BN": self.keys, "num_warps": self.warps, "num_stages": self.stages, **most}


# Measured on an H200 (docs/guides/speed.md), by head size; other sizes take the next larger one's.
FORWARD = {64: Tile(64, 128), 128: Tile(64, 64)}
QUERY_GRADIENT = {64: Tile(64, 64), 128: Tile(64, 64)}
KEY_GRADIENT = {64: Tile(64, 64, registers=168), 128: Tile(64, 64)}
ROTATED_STREAMS = 16


@triton.jit
def attend_over(  # type: ignore[no-untyped-def]
    acc, total, largest, q, k, v, key_row, bias2, scale2, begin, end, seen, S,
    BN: tl.constexpr, BIAS: tl.constexpr, DIAGONAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Over the keys from `begin` to `end`, out of S; if DIAGONAL, each query sees the first `seen` of all keys."""
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        s = tl.dot(q, k.load([key_row + start, 0]).T) * scale2
        val = v.load([key_row + start, 0])
        if DIAGONAL and not EVEN:
            val = tl.where((n < S)[:, None], val, 0.0)
        if BIAS and DIAGONAL:
            s += tl.load(bias2 + n, mask=n < S, other=0.0)[None, :]
        elif BIAS:
            s += tl.load(bias2 + n)[None, :]
        if DIAGONAL:
            s = tl.where(seen[:, None] > n[None, :], s, -float("inf"))
        above = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp2(s - above[:, None])
        shrink = tl.exp2(largest - above)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), val, acc * shrink[:, None])
        largest = above
    return acc, total, largest


@triton.jit
def _attend_forward(  # type: ignore[no-untyped-def]
    q, k, v, bias2, out, lse, scale2, S, N,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head. Blocks with many keys start first, so that the last to finish are short."""
    blocks = tl.cdiv(S, BM)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    bn = tl.program_id(0) // blocks
    b, head = bn // N, bn % N
    m, h = first + tl.arange(0, BM), tl.arange(0, H)
    query = q.load([bn * S + first, 0])
    acc = tl.zeros((BM, H), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    largest = tl.full((BM,), -float("inf"), tl.float32)
    full = first // BN * BN  # every query of the block sees the keys before this one
    end = tl.minimum(first + BM, S)
    bias2 += b * S
    acc, total, largest = attend_over(
        acc, total, largest, query, k, v, bn * S, bias2, scale2, 0, full, m + 1, S, BN, BIAS, False, EVEN
    )
    acc, total, largest = attend_over(
        acc, total, largest, query, k, v, bn * S, bias2, scale2, full, end, m + 1, S, BN, BIAS, True, EVEN
    )
    acc = acc / total[:, None]
    to = (b * S + m).to(tl.int64)[:, None] * (N * H) + head * H + h[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=(m < S)[:, None])
    tl.store(lse + bn * S + m, largest + tl.log2(total), mask=m < S)


@triton.jit
def query_over(  # type: ignore[no-untyped-def]
    dq, q, dout, logsum, delta, k, v, key_row, bias2, scale2, begin, end, seen, S,
    BN: tl.constexpr, BIAS: tl.constexpr, DIAGONAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        key, val = k.load([key_row + start, 0]), v.load([key_row + start, 0])
        if DIAGONAL and not EVEN:
            key = tl.where((n < S)[:, None], key, 0.0)
            val = tl.where((n < S)[:, None], val, 0.0)
        s = tl.dot(q, key.T) * scale2
        if BIAS and DIAGONAL:
            s += tl.load(bias2 + n, mask=n < S, other=0.0)[None, :]
        elif BIAS:
            s += tl.load(bias2 + n)[None, :]
        p = tl.exp2(s - logsum[:, None])
        if DIAGONAL:
            p = tl.where(seen[:, None] > n[None, :], p, 0.0)
        ds = p * (tl.dot(dout, val.T) - delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq)
    return dq


@triton.jit
def _query_gradient(  # type: ignore[no-untyped-def]
    q, k, v, bias2, out, dout, lse, delta, cos, sin, dqkv, scale, scale2, S, N,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    bn = tl.program_id(0) // blocks
    b, head = bn // N, bn % N
    m, h = first + tl.arange(0, BM), tl.arange(0, H)
    here = (m < S)[:, None]
    row = (b * S + m).to(tl.int64)[:, None]
    query = q.load([bn * S + first, 0])
    at = row * (N * H) + head * H + h[None, :]
    do = tl.load(dout + at, mask=here, other=0.0)
    own = tl.sum(do.to(tl.float32) * tl.load(out + at, mask=here, other=0.0).to(tl.float32), 1)
    tl.store(delta + bn * S + m, own, mask=m < S)
    logsum = tl.load(lse + bn * S + m, mask=m < S, other=float("inf"))  # rows past the end have no weights
    dq = tl.zeros((BM, H), tl.float32)
    full = first // BN * BN
    end = tl.minimum(first + BM, S)
    bias2 += b * S
    dq = query_over(dq, query, do, logsum, own, k, v, bn * S, bias2, scale2, 0, full, m + 1, S, BN, BIAS, False, EVEN)
    dq = query_over(dq, query, do, logsum, own, k, v, bn * S, bias2, scale2, full, end, m + 1, S, BN, BIAS, True, EVEN)
    store_query_gradient(dq * scale, cos, sin, dqkv, row, here, head, N, H, BM)


@triton.jit
def store_query_gradient(dq, cos, sin, dqkv, row, here, head, N, H: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    half: tl.constexpr = H // 2
    i = tl.arange(0, half)
    left, right = rotate_back(dq, cos, sin, row * half + i[None, :], here, BM, H)
    to = dqkv + row * (3 * N * H) + head * H + i[None, :]
    tl.store(to, left.to(dqkv.dtype.element_ty), mask=here)
    tl.store(to + half, right.to(dqkv.dtype.element_ty), mask=here)


@triton.jit
def key_over(  # type: ignore[no-untyped-def]
    dk, dv, db, k, v, b2, q, query_row, dout, out_row, channel, lse, delta, token, scale2, begin, end, n, S,
    BM: tl.constexpr, ADD: tl.constexpr, SUM: tl.constexpr, DIAGONAL: tl.constexpr, FAR: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """If DIAGONAL, a query sees the first of all keys: those up to its own, or, if FAR, as many as its token says."""
    for start in range(begin, end, BM):
        m = start + tl.arange(0, BM)
        query = q.load([query_row + start, 0])
        do = dout.load([out_row + start, channel])
        if EVEN:
            logsum, own = tl.load(lse + m), tl.load(delta + m)
        else:  # no weight to queries past the end
            query, do = tl.where((m < S)[:, None], query, 0.0), tl.where((m < S)[:, None], do, 0.0)
            logsum = tl.load(lse + m, mask=m < S, other=float("inf"))
            own = tl.load(delta + m, mask=m < S, other=0.0)
        s = tl.dot(k, query.T) * scale2
        if ADD:
            s += b2[:, None]
        p = tl.exp2(s - logsum[None, :])
        if DIAGONAL:
            seen = tl.load(token + m, mask=m < S, other=0) if FAR else m + 1
            p = tl.where(seen[None, :] > n[:, None], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, do.T) - own[None, :])
        if SUM:
            db += tl.sum(ds, 1)
        dk = tl.dot(ds.to(query.dtype), query, dk)
    return dk, dv, db


@triton.jit
def _key_gradient(  # type: ignore[no-untyped-def]
    q, k, v, bias2, value, dout, lse, delta, cos, sin, more, dqkv, dbias, dvalue, scale, scale2, S, N, part,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIAS: tl.constexpr, APART: tl.constexpr, VALUE: tl.constexpr, MORE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """MORE: others have seen these keys and values too. `part`: the distance between their gradients in `more`."""
    blocks = tl.cdiv(S, BN)
    first = tl.program_id(0) % blocks * BN
    bn = tl.program_id(0) // blocks
    b, head = bn // N, bn % N
    n = first + tl.arange(0, BN)
    key = k.load([bn * S + first, 0])
    val = v.load([bn * S + first, 0])
    b2 = tl.zeros((BN,), tl.float32)
    if BIAS:
        b2 = tl.load(bias2 + b * S + n, mask=n < S, other=0.0)
    dk = tl.zeros((BN, H), tl.float32)
    dv = tl.zeros((BN, H), tl.float32)
    db = tl.zeros((BN,), tl.float32)
    lse += bn * S
    delta += bn * S
    begin = first // BM * BM
    full = tl.minimum(tl.cdiv(first + BN, BM) * BM, S)  # from here on every query sees every key of the block
    dk, dv, db = key_over(
        dk, dv, db, key, val, b2, q, bn * S, dout, b * S, head * H, lse, delta, lse, scale2, begin, full, n, S,
        BM, BIAS and not APART, BIAS, True, False, EVEN,
    )  # fmt: skip
    dk, dv, db = key_over(
        dk, dv, db, key, val, b2, q, bn * S, dout, b * S, head * H, lse, delta, lse, scale2, full, S, n, S,
        BM, BIAS and not APART, BIAS, False, False, EVEN,
    )  # fmt: skip
    if BIAS and APART:  # a key's bias multiplies all its weights: once at the end is enough
        weight = tl.exp2(b2)
        dk = dk * weight[:, None]
        dv = dv * weight[:, None]
        db = db * weight
    dk = dk * scale
    if MORE:
        at = more + (bn * S + n).to(tl.int64)[:, None] * H + tl.arange(0, H)[None, :]
        dk += tl.load(at + part.to(tl.int64), mask=(n < S)[:, None], other=0.0).to(tl.float32)
        dv += tl.load(at + 2 * part.to(tl.int64), mask=(n < S)[:, None], other=0.0).to(tl.float32)
    store_key_gradients(dk, dv, db, val, value, cos, sin, dqkv, dbias, dvalue, b, head, n, S, N, H, BN, BIAS, VALUE)


@triton.jit
def store_key_gradients(  # type: ignore[no-untyped-def]
    dk, dv, db, val, value, cos, sin, dqkv, dbias, dvalue, b, head, n, S, N,
    H: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = dqkv.dtype.element_ty
    half: tl.constexpr = H // 2
    i, h = tl.arange(0, half), tl.arange(0, H)
    bn, here = b * N + head, (n < S)[:, None]
    row = (b * S + n).to(tl.int64)[:, None]
    left, right = rotate_back(dk, cos, sin, row * half + i[None, :], here, BN, H)
    to = dqkv + row * (3 * N * H) + (N + head) * H
    tl.store(to + i[None, :], left.to(dtype), mask=here)
    tl.store(to + half + i[None, :], right.to(dtype), mask=here)
    if VALUE:
        score = tl.load(value + b * S + n, mask=n < S, other=0.0)
        # v is already multiplied by the score here. Where the score has underflowed to 0, its gradient is 0 too.
        dscore = tl.sum(dv * val.to(tl.float32), 1) / tl.where(score > 0.0, score, 1.0)
        tl.store(dvalue + bn * S + n, dscore, mask=n < S)
        dv = dv * score[:, None]
    tl.store(to + N * H + h[None, :], dv.to(dtype), mask=here)
    if BIAS:
        tl.store(dbias + bn * S + n, db, mask=n < S)


def tile_for(tiles: dict[int, Tile], head_size: int) -> Tile:
    return tiles[min(size for size in tiles if size >= head_size)]


def described(parts: Tensor, rows: tuple[int, ...]) -> list[Any]:
    """Parts (q, k, v, or some of them) as tables of rows, loaded `rows` at a time by the GPU's copy engine.

    A block that extends past its head's last row reads rows of the next head, or of the next row of the batch. Kernels
    replace them by zeros: their weight is 0, but 0 times NaN would be NaN.
    """
    tables = (part.flatten(0, 2) for part in parts)
    return [TensorDescriptor.from_tensor(table, [n, table.shape[1]]) for table, n in zip(tables, rows, strict=True)]


def in_base_2(key_bias: Tensor) -> Tensor:
    return (key_bias * LOG2E.value).contiguous()


def rotate(
    qkv: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, value: Tensor | None, *, n_head: int
) -> Float[Tensor, "3 B N S H"]:
    """q, k and v with their bias, q and k rotated, v times its scores."""
    batch, streams, head = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * n_head)
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    rotated = qkv.new_empty(3, batch, n_head, streams, head)
    rotate_qkv[(triton.cdiv(streams, ROTATED_STREAMS), batch)](
        qkv, bias, cos, sin, cos if value is None else value.contiguous(), rotated, streams, n_head, rotated[0].numel(),
        H=head, VALUE=value is not None, BS=ROTATED_STREAMS,
    )  # fmt: skip
    return rotated


@on_its_device
def forward(
    qkv: Tensor,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_bias: Tensor | None,
    value: Tensor | None,
    *,
    n_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads, and for the backward the rotated q, k and v and the log of the weights' sums."""
    rotated = rotate(qkv, bias, cos, sin, value, n_head=n_head)
    _, batch, _, streams, head = rotated.shape
    out = qkv.new_empty(batch, streams, n_head * head)
    lse = qkv.new_empty(batch, n_head, streams, dtype=torch.float32)
    tile = tile_for(FORWARD, head)
    q, k, v = described(rotated, (tile.queries, tile.keys, tile.keys))
    _attend_forward[(triton.cdiv(streams, tile.queries) * batch * n_head,)](
        q, k, v, lse if key_bias is None else in_base_2(key_bias), out, lse,
        LOG2E.value / math.sqrt(head), streams, n_head,
        H=head, BIAS=key_bias is not None, EVEN=streams % tile.keys == 0, **tile.launch(),
    )  # fmt: skip
    return out, rotated, lse


@on_its_device
def backward(
    dout: Tensor,
    rotated: Tensor,
    out: Tensor,
    lse: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_bias: Tensor | None,
    value: Tensor | None,
    drotated: Tensor | None,
    *,
    is_bounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv, of its bias, and of key bias and value score together (undefined for one that is None).

    drotated  gradients of the rotated keys and values from elsewhere; its first part is not read
    """
    _, batch, n_head, streams, head = rotated.shape
    dout, cos, sin = dout.contiguous(), cos.contiguous(), sin.contiguous()
    dqkv = rotated.new_empty(batch, streams, 3 * n_head * head)
    delta = torch.empty_like(lse)
    of_heads = lse.new_empty(2, batch, n_head, streams if key_bias is not None or value is not None else 0)
    bias = lse if key_bias is None else in_base_2(key_bias)
    score = lse if value is None else value.contiguous()
    scale = 1 / math.sqrt(head)
    tile = tile_for(QUERY_GRADIENT, head)
    q, k, v = described(rotated, (tile.queries, tile.keys, tile.keys))
    _query_gradient[(triton.cdiv(streams, tile.queries) * batch * n_head,)](
        q, k, v, bias, out, dout, lse, delta, cos, sin, dqkv, scale, scale * LOG2E.value, streams, n_head,
        H=head, BIAS=key_bias is not None, EVEN=streams % tile.keys == 0, **tile.launch(),
    )  # fmt: skip
    tile = tile_for(KEY_GRADIENT, head)
    q, k, v = described(rotated, (tile.queries, tile.keys, tile.keys))
    do = TensorDescriptor.from_tensor(dout.flatten(0, 1), [tile.queries, head])
    _key_gradient[(triton.cdiv(streams, tile.keys) * batch * n_head,)](
        q, k, v, bias, score, do, lse, delta, cos, sin, lse if drotated is None else drotated.contiguous(),
        dqkv, *of_heads, scale, scale * LOG2E.value, streams, n_head, rotated[0].numel(),
        H=head, BIAS=key_bias is not None, APART=is_bounded, VALUE=value is not None, MORE=drotated is not None,
        EVEN=streams % tile.queries == 0, **tile.launch(),
    )  # fmt: skip
    return dqkv, column_sums(dqkv.flatten(0, 1)), of_heads.sum(2)
