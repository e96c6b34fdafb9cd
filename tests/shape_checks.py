"""The type checker that conftest.py gives to all functions of the package."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Functions inside another are made anew by every call of it; their checks, which take longer, only when used."""
    if "<locals>" not in function.__qualname__:
        return beartype(function)

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return beartype(function)(*arguments, **options)

    return call
