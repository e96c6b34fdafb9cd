"""Tokenizes text into shards: one process reads and writes, the others tokenize.

    sources ─read─▶ chunks of ~1 MB ─▶ processes: records, tokens, hash ─in order─▶ train or val ─▶ shards, journal

Documents keep the order of the sources, and the split of a document depends only on its text, or on its source if a
validation set is given. So the result depends neither on the number of processes nor on interruptions: the same command
resumes where it stopped. A validation set is read first, so that its errors show early. Only a few chunks per process
are in flight; memory holds them and the two shards being filled.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from thoughtbubbles.data.encode import Encoded, encode_chunk
from thoughtbubbles.data.output import OutputFolder, finished
from thoughtbubbles.data.progress import PrepareProgress, VocabularyProgress
from thoughtbubbles.data.shards import INDEX, Index, read_index
from thoughtbubbles.data.sources import Chunk, Input, find_inputs, fingerprint, read_chunks
from thoughtbubbles.data.summary import VOCAB_SIZE, summarize
from thoughtbubbles.data.tokenizer import NAMED, TRAINED, Tokenizer, read_tokenizer, save_tokenizer, saved_tokenizer
from thoughtbubbles.data.tokenizer import tokenizer as named_tokenizer
from thoughtbubbles.data.vocabulary import LEAST, MOST, train_vocabulary, training_texts
from thoughtbubbles.data.workers import in_order, processors
from thoughtbubbles.files import SHIPPED, check_folder, locked, named, reason, shipped_model, short_name

SAVE_SECONDS = 10.0  # the most work that an interruption can lose
VAL_FRACTION = 0.005  # fraction of the documents, if no validation set is given
MOST_PROCESSES = 1024
MOST_SHARD_TOKENS = 1 << 32
AGAIN = "run the same command again to resume"


def prepare(
    sources: tuple[str, ...],
    /,
    *,
    out: Path,
    tokenizer: str = "gpt2",
    vocab_size: int | None = None,
    processes: int | None = None,
    val: tuple[str, ...] = (),
    val_fraction: float | None = None,
    shard_tokens: int = 2**27,
    limit: int | None = None,
) -> Index:
    """Tokenize text, questions or chats into a folder of token shards for training.

    After an interruption, run the same command again to resume.

    Args:
        sources: Files (.txt, .md, .jsonl, .jsonl.gz, .jsonl.xz, .jsonl.zst, .parquet), folders of them, or public
            datasets by name: openwebtext, pes2o, fineweb, smoltalk, mmlu, gsm8k, gsm8k-aug.
        out: The folder to write.
        tokenizer: gpt2; bytes; bubbles-7m, that of the model in the package; bpe, to first train a vocabulary on these
            sources (byte-pair encoding of bytes, kept in the folder); or a folder that has a tokenizer: a prepared
            one, or a model's.
        vocab_size: Ids of a vocabulary to train (--tokenizer bpe). Default: 8192.
        processes: Number of processes that tokenize. Default: one per processor.
        val: The validation set: files, folders or names whose documents all become the split val. The other sources
            are then all training data.
        val_fraction: Fraction of the documents used as validation data if --val is not given. Default: 0.005; 0 for
            none. Equal documents are always in the same split.
        shard_tokens: Tokens per file; memory holds 2 bytes per token while it is filled.
        limit: Stop after this many documents, not counting those of --val.
    """
    _check(sources=sources, val=val, val_fraction=val_fraction)
    _check_numbers(processes=processes, shard_tokens=shard_tokens, limit=limit)
    check_folder(out, option="--out")
    tok, vocab_size = _find_tokenizer(tokenizer, vocab_size)
    train_inputs, val_inputs = find_inputs(sources), find_inputs(val) if val else []
    _refuse_overlap(train_inputs, val_inputs)
    inputs = [*val_inputs, *train_inputs]
    settings = {
        "sources": list(sources),
        "val": list(val),
        "inputs": fingerprint(inputs),
        "tokenizer": TRAINED if tok is None else tok.name,
        "vocab_size": vocab_size,
        "val_fraction": (0.0 if val else VAL_FRACTION) if val_fraction is None else val_fraction,
        "shard_tokens": shard_tokens,
        "limit": limit,
    }
    with contextlib.ExitStack() as stack:
        with _writing(out):
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out, doing="preparing"))
            index = finished(out, settings)
        if index is not None:
            print(f"{out} is already prepared; nothing to do")
        else:
            index = _run(out, settings, inputs, tok, n_val=len(val_inputs), processes=processes or processors())
    summarize(out, index)
    return index


def _find_tokenizer(given: str, vocab_size: int | None) -> tuple[Tokenizer | None, int | None]:
    """The tokenizer, or None and the size of the vocabulary to train."""
    if given == TRAINED:
        size = VOCAB_SIZE if vocab_size is None else vocab_size
        if type(size) is not int or not LEAST <= size <= MOST:
            raise ValueError(f"vocab_size = {short_name(repr(size))}: give a whole number from {LEAST} to {MOST:,}")
        return None, size
    if vocab_size is not None:
        raise ValueError(
            f"vocab_size = {short_name(repr(vocab_size))}: only for a vocabulary that is trained here (--tokenizer "
            f"{TRAINED}); leave it out"
        )
    if isinstance(given, str) and given:
        if given in NAMED:
            return named_tokenizer(given), None
        with named(f"tokenizer = {short_name(repr(given))}", "give a folder that has a tokenizer"):
            if Path(given).is_dir():
                return _folder_tokenizer(Path(given)), None
        if given == SHIPPED:
            return read_tokenizer(shipped_model()), None
    raise ValueError(
        f"tokenizer = {short_name(repr(given))}: choose from {', '.join((*NAMED, SHIPPED))} and {TRAINED} (trains "
        "one), or give a folder that has a tokenizer"
    )


def _folder_tokenizer(folder: Path) -> Tokenizer:
    if os.path.lexists(folder / INDEX):  # a prepared folder has no files for a tokenizer with a name
        return saved_tokenizer(read_index(folder).tokenizer, folder)
    return read_tokenizer(folder)


def _check(*, sources: tuple[str, ...], val: tuple[str, ...], val_fraction: float | None) -> None:
    for name, value in (("sources", sources), ("val", val)):
        if not (isinstance(value, tuple | list) and all(isinstance(source, str) for source in value)):
            raise ValueError(f"{name} = {short_name(repr(value))}: give a tuple of files, folders or names as strings")
    if val_fraction is None:
        return
    if isinstance(val_fraction, bool) or not isinstance(val_fraction, int | float) or not 0 <= val_fraction < 1:
        raise ValueError(
            f"val_fraction = {short_name(repr(val_fraction))}: give a fraction of the documents from 0 to below 1, "
            f"e.g. {VAL_FRACTION}"
        )
    if val:
        raise ValueError(
            f"val_fraction = {val_fraction} and val = {short_name(' '.join(val))}: with --val, all other sources are "
            "training data; leave one of the two out"
        )


def _check_numbers(*, processes: int | None, shard_tokens: int, limit: int | None) -> None:
    for name, value, most, remedy in (
        ("processes", processes, MOST_PROCESSES, "give 1 or more, up to {:,}, or leave it out for one per processor"),
        ("shard_tokens", shard_tokens, MOST_SHARD_TOKENS, f"give 1 or more tokens, up to {{:,}}, e.g. {2**27}"),
        ("limit", limit, sys.maxsize, "give 1 or more documents, up to {:,}, or leave it out for all"),
    ):
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise ValueError(f"{name} = {short_name(repr(value))}: {remedy.format(most)}")


def _refuse_overlap(train: Sequence[Input], val: Sequence[Input]) -> None:
    def places(inputs: Sequence[Input]) -> dict[str, str]:
        return {os.path.realpath(found.path) if found.path else found.name: found.name for found in inputs}

    if both := places(train).keys() & places(val).keys():
        raise ValueError(
            f"val = {short_name(places(val)[min(both)])}: is also a source of training data, so its validation loss "
            "would be meaningless; move it out of their folder, or give another"
        )


def _run(
    out: Path, settings: dict[str, Any], inputs: Sequence[Input], tok: Tokenizer | None, *, n_val: int, processes: int
) -> Index:
    with _writing(out):
        output = OutputFolder(out, settings)
        tok = tok or output.tokenizer()
    if tok is None:
        tok = _train_tokenizer(settings, inputs[n_val:])
    if tok.name not in NAMED:
        with _writing(out):
            save_tokenizer(tok, out)
    with PrepareProgress(inputs, resumed=output.documents if output.resumed else None) as progress:
        _fill(
            output,
            read_chunks(inputs, at=output.state.place[0], start=output.state.place[1]),
            tok,
            processes=processes,
            n_val=n_val,
            limit=settings["limit"],
            progress=progress,
            out=out,
        )
    for split, given in (("val", settings["val"]), ("train", settings["sources"])):
        if given and not output.state.counts[split].documents:
            output.abandon()
            name = "val" if split == "val" else "sources"
            raise ValueError(f"{name} = {short_name(' '.join(given))}: contains no documents; give other sources")
    with _writing(out):
        return output.finish(tok)


def _train_tokenizer(settings: dict[str, Any], inputs: Sequence[Input]) -> Tokenizer:
    with VocabularyProgress(inputs) as progress:
        texts = training_texts(
            inputs, val_fraction=settings["val_fraction"], limit=settings["limit"], report=progress.update
        )
        return train_vocabulary(texts, size=settings["vocab_size"])


def _fill(
    output: OutputFolder,
    chunks: Iterator[Chunk],
    tok: Tokenizer,
    *,
    processes: int,
    n_val: int,
    limit: int | None,
    progress: PrepareProgress,
    out: Path,
) -> None:
    """Adds documents to the folder until the sources or the limit end. The first `n_val` inputs go to val."""
    counted = output.state.counts["train"].documents if n_val else output.documents
    left = sys.maxsize if limit is None else limit - counted
    saved, shards, place = time.monotonic(), output.n_shards, output.state.place
    name = f"--processes {processes}"
    encoded = in_order(encode_chunk, chunks, tok, processes=processes, name=name, kept=_without_payload)
    with contextlib.closing(output), contextlib.closing(encoded):
        try:
            for chunk, found in encoded if left else ():
                split = None if not n_val else "val" if chunk.input < n_val else "train"
                if split == "train" and not output.state.counts["val"].documents:
                    return  # an empty validation set is an error: report it now, not after hours
                room = sys.maxsize if split == "val" else left
                if found.error is not None and len(found.key) < room:
                    with _writing(out):
                        output.save(place)
                    raise ValueError(found.error)
                with _writing(out):
                    output.add(_first(found, room), chunk.name, split=split)
                    left -= 0 if split == "val" else len(found.key)
                    if left <= 0:
                        return
                    place = (chunk.input, chunk.stop)
                    if output.n_shards > shards or time.monotonic() - saved > SAVE_SECONDS:
                        output.save(place)
                        saved, shards = time.monotonic(), output.n_shards
                progress.update(chunk, output.state)
        except BrokenProcessPool:
            with _writing(out):
                output.save(place)
            raise ValueError(
                f"a tokenizing process died, perhaps killed because memory ran out; nothing is lost: {AGAIN} "
                f"(with fewer than {name} if memory is short)"
            ) from None


def _first(found: Encoded, n: int) -> Encoded:
    """The first n documents."""
    if len(found.key) <= n:
        return found
    tokens = int(found.n_tokens[:n].sum())
    return found._replace(
        tokens=found.tokens[:tokens],
        mask=found.mask[:tokens],
        n_tokens=found.n_tokens[:n],
        n_bytes=found.n_bytes[:n],
        key=found.key[:n],
    )


def _without_payload(chunk: Chunk) -> Chunk:
    return chunk._replace(payload=None)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"writing to {short_name(out)} failed ({reason(error)}): free disk space or give another folder; complete "
            f"shards are kept: {AGAIN}"
        ) from error
