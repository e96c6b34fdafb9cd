"""Attention whose forks are visible to near tokens only (`ModelConfig.fork_reach`), without computing what is hidden.

A query of token t has two kinds of keys, and the loops of attention.py run over each on its own:

    far     the originals of the tokens before t. Their keys and values are gathered into a table of T rows, of which a
            query sees the first t: as in causal attention, but over T keys in place of S
    near    itself, and the forks at or left of it whose tokens are at most `reach` tokens before t: a few keys around
            the diagonal of the streams, in a band that is as wide as a bubble if the reach is 0

In the backward, the gradients of the far table are computed first, by `_far_key_gradient`. `_near_key_gradient` then
adds to each original's own share what the table has for its token. Nothing is added by two programs, so results are
bitwise deterministic. The reference implementation is `Reach.visible` in model/layout.py with `reference_attention`.

With `feedback`, forks go through the blocks after the originals. Then they are the only streams here, at most one per
token, the far table is given, and its gradients are returned; the reference implementation is in model/feedback.py.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from thoughtbubbles.kernels.attention import (
    FORWARD,
    KEY_GRADIENT,
    LOG2E,
    QUERY_GRADIENT,
    attend_over,
    described,
    in_base_2,
    key_over,
    query_over,
    rotate,
    store_key_gradients,
    store_query_gradient,
    tile_for,
)
from thoughtbubbles.kernels.launch import on_its_device
from thoughtbubbles.kernels.sums import column_sums

# The far loops have the tiles of attention.py. With a near loop beside them, the forward takes 214 registers, and two
# programs run at a time, not three; with 168 it spills 24 bytes (compiled for an H200 by Triton 3.9, not timed).
WITH_NEAR = {64: FORWARD[64]._replace(registers=168), 128: FORWARD[128]}
NEAR = 32  # near keys at a time, and in the gradient of keys also near queries: there are few of them


@triton.jit
def _tokens(token, m, S):  # type: ignore[no-untyped-def]
    """Of streams; past the end, that of the last stream."""
    return tl.load(token + tl.minimum(m, S - 1)).to(tl.int32)


@triton.jit
def _forks(token, n, S, T, ALL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens of streams, and whether each is a fork: in use, and (unless ALL are forks) followed by a stream of the
    same token."""
    own = tl.load(token + n, mask=n < S, other=T).to(tl.int32)
    after = own if ALL else tl.load(token + n + 1, mask=n + 1 < S, other=T).to(tl.int32)
    return own, (own < T) & (own == after)


@triton.jit
def _sees(m, own, n, of_key, is_fork, T, reach):  # type: ignore[no-untyped-def]
    """Whether queries m, of tokens `own`, see streams n nearby: themselves, and forks left of them within the reach."""
    return (m == n) | (is_fork & (m > n) & (own - of_key <= reach) & (own < T))


@triton.jit
def _up_to(up_to, t, T):  # type: ignore[no-untyped-def]
    """The streams of tokens 0 … t; 0 if t is negative."""
    return tl.where(t < 0, 0, tl.load(up_to + tl.minimum(tl.maximum(t, 0), T - 1)).to(tl.int32))


@triton.jit
def _near_begin(token, up_to, first, S, T, reach):  # type: ignore[no-untyped-def]
    """The first stream that a query of a block can see nearby. Unused slots see themselves only."""
    t = _tokens(token, first, S)
    return tl.where(t == T, first, _up_to(up_to, t - reach - 1, T))


@triton.jit
def _near_end(token, up_to, last, S, T, reach):  # type: ignore[no-untyped-def]
    """The end of the queries that can see a stream of a block nearby."""
    t = _tokens(token, last, S)
    return tl.minimum(tl.maximum(_up_to(up_to, t + reach, T), last + 1), S)


@triton.jit
def _attend_forward(  # type: ignore[no-untyped-def]
    q, k, v, far_k, far_v, bias2, far_bias2, token, up_to, out, lse, scale2, S, T, N, reach,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    FORKS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    bn = tl.program_id(0) // blocks
    b, head = bn // N, bn % N
    m, h = first + tl.arange(0, BM), tl.arange(0, H)
    token += b * S
    up_to += b * T
    bias2 += b * S
    query = q.load([bn * S + first, 0])
    own = _tokens(token, m, S)
    acc = tl.zeros((BM, H), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    largest = tl.full((BM,), -float("inf"), tl.float32)
    begin = _near_begin(token, up_to, first, S, T, reach)
    for start in tl.range(begin, tl.minimum(first + BM, S), NEAR, num_stages=1):  # too few to overlap loads
        n = start + tl.arange(0, NEAR)
        s = tl.dot(query, k.load([bn * S + start, 0]).T) * scale2
        val = tl.where((n < S)[:, None], v.load([bn * S + start, 0]), 0.0)
        if BIAS:
            s += tl.load(bias2 + n, mask=n < S, other=0.0)[None, :]
        of_key, is_fork = _forks(token, n, S, T, FORKS)
        near = _sees(m[:, None], own[:, None], n[None, :], of_key[None, :], is_fork[None, :], T, reach)
        s = tl.where(near, s, -float("inf"))
        above = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(above == -float("inf"), 0.0, above)  # no key yet that this query sees
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(query.dtype), val, acc * shrink[:, None])
        largest = above
    full = tl.min(own) // BN * BN
    end = tl.max(own)
    far_bias2 += b * T
    acc, total, largest = attend_over(
        acc, total, largest, query, far_k, far_v, bn * T, far_bias2, scale2, 0, full, own, T, BN, BIAS, False, EVEN
    )
    acc, total, largest = attend_over(
        acc, total, largest, query, far_k, far_v, bn * T, far_bias2, scale2, full, end, own, T, BN, BIAS, True, EVEN
    )
    acc = acc / total[:, None]
    to = (b * S + m).to(tl.int64)[:, None] * (N * H) + head * H + h[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=(m < S)[:, None])
    tl.store(lse + bn * S + m, largest + tl.log2(total), mask=m < S)


@triton.jit
def _query_gradient(  # type: ignore[no-untyped-def]
    q, k, v, far_k, far_v, bias2, far_bias2, token, up_to, out, dout, lse, delta, cos, sin, dqkv,
    scale, scale2, S, T, N, reach,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    FORKS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    bn = tl.program_id(0) // blocks
    b, head = bn // N, bn % N
    m, h = first + tl.arange(0, BM), tl.arange(0, H)
    token += b * S
    up_to += b * T
    bias2 += b * S
    here = (m < S)[:, None]
    row = (b * S + m).to(tl.int64)[:, None]
    query = q.load([bn * S + first, 0])
    own = _tokens(token, m, S)
    at = row * (N * H) + head * H + h[None, :]
    do = tl.load(dout + at, mask=here, other=0.0)
    dot_out = tl.sum(do.to(tl.float32) * tl.load(out + at, mask=here, other=0.0).to(tl.float32), 1)
    tl.store(delta + bn * S + m, dot_out, mask=m < S)
    logsum = tl.load(lse + bn * S + m, mask=m < S, other=float("inf"))  # rows past the end have no weights
    dq = tl.zeros((BM, H), tl.float32)
    begin = _near_begin(token, up_to, first, S, T, reach)
    for start in tl.range(begin, tl.minimum(first + BM, S), NEAR, num_stages=1):  # too few to overlap loads
        n = start + tl.arange(0, NEAR)
        key = tl.where((n < S)[:, None], k.load([bn * S + start, 0]), 0.0)
        val = tl.where((n < S)[:, None], v.load([bn * S + start, 0]), 0.0)
        s = tl.dot(query, key.T) * scale2
        if BIAS:
            s += tl.load(bias2 + n, mask=n < S, other=0.0)[None, :]
        of_key, is_fork = _forks(token, n, S, T, FORKS)
        near = _sees(m[:, None], own[:, None], n[None, :], of_key[None, :], is_fork[None, :], T, reach)
        p = tl.where(near, tl.exp2(s - logsum[:, None]), 0.0)
        ds = p * (tl.dot(do, val.T) - dot_out[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq)
    full = tl.min(own) // BN * BN
    end = tl.max(own)
    far_bias2 += b * T
    dq = query_over(
        dq, query, do, logsum, dot_out, far_k, far_v, bn * T, far_bias2, scale2, 0, full, own, T, BN, BIAS, False, EVEN
    )
    dq = query_over(
        dq, query, do, logsum, dot_out, far_k, far_v, bn * T, far_bias2, scale2, full, end, own, T, BN, BIAS, True, EVEN
    )
    store_query_gradient(dq * scale, cos, sin, dqkv, row, here, head, N, H, BM)


@triton.jit
def _far_key_gradient(  # type: ignore[no-untyped-def]
    q, far_k, far_v, far_bias2, token, up_to, dout, lse, delta, far_dk, far_dv, far_db, scale, scale2, S, T, N,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A block of originals, and all queries of later tokens. `scale`: of the gradient of keys."""
    blocks = tl.cdiv(T, BN)
    first = tl.program_id(0) % blocks * BN
    bn = tl.program_id(0) // blocks
    b, head = bn // N, bn % N
    n, h = first + tl.arange(0, BN), tl.arange(0, H)
    token += b * S
    up_to += b * T
    key = far_k.load([bn * T + first, 0])
    val = far_v.load([bn * T + first, 0])
    b2 = tl.zeros((BN,), tl.float32)
    if BIAS:
        b2 = tl.load(far_bias2 + b * T + n, mask=n < T, other=0.0)
    dk = tl.zeros((BN, H), tl.float32)
    dv = tl.zeros((BN, H), tl.float32)
    db = tl.zeros((BN,), tl.float32)
    lse += bn * S
    delta += bn * S
    begin = _up_to(up_to, first, T) // BM * BM
    full = tl.minimum(tl.cdiv(_up_to(up_to, first + BN - 1, T), BM) * BM, S)
    dk, dv, db = key_over(
        dk, dv, db, key, val, b2, q, bn * S, dout, b * S, head * H, lse, delta, token, scale2, begin, full, n, S,
        BM, BIAS and not APART, BIAS, True, True, EVEN,
    )  # fmt: skip
    dk, dv, db = key_over(
        dk, dv, db, key, val, b2, q, bn * S, dout, b * S, head * H, lse, delta, token, scale2, full, S, n, S,
        BM, BIAS and not APART, BIAS, False, True, EVEN,
    )  # fmt: skip
    if BIAS and APART:
        weight = tl.exp2(b2)
        dk = dk * weight[:, None]
        dv = dv * weight[:, None]
        db = db * weight
    to = (bn * T + n).to(tl.int64)[:, None] * H + h[None, :]
    tl.store(far_dk + to, (dk * scale).to(far_dk.dtype.element_ty), mask=(n < T)[:, None])
    tl.store(far_dv + to, dv.to(far_dv.dtype.element_ty), mask=(n < T)[:, None])
    if BIAS:
        tl.store(far_db + bn * T + n, db, mask=n < T)


@triton.jit
def _near_key_gradient(  # type: ignore[no-untyped-def]
    q, k, v, bias2, token, up_to, value, dout, lse, delta, far_dk, far_dv, far_db, cos, sin, dqkv, dbias, dvalue,
    scale, scale2, S, T, N, reach,
    H: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr, BIAS: tl.constexpr, VALUE: tl.constexpr, FORKS: tl.constexpr,
):  # fmt: skip
    """A block of streams as keys, and the queries near them; then the originals' part from the far table, unless the
    streams are FORKS only."""
    blocks = tl.cdiv(S, BN)
    first = tl.program_id(0) % blocks * BN
    bn = tl.program_id(0) // blocks
    b, head = bn // N, bn % N
    n, h = first + tl.arange(0, BN), tl.arange(0, H)
    token += b * S
    up_to += b * T
    key = k.load([bn * S + first, 0])
    val = v.load([bn * S + first, 0])
    b2 = tl.zeros((BN,), tl.float32)
    if BIAS:
        b2 = tl.load(bias2 + b * S + n, mask=n < S, other=0.0)
    of_key, is_fork = _forks(token, n, S, T, FORKS)
    dk = tl.zeros((BN, H), tl.float32)
    dv = tl.zeros((BN, H), tl.float32)
    db = tl.zeros((BN,), tl.float32)
    last = tl.minimum(first + BN, S) - 1
    for start in tl.range(first, _near_end(token, up_to, last, S, T, reach), NEAR, num_stages=1):
        m = start + tl.arange(0, NEAR)
        query = tl.where((m < S)[:, None], q.load([bn * S + start, 0]), 0.0)
        do = tl.where((m < S)[:, None], dout.load([b * S + start, head * H]), 0.0)
        logsum = tl.load(lse + bn * S + m, mask=m < S, other=float("inf"))
        dot_out = tl.load(delta + bn * S + m, mask=m < S, other=0.0)
        own = _tokens(token, m, S)
        s = tl.dot(key, query.T) * scale2 + b2[:, None]
        near = _sees(m[None, :], own[None, :], n[:, None], of_key[:, None], is_fork[:, None], T, reach)
        p = tl.where(near, tl.exp2(s - logsum[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(val, do.T) - dot_out[None, :])
        if BIAS:
            db += tl.sum(ds, 1)
        dk = tl.dot(ds.to(query.dtype), query, dk)
    if not FORKS:
        is_original = (of_key < T) & (is_fork == 0)
        at = (bn * T + of_key).to(tl.int64)[:, None] * H + h[None, :]
        dk += tl.load(far_dk + at, mask=is_original[:, None], other=0.0)
        dv += tl.load(far_dv + at, mask=is_original[:, None], other=0.0)
        if BIAS:
            db += tl.load(far_db + bn * T + of_key, mask=is_original, other=0.0)
    store_key_gradients(
        dk * scale, dv, db, val, value, cos, sin, dqkv, dbias, dvalue, b, head, n, S, N, H, BN, BIAS, VALUE
    )


def _far(
    rotated: Tensor, up_to: Tensor, key_bias: Tensor | None, far: Tensor | None, far_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys, values (2, B, N, T, H) and biases (B, T) of the originals, if not given those among the streams. Past a
    padded row's end: its last original."""
    if far is not None:
        return far.contiguous()[1:], rotated.new_empty(0) if far_bias is None else in_base_2(far_bias)
    slot = (up_to - 1).clamp(min=0)
    index = slot[None, :, None, :, None].expand(2, -1, rotated.shape[2], -1, rotated.shape[-1])
    bias = rotated.new_empty(0, dtype=torch.float32) if key_bias is None else in_base_2(key_bias.gather(1, slot))
    return rotated[1:].gather(3, index), bias


@on_its_device
def forward(
    qkv: Tensor,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_bias: Tensor | None,
    value: Tensor | None,
    token: Tensor,
    up_to: Tensor,
    far: Tensor | None,
    far_bias: Tensor | None,
    *,
    n_head: int,
    reach: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads, and for the backward the rotated q, k and v and the log of the weights' sums.

    token, up_to  the token of each stream, and for each token the number of streams of tokens up to it
    far           q (not used), k and v of originals that are not among the streams, and their key biases
    """
    rotated = rotate(qkv, bias, cos, sin, value, n_head=n_head)
    _, batch, _, streams, head = rotated.shape
    out = qkv.new_empty(batch, streams, n_head * head)
    lse = qkv.new_empty(batch, n_head, streams, dtype=torch.float32)
    token, up_to, n_tokens = token.contiguous(), up_to.contiguous(), up_to.shape[1]
    tile, is_given = tile_for(WITH_NEAR, head), far is not None
    far, far_bias = _far(rotated, up_to, key_bias, far, far_bias)
    _attend_forward[(triton.cdiv(streams, tile.queries) * batch * n_head,)](
        *described(rotated, (tile.queries, NEAR, NEAR)), *described(far, (tile.keys, tile.keys)),
        lse if key_bias is None else in_base_2(key_bias), far_bias, token, up_to, out, lse,
        LOG2E.value / math.sqrt(head), streams, n_tokens, n_head, reach,
        H=head, NEAR=NEAR, BIAS=key_bias is not None, EVEN=n_tokens % tile.keys == 0, FORKS=is_given,
        **tile.launch(),
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
    token: Tensor,
    up_to: Tensor,
    far: Tensor | None,
    far_bias: Tensor | None,
    *,
    reach: int,
    is_bounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qkv, of its bias, of key bias and value score together (undefined for one that is None), of `far`
    (zeros for its queries) and of `far_bias`."""
    _, batch, n_head, streams, head = rotated.shape
    dout, cos, sin = dout.contiguous(), cos.contiguous(), sin.contiguous()
    token, up_to, n_tokens = token.contiguous(), up_to.contiguous(), up_to.shape[1]
    dqkv = rotated.new_empty(batch, streams, 3 * n_head * head)
    delta = torch.empty_like(lse)
    of_heads = lse.new_empty(2, batch, n_head, streams if key_bias is not None or value is not None else 0)
    bias = lse if key_bias is None else in_base_2(key_bias)
    dfar = lse.new_empty(0) if far is None else torch.empty_like(far, memory_format=torch.contiguous_format)
    far_gradients = lse.new_empty(2, batch, n_head, n_tokens, head) if far is None else dfar[1:]
    if far is not None:
        dfar[0] = 0
    is_given, has_far_bias = far is not None, far_bias is not None
    far, far_bias = _far(rotated, up_to, key_bias, far, far_bias)
    far_db = lse.new_empty(batch, n_head, n_tokens)
    scale, has_bias = 1 / math.sqrt(head), key_bias is not None
    tile = tile_for(QUERY_GRADIENT, head)
    _query_gradient[(triton.cdiv(streams, tile.queries) * batch * n_head,)](
        *described(rotated, (tile.queries, NEAR, NEAR)), *described(far, (tile.keys, tile.keys)),
        bias, far_bias, token, up_to, out, dout, lse, delta, cos, sin, dqkv,
        scale, scale * LOG2E.value, streams, n_tokens, n_head, reach,
        H=head, NEAR=NEAR, BIAS=has_bias, EVEN=n_tokens % tile.keys == 0, FORKS=is_given, **tile.launch(),
    )  # fmt: skip
    tile = tile_for(KEY_GRADIENT, head)
    (q,) = described(rotated[:1], (tile.queries,))
    do = TensorDescriptor.from_tensor(dout.flatten(0, 1), [tile.queries, head])
    near_tables = described(rotated, (NEAR, NEAR, NEAR))
    near_do = TensorDescriptor.from_tensor(dout.flatten(0, 1), [NEAR, head])
    _far_key_gradient[(triton.cdiv(n_tokens, tile.keys) * batch * n_head,)](
        q, *described(far, (tile.keys, tile.keys)), far_bias, token, up_to, do, lse, delta, *far_gradients, far_db,
        scale if is_given else 1.0, scale * LOG2E.value, streams, n_tokens, n_head,
        H=head, BIAS=has_bias, APART=is_bounded, EVEN=streams % tile.queries == 0, **tile.launch(),
    )  # fmt: skip
    _near_key_gradient[(triton.cdiv(streams, NEAR) * batch * n_head,)](
        *near_tables, bias, token, up_to, lse if value is None else value.contiguous(), near_do, lse, delta,
        *far_gradients, far_db, cos, sin, dqkv, *of_heads, scale, scale * LOG2E.value, streams, n_tokens, n_head, reach,
        H=head, BN=NEAR, NEAR=NEAR, BIAS=has_bias, VALUE=value is not None, FORKS=is_given,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    of_far_bias = far_db.sum(1) if has_far_bias else lse.new_empty(0)
    return dqkv, column_sums(dqkv.flatten(0, 1)), of_heads.sum(2), dfar, of_far_bias
