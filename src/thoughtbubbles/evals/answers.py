"""Answers on disk, so that an exam that was killed goes on where it was: one line of JSON a document.

    answers/TASK-1A2B3C4D.jsonl          the first line tells what was examined, and how; the name has its checksum
    answers/TASK-1A2B3C4D.rank-1.jsonl   of further ranks, each of which writes for itself

So answers to other questions, of another model or under other settings lie side by side and are never mixed. A line
that was cut short is left out, and its document answered again.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from thoughtbubbles.evals.marks import Answer

FIELDS = {"document", *(field.name for field in fields(Answer))}


class Answers:
    """Those of one exam. As a context it keeps a file open for what this rank adds."""

    def __init__(self, folder: Path, task: str, about: Mapping[str, Any], *, rank: int = 0):
        self.folder, self.about = folder, json.dumps(about, sort_keys=True)
        self.name = f"{task}-{zlib.crc32(self.about.encode()):08x}"
        self.path = folder / (f"{self.name}.jsonl" if rank == 0 else f"{self.name}.rank-{rank}.jsonl")
        self.new: dict[int, Answer] = {}  # what this rank has added

    def read(self) -> dict[int, Answer]:
        """What all ranks have left, by the numbers of the documents."""
        return {number: answer for path in self._files() for number, answer in _read(path).items()}

    def forget(self) -> None:
        """Deletes what there is."""
        for path in self._files():
            path.unlink()

    def __enter__(self) -> "Answers":
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.path.read_bytes() if self.path.exists() else b""
        self._file = self.path.open("a", encoding="utf-8", buffering=1)  # a line is on disk when it is written
        self._file.truncate(whole := kept.rfind(b"\n") + 1)  # without a line that was cut short
        if not whole:
            self._file.write(self.about + "\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, number: int, answer: Answer) -> None:
        self.new[number] = answer
        self._file.write(json.dumps({"document": number, **asdict(answer)}) + "\n")

    def _files(self) -> list[Path]:
        return sorted([*self.folder.glob(f"{self.name}.jsonl"), *self.folder.glob(f"{self.name}.rank-*.jsonl")])


def _read(path: Path) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    for line in path.read_bytes().splitlines(keepends=True)[1:]:
        record = _parsed(line)
        if line.endswith(b"\n") and isinstance(record, dict) and record.keys() == FIELDS:
            number = record.pop("document")
            found[number] = Answer(**record)
    return found


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
