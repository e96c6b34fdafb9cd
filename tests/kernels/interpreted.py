"""Triton's interpreter, which runs kernels on a CPU: `TRITON_INTERPRET=1 python -m kernels.interpreted PROBE [WORD …]`.

PROBE is a module of tests, such as kernels.block_probe. Nearly all of the time is Python around small arrays, so what
the interpreter does again for every operation counts.
"""

import runpy
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def prepare_interpreter() -> None:
    """Once per process, before the first launch."""
    interpreter._patch_lang_tensor = _accept_arrays_of_one(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _once_per_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)


def _accept_arrays_of_one(patch: Callable[..., None]) -> Callable[..., None]:
    """The interpreter keeps a scalar as an array of one, which newer NumPy does not take for a number by itself."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _remembered(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """It makes a table of all dtypes for every answer."""
    of_scalars = cache(numpy_dtype)

    def found(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return numpy_dtype(scalar) if isinstance(scalar, tl.pointer_type) else of_scalars(scalar)

    return found


def _once_per_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """It replaces Triton's operations at a launch, and again for every call of a function inside the kernel."""
    nothing = interpreter._LangPatchScope()
    launch, done = nothing, set()

    @cache
    def seen(module: str) -> set[ModuleType]:
        values = vars(sys.modules[module]).values()
        return {value for value in values if isinstance(value, ModuleType) and value in (tl, tl.core)}

    def patched(fn: Any) -> Any:
        nonlocal launch
        if not launch._changes:  # the last launch has ended, and has put everything back
            done.clear()
        wanted = seen(fn.__globals__["__name__"])
        if wanted <= done:
            return nothing
        is_launch = not done
        done.update(wanted)
        scope = patch(fn)
        if is_launch:
            launch = scope
        return scope

    return patched


if __name__ == "__main__":
    prepare_interpreter()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
