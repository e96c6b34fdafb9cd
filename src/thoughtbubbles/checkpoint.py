"""Model folders, the on-disk format of a model, which Hugging Face's tools can also open.

    config.json           every field of ModelConfig, with `model_type` and `architectures`
    model.safetensors     the weights by name; the output head is the embedding, so it is stored once. Hugging Face may
                          have split it into several files, which are listed in an index
    tokenizer.json, …     the tokenizer, if the model has one

Nothing is ever unpickled. Folders and files get their names only when they are complete.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thoughtbubbles import __version__
from thoughtbubbles.data.records import CHAT_TEMPLATE
from thoughtbubbles.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from thoughtbubbles.data.tokenizer import Tokenizer, read_tokenizer, save_tokenizer
from thoughtbubbles.files import (
    MANIFEST,
    SHIPPED,
    damage,
    named,
    partial_folder,
    publish,
    read_object,
    reason,
    shipped_model,
    short_name,
    write_json,
)
from thoughtbubbles.model.config import ModelConfig, without_removed
from thoughtbubbles.model.transformer import Thoughtbubbles

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
STATE = "state.json"  # of a checkpoint, next to its model (train/state.py)
NUMBERED = re.compile(r"step-[0-9]{1,18}")
READ = (".json", ".safetensors")  # files of these kinds are read
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WANTED = f"give a model folder, a checkpoint of a run, a run's folder, or {SHIPPED} (the model in the package)"
DAMAGED = "it is damaged, use another checkpoint"


def save_model(
    folder: str | Path,
    model: Thoughtbubbles,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    chat: bool = False,
) -> Path:
    """Writes a model folder; `dtype` converts the weights, e.g. to torch.bfloat16; `chat` declares that the model was
    trained on chats. An existing folder is replaced, except for the evaluations in it, which record the weights that
    they are for."""
    weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    if dtype is not None:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
    folder = Path(folder)
    partial = partial_folder(folder)
    write_model(partial, model.config, weights, tokenizer=tokenizer, chat=chat)
    if (folder / "eval").is_dir():  # see evals/results.py; copied, so that a failed save loses nothing
        with named(folder / "eval", "move it away"):
            shutil.copytree(folder / "eval", partial / "eval")
    publish(partial, folder)
    return folder


def write_model(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    tokenizer: Tokenizer | None,
    chat: bool = False,
) -> None:
    """Writes the files of a model folder, into a folder that does not have its final name yet."""
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
        template = CHAT_TEMPLATE if chat else None
        save_tokenizer(tokenizer, folder, max_length=config.block_size, chat_template=template)


def ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Config fields for Hugging Face's `generate`: end-of-text and padding ids, and the number of real ids."""
    end = tokenizer.end_of_text
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "n_ids": tokenizer.size}


def load(
    folder: str | Path | None = None, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Thoughtbubbles:
    """Loads a model folder, a checkpoint (its model) or a run (the model of its newest checkpoint); by default the
    model in the package. It is in evaluation mode: call `.train()` before training it.

    dtype  of the weights; by default the one on disk, which is bfloat16 for the model in the package
    """
    folder = find_model(folder)
    check_manifest(folder)
    config = read_config(folder)
    weights = read_weights(folder)
    check_weights(folder, weights, config)
    with torch.device("meta"):
        model = Thoughtbubbles(config)
    kept = dtype or weights["embedding.weight"].dtype
    model.load_state_dict({name: weight.to(device, kept) for name, weight in weights.items()}, assign=True)
    return model.requires_grad_(True).eval()


def load_tokenizer(folder: str | Path | None = None) -> Tokenizer | None:
    """The tokenizer of a model folder, if it has one; by default of the model in the package."""
    folder = find_model(folder)
    return read_tokenizer(folder) if (folder / "tokenizer.json").exists() else None


def has_chat_form(folder: str | Path | None = None) -> bool:
    """Whether the model declares that it was trained on chats in our format (data/records.py)."""
    path = find_model(folder) / TOKENIZER_CONFIG
    return path.is_file() and read_object(path, remedy=DAMAGED).get("chat_template") == CHAT_TEMPLATE


def find_model(path: str | Path | None = None) -> Path:
    """The model folder in a path. None, or its name unless there is a folder of that name: the one in the package."""
    if path is None or (str(path) == SHIPPED and not Path(path).exists()):
        return shipped_model()
    path = Path(path)
    with named(path, WANTED):
        newest = [step / "model" for step in checkpoints(path)[-1:]]
        for folder in (path, path / "model", *newest):
            if (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
                return folder
        if newest:  # do not silently use an older checkpoint: it is another model
            raise ValueError(
                f"{short_name(newest[0].parent)}, the newest checkpoint of the run, has no complete model: delete it, "
                "or give the checkpoint that you want"
            )
        missing = f"has no {CONFIG} with {WEIGHTS}, and no checkpoint with them"
        raise ValueError(f"{short_name(path)} {missing if path.exists() else 'does not exist'}: {WANTED}")


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return sorted(
        (folder for folder in run.glob("step-*") if folder.is_dir() and NUMBERED.fullmatch(folder.name)),
        key=lambda folder: int(folder.name[5:]),
    )


def check_manifest(folder: Path) -> None:
    """Checks the files of a model folder against the manifest next to it, if there is one."""
    folder = folder.resolve()  # the path may not contain its name, as in `.`
    for home, prefix in ((folder, ""), (folder.parent, f"{folder.name}/")):
        is_checkpoint = bool(NUMBERED.fullmatch(home.name)) or (home / STATE).is_file()  # or a renamed copy of one
        if not (home / MANIFEST).is_file() or (prefix and not is_checkpoint):
            continue
        read = {prefix + path.name for path in folder.iterdir() if path.name.endswith(READ) and path.name != MANIFEST}
        if (wrong := damage(home, required=read, only=read | _listed(home, prefix))) is not None:
            raise ValueError(
                f"{home} is damaged ({wrong}): use another checkpoint; if you changed it yourself, delete {MANIFEST}"
            )


def drop_manifest(folder: Path) -> None:
    """Removes the manifest of a model that was overwritten by another one."""
    if (folder / MANIFEST).is_file() and CONFIG in read_object(folder / MANIFEST):
        (folder / MANIFEST).unlink()


def _listed(home: Path, prefix: str) -> set[str]:
    """The files that the manifest lists, whether they exist or not."""
    names = read_object(home / MANIFEST, remedy=DAMAGED)
    return {
        name for name in names if name.startswith(prefix) and "/" not in name[len(prefix) :] and name.endswith(READ)
    }


def read_config(folder: Path) -> ModelConfig:
    path = folder / CONFIG
    found = read_object(path, remedy=DAMAGED)
    if found.get("model_type") != "thoughtbubbles":
        kind = short_name(str(found.get("model_type")))
        raise ValueError(f"{path} describes a model of type {kind!r}: only 'thoughtbubbles' is supported")
    known = {field.name for field in fields(ModelConfig)}
    described = {name: value for name, value in found.items() if name in known}
    if isinstance(layers := described.get("fork_layers"), list):  # JSON has lists only
        described["fork_layers"] = tuple(layers)
    try:
        without_removed(found)
        return ModelConfig(**described)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a model ({error}): {DAMAGED}") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it has keys only)
                    if name in weights:
                        raise ValueError(f"{path} has {name}, which is also in another file: {DAMAGED}")
                    weights[name] = file.get_tensor(name)
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({reason(error)}): {DAMAGED}") from None
        except (SafetensorError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({short_name(' '.join(str(error).split()))}): {DAMAGED}") from None
    return weights


def weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    places = read_object(index, remedy=DAMAGED).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} has no weight_map: {DAMAGED}")
    for name in places.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ValueError(f"{index} lists {short_name(str(name))!r}, which is not a file of this folder: {DAMAGED}")
    files = [folder / name for name in sorted(set(places.values()))]
    for path in files:
        with named(path, DAMAGED):
            if not path.is_file():  # opening a pipe would block
                raise ValueError(f"{path} is missing, though {INDEX} lists it: {DAMAGED}")
    return files


def check_weights(folder: Path, weights: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Called before the model is built, since a config with a million layers would take forever."""
    layers = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    wrong = f"it has {len(layers)} blocks, not {config.n_layer}" if len(layers) != config.n_layer else None
    if wrong is None:
        wrong = mismatches(shapes(config), weights)
    if wrong is not None:
        raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {wrong}")
    check_dtypes(folder, weights)


def check_dtypes(folder: Path, weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        if weight.dtype not in DTYPES:
            raise ValueError(f"{folder / WEIGHTS}: {name} has the unsupported dtype {weight.dtype}: {DAMAGED}")


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Thoughtbubbles(config).state_dict().items()}


def mismatches(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> str | None:
    """Missing and unknown weights and other shapes, in words; None if everything fits."""
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
