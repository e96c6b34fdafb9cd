"""Reads the documents of a benchmark from JSON lines: NAME.jsonl, also compressed (.gz or .xz).

The files are in the given folder, or in its subfolder `eval`. Lines that are not part of the benchmark are skipped; a
damaged line is an error with the line number.
"""

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from thoughtbubbles.data.compressed import DAMAGE, decompressed
from thoughtbubbles.evals.tasks.task import Choices, Question, Task
from thoughtbubbles.files import named, short_name

VARIABLE = "THOUGHTBUBBLES_DATA"
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz")
LINE_BYTES = 1 << 24  # maximum length of a line: a small compressed file may expand to one that fills the memory


class Benchmark(NamedTuple):
    task: Task
    documents: dict[int, Choices | Question]  # by their number in the benchmark
    checksum: int  # of all documents, including those not chosen, so that numbers mean the same for every `limit`


def data_folder(given: Path | None) -> Path:
    """`--data-dir`, or the folder named by the environment variable."""
    given_name = os.environ.get(VARIABLE) if given is None else str(given)
    if not given_name:
        raise ValueError(
            f"--data-dir is missing: give the folder with the benchmarks, files such as hellaswag.validation.jsonl.gz, "
            f"or set the environment variable {VARIABLE}"
        )
    folder = Path(given_name)
    with named(f"--data-dir {short_name(folder)}", "give the folder with the benchmarks"):
        if not folder.is_dir():
            missing = "is not a folder: give the one" if folder.exists() else "does not exist: give the folder"
            raise ValueError(f"--data-dir {short_name(folder)}: {missing} with the benchmarks")
    return folder


def open_benchmark(task: Task, folder: Path, *, limit: int | None = None) -> Benchmark:
    """All documents, or `limit` of them, spread evenly."""
    every = [document for path in find_files(task, folder) for document in _read(task, path)]
    if not every:
        raise ValueError(
            f"{task.name}: its files in {folder} have no document of the benchmark: check that they are the right files"
        )
    n = len(every) if limit is None else min(limit, len(every))
    chosen = {index: every[index] for index in (i * len(every) // n for i in range(n))}
    return Benchmark(task, chosen, zlib.crc32(repr(every).encode()))


def find_files(task: Task, folder: Path) -> list[Path]:
    for place in (folder, folder / "eval"):
        with named(place, "give another folder with --data-dir"):
            by_name = {
                path.name.removesuffix(suffix): path
                for suffix in sorted(ENDINGS, key=len, reverse=True)  # an uncompressed file comes last and wins
                for path in place.glob(task.file + suffix)
            }
        if by_name:
            return [by_name[name] for name in sorted(by_name)]
    one, by_itself = task.file.replace("*", "NAME"), f"one JSON object per line with the fields {task.fields}"
    command = f"`thoughtbubbles download {task.file} --out {folder}`, or " if "huggingface.co" in task.home else ""
    raise ValueError(
        f"{task.name}: {folder} has no {one}.jsonl (.gz or .xz): {command}get the dataset from {task.home} and write "
        f"it there, {by_itself}"
    )


def _read(task: Task, path: Path) -> Iterator[Choices | Question]:
    for number, record in records(path):
        try:
            document = task.document(record)
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: field {error} is missing; expected {task.fields}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        except RecursionError:
            raise ValueError(f"{path}, line {number}: a field is nested too deeply") from None
        if document is not None:
            yield document


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, with their line numbers."""
    with named(path, "download it again"):
        if path.exists() and not path.is_file():
            raise ValueError(f"{short_name(path)} is not a file: put a file of JSON lines there")
    number = 0
    try:
        with path.open("rb") as raw:
            lines = decompressed(raw, path.suffix)
            while line := lines.readline(LINE_BYTES):
                number += 1
                if line.strip():
                    yield number, _object(line)
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"{path}, line {number}: {error}; expected one JSON object per line") from None
    except DAMAGE as error:
        raise ValueError(f"{path}, after line {number}: cannot be decompressed ({error}); download it again") from None


def _object(line: bytes) -> dict[str, Any]:
    if len(line) == LINE_BYTES:
        raise ValueError(f"it has {LINE_BYTES:,} bytes or more")
    try:
        record = json.loads(line.decode())
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    return record
