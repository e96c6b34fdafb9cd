"""Answers on disk, so that an exam that was killed goes on where it was: one line of JSON a document.

    answers/TASK.jsonl           the first line tells what was examined, and how
    answers/TASK.rank-1.jsonl    of further ranks, each of which writes for itself

A line that was cut short is left out, and its document answered again. Answers to other questions, of another model or
under other settings are not mixed in: such a file is begun anew.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from thoughtbubbles.evals.marks import Answer


class Answers:
    """Those of one exam. As a context it keeps a file open for what this rank adds."""

    def __init__(self, folder: Path, task: str, about: Mapping[str, Any], *, rank: int = 0):
        self.path = folder / (f"{task}.jsonl" if rank == 0 else f"{task}.rank-{rank}.jsonl")
        self.about = json.loads(json.dumps(about))
        self.found: dict[int, Answer] = {}
        for path in sorted([*folder.glob(f"{task}.jsonl"), *folder.glob(f"{task}.rank-*.jsonl")]):
            self.found |= _read(path, self.about)
        self.n_found = len(self.found)

    def __enter__(self) -> "Answers":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        fresh = not whole or _parsed(whole[0]) != self.about
        partial = self.path.with_name(f".{self.path.name}.partial")  # never a moment without what there was
        partial.write_bytes(json.dumps(self.about).encode() + b"\n" if fresh else b"".join(whole))
        os.replace(partial, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, number: int, answer: Answer) -> None:
        self.found[number] = answer
        self._file.write(json.dumps({"document": number, **asdict(answer)}) + "\n")

    def flush(self) -> None:
        self._file.flush()


def _read(path: Path, about: Mapping[str, Any]) -> dict[int, Answer]:
    first, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
    if _parsed(first) != about:
        return {}
    records = [record for line in lines if line.endswith(b"\n") and isinstance(record := _parsed(line), dict)]
    return {record.pop("document"): Answer(**record) for record in records}


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
