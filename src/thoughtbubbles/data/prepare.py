"""Text into shards of tokens: many processes tokenize, one reads and writes.

    sources ─read─▶ chunks of ~1 MB ─▶ processes: records, tokens, hash ─in order─▶ train or val ─▶ shards, journal

The order of documents is that of the sources, and each document's side follows from its text alone, or from its source
where a validation set is given, so the result does not depend on the number of processes, nor on interruptions: the
same command, given again, goes on where it stopped. A validation set comes first: what is wrong with it shows at once.
Only a few chunks for each process are on their way at any time; memory holds them and the two shards being filled.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shlex
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from thoughtbubbles.data.encode import Encoded, encode_chunk
from thoughtbubbles.data.output import SPLITS, Output, finished
from thoughtbubbles.data.progress import Progress
from thoughtbubbles.data.shards import SMALL_VALIDATION, Index
from thoughtbubbles.data.sources import Chunk, Input, find_inputs, fingerprint, read_chunks
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.data.tokenizer import tokenizer as find_tokenizer
from thoughtbubbles.files import locked, named, reason, short_name

PATIENCE = 5.0  # seconds without a result, after which somebody looks whether all processes live
AHEAD = 3  # chunks on their way for each process
SAVE_SECONDS = 10.0  # at most so much work is done twice after an interruption
VAL_FRACTION = 0.005  # share of the documents, where no validation set is given
MOST_PROCESSES = 1024
MOST_SHARD_TOKENS = 1 << 32
MUCH = 10**8  # tokens: enough for one of the paper's models
NEXT = {  # a recipe for the tokens, its context length, and from how many tokens on
    "bytes": (("tiny", 128, 0),),
    "gpt2": (("150m-r2-owt", 512, MUCH), ("small-gpt2", 256, 0)),
}
AGAIN = "run the same command again, and it goes on where it stopped"


def prepare(
    sources: tuple[str, ...],
    /,
    *,
    out: Path,
    tokenizer: str = "gpt2",
    processes: int | None = None,
    val: tuple[str, ...] = (),
    val_fraction: float | None = None,
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
        val: The validation set: files, folders or names whose documents become the split val, all of them, as they are.
            The other sources are all training data then.
        val_fraction: Fraction of the documents that is validation data where no --val is given; 0.005 by default, 0 for
            none. Equal documents stay on one side.
        shard_tokens: Tokens in a file; while it is filled, memory holds 2 bytes for each.
        limit: Stop after this many documents, not counting those of --val.
    """
    _check(sources=sources, val=val, val_fraction=val_fraction)
    _check_numbers(processes=processes, shard_tokens=shard_tokens, limit=limit)
    tok = find_tokenizer(tokenizer)
    train_inputs, val_inputs = find_inputs(sources), find_inputs(val) if val else []
    _refuse_overlap(train_inputs, val_inputs)
    inputs = [*val_inputs, *train_inputs]
    settings = {
        "sources": list(sources),
        "val": list(val),
        "inputs": fingerprint(inputs),
        "tokenizer": tokenizer,
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
            print(f"{out} is prepared already; nothing to do")
        else:
            index = _run(out, settings, inputs, tok, n_val=len(val_inputs), processes=processes or _processors())
    _summarize(out, index)
    return index


def _check(*, sources: tuple[str, ...], val: tuple[str, ...], val_fraction: float | None) -> None:
    for name, value in (("sources", sources), ("val", val)):
        if not (isinstance(value, tuple | list) and all(isinstance(source, str) for source in value)):
            raise ValueError(f"{name} = {short_name(repr(value))}: give a tuple of files, folders or names as text")
    if val_fraction is None:
        return
    if isinstance(val_fraction, bool) or not isinstance(val_fraction, int | float) or not 0 <= val_fraction < 1:
        raise ValueError(
            f"val_fraction = {short_name(repr(val_fraction))}: give a fraction of the documents from 0 to below 1, "
            f"e.g. {VAL_FRACTION}"
        )
    if val:
        raise ValueError(
            f"val_fraction = {val_fraction} and val = {short_name(' '.join(val))}: with --val all else is training "
            "data; leave one of the two out"
        )


def _check_numbers(*, processes: int | None, shard_tokens: int, limit: int | None) -> None:
    for name, value, most, remedy in (
        ("processes", processes, MOST_PROCESSES, "give 1 or more, up to {:,}, or leave it out for one a processor"),
        ("shard_tokens", shard_tokens, MOST_SHARD_TOKENS, f"give at least 1 token a shard, up to {{:,}}, e.g. {2**27}"),
        ("limit", limit, sys.maxsize, "give 1 document or more, up to {:,}, or leave it out for all"),
    ):
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise ValueError(f"{name} = {short_name(repr(value))}: {remedy.format(most)}")


def _refuse_overlap(train: Sequence[Input], val: Sequence[Input]) -> None:
    def places(inputs: Sequence[Input]) -> dict[str, str]:
        return {os.path.realpath(found.path) if found.path else found.name: found.name for found in inputs}

    if both := places(train).keys() & places(val).keys():
        raise ValueError(
            f"val = {short_name(places(val)[min(both)])}: it is among the sources to train on, too, so the loss on it "
            "would tell nothing; move it out of their folder, or give another"
        )


def _run(
    out: Path, settings: dict[str, Any], inputs: Sequence[Input], tok: Tokenizer, *, n_val: int, processes: int
) -> Index:
    with _writing(out):
        output = Output(out, settings)
    with Progress(inputs, resumed=output.documents if output.resumed else None) as progress:
        _fill(
            output,
            read_chunks(inputs, at=output.state.place[0], start=output.state.place[1]),
            tok.name,
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
            raise ValueError(f"{name} = {short_name(' '.join(given))}: there is no document in them; give others")
    with _writing(out):
        return output.finish(tok)


def _fill(
    output: Output,
    chunks: Iterator[Chunk],
    tokenizer: str,
    *,
    processes: int,
    n_val: int,
    limit: int | None,
    progress: Progress,
    out: Path,
) -> None:
    """Takes documents into the folder until the sources or the limit end. The first `n_val` inputs go to val."""
    counted = output.state.counts["train"].documents if n_val else output.documents
    left = sys.maxsize if limit is None else limit - counted
    saved, shards, place = time.monotonic(), output.n_shards, output.state.place
    with contextlib.closing(output), contextlib.closing(_encode(chunks, tokenizer, processes)) as encoded:
        try:
            for chunk, found in encoded if left else ():
                split = None if not n_val else "val" if chunk.input < n_val else "train"
                if split == "train" and not output.state.counts["val"].documents:
                    return  # a validation set without a document is an error, and not after hours
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
    with named(f"--processes {processes}", "give fewer"):
        pool = ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(tokenizer,),
        )
    try:
        for chunk in chunks:
            with named(f"--processes {processes}", "give fewer"):  # a process is started when there is work for it
                waiting.append((chunk._replace(payload=None), pool.submit(encode_chunk, chunk, tokenizer)))
            if len(waiting) > AHEAD * processes:
                chunk, future = waiting.popleft()
                yield chunk, _result(pool, future)
        for chunk, future in waiting:
            yield chunk, _result(pool, future)
    finally:
        pool.shutdown(cancel_futures=True)


def _result(pool: ProcessPoolExecutor, future: Future[Encoded]) -> Encoded:
    """A process that is killed while it sends leaves half a message, for whose rest the pool would wait forever."""
    while True:
        try:
            return future.result(timeout=PATIENCE)
        except TimeoutError:
            processes = list((pool._processes or {}).values())
            if all(process.is_alive() for process in processes):
                continue
        for process in processes:
            process.kill()
        queue: Any = pool._result_queue
        queue._writer.close()  # the last end that could be written to: now the pool sees that nothing more will come
        raise BrokenProcessPool("a process died while it sent its result")


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
            f"writing to {short_name(out)} failed ({reason(error)}): make room or give another folder; what is "
            f"complete is kept: {AGAIN}"
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
    n_val = sum(shard.n_tokens for shard in index.splits["val"])
    if not n_val:
        print(
            "there is no split val, so training will have no validation loss; for one, give --val, or two different "
            "documents or more and --val-fraction above 0"
        )
    elif n_val < SMALL_VALIDATION:
        print(
            f"val is very small (fewer than {SMALL_VALIDATION:,} tokens): its loss will depend on the choice of "
            f"documents; give {'more' if index.notes['settings'].get('val') else '--val or a larger --val-fraction'}"
        )
    print(f"next: {_next_command(out, index)}")


def _next_command(out: Path, index: Index) -> str:
    n_tokens = sum(shard.n_tokens for shard in index.splits["train"])
    recipe, block_size = next((name, size) for name, size, least in NEXT[index.tokenizer] if n_tokens >= least)
    words = ["thoughtbubbles", "train", recipe, "--data.mixture", f"{out}=1" if "=" in str(out) else str(out)]
    if index.kind == "text" and n_tokens <= block_size:  # not one window of the recipe's own length
        words += ["--model.block-size", str(1 << (n_tokens - 1).bit_length() - 1)]
    return shlex.join(words)
