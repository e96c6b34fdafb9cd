"""Kernels for the decisions of a fork layer: ranks of candidates, and slots of survivors.

    ranks          for each candidate, the number with a larger key among the tokens up to its own, and in its own
    rank_in_row    the number with a larger key in the full row
    pack           the candidate in each slot (survivors in their order), and the slot of each candidate

Ranks are counted pairwise. The candidates of a row are ordered by token, and at equal levels the earlier candidate has
the larger key, so almost all pairs need one comparison: candidate j of an earlier token counts for i if
level_j ≥ level_i. Only candidates near i, whose token can be the same, need more. That is quadratic, like attention;
the 2048 candidates of 64 rows make 134 million pairs, a few thousandths of a step. The reference
implementations are in model/selection.py; everything is an integer, so both give the same bits.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor

from thoughtbubbles.kernels.launch import on_its_device

MINE, THEIRS = 64, 64  # the tile of pairs that a program compares at a time
PACKED = 1024  # candidates of a row that are packed at a time


@triton.jit
def _levels(key, candidate, inside):  # type: ignore[no-untyped-def]
    """key = level · 2³² − candidate."""
    return ((tl.load(key + candidate, mask=inside, other=0) + candidate) >> 32).to(tl.int32)


@triton.jit
def _ranks(  # type: ignore[no-untyped-def]
    key, token, rank, rank_in_bubble, C,
    WHOLE: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Candidates i of one row; BI is a multiple of BJ. Pairs (i, j) with j before `near` need only the levels."""
    row, first = tl.program_id(1).to(tl.int64) * C, tl.program_id(0) * BI
    key += row
    token += row
    i, j = first + tl.arange(0, BI), tl.arange(0, BJ)
    mine = _levels(key, i, i < C)[:, None]
    near, until = first, tl.minimum(first + BI, C)
    if WHOLE:
        until = C
    else:  # from the first candidate of the first token to the last one of the last token, in full tiles
        my_token = tl.load(token + i, mask=i < C, other=-1)[:, None]
        first_token, last_token = tl.load(token + first), tl.load(token + until - 1)
        while (near > 0) & (tl.load(token + tl.maximum(near - 1, 0)) == first_token):
            near -= BJ
        while (until < C) & (tl.load(token + tl.minimum(until, C - 1)) == last_token):
            until = tl.minimum(until + BJ, C)
    larger = tl.zeros((BI, BJ), tl.int32)
    for start in range(0, near, BJ):
        theirs = _levels(key, start + j, start + j < C)[None, :]
        larger += (theirs >= mine).to(tl.int32)
    same = tl.zeros((BI, BJ), tl.int32)
    for start in range(near, until, BJ):
        other = start + j
        theirs = _levels(key, other, other < C)[None, :]
        beats = (theirs > mine) | ((theirs == mine) & (other[None, :] < i[:, None]))
        beats &= other[None, :] < C
        if WHOLE:
            larger += beats.to(tl.int32)
        else:
            their_token = tl.load(token + other, mask=other < C, other=-1)[None, :]
            larger += (beats & (their_token <= my_token)).to(tl.int32)
            same += (beats & (their_token == my_token)).to(tl.int32)
    tl.store(rank + row + i, tl.sum(larger, 1), mask=i < C)
    if not WHOLE:
        tl.store(rank_in_bubble + row + i, tl.sum(same, 1), mask=i < C)


@triton.jit
def _pack(survives, chosen, place, C, N, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row, from left to right."""
    row = tl.program_id(0).to(tl.int64)
    filled = 0
    for start in range(0, C, BC):
        candidate = start + tl.arange(0, BC)
        lives = tl.load(survives + row * C + candidate, mask=candidate < C, other=0).to(tl.int32)
        slot = filled + tl.cumsum(lives, 0) - lives
        fits = (lives > 0) & (slot < N)
        tl.store(chosen + row * N + slot, candidate.to(tl.int64), mask=fits)
        tl.store(place + row * C + candidate, tl.where(fits, slot, N).to(tl.int64), mask=candidate < C)
        filled += tl.sum(lives, 0)
    for start in range(filled, N, BC):
        slot = start + tl.arange(0, BC)
        tl.store(chosen + row * N + slot, tl.zeros((BC,), tl.int64) + C, mask=slot < N)


def ranks(key: Int[Tensor, "B C"], token: Int[Tensor, "B C"]) -> tuple[Int[Tensor, "B C"], Int[Tensor, "B C"]]:
    rank, rank_in_bubble = (key.new_empty(key.shape, dtype=torch.int32) for _ in range(2))
    _launch_ranks(key, token, rank, rank_in_bubble, whole=False)
    return rank, rank_in_bubble


def rank_in_row(key: Int[Tensor, "B C"]) -> Int[Tensor, "B C"]:
    rank = key.new_empty(key.shape, dtype=torch.int32)
    _launch_ranks(key, key, rank, rank, whole=True)
    return rank


@on_its_device
def _launch_ranks(key: Tensor, token: Tensor, rank: Tensor, rank_in_bubble: Tensor, *, whole: bool) -> None:
    rows, candidates = key.shape
    _ranks[triton.cdiv(candidates, MINE), rows](
        key.contiguous(), token.contiguous(), rank, rank_in_bubble, candidates,
        WHOLE=whole, BI=MINE, BJ=THEIRS, num_warps=4,
    )  # fmt: skip


@on_its_device
def pack(survives: Bool[Tensor, "B C"], n_slots: int) -> tuple[Int[Tensor, "B n"], Int[Tensor, "B C"]]:
    rows, candidates = survives.shape
    chosen = torch.empty(rows, n_slots, dtype=torch.int64, device=survives.device)
    place = torch.empty(rows, candidates, dtype=torch.int64, device=survives.device)
    _pack[(rows,)](survives.contiguous(), chosen, place, candidates, n_slots, BC=PACKED, num_warps=4)
    return chosen, place
