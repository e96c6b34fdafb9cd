"""Start of a run: locks its folder, and initializes the weights or loads those of another model."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from thoughtbubbles.checkpoint import (
    check_dtypes,
    check_manifest,
    find_model,
    load_tokenizer,
    mismatches,
    read_config,
    read_weights,
    shapes,
)
from thoughtbubbles.data.tokenizer import NAMED
from thoughtbubbles.distributed import World
from thoughtbubbles.files import SHIPPED, locked, named, short_name
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.config import RunConfig


def build_model(config: RunConfig, say: Callable[[str], None]) -> Thoughtbubbles:
    """Initializes on the CPU, so that a seed gives the same weights on every device and number of ranks."""
    torch.manual_seed(config.seed)
    model = Thoughtbubbles(config.model)
    if config.compute.precision == "float64":
        model.double().init_weights()  # drawn in float64, they are bit-identical on every kind of CPU
    if config.init_from is not None:
        fresh = initialize(model, config.init_from)
        of_layers = [name for name in fresh if name.endswith(".embedding")]
        missing = (
            f"fork layers {', '.join(name.split('.')[1] for name in of_layers)}" if of_layers else ", ".join(fresh)
        )
        added = f"; it has no {missing}, which are newly initialized" if fresh else ""
        say(f"weights from {config.init_from}{added}")
    return model


def initialize(model: Thoughtbubbles, path: Path) -> list[str]:
    """Loads weights from a saved model. Fork layers missing there stay newly initialized; returns their names."""
    weights, fresh = fitting_weights(model.config, path)
    model.load_state_dict({**model.state_dict(), **weights})
    return fresh


def fitting_weights(config: ModelConfig, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a saved model, checked against its manifest, and the names of fork weights missing there."""
    folder = find_model(path)
    check_manifest(folder)
    weights, expected = read_weights(folder), shapes(config)
    fresh = [name for name in expected if name not in weights and name.startswith("forks.")]
    wrong = mismatches({name: shape for name, shape in expected.items() if name not in fresh}, weights)
    if wrong is not None:
        theirs = read_config(folder)
        raise ValueError(
            f"--init-from {path} does not fit the model: {wrong}. It has {theirs.n_layer} layers of "
            f"width {theirs.width} ({theirs.block} blocks), vocabulary {theirs.vocab_size} and fork layers "
            f"{theirs.fork_layers}"
        )
    check_dtypes(folder, weights)
    return weights, fresh


def check_tokenizer(path: Path, of_data: str) -> None:
    """The weights must be of a model that reads the data's tokens; a model without a tokenizer of ours may."""
    try:
        theirs = load_tokenizer(path)
    except ValueError:  # another project's, or damaged, which the manifest tells
        return
    if theirs is not None and theirs.name != of_data:
        folder = path if str(path) == SHIPPED else find_model(path)
        known = theirs.name if theirs.name in NAMED else folder
        raise ValueError(
            f"--init-from {path} was trained with tokenizer {theirs.name!r}, the data is made with {of_data!r}: "
            f"prepare the data with --tokenizer {known}"
        )


@contextmanager
def own_folder(run: Path, world: World) -> Iterator[None]:
    """Creates the run's folder and locks it against other processes; the first rank does so for all."""
    with ExitStack() as held:
        world.first(lambda: held.enter_context(_made_and_locked(run)))
        _check_shared(run, world)
        yield


@contextmanager
def _made_and_locked(run: Path) -> Iterator[None]:
    with ExitStack() as held:
        with named(f"--out {short_name(run)}", "give another folder"):
            run.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(run, doing="training in"))
        yield


def _check_shared(run: Path, world: World) -> None:
    """Every rank must see the files of the first one, since all of them write a checkpoint together."""
    mark = world.first(lambda: run / f".seen-by-all-{os.getpid()}")
    world.first(lambda: _touch(mark))
    world.wait()
    trouble = None if mark.exists() else f"rank {world.rank} does not see the same {run} as the first rank"
    trouble = world.first_error(trouble)
    if world.is_first:
        mark.unlink()
    if trouble is not None:
        raise ValueError(f"{trouble}: give an --out on a file system shared by all hosts")


def _touch(mark: Path) -> None:
    with named(f"--out {short_name(mark.parent)}", "give a folder that can be written to"):
        mark.touch()
