"""Judges an input: a reader rejects it in one line that names it, or accepts it; anything else is a finding."""

import os
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cases import Case

LONGEST = 1000  # characters of a message
PACKAGE = "thoughtbubbles"
MEMORY = re.compile(r"allocat|out of memory", re.IGNORECASE)


class Outcome(NamedTuple):
    kind: str  # "refused", "unchanged", "changed" or "finding"
    about: str = ""  # of a change, why it is acceptable; of a finding, what it is
    where: str = ""  # of a finding: the line of the package it comes from
    message: str = ""


def judge(case: Case, folder: Path, expected: Any) -> Outcome:
    heard: list[str] = []
    try:
        with _listening(heard):
            found = case.run(folder)
    except MemoryError as error:
        outcome = Outcome("finding", "too much memory", where(error), str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's checkpoint errors are not Exceptions, nor is SystemExit
        outcome = _refusal(case, error)
    else:
        outcome = _acceptance(case, found, expected)
    if os.path.lexists(os.environ["FUZZ_CANARY"]):
        os.rmdir(os.environ["FUZZ_CANARY"])
        return Outcome("finding", "a pickle was executed", outcome.where, outcome.message)
    if heard and outcome.kind != "finding":
        return Outcome("finding", "a warning", heard[0].partition(" ")[0], heard[0])
    return outcome


@contextmanager
def _listening(heard: list[str]) -> Iterator[None]:
    """Warnings are collected, and do not change what the reader does."""

    def hear(message: Any, category: type, filename: str, line: int, *_: Any, **__: Any) -> None:
        heard.append(f"{Path(filename).name}:{line} {category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # comes when Python tidies up, perhaps with another input
        warnings.showwarning = hear
        yield


def _refusal(case: Case, error: BaseException) -> Outcome:
    if isinstance(error, SystemExit):
        if error.code in (None, 0, 2):  # 2: the parser of the command line has said what is wrong
            return Outcome("refused")
        message, right = str(error.code), isinstance(error.code, str)
    else:
        message, right = _text(error), isinstance(error, ValueError)
    wrong = None
    if not right:
        wrong = type(error).__name__
    elif MEMORY.search(message):
        wrong = "too much memory"
    elif len(message.splitlines()) > 1:
        wrong = "a message of several lines"
    elif len(message) > LONGEST:
        wrong = "a message of more than a thousand characters"
    elif not any(names(name, message) for name in case.names):
        wrong = "a message that does not name its input"
    return Outcome("refused") if wrong is None else Outcome("finding", wrong, where(error), message[:300])


def names(name: str, message: str) -> bool:
    """As a separate word: "stop" does not name `top`."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) is not None


def _acceptance(case: Case, found: Any, expected: Any) -> Outcome:
    if found == expected:
        return Outcome("unchanged")
    if case.reason is None:
        return Outcome("finding", "a change that a checksum should have shown", "", f"{found!r}"[:300])
    return Outcome("changed", case.reason)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # of an error whose own text cannot be made
        return f"{type(error).__name__} without a text ({type(broken).__name__})"


def where(error: BaseException) -> str:
    """The innermost line in the package, or in another one if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"/{PACKAGE}/" in frame.filename] or frames
    return f"{short(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""


def short(filename: str) -> str:
    return filename.rpartition(f"/{PACKAGE}/")[2] if f"/{PACKAGE}/" in filename else Path(filename).name
