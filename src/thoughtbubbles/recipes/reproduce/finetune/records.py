"""The records of `reproduce clutrr` and `reproduce gsm8k`, ROW-seedN.json: read and checked, and their numbers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from thoughtbubbles.recipes.reproduce.finetune.measure import WHOLE
from thoughtbubbles.recipes.reproduce.finetune.protocol import CLUTRR_FORMS, SETS, clutrr_rows
from thoughtbubbles.recipes.reproduce.study import Record, read_records

REQUIRED = (
    *("version", "protocol", "row", "form", "seed", "start", "parameters", "steps", "epochs", "device", "commit"),
    *("versions", "command", "time", "wall_seconds", "text", "test"),
)
BySeed = Mapping[int, Record]
BySet = Mapping[str, BySeed]  # of one form of CLUTRR


def read_finetune_records(out: Path, protocol: str, order: Iterable[str]) -> dict[str, dict[int, Record]]:
    """By row and seed, rows in the given order."""
    found = read_records(out, protocol, required=REQUIRED, order=order)
    check_same_examples(found)
    return found


def check_same_examples(found: Mapping[str, BySeed]) -> None:
    """Rows of the same set and tokenizer must have been trained on the same examples, or they cannot be compared."""
    seen: dict[tuple[object, str], Record] = {}
    for record in (record for seeds in found.values() for record in seeds.values()):
        first = seen.setdefault((record.get("set"), record["text"]["tokenizer"]), record)
        if first["text"]["checksum"] != record["text"]["checksum"]:
            raise ValueError(
                f"{record['protocol']}: {first['row']}-seed{first['seed']} and {record['row']}-seed{record['seed']} "
                "were trained on different examples, so they cannot be compared; remove one of them"
            )


def clutrr_records(out: Path) -> dict[str, BySet]:
    """By form, set and seed."""
    found = read_finetune_records(out, "clutrr", clutrr_rows())
    return {
        form: {name: found[f"{name}-{form}"] for name in SETS if f"{name}-{form}" in found} for form in CLUTRR_FORMS
    }


def every(by_set: BySet) -> list[Record]:
    return [record for seeds in by_set.values() for record in seeds.values()]


def by_hops(record: Record) -> dict[int, dict[str, Any]]:
    """Mean and standard error of the accuracy, by the number of hops."""
    return {int(hops): each[WHOLE] for hops, each in record["test"]["by"]["hops"].items()}


def hops_mean(seeds: BySeed, hops: int) -> float:
    return fmean(by_hops(record)[hops]["mean"] for record in seeds.values())


def hops_error(seeds: BySeed, hops: int) -> float:
    """Over questions: the mean over seeds, since all of them answer the same ones."""
    return fmean(by_hops(record)[hops]["standard_error"] or 0.0 for record in seeds.values())


def means_by_seed(sets: Sequence[BySeed], hops: int) -> list[float]:
    """The mean over sets for each seed that all of them have."""
    common = set.intersection(*(set(seeds) for seeds in sets))
    return [fmean(by_hops(seeds[seed])[hops]["mean"] for seeds in sets) for seed in sorted(common)]


def last_streams(records: Iterable[Record], kind: str) -> float | None:
    """Mean streams per token of a kind after the last fork layer; None if no model has forks."""
    measured = [record["test"]["streams"] for record in records]
    found = [each[kind]["streams"][-1] for each in measured if each and kind in each]
    return fmean(found) if found else None
