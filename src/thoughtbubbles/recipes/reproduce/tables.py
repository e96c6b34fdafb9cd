"""The tables of docs/results as Markdown, each from the records of one protocol."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thoughtbubbles.recipes.reproduce.compare_rows import (
    autoregressive_gap,
    between_seeds,
    common_seeds,
    difference,
    error_over_windows,
    variation_between_seeds,
    with_like,
)
from thoughtbubbles.recipes.reproduce.parts import PLAIN, TUNED
from thoughtbubbles.recipes.reproduce.records import (
    Results,
    gpu_seconds,
    is_cpu,
    nats,
    parameters,
    tokens,
    with_scores_off,
)
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.train.forks import QUANTILE_NAMES
from thoughtbubbles.written import signed

NONE_YET = "Not measured yet."
PAPER = Path(__file__).with_name("paper.json")


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings), *rows])


def protocol_table(results: Results) -> str:
    """One line per row that has a record; then those that have none."""
    if not results.rows:
        return "\n\n".join(not_run(results))
    headings = (
        "row",
        "model",
        "seeds",
        "parameters",
        "training tokens",
        f"{unit(results)} seconds",
        "nats per token (spread)",
        "bits per byte",
        "against plain",
        "loss on a repetition",
        "autoregressive − blockwise",
    )
    table = markdown(headings, (protocol_line(results, row) for row in results.rows))
    notes = [measured_on(results), *errors_of(results), *times_from(results), *changed_since(results)]
    return "\n\n".join([table, *not_run(results), *notes])


def not_run(results: Results) -> list[str]:
    """The rows of the protocol without a record, by name."""
    missing = [
        f"`{row}` ({known.what}{f'; {len(known.seeds)} seeds' * (len(known.seeds) > 1)})"
        for row, known in results.protocol.rows.items()
        if row not in results
    ]
    return [f"Planned, not run: {'; '.join(missing)}."] if missing else []


def errors_of(results: Results) -> list[str]:
    """What makes a difference vary: the seed, and the text that it is measured on."""
    found = between_seeds(results)
    if found is None:
        parts = ["No row has a second seed, so errors leave out how much seeds differ: they are too small."]
    else:
        where = " and ".join(f"`{each.name}`" for each in with_like(results) if variation_between_seeds(each))
        parts = [
            f"Between seeds, the difference of two rows has a standard deviation of {found[0]:.4f} in {where} "
            f"({found[1]} degrees of freedom)."
        ]
    seeds = {row: common_seeds(results, row, PLAIN) for row in results.rows if row != PLAIN}
    pairs = [[(results.rows[row][seed], results.rows[PLAIN][seed]) for seed in of_row] for row, of_row in seeds.items()]
    known = [error for error, _ in (error_over_windows(each) for each in pairs if each) if error is not None]
    if known:
        parts.append(
            f"Over the validation text, differences to `{PLAIN}` have a standard error of {min(known):.4f} to "
            f"{max(known):.4f}."
        )
    return [" ".join(parts)]


def times_from(results: Results) -> list[str]:
    """Which commits the times of training steps are of, if of several."""
    of_commit: dict[str, list[str]] = {}
    for row in results.rows:
        if row in results.step_alone:
            of_commit.setdefault(results.step_alone[row].commit[:7], []).append(f"`{row}`")
    parts = "; ".join(f"at {commit} {', '.join(rows)}" for commit, rows in of_commit.items())
    if len(of_commit) < 2:
        return []
    return [f"Times of a training step were measured at several commits, so their ratios are rough: {parts}."]


def changed_since(results: Results) -> list[str]:
    """Rows whose records have a form of the model that the code now writes in another way."""
    changed = [
        f"`{row}` ({seeds})"
        for row, records in results.rows.items()
        if (
            seeds := ", ".join(
                str(seed) for seed, each in records.items() if with_scores_off(each["config"]) != each["config"]
            )
        )
    ]
    if not changed:
        return []
    return [
        "Run with scores that are all 1 (`score_bias=60`) where the row has none today (`scores=False`): the same "
        f"function with more parameters, whose bits `--again` cannot repeat: {', '.join(changed)}."
    ]


def unit(results: Results) -> str:
    return "CPU" if any(is_cpu(device) for device in results.devices) else "GPU"


def measured_on(results: Results) -> str:
    record = results.records[0]
    text, validation = record["text"], record["validation"]
    mixed = "" if results.same_device else " Times of different devices cannot be compared; each has its device."
    return (
        f"Device: {', '.join(results.devices)}.{mixed} Text: {text['tokens']:,} training tokens of tokenizer "
        f"`{text['tokenizer']}` (checksum {text['checksum']}); {validation['tokens']:,} validation tokens."
    )


def protocol_line(results: Results, row: str) -> list[str]:
    planned = len(results.planned(row))
    records = list(results.rows[row].values())
    seconds = seconds_of(results, row)
    if not results.same_device:
        seconds += f" ({', '.join(sorted({record['device'] for record in records}))})"
    losses = [nats(record) for record in records]
    spread = f" ({max(losses) - min(losses):.4f})" if len(losses) > 1 else ""
    copying = [record["copying"]["second"] for record in records if record.get("copying")]
    gap = autoregressive_gap(results, row)
    return [
        f"`{row}`",
        results.what(row),
        f"{len(records)} of {max(planned, len(records))}",
        f"{results.mean(row, parameters):,.0f}",
        f"{results.mean(row, tokens) / 1e6:,.1f}M",
        seconds,
        f"{statistics.fmean(losses):.4f}{spread}",
        f"{results.mean(row, lambda record: record['validation']['bits_per_byte']):.4f}",
        "–" if row == PLAIN else cell(results, row),
        f"{statistics.fmean(copying):.3f}" if copying else "–",
        "–" if gap is None else signed(gap.mean),
    ]


def seconds_of(results: Results, row: str) -> str:
    """An upper bound unless a step was measured alone on the GPU."""
    bound = "" if row in results.step_alone or is_cpu(results.devices[0]) else "≤ "
    return f"{bound}{results.cost(row, gpu_seconds):,.0f}"


def screen_table(results: Results, long: Results) -> str:
    """Every row against plain models of its kind, with and without the usual gate; the best loss is bold. Then how it
    compares with `long`, which a screen is to predict."""
    losses = {row: results.mean(row, nats) for row in results.rows}
    best = min(losses, key=losses.__getitem__) if losses else None
    lines = []
    for row in (row for row in results.protocol.rows if row in losses):
        rivals = (None if row == rival else difference(results, row, rival) for rival in plain_rivals(row))
        lines.append(
            [
                f"`{row}`",
                results.what(row),
                seconds_of(results, row),
                f"**{losses[row]:.4f}**" if row == best else f"{losses[row]:.4f}",
                *("–" if against is None else against.cell for against in rivals),
            ]
        )
    headings = (
        "row",
        "model",
        f"{unit(results)} seconds",
        "nats per token",
        "against plain",
        "against plain with a gate",
    )
    notes = [measured_on(results), *errors_of(results)] if lines else []
    parts = [*([markdown(headings, lines)] if lines else []), *not_run(results), *notes]
    trusted = []
    for rival in (PLAIN, "head-gate"):
        both = [row for row in results.rows if row not in (PLAIN, rival) and difference(long, row, rival)]
        if pairs := [
            f"`{row}` {cell(results, row, rival)} here and {cell(long, row, rival)} in `long`" for row in both
        ]:
            trusted.append(f"Against `{rival}`: {'; '.join(pairs)}.")
    if trusted:
        parts.append(" ".join(["How far a screen can be trusted.", *trusted]))
    return "\n\n".join(parts)


def plain_rivals(row: str) -> tuple[str, str]:
    """The rows of `screen` with the same kind of blocks and optimizer and no forks: without a gate and with it."""
    for kind in ("modern-muon", "modern"):
        if row.startswith(kind):
            return kind, f"{kind}-gate"
    return PLAIN, "head-gate"


def cell(results: Results, row: str, other: str = PLAIN) -> str:
    against = difference(results, row, other)
    return "–" if against is None else against.cell


def sweep_table(results: Results) -> str:
    """Weight decay × learning rate, one table per model; the best of each is bold."""
    rows = results.protocol.rows
    points = {row: (settings.optim["lr"], settings.optim["weight_decay"]) for row, settings in rows.items()}
    models = list(dict.fromkeys(row.partition("-lr")[0] for row in rows))
    rates, decays = (sorted({point[i] for point in points.values()}) for i in (0, 1))
    parts = []
    for model in models:
        losses = {row: results.mean(row, nats) for row in results.rows if row.partition("-lr")[0] == model}
        best = min(losses, key=losses.__getitem__) if losses else None
        at = {point: row for row, point in points.items() if row.partition("-lr")[0] == model}
        lines = [
            [f"{decay:g}", *(sweep_cell(at.get((rate, decay)), losses, best) for rate in rates)] for decay in decays
        ]
        headings = [f"`{model}`: weight decay", *(f"lr {rate:g}" for rate in rates)]
        parts.append(markdown(headings, lines))
    used = (f"`{model}` lr {at['lr']:g}, weight decay {at['weight_decay']:g}" for model, at in TUNED.items())
    parts.append(f"Validation loss in nats per token, the best bold. `long` uses: {'; '.join(used)}.")
    return "\n\n".join(parts)


def sweep_cell(row: str | None, losses: dict[str, float], best: str | None) -> str:
    if row is None:
        return "–"
    if row not in losses:
        return "not run"
    return f"**{losses[row]:.4f}**" if row == best else f"{losses[row]:.4f}"


def sources_table(results: Results) -> str:
    names = list(dict.fromkeys(name for record in results.records for name in record.get("by_source", {})))
    if not names:
        return NONE_YET
    headings = ("row", "seeds", *(f"{name}: nats (bits per byte)" for name in names))
    lines = []
    for row, seeds in results.rows.items():
        cells = [mean_of(seeds.values(), name) for name in names]
        lines.append([f"`{row}`", str(len(seeds)), *cells])
    return markdown(headings, lines)


def mean_of(records: Iterable[Record], source: str) -> str:
    found = [record["by_source"][source] for record in records if source in record.get("by_source", {})]
    if not found:
        return "–"
    loss, bits = (statistics.fmean(each[name] for each in found) for name in ("nats", "bits_per_byte"))
    return f"{loss:.4f} ({bits:.4f})"


def forks_table(results: Results) -> str:
    """Means over the seeds of a row, for each fork layer."""
    lines = []
    for row, seeds in results.rows.items():
        records = [record["forks"] for record in seeds.values() if record.get("forks")]
        for layers in zip(*records, strict=True):
            numbers = {name: statistics.fmean(layer[name] for layer in layers) for name in ("streams", "alive")}
            scores = [statistics.fmean(values) for values in zip(*(layer["scores"] for layer in layers), strict=True)]
            cells = [f"{score:.3f}" for score in scores]
            place = [f"`{row}`", str(layers[0]["layer"]), f"{numbers['streams']:.3f}"]
            lines.append([*place, *cells, f"{numbers['alive']:.1%}"])
    if not lines:
        return NONE_YET
    quantiles = (f"score: {name}" for name in QUANTILE_NAMES)
    return markdown(("row", "before block", "streams per token", *quantiles, "share with a score above 0.05"), lines)


WAYS = {"blockwise": "blockwise", "autoregressive": "autoregressive", "fixed": "fixed budget", "cached": "cached"}


def autoregressive_table(results: Results) -> str:
    """Every way to score a row on the same windows; only block selection has a fixed budget and an inexact cache."""
    lines = []
    for row, seeds in results.rows.items():
        found = [record["autoregressive"] for record in seeds.values() if record.get("autoregressive")]
        if found:
            ways = [way_cell(found, way) for way in WAYS]
            gap = autoregressive_gap(results, row)
            largest = max(each["differences"]["autoregressive - blockwise"]["largest"] for each in found)
            lines.append([f"`{row}`", str(found[0]["windows"]), *ways, gap.cell if gap else "–", f"{largest:.1e}"])
    if not lines:
        return NONE_YET
    headings = ("row", "windows", *WAYS.values(), "autoregressive − blockwise", "largest of any token")
    return markdown(headings, lines)


def way_cell(found: Sequence[dict[str, Any]], way: str) -> str:
    losses = [each["nats"][way] for each in found if way in each["nats"]]
    return f"{statistics.fmean(losses):.4f}" if losses else "–"


def provenance_table(all_results: Iterable[Results]) -> str:
    return records_table(
        {
            f"{results.name}/{row}-seed{seed}.json": record
            for results in all_results
            for row, seeds in results.rows.items()
            for seed, record in seeds.items()
        }
    )


def records_table(records: Mapping[str, Record]) -> str:
    """By path, as seen from the page: where each record comes from."""
    lines = []
    for path, record in records.items():
        wall = f"{record['wall_seconds']:,.0f}"
        wall += f" (resumed at step {record['resumed_at']:,})" if record.get("resumed_at") else ""
        wall += f" (skipped steps: {record['skipped_steps']:,})" if record.get("skipped_steps") else ""
        commit, torch = (record["commit"] or "unknown")[:12], record["versions"]["torch"]
        cells = [commit, torch, record["device"], f"`{record['command']}`", wall, record["time"][:16]]
        lines.append([f"[{path}]({path})", *cells])
    if not lines:
        return "No records yet."
    return markdown(
        ("record", "commit", "PyTorch", "device", "command", "wall seconds of training", "time (UTC)"), lines
    )
