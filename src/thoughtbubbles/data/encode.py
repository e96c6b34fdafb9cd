"""Encodes a chunk of a source into arrays of tokens; runs in the processes that prepare a dataset.

A broken record does not lose the records before it: they are returned together with the error message.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from thoughtbubbles.data.compressed import extra
from thoughtbubbles.data.records import Document, Example, Part, read_record
from thoughtbubbles.data.shards import Kind
from thoughtbubbles.data.sources import Chunk, one_line
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.files import parse_json


class Encoded(NamedTuple):
    """The concatenated documents (or examples) of a chunk."""

    kind: Kind | None  # None if there are none
    tokens: np.ndarray  # uint16
    mask: np.ndarray  # bool, for the tokens of examples: part of an answer, which counts in the loss
    n_tokens: np.ndarray  # of each document
    n_bytes: np.ndarray  # of text in each document
    key: np.ndarray  # uint64: equal for documents that must be in the same split
    skipped: int  # records with nothing to learn
    error: str | None  # the error in the record after the last document


def encode_parts(tok: Tokenizer, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of an example. Answers end in end-of-text, which also counts in the loss."""
    ids: list[np.ndarray] = []
    for part in parts:
        ids.append(tok.encode_array(part.text))
        if part.said:
            ids[-1] = np.append(ids[-1], np.uint16(tok.end_of_text))
    mask = [np.full(len(part_ids), part.said) for part_ids, part in zip(ids, parts, strict=True)]
    return np.concatenate(ids), np.concatenate(mask)


def encode_chunk(chunk: Chunk, tok: Tokenizer) -> Encoded:
    kind: Kind | None = None
    tokens, masks, n_bytes, keys, skipped, error = [], [], [], [], 0, None
    try:
        for found in read_documents(chunk):
            if found is None:
                skipped += 1
                continue
            kind = kind or kind_of(found)
            if isinstance(found, Document):
                ids = np.append(tok.encode_array(found.text), np.uint16(tok.end_of_text))
                n_bytes.append(len(_bytes(found.text)))
            else:
                ids, mask = encode_parts(tok, found.parts)
                n_bytes.append(sum(len(_bytes(part.text)) for part in found.parts))
                masks.append(mask)
            tokens.append(ids)
            keys.append(key_of(found))
    except ValueError as problem:
        error = str(problem)
    return Encoded(
        kind,
        np.concatenate(tokens) if tokens else np.empty(0, dtype=np.uint16),
        np.concatenate(masks) if masks else np.empty(0, dtype=np.bool_),
        np.array([len(ids) for ids in tokens], dtype=np.int64),
        np.array(n_bytes, dtype=np.int64),
        np.array(keys, dtype=np.uint64),
        skipped,
        error,
    )


def read_documents(chunk: Chunk) -> Iterator[Document | Example | None]:
    """The documents, or examples, of a chunk, all of one kind; None for a record with nothing to learn."""
    kind: Kind | None = None
    for where, record in _records(chunk):
        try:
            found = read_record(record)
        except ValueError as problem:
            raise ValueError(f"{where}: {problem}") from None
        if found is not None:
            kind = kind or kind_of(found)
            if kind_of(found) != kind:
                raise ValueError(f"{where}: {mixed(kind, kind_of(found))}")
        yield found


def kind_of(found: Document | Example) -> Kind:
    return "text" if isinstance(found, Document) else "examples"


def key_of(found: Document | Example) -> int:
    """64 bits that decide the split, equal for documents that must be in the same one."""
    text = found.text if isinstance(found, Document) else found.key
    return int.from_bytes(hashlib.blake2b(_bytes(text), digest_size=8).digest())


def mixed(first: Kind, second: Kind) -> str:
    names = {"text": "plain text", "examples": "questions or chats with answers"}
    return (
        f"found {names[second]} after {names[first]}: the loss is computed differently for the two, so prepare them "
        "into separate folders"
    )


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _records(chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each record with its position, for messages."""
    if chunk.form == "broken":
        raise ValueError(chunk.payload)
    if chunk.form == "text":
        yield chunk.name, {"text": _decoded(chunk.payload, chunk.name)}
    elif chunk.form == "lines":
        for number, line in enumerate(chunk.payload.split(b"\n"), start=chunk.start + 1):
            if line and not line.isspace():
                where = f"{chunk.name}, line {number}"
                yield where, _parsed(line, where)
    else:
        rows = chunk.payload if chunk.form == "records" else _rows(chunk.payload, chunk.name)
        for number, record in enumerate(rows, start=chunk.start + 1):
            yield f"{chunk.name}, record {number}", record


def _rows(payload: bytes, where: str) -> list[dict[str, Any]]:
    arrow = extra("pyarrow", "to read .parquet files")
    try:
        rows: list[dict[str, Any]] = arrow.ipc.open_stream(payload).read_all().to_pylist()
    except Exception as error:  # text that is not UTF-8, dates that Python does not have …
        raise ValueError(f"{where} cannot be read ({one_line(error)}): check the file, or copy it again") from None
    return rows


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: byte {error.start + 1} is not UTF-8: convert the file, e.g. with iconv --from-code latin1 "
            "--to-code utf-8"
        ) from None


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    record = parse_json(
        _decoded(line, where), where=where, remedy="fix or remove the line, then prepare into a new folder"
    )
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON {type(record).__name__} is not a record: give an object such as {{text}}")
    return record
