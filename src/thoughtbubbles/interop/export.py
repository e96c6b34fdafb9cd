"""`thoughtbubbles export`: writes a folder for the Hugging Face Hub, which loads without this package.

config.json, model.safetensors, tokenizer…    as in every model folder, with `auto_map` for the code next to them
generation_config.json                        defaults of `generate`
modeling_thoughtbubbles.py, …                 the code (see remote_code.py)
README.md                                     the model card (see card.py)
manifest.json                                 the files written here, so that the next export deletes nothing else
"""

from pathlib import Path

import torch

from thoughtbubbles.checkpoint import CONFIG, find_model, has_chat_form, ids_of, load, load_tokenizer, write_model
from thoughtbubbles.files import (
    MANIFEST,
    check_folder,
    damage,
    partial_folder,
    publish,
    read_object,
    write_json,
    write_manifest,
)
from thoughtbubbles.interop.card import card
from thoughtbubbles.interop.remote_code import AUTO_MAP, remote_code

CARD, GENERATION = "README.md", "generation_config.json"


def export(checkpoint: Path | None = None, *, out: Path, dtype: torch.dtype | None = None, chat: bool = False) -> Path:
    """Writes the folder `out`; raises ValueError if it contains anything but an earlier export.

    chat  declares that the model was trained on chats; one that says so already keeps it
    """
    out = check_folder(out, option="--out")  # a link's target is replaced, not the link
    check_out(out)
    folder = find_model(checkpoint)
    model, tokenizer = load(folder, dtype=dtype), load_tokenizer(folder)
    if chat and tokenizer is None:
        raise ValueError("--chat: the model has no tokenizer, whose configuration would declare it")
    partial = partial_folder(out)
    chat = chat or has_chat_form(folder)
    write_model(partial, model.config, model.state_dict(), tokenizer=tokenizer, chat=chat)
    write_json(partial / CONFIG, {**read_object(partial / CONFIG), "auto_map": AUTO_MAP})
    ids = {} if tokenizer is None else {name: i for name, i in ids_of(tokenizer).items() if name.endswith("_token_id")}
    write_json(partial / GENERATION, ids)
    for name, text in remote_code().items():
        (partial / name).write_text(text, encoding="utf-8")
    written = card(
        out.name,
        model.config,
        parameters=sum(weight.numel() for weight in model.parameters()),
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        folder=folder.resolve(),
        has_tokenizer=tokenizer is not None,
    )
    (partial / CARD).write_text(written, encoding="utf-8")
    write_manifest(partial)
    publish(partial, out)
    return out


def check_out(out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        return
    wrong: str | None = f"it has no {MANIFEST}"
    if (out / MANIFEST).is_file():
        wrong = damage(out, required=("modeling_thoughtbubbles.py", CARD))
    if wrong is None:
        listed = {MANIFEST, *read_object(out / MANIFEST)}
        unlisted = [
            path.relative_to(out).as_posix()
            for path in sorted(out.rglob("*"))
            if path.is_symlink() or path.relative_to(out).as_posix() not in listed
        ]
        wrong = f"{unlisted[0]} is not part of it" if unlisted else None
    if wrong is not None:
        raise ValueError(
            f"--out {out} is not empty and not just an earlier export ({wrong}): give another folder, or move its "
            "files away"
        )
