"""What a made-up task is: texts whose hard places are known, endless, each a pure function of (task, split, seed, i).

An example is text in bytes, of which some characters are answers. An answer's character says how many steps of work its
prediction needs: relations to combine, places to look up, moves to follow. 0 is easy: the rest of a word, or copying.
The stream that predicts the character is at the *hard position*, the one before it.

    Mi is To's ral. To is Se's tov. Mi is Se's sek.
                                             ^        work 2, at the hard position of the space before it

In some tasks (`is_forced`) nothing before the hard position says what will be asked, so that the work has to be done
there; in the others a model may also do it earlier, token by token.

Splits: `train`, and `val` of the same kind, told apart by the checksum of the text, so that no text is in both. The
others differ in structure: more work for an answer than any in training (`deeper`), longer texts (`longer`), names that
training never sees (`names`).
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from thoughtbubbles.data.builtin import Item, encode, write_once
from thoughtbubbles.data.workers import in_order

VERSION = 3  # counts changes to the texts of any task
VALIDATION = 4  # one text in so many, by its checksum
VALIDATION_EXAMPLES = 512
PART = 4096  # texts that a process makes at a time


class Example(NamedTuple):
    text: str
    counts: tuple[bool, ...]  # of each character: whether it is a target
    work: tuple[int, ...]  # of each character: the steps that its prediction needs

    @property
    def hard(self) -> dict[int, int]:
        """The work at each hard position, the one that predicts the next character."""
        return {place - 1: work for place, work in enumerate(self.work) if work}

    @property
    def tokens(self) -> np.ndarray:
        """The bytes, and end-of-text."""
        return encode(self.text)

    @property
    def mask(self) -> np.ndarray:
        """Where a token is a target. End-of-text is one too, so that generation knows where to stop."""
        return np.array([*self.counts, True])


class Writer:
    """Puts an example together from what is given and what is to be answered."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, bool, int]] = []

    def say(self, text: str) -> None:
        self._parts.append((text, False, 0))

    def answer(self, text: str, *, work: int) -> None:
        """Its first character needs the work, and decides all others."""
        self._parts.append((text, True, work))

    def example(self) -> Example:
        return Example(
            "".join(text for text, _, _ in self._parts),
            tuple(is_answer for text, is_answer, _ in self._parts for _ in text),
            tuple(work if place == 0 else 0 for text, _, work in self._parts for place in range(len(text))),
        )


class Variant(ABC):
    """One setting of a task's generator: how hard, how long. The fields of a subclass are its knobs."""

    @abstractmethod
    def make(self, random: Random) -> Example: ...

    @property
    @abstractmethod
    def work(self) -> range:
        """The work that an answer may need; empty if nothing is hard."""


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    what: str
    """In one line, for --help and tables."""
    splits: Mapping[str, Variant]
    """`train`, and those that differ from it in structure."""
    block_size: int
    """Tokens of the longest example of any split, rounded up."""
    is_forced: bool
    """Whether the work can only be done at the hard position."""
    chance: Callable[[int], float]
    """The share of answers with this work that a guess among the possible ones gets right."""
    other_chance: Mapping[str, float] = field(default_factory=dict)
    """The same in splits where it is another, whatever the work."""

    def guess(self, split: str, work: int) -> float:
        return self.other_chance[split] if split in self.other_chance else self.chance(work)

    def variant(self, split: str) -> Variant:
        return self.splits["train" if split == "val" else split]

    def examples(self, split: str, *, seed: int) -> Iterator[Example]:
        """Without end; other seeds give other texts."""
        return _numbered(count(), self.name, split, self.variant(split), seed)


def _numbered(numbers: Iterable[int], name: str, split: str, variant: Variant, seed: int) -> Iterator[Example]:
    """Those of the texts with these numbers that are in the split."""
    for i in numbers:
        found = variant.make(Random(f"{name} {split} {seed} {i}"))
        if split not in ("train", "val") or is_validation(found.text) == (split == "val"):
            yield found


def is_validation(text: str) -> bool:
    return zlib.crc32(text.encode()) % VALIDATION == 0


def write_task(folder: Path, task: Task, *, n_examples: int, seed: int, processes: int = 1) -> None:
    """Writes a prepared folder with so many training examples, and always the same validation examples."""
    notes = {"made_by": f"task:{task.name}", "version": VERSION, "n_examples": n_examples, "seed": seed}
    val = (("val", *_arrays(found)) for found in islice(task.examples("val", seed=0), VALIDATION_EXAMPLES))
    with closing(_train_items(task, n_examples, seed, processes)) as train:
        try:
            write_once(folder, chain(train, val), kind="examples", notes=notes)
        except BrokenProcessPool:
            raise ValueError(
                f"{folder}: a process that makes examples died, perhaps killed because memory ran out: run it again"
            ) from None


def _train_items(task: Task, n: int, seed: int, processes: int) -> Generator[Item, None, None]:
    """The same for any number of processes."""
    size = max(1, min(PART, n))
    shared = (size, task.name, task.variant("train"), seed)
    name, remedy = f"{processes} processes", "end other programs, or allow more open files (ulimit -n)"
    made = in_order(_part, count(0, size), *shared, processes=processes, name=name, remedy=remedy)
    with closing(made) as parts:
        yield from islice((("train", *arrays) for _, part in parts for arrays in part), n)


def _part(first: int, size: int, name: str, variant: Variant, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [_arrays(found) for found in _numbered(range(first, first + size), name, "train", variant, seed)]


def _arrays(found: Example) -> tuple[np.ndarray, np.ndarray]:
    return found.tokens, found.mask


def some(random: Random, limits: tuple[int, int]) -> int:
    """A whole number within the limits, both included."""
    return random.randint(*limits)
