"""The table of the README: what the main models of `long` reach, and what they cost."""

from thoughtbubbles.recipes.reproduce.compare_rows import difference
from thoughtbubbles.recipes.reproduce.equal_cost import BATCHES
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Evidence, Results, epochs, gpu_seconds, nats, parameters, tokens
from thoughtbubbles.recipes.reproduce.sentences import PRESET
from thoughtbubbles.recipes.reproduce.tables import markdown

PAGE = "docs/results/index.md"  # as seen from the README
ROWS = {
    PLAIN: "plain GPT",
    "head-gate": "plain GPT with a gate per attention head",
    "r1": "the paper's scores and attenuation, no fork survives",
    "r2": "forks chosen by learned scores, causally, 2 streams per token (residual merge)",
    PRESET: "**our presets**: every token forks once, with feedback; a gate per head",
    "longer-gate": "plain GPT with the gate, {tokens:.2f} × the tokens ({epochs:.1f} epochs)",
    "wider": "wider plain GPT, {parameters:.1f} × the parameters",
}


def overview(evidence: Evidence) -> str:
    results = evidence.results["long"]
    rows = [row for row in ROWS if row in results and (row == PLAIN or difference(results, row, PLAIN))]
    if len(rows) < 2:
        return (
            f"Experiments on what bubbles bring, and which part of it the forks bring, are running: [results]({PAGE})."
        )
    headings = (
        *("model", "validation loss, nats per token (seeds)", "against plain GPT", "GPU time of training"),
        *(f"time of a decoded token, batch size {batch}" for batch in BATCHES),
    )
    lines = [[*loss_cells(results, row), *cost_cells(evidence, row)] for row in rows]
    size, length = results.mean(PLAIN, parameters) / 1e6, results.mean(PLAIN, tokens) / 1e6
    times = results.mean(PLAIN, epochs)
    text = f"{length:,.0f}M training tokens ({times:.0f} epochs of {length / times:.0f}M)"
    where = f"{size:.1f}M parameters, {text}, {' and '.join(results.devices)}"
    errors = (
        "±: standard error of the differences, paired by seed: how far they would typically move with other seeds and "
        "another validation text. \\*: one seed, so the difference is to plain's loss in it, not to the mean above"
    )
    note = f"{where}. {errors}. Rows, curves, commits and answers to each question: [results]({PAGE})."
    return f"{markdown(headings, lines)}\n\n{note}"


def loss_cells(results: Results, row: str) -> list[str]:
    gap = None if row == PLAIN else difference(results, row, PLAIN)
    what = ROWS[row].format(
        tokens=results.ratio(row, tokens),
        parameters=results.ratio(row, parameters),
        epochs=results.mean(row, epochs),
    )
    return [what, f"{results.mean(row, nats):.4f} ({len(results.rows[row])})", "–" if gap is None else gap.cell]


def cost_cells(evidence: Evidence, row: str) -> list[str]:
    """As multiples of plain's."""
    results, decode = evidence.results["long"], evidence.decode
    rows = decode["rows"] if decode and results.devices == [decode["device"]] else {}
    times = [[rows.get(each, {}).get(batch, {}).get("milliseconds") for each in (row, PLAIN)] for batch in BATCHES]
    decoding = [f"{own / plain:.2f} ×" if own and plain else "–" for own, plain in times]
    return [f"{results.ratio(row, gpu_seconds):.2f} ×" if results.same_device else "–", *decoding]
