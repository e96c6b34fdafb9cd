"""The records of `reproduce two-stage`, ROW-seedN.json: read and checked, and the numbers that tables use."""

from pathlib import Path

from thoughtbubbles.recipes.reproduce.study import Record, read_records
from thoughtbubbles.recipes.reproduce.two_stage.protocol import ROWS

NAME = "two-stage"
STAGES = ("one", "two")
REQUIRED = (
    *("version", "row", "seed", "what", "text", "substitution", "device", "commit", "versions", "command", "time"),
    *("wall_seconds", *STAGES),
    *(
        f"{stage}.{name}"
        for stage in STAGES
        for name in ("config", "data", "steps", "tokens", "wall_seconds", "validation", "forks", "benchmarks")
    ),
)


def read_two_stage(out: Path) -> dict[str, dict[int, Record]]:
    """By row and seed, rows in the order of the protocol."""
    return read_records(out, NAME, required=REQUIRED, order=ROWS)


def streams(stage: Record) -> float:
    """Per token, after the last fork layer, on the first windows of the validation text."""
    return float(stage["forks"][-1]["streams"]) if stage["forks"] else 1.0


def percent(stage: Record, task: str) -> str:
    """Accuracy with its standard error over questions."""
    found = stage["benchmarks"][task]
    error = found["standard_error"]
    return f"{100 * found['accuracy']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
