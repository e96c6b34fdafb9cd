"""Resuming a run: reads its settings, finds its newest good checkpoint, and checks that it is the same run.

A run can be made longer or shorter if no finished step would have had another learning rate or budget. The result is
then bit-identical to a run that had the new number of tokens from the start. The warm-up, a fraction of the steps,
keeps its original number of steps.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from thoughtbubbles.checkpoint import STATE, checkpoints
from thoughtbubbles.files import named, read_object, short_name, write_json
from thoughtbubbles.provenance import provenance
from thoughtbubbles.train.config import RunConfig, differences
from thoughtbubbles.train.fields import from_record
from thoughtbubbles.train.optim import learning_rate, warmup_steps
from thoughtbubbles.train.state import RunState, newest_good, read_state

RUN = "run.json"
WANTED = "give the folder of a run, or a recipe with --resume"


def read_run(folder: Path) -> RunConfig:
    """The run's config as it was last started or resumed, with its current folder."""
    path = folder / RUN
    with named(path, WANTED):
        if not path.is_file():
            raise ValueError(f"--resume {short_name(folder)}: contains no {RUN}; {WANTED}")
    record = read_object(path, remedy=WANTED)
    resumed = record.get("resumed", [])
    if not isinstance(resumed, list) or not all(isinstance(entry, dict) for entry in resumed):
        raise ValueError(f"{path}: resumed is not a list of objects: the file is damaged; {WANTED}")
    last = (resumed or [record])[-1]
    return replace(from_record(RunConfig, last.get("config"), where=str(path)), out=folder)


def find_checkpoint(run: Path, *, resume: bool, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from; None starts at step 0."""
    with named(run, "give another --out"):
        known = checkpoints(run)
        if not resume:
            if known:
                raise ValueError(
                    f"{run} already has checkpoints of a run: pass --resume to continue it, or choose another --out"
                )
            return None
        found = newest_good(run, say)
    if found is None and known:
        raise ValueError(f"{run}: every checkpoint is damaged: start again with another --out")
    if found is None:
        say(f"{run} has no checkpoint yet: starting at step 0")
    return found


def same_run(folder: Path, config: RunConfig, *, precision: str, fingerprints: list[dict[str, Any]]) -> RunState:
    """The state of a checkpoint, if it belongs to this run; its `warmup_steps` are those that the run started with, its
    `milestones` those of all lengths that the run has had."""
    state = read_state(folder)
    same_settings(state, folder, config, precision=precision)
    if state.data != fingerprints:
        raise _another_run(folder, [f"the data was {_in_words(state.data)}, is {_in_words(fingerprints)}"])
    before = from_record(RunConfig, state.config, where=str(folder / STATE))
    warmup = warmup_steps(before.optim, before.steps) if state.warmup_steps is None else state.warmup_steps
    _check_length(folder, before, config, done=state.step, warmup=warmup)
    return replace(state, warmup_steps=warmup, milestones=sorted({*(state.milestones or ()), *before.milestone_steps}))


def same_settings(state: RunState, folder: Path, config: RunConfig, *, precision: str) -> None:
    """Raises ValueError for a checkpoint of a run with other settings."""
    before = from_record(RunConfig, state.config, where=str(folder / STATE))
    changed = differences({**before.as_dict(), "tokens": config.tokens}, config.as_dict())
    if state.precision != precision:
        changed.append(f"the precision was {state.precision}, is {precision}: see --compute.precision")
    if changed:
        raise _another_run(folder, changed)


def _another_run(folder: Path, changed: list[str]) -> ValueError:
    return ValueError(
        f"{folder} belongs to another run: {'; '.join(changed)}. Resume with the original settings "
        f"(thoughtbubbles train --resume {folder.parent} reads them), or start a new run with --init-from"
    )


def _check_length(folder: Path, before: RunConfig, now: RunConfig, *, done: int, warmup: int) -> None:
    """Raises ValueError for another number of steps if finished ones would have had another learning rate or budget."""
    if before.steps == now.steps:
        return
    changed = f"tokens was {before.tokens}, is {now.tokens}"
    if now.steps < done:
        raise ValueError(
            f"{folder} has {done} steps, but {changed} ({now.steps} steps): give --tokens of at least that"
        )
    rates = (
        learning_rate(now.optim, step, now.steps, warmup) == learning_rate(now.optim, step, before.steps, warmup)
        for step in range(done)
    )
    if not all(rates):
        raise ValueError(
            f"{folder} belongs to another run: {changed}, and with --optim.schedule {now.optim.schedule} its finished "
            "steps would have had other learning rates. The length can change with constant, and with wsd before its "
            f"decay; here, start a new run with --init-from {folder.parent}"
        )
    begin, began = now.steps_before_forks, before.steps_before_forks
    if min(begin, done) != min(began, done):
        raise ValueError(
            f"{folder} belongs to another run: {changed}, and with --forks-from {now.forks_from:g} tokens would fork "
            f"after step {begin}, not after step {began}. Start a new run with --init-from {folder.parent}"
        )


def _in_words(data: list[dict[str, Any]]) -> str:
    return ", ".join(f"{source['share']:.4g} of {source['name']} (index {source['index']:08x})" for source in data)


def describe(run: Path, config: RunConfig, *, done: int, warmup: int) -> None:
    """Writes run.json before step 0; a resumed run appends its settings."""
    path = run / RUN
    now = {"config": config.as_dict(), **provenance(), "warmup_steps": warmup}
    if done and path.exists():
        before = read_object(path, remedy="delete it, and --resume again")
        earlier = before.get("resumed", [])
        if not isinstance(earlier, list):
            raise ValueError(f"{path}: resumed is not a list: delete it, and --resume again")
        now = {**before, "resumed": [*earlier, {"step": done, **now}]}
    write_json(path, now)
