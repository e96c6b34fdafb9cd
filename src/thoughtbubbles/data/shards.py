"""Tokens on disk: a folder with `index.json` and shards `train-00000.bin …`, `val-00000.bin …`.

    shard     header (64 bytes), then the payload, everything little-endian
    header    magic, version, kind, largest token, counts of tokens and examples, CRC-32 of payload and of header
    text      tokens uint16: concatenated documents, each ending in end-of-text
    examples  offsets uint64 (n_examples + 1), tokens uint16, mask uint8: 1 where this token counts as a target

A shard gets its name only when it is complete on disk, and the index is written last, so an interrupted preparation
never looks finished. The index contains a checksum of itself. Reading maps files into memory, after checking the index
against its tokenizer and every shard against its header, the index and its checksum.
"""

import json
import mmap
import os
import re
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from thoughtbubbles.data.tokenizer import Tokenizer, is_trained, saved_tokenizer, tokenizer
from thoughtbubbles.files import CHUNK_BYTES, named, read_object, short_name, write_atomically

Kind = Literal["text", "examples"]

INDEX = "index.json"
FORMAT = "thoughtbubbles tokens"
VERSION = 2
MAGIC = b"TBTOKENS"
KIND_CODES: dict[str, int] = {"text": 1, "examples": 2}
SPLIT_NAME = re.compile(r"[a-z]+")
HEADER = struct.Struct("<8sHHHxxQQI24xI")  # the last field is the CRC-32 of all before it
HEADER_BYTES = 64
SMALL_VALIDATION = 10_000  # tokens: the mean loss over fewer varies by several percent with the choice of documents
REMEDY = "copy it again from its source, or prepare the dataset again"

TOKEN = np.dtype("<u2")
OFFSET = np.dtype("<u8")


@dataclass(frozen=True)
class ShardInfo:
    """The entry of a shard in the index."""

    file: str
    n_tokens: int
    n_examples: int
    crc32: int


@dataclass(frozen=True)
class Index:
    """Properties of all shards of a folder, and the list of shards."""

    kind: Kind
    tokenizer: str
    end_of_text: int
    vocab_size: int
    splits: dict[str, list[ShardInfo]]
    notes: dict[str, Any] = field(default_factory=dict)


class Header(NamedTuple):
    kind: int
    max_token: int
    n_tokens: int
    n_examples: int
    crc32: int

    def pack(self) -> bytes:
        head = HEADER.pack(MAGIC, VERSION, *self, 0)[:-4]
        return head + struct.pack("<I", zlib.crc32(head))

    @property
    def file_bytes(self) -> int:
        if self.kind == KIND_CODES["text"]:
            return HEADER_BYTES + TOKEN.itemsize * self.n_tokens
        return HEADER_BYTES + OFFSET.itemsize * (self.n_examples + 1) + (TOKEN.itemsize + 1) * self.n_tokens


class ShardWriter:
    """Writes one split, shard by shard. Only complete shards have the name of a shard.

    Text is cut so that every shard but the last has exactly `shard_tokens` tokens. Examples are not cut: a shard of
    examples is complete with the one that brings it to `shard_tokens`. To resume, continue with
    `first_shard` = the number of finished shards and the first token (or example) after them.
    """

    def __init__(self, folder: Path, split: str, *, kind: Kind, shard_tokens: int, first_shard: int = 0):
        if not SPLIT_NAME.fullmatch(split):
            raise ValueError(f"split = {split!r}: give lower-case letters only, e.g. 'train'")
        if kind not in KIND_CODES:
            raise ValueError(f"kind = {kind!r}: give one of {', '.join(KIND_CODES)}")
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens = {shard_tokens}: give 1 or more tokens, e.g. 100_000_000")
        self.finished: list[ShardInfo] = []
        self.pending = 0  # tokens added and not yet in a finished shard
        self._folder, self._split, self._kind = folder, split, kind
        self._shard_tokens, self._next = shard_tokens, first_shard
        self._tokens: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, tokens: np.ndarray) -> None:
        assert self._kind == "text", "a writer of examples takes add_example"
        tokens = _own_copy(tokens)
        while len(tokens):
            room = self._shard_tokens - self.pending
            self._take(tokens[:room])
            tokens = tokens[room:]

    def add_example(self, tokens: np.ndarray, mask: np.ndarray) -> None:
        assert self._kind == "examples", "a writer of text takes add"
        assert mask.dtype == np.bool_, f"the mask is boolean, not {mask.dtype}"
        assert mask.shape == tokens.shape, f"mask {mask.shape} and tokens {tokens.shape} differ"
        self._masks.append(mask.astype(np.uint8))
        self._take(_own_copy(tokens))

    def close(self) -> None:
        """Writes the rest as the last shard. The writer cannot be used afterwards."""
        if self._tokens:
            self._finish_shard()

    def _take(self, tokens: np.ndarray) -> None:
        self._tokens.append(tokens)
        self.pending += len(tokens)
        if self.pending >= self._shard_tokens:
            self._finish_shard()

    def _finish_shard(self) -> None:
        parts, n_examples = self._tokens, 0
        if self._kind == "examples":
            n_examples = len(self._tokens)
            offsets = np.cumsum([0, *map(len, self._tokens)]).astype(OFFSET)
            parts = [offsets, *self._tokens, *self._masks]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part.data, crc)
        max_token = max((int(t.max()) for t in self._tokens if len(t)), default=0)
        header = Header(KIND_CODES[self._kind], max_token, self.pending, n_examples, crc)
        name = shard_name(self._split, self._next)
        write_atomically(self._folder / name, [header.pack(), *(part.data for part in parts)])
        self.finished.append(ShardInfo(name, self.pending, n_examples, crc))
        self._tokens, self._masks, self.pending = [], [], 0
        self._next += 1


def _own_copy(tokens: np.ndarray) -> np.ndarray:
    """A copy, since the caller may reuse its array. No cast: it would silently wrap large ids around."""
    assert tokens.dtype == np.uint16, f"tokens are uint16, not {tokens.dtype}"
    assert tokens.ndim == 1, f"tokens are one-dimensional, not {tokens.shape}"
    return np.array(tokens, dtype=TOKEN)


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def write_sealed(path: Path, record: dict[str, Any]) -> None:
    """JSON with a checksum of itself, so that an edited or half-copied file is detected."""
    write_atomically(path, [(json.dumps({**record, "crc32": _seal(record)}, indent=1) + "\n").encode()])


def check_seal(path: Path, record: dict[str, Any], *, remedy: str) -> None:
    try:
        whole = record.get("crc32") == _seal(record)
    except RecursionError:  # deeper than anything we write
        whole = False
    if not whole:
        raise ValueError(f"{short_name(path)} has been altered (its checksum differs): {remedy}")


def _seal(record: dict[str, Any]) -> int:
    """Checksum of the content, independent of indentation and order."""
    rest = {name: value for name, value in record.items() if name != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def write_index(folder: Path, index: Index) -> None:
    write_sealed(folder / INDEX, {"format": FORMAT, "version": VERSION, **asdict(index)})


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    with named(path, "give a folder written by `prepare`"):
        if not path.exists() and not path.is_symlink():
            raise ValueError(
                f"{short_name(path)} is missing: {short_name(folder)} is not a prepared dataset, or its preparation "
                "did not finish; prepare it (again)"
            )
    record = read_object(path, remedy=REMEDY)
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{short_name(path)} is not the index of a prepared dataset: give a folder written by `prepare`"
        )
    if record.get("version") != VERSION:
        raise ValueError(
            f"{short_name(path)} has version {short_name(repr(record.get('version')))}, this program reads {VERSION}: "
            "prepare it again (and start runs on it again, with --init-from)"
        )
    check_seal(path, record, remedy=REMEDY)
    name = record.get("tokenizer")
    tok = saved_tokenizer(name, folder, remedy=REMEDY) if is_trained(name) else None  # its errors name its own files
    try:
        return _parse_index(record, tok or tokenizer(record["tokenizer"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = short_name(f"{type(error).__name__}: {error}")
        raise ValueError(f"{short_name(path)} is damaged ({what}): {REMEDY}") from None


def _parse_index(record: dict[str, Any], tok: Tokenizer) -> Index:
    if record["kind"] not in KIND_CODES:
        raise ValueError(f"kind = {record['kind']!r}")
    if wrong := [name for name in record["splits"] if not SPLIT_NAME.fullmatch(name)]:
        raise ValueError(f"a split is named {wrong[0]!r}")
    splits = {split: parse_shards(infos, split=split) for split, infos in record["splits"].items()}
    if not isinstance(record["notes"], dict):
        raise ValueError("notes are not an object")
    for name, own in (("end_of_text", tok.end_of_text), ("vocab_size", tok.size)):
        if count(record[name]) != own:
            raise ValueError(f"{name} = {record[name]}, but the tokenizer {tok.name!r} has {own}")
    return Index(record["kind"], tok.name, tok.end_of_text, tok.size, splits, record["notes"])


def parse_shards(infos: Any, *, split: str) -> list[ShardInfo]:
    """The shards of a split, from the index or the journal: their names follow from their order."""
    if not isinstance(infos, list):
        raise ValueError(f"the shards of {split!r} are not a list")
    found = [
        ShardInfo(str(info["file"]), count(info["n_tokens"]), count(info["n_examples"]), count(info["crc32"]))
        for info in infos
    ]
    for number, info in enumerate(found):
        if info.file != shard_name(split, number):
            raise ValueError(f"shard {number} of {split!r} is {info.file!r} instead of {shard_name(split, number)!r}")
    return found


def count(value: Any) -> int:
    """A whole number, 0 or more, that fits the fields of the header."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is not a count")
    return value


@dataclass(frozen=True)
class Shard:
    """One file, mapped into memory. `offsets` and `mask` are for examples only."""

    path: Path
    header: Header
    payload: np.ndarray  # uint8

    @cached_property
    def tokens(self) -> np.ndarray:
        begin = self._tokens_at
        return self.payload[begin : begin + TOKEN.itemsize * self.header.n_tokens].view(TOKEN)

    @cached_property
    def offsets(self) -> np.ndarray:
        return self.payload[: self._tokens_at].view(OFFSET)

    @cached_property
    def mask(self) -> np.ndarray:
        return self.payload[self._tokens_at + TOKEN.itemsize * self.header.n_tokens :]

    @property
    def _tokens_at(self) -> int:
        return OFFSET.itemsize * (self.header.n_examples + 1) if self.header.kind == KIND_CODES["examples"] else 0


@dataclass(frozen=True)
class Dataset:
    """One split of a folder, checked and ready to be read."""

    folder: Path
    split: str
    index: Index
    shards: tuple[Shard, ...]

    @property
    def n_tokens(self) -> int:
        return sum(shard.header.n_tokens for shard in self.shards)

    @property
    def n_examples(self) -> int:
        return sum(shard.header.n_examples for shard in self.shards)

    @property
    def max_token(self) -> int:
        return max(shard.header.max_token for shard in self.shards)


def has_split(folder: Path, split: str) -> bool:
    """Whether a prepared folder has this split and it is not empty; raises ValueError for any other folder."""
    return bool(read_index(folder).splits.get(split))


def open_dataset(folder: Path, *, split: str, verify: bool = True) -> Dataset:
    """Without `verify`, headers, sizes and offsets are still checked, but not the checksums of all bytes."""
    index = read_index(folder)
    infos = index.splits.get(split)
    if not infos:
        have = ", ".join(name for name, shards in index.splits.items() if shards) or "none"
        raise ValueError(
            f"{short_name(folder)} has no split {split!r} (it has: {have}): prepare it with one, or ask for another"
        )
    dataset = Dataset(folder, split, index, tuple(open_shard(folder / info.file, info, index) for info in infos))
    if verify:
        with ThreadPoolExecutor(min(len(infos), os.cpu_count() or 1, 8)) as pool:
            list(pool.map(_check_payload, dataset.shards))
    return dataset


def open_shard(path: Path, info: ShardInfo, index: Index) -> Shard:
    """Checks everything that does not need to read the whole file."""
    with named(path, REMEDY):
        if not path.is_file():  # opening a pipe would block
            what = "is not a file" if path.exists() or path.is_symlink() else "is missing"
            raise ValueError(f"{path} {what}, though {INDEX} lists it: {REMEDY}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER_BYTES)
            if len(head) < HEADER_BYTES:
                raise ValueError(f"{path} has only {size} bytes: {REMEDY}")
            header = _parse_header(path, head)
            _compare(path, header, info, index)
            if size != header.file_bytes:
                raise ValueError(f"{path} has {size} bytes instead of {header.file_bytes}: {REMEDY}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    shard = Shard(path, header, np.frombuffer(mapped, dtype=np.uint8)[HEADER_BYTES:])
    if index.kind == "examples" and not _fits(shard.offsets, header.n_tokens):
        raise ValueError(f"{path} has altered bytes (its offsets do not fit its tokens): {REMEDY}")
    return shard


def _fits(offsets: np.ndarray, n_tokens: int) -> bool:
    """Whether the examples cover the tokens from the first to the last, in order."""
    return bool(offsets[0] == 0 and offsets[-1] == n_tokens and (offsets[1:] >= offsets[:-1]).all())


def _parse_header(path: Path, head: bytes) -> Header:
    magic, version, *counts, crc = HEADER.unpack(head)
    if magic != MAGIC:
        raise ValueError(f"{path} is not a shard of tokens (it starts with {magic!r}): {REMEDY}")
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, this program reads {VERSION}: prepare the dataset again")
    if crc != zlib.crc32(head[:-4]):
        raise ValueError(f"{path} has altered bytes in its header (checksum differs): {REMEDY}")
    return Header(*counts)


def _compare(path: Path, header: Header, info: ShardInfo, index: Index) -> None:
    expected = (KIND_CODES[index.kind], info.n_tokens, info.n_examples, info.crc32)
    found = (header.kind, header.n_tokens, header.n_examples, header.crc32)
    for name, listed, own in zip(("kind", "n_tokens", "n_examples", "crc32"), expected, found, strict=True):
        if listed != own:
            raise ValueError(f"{path} disagrees with {INDEX} ({name}: {own}, the index says {listed}): {REMEDY}")
    if header.max_token >= index.vocab_size:
        raise ValueError(f"{path} has token {header.max_token}, {INDEX} says vocab_size = {index.vocab_size}: {REMEDY}")


def _check_payload(shard: Shard) -> None:
    crc, payload = 0, shard.payload
    for begin in range(0, len(payload), CHUNK_BYTES):
        crc = zlib.crc32(payload[begin : begin + CHUNK_BYTES].data, crc)  # releases the GIL for the other shards
    if crc != shard.header.crc32:
        raise ValueError(f"{shard.path} has altered bytes (checksum differs): {REMEDY}")
