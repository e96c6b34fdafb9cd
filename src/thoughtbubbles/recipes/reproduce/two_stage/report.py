"""The table of `reproduce two-stage` as Markdown."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thoughtbubbles.recipes.reproduce.compare_rows import error_over_windows
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.recipes.reproduce.tables import NONE_YET, markdown
from thoughtbubbles.recipes.reproduce.two_stage.protocol import ROWS
from thoughtbubbles.recipes.reproduce.two_stage.records import STAGES, percent, read_two_stage, streams
from thoughtbubbles.written import plus_minus, signed

HEADINGS = (
    "row",
    "model",
    "seed",
    "after stage",
    "training tokens",
    "wall seconds of training",
    "nats per token",
    "bits per byte",
    "against plain, same seed (± over windows)",
    "GSM8K, exact match (%)",
    "ARC-Easy (%)",
    "streams per token",
)
Records = Mapping[str, Mapping[int, Record]]


def two_stage_table(out: Path) -> str:
    """A line for every row, seed and stage, and one for every row that is not run."""
    found = read_two_stage(out)
    if not found:
        return NONE_YET
    return f"{markdown(HEADINGS, _lines(found))}\n\n{_about(found)}"


def _lines(found: Records) -> Iterator[list[str]]:
    for row in dict.fromkeys([*ROWS, *found]):
        if row not in found:
            yield [f"`{row}`", ROWS[row].what, "not run", *["–"] * (len(HEADINGS) - 3)]
        for seed, record in found.get(row, {}).items():
            for stage in STAGES:
                yield _line(found, row, seed, stage, record)


def _line(found: Records, row: str, seed: int, stage: str, record: Record) -> list[str]:
    here = record[stage]
    return [
        f"`{row}`",
        record["what"],
        str(seed),
        stage,
        f"{here['tokens'] / 1e6:,.1f}M",
        f"{here['wall_seconds']:,.0f}",
        f"{here['validation']['nats']:.4f}",
        f"{here['validation']['bits_per_byte']:.4f}",
        _against_plain(found, row, seed, stage),
        percent(here, "gsm8k"),
        percent(here, "arc_easy"),
        f"{streams(here):.2f}",
    ]


def _against_plain(found: Records, row: str, seed: int, stage: str) -> str:
    if row == PLAIN or seed not in found.get(PLAIN, {}):
        return "–"
    # The names are for its message about a damaged record.
    one, two = (
        {**{name: found[each][seed][name] for name in ("protocol", "row", "seed")}, **found[each][seed][stage]}
        for each in (row, PLAIN)
    )
    gap = one["validation"]["nats"] - two["validation"]["nats"]
    error, _ = error_over_windows([(one, two)])
    return f"{signed(gap)}{plus_minus(error)}"


def _about(found: Records) -> str:
    records = [record for seeds in found.values() for record in seeds.values()]
    record = records[0]
    text, two = record["text"], record["two"]
    devices = sorted({each["device"] for each in records})
    parts = [f"{part['share']:.0%} {name}{_size(part)}" for name, part in two["data"].items()]
    tasks = two["benchmarks"]
    return (
        f"Device: {', '.join(devices)}. Text: {text['tokens']:,} training tokens of tokenizer `{text['tokenizer']}` "
        f"(checksum {text['checksum']}); {two['validation']['tokens']:,} validation tokens. Rows of stage two: "
        f"{', '.join(parts)}; {record['substitution']}. Answers: {tasks['gsm8k']['documents']:,} of GSM8K, greedy, "
        f"through the KV cache, and {tasks['arc_easy']['documents']:,} of ARC-Easy; ± is the standard error over "
        "questions."
    )


def _size(part: Mapping[str, Any]) -> str:
    return f" ({part['examples']:,} examples)" if "examples" in part else ""
