"""The records of `reproduce two-stage`, ROW-seedN.json: read and checked, and the numbers that tables use."""

from pathlib import Path

from thoughtbubbles.files import read_object
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.recipes.reproduce.two_stage.protocol import ROWS

NAME = "two-stage"
STAGES = ("one", "two")
REQUIRED = (
    *("version", "row", "seed", "what", "text", "substitution", "device", "commit", "versions", "command", "time"),
    *("wall_seconds", *STAGES),
)
OF_A_STAGE = ("config", "data", "steps", "tokens", "wall_seconds", "validation", "forks", "benchmarks")


def read_two_stage(out: Path) -> dict[str, dict[int, Record]]:
    """By row and seed, rows in the order of the protocol."""
    found: dict[str, dict[int, Record]] = {}
    for path in sorted((out / NAME).glob("*-seed*.json")):
        record = read_object(path)
        absent = [name for name in REQUIRED if name not in record]
        absent = absent or [f"{stage}.{name}" for stage in STAGES for name in OF_A_STAGE if name not in record[stage]]
        if absent:
            raise ValueError(f"{path}: has no {absent[0]}: it is not a record of `reproduce {NAME}`, or damaged")
        if path.stem != f"{record['row']}-seed{record['seed']}":
            raise ValueError(f"{path}: is a record of {record['row']}-seed{record['seed']}; rename it")
        found.setdefault(record["row"], {})[record["seed"]] = record
    return {row: dict(sorted(found[row].items())) for row in dict.fromkeys([*ROWS, *found]) if row in found}


def streams(stage: Record) -> float:
    """Per token, after the last fork layer, on the first windows of the validation text."""
    return float(stage["forks"][-1]["streams"]) if stage["forks"] else 1.0


def percent(stage: Record, task: str) -> str:
    """Accuracy with its standard error over questions."""
    found = stage["benchmarks"][task]
    error = found["standard_error"]
    return f"{100 * found['accuracy']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
