"""How a run begins: its own folder, and fresh weights or another model's."""

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
    mismatches,
    read_config,
    read_weights,
    shapes,
)
from thoughtbubbles.distributed import World
from thoughtbubbles.files import locked, named, short_name
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.config import RunConfig


def build_model(config: RunConfig, say: Callable[[str], None]) -> Thoughtbubbles:
    """Initial weights on the CPU, where one seed gives the same numbers for every device and number of ranks."""
    torch.manual_seed(config.seed)
    model = Thoughtbubbles(config.model)
    if config.compute.precision == "float64":
        model.double().init_weights()  # drawn in float64 they have the same bits on every kind of CPU too
    if config.init_from is not None:
        fresh = initialize(model, config.init_from)
        layers = sorted({name.split(".")[1] for name in fresh}, key=int)
        added = f"; it has no fork layers {', '.join(layers)}, which start fresh" if fresh else ""
        say(f"weights from {config.init_from}{added}")
    return model


def initialize(model: Thoughtbubbles, path: Path) -> list[str]:
    """Weights from a saved model. Fork layers that it lacks keep their fresh ones; returns their names."""
    weights, fresh = fitting_weights(model.config, path)
    model.load_state_dict({**model.state_dict(), **weights})
    return fresh


def fitting_weights(config: ModelConfig, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a saved model, checked against its manifest, and the names that the new model has besides."""
    folder = find_model(path)
    check_manifest(folder)
    weights, expected = read_weights(folder), shapes(config)
    fresh = [name for name in expected if name not in weights and name.startswith("forks.")]
    wrong = mismatches({name: shape for name, shape in expected.items() if name not in fresh}, weights)
    if wrong is not None:
        theirs = read_config(folder)
        raise ValueError(
            f"--init-from {path} does not fit the model: {wrong}. It has {theirs.n_layer} layers of "
            f"width {theirs.width}, vocabulary {theirs.vocab_size} and fork layers {theirs.fork_layers}"
        )
    check_dtypes(folder, weights)
    return weights, fresh


@contextmanager
def own_folder(run: Path, world: World) -> Iterator[None]:
    """Makes the run's folder, and holds it against other processes, on the first rank and for all."""
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
    """Every rank must see what the first one writes: a checkpoint is the work of all of them."""
    mark = world.first(lambda: run / f".seen-by-all-{os.getpid()}")
    world.first(lambda: _touch(mark))
    world.wait()
    trouble = None if mark.exists() else f"rank {world.rank} does not see {run} as the first rank does"
    trouble = world.first_error(trouble)
    if world.is_first:
        mark.unlink()
    if trouble is not None:
        raise ValueError(f"{trouble}: give an --out on a file system that all hosts share")


def _touch(mark: Path) -> None:
    with named(f"--out {short_name(mark.parent)}", "give a folder that can be written to"):
        mark.touch()
