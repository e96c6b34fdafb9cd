"""Reads checkpoints of the authors' JAX code: their Orbax folder, or a plain file with the same names.

    config.json      {"config": the arguments of the run, …}
    checkpoint/      the training state, written by Orbax: parameters, optimizer, step
    params.npz       or params.safetensors, in its place: only the parameters, by slash- or dot-joined name

Orbax needs JAX. It is imported only to read its folder; the guide shows the few lines that write a plain file.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from thoughtbubbles.checkpoint import DTYPES
from thoughtbubbles.files import named, read_object, short_name

CONFIG, ORBAX = "config.json", "checkpoint"
PLAIN = ("params.npz", "params.safetensors")
GUIDE = "docs/guides/authors-checkpoints.md"
GIVE = "give the folder of a checkpoint, or a file of its arrays"
MOST_PACKED = 100  # the largest compression ratio that a file may claim; weights hardly compress
PIECE = 1 << 20  # bytes of an array that are decompressed at a time
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Checkpoint(NamedTuple):
    tensors: dict[str, Tensor]  # by their names, slash-joined
    settings: Mapping[str, Any]  # the arguments of their run; empty if there is no file
    name: str  # for messages


def read_checkpoint(path: Path) -> Checkpoint:
    with named(path, GIVE):
        if not path.exists():
            raise ValueError(f"{short_name(path)} does not exist: {GIVE}")
        if path.is_file():
            return Checkpoint(read_file(path), read_settings(path.parent / CONFIG), str(path))
        settings = read_settings(path / CONFIG)
        for name in PLAIN:
            if (path / name).is_file():
                return Checkpoint(read_file(path / name), settings, str(path / name))
        for folder in (path / ORBAX, path):
            if (folder / "_METADATA").is_file():
                return Checkpoint(flatten(read_orbax(folder), name=str(folder)), settings, str(folder))
    raise ValueError(
        f"{path} is not a checkpoint of the authors' code: it has no Orbax folder {ORBAX}/, and no {' or '.join(PLAIN)}"
    )


def read_settings(path: Path) -> Mapping[str, Any]:
    """The arguments of their run, which their trainer stores under `config`."""
    if not path.exists():
        return {}
    settings = read_object(path, remedy="fix it, or remove it and give options").get("config")
    if not isinstance(settings, dict):
        raise ValueError(f"{path} does not describe a run of the authors' code: it has no settings under 'config'")
    return settings


def read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{path} is not an .npz or .safetensors file: give one, or the folder of a checkpoint")
    try:
        arrays = read_npz(path) if path.suffix == ".npz" else read_safetensors(path)
    except Exception as error:  # of very many kinds, if a compressed file is damaged
        told = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} cannot be read ({told or type(error).__name__}): it is damaged") from None
    return flatten(arrays, name=str(path))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it has keys only)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Like np.load, but nothing is decompressed or allocated just because a header claims it."""
    with ZipFile(path) as archive:
        members = archive.infolist()
        names = [member.filename.removesuffix(".npy") for member in members]
        if len({*names}) < len(names):
            raise ValueError("two of its arrays have the same name")
        claimed, size = sum(member.file_size for member in members), path.stat().st_size
        if claimed > MOST_PACKED * size:
            raise ValueError(f"its arrays claim {claimed:,} bytes, and it has {size:,}")
        return {name: _read_member(archive, member) for name, member in zip(names, members, strict=True)}


def _read_member(archive: ZipFile, member: ZipInfo) -> np.ndarray:
    data = _unpacked(archive, member)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers written by Python 2
        shape, _, dtype = HEADERS[np.lib.format.read_magic(data)](data)
        left = data.getbuffer().nbytes - data.tell()
        if dtype.hasobject or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != left:
            raise ValueError(f"{member.filename} claims shape {shape} of {dtype}, and has {left:,} bytes")
        data.seek(0)
        array: np.ndarray = np.lib.format.read_array(data, allow_pickle=False)
        return array


def _unpacked(archive: ZipFile, member: ZipInfo) -> BytesIO:
    """Decompresses at most the claimed size: a full read would decompress everything first and truncate then.

    A partial read of a deflated member decompresses only that part; with other methods it decompresses more. With the
    last piece, zipfile verifies the checksum.
    """
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ValueError(
            f"{member.filename} has compression method {member.compress_type}: use np.savez or np.savez_compressed"
        )
    data = BytesIO()
    with archive.open(member) as file:
        while piece := file.read(min(PIECE, member.file_size - data.tell())):
            data.write(piece)
    data.seek(0)
    return data


def read_orbax(folder: Path) -> Mapping[str, Any]:
    """Only the parameters: the optimizer's state next to them is twice as large."""
    try:
        import orbax.checkpoint as ocp  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{folder} is an Orbax folder, and Orbax is not installed: pip install orbax-checkpoint, or write "
            f"{PLAIN[0]} next to it where it is installed (see {GUIDE})"
        ) from None
    try:
        return _restore(ocp, folder)
    except Exception as error:  # of very many kinds, if the folder is damaged
        told = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder} cannot be read ({told or type(error).__name__}): it is damaged") from None


def _restore(ocp: Any, folder: Path) -> Mapping[str, Any]:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        kept = reader.metadata(folder.resolve()).item_metadata.tree
        if "params" not in kept:
            raise ValueError(f"it has no params, but {', '.join(sorted(kept))}")
        wanted = {"params": _map(kept["params"], lambda leaf: np.empty(leaf.shape, leaf.dtype))}
        how = _map(wanted, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
        found: Mapping[str, Any] = reader.restore(folder.resolve(), args=arguments)
        return found


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    return {key: _map(part, function) for key, part in tree.items()} if isinstance(tree, Mapping) else function(tree)


def flatten(tree: Mapping[str, Any], *, name: str) -> dict[str, Tensor]:
    """Arrays by slash-joined name. Dots count as slashes; a leading `params` and a box's final `value` are dropped."""
    leaves = {key.replace(".", "/"): leaf for key, leaf in _leaves(tree)}
    if any(key.startswith("params/") for key in leaves):  # a full training state: the rest is the optimizer's
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
        try:
            array = np.asarray(leaf)
        except ValueError as error:
            raise ValueError(f"{what} is not an array ({error})") from None
        if array.dtype.name == "bfloat16":  # which NumPy knows by name only
            array = array.astype(np.float32)
        if array.dtype.kind != "f" or array.dtype.itemsize > 8:
            raise ValueError(f"{what} has dtype {array.dtype}: a parameter has floating-point numbers")
        leaf = torch.tensor(array.astype(array.dtype.newbyteorder("=")))
    if leaf.dtype not in DTYPES:
        raise ValueError(f"{what} has dtype {leaf.dtype}: a parameter has floating-point numbers of 16 bits or more")
    return leaf
