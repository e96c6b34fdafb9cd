"""Ranks and devices of training and evaluation.

Under torchrun there is a process group, even for one rank; otherwise there is none.
"""

import atexit
import gc
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

Value = TypeVar("Value")
PATIENCE = timedelta(hours=4)  # for work of one rank while the others wait: checksums of large data, a slow disk
DEVICES = ("cuda", "mps", "cpu")  # in the order in which `auto` looks for them
GROUPS = count()  # process groups that this process has joined
MESHES: list[DeviceMesh] = []


class World(NamedTuple):
    device: torch.device
    rank: int = 0
    size: int = 1
    is_distributed: bool = False
    cpu_group: Any = None  # a separate process group: checkpoints are written while training continues

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks, on every rank, in the order of the ranks."""
        if not self.is_distributed:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.cpu_group)
        return found

    def first_error(self, error: str | None) -> str | None:
        """The first error of any rank, on all of them, so that they give up together; None if there is none."""
        return next(filter(None, self.gather(error)), None)

    def first(self, work: Callable[[], Value]) -> Value:
        """Runs `work` on the first rank; its result, or its ValueError, reaches all ranks."""
        found: list[Any] = [None, None]
        if self.is_first:
            try:
                found[0] = work()
            except ValueError as error:
                found[1] = str(error)
        if self.is_distributed:
            dist.broadcast_object_list(found, src=0, group=self.cpu_group)
        if found[1] is not None:
            raise ValueError(found[1])
        return found[0]  # type: ignore[no-any-return]

    def total(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.is_distributed:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        if self.is_distributed:
            dist.barrier(group=self.cpu_group)

    def mesh(self) -> DeviceMesh:
        """All ranks in a row, over which a model is sharded."""
        MESHES.append(init_device_mesh(self.device.type, (self.size,)))
        return MESHES[-1]


def find_device(wanted: str, *, among: Collection[str] = DEVICES) -> str:
    """The device that an option names; `auto` is the best available one. `among` restricts the choice."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    here = [name for name in DEVICES if found[name] and name in among]
    if wanted == "auto":
        return here[0]
    if wanted not in here:
        raise ValueError(f"--device {wanted}: not available here; available: {', '.join(here)}")
    return wanted


@cache
def meeting() -> tuple[Any, int, int]:
    """The ranks' shared store, the own rank and their number. Once per process: without torchrun's own store, the first
    rank keeps it, at a fixed port."""
    return next(rendezvous("env://"))  # type: ignore[no-any-return]


@cache
def end_threads_at_exit() -> None:
    """Process groups end with their last reference, and only then gloo's threads: one that still holds a tensor while
    Python shuts down would abort the process. Cycles of a sharded model hold groups, and so do torch's caches, which
    keep every mesh."""

    def end_threads() -> None:
        for mesh in MESHES:
            getattr(mesh, "_pg_registry", {}).clear()  # the one reference to groups from a mesh; not in older versions
        gc.collect()

    atexit.register(end_threads)


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """Joins the process group if started by torchrun, and leaves it at the end."""
    kind = find_device(device)
    if "RANK" not in os.environ:
        yield World(torch.device(kind))
        return
    if kind == "mps":
        raise ValueError("--device mps: torchrun needs cuda or cpu")
    own = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(own)
    end_threads_at_exit()
    store, rank, size = meeting()
    # The store remembers the addresses of a group after its end: a second group with the same keys would wait forever.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=PrefixStore(f"group-{next(GROUPS)}", store),
        rank=rank,
        world_size=size,
        device_id=own if kind == "cuda" else None,
    )
    try:
        cpu_group = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield World(own, dist.get_rank(), dist.get_world_size(), True, cpu_group)
    finally:
        dist.destroy_process_group()
