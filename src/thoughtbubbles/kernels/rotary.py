"""Rotary embedding for the attention kernels: of queries and keys in the forward, of their gradients in the backward.

Channel i is paired with channel i + H/2, as in model/rope.py, whose `rotate` is the reference implementation.
"""

import triton
import triton.language as tl


@triton.jit
def _halves(x, ROWS: tl.constexpr, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """The left and right halves of the channels, which the rotation pairs."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, H // 2)), (0, 2, 1)))


@triton.jit
def rotate_qkv(  # type: ignore[no-untyped-def]
    qkv, bias, cos, sin, value, rotated, S, N, part,
    H: tl.constexpr, VALUE: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """(B, S, 3, N, H) + bias (3, N, H) → (3, B, N, S, H). `part` is the distance between q, k and v in the latter."""
    b = tl.program_id(1)
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    half: tl.constexpr = H // 2
    i = tl.arange(0, half)
    inside = (s < S)[:, None]
    angle = (b * S + s)[:, None] * half + i[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    r = tl.load(sin + angle, mask=inside, other=0.0)
    if VALUE:
        score = tl.load(value + b * S + s, mask=s < S, other=0.0)[:, None]
    dtype: tl.constexpr = rotated.dtype.element_ty
    row = (b * S + s).to(tl.int64)[:, None] * (3 * N * H)
    for n in range(N):
        into = ((b * N + n).to(tl.int64) * S + s[:, None]) * H + i[None, :]
        for which in tl.static_range(3):
            channel = (which * N + n) * H + i
            source = qkv + row + channel[None, :]
            left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
            left += tl.load(bias + channel).to(tl.float32)[None, :]
            right += tl.load(bias + half + channel).to(tl.float32)[None, :]
            if which < 2:
                x = left * c - right * r
                y = right * c + left * r
            else:
                x = left
                y = right
                if VALUE:
                    x = x * score
                    y = y * score
            tl.store(rotated + which * part.to(tl.int64) + into, x.to(dtype), mask=inside)
            tl.store(rotated + which * part.to(tl.int64) + into + half, y.to(dtype), mask=inside)


@triton.jit
def rotate_back(x, cos, sin, angle, here, ROWS: tl.constexpr, H: tl.constexpr):  # type: ignore[no-untyped-def]
    left, right = _halves(x, ROWS, H)
    c = tl.load(cos + angle, mask=here, other=0.0)
    r = tl.load(sin + angle, mask=here, other=0.0)
    return left * c + right * r, right * c - left * r
