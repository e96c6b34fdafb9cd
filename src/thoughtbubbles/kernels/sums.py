"""Sums over the streams, for gradients of biases and norms: a pass over all rows, then a short pass over its results.

The reference implementation is `x.sum(0, dtype=float32)`.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from thoughtbubbles.kernels.launch import programs_for

ROWS, COLUMNS = 32, 128  # a program's tile in a pass over many rows
LAST_ROWS, LAST_COLUMNS = 128, 16  # and in the last pass, where one program sums all rows of its columns
FEW = 2048  # the last pass takes at most so many rows


@triton.jit(do_not_specialize=["rows"])
def _column_sums(x, sums, R, C, rows, BR: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program sums `rows` rows, a multiple of its tile's."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    total = tl.zeros((BR, BC), tl.float32)
    for i in range(0, rows, BR):
        row = tl.program_id(0).to(tl.int64) * rows + i + tl.arange(0, BR)[:, None]
        total += tl.load(x + row * C + column, mask=(row < R) & (column < C), other=0.0).to(tl.float32)
    to = tl.program_id(1) * BC + tl.arange(0, BC)
    tl.store(sums + tl.program_id(0).to(tl.int64) * C + to, tl.sum(total, 0), mask=to < C)


def column_sums(x: Float[Tensor, "R C"]) -> Float[Tensor, "C"]:
    """Sums in float32 over the rows of a contiguous `x`."""
    rows, columns = x.shape
    if rows > FEW:
        blocks = triton.cdiv(columns, COLUMNS)
        programs = triton.cdiv(programs_for(x, triton.cdiv(rows, ROWS) * blocks, each=8), blocks)
        return column_sums(_summed(x, triton.cdiv(rows, programs), ROWS, COLUMNS))
    return _summed(x, rows, LAST_ROWS, LAST_COLUMNS)[0]


def _summed(x: Float[Tensor, "R C"], each: int, tile_rows: int, tile_columns: int) -> Float[Tensor, "n C"]:
    """Sums of `each` rows, rounded up to full tiles."""
    rows, columns = x.shape
    each = triton.cdiv(each, tile_rows) * tile_rows
    programs = triton.cdiv(rows, each)
    sums = torch.empty(programs, columns, device=x.device)
    grid = (programs, triton.cdiv(columns, tile_columns))
    _column_sums[grid](x, sums, rows, columns, each, BR=tile_rows, BC=tile_columns)
    return sums
