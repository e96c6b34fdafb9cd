"""Padded rows: Hugging Face pads on either side and passes a mask; the model expects every row to start at the left.

ids   · · a b c          rows   a b c · ·      lengths  3
      d e f g h                 d e f g h               5
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Padding(NamedTuple):
    """Where the tokens of each row are."""

    lengths: Int[Tensor, "B"]
    into_rows: Int[Tensor, "B n"]  # the column that each position of a row is taken from
    into_columns: Int[Tensor, "B T"]  # and back
    is_real: Bool[Tensor, "B T"]  # by column
    longest: int  # tokens of the longest row: rows need no more positions

    @classmethod
    def of(cls, attention_mask: Tensor) -> "Padding":
        is_real = attention_mask != 0
        column = torch.arange(is_real.shape[1], device=is_real.device)
        lengths, first = is_real.sum(1), is_real.int().argmax(1)[:, None]
        if not torch.compiler.is_compiling():
            cls._check(is_real, lengths, is_real == ((column >= first) & (column < first + lengths[:, None])))
        n = is_real.shape[1]
        longest = n if torch.compiler.is_compiling() else max(int(lengths.max()), 1)
        into_columns = ((column - first) % n).clamp(max=longest - 1)
        return cls(lengths, ((column + first) % n)[:, :longest], into_columns, is_real, longest)

    @staticmethod
    def _check(is_real: Tensor, lengths: Tensor, as_expected: Tensor) -> None:
        if not bool(as_expected.all()):
            row = int((~as_expected).any(1).nonzero()[0])
            raise ValueError(
                f"attention_mask has a hole in row {row}: a row is one piece of text with padding on one or both sides"
            )

    def to_rows(self, values: Int[Tensor, "B T"]) -> Int[Tensor, "B n"]:
        return values.gather(1, self.into_rows)

    def to_columns(self, values: Tensor) -> Tensor:
        """Moves values of each row's tokens, (B, n, V), to the columns of the caller, (B, T, V); 0 at padding."""
        index = self.into_columns[..., None].expand(*self.into_columns.shape, values.shape[-1])
        return values.gather(1, index).masked_fill(~self.is_real[..., None], 0)
