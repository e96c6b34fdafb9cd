"""Builds configs from JSON and checks every field against its annotation (so True is not accepted as a number)."""

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from thoughtbubbles.files import short_name
from thoughtbubbles.model.budget import brief
from thoughtbubbles.model.config import ModelConfig, is_number, is_whole, without_removed

Config = TypeVar("Config")

LARGEST = 10**15  # upper limit of counts (tokens, steps), far beyond any real training run
WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", Path: "a path"}
KINDS: dict[Any, Callable[[Any], bool]] = {
    int: is_whole,
    float: is_number,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    Path: lambda value: isinstance(value, Path),
    type(None): lambda value: value is None,
}


def read_count(text: str) -> int:
    """A whole number, also as 1e5, 2.5e9 or 100_000."""
    remedy = f"give a whole number up to {LARGEST:.0e}, such as 100_000 or 2.5e9"
    try:
        number = Decimal(text) if len(text) <= 40 else Decimal("nan")
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or not -LARGEST <= number <= LARGEST or number != number.to_integral_value():
        raise ValueError(f"{short_name(text)!r}: {remedy}")
    return int(number)


Count = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: read_count(words[0]),
        is_instance=is_whole,
        str_from_instance=lambda number: [str(number)],
    ),
]


def check_kinds(config: Any, *, prefix: str = "") -> None:
    """Raises ValueError, with the name of the option, for a field whose value does not match its annotation."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(hint):
            if not isinstance(value, hint):  # type: ignore[arg-type]
                raise ValueError(f"{option(prefix + name)} {brief(value)}: give a {getattr(hint, '__name__', hint)}")
        elif not _fits(value, hint):
            raise ValueError(f"{option(prefix + name)} {brief(value)}: give {_words(hint)}")


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(kinds) == len(value) and all(_fits(item, kind) for item, kind in zip(value, kinds, strict=True))
    return KINDS[hint](value)


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not type(None)]
    if origin in (Union, types.UnionType):
        return " or ".join(_words(part) for part in parts) + ", or nothing"
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin is tuple:
        return f"a tuple (in JSON a list), each {_words(parts[0])}"
    return WORDS[hint]


# Fields that had another name in the first version of run folders.
RENAMED = {"compute.micro_rows": "micro_batch_size", "compute.recompute": "activation_checkpointing"}


def from_record(kind: type[Config], record: Any, *, where: str, prefix: str = "") -> Config:
    """A config from its JSON object; missing fields take their defaults. `where` names the file in errors."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {prefix.rstrip('.') or 'config'} is not an object: the file is damaged")
    record = {RENAMED.get(prefix + name, name): value for name, value in record.items()}
    if kind is ModelConfig:
        try:
            record = without_removed(record)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    hints = get_type_hints(kind)
    if unknown := sorted(record.keys() - hints.keys()):
        name = short_name(prefix + unknown[0])
        raise ValueError(f"{where}: unknown field {name}: the file is damaged, or from another version")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.default is MISSING and field.default_factory is MISSING and field.name not in record:
            raise ValueError(f"{where}: {prefix}{field.name} is missing: the file is damaged")
    values = {
        name: from_record(hints[name], value, where=where, prefix=f"{prefix}{name}.")
        if is_dataclass(hints[name])
        else _from_json(value, hints[name])
        for name, value in record.items()
    }
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _from_json(value: Any, hint: Any) -> Any:
    """Converts lists to tuples and strings to paths; other values stay as they are, for `check_kinds` to reject."""
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if isinstance(value, str) and Path in (hint, *get_args(hint)) else value
