"""The budget: how many streams a row may have per token, as an exact fraction.

The paper's κ is a number of streams; ours is the ratio r = κ / T. Rounding must be exact: in floats
ceil(1.1 · 50) is 56 and floor(1.15 · 100) is 114, one stream too many and one too few. So a budget is stored as two
integers, and every cap is computed in integer arithmetic, also on the GPU.

A budget is at least 1. A budget of `ModelConfig.max_bubble` or more, the most streams that a token can have, never
limits anything: it is always allowed and means no limit (`ModelConfig.is_unlimited`). The only upper bound is the range
of int64: the numerator times the context length (`block_size`) must stay below 2⁶³ (`check_range`).
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

Number = int | float | str | Fraction  # and anything else that prints as a decimal, such as NumPy's numbers
BudgetLike = Number | Sequence[Number]

INT64_MAX = 2**63 - 1


class Budget(NamedTuple):
    """Streams allowed per token: one fraction for every row of a batch, or one for each row."""

    numerator: tuple[int, ...]
    denominator: tuple[int, ...]

    @classmethod
    def of(cls, value: "BudgetLike | Budget", *, name: str = "budget") -> "Budget":
        """Parses one number, or one per row. A float is read as the decimal that it prints as."""
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
        """1 if all rows have the same budget."""
        return len(self.numerator)

    @property
    def largest(self) -> Fraction:
        return max(Fraction(n, d) for n, d in zip(self.numerator, self.denominator, strict=True))

    @property
    def shown(self) -> str:
        """For a one-line message: one number, or those of the rows."""
        exact = [Fraction(n, d) for n, d in zip(self.numerator, self.denominator, strict=True)]
        rows = [int(each) if each.denominator == 1 else float(each) for each in exact]
        return brief(rows[0] if self.rows == 1 else rows)

    def floor(self, tokens: Int[Tensor, "#B n"]) -> Int[Tensor, "_ n"]:
        numerator, denominator = self._columns(tokens.device)
        return tokens * numerator // denominator

    def ceil(self, tokens: Int[Tensor, "#B n"]) -> Int[Tensor, "_ n"]:
        numerator, denominator = self._columns(tokens.device)
        return -(-tokens * numerator // denominator)

    def largest_floor(self, tokens: int) -> int:
        """The largest cap of any row, as a Python int: it sizes tensors."""
        return max(tokens * n // d for n, d in zip(self.numerator, self.denominator, strict=True))

    def largest_ceil(self, tokens: int) -> int:
        return max(-(-tokens * n // d) for n, d in zip(self.numerator, self.denominator, strict=True))

    def check_range(self, tokens: int, *, name: str = "budget") -> None:
        """Caps are int64 on the device; a budget with very many digits would overflow."""
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
    """A value's repr for a one-line message, shortened; Python refuses to print integers of very many digits."""
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
    """Numerator and denominator of the decimal as written."""
    try:
        text = str(value)
        # Fraction would expand 1e99999999 in full and take forever, so check the exponent first.
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
