"""Checkpoints of a run: the model folder, and next to it what training needs to resume.

    RUN/step-00001000/
      model/          config.json, model.safetensors, the tokenizer           (see checkpoint.py)
      optimizer/      the optimizer's tensors, one safetensors file per rank    (torch's distributed checkpoint)
      state.json      the step, which also defines the position in the data and all random numbers
      manifest.json   size and checksum of every file

A checkpoint is copied to host memory while training waits, written in the background, and renamed when it is complete.
If the disk is full, only that checkpoint is lost. It can be loaded by any number of ranks.
"""

import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from thoughtbubbles.checkpoint import STATE, checkpoints, write_model
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.files import (
    MANIFEST,
    damage,
    partial_folder,
    publish,
    read_object,
    short_name,
    write_json,
    write_manifest,
)
from thoughtbubbles.model.config import ModelConfig, is_number, is_whole
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.fields import LARGEST
from thoughtbubbles.train.optim import Optimizer
from thoughtbubbles.train.parallel import whole

PARTS = ("model", "optimizer")


class SaveError(Exception):
    """A checkpoint could not be written; earlier ones are unchanged."""


class Staged(NamedTuple):
    """A copy of everything in a checkpoint, in host memory: training goes on while it is written."""

    config: ModelConfig  # `model.config` may be that of a plain model for a step
    weights: dict[str, Tensor]  # full tensors, on the first rank only
    optimizer: dict[str, Tensor]  # this rank's shards
    facts: dict[str, Any]


class Checkpoints:
    def __init__(self, run: Path, world: World, *, keep: int, milestones: set[int], tokenizer: Tokenizer | None):
        self.run, self.world, self.keep, self.milestones, self.tokenizer = run, world, keep, milestones, tokenizer
        self._pending: Background | None = None

    def save(self, model: Thoughtbubbles, optimizer: Optimizer, facts: dict[str, Any]) -> None:
        """Starts to write the checkpoint of `facts["step"]`; the one before it must be finished."""
        assert self._pending is None, "finish() comes before the next save()"
        staged = _stage(model, optimizer, facts, self.world)
        self._pending = Background(lambda: self._write(staged))

    @property
    def is_written(self) -> bool:
        """Whether a started save has ended, successfully or not."""
        return self._pending is not None and not self._pending.thread.is_alive()

    def wait(self) -> None:
        """Waits for a started save, whose result is still to be asked for."""
        if self._pending is not None:
            self._pending.thread.join()

    def finish(self) -> None:
        """Waits for a started save; raises SaveError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    def _write(self, staged: Staged) -> None:
        folder = self.run / folder_name(staged.facts["step"])
        partial = folder.with_name(f".{folder.name}.partial")

        def begin() -> None:
            partial_folder(folder)
            write_model(partial / "model", staged.config, staged.weights, tokenizer=self.tokenizer)
            write_json(partial / STATE, staged.facts)
            (partial / "optimizer").mkdir()

        def end() -> None:
            write_manifest(partial)
            publish(partial, folder)
            self._prune(staged.facts["step"])

        def give_up() -> None:
            shutil.rmtree(partial, ignore_errors=True)

        self._together(folder, begin if self.world.is_first else _nothing, give_up)
        self._together(folder, lambda: _save_tensors(partial / "optimizer", staged.optimizer, self.world), give_up)
        self._together(folder, end if self.world.is_first else _nothing, give_up)

    def _together(self, folder: Path, work: Callable[[], None], give_up: Callable[[], None]) -> None:
        """All ranks succeed, or all of them give up."""
        trouble: str | None = None
        try:
            work()
        except (Exception, CheckpointException) as error:  # a failed save must not end the training
            trouble = _reason(error)
        trouble = self.world.first_error(trouble)
        if trouble is not None:
            if self.world.is_first:
                give_up()
            raise SaveError(f"{folder} could not be written: {trouble}")

    def _prune(self, step: int) -> None:
        """Keeps the newest ones up to this step, which has just been written. One that cannot be removed stays."""
        known = [folder for folder in checkpoints(self.run) if step_of(folder) <= step]
        for folder in [folder for folder in known if step_of(folder) not in self.milestones][: -self.keep]:
            # Renamed first, so that a kill in the middle does not leave half a checkpoint under its name.
            gone = folder.with_name(f".{folder.name}.old")
            with suppress(OSError):
                folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


class Background:
    """Work in a daemon thread: a second Ctrl-C, or a rank that fails, ends the process immediately."""

    def __init__(self, work: Callable[[], None]):
        self.trouble: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.trouble = error

    def finish(self) -> None:
        """Waits for the thread, and raises the exception that it raised."""
        self.thread.join()
        if self.trouble is not None:
            raise self.trouble


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of state.json: everything a run needs to resume, except tensors."""

    step: int
    updates: int
    skipped_in_a_row: int
    precision: str
    data: list[dict[str, Any]]  # of each source: name, share, and the checksum of its index
    config: dict[str, Any]
    warmup_steps: int | None = None  # None in old checkpoints, from before runs could be extended: use the config's
    ranks: int | None = None  # each has written one file of the optimizer's tensors; None in old checkpoints
    milestones: list[int] | None = None  # steps whose checkpoints are never deleted, even if the run's length changes


def newest_good(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint; damaged ones are reported."""
    for folder in reversed(checkpoints(run)):
        wrong = checkpoint_damage(folder)
        if wrong is None:
            return folder
        say(f"{folder} is damaged and is skipped: {wrong}")
    return None


def checkpoint_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if it is undamaged.

    Torch's reader loads every safetensors file in a folder, so each of them must be in the manifest.
    """
    read = {path.relative_to(folder).as_posix() for part in PARTS for path in (folder / part).glob("*.safetensors")}
    wrong = damage(folder, required=(STATE, "model/config.json", "model/model.safetensors", *sorted(read)))
    if wrong is not None:
        return wrong
    try:
        state = read_state(folder)
    except ValueError as error:
        return str(error)
    files = [name for name in read_object(folder / MANIFEST) if name.startswith("optimizer/")]
    if len(files) != (state.ranks or len(files)) or not files:
        return f"{MANIFEST} lists {len(files)} optimizer files, expected {state.ranks or 'one or more'}"
    return None


def set_aside(run: Path, step: int) -> None:
    """Renames the checkpoints after the one that is resumed: they are damaged, and kept for inspection only."""
    for folder in checkpoints(run):
        if step_of(folder) > step:
            aside = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)


def read_state(folder: Path) -> RunState:
    path = folder / STATE
    found = read_object(path, remedy="use an earlier checkpoint")
    known: dict[str, Any] = {name: found.get(name) for name in RunState.__dataclass_fields__}
    wrong = [name for name in ("step", "updates", "skipped_in_a_row") if not _is_count(known[name])]
    wrong += [name for name in ("warmup_steps", "ranks") if known[name] is not None and not _is_count(known[name])]
    wrong += [name for name, kind in (("precision", str), ("config", dict)) if not isinstance(known[name], kind)]
    if not isinstance(known["data"], list) or not all(_is_source(source) for source in known["data"]):
        wrong.append("data")
    kept = known["milestones"]
    if kept is not None and not (isinstance(kept, list) and all(_is_count(step) for step in kept)):
        wrong.append("milestones")
    if not wrong and known["step"] != step_of(folder):
        wrong.append("step")
    if wrong:
        raise ValueError(f"{path} is damaged ({wrong[0]} is missing or wrong): use an earlier checkpoint")
    return RunState(**known)


def _is_count(value: object) -> bool:
    return is_whole(value) and 0 <= value <= LARGEST  # type: ignore[operator]


def _is_source(source: object) -> bool:
    return (
        isinstance(source, dict)
        and isinstance(source.get("name"), str)
        and is_number(source.get("share"))
        and _is_count(source.get("index"))
    )


def restore(folder: Path, model: Thoughtbubbles, optimizer: Optimizer, world: World) -> None:
    """Loads weights and optimizer state, resharded for this number of ranks."""
    tensors = {name: torch.empty_like(tensor) for name, tensor in optimizer.tensors().items()}
    try:
        _load_tensors(folder / "model", model.state_dict(), world)
        _load_tensors(folder / "optimizer", tensors, world)
    except (Exception, CheckpointException) as error:  # torch's reader can raise anything
        raise ValueError(f"{folder} cannot be restored ({_reason(error)}): delete it, and --resume again") from None
    optimizer.restore(tensors, read_state(folder).updates)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _stage(model: Thoughtbubbles, optimizer: Optimizer, facts: dict[str, Any], world: World) -> Staged:
    weights = {}
    for name, tensor in model.state_dict().items():
        full = whole(tensor.detach())
        if world.is_first:
            weights[name] = full.to("cpu", copy=True)
    own = {name: _host_copy(tensor) for name, tensor in optimizer.tensors().items()}
    return Staged(model.config, weights, own, facts)


def _host_copy(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _be_quiet() -> None:
    """Hides the warning of distributed checkpoint about a single process, which is intended here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _save_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    _be_quiet()
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save_distributed(
        dict(tensors), storage_writer=writer, process_group=world.cpu_group, no_dist=not world.is_distributed
    )


def _load_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    _be_quiet()
    reader = HuggingFaceStorageReader(str(folder))
    load_distributed(
        dict(tensors), storage_reader=reader, process_group=world.cpu_group, no_dist=not world.is_distributed
    )


def _reason(error: BaseException) -> str:
    """The error in one line; distributed checkpoint wraps the errors of all ranks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    text = short_name(" ".join(str(error).split()) or type(error).__name__)
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


def _nothing() -> None:
    pass


def clean(run: Path) -> None:
    """Removes checkpoints that a killed run left half-written or half-deleted."""
    for leftover in [*run.glob(".step-*.partial"), *run.glob(".step-*.old")]:
        shutil.rmtree(leftover, ignore_errors=True)
