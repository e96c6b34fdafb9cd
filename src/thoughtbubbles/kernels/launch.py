"""Helpers for kernel launches: the right device, and how many programs fill it."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

Rest = ParamSpec("Rest")
Result = TypeVar("Result")
MULTIPROCESSORS = 132  # of an H200


def on_its_device(
    launch: Callable[Concatenate[torch.Tensor, Rest], Result],
) -> Callable[Concatenate[torch.Tensor, Rest], Result]:
    """Kernels launch on the current GPU, so this makes the first tensor's GPU the current one."""

    @wraps(launch)
    def launched(first: torch.Tensor, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        with torch.cuda.device_of(first):
            return launch(first, *args, **kwargs)

    return launched


@cache
def ahead(device: torch.device) -> dict[str, bool]:
    """Options of a launch: from Hopper on, a kernel launches before the previous one has ended, and waits inside."""
    is_able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"AHEAD": is_able, "launch_pdl": is_able}


def programs_for(x: torch.Tensor, work: int, *, each: int) -> int:
    """`each` programs per multiprocessor of the tensor's GPU, but at most `work`."""
    count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else MULTIPROCESSORS
    return max(1, min(work, each * count))
