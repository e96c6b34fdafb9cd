"""What `thoughtbubbles reproduce NAME` can run: a study has rows, each of which gives one record per seed.

Text protocols (protocols.py, row.py) train on a corpus that the user gives. Other studies bring their own data.
studies.py lists them all.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from thoughtbubbles.files import did_you_mean, read_object, write_atomically
from thoughtbubbles.train.loop import Result

Record = dict[str, Any]


class Planned(Protocol):
    """A row, as far as every study has it."""

    @property
    def what(self) -> str: ...

    @property
    def seeds(self) -> tuple[int, ...]: ...


class Stopped(Exception):
    """A signal stopped the training."""

    def __init__(self, result: Result):
        super().__init__(f"stopped after step {result.step}")
        self.exit_code = result.exit_code


@dataclass(frozen=True, kw_only=True)
class Place:
    """What all rows of a command share."""

    protocol: str
    data: Path | None
    """The corpus; None for studies that bring their own data."""
    sources: dict[str, Path]
    """Further validation text, by name."""
    data_dir: Path | None
    """The benchmarks; None: none are run."""
    runs: Path
    """Folders of the training runs."""
    out: Path
    """Folder of the records of all studies."""
    init: dict[str, Path] = field(default_factory=dict)
    """Models that rows start from, by name, where the package does not have them."""

    def record(self, row: str, seed: int) -> Path:
        return self.out / self.protocol / f"{row}-seed{seed}.json"

    def run(self, row: str, seed: int) -> Path:
        return self.runs / self.protocol / f"{row}-seed{seed}"


class Study(ABC):
    name: str
    what: str
    result: str
    """What a record's result in a word is, as a heading."""
    has_own_data: bool
    trains_on_benchmarks: bool = False
    """Whether rows need --data-dir to be trained, not only to be evaluated."""
    starts: tuple[str, ...] = ()
    """Names of the models that `--init` gives to its rows."""
    rows: Mapping[str, Planned]

    @abstractmethod
    def check(self, chosen: Sequence[tuple[str, int]], place: Place) -> None:
        """What would otherwise be noticed after an hour of training: raises ValueError."""

    @abstractmethod
    def make_record(self, row: str, seed: int, place: Place) -> Record:
        """Trains or resumes the row, and measures it."""

    @abstractmethod
    def done(self, out: Path) -> Mapping[str, Mapping[int, str]]:
        """The result of every row and seed that has a record, in a word."""

    @abstractmethod
    def compare(self, before: Record, again: Record) -> tuple[bool, str]:
        """Whether a repeated row has the same numbers, to the bit; and that in one line."""

    def is_built_on_others(self, row: str) -> bool:
        """Whether it uses the training runs of other rows: then it is run after them."""
        return False

    def run_row(self, row: str, seed: int, place: Place) -> Path:
        """Returns the path of the record; a row that has one is not run."""
        path = place.record(row, seed)
        if not path.exists():
            record = self.make_record(row, seed, place)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, [as_lines(record).encode()])
        return path

    def check_row(self, row: str) -> None:
        if row not in self.rows:
            hint = did_you_mean(row, self.rows, otherwise=f"it has {', '.join(self.rows)}")
            raise ValueError(f"--only {row}: {self.name} has no such row; {hint}")

    def pairs(self) -> Iterator[tuple[str, int]]:
        """Every row and seed: all rows of a seed before the next seed, so that pairs are complete early."""
        for seed in sorted({seed for row in self.rows.values() for seed in row.seeds}):
            for name, row in self.rows.items():
                if seed in row.seeds:
                    yield name, seed


def read_record(path: Path, name: str, *, required: Iterable[str]) -> Record:
    """A record of study `name`, which must have these fields; `text.checksum` is a field of a field."""
    record = read_object(path)
    absent = [field for field in required if not _has(record, field.split("."))]
    if absent:
        raise ValueError(f"{path}: has no {absent[0]}: it is not a record of `reproduce {name}`, or damaged")
    study, row = record.get("protocol", name), f"{record['row']}-seed{record['seed']}"
    if (path.stem, name) != (row, study):
        raise ValueError(f"{path}: is a record of {study}/{row}; rename it")
    return record


def read_records(
    out: Path, name: str, *, required: Iterable[str], order: Iterable[str]
) -> dict[str, dict[int, Record]]:
    """All of a study, by row and seed, rows in the given order."""
    required = tuple(required)
    found: dict[str, dict[int, Record]] = {}
    for path in sorted((out / name).glob("*-seed*.json")):
        record = read_record(path, name, required=required)
        found.setdefault(record["row"], {})[record["seed"]] = record
    return {row: dict(sorted(found[row].items())) for row in dict.fromkeys([*order, *found]) if row in found}


def _has(record: Any, names: Sequence[str]) -> bool:
    if not names:
        return True
    return isinstance(record, dict) and names[0] in record and _has(record[names[0]], names[1:])


def as_lines(record: Record) -> str:
    """JSON with one line per field, so that a list of thousands of numbers does not fill thousands of lines."""
    fields = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"
