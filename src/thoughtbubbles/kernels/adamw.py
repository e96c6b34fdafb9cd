"""AdamW for all parameters in one launch, and the sum of squares of all gradients in another one.

    g ← c · g,                      c = min(1, clip / (‖g‖ + 1e-6)), over all tensors
    m ← m + (1 − β₁)(g − m)
    v ← v + (1 − β₂)(g² − v)
    p ← p − lr · (λp + m̂ / (√v̂ + ε)),      m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)

The step is memory-bound: p, g, m, v are read once, p, m, v are written once. (torch's fused kernel also writes c · g.)
A table on the device holds the addresses; all tensors are cut into pieces, and a second table holds the tensor of each
piece. Whether the step is taken, c and t are read on the device too, so the host never waits. One program sums the
squares of a piece into its own slot, without atomics, so the result is bitwise deterministic. The reference
implementation is the torch path of `train/optim.py`.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

PIECE = 4096  # elements that one program squares
BLOCK = 1024  # elements that one program updates: with four tensors to read, fewer of each keep the memory busy
WARPS = 4
WIDTH = tl.constexpr(7)  # of the table: addresses of p, g, m, v; elements; first piece; whether it decays
BYTES = tl.constexpr(4)  # of an element
WIDE = tl.constexpr(16)  # bytes that a thread reads in one load where the address allows it


@triton.jit
def _pointer(address, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, WIDE) if ALIGNED else pointer


@triton.jit
def _adamw_squares(table, owner, sums, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    piece = tl.program_id(0)
    row = table + tl.load(owner + piece) * WIDTH
    begin = (piece - tl.load(row + 5)) * PIECE
    n = tl.load(row + 4) - begin  # elements from here on
    at = tl.load(row + 1) + begin * BYTES
    here = tl.arange(0, PIECE)
    if (n >= PIECE) & (at % WIDE == 0):
        g = tl.load(_pointer(at, True) + here)
        tl.store(sums + piece, tl.sum(g * g, 0))
    else:
        g = tl.load(_pointer(at, False) + here, mask=here < n, other=0.0)
        tl.store(sums + piece, tl.sum(g * g, 0))


@triton.jit
def _update_block(  # type: ignore[no-untyped-def]
    p_at, g_at, m_at, v_at, n, factor, lr, decay, rise1, rise2, scale1, scale2, epsilon, BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    here = tl.arange(0, BLOCK)
    mask = None if FAST else here < n
    p_at, g_at = _pointer(p_at, FAST) + here, _pointer(g_at, FAST) + here
    m_at, v_at = _pointer(m_at, FAST) + here, _pointer(v_at, FAST) + here
    p, g = tl.load(p_at, mask=mask), tl.load(g_at, mask=mask) * factor
    m, v = tl.load(m_at, mask=mask), tl.load(v_at, mask=mask)
    m += rise1 * (g - m)
    v += rise2 * (g * g - v)
    p -= lr * (decay * p + m * scale1 / (tl.sqrt(v) * scale2 + epsilon))
    tl.store(p_at, p, mask=mask)
    tl.store(m_at, m, mask=mask)
    tl.store(v_at, v, mask=mask)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    table, owner, scalars, lr, decay, rise1, rise2, epsilon, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    """`scalars`: c; whether the step is taken; 1 / (1 − β₁ᵗ); 1 / √(1 − β₂ᵗ). `rise`: 1 − β."""
    factor, taken, scale1, scale2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    piece = tl.program_id(0) // (PIECE // BLOCK)
    row = table + tl.load(owner + piece) * WIDTH
    begin = (piece - tl.load(row + 5)) * PIECE + tl.program_id(0) % (PIECE // BLOCK) * BLOCK
    n = tl.where(taken != 0.0, tl.load(row + 4) - begin, 0)  # elements to update from here on
    p, g = tl.load(row) + begin * BYTES, tl.load(row + 1) + begin * BYTES
    m, v = tl.load(row + 2) + begin * BYTES, tl.load(row + 3) + begin * BYTES
    decay *= tl.load(row + 6).to(tl.float32)
    if (n >= BLOCK) & ((p | g | m | v) % WIDE == 0):
        _update_block(p, g, m, v, n, factor, lr, decay, rise1, rise2, scale1, scale2, epsilon, BLOCK, True)
    elif n > 0:
        _update_block(p, g, m, v, n, factor, lr, decay, rise1, rise2, scale1, scale2, epsilon, BLOCK, False)


class Entry(NamedTuple):
    """One parameter: float32, contiguous, all on one device."""

    parameter: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    decays: bool


class Plan(NamedTuple):
    """Where all tensors are. Keeps them alive, so that the addresses stay valid."""

    table: Int[Tensor, "tensors 7"]
    owner: Int[Tensor, "pieces"]  # the tensor of each piece
    n_updated: int  # pieces of the entries; those of other gradients follow
    tensors: tuple[Sequence[Entry], Sequence[Tensor]]


class Planner:
    """Uploads the tables only when a tensor has moved, which the gradients of a CUDA graph never do."""

    def __init__(self, device: torch.device):
        self.device = device
        self._places: list[tuple[int, ...]] = []
        self._sizes: list[int] | None = None

    def plan(self, entries: Sequence[Entry], others: Sequence[Tensor] = ()) -> Plan:
        """`others`: gradients that count in the sum of squares only."""
        places: list[tuple[int, ...]] = [
            (p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), p.numel(), decays)
            for p, g, m, v, decays in entries
        ]
        places += [(0, g.data_ptr(), 0, 0, g.numel(), 0) for g in others]
        if self._sizes is None or places != self._places:
            sizes = [place[4] for place in places]
            pieces = [triton.cdiv(size, PIECE) for size in sizes]
            firsts = accumulate(pieces[:-1], initial=0)
            rows = [(*place[:5], first, place[5]) for place, first in zip(places, firsts, strict=True)]
            self._table = self._upload(torch.tensor(rows, dtype=torch.int64))
            if sizes != self._sizes:
                each = torch.arange(len(pieces), dtype=torch.int32)
                self._owner = self._upload(each.repeat_interleave(torch.tensor(pieces, dtype=torch.int64)))
            self._places, self._sizes = places, sizes
            self._n_updated = sum(pieces[: len(entries)])
        return Plan(self._table, self._owner, self._n_updated, (entries, others))

    def _upload(self, table: Tensor) -> Tensor:
        """From newly pinned memory, so that nothing waits and nothing is overwritten during the copy."""
        return table.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else table


def sum_of_squares(plan: Plan) -> Float[Tensor, ""]:
    """The sum of squares of all gradients, in float64."""
    sums = torch.empty(len(plan.owner), device=plan.owner.device)
    if len(sums):
        with torch.cuda.device_of(sums):
            _adamw_squares[(len(sums),)](plan.table, plan.owner, sums, PIECE=PIECE, num_warps=WARPS)
    return sums.sum(dtype=torch.float64)


def update(
    plan: Plan,
    lr: float,
    *,
    factor: Float[Tensor, ""],
    taken: Bool[Tensor, ""],
    updates: Float[Tensor, ""],
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
) -> None:
    """Updates the entries in place, with gradients times `factor`; `updates` is t. Writes nothing unless `taken`."""
    t = updates.double()
    scale1, scale2 = 1 / (1 - torch.pow(betas[0], t)), (1 - torch.pow(betas[1], t)).rsqrt()
    scalars = torch.stack([factor, taken.float(), scale1.float(), scale2.float()])
    numbers = (float(x) for x in (lr, decay, 1 - betas[0], 1 - betas[1], epsilon))
    if plan.n_updated:
        with torch.cuda.device_of(scalars):
            _adamw[(plan.n_updated * (PIECE // BLOCK),)](
                plan.table, plan.owner, scalars, *numbers, PIECE=PIECE, BLOCK=BLOCK, num_warps=WARPS
            )
