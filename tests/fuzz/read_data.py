"""Readers of the data package: prepared shards, half-finished preparations, and text sources."""

import io
import json
import zlib
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
from cases import FileBase, gather
from mutate import Files
from packed import PACKINGS

from thoughtbubbles.data import shards as form
from thoughtbubbles.data.encode import encode_chunk
from thoughtbubbles.data.loader import Batch, Loader, Source, ValidationSet
from thoughtbubbles.data.output import JOURNAL
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.shards import INDEX, Header, Index, ShardWriter, open_dataset, write_index
from thoughtbubbles.data.sources import find_inputs, read_chunks
from thoughtbubbles.data.tokenizer import Tokenizer, save_tokenizer, tokenizer, trained

TEXTS = [
    json.dumps({"text": f"Text {n}: a fox, and a dog that is {'very ' * n}lazy. Grüße, 世界 \U0001f600"})
    for n in range(6)
]
RECORDS = [
    {"question": "What is 2 + 2?", "answer": "It is <<2+2=4>>4. #### 4"},
    {"question": "And 3 + 3?", "steps": ["<<3+3=6>>", "So 6."], "answer": "6"},
    {"question": "Which?", "choices": ["red", "green", "blue"], "answer": 1},
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]},
    {"train": {"question": "Which?", "choices": ["a", "b"], "answer": "B"}},
]


def shards(folder: Path) -> Sequence[FileBase]:
    bases = []
    for kind in ("text", "examples"):
        files = gather(prepared(folder / kind, kind))
        for verify in (True, False):
            base = FileBase(
                files=files,
                read=lambda path, verify=verify: batches(path, verify=verify),
                checked=(INDEX, "*.bin") if verify else (INDEX,),
                reason="without verification nobody looks at every byte",
                repair=repair_shards,
            )
            bases.append(base)
    learned = FileBase(
        files=gather(prepared(folder / "learned", "text", trained(["a b", "Ġ t"]))),
        read=lambda path: batches(path, verify=True),
        aim=("tokenizer*.json",),
        checked=("*",),
        reason="",
    )
    return [*bases, learned]


def prepared(folder: Path, kind: Any, tok: Tokenizer | None = None) -> Path:
    """With a tokenizer of the folder's own, or with bytes."""
    rng, splits = np.random.default_rng(0), {}
    for split, count in (("train", 12), ("val", 5)):
        writer = ShardWriter(folder, split, kind=kind, shard_tokens=70)
        for _ in range(count):
            tokens = rng.integers(0, 256, size=12).astype(np.uint16)
            tokens[-1] = 256
            if kind == "text":
                writer.add(tokens)
            else:
                writer.add_example(tokens, np.arange(12) >= 5)
        writer.close()
        splits[split] = writer.finished
    if tok is not None:
        save_tokenizer(tok, folder)
    tok = tok or tokenizer("bytes")
    write_index(folder, Index(kind, tok.name, tok.end_of_text, tok.size, splits, {"settings": {"limit": None}}))
    return folder


def batches(path: Path, *, verify: bool) -> int:
    """What training and validation read from a folder."""
    loader = Loader([Source(path)], rows=4, n_tokens=8, seed=0, verify=verify)
    validation = ValidationSet([Source(path)], rows=4, n_tokens=8, verify=verify)
    loader.check_vocab(260)
    validation.check_vocab(260)
    facts = [(fact.kind, fact.n_tokens, fact.rows_per_epoch, fact.n_excluded) for fact in loader.describe()]
    return zlib.crc32(repr((loader.tokenizer, facts)).encode(), _sum([loader.batch(0), loader.batch(7), *validation]))


def _sum(found: Sequence[Batch]) -> int:
    value = 0
    for batch in found:
        for array in batch:
            value = zlib.crc32(np.ascontiguousarray(array).data, value)
    return value


def repair_shards(files: Files, touched: list[str]) -> Files:
    """Recomputes the checksums of payloads, of headers, in the index and of the index, as far as possible."""
    files, crcs = dict(files), {}
    for name, content in files.items():
        if name.endswith(".bin") and isinstance(content, bytes) and len(content) >= form.HEADER_BYTES:
            fields = form.HEADER.unpack(content[: form.HEADER_BYTES])[2:-1]
            crcs[name] = zlib.crc32(content[form.HEADER_BYTES :])
            files[name] = Header(*fields[:-1], crcs[name]).pack() + content[form.HEADER_BYTES :]
    try:
        record = json.loads(bytes(files[INDEX]))
        for entry in (entry for entries in record["splits"].values() for entry in entries):
            if entry["file"] in touched and entry["file"] in crcs:
                entry["crc32"] = crcs[entry["file"]]
        files[INDEX] = json.dumps(record).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return repair_seals(files, touched)


def repair_seals(files: Files, touched: list[str]) -> Files:
    """Recomputes the checksums that JSON files contain of themselves."""
    files = dict(files)
    for name in (INDEX, JOURNAL):
        try:
            record = json.loads(bytes(files[name]))
            files[name] = json.dumps({**record, "crc32": form._seal(record)}).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
    return files


def journal(folder: Path) -> Sequence[FileBase]:
    """A preparation interrupted by a bad line; the line is fixed, and the same command run again."""
    bases = []
    for kind, lines in (("text", TEXTS), ("examples", [json.dumps(record) for record in RECORDS])):
        good, bad, out = folder / f"{kind}.jsonl", folder / f"{kind}-2.jsonl", folder / kind
        good.write_text("\n".join(lines))
        bad.write_text("}" + lines[0][1:])
        with suppress(ValueError):
            finish((str(good), str(bad)), out)
        files = gather(out)
        assert any(name.endswith(".tail") for name in files), f"no interrupted preparation: {sorted(files)}"
        bad.write_text(lines[0])
        bases.append(
            FileBase(
                files=files,
                read=lambda path, sources=(str(good), str(bad)): finish(sources, path),
                checked=("*",),
                reason="",
                repair=repair_seals,
            )
        )
    return bases


def finish(sources: tuple[str, ...], out: Path) -> int:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        prepare(sources, out=out, tokenizer="bytes", processes=1, val_fraction=0.5, shard_tokens=200)
    found = [shard.tokens for split in ("train", "val") for shard in open_dataset(out, split=split).shards]
    return zlib.crc32(np.concatenate(found).data)


def sources(folder: Path) -> Sequence[FileBase]:
    texts = "\n".join(TEXTS).encode() + b"\n"
    examples = "\n".join(map(json.dumps, RECORDS)).encode() + b"\n"
    contents = {"text.txt": "Plain text, Grüße.\n".encode() * 3, "notes.md": b"# Title\n\nA line.\n"}
    contents |= {"text.jsonl": texts, "examples.jsonl": examples, "more.jsonl": examples}
    contents |= {f"packed.jsonl{ending}": PACKINGS[ending][1](texts) for ending in (".gz", ".xz", ".zst")}
    contents |= {f"records.json{ending}": PACKINGS[ending][1](examples) for ending in (".gz", ".zst")}
    contents |= {"text.parquet": PACKINGS[".parquet"][1](texts), "chats.parquet": PACKINGS[".parquet"][1](_alike())}
    reason = "the text is the user's own"
    single = [FileBase(files={name: data}, at=name, read=encoded, reason=reason) for name, data in contents.items()]
    several = {name: contents[name] for name in ("text.jsonl", "packed.jsonl.gz", "text.parquet")}
    return [*single, FileBase(files=several, read=encoded, reason=reason)]


def _alike() -> bytes:
    """Chats only: the rows of a table have the same columns."""
    return "\n".join(json.dumps({"messages": RECORDS[3]["messages"]}) for _ in range(3)).encode()


def encoded(path: Path) -> int:
    value = 0
    for chunk in read_chunks(find_inputs([str(path)])):
        found = encode_chunk(chunk, tokenizer("bytes"))
        if found.error is not None:
            raise ValueError(found.error)
        value = zlib.crc32(found.tokens.tobytes() + found.mask.tobytes() + found.n_tokens.tobytes(), value)
    return value
