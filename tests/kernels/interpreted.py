"""Triton's interpreter, which runs kernels on a CPU: `TRITON_INTERPRET=1 python -m kernels.interpreted PROBE [WORD …]`.

PROBE is a module of tests, such as kernels.block_probe. Nearly all of the time is Python around small arrays, so what
the interpreter does again for every operation counts.
"""

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
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
    _share_types()
    _skip_what_is_alike()
    _without_overflow()


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


def _share_types() -> None:
    """Every tensor gets a type of its own, and works out its shape from it. Nothing ever changes either."""
    types: dict[tuple[Any, ...], Any] = {}
    of_tensors: dict[int, dict[str, Any]] = {}
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__

    def shared_type(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = id(element_ty), *shape  # a pointer has no hash; the type keeps it, so that no other gets its id
        if (found := types.get(key)) is None:
            found = object.__new__(cls)
            make_type(found, element_ty, shape)
            types[key] = found
        return found

    def tensor_of_type(self: Any, handle: Any, type: Any) -> None:
        if (known := of_tensors.get(id(type))) is None:
            make_tensor(self, None, type)
            known = of_tensors[id(type)] = vars(self).copy()  # keeps the type
        vars(self).update(known)
        self.handle = handle

    tl.block_type.__new__ = shared_type
    tl.block_type.__init__ = lambda self, element_ty, shape: None
    tl.tensor.__init__ = tensor_of_type


def _skip_what_is_alike() -> None:
    """Most types that it compares are one."""
    semantic, equal = interpreter.interpreter_semantic, tl.dtype.__eq__
    broadcast = semantic.broadcast_impl_value
    semantic.broadcast_impl_value = lambda a, b: (a, b) if a.type is b.type else broadcast(a, b)
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _without_overflow() -> None:
    """Sums of integers are computed in 64 bits too, for an assertion that the interpreter makes in debug mode alone."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    prepare_interpreter()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
