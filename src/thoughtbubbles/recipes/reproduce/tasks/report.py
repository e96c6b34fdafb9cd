"""The page of `reproduce tasks`: a table per task, figures, and a plain answer to both questions, from the records.

Do forks go where the work is: streams at hard positions against easy ones with the same character, in the tasks where
the work can only be done there. Do they help there: accuracy on hard answers, the upper half of the work that training
has, against each form without forks, paired by seed.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

from thoughtbubbles.data.tasks import TASKS
from thoughtbubbles.evals.hard_places import ALIKE, EASY
from thoughtbubbles.recipes.reproduce.compare_rows import Difference, of_seeds
from thoughtbubbles.recipes.reproduce.figures import Figure, Series, rounded
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.recipes.reproduce.tables import NONE_YET, markdown
from thoughtbubbles.recipes.reproduce.tasks.protocol import FORMS, SEEDS, SWEPT_RATES, forms_of, sweep_rows
from thoughtbubbles.recipes.reproduce.tasks.records import accuracy, hard_accuracy, hard_streams, streams

Records = Mapping[str, Mapping[int, Record]]  # of a task, by form and seed
RIVALS = ("plain", "heads", "deep", "r1", "copy-2")  # what bubbles have to beat, at the same FLOPs
CHOOSING = ("r1.25", "r2", "r4", "r2-elastic")  # which tokens fork; in the other BUBBLES every one does
BUBBLES = (*CHOOSING, "feedback", "forked", "feedback-private", "feedback-residual")
FORKING = ("block-r2", "block-r4", *CHOOSING)


def of_task(records: Mapping[str, Mapping[int, Record]], task: str) -> Records:
    return {form: records[f"{task}-{form}"] for form in FORMS if f"{task}-{form}" in records}


def task_table(task: str, found: Records) -> str:
    """A line per form that has a record; then those that have none."""
    splits = ["val", *(split for split in TASKS[task].splits if split != "train")]
    headings = (
        "form",
        "model",
        "seeds",
        "steps",
        *(_headings(task, splits)),
        "streams: hard, easy with the same character, easy",
    )
    lines = [_line(task, form, found[form], splits) for form in FORMS if form in found]
    missing = ", ".join(f"`{form}`" for form in forms_of(task) if form not in found)
    parts = [markdown(headings, [*lines, _chance(task, splits)])] if found else []
    parts += [f"Planned, {len(SEEDS)} seeds each, not run: {missing}."] if missing else []
    example = next(TASKS[task].examples("val", seed=0)).text
    what = TASKS[task].what.capitalize().removesuffix("?")
    first = f"{what}{'?' * TASKS[task].what.endswith('?') or '.'} For example: `{example}`"
    return "\n\n".join([first, *parts])


def forms_table() -> str:
    return markdown(("form", "model"), ([f"`{form}`", known.what] for form, known in FORMS.items()))


def _chance(task: str, splits: Sequence[str]) -> list[str]:
    """A guess among the possible answers, for the same columns."""
    known, hard = TASKS[task], list(TASKS[task].variant("train").work)
    ranges = [("val", hard[len(hard) // 2 :]), *([("val", hard)] if hard else [])]
    ranges += [(split, list(known.variant(split).work)) for split in splits[1:]]
    shares = (statistics.fmean(known.guess(split, work) for work in works or [0]) for split, works in ranges)
    return ["", "a guess", "", "", *(f"{100 * share:.1f} %" for share in shares), "–"]


def _headings(task: str, splits: Sequence[str]) -> list[str]:
    hard = TASKS[task].variant("train").work
    first = f"`val`, work {_half(hard)}" if hard else "`val`"
    return [first, *(["`val`, all"] if hard else []), *(f"`{split}`" for split in splits[1:])]


def _half(work: range) -> str:
    works = list(work)
    return f"{works[len(works) // 2]}–{works[-1]}"


def _line(task: str, form: str, records: Mapping[int, Record], splits: Sequence[str]) -> list[str]:
    hard: list[Callable[[Record], float]] = [lambda record: hard_accuracy(record, "val")]
    if TASKS[task].variant("train").work:
        hard.append(lambda record: accuracy(record, "val"))
    cells = [spread([value(record) for record in records.values()]) for value in hard]
    cells += [spread([accuracy(record, split) for record in records.values()]) for split in splits[1:]]
    steps = next(iter(records.values()))["steps"]
    return [f"`{form}`", FORMS[form].what, str(len(records)), f"{steps:,}", *cells, _streams(form, records)]


def spread(values: Sequence[float]) -> str:
    """The mean, and the smallest and largest of several."""
    mean = f"{100 * statistics.fmean(values):.1f} %"
    return mean if len(values) < 2 else f"{mean} ({100 * min(values):.1f}–{100 * max(values):.1f})"


def _streams(form: str, records: Mapping[int, Record]) -> str:
    if form not in FORKING:
        return "–"
    hard = [found for record in records.values() if (found := hard_streams(record, "val")) is not None]
    others = [[n for record in records.values() if (n := streams(record, "val").get(kind))] for kind in (ALIKE, EASY)]
    return ", ".join(f"{statistics.fmean(each):.2f}" if each else "–" for each in (hard, *others))


def gap(found: Records, form: str, other: str, value: Callable[[Record], float]) -> Difference | None:
    """In percentage points, paired by seed; None without a common seed."""
    seeds = tuple(sorted(found.get(form, {}).keys() & found.get(other, {}).keys()))
    each = [100 * (value(found[form][seed]) - value(found[other][seed])) for seed in seeds]
    return of_seeds(each, seeds) if seeds else None


def points(difference: Difference) -> str:
    error = "" if difference.error is None else f" ± {difference.error:.1f}"
    return f"{difference.mean:+.1f}{error}".replace("-", "−")


def help_table(records: Mapping[str, Mapping[int, Record]]) -> str:
    """Accuracy on hard answers of each bubble form minus that of each rival; what is measurable is bold."""
    lines = []
    for task in TASKS:
        found = of_task(records, task)
        for form in BUBBLES:
            gaps = [gap(found, form, other, lambda record: hard_accuracy(record, "val")) for other in RIVALS]
            if any(gaps):
                cells = ["–" if each is None else _marked(each) for each in gaps]
                lines.append([f"`{task}`", f"`{form}`", *cells])
    return markdown(("task", "form", *(f"against `{other}`" for other in RIVALS)), lines) if lines else NONE_YET


def _marked(difference: Difference) -> str:
    return f"**{points(difference)}**" if difference.is_measurable else points(difference)


def answer(records: Mapping[str, Mapping[int, Record]]) -> str:
    """Both questions, in plain sentences."""
    if not records:
        return NONE_YET
    return f"{where(records)}\n\n{whether(records)}"


def where(records: Mapping[str, Mapping[int, Record]]) -> str:
    parts = []
    for task in (task for task in TASKS if TASKS[task].is_forced):
        for form in CHOOSING:
            ratios = [
                hard / streams(record, "val")[ALIKE]
                for record in of_task(records, task).get(form, {}).values()
                if (hard := hard_streams(record, "val")) is not None
            ]
            if ratios:
                parts.append(f"`{task}` {form}: {statistics.fmean(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})")
    found = f"{'; '.join(parts)}." if parts else NONE_YET
    return (
        "**Do forks go where the work is?** Streams at hard positions over streams at easy ones with the same "
        f"character: {found} In the other tasks a model can do the work before it is asked, so their streams at the "
        "question prove nothing."
    )


def whether(records: Mapping[str, Mapping[int, Record]]) -> str:
    ahead, apart, behind = [], [], []
    for task in TASKS:
        found = of_task(records, task)
        for form in BUBBLES:
            name = f"`{form}` in `{task}`"
            gaps = [gap(found, form, other, lambda record: hard_accuracy(record, "val")) for other in RIVALS]
            known = [each for each in gaps if each is not None]
            if len(known) == len(RIVALS) and all(each.is_measurable and each.mean > 0 for each in known):
                ahead.append(name)
            elif ends := separated(found, form):
                apart.append(f"{name} (its worst {100 * ends[0]:.1f} %, their best {100 * ends[1]:.1f} %)")
            elif any(each.is_measurable and each.mean < 0 for each in known):
                behind.append(name)
    rivals = ", ".join(f"`{other}`" for other in RIVALS)
    return (
        f"**Do they help there?** Measurably ahead of all of {rivals}, at the same training FLOPs: "
        f"{', '.join(ahead) or 'none'}. Not measurable over so few seeds, but every run is ahead of every run of "
        f"theirs: {', '.join(apart) or 'none'}. Measurably behind at least one of them: {', '.join(behind) or 'none'}."
    )


def separated(found: Records, form: str) -> tuple[float, float] | None:
    """The worst accuracy on hard answers of all seeds, and the best of any rival's, if that is lower."""
    own, others = found.get(form, {}), [found.get(other, {}) for other in RIVALS]
    if min(map(len, [own, *others])) < len(SEEDS):
        return None
    worst = min(hard_accuracy(record, "val") for record in own.values())
    best = max(hard_accuracy(record, "val") for other in others for record in other.values())
    return (worst, best) if worst > best else None


def accuracy_figure(task: str, found: Records) -> Figure:
    """By work, in and beyond the range of training."""
    series = {}
    for form, records in found.items():
        by_work = [_by_work(task, record) for record in records.values()]
        works = sorted(set.intersection(*map(set, by_work))) if by_work else []
        values = {work: [100 * each[work] for each in by_work] for work in works}
        series[form] = Series(
            x=[float(work) for work in works],
            y=[rounded(statistics.fmean(values[work])) for work in works],
            error=_errors([values[work] for work in works]),
        )
    trained = TASKS[task].variant("train").work
    beyond = f"; training has up to {trained[-1]}" if "deeper" in TASKS[task].splits else ""
    return Figure(
        name=f"task-{task}",
        kind="lines",
        title=f"{task}: right answers by the work they need{beyond}",
        x="work",
        y="right answers (%)",
        series=series,
        sentence=f"Accuracy on `{task}`, the mean over seeds ± one standard error." if series else NONE_YET,
    )


def _by_work(task: str, record: Record) -> dict[int, float]:
    found: dict[int, float] = {}
    for split in ("val", "deeper"):
        if split == "val" or split in TASKS[task].splits:
            measured = record["splits"][split]
            found |= {int(work): each for work, each in measured.get("alone", measured["accuracy"]).items()}
    return found


def _errors(groups: Sequence[Sequence[float]]) -> list[float] | None:
    if not groups or min(map(len, groups)) < 2:
        return None
    return [rounded(statistics.stdev(values) / len(values) ** 0.5) for values in groups]


def streams_figure(task: str, found: Records) -> Figure:
    """Streams per token after the last fork layer at hard positions, by work; 0 is easy."""
    series = {}
    for form in FORKING:
        records = list(found.get(form, {}).values())
        if not records:
            continue
        each = [
            {0 if work == EASY else int(work): n for work, n in streams(r, "val").items() if work != ALIKE}
            for r in records
        ]
        works = sorted(set.intersection(*map(set, each)))
        values = [[one[work] for one in each] for work in works]
        series[form] = Series(
            x=[float(work) for work in works],
            y=[rounded(statistics.fmean(group)) for group in values],
            error=_errors(values),
        )
    return Figure(
        name=f"task-{task}-streams",
        kind="lines",
        title=f"{task}: streams where work is to be done (0: easy positions)",
        x="work",
        y="streams per token",
        series=series,
        sentence=f"Streams after the last fork layer in `{task}`." if series else NONE_YET,
    )


def sweep_table(records: Mapping[str, Mapping[int, Record]]) -> str:
    """Right answers of `val` by learning rate, of all work; the best of each model is bold."""
    rows = sweep_rows()
    if not records:
        return NONE_YET
    lines = []
    for task, form in dict.fromkeys((row.task, row.form) for row in rows.values()):
        own = {row.lr: name for name, row in rows.items() if (row.task, row.form) == (task, form)}
        shares = {lr: accuracy(records[name][0], "val") for lr, name in own.items() if 0 in records.get(name, {})}
        best = max(shares, key=shares.__getitem__, default=None)
        cells = [f"{100 * shares[lr]:.1f} %" if lr in shares else "not run" for lr in own]
        lines.append(
            [f"`{task}`", f"`{form}`", *(f"**{c}**" if lr == best else c for lr, c in zip(own, cells, strict=True))]
        )
    return markdown(("task", "form", *(f"lr {lr:g}" for lr in SWEPT_RATES)), lines)


def task_figures(records: Mapping[str, Mapping[int, Record]]) -> list[Figure]:
    hard = [task for task in TASKS if TASKS[task].variant("train").work]
    found = {task: of_task(records, task) for task in hard}
    return [draw(task, found[task]) for task in hard for draw in (accuracy_figure, streams_figure) if found[task]]
