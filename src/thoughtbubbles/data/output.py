"""The output folder while it is being filled; filling can resume after an interruption at any moment.

    prepare.json       the journal: the settings, the position in the sources, the complete shards
    train-00003.tail   the tokens of train after its first 3 shards, up to the length in the journal
    train-00002.bin    complete shards, see shards.py
    tokenizer.json, tokenizer_config.json    the tokenizer, unless it is one that has a name

Saving flushes the tails to disk and then replaces the journal atomically. Resuming truncates the tails to the length in
the journal and reads the sources from the journal's position: the result is byte-identical to an uninterrupted one. At
the end the index is written, and journal and tails are deleted.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from thoughtbubbles.data.encode import Encoded, mixed
from thoughtbubbles.data.shards import (
    INDEX,
    KIND_CODES,
    Index,
    Kind,
    ShardInfo,
    ShardWriter,
    check_seal,
    count,
    open_shard,
    parse_shards,
    read_index,
    write_sealed,
)
from thoughtbubbles.data.shards import write_index as write_dataset_index
from thoughtbubbles.data.tokenizer import CONFIG, DEFINITION, TRAINED, Tokenizer, read_tokenizer, saved_tokenizer
from thoughtbubbles.files import read_object, short_name

JOURNAL = "prepare.json"
SPLITS = ("train", "val")
SAID, FIRST = np.uint32(1 << 16), np.uint32(1 << 17)  # flags added to a token in the tail of examples


@dataclass
class Counts:
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass
class Tail:
    """Length of a tail in the journal, and its checksum up to there."""

    tokens: int = 0
    crc32: int = 0


@dataclass
class PrepareState:
    """The content of the journal, except the settings."""

    kind: Kind | None = None
    place: tuple[int, int] = (0, 0)  # input, record
    skipped: int = 0
    first_keys: list[int] = field(default_factory=list)
    counts: dict[str, Counts] = field(default_factory=lambda: {split: Counts() for split in SPLITS})
    shards: dict[str, list[ShardInfo]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    tails: dict[str, Tail] = field(default_factory=lambda: {split: Tail() for split in SPLITS})

    @classmethod
    def parse(cls, record: Any) -> "PrepareState":
        if record["kind"] is not None and record["kind"] not in KIND_CODES:
            raise ValueError(f"kind = {record['kind']!r}")
        place = [count(value) for value in record["place"]]
        first_keys = [count(value) for value in record["first_keys"]]
        if len(place) != 2 or len(first_keys) > 2:
            raise ValueError(f"place = {place}, first_keys = {first_keys}")
        counts = {s: Counts(**{name: count(n) for name, n in record["counts"][s].items()}) for s in SPLITS}
        if record["kind"] is None and any(asdict(c) != asdict(Counts()) for c in counts.values()):
            raise ValueError("there are documents without a kind")
        return cls(
            record["kind"],
            (place[0], place[1]),
            count(record["skipped"]),
            first_keys,
            counts,
            {split: parse_shards(record["shards"][split], split=split) for split in SPLITS},
            {s: Tail(**{name: count(n) for name, n in record["tails"][s].items()}) for s in SPLITS},
        )


class Split:
    """One split being written: complete shards, and a tail, also on disk, that is not in a shard yet."""

    def __init__(self, folder: Path, name: str, *, kind: Kind, shard_tokens: int, shards: list[ShardInfo], tail: Tail):
        self._folder, self._name, self._kind, self._before = folder, name, kind, list(shards)
        self._writer = ShardWriter(folder, name, kind=kind, shard_tokens=shard_tokens, first_shard=len(shards))
        self._form = np.dtype("<u2" if kind == "text" else "<u4")
        self.tail, self.tail_path = tail, self._tail_path()
        self._file: BinaryIO = self._continue_tail()

    @property
    def shards(self) -> list[ShardInfo]:
        return self._before + self._writer.finished

    def add(self, tokens: np.ndarray, mask: np.ndarray, n_tokens: np.ndarray) -> None:
        if self._kind == "text":
            self._take(tokens.astype(self._form))
            return
        packed = tokens.astype(self._form) | mask * SAID
        packed[np.cumsum(n_tokens) - n_tokens] |= FIRST
        self._take(packed)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def finish(self) -> None:
        self.close()
        self._writer.close()

    def _take(self, packed: np.ndarray) -> None:
        finished = len(self._writer.finished)
        self._write(packed)
        if len(self._writer.finished) > finished:
            self.close()  # the old tail stays until the new one is in the journal
            self.tail_path = self._tail_path()
            self._file, self.tail = self._new_tail(), Tail()
            packed = packed[len(packed) - self._writer.pending :]
        self._file.write(packed.data)
        self.tail = Tail(self.tail.tokens + len(packed), zlib.crc32(packed.data, self.tail.crc32))

    def _write(self, packed: np.ndarray) -> None:
        if self._kind == "text":
            self._writer.add(packed.astype(np.uint16, copy=False))
            return
        for example in np.split(packed, np.flatnonzero(packed & FIRST))[1:]:
            self._writer.add_example(example.astype(np.uint16), (example & SAID).astype(np.bool_))

    def _tail_path(self) -> Path:
        return self._folder / f"{self._name}-{len(self.shards):05d}.tail"

    def _new_tail(self) -> BinaryIO:
        self.tail_path.unlink(missing_ok=True)  # whatever has this name: opening a pipe would block
        return self.tail_path.open("wb")

    def _continue_tail(self) -> BinaryIO:
        """Passes the tail to the writer, and truncates what was written after the last save of the journal."""
        if not self.tail.tokens:
            return self._new_tail()
        remedy = f"delete {self._folder} and prepare it again"
        there = self.tail_path.stat().st_size if self.tail_path.is_file() else 0
        if there < self.tail.tokens * self._form.itemsize:
            raise ValueError(f"{self.tail_path} is missing or truncated: {remedy}")
        packed = np.fromfile(self.tail_path, dtype=self._form, count=self.tail.tokens)
        if zlib.crc32(packed.data) != self.tail.crc32:
            raise ValueError(f"{self.tail_path} is damaged (its checksum differs): {remedy}")
        self._write(packed)
        os.truncate(self.tail_path, packed.nbytes)
        return self.tail_path.open("ab")


class OutputFolder:
    """The folder. Its state is what a later run needs to resume."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self._folder, self._settings = folder, settings
        self._splits: dict[str, Split] = {}
        state = _read_journal(folder, settings)
        self.resumed = state is not None
        self.state = PrepareState() if state is None else state
        if state is None:
            _refuse_foreign(folder)
            self.save(self.state.place)
        else:
            self._open(self.state.kind)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the settings; None for a vocabulary that has not been trained yet."""
        remedy = f"delete the folder {self._folder} and prepare it again"
        if (name := str(self._settings["tokenizer"])) != TRAINED:
            return saved_tokenizer(name, self._folder, remedy=remedy)
        if self.state.kind is None and not os.path.lexists(self._folder / CONFIG):
            return None
        return read_tokenizer(self._folder, remedy=remedy)

    @property
    def documents(self) -> int:
        return sum(counts.documents for counts in self.state.counts.values())

    @property
    def n_shards(self) -> int:
        return sum(len(split.shards) for split in self._splits.values())

    def add(self, found: Encoded, name: str, *, split: str | None) -> None:
        """Without `split`, the hash of a document decides whether it goes to `val`."""
        state = self.state
        state.skipped += found.skipped
        if found.kind is None:
            return
        if state.kind is None:
            state.kind = found.kind
            self._open(found.kind)
        if found.kind != state.kind:
            raise ValueError(f"{name}: {mixed(state.kind, found.kind)}")
        end = np.concatenate([[0], np.cumsum(found.n_tokens)])
        if split is None:
            is_val = held_out(found.key, state.first_keys, share=float(self._settings["val_fraction"]))
        else:
            is_val = np.full(len(found.key), split == "val")
        for held, a, b in _runs(is_val):
            name, counts = SPLITS[held], state.counts[SPLITS[held]]
            these = slice(end[a], end[b])
            self._splits[name].add(found.tokens[these], found.mask[these], found.n_tokens[a:b])
            counts.documents += b - a
            counts.tokens += int(end[b] - end[a])
            counts.bytes += int(found.n_bytes[a:b].sum())

    def save(self, place: tuple[int, int]) -> None:
        """Writes the journal, so that a later run can resume from here."""
        self.state.place = place
        for name, split in self._splits.items():
            split.sync()
            self.state.shards[name], self.state.tails[name] = split.shards, split.tail
        write_sealed(self._folder / JOURNAL, {"settings": self._settings, "state": asdict(self.state)})
        self._remove(self._folder.glob("*.tail"), keep={split.tail_path for split in self._splits.values()})

    def close(self) -> None:
        for split in self._splits.values():
            with contextlib.suppress(OSError):  # the journal does not count on bytes that could not be written
                split.close()

    def finish(self, tok: Tokenizer) -> Index:
        state = self.state
        assert state.kind is not None, "there must be at least one document"
        for split in self._splits.values():
            split.finish()
        notes = {
            "settings": self._settings,
            "skipped": state.skipped,
            **{what: {s: asdict(c)[what] for s, c in state.counts.items()} for what in ("documents", "bytes")},
        }
        shards = {name: split.shards for name, split in self._splits.items()}
        index = Index(state.kind, tok.name, tok.end_of_text, tok.size, shards, notes)
        write_dataset_index(self._folder, index)
        tidy(self._folder)
        return index

    def abandon(self) -> None:
        """Removes everything, if there was nothing to prepare."""
        for name in ("*.bin", CONFIG, DEFINITION):
            self._remove(self._folder.glob(name), keep=set())
        tidy(self._folder)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _open(self, kind: Kind | None) -> None:
        if kind is not None:
            size, state = int(self._settings["shard_tokens"]), self.state
            tok = self.tokenizer()
            assert tok is not None, "a vocabulary is trained before the first document is encoded"
            _check_shards(self._folder, Index(kind, tok.name, tok.end_of_text, tok.size, state.shards))
            self._splits = {
                s: Split(self._folder, s, kind=kind, shard_tokens=size, shards=state.shards[s], tail=state.tails[s])
                for s in SPLITS
            }

    @staticmethod
    def _remove(paths: Iterator[Path], *, keep: set[Path]) -> None:
        for path in set(paths) - keep:
            path.unlink(missing_ok=True)


def held_out(key: np.ndarray, first: list[int], *, share: float) -> np.ndarray:
    """Which documents go to val. By the key only, so that equal documents stay together; but the first document goes
    to train and the next different one to val: their keys are kept in `first`, which is empty at the beginning.
    """
    for value in key[:0] if len(first) == 2 else key:
        if int(value) not in first:
            first.append(int(value))
        if len(first) == 2:
            break
    held = key < np.uint64(share * 2**64)
    for value, side in zip(first, (False, True), strict=False):
        held[key == np.uint64(value)] = side and share > 0
    return held


def tidy(folder: Path) -> None:
    """Removes the files that only an unfinished folder needs."""
    for pattern in ("*.tail", "*.tmp", JOURNAL):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def finished(folder: Path, settings: dict[str, Any]) -> Index | None:
    """The index of a folder that was prepared before, with the same settings."""
    if not os.path.lexists(folder / INDEX):
        return None
    index = read_index(folder)
    theirs = index.notes.get("settings")
    _refuse_other(folder, settings, theirs if isinstance(theirs, dict) else {}, "a prepared dataset")
    try:
        count(index.notes["skipped"])
        for split in SPLITS:
            len(index.splits[split])
            count(index.notes["documents"][split])
            count(index.notes["bytes"][split])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{folder / INDEX} is damaged (its notes are not from `prepare`): delete {folder} and prepare it again"
        ) from None
    _check_shards(folder, index)
    tidy(folder)
    return index


def _check_shards(folder: Path, index: Index) -> None:
    """Checks headers and sizes: earlier shards must still exist."""
    for infos in index.splits.values():
        for info in infos:
            open_shard(folder / info.file, info, index)


def _runs(held: np.ndarray) -> list[tuple[bool, int, int]]:
    """Runs of documents that go to the same split."""
    cuts = [0, *(np.flatnonzero(held[1:] != held[:-1]) + 1).tolist(), len(held)]
    return [(bool(held[a]), a, b) for a, b in pairwise(cuts)]


def _read_journal(folder: Path, settings: dict[str, Any]) -> PrepareState | None:
    path, remedy = folder / JOURNAL, f"delete the folder {folder} and prepare it again"
    if not os.path.lexists(path):
        return None
    record = read_object(path, remedy=remedy)
    check_seal(path, record, remedy=remedy)
    try:
        theirs, state = dict(record["settings"]), PrepareState.parse(record["state"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = short_name(f"{type(error).__name__}: {error}")
        raise ValueError(f"{short_name(path)} is damaged ({what}): {remedy}") from None
    _refuse_other(folder, settings, theirs, "a half-finished preparation")
    return state


def _refuse_foreign(folder: Path) -> None:
    there = sorted(path.name for path in folder.iterdir() if path.suffix != ".tmp")
    if there:
        first = short_name(there[0])
        raise ValueError(f"out = {folder} already contains other files ({first} …): give a new or empty folder")


def _refuse_other(folder: Path, ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if names == ["inputs"]:
        raise ValueError(
            f"out = {folder} contains {what} of the same sources, but their files have changed since: give another "
            "folder, or delete this one to start over"
        )
    if names:
        if not theirs:
            raise ValueError(f"out = {folder} contains {what} that was made in another way: give another folder")
        differences = short_name(", ".join(f"{name} = {theirs.get(name)!r}" for name in names if name != "inputs"))
        raise ValueError(
            f"out = {folder} contains {what} with other settings ({differences}): use those, give another folder, or "
            "delete this one to start over"
        )
