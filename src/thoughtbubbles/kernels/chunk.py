"""Attention of new streams of several rows over a KV cache: chunks of prompts, and decoding steps of many rows.

First their own keys and values are stored there. Then every program has one head of a block of streams of a row, and
attends over the slots of that row up to theirs. (A step of few rows has too few programs for that: see decode.py.)
Private forks are not stored: whole bubbles are in one block, whose forks attend to each other directly.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from thoughtbubbles.kernels.launch import ahead, on_its_device


class Tile(NamedTuple):
    """Streams of a program, cached streams that it reads at a time, and how it loads them."""

    streams: int
    slots: int
    stages: int
    warps: int


CHUNK = Tile(64, 64, 3, 4)
STEP = Tile(16, 32, 4, 2)  # `streams`: at least as many as a bubble has
STORED = 16  # streams of a program that stores
WIDEST_PRIVATE = CHUNK.streams // 2  # streams of a bubble, so that a block of whole bubbles is at least half full
NOTHING = tl.constexpr(-1.0e30)  # a masked logit: its weight is exactly 0


@triton.jit
def add_to_softmax(logits, values, most, total, summed):  # type: ignore[no-untyped-def]
    """A softmax so far (its largest logit, the sum of its weights, and of its weighted values), and more of it."""
    highest = tl.maximum(most, tl.max(logits, 1))
    weights = tl.exp(logits - highest[:, None])
    fade = tl.exp(most - highest)
    summed = tl.dot(weights.to(values.dtype), values, summed * fade[:, None])
    return highest, total * fade + tl.sum(weights, 1), summed


@triton.jit
def rotated(x, row, h, c, t, real, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """A vector of each row of x, rotated: the channel half a head away is its partner."""
    own = tl.load(x + row[:, None] + h[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    partner = tl.load(x + row[:, None] + ((h + H // 2) % H)[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    return own * c + partner * t


@triton.jit
def angles(cos, sin, stream, h, real, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines, and sines with the sign that a channel's partner has."""
    at = stream[:, None] * (H // 2) + (h % (H // 2))[None, :]
    c = tl.load(cos + at, mask=real[:, None], other=1.0)
    t = tl.load(sin + at, mask=real[:, None], other=0.0)
    return c, tl.where((h < H // 2)[None, :], -t, t)


@triton.jit
def gated(heads, gate, at, real):  # type: ignore[no-untyped-def]
    """Outputs of a head times the sigmoid of their logits, each rounded first, as without kernels."""
    dtype: tl.constexpr = gate.dtype.element_ty
    by = tl.sigmoid(tl.load(gate + at, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    return heads.to(dtype).to(tl.float32) * by[:, None]


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    qkv, cos, sin, value_gate, key, value, row, slot, q, M, S,
    N: tl.constexpr, GATE: tl.constexpr, H: tl.constexpr, BW: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rotates queries and keys of one head, and stores keys and attenuated values in their slots."""
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    stream, h = tl.program_id(0) * BW + tl.arange(0, BW), tl.arange(0, H)
    real = stream < M
    c, t = angles(cos, sin, stream, h, real, H)
    of_stream = (stream * 3 * N + head) * H
    queries = rotated(qkv, of_stream, h, c, t, real, H)
    tl.store(q + (stream * N + head)[:, None] * H + h[None, :], queries.to(q.dtype.element_ty), mask=real[:, None])
    keys = rotated(qkv + N * H, of_stream, h, c, t, real, H)
    values = tl.load(qkv + 2 * N * H + of_stream[:, None] + h[None, :], mask=real[:, None], other=0.0)
    if GATE:
        values = values.to(tl.float32) * tl.load(value_gate + stream, mask=real, other=0.0)[:, None]
    of_row = (tl.load(row + stream, mask=real, other=0).to(tl.int64) * N + head) * S
    into = (of_row + tl.load(slot + stream, mask=real, other=0))[:, None] * H + h[None, :]
    tl.store(key + into, keys.to(key.dtype.element_ty), mask=real[:, None])
    tl.store(value + into, values.to(value.dtype.element_ty), mask=real[:, None])


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, key, value, key_bias, blocks, out, scale, S, qkv, cos, sin, value_gate, own_bias, token, own_slot,
    head_gate,
    N: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, HEAD: tl.constexpr, PRIVATE: tl.constexpr,
    H: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """PRIVATE: slots are the originals of the row's tokens, and a stream that is not in its token's slot is a fork."""
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    blocks += tl.program_id(0) * 4
    row, first, n, border = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2), tl.load(blocks + 3)
    w, h, s = tl.arange(0, BW), tl.arange(0, H), tl.arange(0, BS)
    key += (row * N + head).to(tl.int64) * S * H
    value += (row * N + head).to(tl.int64) * S * H
    stream, real = first + w, w < n
    here = (stream * N + head)[:, None] * H + h[None, :]
    queries = tl.load(q + here, mask=real[:, None], other=0.0)
    if PRIVATE:
        number = tl.load(token + stream, mask=real, other=0)
        is_fork = tl.load(own_slot + stream, mask=real, other=0) != number
        last = number - is_fork.to(tl.int32)  # the last slot that it sees: a fork does not see its own original
        end = tl.where(n > 0, border, 0)
    else:
        last = border + w
        end = tl.where(n > 0, border + n, 0)
    most = tl.full((BW,), NOTHING, tl.float32)
    total = tl.zeros((BW,), tl.float32)
    summed = tl.zeros((BW, H), tl.float32)
    for start in tl.range(0, end, BS, num_stages=STAGES):
        slot = start + s
        there = slot < end
        at = slot[:, None] * H + h[None, :]
        keys = tl.load(key + at, mask=there[:, None], other=0.0)
        logits = tl.dot(queries, tl.trans(keys)) * scale
        if BIAS:
            logits += tl.load(key_bias + row * S + slot, mask=there, other=0.0)[None, :]
        logits = tl.where(slot[None, :] <= last[:, None], logits, NOTHING)
        values = tl.load(value + at, mask=there[:, None], other=0.0)
        most, total, summed = add_to_softmax(logits, values, most, total, summed)
    if PRIVATE:  # what a fork of the first token has summed so far is nothing, and vanishes here
        of_stream = (stream * 3 * N + head) * H
        c, t = angles(cos, sin, stream, h, real, H)
        keys = rotated(qkv + N * H, of_stream, h, c, t, real, H).to(key.dtype.element_ty)
        values = tl.load(qkv + 2 * N * H + of_stream[:, None] + h[None, :], mask=real[:, None], other=0.0)
        if GATE:
            values = values.to(tl.float32) * tl.load(value_gate + stream, mask=real, other=0.0)[:, None]
        logits = tl.dot(queries, tl.trans(keys)) * scale
        if BIAS:
            logits += tl.load(own_bias + stream, mask=real, other=0.0)[None, :]
        is_own = (number[None, :] == number[:, None]) & (w[None, :] <= w[:, None])
        logits = tl.where(is_own & (is_fork & real)[None, :], logits, NOTHING)
        most, total, summed = add_to_softmax(logits, values.to(value.dtype.element_ty), most, total, summed)
    summed = summed / total[:, None]
    if HEAD:
        summed = gated(summed, head_gate, stream * N + head, real)
    tl.store(out + here, summed.to(out.dtype.element_ty), mask=real[:, None])


def blocks_of(rows: Sequence[int], used: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Row, first packed stream, number of streams and first slot of each block."""
    found, first = [], 0
    for row, before, count in zip(rows, used, counts, strict=True):
        for begin in range(0, count, CHUNK.streams):
            found.append((row, first + begin, min(CHUNK.streams, count - begin), before + begin))
        first += count
    return found


def blocks_of_bubbles(
    rows: Sequence[int], counts: Sequence[int], token: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """For private forks: row, first packed stream, number of streams and number of tokens up to the end of each block.

    No bubble is in two blocks. token: of each packed stream, in its row
    """
    found, begin = [], 0
    for row, count in zip(rows, counts, strict=True):
        end = begin + count
        while begin < end:
            stop = min(begin + CHUNK.streams, end)
            while stop < end and token[stop] == token[stop - 1]:
                stop -= 1
            found.append((row, begin, stop - begin, token[stop - 1] + 1))
            begin = stop
    return found


class Private(NamedTuple):
    """What attention needs of private forks."""

    token: Int[Tensor, "M"]
    key_bias: Float[Tensor, "M"] | None


@on_its_device
def attend(
    qkv: Float[Tensor, "M 3D"],
    cos: Float[Tensor, "M H/2"],
    sin: Float[Tensor, "M H/2"],
    value_gate: Float[Tensor, "M"] | None,
    key: Float[Tensor, "R N S H"],
    value: Float[Tensor, "R N S H"],
    key_bias: Float[Tensor, "R S"] | None,
    head_gate: Float[Tensor, "M N"] | None,
    where: tuple[Int[Tensor, "M"], Int[Tensor, "M"]],
    blocks: Int[Tensor, "n 4"],
    *,
    private: Private | None = None,
    first: int = 0,
    most: int | None = None,
    fill: bool = False,
) -> Float[Tensor, "M D"]:
    """Stores keys and values in the rows and slots `where`, then attends.

    head_gate  logits of the gates of heads
    blocks   of `blocks_of`, or with `private` of `blocks_of_bubbles`; at most `most` streams each if that is given
    private  of a model whose forks are private, or do not pass the blocks now: stored in a slot that is never read
    first    the slot that counts as the first
    fill     whether streams that are in no block get zeros; else they are not written
    """
    (_, heads, slots, size), m = key.shape, qkv.shape[0]
    key, value = key[:, :, first:], value[:, :, first:]  # rows are as far apart as before
    tile, options = CHUNK, ahead(qkv.device)
    if most is not None:
        tile = STEP._replace(streams=max(STEP.streams, triton.next_power_of_2(most)))
    q = torch.empty(m, heads * size, dtype=qkv.dtype, device=qkv.device)
    out = torch.zeros_like(q) if fill else torch.empty_like(q)
    _store[triton.cdiv(m, STORED), heads](
        qkv, cos, sin, cos if value_gate is None else value_gate, key, value, *where, q, m, slots,
        N=heads, GATE=value_gate is not None, H=size, BW=STORED, num_warps=4, **options,
    )  # fmt: skip
    token, own_bias = (where[1], None) if private is None else private
    key_bias = None if key_bias is None else key_bias[:, first:]
    _attend[blocks.shape[0], heads](
        q, key, value, cos if key_bias is None else key_bias, blocks, out, 1 / math.sqrt(size), slots,
        qkv, cos, sin, cos if value_gate is None else value_gate,
        cos if own_bias is None else own_bias, token, where[1], cos if head_gate is None else head_gate,
        N=heads, BIAS=key_bias is not None, GATE=value_gate is not None, HEAD=head_gate is not None,
        PRIVATE=private is not None, H=size, BW=tile.streams, BS=tile.slots, STAGES=tile.stages, num_warps=tile.warps,
        **options,
    )  # fmt: skip
    return out
