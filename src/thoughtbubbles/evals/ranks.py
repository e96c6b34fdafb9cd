"""Several processes that sit an exam together: each takes its share of the documents, and all see all answers."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from thoughtbubbles.files import reason, short_name

Value = TypeVar("Value")
NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory")  # in torch's words


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
        except (ValueError, OSError, MemoryError, RuntimeError) as error:  # of files, settings and sizes
            if isinstance(error, RuntimeError) and not _is_memory(error):
                raise
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
    if _is_memory(error):
        return "out of memory: give smaller batches (--batch, --batch-tokens, --answers-at-once)"
    return str(error)


def _is_memory(error: BaseException) -> bool:
    """torch has a class of its own for it, but not on a CPU."""
    is_told = isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))
    return is_told or isinstance(error, (MemoryError, torch.OutOfMemoryError))
