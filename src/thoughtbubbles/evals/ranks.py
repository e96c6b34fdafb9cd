"""Several processes that sit an exam together: each takes its share of the documents, and all see all answers."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from thoughtbubbles.files import reason, short_name

Value = TypeVar("Value")
TROUBLE = (ValueError, OSError, MemoryError, torch.OutOfMemoryError)  # of files, settings and sizes; no other error is


class Ranks(NamedTuple):
    rank: int = 0
    size: int = 1
    group: Any = None  # a process group on the CPU; None without others

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, on all of them, in the order of the ranks."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, work: Callable[[], Value]) -> Value:
        """What `work` returns here; trouble on any rank is the same ValueError on all of them, so nobody waits."""
        found: list[Value] = []
        trouble = None
        try:
            found.append(work())
        except TROUBLE as error:
            trouble = in_words(error)
        first = next((wrong for wrong in self.gather(trouble) if wrong is not None), None)
        if first is not None:
            raise ValueError(first)
        return found[0]


def in_words(error: BaseException) -> str:
    """One line."""
    if isinstance(error, OSError):
        where = f"{short_name(error.filename)}: " if error.filename else ""
        return f"{where}{reason(error)}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out of memory: give smaller batches (--batch, --batch-tokens, --answers-at-once)"
    return str(error)
