"""The best rows of `long` at each cost: those that are measurably better than all others at the same cost or less."""

from collections.abc import Mapping

from thoughtbubbles.recipes.reproduce.compare_rows import difference
from thoughtbubbles.recipes.reproduce.protocols import PLAIN
from thoughtbubbles.recipes.reproduce.records import Evidence, Results, flops, gpu_seconds, nats, parameters, tokens
from thoughtbubbles.recipes.reproduce.tables import NONE_YET, markdown

TRAINING = {"training tokens": tokens, "training FLOPs": flops, "GPU time of training": gpu_seconds}
SAME_SIZE = f"training tokens, as many parameters as `{PLAIN}`"
LARGEST = 1.01  # times plain's parameters: a score head or a gate is no other size
DECODING = {"1": "time of a decoded token, 1 row", "32": "time of a decoded token, 32 rows"}


def best_table(evidence: Evidence) -> str:
    results = evidence.results["long"]
    if PLAIN not in results:
        return NONE_YET
    costs, lines = costs_of(evidence), []
    for what, of_rows in costs.items():
        for i, row in enumerate(frontier(results, of_rows)):
            gap = difference(results, row, PLAIN)
            assert gap is not None, "no row without one is here"
            seeds = " ".join(map(str, results.rows[row]))
            lines.append(
                [
                    what if i == 0 else "",
                    f"{of_rows[row] / of_rows[PLAIN]:.2f} ×",
                    f"`{row}`",
                    results.what(row),
                    f"{results.mean(PLAIN, nats) + gap.mean:.4f}",
                    "–" if row == PLAIN else gap.cell,
                    f"`thoughtbubbles reproduce long --data CORPUS --only {row} --seed {seeds}`",
                ]
            )
    headings = ("cost", "over `plain`", "best row", "model", "nats per token", "against `plain`", "command")
    absent = [what for what in (*TRAINING, *DECODING.values()) if what not in costs]
    notes = [f"Not measured yet, or on different devices: {'; '.join(absent)}."] if absent else []
    return "\n\n".join([markdown(headings, lines), *notes])


def costs_of(evidence: Evidence) -> dict[str, dict[str, float]]:
    """By kind of cost and row; kinds in which rows cannot be compared are left out."""
    results = evidence.results["long"]
    most = LARGEST * results.cost(PLAIN, parameters)
    found = {
        SAME_SIZE: {row: results.cost(row, tokens) for row in results.rows if results.cost(row, parameters) <= most}
    }
    found |= {
        what: {row: results.cost(row, value) for row in results.rows}
        for what, value in TRAINING.items()
        if value is not gpu_seconds or results.same_device
    }
    rows = evidence.decode["rows"] if evidence.decode else {}
    for batch, what in DECODING.items():
        times = {row: at[batch]["milliseconds"] for row, at in rows.items() if batch in at and row in results}
        if PLAIN in times:
            found[what] = times
    return found


def frontier(results: Results, costs: Mapping[str, float]) -> list[str]:
    """From cheap to dear; costs are compared in hundredths of plain's, since times have that much noise."""
    gaps = {row: gap.mean for row in costs if (gap := difference(results, row, PLAIN)) is not None}
    found: list[str] = []
    for row in sorted(gaps, key=lambda row: (round(costs[row] / costs[PLAIN], 2), gaps[row])):
        gain = difference(results, row, found[-1]) if found else None  # in the seeds that both have
        if not found or (gain is not None and gain.mean < 0 and gain.is_measurable):
            found.append(row)
    return found
