"""The definition of a benchmark: its file of questions, and how a line becomes a document.

There are two kinds of documents. `Choices` are compared by likelihood (a single choice must be the model's greedy
continuation); answers to a `Question` are generated. evals/metrics.py describes the scoring.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Choices(NamedTuple):
    context: str
    choices: tuple[str, ...]  # continuations of the context, with a leading space
    gold: int
    groups: dict[str, str] = {}  # noqa: RUF012 (never changed): what results are grouped by, such as a subject


class Question(NamedTuple):
    prompt: str
    answer: str
    groups: dict[str, str] = {}  # noqa: RUF012 (never changed)


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    version: int
    """Incremented whenever a change of prompt or scoring changes a score."""
    title: str
    file: str
    """Name of its file of JSON lines, without .jsonl and the suffix of the compression; a * takes all that match."""
    home: str
    """Where users can download it."""
    fields: str
    """The fields of a line, for users who make the file themselves."""
    document: Callable[[Mapping[str, Any]], Choices | Question | None]
    """Makes a document from a line; None if it is not part of the benchmark. Raises KeyError for a missing field,
    ValueError for a wrong one."""
    max_new: int = 0
    """Maximum number of tokens of a generated answer."""
    is_right: Callable[[str, str], bool] = field(default=lambda text, answer: text == answer)
    """Whether a generated answer (first) matches the right one (second)."""


def spaced(texts: Sequence[str]) -> tuple[str, ...]:
    """As continuations, with a leading space."""
    return tuple(f" {text}" for text in texts)


def text_of(record: Mapping[str, Any], name: str) -> str:
    if not _is_text(found := record[name]):
        raise ValueError(f"{name} is {shown(found)}: it must be text")
    return str(found)


def texts_of(record: Mapping[str, Any], name: str) -> list[str]:
    found = record[name]
    if not isinstance(found, list) or len(found) < 2 or not all(map(_is_text, found)):
        raise ValueError(f"{name} is {shown(found)}: it must be a list of two or more texts")
    return found


def _is_text(value: object) -> bool:
    """JSON may contain lone surrogates, which no tokenizer can encode."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


def shown(value: object) -> str:
    """Shortened, for an error message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def place_of(record: Mapping[str, Any], name: str, n_choices: int) -> int:
    """The index of the right choice, from 0; some datasets write it as a string."""
    found = record[name]
    place = int(found) if isinstance(found, str) and found.isdecimal() and len(found) < 10 else found
    if type(place) is not int or not 0 <= place < n_choices:
        raise ValueError(f"{name} is {shown(found)}: it must be a number from 0 to {n_choices - 1}")
    return place
