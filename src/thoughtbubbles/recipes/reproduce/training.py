"""Trains or resumes a run, and what its metrics say: shared by all studies."""

import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thoughtbubbles.checkpoint import checkpoints
from thoughtbubbles.files import is_locked
from thoughtbubbles.recipes.reproduce.parts import GROUP
from thoughtbubbles.recipes.reproduce.study import Stopped
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.loop import train


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run, and the checkpoint to be measured."""

    config: RunConfig
    checkpoint: Path
    step: int
    seconds: float  # of this process
    resumed_at: int | None
    lines: list[dict[str, Any]]  # of metrics.jsonl


def train_run(config: RunConfig) -> Trained:
    """Raises Stopped if a signal ended it."""
    folder = config.folder
    earlier, begun = checkpoints(folder), time.monotonic()
    try:
        result = train(config, resume=bool(earlier))
    except ValueError as error:
        if not earlier or is_locked(folder):
            raise
        raise ValueError(f"{folder} cannot be resumed: delete it, or give another --runs ({error})") from None
    if not result.finished:
        raise Stopped(result)
    return Trained(
        config=config,
        checkpoint=result.checkpoint,
        step=result.step,
        seconds=time.monotonic() - begun,
        resumed_at=int(earlier[-1].name[5:]) if earlier else None,
        lines=[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
    )


def curve(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Validation loss by step, on the part of the text that is used while training, where it is finite."""
    found = ((line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line)
    losses = ((step, float(next(iter(of_sources.values())))) for step, of_sources in found)
    return [(step, loss) for step, loss in losses if math.isfinite(loss)]


def training_loss(lines: list[dict[str, Any]]) -> list[float]:
    """The mean of every `GROUP` steps. Losses that are not finite, whose steps are skipped, are left out; a run ends
    before a whole group is."""
    losses = [float(line["loss"]) for line in lines if "loss" in line]
    groups = (losses[i : i + GROUP] for i in range(0, len(losses), GROUP))
    finite = ([loss for loss in group if math.isfinite(loss)] for group in groups)
    return [round(statistics.fmean(group), 5) for group in finite if group]


def skipped_steps(lines: list[dict[str, Any]]) -> int:
    """Steps whose loss or gradient was not finite: they change no weight."""
    return sum(line.get("skipped", False) for line in lines)


def gpu_seconds(trained: Trained) -> float:
    """Time of the steps at the speed of undisturbed ones: the 90th percentile of groups of steps.

    Before and after forks begin, steps have other speeds. If each draws its budget, fast groups are those of small
    budgets, so the median stands for all.
    """
    config, share = trained.config, 0.5 if trained.config.budgets else 0.9
    border = min(config.steps_before_forks, trained.step)
    before = [line for line in trained.lines if line.get("step", 0) <= border]
    after = [line for line in trained.lines if line.get("step", 0) > border]
    parts = [(n, part) for n, part in ((border, before), (trained.step - border, after)) if n]
    return sum(n * config.tokens_per_step / speed(part, share) for n, part in parts)


def speed(lines: list[dict[str, Any]], share: float) -> float:
    """Tokens per second of a group of steps; this share of the groups was slower."""
    speeds = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    return speeds[int(share * (len(speeds) - 1))]
