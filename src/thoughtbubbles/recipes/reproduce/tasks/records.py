"""The records of `reproduce tasks`, TASK-FORM-seedN.json: read and checked, and the numbers that tables use."""

from collections.abc import Mapping
from pathlib import Path

from thoughtbubbles.data.tasks.task import VERSION
from thoughtbubbles.evals.hard_places import ALIKE, EASY
from thoughtbubbles.recipes.reproduce.study import Record, read_records
from thoughtbubbles.recipes.reproduce.tasks.protocol import sweep_rows, task_rows

REQUIRED = (
    *("version", "task_version", "row", "task", "form", "seed", "steps", "flops", "device", "commit", "command"),
    *("time", "versions", "wall_seconds", "splits"),
)


def read_task_records(out: Path, name: str = "tasks") -> dict[str, dict[int, Record]]:
    """By row and seed, rows in the order of the protocol. `name`: tasks or tasks-sweep."""
    order = task_rows() if name == "tasks" else sweep_rows()
    found = read_records(out, name, required=REQUIRED, order=order)
    for record in (record for seeds in found.values() for record in seeds.values()):
        if record["task_version"] != VERSION:
            path = out / name / f"{record['row']}-seed{record['seed']}.json"
            raise ValueError(
                f"{path}: is of version {record['task_version']} of the tasks, now {VERSION}; run it again"
            )
    return found


def accuracy(record: Record, split: str, *, work: range | None = None) -> float:
    """Over all answers of a split, or those that need work in a range. Block selection: each from its own prefix."""
    measured = record["splits"][split]
    each: Mapping[str, float] = measured.get("alone", measured["accuracy"])
    count = {name: n for name, n in measured["count"].items() if work is None or int(name) in work}
    return sum(each[name] * n for name, n in count.items()) / sum(count.values())


def hard_accuracy(record: Record, split: str) -> float:
    """Over answers in the upper half of the work of a split; all of them where nothing is hard."""
    works = sorted(int(name) for name in record["splits"][split]["count"])
    return accuracy(record, split, work=range(works[len(works) // 2], works[-1] + 1))


def streams(record: Record, split: str) -> dict[str, float]:
    """Mean streams per token after the last fork layer, by work and at easy positions."""
    return {name: layers[-1] for name, layers in record["splits"][split]["streams"].items()}


def hard_streams(record: Record, split: str) -> float | None:
    """At hard positions; None where there are none."""
    measured = record["splits"][split]
    found = {name: n for name, n in streams(record, split).items() if name not in (EASY, ALIKE)}
    total = sum(measured["count"][name] for name in found)
    return sum(n * measured["count"][name] for name, n in found.items()) / total if found else None
