"""Renders docs/results: tables, answers and figures from the records, between the markers that name them.

A page is written by hand; what is between `<!-- name -->` and `<!-- /name -->` is generated. So is a table of the
README, `evidence`. index.md has the protocols on text, tasks.md the tasks.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from thoughtbubbles.data.tasks import TASKS
from thoughtbubbles.files import check_folder, read_object, short_name, write_atomically
from thoughtbubbles.plotting import has_matplotlib
from thoughtbubbles.recipes.reproduce.answers import answers
from thoughtbubbles.recipes.reproduce.best import best_table
from thoughtbubbles.recipes.reproduce.figures import Figure, figures
from thoughtbubbles.recipes.reproduce.finetune.report import clutrr_figure, clutrr_table, gsm8k_table
from thoughtbubbles.recipes.reproduce.overview import overview
from thoughtbubbles.recipes.reproduce.plots import write_figure
from thoughtbubbles.recipes.reproduce.records import Evidence, read_evidence
from thoughtbubbles.recipes.reproduce.tables import (
    autoregressive_table,
    forks_table,
    protocol_table,
    provenance_table,
    records_table,
    screen_table,
    sources_table,
    sweep_table,
)
from thoughtbubbles.recipes.reproduce.tasks.records import read_task_records
from thoughtbubbles.recipes.reproduce.tasks.report import (
    answer,
    forms_table,
    help_table,
    of_task,
    task_figures,
    task_table,
)
from thoughtbubbles.recipes.reproduce.tasks.report import sweep_table as task_sweep_table
from thoughtbubbles.recipes.reproduce.two_stage.report import two_stage_table
from thoughtbubbles.recipes.reproduce.zero_shot import zero_shot_table

PAGE, TASKS_PAGE, FIGURES = "index.md", "tasks.md", "figures"
NEED = "the plots need `pip install 'thoughtbubbles[analysis]'`"
SECTIONS: dict[str, tuple[str, Callable[[Evidence], str]]] = {
    "best": ("The best so far", best_table),
    "answers": ("Answers", answers),
    "long": ("Protocol `long`", lambda found: protocol_table(found.results["long"])),
    "short": ("Protocol `short`", lambda found: protocol_table(found.results["short"])),
    "screen": ("Protocol `screen`", lambda found: screen_table(found.results["screen"], found.results["long"])),
    "scarce": ("Protocol `scarce`", lambda found: protocol_table(found.results["scarce"])),
    "laptop": ("Protocol `laptop`", lambda found: protocol_table(found.results["laptop"])),
    "curves": ("During training", lambda found: shown(found, "curves")),
    "pays": ("Where it pays", lambda found: shown(found, "pays")),
    "autoregressive": (
        "Blockwise and token by token",
        lambda found: autoregressive_table(found.results["long"]),
    ),
    "sources": ("By source", lambda found: sources_table(found.results["long"])),
    "forks": ("What the fork layers do", lambda found: forks_table(found.results["long"])),
    "zero-shot": ("Zero-shot benchmarks", lambda found: zero_shot_table(found.results["long"])),
    "sweep": (
        "Learning rate and weight decay",
        lambda found: f"{sweep_table(found.results['long-sweep'])}\n\n{shown(found, 'sweep')}",
    ),
    "provenance": ("Records", lambda found: provenance_table(found.results.values())),
    "evidence": ("Overview", overview),
}
# Which protocols a part of the page is about: one without any records is left out of a new page.
ABOUT = {
    **dict.fromkeys(("best", "long", "pays", "autoregressive", "sources", "forks", "zero-shot", "evidence"), ("long",)),
    "answers": ("long", "short", "scarce"),
    "sweep": ("long-sweep",),
    **{name: (name,) for name in ("short", "screen", "scarce", "laptop")},
}
MARKED = re.compile(r"(<!-- ([\w-]+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def shown(found: Evidence, part: str) -> str:
    return "\n\n".join(figure_block(found.folder, figure) for figure in figures(found)[part])


def task_sections(folder: Path) -> dict[str, Callable[[], str]]:
    """The generated parts of tasks.md."""
    records = read_task_records(folder)
    drawn = task_figures(records)

    def section(task: str) -> str:
        own = [figure for figure in drawn if figure.name in (f"task-{task}", f"task-{task}-streams")]
        parts = [task_table(task, of_task(records, task)), *(figure_block(folder, figure) for figure in own)]
        return "\n\n".join(parts)

    return {
        "tasks-forms": forms_table,
        "tasks-answer": partial(answer, records),
        "tasks-help": partial(help_table, records),
        **{f"task-{task}": partial(section, task) for task in TASKS},
        "clutrr": partial(clutrr_section, folder),
        "gsm8k": partial(gsm8k_table, folder),
        "two-stage": partial(two_stage_table, folder),
        "tasks-sweep": lambda: task_sweep_table(read_task_records(folder, "tasks-sweep")),
        "tasks-records": lambda: records_table(
            {f"{path.parent.name}/{path.name}": read_object(path) for path in tasks_page_records(folder)}
        ),
    }


def tasks_page_records(folder: Path) -> list[Path]:
    """Of everything that is on tasks.md."""
    names = ("tasks", "tasks-sweep", "clutrr", "gsm8k", "two-stage")
    return [path for name in names for path in sorted((folder / name).glob("*-seed*.json"))]


def clutrr_section(folder: Path) -> str:
    figure = clutrr_figure(folder)
    return "\n\n".join([clutrr_table(folder), *([figure_block(folder, figure)] if figure.series else [])])


def sections_of(page: Path, folder: Path) -> Mapping[str, Callable[[], str]]:
    if page.name == TASKS_PAGE:
        return task_sections(folder)
    found = read_evidence(folder)
    return {name: partial(make, found) for name, (_, make) in SECTIONS.items()}


def figure_block(folder: Path, figure: Figure) -> str:
    """The picture, if it was drawn, and its sentence."""
    if not figure.series:
        return f"**{figure.title}.** {figure.sentence}"
    at = f"{FIGURES}/{figure.name}"
    numbers = f"[Numbers]({at}.json)"
    if not (folder / f"{at}.png").is_file():
        return f"**{figure.title}.** {figure.sentence} {numbers}; {NEED}."
    return f"![{figure.title}]({at}.png)\n\n{figure.sentence} [SVG]({at}.svg), {numbers.lower()}."


def rendered(page: Path) -> str:
    """The text of a page with everything between markers generated again; unknown markers stay as they are.

    The records are next to the page; for a README, in docs/results.
    """
    folder = page.parent / "docs" / "results" if page.name == "README.md" else page.parent
    sections = sections_of(page, folder)

    def fresh(match: re.Match[str]) -> str:
        name = match[2]
        return f"{match[1]}{sections[name]()}\n{match[3]}" if name in sections else match[0]

    return MARKED.sub(fresh, page.read_text(encoding="utf-8"))


def write_report(out: Path) -> list[Path]:
    """Draws the figures, then renders the page, and the README if `out` is docs/results of a repository.

    Where there is no page yet, one is made of the generated parts alone; parts that a page lacks are added at its end.
    Returns the paths written.
    """
    out = check_folder(out, option="--out")
    found = read_evidence(out)
    if not (any(results.rows for results in found.results.values()) or tasks_page_records(out)):
        raise ValueError(f"--out {short_name(out)}: has no records (PROTOCOL/ROW-seedN.json); run rows first")
    drawn = [figure for part in figures(found).values() for figure in part if figure.series]
    drawn += [figure for figure in (*task_figures(read_task_records(out)), clutrr_figure(out)) if figure.series]
    written = [path for figure in drawn for path in write_figure(figure, out / FIGURES)]
    if drawn and not has_matplotlib():
        print(f"tables only: {NEED}")
    page, readme = out / PAGE, out.parent.parent / "README.md"
    before = page.read_text(encoding="utf-8") if page.exists() else "# Results\n"
    write_atomically(page, [with_parts(before, found).encode()])
    tasks = out / TASKS_PAGE
    if not tasks.exists() and tasks_page_records(out):
        write_atomically(tasks, [empty_tasks_page(out).encode()])
    is_ours = out.parts[-2:] == ("docs", "results") and readme.is_file()
    for each in [page, *[tasks] * tasks.exists(), *[readme] * is_ours]:
        write_atomically(each, [rendered(each).encode()])
        written.append(each)
    return written


def with_parts(page: str, found: Evidence) -> str:
    """With empty parts for everything that has records and no place yet."""
    parts = [
        f"## {title}\n\n<!-- {name} -->\n<!-- /{name} -->\n"
        for name, (title, _) in SECTIONS.items()
        if name != "evidence"
        and f"<!-- {name} -->" not in page
        and any(found.results[each].rows for each in ABOUT.get(name, found.results))
    ]
    return "\n".join([page, *parts])


def empty_tasks_page(out: Path) -> str:
    parts = [f"<!-- {name} -->\n<!-- /{name} -->\n" for name in task_sections(out)]
    return "\n".join(["# Tasks\n", *parts])
