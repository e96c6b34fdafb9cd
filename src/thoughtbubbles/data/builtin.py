"""Prepared folders that the package writes itself: synthetic text, Python's documentation, made-up tasks. All in bytes.

Tokens are bytes: ids 0–255, and 256 for end-of-text.
"""

import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from thoughtbubbles.data.shards import Index, Kind, ShardWriter, open_dataset, read_index, write_index
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.files import named

BYTES = tokenizer("bytes")
SHARD_TOKENS = 16_000_000
# Split (`train` or `val`) and tokens of a document; of an example also which tokens are targets.
Item = tuple[str, np.ndarray] | tuple[str, np.ndarray, np.ndarray]


def encode(text: str) -> np.ndarray:
    """The bytes of a document, and end-of-text."""
    return np.append(BYTES.encode_array(text), np.uint16(BYTES.end_of_text))


def write_once(folder: Path, items: Iterable[Item], *, kind: Kind, notes: dict[str, Any]) -> None:
    """Writes documents or examples as a prepared folder, unless it exists with these notes.

    The folder is written under another name and renamed when complete. Of several processes, the first to finish wins,
    and the others use its folder.
    """
    with named(folder, "give another folder"):
        if not _holds(folder, notes):
            _write(folder, items, kind, notes)


def _write(folder: Path, items: Iterable[Item], kind: Kind, notes: dict[str, Any]) -> None:
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        writers = {s: ShardWriter(temporary, s, kind=kind, shard_tokens=SHARD_TOKENS) for s in ("train", "val")}
        for split, *arrays in items:
            (writers[split].add if kind == "text" else writers[split].add_example)(*arrays)
        for writer in writers.values():
            writer.close()
        splits = {split: writer.finished for split, writer in writers.items()}
        write_index(temporary, Index(kind, BYTES.name, BYTES.end_of_text, BYTES.size, splits, notes))
        try:
            temporary.rename(folder)  # replaces an empty folder, never one with files
        except OSError:
            if not _holds(folder, notes):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _holds(folder: Path, notes: dict[str, Any]) -> bool:
    if not folder.exists() or not any(folder.iterdir()):
        return False
    try:
        found = read_index(folder).notes
        if found != notes:
            raise ValueError(f"{folder} contains {found}, not {notes}")
        for split in ("train", "val"):
            open_dataset(folder, split=split)
    except ValueError as error:
        raise ValueError(f"cannot write to {folder}: {error}. Remove this folder, or give another") from None
    return True
