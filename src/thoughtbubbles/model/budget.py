"""The budget: how many streams a row may hold for each of its tokens, as an exact fraction.

The paper's κ is a number of streams; ours is the ratio r = κ / T. Rounding must be exact: in floats
ceil(1.1 · 50) is 56 and floor(1.15 · 100) is 114, one stream too many and one too few. So a budget travels as two
integers, and every cap is integer arithmetic, on the GPU too.

A budget is at least 1. From `ModelConfig.max_bubble` on, the most that the fork layers can make of a token, no cap ever
binds: such a budget is allowed wherever one can be given, and means no limit (`ModelConfig.is_unlimited`). The one
bound is that of integers on the device: the numerator times the block size has to stay below 2⁶³ (`check_range`).
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

Number = int | float | str | Fraction  # and whatever else writes itself as a decimal, such as NumPy's numbers
BudgetLike = Number | Sequence[Number]

INT64_MAX = 2**63 - 1


class Budget(NamedTuple):
    """Streams allowed per token: one fraction for every row of a batch, or one for each row."""

    numerator: tuple[int, ...]
    denominator: tuple[int, ...]

    @classmethod
    def of(cls, value: "BudgetLike | Budget", *, name: str = "budget") -> "Budget":
        """Reads a number, or one number per row. A float stands for the shortest decimal that denotes it."""
        if isinstance(value, Budget):
            rows: list[Any] = _fractions(value, name)
        elif isinstance(value, Tensor):
            raise ValueError(
                f"{name} is a tensor: its rounding would decide the number of streams; pass Python numbers (x.tolist())"
            )
        else:
            rows = list(value) if isinstance(value, (list, tuple)) else [value]
        if not rows:
            raise ValueError(f"{name} is empty: give one number, or one for each row")
        exact = [_exact(row, name) for row in rows]
        return cls(tuple(n for n, _ in exact), tuple(d for _, d in exact))

    @property
    def rows(self) -> int:
        """1 when the same budget serves every row."""
        return len(self.numerator)

    def floor(self, tokens: Int[Tensor, "#B n"]) -> Int[Tensor, "_ n"]:
        numerator, denominator = self._columns(tokens.device)
        return tokens * numerator // denominator

    def ceil(self, tokens: Int[Tensor, "#B n"]) -> Int[Tensor, "_ n"]:
        numerator, denominator = self._columns(tokens.device)
        return -(-tokens * numerator // denominator)

    def largest_floor(self, tokens: int) -> int:
        """The largest cap of any row, as a Python number: it sizes tensors."""
        return max(tokens * n // d for n, d in zip(self.numerator, self.denominator, strict=True))

    def largest_ceil(self, tokens: int) -> int:
        return max(-(-tokens * n // d) for n, d in zip(self.numerator, self.denominator, strict=True))

    def check_range(self, tokens: int, *, name: str = "budget") -> None:
        """Caps are int64 on the device; a budget of very many digits would overflow there."""
        if max(self.numerator) * tokens > INT64_MAX:
            raise ValueError(
                f"{name} is too large or has too many digits for {tokens} tokens: round it, e.g. to 4 decimals"
            )

    def _columns(self, device: torch.device) -> tuple[int | Tensor, int | Tensor]:
        if self.rows == 1:
            return self.numerator[0], self.denominator[0]
        return (
            torch.tensor(self.numerator, device=device)[:, None],
            torch.tensor(self.denominator, device=device)[:, None],
        )


def brief(value: object) -> str:
    """A value as it is written, for a message of one line; Python itself refuses to write numbers of many digits."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:
        return "a number of very many digits"
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= 100 else f"{text[:100]}…"


def _fractions(value: Budget, name: str) -> list[Any]:
    if {type(part) for column in value for part in column} != {int} or len({len(column) for column in value}) != 1:
        raise ValueError(f"{name} = {brief(value)}: a Budget has as many numerators as denominators, all of them int")
    return [Fraction(n, d) if d else f"{n}/{d}" for n, d in zip(*value, strict=True)]


def _exact(value: Any, name: str) -> tuple[int, int]:
    """Numerator and denominator of the decimal that was written."""
    try:
        text = str(value)
        # Fraction writes 1e99999999 out in full: looked at first, so that nobody waits for it.
        exponent = re.search(r"[eE]([+-]?[\d_]+)\s*$", text)
        if isinstance(value, bool) or len(text) > 200 or (exponent and abs(int(exponent[1])) > 20):
            raise ValueError
        fraction = Fraction(text)
    except (ValueError, ZeroDivisionError, RecursionError):
        raise ValueError(f"{name} = {brief(value)} is not a number: give streams per token, e.g. 2 or 1.5") from None
    if fraction < 1:
        raise ValueError(
            f"{name} = {value} is below 1: every token keeps its original stream, so give 1 or more streams per token"
        )
    return fraction.numerator, fraction.denominator
