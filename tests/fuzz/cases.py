"""The inputs of the fuzzer: input n of a reader is a pure function of reader, seed and n."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import Any

from mutate import NASTY, Fault, Files, mutate_files, mutate_tree

SUBJECT = "subject"  # the folder with the files of an input, as messages name it


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input."""

    run: Callable[[Path], Any]
    """Passes the input to the reader, in a given folder; returns something that can be compared."""
    names: Sequence[str]
    """An error message must contain one of these: the file or folder, or the field."""
    notes: Sequence[str]
    """The mutation, in words."""
    reason: str | None
    """Why a result that differs from that of the unchanged input is acceptable; None: it is not."""


@dataclass(frozen=True, kw_only=True)
class FileBase:
    """Valid files of a reader, from which inputs are made by mutation."""

    files: Files
    read: Callable[[Path], Any]
    at: str = ""
    """The path passed to the reader, inside the folder; by default the folder."""
    is_given: bool = True
    """Whether the path comes from outside, and may itself be wrong."""
    aim: tuple[str, ...] = ("*",)
    """Patterns of the files that are mutated."""
    checked: tuple[str, ...] = ()
    """Patterns of files in which a checksum must detect every change."""
    reason: str
    """Why a change of the other files may change the result."""
    repair: Callable[[Files, list[str]], Files] | None = None
    """Recomputes checksums after the named files have changed, to reach deeper code."""

    def unchanged(self) -> Case:
        return Case(run=lambda folder: self._run(folder, self.files, self.at), names=(), notes=(), reason="")

    def make(self, rng: Random) -> Case:
        files, touched, notes = self.files, list[str](), list[str]()
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if aims := [name for name in files if matches(name, self.aim)]:
                files, names, note = mutate_files(rng, files, rng.choice(sorted(aims)))
                touched, notes = touched + names, [*notes, note]
        at, reason = self.at, self.reason
        if self.repair is not None and rng.random() < 0.6:
            files, reason = self.repair(files, touched), "checksums were made right again"
            notes.append("checksums are right")
        elif all(matches(name, self.checked) for name in touched):
            reason = ""
        if self.is_given and rng.random() < 0.02:
            at = rng.choice(["missing", "x" * 300, f"{'x' * 200}/" * 30, *sorted(self.files)])
            files, notes, reason = self.files, [f"the path is {at!r}"], self.reason
        names = [SUBJECT, *(name.rpartition("/")[2] for name in (*self.files, *touched, at) if name)]
        return Case(run=lambda folder: self._run(folder, files, at), names=names, notes=notes, reason=reason or None)

    def _run(self, folder: Path, files: Files, at: str) -> Any:
        lay(folder / SUBJECT, files)
        return self.read(folder / SUBJECT / at)


@dataclass(frozen=True, kw_only=True)
class CallBase:
    """Arguments as plain data, for functions that are called."""

    arguments: dict[str, Any]
    call: Callable[[dict[str, Any]], Any]
    names: Sequence[str] = ()
    """What an error message may name in addition to the arguments."""
    nasty: tuple[Any, ...] = NASTY
    reason: str
    may_lack: bool = False
    """Whether arguments may be left out: if they come from a file, and Python itself does not require them."""
    is_refused: bool = False
    """The unchanged arguments are rejected too, so that nothing long starts; errors in others are reported first."""

    def unchanged(self) -> Case:
        return Case(run=self._run_unchanged, names=(), notes=(), reason="")

    def make(self, rng: Random) -> Case:
        arguments: Any = self.arguments
        for _ in range(rng.choice([1, 1, 1, 2])):
            changed = mutate_tree(rng, arguments, self.nasty)
            arguments = changed if isinstance(changed, dict) else arguments
        if not self.may_lack:
            arguments = {**self.arguments, **arguments}
        names = [*self.names, *self.arguments, *(str(name) for name in arguments if name)]
        notes = [
            f"{name} = {shown(value)}" for name, value in arguments.items() if value is not self.arguments.get(name)
        ]
        return Case(run=lambda folder: self.call(arguments), names=names, notes=notes, reason=self.reason)

    def _run_unchanged(self, folder: Path) -> Any:
        if not self.is_refused:
            return self.call(self.arguments)
        with suppress(ValueError, SystemExit):
            self.call(self.arguments)
        return "refused"


@dataclass(frozen=True, kw_only=True)
class Reader:
    name: str
    bases: Sequence[FileBase | CallBase] = field(repr=False)

    def make(self, seed: int, number: int) -> tuple[int, Case]:
        """The number of the base, and the input made from it."""
        rng = Random(f"{self.name} {seed} {number}")
        base = rng.randrange(len(self.bases))
        return base, self.bases[base].make(rng)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or too many digits
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) < 100 else f"{text[:100]}…"


def lay(folder: Path, files: Files) -> None:
    """Writes files into an otherwise empty folder."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    made = {folder}
    for name, content in files.items():
        path = folder / name
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is Fault.FOLDER:
            path.mkdir()
        elif content is Fault.PIPE:
            os.mkfifo(path)
        else:
            path.symlink_to(path.name if content is Fault.LOOP else "there is nothing of this name")


def gather(folder: Path) -> Files:
    """The files of a folder, as a base needs them."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
