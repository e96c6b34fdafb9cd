"""Turns an error on one rank into a one-line error on all ranks, so that none waits for it."""

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from thoughtbubbles.distributed import World
from thoughtbubbles.files import reason, short_name

Value = TypeVar("Value")
NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory")  # in torch's messages


def agree(world: World, work: Callable[[], Value]) -> Value:
    """The result of `work` on this rank; an error of files, settings or memory on any rank is a ValueError on all."""
    found: list[Value] = []
    wrong = None
    try:
        found.append(work())
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_memory(error):
            raise
        wrong = _in_words(error)
    first = world.first_error(wrong)
    if first is not None:
        raise ValueError(first)
    return found[0]


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError):
        where = f"{short_name(error.filename)}: " if error.filename else ""
        return f"{where}{reason(error)}"
    if _is_memory(error):
        return "out of memory: use smaller batches (--batch, --batch-tokens, --answers-at-once)"
    return str(error) or type(error).__name__


def _is_memory(error: BaseException) -> bool:
    """torch has a separate exception for it, but not on a CPU."""
    is_told = isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))
    return is_told or isinstance(error, (MemoryError, torch.OutOfMemoryError))
