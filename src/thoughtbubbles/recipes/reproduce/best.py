"""The best rows of `long` at each cost: those that are measurably better than all cheaper ones."""

from collections.abc import Mapping

from thoughtbubbles.recipes.reproduce.answers import BATCHES
from thoughtbubbles.recipes.reproduce.compare_rows import difference
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Evidence, Results, flops, gpu_seconds, nats, parameters, tokens
from thoughtbubbles.recipes.reproduce.tables import NONE_YET, markdown

TRAINING = {"training tokens": tokens, "training FLOPs": flops, "GPU time of training": gpu_seconds}
SAME_SIZE = f"training tokens, as many parameters as `{PLAIN}`"
LARGEST = 1.01  # times plain's parameters: a score head or a gate is no other size
DECODING = {batch: f"time of a decoded token, batch size {batch}" for batch in BATCHES}


def best_table(evidence: Evidence) -> str:
    results = evidence.results["long"]
    if PLAIN not in results:
        return NONE_YET
    costs, lines = costs_of(evidence), []
    for what, of_rows in costs.items():
        best = frontier(results, of_rows)
        for i, row in enumerate(best):
            gap, gain = difference(results, row, PLAIN), difference(results, row, best[i - 1]) if i else None
            assert gap is not None, "no row without one is here"
            equals = "".join(f", `{other}`" for other in as_good(results, of_rows, row))
            seeds = " ".join(map(str, results.rows[row]))
            lines.append(
                [
                    what if i == 0 else "",
                    f"{of_rows[row] / of_rows[PLAIN]:.2f} ×",
                    f"`{row}`{equals}",
                    results.what(row),
                    f"{results.mean(PLAIN, nats) + gap.mean:.4f}",
                    "–" if row == PLAIN else gap.cell,
                    "–" if gain is None or best[i - 1] == PLAIN else gain.cell,
                    f"`thoughtbubbles reproduce long --data CORPUS --only {row} --seed {seeds}`",
                ]
            )
    headings = (
        *("cost", "over `plain`", "best row, and others not measurably worse", "model", "mean of `plain` + difference"),
        *("against `plain`", "against the line above", "command"),
    )
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


def in_hundredths(costs: Mapping[str, float]) -> dict[str, float]:
    """Costs over plain's, rounded, since times have that much noise."""
    return {row: round(cost / costs[PLAIN], 2) for row, cost in costs.items()}


def frontier(results: Results, costs: Mapping[str, float]) -> list[str]:
    """From cheap to dear: each is measurably better than every row that costs less, in the seeds that both have."""
    gaps = {row: gap.mean for row in costs if (gap := difference(results, row, PLAIN)) is not None}
    ordered, found = sorted(gaps, key=lambda row: (in_hundredths(costs)[row], gaps[row])), []
    for i, row in enumerate(ordered):
        gains = [gain for other in ordered[:i] if (gain := difference(results, row, other)) is not None]
        if all(gain.mean < 0 and gain.is_measurable for gain in gains):
            found.append(row)
    return found


def as_good(results: Results, costs: Mapping[str, float], best: str) -> list[str]:
    """Other rows that cost no more and are not measurably worse, in the seeds that both have."""
    over = in_hundredths(costs)
    gaps = {row: difference(results, row, best) for row in costs if row != best and over[row] <= over[best]}
    return [row for row, gap in gaps.items() if gap is not None and not (gap.mean > 0 and gap.is_measurable)]
