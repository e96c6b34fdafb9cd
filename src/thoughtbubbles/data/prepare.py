"""Text into shards of tokens: many processes tokenize, one reads and writes.

    sources ─read─▶ chunks of ~1 MB ─▶ processes: records, tokens, hash ─in order─▶ train or val ─▶ shards, journal

The order of documents is that of the sources, and each document's side follows from its text alone, so the result does
not depend on the number of processes, nor on interruptions: the same command, given again, goes on where it stopped.
Only a few chunks for each process are on their way at any time; memory holds them and the two shards being filled.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from thoughtbubbles.data.encode import Encoded, encode_chunk
from thoughtbubbles.data.output import SPLITS, Output, finished
from thoughtbubbles.data.progress import Progress
from thoughtbubbles.data.shards import Index
from thoughtbubbles.data.sources import Chunk, find_inputs, fingerprint, read_chunks
from thoughtbubbles.data.tokenizer import tokenizer as find_tokenizer
from thoughtbubbles.files import locked

AHEAD = 3  # chunks on their way for each process
SAVE_SECONDS = 10.0  # at most so much work is done twice after an interruption
AGAIN = "run the same command again, and it goes on where it stopped"


def prepare(
    sources: tuple[str, ...],
    /,
    *,
    out: Path,
    tokenizer: str = "gpt2",
    processes: int | None = None,
    held_out: float = 0.005,
    shard_tokens: int = 2**27,
    limit: int | None = None,
) -> Index:
    """Turn text, questions or chats into a folder of token shards that a model can be trained on.

    The same command, given again after an interruption, goes on where it stopped.

    Args:
        sources: Files (.txt, .md, .jsonl, .jsonl.gz, .jsonl.xz, .jsonl.zst, .parquet), folders of them, or public
            datasets by name: openwebtext, pes2o, fineweb, smoltalk, mmlu, gsm8k, gsm8k-aug.
        out: The folder to write.
        tokenizer: gpt2 or bytes.
        processes: Processes that tokenize; as many as there are processors by default.
        held_out: Share of the documents to hold out for validation. Equal documents stay on one side.
        shard_tokens: Tokens in a file; while it is filled, memory holds 2 bytes for each.
        limit: Stop after this many documents.
    """
    _check(processes=processes, held_out=held_out, shard_tokens=shard_tokens, limit=limit)
    tok = find_tokenizer(tokenizer)
    inputs = find_inputs(sources)
    settings = {
        "sources": list(sources),
        "inputs": fingerprint(inputs),
        "tokenizer": tokenizer,
        "held_out": held_out,
        "shard_tokens": shard_tokens,
        "limit": limit,
    }
    processes = processes or _processors()
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out, doing="preparing"):
        if (index := finished(out, settings)) is not None:
            print(f"{out} is prepared already; nothing to do")
        else:
            with _writing(out):
                output = Output(out, settings)
            with Progress(inputs, resumed=output.documents if output.resumed else None) as progress:
                _fill(
                    output,
                    read_chunks(inputs, at=output.state.place[0], start=output.state.place[1]),
                    tokenizer,
                    processes=processes,
                    limit=limit,
                    progress=progress,
                    out=out,
                )
            if not output.documents:
                output.abandon()
                raise ValueError(f"sources = {' '.join(sources)}: there is no document in them; give others")
            with _writing(out):
                index = output.finish(tok)
    _summarize(out, index)
    return index


def _check(*, processes: int | None, held_out: float, shard_tokens: int, limit: int | None) -> None:
    if processes is not None and processes < 1:
        raise ValueError(f"processes = {processes}: give 1 or more, or leave it out for one a processor")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out = {held_out}: give a share of the documents from 0 to below 1, e.g. 0.005")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens = {shard_tokens}: give at least 1 token a shard, e.g. {2**27}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: give 1 document or more, or leave it out for all")


def _fill(
    output: Output,
    chunks: Iterator[Chunk],
    tokenizer: str,
    *,
    processes: int,
    limit: int | None,
    progress: Progress,
    out: Path,
) -> None:
    """Takes documents into the folder until the sources or the limit end."""
    left = sys.maxsize if limit is None else limit - output.documents
    saved, shards, place = time.monotonic(), output.n_shards, output.state.place
    with contextlib.closing(output), contextlib.closing(_encode(chunks, tokenizer, processes)) as encoded:
        try:
            for chunk, found in encoded if left else ():
                if found.error is not None and len(found.key) < left:
                    with _writing(out):
                        output.save(place)
                    raise ValueError(found.error)
                with _writing(out):
                    output.add(_first(found, left), chunk.name)
                    left -= len(found.key)
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
                f"a process that tokenizes has died, killed perhaps because memory ran out; nothing is lost: {AGAIN} "
                f"(with fewer than --processes {processes} if memory is short)"
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


def _encode(chunks: Iterable[Chunk], tokenizer: str, processes: int) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Each chunk with its tokens, in order; one process does it right here."""
    if processes == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(chunk, tokenizer)
        return
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    # Fresh processes rather than copies of this one, whose threads and open files a copy would share.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer,),
    )
    try:
        for chunk in chunks:
            waiting.append((chunk._replace(payload=None), pool.submit(encode_chunk, chunk, tokenizer)))
            if len(waiting) > AHEAD * processes:
                chunk, future = waiting.popleft()
                yield chunk, future.result()
        for chunk, future in waiting:
            yield chunk, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(tokenizer: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    find_tokenizer(tokenizer)


def _end_with_parent() -> None:
    """A parent that is killed cannot tell its workers, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"writing to {out} failed ({error.strerror or error}): make room or give another folder; what is complete "
            f"is kept: {AGAIN}"
        ) from error


def _processors() -> int:
    """Those that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _summarize(out: Path, index: Index) -> None:
    def row(name: str, *numbers: Any) -> str:
        return f"{name:<8}" + "".join(f"{n:>18,}" if isinstance(n, int) else f"{n:>18}" for n in numbers)

    print(f"{out}: {'plain text' if index.kind == 'text' else 'examples'}, tokenizer {index.tokenizer}")
    print(row("", "documents", "tokens", "bytes of text", "shards"))
    for split in SPLITS:
        shards = index.splits[split]
        tokens = sum(shard.n_tokens for shard in shards)
        print(row(split, index.notes["documents"][split], tokens, index.notes["bytes"][split], len(shards)))
    if index.notes["skipped"]:
        print(f"{index.notes['skipped']:,} records were left out: there was nothing to learn in them")
    if not index.splits["val"]:
        print("nothing is held out: for that, give two different documents or more, and held_out above 0")
    fitting = {"bytes": "tiny", "gpt2": "150m-r2-owt"}[index.tokenizer]
    print(f"next: thoughtbubbles train {fitting} --data.mixture {out}")
