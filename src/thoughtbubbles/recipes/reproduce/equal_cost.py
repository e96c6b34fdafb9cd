"""Answers at equal cost, as tables: rows with forks against plain models, with a gate, of another size or length.

A verdict is about the best of these at about the same cost; a cheaper one counts too, unless it is measurably worse.
Models of the same size are another question than larger ones, whose weights need more memory.
"""

from collections.abc import Mapping, Sequence

from thoughtbubbles.recipes.reproduce.compare_rows import Difference, difference
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Evidence, Results, Value, gpu_seconds, parameters
from thoughtbubbles.recipes.reproduce.sentences import PRESET, needs, verdict
from thoughtbubbles.recipes.reproduce.tables import markdown

ROWS = ("r2", PRESET)
PROTOCOLS = ("long", "scarce")
ABOUT = 1.25  # costs within this factor of each other are about equal
NOT_SLOWER = 1.05
LARGEST = 1.01  # times the parameters: a score head or a gate is no other size
BATCHES = ("1", "32")  # sizes at which decoding is measured


def plain_rows(results: Results) -> list[str]:
    """Plain GPTs with a gate per head, or of another size or length."""
    special = {"fork_layers", "copies", "block"}
    known = results.protocol.rows.items()
    return [other for other, settings in known if other != PLAIN and not special & set(settings.model)]


def equal_cost(evidence: Evidence, value: Value, what: str) -> str:
    """`value` is the cost of a record, `what` its name."""
    verdicts, lines, notes = [], [], []
    for row in ROWS:
        for name in PROTOCOLS:
            results = evidence.results[name]
            known = plain_rows(results)
            rivals = [rival for rival in (PLAIN, *known) if difference(results, row, rival)]
            if set(rivals) <= {PLAIN}:
                notes.append(f"`{row}` in `{name}`: {needs(results, (PLAIN, row, *known))}")
            elif value is gpu_seconds and not results.same_device:
                devices = ", ".join(results.devices)
                notes.append(f"In `{name}`, rows ran on different devices ({devices}): their times cannot be compared.")
            else:
                ratios = {rival: results.ratio(rival, value, over=row) for rival in rivals}
                verdicts += verdicts_by_size(results, row, ratios, (1 / ABOUT, ABOUT), f"`{row}` in `{name}`")
                lines += [cost_line(results, row, rival, value) for rival in rivals]
    costs = (f"its {each}, over the row's" for each in ("parameters", what))
    headings = ("row", "protocol", "against", *costs, "the row's loss minus its loss")
    table = [markdown(headings, lines)] if lines else []
    return "\n\n".join(
        [
            *as_list(verdicts, f"from {1 / ABOUT:g} to {ABOUT:g} × the {what}, or less without being measurably worse"),
            *table,
            *dict.fromkeys(notes),
        ]
    )


def cost_line(results: Results, row: str, rival: str, value: Value) -> list[str]:
    costs = [f"{results.ratio(rival, each, over=row):.2f} ×" for each in (parameters, value)]
    return [f"`{row}`", f"`{results.name}`", f"`{rival}`", *costs, cell(results, row, rival)]


def equal_latency(evidence: Evidence) -> str:
    results, decode = evidence.results["long"], evidence.decode
    if decode is None:
        return "Not measured yet: needs the decoding times of the rows of `long`."
    verdicts, lines = [], []
    for row in ROWS:
        for batch in BATCHES:
            times = {each: at[batch]["milliseconds"] for each, at in decode["rows"].items() if batch in at}
            known = (PLAIN, *plain_rows(results))
            rivals = [rival for rival in known if rival in times and difference(results, row, rival)]
            if row not in times or not rivals:
                continue
            ratios = {rival: times[rival] / times[row] for rival in rivals}
            verdicts += verdicts_by_size(results, row, ratios, (0, NOT_SLOWER), f"`{row}` at batch size {batch}")
            lines += [
                [
                    *(f"`{row}`", batch, f"{times[row]:.3f} ms"),
                    *(f"`{rival}`", f"{times[rival]:.3f} ms", cell(results, row, rival)),
                ]
                for rival in rivals
            ]
    if not lines:
        rows = " or ".join(f"`{row}`" for row in ROWS)
        return f"Not measured yet: needs decoding times and records of `{PLAIN}` and of {rows}."
    headings = ("row", "batch size", "time per token", "against", "its time per token", "the row's loss minus its loss")
    first = as_list(verdicts, f"at most {NOT_SLOWER:g} × the time")
    return "\n\n".join([*first, markdown(headings, lines), f"Device: {decode['device']}."])


def as_list(verdicts: Sequence[str], allowed: str) -> list[str]:
    """Paragraphs; none without a verdict."""
    if not verdicts:
        return []
    return [
        f"Against the best plain model, with a gate per head or without, that takes {allowed}:",
        "\n".join(f"- {each}" for each in verdicts),
    ]


def verdicts_by_size(
    results: Results, row: str, ratios: Mapping[str, float], allowed: tuple[float, float], where: str
) -> list[str]:
    """Against the best rival of each size. `ratios`: the cost of each rival over that of the row.

    A cheaper rival that is measurably worse says nothing: it may be better with as much.
    """
    larger = [rival for rival in ratios if results.ratio(rival, parameters, over=row) > LARGEST]
    found = []
    for size, group in {"no more": [rival for rival in ratios if rival not in larger], "more": larger}.items():
        near = [
            rival
            for rival in group
            if ratios[rival] <= allowed[1] and (ratios[rival] >= allowed[0] or not is_better(results, row, rival))
        ]
        best, words = hardest(results, row, near), f"{where}, {size} parameters"
        if best is not None:
            found.append(f"{words}: **{verdict(best[1])}** (`{best[0]}`).")
        elif group:
            others = "; ".join(f"`{rival}` takes {ratios[rival]:.2f} ×" for rival in group)
            found.append(f"{words}: no such model was run; {others}.")
    return found


def is_better(results: Results, row: str, rival: str) -> bool:
    gap = difference(results, row, rival)
    return gap is not None and gap.mean < 0 and gap.is_measurable


def hardest(results: Results, row: str, rivals: Sequence[str]) -> tuple[str, Difference] | None:
    """The rival with the lowest loss, and the difference of the row to it."""
    gaps = [(rival, gap) for rival in rivals if (gap := difference(results, row, rival)) is not None]
    return max(gaps, key=lambda each: each[1].mean, default=None)


def cell(results: Results, row: str, rival: str) -> str:
    gap = difference(results, row, rival)
    assert gap is not None, "rivals are those that have one"
    return gap.cell
