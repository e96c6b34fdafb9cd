"""How a run begins: with fresh weights, with another model's, or where a checkpoint of its own left off."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from thoughtbubbles import __version__
from thoughtbubbles.checkpoint import checkpoints, find_model, read_config, read_weights
from thoughtbubbles.files import locked, write_json
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.config import RunConfig, differences
from thoughtbubbles.train.parallel import World
from thoughtbubbles.train.state import newest_good, read_state


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
    folder = find_model(path)
    weights = read_weights(folder)
    own = model.state_dict()
    fresh = [name for name in own if name not in weights]
    wrong = [f"{name} is missing" for name in fresh if not name.startswith("forks.")]
    wrong += [f"{name} has no place in this model" for name in weights if name not in own]
    wrong += [
        f"{name} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
        for name, tensor in weights.items()
        if name in own and tensor.shape != own[name].shape
    ]
    if wrong:
        theirs = read_config(folder)
        raise ValueError(
            f"--init-from {path} does not fit the model: {'; '.join(wrong[:3])}. It has {theirs.n_layer} layers of "
            f"width {theirs.width}, vocabulary {theirs.vocab_size} and fork layers {theirs.fork_layers}"
        )
    model.load_state_dict({**own, **weights})
    return fresh


@contextmanager
def own_folder(run: Path, world: World) -> Iterator[None]:
    """Makes the run's folder, and holds it against other processes, on the first rank and for all."""
    with ExitStack() as held:
        world.first(lambda: held.enter_context(_made_and_locked(run)))
        _check_shared(run, world)
        yield


@contextmanager
def _made_and_locked(run: Path) -> Iterator[None]:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {run}: it cannot be made ({error.strerror}); give another folder") from None
    with locked(run, doing="training in"):
        yield


def _check_shared(run: Path, world: World) -> None:
    """Every rank must see what the first one writes: a checkpoint is the work of all of them."""
    mark = world.first(lambda: run / f".seen-by-all-{os.getpid()}")
    if world.is_first:
        mark.touch()
    world.wait()
    trouble = None if mark.exists() else f"rank {world.rank} does not see {run} as the first rank does"
    trouble = world.agree(trouble)
    if world.is_first:
        mark.unlink()
    if trouble is not None:
        raise ValueError(f"{trouble}: give an --out on a file system that all hosts share")


def find_checkpoint(run: Path, *, resume: bool, say: Callable[[str], None]) -> Path | None:
    """What to resume from; None starts at step 0."""
    if not resume:
        if checkpoints(run):
            raise ValueError(f"{run} has checkpoints of a run: pass --resume to go on with it, or choose another --out")
        return None
    found = newest_good(run, say)
    if found is None and checkpoints(run):
        raise ValueError(f"no checkpoint in {run} is whole: begin again with another --out")
    if found is None:
        say(f"{run} has no checkpoint yet: starting at step 0")
    return found


def same_run(folder: Path, config: RunConfig, *, precision: str, fingerprints: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a checkpoint, if it belongs to this run."""
    state = read_state(folder)
    changed = differences(state["config"], json.loads(json.dumps(config.as_dict())))
    if state["precision"] != precision:
        changed.append(f"the precision was {state['precision']}, is {precision}: see --compute.precision")
    if state["data"] != fingerprints:
        changed.append(f"the data was {_in_words(state['data'])}, is {_in_words(fingerprints)}")
    if changed:
        raise ValueError(
            f"{folder} belongs to another run: {'; '.join(changed)}. Resume with the settings of before, or begin "
            "a new run with --init-from"
        )
    return state


def _in_words(data: list[dict[str, Any]]) -> str:
    return ", ".join(f"{source['share']:.4g} of {source['name']} (index {source['index']:08x})" for source in data)


def describe(run: Path, config: RunConfig, *, done: int) -> None:
    """Writes run.json before step 0; a resumed run adds what it was resumed with."""
    path = run / "run.json"
    now = _description(config)
    if done and path.exists():
        before = json.loads(path.read_text())
        now = {**before, "resumed": [*before.get("resumed", []), {"step": done, **now}]}
    write_json(path, now)


def _description(config: RunConfig) -> dict[str, Any]:
    return {
        "config": config.as_dict(),
        "command": sys.argv,
        "versions": {"thoughtbubbles": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.platform(),
        "commit": os.environ.get("THOUGHTBUBBLES_COMMIT"),
    }
