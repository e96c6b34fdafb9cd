"""`thoughtbubbles eval`: evaluates a checkpoint on benchmarks, shows tables, and writes results.json.

Settings and files are checked before the first forward. Wrong settings end the command; a task that cannot be opened,
or fails later, is reported and the others run. Answers are saved as soon as they are computed (evals/answers.py), and
tables and figures are made from results.json.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thoughtbubbles.checkpoint import find_model, load, load_tokenizer
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.distributed import World, joined
from thoughtbubbles.evals.autoregressive import Windows
from thoughtbubbles.evals.documents import Benchmark, data_folder, open_benchmark
from thoughtbubbles.evals.errors import agree
from thoughtbubbles.evals.evaluate import check_lengths
from thoughtbubbles.evals.measure import Found, Job, evaluate_benchmark, measure_text
from thoughtbubbles.evals.progress import Progress
from thoughtbubbles.evals.results import (
    ANSWERS,
    RESULTS,
    exact,
    home_of,
    make_folders,
    move_aside,
    name_of,
    remove_empty,
    weights_of,
)
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.show import show
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.evals.windows import check_tokens, checksum, windows_for
from thoughtbubbles.files import read_object, write_json
from thoughtbubbles.generate.requests import budget_problem, budget_remark, exact_method
from thoughtbubbles.model.budget import Number
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.provenance import provenance

Work = Windows | Benchmark


def evaluate_command(settings: Evaluation) -> None:
    """On every rank; exits with 1 if a task could not run."""
    with joined(settings.device) as world:
        failed = run(settings, world)["failed"]
    if failed:  # reported in full above
        few = f"{len(failed)} of {len(settings.names)} tasks could not run: {', '.join(failed)}"
        sys.exit(f"thoughtbubbles eval: {few}" if world.is_first else 1)


def run(settings: Evaluation, world: World) -> dict[str, Any]:
    """The content of results.json, on every rank; its `failed` has the tasks that could not run, and why."""
    folder, model, tokenizer = agree(world, lambda: _open(settings, world.device))
    budgets = _budgets(model, settings)
    failed: dict[str, str] = {}
    work = _open_tasks(settings, model, tokenizer, world, failed)
    weights = world.gather(agree(world, lambda: weights_of(folder) if world.is_first else {}))[0]
    about = {"weights": weights, "config": asdict(model.config), "tokenizer": tokenizer.name, "dtype": settings.dtype}
    name = name_of(settings, _depends_on(settings, model, budgets, about, work))
    home = home_of(folder) if settings.out is None else settings.out
    place = agree(world, lambda: make_folders(home, name, is_given=settings.out is not None))
    with Progress(quiet=not world.is_first) as progress:
        job = Job(
            settings=settings,
            model=model,
            tokenizer=tokenizer,
            budgets=budgets,
            about=about,
            answers=home / ANSWERS,
            world=world,
            progress=progress,
        )
        for budget in settings.budget:
            if remark := budget_remark(model.config, budget):
                progress.say(remark)
        try:
            found = _measure(job, work, failed)
        except ValueError:
            if settings.out is None:
                remove_empty(home, name)
            raise
    kept = world.gather(agree(world, lambda: _kept(place / RESULTS, name, failed) if world.is_first else {}))[0]
    found |= {task: earlier for task, (earlier, _) in kept.items()}
    results = {
        "name": name,
        **_numbers(settings, found, budgets),
        "failed": {task: failed[task] for task in settings.names if task in failed},
        "kept": {task: time for task, (_, time) in kept.items()},
        "checkpoint": str(folder),
        "weights": weights,
        "budget": budgets[0],
        "selection": model.config.selection if model.config.fork_layers else None,
        "config": asdict(model.config),
        "tokenizer": tokenizer.name,
        "settings": {**settings.as_dict(), "device": str(world.device)},
        "ranks": world.size,
        **provenance(),
    }
    agree(world, lambda: _write(place, results, settings) if world.is_first else None)  # all ranks wait for the file
    return results


def _open(settings: Evaluation, device: torch.device) -> tuple[Path, Thoughtbubbles, Tokenizer]:
    folder = find_model(settings.checkpoint)
    tokenizer = _tokenizer(folder)
    model = _model(folder, settings, device)
    if tokenizer.size > model.config.vocab_size:
        raise ValueError(
            f"--checkpoint {folder}: its tokenizer has {tokenizer.size} ids, more than the model's vocabulary, "
            f"{model.config.vocab_size}"
        )
    if "perplexity" in settings.names:
        check_tokens(settings, model.config)
    if any(name in TASKS for name in settings.names):
        data_folder(settings.data_dir)
    return folder, model, tokenizer


def _model(folder: Path, settings: Evaluation, device: torch.device) -> Thoughtbubbles:
    if settings.dtype == "float64" and device.type == "mps":
        raise ValueError("--dtype float64: not available on mps; use --device cpu")
    if settings.compile and device.type != "cuda":
        raise ValueError("--compile: needs a CUDA GPU; leave it out on other devices")
    model = load(folder, device=device, dtype=torch.float64 if settings.dtype == "float64" else torch.float32)
    for budget in settings.budget:
        if wrong := budget_problem(model.config, budget):
            raise ValueError(f"--{wrong}")
    if settings.compile and (settings.method or exact_method(model.config)) == "uncached":
        raise ValueError("--compile: only the cache can be compiled; add --method cached, or leave it out")
    return model.eval()


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(
            f"--checkpoint {folder} has no tokenizer.json, which is needed to encode the text: "
            "save the model with save_model(…, tokenizer=…)"
        )
    return tokenizer


def _budgets(model: Thoughtbubbles, settings: Evaluation) -> tuple[Number | None, ...]:
    """The given budgets without repetition, by default the model's own; None for a model without forks."""
    if not model.config.fork_layers:
        return (None,)
    given: tuple[Number, ...] = settings.budget or (model.config.budget,)
    once: dict[str, Number] = {}
    for budget in given:
        once.setdefault(exact(budget), budget)
    return tuple(once.values())


def _open_tasks(
    settings: Evaluation, model: Thoughtbubbles, tokenizer: Tokenizer, world: World, failed: dict[str, str]
) -> dict[str, Work]:
    """The tasks that can be opened, in the order asked for; the reasons of the others go to `failed`."""

    def opened(name: str) -> Work:
        if name == "perplexity":
            return windows_for(settings, model.config, tokenizer)
        benchmark = open_benchmark(TASKS[name], data_folder(settings.data_dir), limit=settings.limit)
        check_lengths(benchmark, tokenizer, block_size=model.config.block_size)
        return benchmark

    work: dict[str, Work] = {}
    for name in settings.names:
        try:
            work[name] = agree(world, partial(opened, name))
        except ValueError as error:
            failed[name] = str(error).removeprefix(f"{name}: ")
    _require_any(work, failed)
    return work


def _require_any(done: Mapping[str, object], failed: Mapping[str, str]) -> None:
    if not done:
        (name, wrong), *others = failed.items()
        also = f" ({', '.join(other for other, _ in others)} cannot run either)" if others else ""
        raise ValueError(f"{name}: {wrong}{also}")


def _measure(job: Job, work: Mapping[str, Work], failed: dict[str, str]) -> dict[str, Found]:
    """Runs one task after the other; one that fails now is reported like those that could not be opened."""
    found: dict[str, Found] = {}
    for name, wrong in failed.items():
        job.progress.say(f"{name} cannot run: {wrong}")
    for name, each in work.items():
        try:
            found[name] = measure_text(job, each) if isinstance(each, Windows) else evaluate_benchmark(job, each)
        except ValueError as error:
            failed[name] = str(error)
            job.progress.say(f"{name} cannot run: {error}")
    _require_any(found, failed)
    return found


def _kept(path: Path, name: str, failed: Mapping[str, str]) -> dict[str, tuple[Found, str]]:
    """Earlier results of the same evaluation, and their time, for tasks that failed now: they are not lost."""
    try:
        earlier = read_object(path)
        if earlier["name"] != name:
            return {}
        paired = earlier.get("budgets", {"tasks": {}, "others": {}})
        every = [earlier["tasks"], *(other["tasks"] for other in paired["others"].values())]
        return {
            task: (
                Found(numbers=[numbers[task] for numbers in every], paired=paired["tasks"].get(task, {})),
                earlier["kept"].get(task, earlier["time"]),
            )
            for task in failed
            if task in earlier["tasks"]
        }
    except (ValueError, KeyError, TypeError, AttributeError):  # the file is missing or damaged
        return {}


def _depends_on(
    settings: Evaluation,
    model: Thoughtbubbles,
    budgets: tuple[Number | None, ...],
    about: Mapping[str, Any],
    work: Mapping[str, Work],
) -> dict[str, Any]:
    """What the numbers depend on: evaluations that differ here have separate results."""
    tasks: dict[str, Any] = dict.fromkeys(settings.names)  # None for one that cannot run
    for name, each in work.items():
        tasks[name] = (
            checksum(each) if isinstance(each, Windows) else [each.task.version, each.checksum, settings.limit]
        )
        if isinstance(each, Benchmark) and each.task.max_new:
            tasks[name].append(settings.method or exact_method(model.config))
    return {**about, "budgets": [None if budget is None else exact(budget) for budget in budgets], "tasks": tasks}


def _numbers(settings: Evaluation, found: Mapping[str, Found], budgets: tuple[Number | None, ...]) -> dict[str, Any]:
    """The numbers of the first budget under `tasks`; those of the others, and paired differences, under `budgets`."""
    names = [name for name in settings.names if name in found]
    numbers: dict[str, Any] = {"tasks": {name: found[name].numbers[0] for name in names}}
    if len(budgets) > 1:
        others = {
            str(budget): {"tasks": {name: found[name].numbers[place] for name in names}}
            for place, budget in enumerate(budgets)
            if place
        }
        numbers["budgets"] = {
            "reference": str(budgets[0]),
            "tasks": {name: found[name].paired for name in names},
            "others": others,
        }
    return numbers


def _write(place: Path, results: dict[str, Any], settings: Evaluation) -> None:
    place.mkdir(parents=True, exist_ok=True)  # another process with the same name may have failed and removed it
    if settings.out is not None:
        move_aside(place, results["name"])
    for task, time in results["kept"].items():
        print(f"{task} could not run now: its numbers in {place / RESULTS} are those of {time}.", file=sys.stderr)
    write_json(place / RESULTS, results)
    show(results, place / RESULTS)
