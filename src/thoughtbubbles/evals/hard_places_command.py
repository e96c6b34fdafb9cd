"""`thoughtbubbles eval --tasks task:NAME`: a model's accuracy on made-up tasks by work, and where its streams are.

Every process does all of it: it takes seconds.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from thoughtbubbles.checkpoint import find_model, load, load_tokenizer
from thoughtbubbles.data.builtin import BYTES
from thoughtbubbles.data.tasks import PREFIX, task_named
from thoughtbubbles.data.tasks.task import VERSION, Task
from thoughtbubbles.distributed import joined
from thoughtbubbles.evals.hard_places import ALIKE, EASY, measure_task
from thoughtbubbles.evals.results import home_of
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.files import write_json
from thoughtbubbles.generate.requests import budget_problem
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.provenance import provenance

EXAMPLES = 1024  # of each split, unless --limit says otherwise


def evaluate_tasks(settings: Evaluation) -> None:
    """Prints a table per task and writes task-NAME.json."""
    folder = find_model(settings.checkpoint)
    tasks = [task_named(name.removeprefix(PREFIX)) for name in settings.names]
    with joined(settings.device) as world:
        model = load(folder, device=world.device, dtype=torch.float32).eval()
        check(folder, model, tasks, settings)
        home = home_of(folder) if settings.out is None else settings.out
        home.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            found = {
                split: measure_task(
                    model,
                    task,
                    split,
                    n_examples=settings.limit or EXAMPLES,
                    budget=settings.budget[0] if settings.budget else None,
                )
                for split in ("val", *(split for split in task.splits if split != "train"))
            }
            if world.is_first:
                path = home / file_name(task, settings)
                show(task, found, has_forks=bool(model.config.fork_layers))
                about = {"checkpoint": str(folder), "task": task.name, "version": VERSION, "budget": settings.budget}
                write_json(path, {**about, "splits": found, **provenance()})
                print(f"written: {path}")


def file_name(task: Task, settings: Evaluation) -> str:
    """One for each combination of settings, so that none replaces another."""
    limit = () if settings.limit is None else (f"limit{settings.limit}",)
    return (
        "-".join(("task", task.name, *(f"r{budget}" for budget in settings.budget), *limit)).replace("/", "_") + ".json"
    )


def check(folder: Path, model: Thoughtbubbles, tasks: list[Task], settings: Evaluation) -> None:
    tokenizer = load_tokenizer(folder)
    if tokenizer is None or tokenizer.name != BYTES.name:
        has = "none" if tokenizer is None else tokenizer.name
        raise ValueError(
            f"--checkpoint {folder}: made-up tasks are text in bytes, but its tokenizer is {has}; give a model that "
            f"`thoughtbubbles train {PREFIX}{tasks[0].name}` has trained"
        )
    for task in tasks:
        if task.block_size > model.config.block_size:
            raise ValueError(
                f"--tasks {PREFIX}{task.name}: has texts of up to {task.block_size} tokens, but the model's context "
                f"length (block_size) is {model.config.block_size}"
            )
    if settings.dtype != "float32":
        raise ValueError(f"--dtype {settings.dtype}: made-up tasks are measured in float32; leave it out")
    if len(settings.budget) > 1:
        raise ValueError(f"--budget {' '.join(settings.budget)}: with made-up tasks give one")
    for budget in settings.budget:
        if wrong := budget_problem(model.config, budget):
            raise ValueError(f"--{wrong}")


def show(task: Task, found: dict[str, Any], *, has_forks: bool) -> None:
    table = Table(title=f"{PREFIX}{task.name}: {task.what}", title_justify="left")
    for heading in ("split", "work", "answers", "right", *(["streams per token"] if has_forks else [])):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split, measured in found.items():
        table.add_section()
        scored = measured.get("alone", measured["accuracy"])
        for place, work in enumerate(sorted(scored, key=int)):
            streams = [f"{measured['streams'][work][-1]:.2f}" if work in measured["streams"] else "–"] * has_forks
            table.add_row(split * (place == 0), work, str(measured["count"][work]), f"{scored[work]:.1%}", *streams)
        if has_forks:
            for name, what in ((ALIKE, "easy, same character"), (EASY, "all easy positions")):
                if name in measured["streams"]:
                    table.add_row("", what, "", "", f"{measured['streams'][name][-1]:.2f}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
