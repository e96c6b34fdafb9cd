"""The tables and the figure of `reproduce clutrr` and `reproduce gsm8k`, from the records of a folder.

Accuracies are in percent. ± is the standard error over questions; the spread, in parentheses, is the largest minus the
smallest result of the seeds. Rows without a record are named.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from thoughtbubbles.recipes.reproduce.figures import Figure, Series, rounded
from thoughtbubbles.recipes.reproduce.finetune.measure import ELSEWHERE, NAMES, QUESTION, WHOLE
from thoughtbubbles.recipes.reproduce.finetune.protocol import CLUTRR_FORMS, GSM8K_FORMS, LONG_SETS, SETS, gsm8k_rows
from thoughtbubbles.recipes.reproduce.finetune.records import (
    BySeed,
    BySet,
    by_hops,
    clutrr_records,
    every,
    hops_error,
    hops_mean,
    last_streams,
    means_by_seed,
    read_finetune_records,
)
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.recipes.reproduce.tables import NONE_YET, markdown

CLUTRR_NOTE = (
    "Accuracy in percent: the answer that the model finds most likely, out of 18 relations, each with the end-of-text "
    "after it. By hops: the mean over the sets that test so many hops and that every form with a record was run on; in "
    "parentheses the spread over seeds, the largest minus the smallest. Where no set is common, it is the mean over "
    "each form's own sets, and forms cannot be compared. By set: all its test stories; ± is the standard error over "
    "them. A set tests only 2 chains of relations of 2 hops and 7 or 8 of 3 hops, each in many stories, so the error "
    "of short stories is larger than it seems; from 5 hops on, every story has its own chain."
)
GSM8K_NOTE = (
    "± is the standard error over questions; in parentheses the spread over seeds, the largest minus the smallest. "
    "Streams after the last fork layer."
)


def clutrr_table(out: Path) -> str:
    found = clutrr_records(out)
    if not any(found.values()):
        return NONE_YET
    parts = [hops_table(found), sets_table(found), places_table(found), CLUTRR_NOTE, not_run(found)]
    return "\n\n".join(part for part in parts if part)


def hops_table(found: Mapping[str, BySet]) -> str:
    """Forms are compared on the same sets: those that every form with a record has."""
    testing: dict[int, set[str]] = {}  # the sets that have stories of so many hops
    for by_set in found.values():
        for name, seeds in by_set.items():
            for hops in by_hops(next(iter(seeds.values()))):
                testing.setdefault(hops, set()).add(name)
    common = set.intersection(*(set(by_set) for by_set in found.values() if by_set))
    columns = sorted(testing)
    headings = [f"{hops} hops ({hops_sets(len(testing[hops] & common))})" for hops in columns]
    averaged = {hops: testing[hops] & common or testing[hops] for hops in columns}
    lines = []
    for form, by_set in found.items():
        about = [f"`{form}`", CLUTRR_FORMS[form].what]
        if by_set:
            cells = [hops_cell([by_set[name] for name in by_set if name in averaged[hops]], hops) for hops in columns]
            lines.append([*about, f"{len(by_set)} of {len(SETS)}", n_seeds(by_set), *cells])
        else:
            lines.append([*about, "not run", *["–"] * (1 + len(columns))])
    return markdown(("form", "model", "sets", "seeds", *headings), lines)


def hops_sets(n_common: int) -> str:
    if n_common == 0:
        return "no common set: each form's own"
    return f"{n_common} set{'s' * (n_common > 1)}"


def hops_cell(sets: Sequence[BySeed], hops: int) -> str:
    if not sets:
        return "–"
    mean = fmean(hops_mean(seeds, hops) for seeds in sets)
    return f"{100 * mean:.1f}{spread(means_by_seed(sets, hops))}"


def sets_table(found: Mapping[str, BySet]) -> str:
    lines = [
        [f"`{name}`", about, *(question_cell(by_set.get(name, {}), WHOLE) for by_set in found.values())]
        for name, about in SETS.items()
    ]
    return markdown(("set", "trained on", *(f"`{form}`" for form in found)), lines)


def places_table(found: Mapping[str, BySet]) -> str:
    """Streams per token by where the token is; "" if no model has forks."""
    kinds = {NAMES: "at names", QUESTION: "at the last token of the question", ELSEWHERE: "elsewhere"}
    lines = [
        [f"`{form}`", *(number(last_streams(every(by_set), kind)) for kind in kinds)]
        for form, by_set in found.items()
        if last_streams(every(by_set), QUESTION) is not None
    ]
    return markdown(("streams per token after the last fork layer", *kinds.values()), lines) if lines else ""


def not_run(found: Mapping[str, BySet]) -> str:
    """A sentence; "" if every row has a record."""
    parts = []
    for form, by_set in found.items():
        missing = [f"`{name}-{form}`" for name in SETS if name not in by_set]
        parts += [f"`{form}` (all sets)"] if len(missing) == len(SETS) else missing
    return f"Not run: {', '.join(parts)}." if parts else ""


def clutrr_figure(out: Path) -> Figure:
    """Only the sets that test up to 10 hops, so that all points of a line are means over the same sets."""
    series: dict[str, Series] = {}
    for form, by_set in clutrr_records(out).items():
        if all(name in by_set for name in LONG_SETS):
            sets = [by_set[name] for name in LONG_SETS]
            hops = sorted(set.intersection(*(set(by_hops(next(iter(seeds.values())))) for seeds in sets)))
            errors = (math.hypot(*(hops_error(seeds, n) for seeds in sets)) / len(sets) for n in hops)
            series[form] = Series(
                x=[float(n) for n in hops],
                y=[rounded(100 * fmean(hops_mean(seeds, n) for seeds in sets)) for n in hops],
                error=[rounded(100 * error) for error in errors],
            )
    return Figure(
        name="clutrr-hops",
        kind="lines",
        title="CLUTRR: accuracy by hops, trained on 2 to 4 of them",
        x="hops",
        y="accuracy (%)",
        series=series,
        sentence=figure_sentence(series) if series else NONE_YET,
    )


def figure_sentence(series: Mapping[str, Series]) -> str:
    first = next(iter(series.values()))
    ends = "; ".join(f"`{form}` {each.y[0]:.1f} and {each.y[-1]:.1f}" for form, each in series.items())
    absent = ", ".join(f"`{form}`" for form in CLUTRR_FORMS if form not in series)
    return (
        f"Accuracy (%) at {first.x[0]:g} and at {first.x[-1]:g} hops, the mean of the sets "
        f"{' and '.join(f'`{name}`' for name in LONG_SETS)}: {ends}. Bands are ± one standard error over questions."
        + (f" Not run on both sets: {absent}." if absent else "")
    )


def gsm8k_table(out: Path) -> str:
    found = read_finetune_records(out, "gsm8k", gsm8k_rows())
    if not found:
        return NONE_YET
    headings = (
        *("row", "model", "seeds", "parameters", "epochs", "exact match (%)", "answers that ended by themselves"),
        *("streams per token: questions", "answers"),
    )
    n = max(record["test"]["documents"] for seeds in found.values() for record in seeds.values())
    table = markdown(headings, (gsm8k_line(row, found.get(row, {})) for row in GSM8K_FORMS))
    return f"{table}\n\n{n:,} questions. {GSM8K_NOTE}"


def gsm8k_line(row: str, seeds: BySeed) -> list[str]:
    about = [f"`{row}`", GSM8K_FORMS[row].what]
    if not seeds:
        return [*about, "not run", *["–"] * 6]
    records = list(seeds.values())
    matches = [record["test"]["exact_match"]["mean"] for record in records]
    ended = fmean(record["test"]["ended"] / record["test"]["documents"] for record in records)
    return [
        *about,
        str(len(records)),
        f"{records[0]['parameters']:,}",
        f"{records[0]['epochs']:.0f}",
        f"{question_cell(seeds, 'exact_match')}{spread(matches)}",
        f"{ended:.1%}",
        *(number(last_streams(records, kind)) for kind in ("questions", "answers")),
    ]


def question_cell(seeds: Mapping[int, Record], way: str) -> str:
    """The mean over seeds, and the mean standard error, since all answer the same questions."""
    if not seeds:
        return "not run"
    numbers = [record["test"][way] for record in seeds.values()]
    errors = [each["standard_error"] for each in numbers if each["standard_error"] is not None]
    error = f" ± {100 * fmean(errors):.1f}" if errors else ""
    return f"{100 * fmean(each['mean'] for each in numbers):.1f}{error}"


def spread(values: Sequence[float]) -> str:
    return f" ({100 * (max(values) - min(values)):.1f})" if len(values) > 1 else ""


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def n_seeds(by_set: BySet) -> str:
    sizes = sorted({len(seeds) for seeds in by_set.values()})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
