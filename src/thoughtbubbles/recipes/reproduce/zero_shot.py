"""The zero-shot benchmarks of docs/results: ours by row, and the paper's."""

import statistics
from collections.abc import Mapping
from functools import partial

from thoughtbubbles.files import read_object
from thoughtbubbles.recipes.reproduce.compare_rows import Difference, common_seeds, gap_of
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Results
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.recipes.reproduce.tables import PAPER, markdown


def zero_shot_table(results: Results) -> str:
    """Ours, by row, then the paper's models on the same benchmarks."""
    paper = read_object(PAPER)
    tasks = paper["tasks"]
    lines = [zero_shot_line(results, row, tasks) for row, known in results.protocol.rows.items() if known.zero_shot]
    chance = {name: task["chance"] for record in results.records for name, task in record.get("zero_shot", {}).items()}
    shown = ("–" if chance.get(name) is None else f"{100 * chance[name]:.1f}" for name in tasks)
    lines.append(["", "chance", *shown])
    for part in paper["zero_shot"]:
        for row, numbers in part["rows"].items():
            cells = (numbers.get(name, "–") for name in tasks)
            lines.append([f"the paper, table {part['table']}: {part['model']}", row, *cells])
    return "\n\n".join([markdown(("", "row", *tasks.values()), lines), *zero_shot_sentences(results, tasks)])


def zero_shot_sentences(results: Results, tasks: Mapping[str, str]) -> list[str]:
    """Which differences to plain, paired by seed, are measurable."""
    found = {
        (row, task): gap
        for row, known in results.protocol.rows.items()
        if known.zero_shot and row != PLAIN
        for task in tasks
        if (gap := zero_shot_difference(results, row, task)) is not None
    }
    if not found:
        return []
    clear = [
        f"`{row}` {tasks[task]} {f'{gap.mean:+.1f}'.replace('-', '−')} ± {gap.error:.1f} points"
        for (row, task), gap in found.items()
        if gap.is_measurable
    ]
    first = f"Of {len(found)} differences to `{PLAIN}`, paired by seed, {len(clear) or 'none'} can be measured"
    chance = f"At 95 % confidence, about {0.05 * len(found):.1f} of them would be measured by chance alone"
    error = "± is here the variation between seeds of all rows together; that other questions would differ is left out"
    return [f"{first}{': ' * bool(clear)}{'; '.join(clear)}. {chance}. {error}."]


def zero_shot_difference(results: Results, row: str, task: str) -> Difference | None:
    """In points, of two seeds or more, if both rows were asked in all of them."""
    accuracy, seeds = partial(points, task=task), common_seeds(results, row, PLAIN)
    both = [results.rows[each][seed] for seed in seeds for each in (row, PLAIN)]
    if len(seeds) < 2 or any(accuracy(record) is None for record in both):
        return None
    return gap_of(results, row, PLAIN, accuracy)


def points(record: Record, task: str) -> float | None:
    """Per cent that were right."""
    found = record.get("zero_shot", {}).get(task)
    return None if found is None else 100 * found["accuracy"]


def zero_shot_line(results: Results, row: str, tasks: dict[str, str]) -> list[str]:
    """Over several seeds: the mean accuracy and the mean standard error over questions, and the range of the seeds."""
    found = [record["zero_shot"] for record in results.rows.get(row, {}).values() if "zero_shot" in record]
    if not found:
        return ["ours: not run", f"`{row}`", *["–"] * len(tasks)]
    cells = []
    for name in tasks:
        scores = [each[name] for each in found if name in each]
        mean = 100 * statistics.fmean(score["accuracy"] for score in scores) if scores else None
        errors = [100 * score["standard_error"] for score in scores if score["standard_error"] is not None]
        error = f" ± {statistics.fmean(errors):.1f}" if errors else ""
        accuracies = sorted(100 * score["accuracy"] for score in scores)
        seeds = f" ({accuracies[0]:.1f} to {accuracies[-1]:.1f})" if len(accuracies) > 1 else ""
        cells.append("–" if mean is None else f"{mean:.1f}{error}{seeds}")
    return [f"ours, {len(found)} seed{'s' * (len(found) > 1)}", f"`{row}`", *cells]
