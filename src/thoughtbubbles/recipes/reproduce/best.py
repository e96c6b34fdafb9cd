"""The best rows of `long` at each cost: those that are measurably better than all cheaper ones."""

from collections.abc import Mapping

from thoughtbubbles.recipes.reproduce.compare_rows import difference
from thoughtbubbles.recipes.reproduce.equal_cost import BATCHES, LARGEST
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Evidence, Results, flops, gpu_seconds, nats, parameters, tokens
from thoughtbubbles.recipes.reproduce.tables import NONE_YET, markdown

TRAINING = {"training tokens": tokens, "training FLOPs": flops, "GPU time of training": gpu_seconds}
DECODING = {batch: f"time of a decoded token, batch size {batch}" for batch in BATCHES}
COMMAND = "thoughtbubbles reproduce long --data CORPUS"
HEADINGS = (
    *("cost", "over `plain`", "best row, and others not measurably worse", "model", "mean of `plain` + difference"),
    *("against `plain`", "against the line above", f"`{COMMAND} …`"),
)


def best_table(evidence: Evidence) -> str:
    """A table of the models that are no larger than plain, and one of all models if there are larger ones."""
    results = evidence.results["long"]
    if PLAIN not in results:
        return NONE_YET
    costs = costs_of(evidence)
    most = LARGEST * results.cost(PLAIN, parameters)
    small = [row for row in results.rows if results.cost(row, parameters) <= most]
    same_size = {what: {row: of_rows[row] for row in small if row in of_rows} for what, of_rows in costs.items()}
    parts = [f"With no more parameters than `{PLAIN}`:", markdown(HEADINGS, best_lines(results, same_size))]
    if len(small) < len(results.rows):
        parts += ["With any number of parameters:", markdown(HEADINGS, best_lines(results, costs))]
    absent = [what for what in (*TRAINING, *DECODING.values()) if what not in costs]
    if absent:
        parts.append(f"Not measured yet, or on different devices: {'; '.join(absent)}.")
    return "\n\n".join(parts)


def best_lines(results: Results, costs: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    lines = []
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
                    f"`--only {row} --seed {seeds}`",
                ]
            )
    return lines


def costs_of(evidence: Evidence) -> dict[str, dict[str, float]]:
    """By kind of cost and row; kinds in which rows cannot be compared are left out."""
    results = evidence.results["long"]
    found = {
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
