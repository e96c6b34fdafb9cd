"""Runs one stage: trains or resumes it, then measures its last weights.

What a record says of a stage is left in the stage's folder when it has ended. So a row that was interrupted in or
before stage two does not touch stage one again, and its numbers and times stay those of the process that made them.
Stage two also notes the weights that it starts from, and is neither resumed nor used after any others.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from thoughtbubbles.checkpoint import checkpoints, find_model
from thoughtbubbles.distributed import World, joined
from thoughtbubbles.evals.results import weights_of
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.files import read_object, write_atomically, write_json
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.provenance import device_name, provenance
from thoughtbubbles.recipes.reproduce.corpus import Corpus
from thoughtbubbles.recipes.reproduce.measure import accuracies, measure
from thoughtbubbles.recipes.reproduce.study import Record, as_lines
from thoughtbubbles.recipes.reproduce.training import curve, skipped_steps, speed, train_run, training_loss
from thoughtbubbles.recipes.reproduce.two_stage.protocol import MixturePart
from thoughtbubbles.train.config import RunConfig

DONE = "stage.json"
START = "start.json"
TASKS = ("gsm8k", "arc_easy")
ANSWERS_AT_ONCE = 256  # on a GPU
HERE_ONLY = ("name", "out", "data", "init_from")  # fields of a run's config that name folders of this machine


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the weights of a stage are measured on."""

    corpus: Corpus
    questions: Path
    """Folder with the benchmarks."""
    limit: int | None
    """Questions per benchmark; None: all."""


class Start(NamedTuple):
    """What a stage starts from."""

    folder: Path  # of the stage before
    weights: dict[str, int]
    """Checksums of its last weights. They are in its record, since its checkpoint may be deleted when all is done."""


def run_stage(config: RunConfig, mixture: Iterable[MixturePart], on: Measured, *, start: Start | None = None) -> Record:
    """Without `start`, from random weights."""
    done = config.folder / DONE
    about: Record = {
        "config": {name: value for name, value in config.as_dict().items() if name not in HERE_ONLY},
        "data": {part.name: part.as_dict() for part in mixture},
    }
    if start is not None:
        about["start_weights"] = start.weights
    if done.is_file():
        remedy = "delete it, and the stage is measured again"
        found = read_object(done, remedy=remedy)
        if "weights" not in found:
            raise ValueError(f"{done} has no checksums of the weights: {remedy}")
        if start is not None and found.get("start_weights") != start.weights:
            raise other_start(config, start)
        if any(found.get(name) != value for name, value in about.items()):
            raise ValueError(
                f"{config.folder} is a stage with other settings or data: delete it, or give another --runs"
            )
        return found
    if start is not None:
        config = replace(config, init_from=begin(config, start))
    found = {**about, **trained(config)}
    with joined("auto") as world:
        found |= measured(config, on, world)
    write_atomically(done, [as_lines(found).encode()])
    return found


def begin(config: RunConfig, start: Start) -> Path:
    """The checkpoint to start from; before training, its weights are noted in the folder of the stage."""
    kept = checkpoints(start.folder)
    if not kept:
        raise ValueError(
            f"{start.folder} has results but no checkpoint, from which the next stage starts: delete this folder to "
            "train the stage again, or give another --runs"
        )
    if weights_of(find_model(kept[-1])) != start.weights:
        raise ValueError(
            f"{kept[-1]} has other weights than those that {start.folder / DONE} is about: delete {DONE}, and the "
            "stage is measured again"
        )
    note = config.folder / START
    if checkpoints(config.folder) and (not note.is_file() or read_object(note) != start.weights):
        raise other_start(config, start)
    config.folder.mkdir(parents=True, exist_ok=True)
    write_json(note, start.weights)
    return kept[-1]


def other_start(config: RunConfig, start: Start) -> ValueError:
    return ValueError(
        f"{config.folder} was trained from other weights than those of {start.folder}: delete it, or give another "
        "--runs"
    )


def trained(config: RunConfig) -> Record:
    found = train_run(config)
    return {
        "parameters": parameter_count(config.model),
        "steps": config.steps,
        "tokens": config.tokens,
        "flops": config.flops_per_row * config.rows * config.steps,
        "wall_seconds": found.seconds,
        "median_tokens_per_second": speed(found.lines, 0.5),
        "resumed_at": found.resumed_at,
        "skipped_steps": skipped_steps(found.lines),
        "curve": [[step, round(loss, 5)] for step, loss in curve(found.lines)],
        "training_loss": training_loss(found.lines),
    }


def measured(config: RunConfig, on: Measured, world: World) -> Record:
    begun, source = time.monotonic(), provenance()
    model = find_model(checkpoints(config.folder)[-1])
    loss = measure([model], on.corpus.folder, {}, ar_windows=0, device=world.device)
    answered = answers(model, on, config.folder / "benchmarks", world)
    return {
        "validation": loss["validation"],
        "forks": loss["forks"],
        "benchmarks": answered,
        "measuring_seconds": time.monotonic() - begun,
        "device": device_name(world.device),
        "weights": weights_of(model),
        **{name: source[name] for name in ("commit", "versions", "time")},
    }


def answers(model: Path, on: Measured, out: Path, world: World) -> dict[str, Any]:
    """Exact match of GSM8K and accuracy of ARC-Easy. All rows are causal or plain, so the KV cache is exact."""
    on_gpu = world.device.type == "cuda"
    settings = Evaluation(
        checkpoint=model,
        tasks=TASKS,
        data_dir=on.questions,
        limit=on.limit,
        method="cached",
        compile=on_gpu,
        dtype="bfloat16" if on_gpu else "float32",  # as in training; compiled steps are for bfloat16
        answers_at_once=ANSWERS_AT_ONCE if on_gpu else 32,
        out=out,
    )
    return {name: {**found, "dtype": settings.dtype} for name, found in accuracies(settings, world).items()}
