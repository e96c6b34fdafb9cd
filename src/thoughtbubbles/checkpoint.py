"""The one on-disk form of a model: a folder that any user opens, Hugging Face's tools included.

    config.json           every field of ModelConfig, with `model_type` and `architectures`
    model.safetensors     the weights by name; the output table is the embedding, so it is stored once. Hugging Face
                          may have split it into several files, which an index beside them lists
    tokenizer.json, …     the tokenizer beside them, where the model has one

Nothing here is ever unpickled. Folders and files appear under their names only when they are whole.
"""

import json
import os
import shutil
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thoughtbubbles import __version__
from thoughtbubbles.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

CONFIG, WEIGHTS, MANIFEST = "config.json", "model.safetensors", "manifest.json"
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 1 << 24


def save_model(
    folder: str | Path,
    model: Thoughtbubbles,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Writes a model folder; `dtype` converts the weights, e.g. to torch.bfloat16. An existing folder is replaced."""
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    if dtype is not None:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
    folder = Path(folder)
    partial = partial_folder(folder)
    write_model(partial, model.config, weights, tokenizer=tokenizer)
    publish(partial, folder)
    return folder


def write_model(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], *, tokenizer: Tokenizer | None
) -> None:
    """The files of a model folder, into a folder that is not yet under its final name."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(iter(weights.values())).dtype
    described = {
        "model_type": "thoughtbubbles",
        "architectures": ["ThoughtbubblesForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": True,
        "thoughtbubbles_version": __version__,
        **({} if tokenizer is None else ids_of(tokenizer)),
        **asdict(config),
    }
    write_json(folder / CONFIG, described)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    """What Hugging Face's `generate` must know: where a text ends, what fills a row, which ids mean something."""
    end = tokenizer.end_of_text
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "n_ids": tokenizer.size}


def load_model(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Thoughtbubbles:
    """Opens a model folder, a checkpoint (its model) or a whole run (its newest checkpoint's model)."""
    folder = find_model(folder)
    config = read_config(folder)
    weights = read_weights(folder)
    with torch.device("meta"):
        model = Thoughtbubbles(config)
    check_weights(folder, weights, model)
    kept = dtype or weights["embedding.weight"].dtype
    model.load_state_dict({name: weight.to(device, kept) for name, weight in weights.items()}, assign=True)
    return model.requires_grad_(True)


def load_folder_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a model folder, if it has one."""
    folder = find_model(folder)
    return load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None


def find_model(path: str | Path) -> Path:
    path = Path(path)
    choices = [path, path / "model", *(step / "model" for step in reversed(checkpoints(path)))]
    for folder in choices:
        if (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
            return folder
    what = "does not exist" if not path.exists() else f"has no {CONFIG} with {WEIGHTS}, and no checkpoint that has them"
    raise ValueError(f"{path} {what}: give a model folder, a checkpoint of a run, or a run's folder")


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return sorted(folder for folder in run.glob("step-*") if folder.is_dir() and folder.name[5:].isdecimal())


def read_config(folder: Path) -> ModelConfig:
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): the folder is damaged, take another checkpoint") from None
    if not isinstance(found, dict) or found.get("model_type") != "thoughtbubbles":
        kind = found.get("model_type") if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path} describes a model of type {kind!r}: only 'thoughtbubbles' can be opened here")
    known = {field.name for field in fields(ModelConfig)}
    described = {name: value for name, value in found.items() if name in known}
    try:
        described["fork_layers"] = tuple(described.get("fork_layers", ()))  # JSON has lists only
        return ModelConfig(**described)
    except TypeError as error:
        raise ValueError(f"{path} is no model's description ({error}): the folder is damaged") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it has keys only)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}): it is damaged, take another checkpoint") from None
    return weights


def weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    try:
        places = json.loads((folder / INDEX).read_text())["weight_map"]
        return [folder / Path(name).name for name in sorted(set(places.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / INDEX} cannot be read ({error!r}): it is damaged, take another checkpoint"
        ) from None


def check_weights(folder: Path, weights: Mapping[str, Tensor], model: Thoughtbubbles) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if wrong := misfits(expected, weights):
        raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {wrong}")


def misfits(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> str | None:
    """What is missing, unknown or of another shape, in words; None if nothing is."""
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name} is not part of this model" for name in found.keys() - expected.keys()]
    wrong += [
        f"{name} has shape {found[name]}, not {expected[name]}"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    if not wrong:
        return None
    return "; ".join(sorted(wrong)[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")


# Folders that are whole or not there: everything is written beside, flushed to the disk, and renamed.


def partial_folder(folder: Path) -> Path:
    """An empty folder beside `folder` to write into; what an earlier attempt left there is removed."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, folder: Path) -> None:
    for path in [*partial.rglob("*"), partial]:
        flush(path)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(folder)
    flush(folder.parent)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, as everything here."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_manifest(folder: Path) -> None:
    """Size and CRC-32 of every file, so that damage is found before it is used."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    write_json(
        folder / MANIFEST,
        {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": crc32(path)} for path in paths},
    )


def damage(folder: Path, *, required: Collection[str] = ()) -> str | None:
    """What is wrong with a folder that has a manifest, in words; None if nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        unlisted = [name for name in required if name not in manifest]
        if unlisted:
            return f"{MANIFEST} does not list {unlisted[0]}"
        for name, expected in manifest.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if crc32(path) != expected["crc32"]:
                return f"{name} has been altered (its checksum differs)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
