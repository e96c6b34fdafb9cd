"""The text of a protocol: a prepared corpus, or part of it."""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thoughtbubbles.data.shards import INDEX, Dataset, Index, ShardWriter, open_dataset, read_index, write_index
from thoughtbubbles.data.tokenizer import CONFIG, DEFINITION
from thoughtbubbles.files import locked, named, partial_folder, publish


class Corpus(NamedTuple):
    folder: Path
    n_tokens: int  # of the training text
    vocab_size: int
    tokenizer: str
    checksum: str  # of all tokens: the same for the same text in the same order, wherever it was prepared


def open_corpus(folder: Path) -> Corpus:
    """Reads every byte once, to verify it."""
    parts = [open_dataset(folder, split=split) for split in ("train", "val")]
    train, index = parts[0], parts[0].index
    if index.kind != "text":
        raise ValueError(f"--data {folder}: has examples; a protocol needs text")
    return Corpus(folder, train.n_tokens, index.vocab_size, index.tokenizer, _checksum(parts))


def _checksum(parts: list[Dataset]) -> str:
    found = 0
    for part in parts:
        for shard in part.shards:
            found = zlib.crc32(shard.tokens.data, found)
    return f"{found:08x}"


def part_of(folder: Path, out: Path, *, n_tokens: int) -> Path:
    """A prepared folder with every k-th document, up to `n_tokens` tokens of training text, and all validation text."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.parent, doing="preparing text in", wait=True):  # rows may be started at the same time
        return out if (out / INDEX).is_file() else _write_part(folder, out, n_tokens)


def _write_part(folder: Path, out: Path, n_tokens: int) -> Path:
    index, train = read_index(folder), open_dataset(folder, split="train", verify=False)
    if train.n_tokens < n_tokens:
        raise ValueError(
            f"--data {folder}: has {train.n_tokens:,} tokens of training text, but {n_tokens:,} are needed; "
            "prepare more text"
        )
    partial = partial_folder(out)
    splits = {}
    for split, tokens in (("train", _every_kth(train, n_tokens)), ("val", _joined(open_dataset(folder, split="val")))):
        writer = ShardWriter(partial, split, kind="text", shard_tokens=1 << 27)
        writer.add(tokens)
        writer.close()
        splits[split] = writer.finished
    for name in (DEFINITION, CONFIG):
        if (folder / name).is_file():
            (partial / name).write_bytes((folder / name).read_bytes())
    notes = {"part_of": {"tokens": n_tokens, "text": train.n_tokens}}
    write_index(partial, Index(index.kind, index.tokenizer, index.end_of_text, index.vocab_size, splits, notes))
    with named(out, "give another --runs"):
        publish(partial, out)
    return out


def _joined(dataset: Dataset) -> np.ndarray:
    return np.concatenate([shard.tokens for shard in dataset.shards])


def _every_kth(dataset: Dataset, n_tokens: int) -> np.ndarray:
    """Documents 0, k, 2k, …, then 1, k + 1, …, with k = how often `n_tokens` fit, until there are enough tokens."""
    tokens = _joined(dataset)
    ends = np.flatnonzero(tokens == dataset.index.end_of_text) + 1
    ends = ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))
    begins = np.concatenate([[0], ends[:-1]])
    k = max(1, len(tokens) // n_tokens)
    order = np.concatenate([np.arange(first, len(ends), k) for first in range(k)])
    sizes = np.cumsum((ends - begins)[order])
    chosen = order[: int(np.searchsorted(sizes, n_tokens)) + 1]
    return np.concatenate([tokens[begins[i] : ends[i]] for i in chosen])[:n_tokens]
