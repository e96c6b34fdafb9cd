"""Errors of one rank become errors of all, so that nobody waits; each in one line."""

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from thoughtbubbles.distributed import World
from thoughtbubbles.files import reason, short_name

Value = TypeVar("Value")
NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory")  # in torch's words


def agree(world: World, work: Callable[[], Value]) -> Value:
    """What `work` returns here; an error of files, settings or sizes on any rank is one ValueError on all of them."""
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
        return "out of memory: give smaller batches (--batch, --batch-tokens, --answers-at-once)"
    return str(error) or type(error).__name__


def _is_memory(error: BaseException) -> bool:
    """torch has a class of its own for it, but not on a CPU."""
    is_told = isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))
    return is_told or isinstance(error, (MemoryError, torch.OutOfMemoryError))
