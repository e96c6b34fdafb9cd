"""Triton's interpreter, which runs kernels on a CPU (`TRITON_INTERPRET=1`)."""

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def prepare_interpreter() -> None:
    """Once per process, before the first launch."""
    interpreter._patch_lang_tensor = _accept_arrays_of_one(interpreter._patch_lang_tensor)


def _accept_arrays_of_one(patch: Callable[..., None]) -> Callable[..., None]:
    """The interpreter keeps a scalar as an array of one, which newer NumPy does not take for a number by itself."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched
