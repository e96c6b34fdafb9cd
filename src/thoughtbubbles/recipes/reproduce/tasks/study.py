"""Runs one row of `reproduce tasks`: trains a form on a task, then measures it on all splits of the task."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from thoughtbubbles.checkpoint import find_model, load
from thoughtbubbles.data.tasks import task_named
from thoughtbubbles.data.tasks.task import VERSION as TASK_VERSION
from thoughtbubbles.data.tasks.task import write_task
from thoughtbubbles.data.workers import processors
from thoughtbubbles.distributed import joined
from thoughtbubbles.evals.hard_places import measure_task
from thoughtbubbles.files import locked
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.provenance import device_name, provenance
from thoughtbubbles.recipes.reproduce.study import Place, Record, Study
from thoughtbubbles.recipes.reproduce.tasks.protocol import (
    FORMS,
    FULL,
    Scale,
    flops_per_row,
    n_examples,
    run_of,
    sweep_rows,
    task_rows,
)
from thoughtbubbles.recipes.reproduce.tasks.records import hard_accuracy, read_task_records
from thoughtbubbles.recipes.reproduce.training import curve, skipped_steps, train_run, training_loss

VERSION = 1
PER_SECOND = 5000  # examples that a process makes, roughly
MAKERS = 4  # processes that make the examples of a task, at most: rows of other seeds may make theirs at the same time


class TaskStudy(Study):
    result = "accuracy on hard answers"
    has_own_data = True

    def __init__(self, name: str = "tasks", scale: Scale = FULL) -> None:
        """`name`: tasks or tasks-sweep."""
        self.name, self.scale = name, scale
        self.what, self.task_rows = {
            "tasks": ("made-up tasks whose hard places are known, at equal training FLOPs", task_rows()),
            "tasks-sweep": ("learning rates for `tasks`", sweep_rows()),
        }[name]
        self.rows = self.task_rows

    def check(self, chosen: Sequence[tuple[str, int]], place: Place) -> None:
        """Nothing is read from anywhere."""

    def make_record(self, row: str, seed: int, place: Place) -> Record:
        known = self.task_rows[row]
        task, data = task_named(known.task), place.runs / "tasks" / f"data-{known.task}-seed{seed}"
        data.mkdir(parents=True, exist_ok=True)
        with locked(data, doing="writing", wait=True):  # rows may be started at the same time
            n = n_examples(known.task, self.scale)
            processes = min(MAKERS, processors()) if n > PER_SECOND else 1
            if not any(data.iterdir()):
                seconds = n / PER_SECOND / processes
                print(f"writing {n:,} examples of {known.task}, {seconds:.0f} seconds or so", file=sys.stderr)
            write_task(data, task, n_examples=n, seed=seed, processes=processes)
        config = run_of(f"{self.name}/{row}-seed{seed}", known, seed, self.scale, data=str(data))
        trained = train_run(replace(config, out=place.run(row, seed)))
        source = provenance()
        with joined("auto") as world:
            model = load(find_model(trained.checkpoint), device=world.device, dtype=torch.float32)
            splits = {
                split: measure_task(model, task, split, n_examples=self.scale.examples)
                for split in ("val", *(name for name in task.splits if name != "train"))
            }
            device = device_name(world.device)
        settings = {name: value for name, value in config.as_dict().items() if name not in ("out", "data", "name")}
        return {
            "version": VERSION,
            "task_version": TASK_VERSION,
            "protocol": self.name,
            "row": row,
            "task": known.task,
            "form": known.form,
            "seed": seed,
            "what": FORMS[known.form].what,
            "parameters": parameter_count(config.model),
            "steps": config.steps,
            "tokens": config.tokens,
            "flops": flops_per_row(known, self.scale) * config.rows * config.steps,
            "wall_seconds": trained.seconds,
            "resumed_at": trained.resumed_at,
            "skipped_steps": skipped_steps(trained.lines),
            "device": device,
            "command": f"thoughtbubbles reproduce {self.name} --only {row} --seed {seed}",
            **{name: source[name] for name in ("commit", "versions", "time")},
            "config": settings,
            "curve": [[step, round(loss, 5)] for step, loss in curve(trained.lines)],
            "training_loss": training_loss(trained.lines),
            "splits": splits,
        }

    def done(self, out: Path) -> Mapping[str, Mapping[int, str]]:
        return {
            row: {seed: f"{hard_accuracy(record, 'val'):.1%}" for seed, record in seeds.items()}
            for row, seeds in read_task_records(out, self.name).items()
        }

    def compare(self, before: Record, again: Record) -> tuple[bool, str]:
        name = f"{before['row']}, seed {before['seed']}"
        # A record may have splits that the task had once.
        splits = {name: before["splits"].get(name) for name in again["splits"]}
        if splits == again["splits"] and before["training_loss"] == again["training_loss"]:
            return True, f"{name}: the same training losses, accuracies and streams again"
        old, new = (hard_accuracy(record, "val") for record in (before, again))
        return False, f"{name}: accuracy {new:.4%}, was {old:.4%} (then on {before['device']})"
