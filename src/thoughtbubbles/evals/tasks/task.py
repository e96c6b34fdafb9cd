"""What a benchmark is: where its questions lie, and how one of them becomes a document.

There are two kinds of documents. `Choices` are compared by the likelihood of each (a single one must be the model's
own greedy continuation); `Question`s are answered freely. evals/metrics.py tells how they are scored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Choices(NamedTuple):
    context: str
    choices: tuple[str, ...]  # as they follow the context, a space in front
    gold: int
    groups: dict[str, str] = {}  # noqa: RUF012 (never changed): by what results are told apart, such as a subject


class Question(NamedTuple):
    prompt: str
    answer: str
    groups: dict[str, str] = {}  # noqa: RUF012 (never changed)


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    version: int
    """Raised whenever a change of prompt or scoring changes a score."""
    title: str
    file: str
    """The name of its file of JSON lines, without .jsonl and what it is packed with; a * takes all that match."""
    home: str
    """Where users get it."""
    fields: str
    """Of a line, for those who make the file themselves."""
    document: Callable[[Mapping[str, Any]], Choices | Question | None]
    """Of a line; None for one that is not part of it. A missing field is a KeyError, a wrong one a ValueError."""
    max_new: int = 0
    """Tokens of a free answer at most."""
    is_right: Callable[[str, str], bool] = field(default=lambda text, answer: text == answer)
    """Whether a free answer (first) is the right one (second)."""


def spaced(texts: Sequence[str]) -> tuple[str, ...]:
    """As continuations: a space in front of each."""
    return tuple(f" {text}" for text in texts)


def text_of(record: Mapping[str, Any], name: str) -> str:
    if not _is_text(found := record[name]):
        raise ValueError(f"{name} is {shown(found)}: it must be text")
    return str(found)


def texts_of(record: Mapping[str, Any], name: str) -> list[str]:
    found = record[name]
    if not isinstance(found, list) or len(found) < 2 or not all(map(_is_text, found)):
        raise ValueError(f"{name} is {shown(found)}: it must be a list of two texts or more")
    return found


def _is_text(value: object) -> bool:
    """JSON may spell halves of characters, which no tokenizer can encode."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


def shown(value: object) -> str:
    """For a message of one line."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def place_of(record: Mapping[str, Any], name: str, n_choices: int) -> int:
    """The number of the right choice, from 0; some sets write it as text."""
    found = record[name]
    place = int(found) if isinstance(found, str) and found.isdecimal() and len(found) < 10 else found
    if type(place) is not int or not 0 <= place < n_choices:
        raise ValueError(f"{name} is {shown(found)}: it must be a number from 0 to {n_choices - 1}")
    return place
