"""Where checkpoints of the authors' JAX code lie: their Orbax folder, or a plain file with the same names.

    config.json      {"config": the arguments of the run, …}
    checkpoint/      the training state, written by Orbax: parameters, optimizer, step
    params.npz       may stand in its place (or params.safetensors): the parameters alone, by slash- or dot-joined name

Orbax needs JAX. It is imported only where its folder is to be read; the guide has the few lines that make a plain file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

CONFIG, ORBAX = "config.json", "checkpoint"
PLAIN = ("params.npz", "params.safetensors")
GUIDE = "docs/guides/authors-checkpoints.md"


class Checkpoint(NamedTuple):
    tensors: dict[str, Tensor]  # by their names, slash-joined
    settings: Mapping[str, Any]  # the arguments of their run; empty where no file tells them
    name: str  # for messages


def read_checkpoint(path: Path) -> Checkpoint:
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the folder of a checkpoint, or a file of its arrays")
    if path.is_file():
        return Checkpoint(read_file(path), read_settings(path.parent / CONFIG), str(path))
    settings = read_settings(path / CONFIG)
    for name in PLAIN:
        if (path / name).is_file():
            return Checkpoint(read_file(path / name), settings, str(path))
    for folder in (path / ORBAX, path):
        if (folder / "_METADATA").is_file():
            return Checkpoint(flatten(read_orbax(folder), name=str(folder)), settings, str(path))
    raise ValueError(
        f"{path} is no checkpoint of the authors' code: it has no Orbax folder {ORBAX}/, and no {' or '.join(PLAIN)}"
    )


def read_settings(path: Path) -> Mapping[str, Any]:
    """The arguments of their run, which their trainer keeps under `config`."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): mend it, or take it away and give options") from None
    settings = found.get("config") if isinstance(found, dict) else None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} does not describe a run of the authors' code: it has no settings under 'config'")
    return settings


def read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{path} is no .npz or .safetensors file: give one, or the folder of a checkpoint")
    arrays: Mapping[str, Any]
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        else:
            arrays = load_file(path)
    except (OSError, ValueError, TypeError, EOFError, BadZipFile, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): it is damaged") from None
    return flatten(arrays, name=str(path))


def read_orbax(folder: Path) -> Mapping[str, Any]:
    """The parameters alone: the optimizer's state beside them is twice as large."""
    try:
        import orbax.checkpoint as ocp  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{folder} is an Orbax folder, and Orbax is not installed: pip install orbax-checkpoint, or write "
            f"{PLAIN[0]} beside it where it is installed ({GUIDE} has the lines)"
        ) from None
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        kept = reader.metadata(folder.resolve()).item_metadata.tree
        if "params" not in kept:
            raise ValueError(
                f"{folder} has no params, but {', '.join(sorted(kept))}: it is no training state of theirs"
            )
        wanted = {"params": _map(kept["params"], lambda leaf: np.empty(leaf.shape, leaf.dtype))}
        how = _map(wanted, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
        found: Mapping[str, Any] = reader.restore(folder.resolve(), args=arguments)
        return found


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    return {key: _map(part, function) for key, part in tree.items()} if isinstance(tree, Mapping) else function(tree)


def flatten(tree: Mapping[str, Any], *, name: str) -> dict[str, Tensor]:
    """Arrays by slash-joined name. Dots serve as slashes; `params` in front and a box's `value` behind are dropped."""
    leaves = {key.replace(".", "/"): leaf for key, leaf in _leaves(tree)}
    if any(key.startswith("params/") for key in leaves):  # a whole training state: the rest is the optimizer's
        leaves = {key.removeprefix("params/"): leaf for key, leaf in leaves.items() if key.startswith("params/")}
    tensors: dict[str, Tensor] = {}
    for key, leaf in leaves.items():
        key = key.removesuffix("/value")
        if key in tensors:
            raise ValueError(f"{name} has {key} twice, with and without a box: keep one")
        tensors[key] = _tensor(leaf, f"{name}: {key}")
    return tensors


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, part in tree.items():
        if isinstance(part, Mapping):
            yield from ((f"{key}/{below}", leaf) for below, leaf in _leaves(part))
        else:
            yield str(key), part


def _tensor(leaf: Any, what: str) -> Tensor:
    if not isinstance(leaf, Tensor):
        array = np.asarray(leaf)
        if array.dtype.name == "bfloat16":  # which NumPy knows by name only
            array = array.astype(np.float32)
        if array.dtype.kind != "f":
            raise ValueError(f"{what} has dtype {array.dtype}: a parameter has floating-point numbers")
        leaf = torch.tensor(array)
    if not leaf.is_floating_point():
        raise ValueError(f"{what} has dtype {leaf.dtype}: a parameter has floating-point numbers")
    return leaf
