"""GPU kernels, each beside a plain twin that says what it computes. Nothing here is needed to run a model.

norm, attention, turn, gelu, sums, loss, fork, adamw    for a step of training
decode                                                  for a step of writing
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import Concatenate, ParamSpec, TypeVar

import torch

Rest = ParamSpec("Rest")
Result = TypeVar("Result")
HAS_TRITON = find_spec("triton") is not None
_are_wanted = True


def serve(x: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether our kernels take x: on a GPU; those behind matrix products in half precision (the products' `dtype`)."""
    return x.is_cuda and HAS_TRITON and _are_wanted and dtype in (None, torch.bfloat16, torch.float16)


@contextmanager
def plain_twins() -> Iterator[None]:
    """No kernel of ours in here: to compare with."""
    global _are_wanted
    before, _are_wanted = _are_wanted, False
    try:
        yield
    finally:
        _are_wanted = before


def on_its_device(
    launch: Callable[Concatenate[torch.Tensor, Rest], Result],
) -> Callable[Concatenate[torch.Tensor, Rest], Result]:
    """Kernels are launched on the current GPU, which must be the one of the first tensor."""

    @wraps(launch)
    def launched(first: torch.Tensor, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        with torch.cuda.device_of(first):
            return launch(first, *args, **kwargs)

    return launched
