"""What an exam is: where its questions lie, and how one of them becomes a document.

There are two kinds of documents. `Choices` are compared by the likelihood of each (a single one must be the model's
own greedy continuation); `Question`s are answered freely. evals/marks.py tells how they are marked.
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
    """Raised whenever a change of prompt or marking changes a score."""
    title: str
    file: str
    """The name of its file of JSON lines, without .jsonl and what it is packed with; a * takes all that match."""
    home: str
    """Where users get it."""
    fields: str
    """Of a line, for those who make the file themselves."""
    document: Callable[[Mapping[str, Any]], Choices | Question | None]
    """Of a line; None for one that is no part of the exam. A missing field is a KeyError, a wrong one a ValueError."""
    max_new: int = 0
    """Tokens of a free answer at most."""
    is_right: Callable[[str, str], bool] = field(default=lambda text, answer: text == answer)
    """Whether a free answer (first) is the right one (second)."""


def spaced(texts: Sequence[str]) -> tuple[str, ...]:
    """As continuations: a space in front of each."""
    return tuple(f" {text}" for text in texts)


def text_of(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(record[name], str):
        raise ValueError(f"{name} is {record[name]!r}: it must be text")
    return str(record[name])


def texts_of(record: Mapping[str, Any], name: str) -> list[str]:
    found = record[name]
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} is {found!r}: it must be a list of two texts or more")
    return found


def place_of(record: Mapping[str, Any], name: str, n_choices: int) -> int:
    """The number of the right choice, from 0; some sets write it as text."""
    found = record[name]
    place = int(found) if isinstance(found, str) and found.isdecimal() else found
    if type(place) is not int or not 0 <= place < n_choices:
        raise ValueError(f"{name} is {found!r}: it must be a number from 0 to {n_choices - 1}")
    return place
