"""Several processes that sit an exam together: each takes its share of the documents, and all see all answers."""

from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


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
