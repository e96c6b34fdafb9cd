"""Answers on disk, one line of JSON per document, so that a killed benchmark resumes where it stopped.

    answers/TASK-1A2B3C4D.jsonl          the first line describes what was evaluated; the name has its checksum
    answers/TASK-1A2B3C4D.rank-1.jsonl   of further ranks, each of which writes its own file
    answers/TASK-1A2B3C4D.2.jsonl        of a second process that runs the same evaluation at the same time

So answers to other questions, of another model or with other settings are in separate files. Every line ends in its own
checksum: a truncated or damaged line is ignored, and its document is answered again. If a document has several answers,
the newest counts.
"""

import fcntl
import json
import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from thoughtbubbles.evals.metrics import Answer
from thoughtbubbles.files import named, parse_json, read_bytes, short_name
from thoughtbubbles.model.config import is_number, is_whole

REMEDY = "delete it; its documents are answered again"
CHECKSUM = ', "crc32": '
FIELDS = {"document", "time", "crc32", *(field.name for field in fields(Answer))}


class Answers:
    """The answers of one benchmark. As a context manager, it keeps a file open for the answers of this rank."""

    def __init__(self, folder: Path, task: str, about: Mapping[str, Any], *, rank: int = 0):
        self.folder, self.about = folder, json.dumps(about, sort_keys=True)
        self.name = f"{task}-{zlib.crc32(self.about.encode()):08x}"
        self._own = self.name if rank == 0 else f"{self.name}.rank-{rank}"
        self.new: dict[int, Answer] = {}  # added by this rank

    def read(self) -> dict[int, Answer]:
        """The saved answers of all ranks, by document number."""
        records = [record for path in self._files() for record in self._read(path)]
        return {
            record["document"]: Answer(**{field.name: record[field.name] for field in fields(Answer)})
            for record in sorted(records, key=lambda record: record["time"])
        }

    def __enter__(self) -> "Answers":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self._take()
        kept = read_bytes(Path(self._file.name), remedy=REMEDY)
        is_ours = kept.partition(b"\n")[0] == self.about.encode()
        self._file.truncate(whole := kept.rfind(b"\n") + 1 if is_ours else 0)  # drop a truncated last line
        if not whole:
            self._file.write(self.about + "\n")
        return self

    def _take(self) -> TextIO:
        """Opens the first file that no other process is writing to."""
        for number in count(1):
            path = self.folder / (f"{self._own}.jsonl" if number == 1 else f"{self._own}.{number}.jsonl")
            with named(path, REMEDY):
                if path.exists() and not path.is_file():  # opening a pipe would block
                    raise ValueError(f"{short_name(path)} is not a file: {REMEDY}")
                file = path.open("a", encoding="utf-8", buffering=1)  # a line is on disk when it is written
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            except OSError:  # a file system without locks
                pass
            return file
        raise AssertionError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, number: int, answer: Answer) -> None:
        self.new[number] = answer
        self._file.write(_line({"document": number, "time": time.time(), **asdict(answer)}))

    def _files(self) -> list[Path]:
        return sorted([*self.folder.glob(f"{self.name}.jsonl"), *self.folder.glob(f"{self.name}.*.jsonl")])

    def _read(self, path: Path) -> list[dict[str, Any]]:
        first, *lines = read_bytes(path, remedy=REMEDY).splitlines(keepends=True) or [b""]
        if first.rstrip(b"\n") != self.about.encode():  # written by another evaluation
            return []
        return [record for line in lines if (record := _record(line)) is not None]


def _line(record: Mapping[str, Any]) -> str:
    """One line, ending in a checksum of what precedes it."""
    text = json.dumps(record)[:-1]
    return f"{text}{CHECKSUM}{zlib.crc32(text.encode())}}}\n"


def _record(line: bytes) -> dict[str, Any] | None:
    """None if the line is not exactly what was written."""
    text, _, end = line.rpartition(CHECKSUM.encode())
    if end != b"%d}\n" % zlib.crc32(text):
        return None
    try:
        record: dict[str, Any] = parse_json(line, where="", remedy="")
    except ValueError:
        return None
    return record if record.keys() == FIELDS and _has_kinds(record) else None


def _has_kinds(record: Mapping[str, Any]) -> bool:
    """Whether every value has the right type: a checksum can be forged."""
    return (
        _is_count(record["document"])
        and _is_finite(record["time"])
        and _is_count(record["truncated"])
        and isinstance(record["scores"], dict)
        and all(map(_is_finite, record["scores"].values()))
        and isinstance(record["groups"], dict)
        and all(isinstance(group, str) for group in record["groups"].values())
        and isinstance(record["log_probs"], list)
        and all(map(_is_finite, record["log_probs"]))
        and isinstance(record["tokens"], list)
        and all(map(_is_count, record["tokens"]))
        and isinstance(record["text"], str | None)
    )


def _is_finite(value: object) -> bool:
    return is_number(value) and abs(value) < math.inf  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return is_whole(value) and 0 <= value < 1 << 60  # type: ignore[operator]
