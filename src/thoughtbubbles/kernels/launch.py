"""What launches have in common: the device, and how many programs fill it."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

Rest = ParamSpec("Rest")
Result = TypeVar("Result")
MULTIPROCESSORS = 132  # of an H200


def on_its_device(
    launch: Callable[Concatenate[torch.Tensor, Rest], Result],
) -> Callable[Concatenate[torch.Tensor, Rest], Result]:
    """Kernels are launched on the current GPU, which must be the one of the first tensor."""

    @wraps(launch)
    def launched(first: torch.Tensor, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        with torch.cuda.device_of(first):
            return launch(first, *args, **kwargs)

    return launched


def programs_for(x: torch.Tensor, work: int, *, each: int) -> int:
    """`each` for every multiprocessor of the tensor's GPU, but no more than there is work."""
    count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else MULTIPROCESSORS
    return max(1, min(work, each * count))
