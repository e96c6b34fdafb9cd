"""Preparation: the same bytes for any number of processes and after any interruption, clear messages for errors."""

import json
import lzma
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thoughtbubbles.cli import main
from thoughtbubbles.data.loader import Loader, Source
from thoughtbubbles.data.prepare import NEXT, prepare
from thoughtbubbles.data.shards import open_dataset, write_index
from thoughtbubbles.data.tokenizer import tokenizer

RUN = """
import sys
from pathlib import Path
from thoughtbubbles.data import prepare, sources
if __name__ == "__main__":
    sources.CHUNK_BYTES = {chunk_bytes}
    {before}
    try:
        prepare.prepare(({source!r},), out=Path({out!r}), {options})
    except ValueError as error:
        sys.exit(f"prepare: {{error}}")
"""


def command(source, out, *, chunk_bytes=1 << 20, before="", **options):
    """In a separate process, to be killed."""
    options = ", ".join(f"{name}={value!r}" for name, value in options.items())
    code = RUN.format(source=str(source), out=str(out), options=options, chunk_bytes=chunk_bytes, before=before)
    return [sys.executable, "-c", code]


def run(*arguments, **options):
    return subprocess.run(command(*arguments, **options), capture_output=True, text=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def random_texts(n, *, words=120, seed=0):
    generator = random.Random(seed)
    pool = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(1, 9))) for _ in range(2000)]
    return [" ".join(generator.choices(pool, k=generator.randint(1, 2 * words))) for _ in range(n)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Some seconds of work."""
    texts = random_texts(4000, words=150)
    return write_lines(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", [{"text": text} for text in texts])


CORPUS_OPTIONS = {"shard_tokens": 150_000, "val_fraction": 0.01}


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "prepared"
    prepare((str(corpus),), out=out, processes=1, **CORPUS_OPTIONS)
    return contents(out)


def documents(out, split):
    tokens = np.concatenate([shard.tokens for shard in open_dataset(out, split=split).shards])
    assert tokens[-1] == 256
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    return [part[:-1].astype(np.uint8).tobytes().decode() for part in parts]


def test_text(tmp_path, capsys):
    texts = random_texts(400)
    texts += texts[:200]  # duplicates
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in [*texts, ""]])
    out = tmp_path / "out"
    index = prepare((str(source),), out=out, tokenizer="bytes", processes=1, val_fraction=0.1, shard_tokens=50_000)
    assert (index.kind, index.tokenizer, index.end_of_text, index.vocab_size) == ("text", "bytes", 256, 257)
    assert [shard.n_tokens for shard in index.splits["train"][:-1]] == [50_000] * (len(index.splits["train"]) - 1)

    train, val = documents(out, "train"), documents(out, "val")
    assert not set(train) & set(val)  # duplicates are in the same split
    held = set(val)
    assert train == [text for text in texts if text not in held]
    assert val == [text for text in texts if text in held]
    assert 0.05 < len(val) / len(texts) < 0.15
    assert index.notes["documents"] == {"train": len(train), "val": len(val)}
    assert index.notes["bytes"] == {"train": sum(map(len, train)), "val": sum(map(len, val))}

    shown = capsys.readouterr().out
    assert f"train{len(train):>21,}{sum(map(len, train)) + len(train):>18,}" in shown
    assert "1 records were skipped: they contain nothing to learn" in shown
    assert f"next: thoughtbubbles train tiny --data.mixture {out}" in shown


def test_examples(tmp_path):
    records = [{"question": f"{i} + {i}?", "answer": f"<<{i}+{i}={2 * i}>>#### {2 * i}"} for i in range(300)]
    source, out = write_lines(tmp_path / "a.jsonl", records), tmp_path / "out"
    index = prepare((str(source),), out=out, processes=1, val_fraction=0.1, shard_tokens=1000)
    assert index.kind == "examples"
    assert len(index.splits["train"]) > 2
    tok, said = tokenizer("gpt2"), []
    for split in ("train", "val"):
        for shard in open_dataset(out, split=split).shards:
            for a, b in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
                tokens, mask = shard.tokens[a:b], shard.mask[a:b] == 1
                number = int(tok.decode(tokens[~mask].tolist()).split()[0])
                assert tok.decode(tokens.tolist()) == f"{number} + {number}?\n#### {2 * number}<|endoftext|>"
                assert tok.decode(tokens[mask].tolist()) == f"#### {2 * number}<|endoftext|>"
                said.append(number)
    assert sorted(said) == list(range(300))


@pytest.mark.parametrize("val_fraction", [1e-9, 0.999999])
def test_both_splits_have_a_document(val_fraction, tmp_path):
    for name, texts, expected in [
        ("two", ["a", "a", "b", "a", "b"], {"train": 3, "val": 2}),
        ("one", ["a", "a"], {"train": 2, "val": 0}),
    ]:
        source = write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
        index = prepare((str(source),), out=tmp_path / name, tokenizer="bytes", processes=1, val_fraction=val_fraction)
        assert index.notes["documents"] == expected


def test_no_validation_on_demand(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in random_texts(50)])
    index = prepare((str(source),), out=tmp_path / "out", tokenizer="bytes", processes=1, val_fraction=0.0)
    assert index.notes["documents"] == {"train": 50, "val": 0}
    shown = capsys.readouterr().out
    assert "there is no split val, so training will have no validation loss; to get one, give --val" in shown
    assert f"next: thoughtbubbles train tiny --data.mixture {tmp_path / 'out'}\n" in shown


def test_the_same_bytes_for_any_number_of_processes(corpus, uninterrupted, tmp_path):
    done = run(corpus, tmp_path / "out", processes=2, chunk_bytes=100_000, **CORPUS_OPTIONS)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == uninterrupted
    assert {name.split("-")[0] for name in uninterrupted} == {"index.json", "train", "val"}


def test_limit(tmp_path):
    texts = random_texts(100)
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    with source.open("a") as file:
        file.write("broken\n")
    out = tmp_path / "out"
    index = prepare((str(source),), out=out, tokenizer="bytes", processes=1, limit=100)
    assert sum(index.notes["documents"].values()) == 100
    index = prepare((str(source),), out=tmp_path / "less", tokenizer="bytes", processes=1, limit=7)
    assert documents(tmp_path / "less", "train") + documents(tmp_path / "less", "val") == [
        texts[0],
        *texts[2:7],
        texts[1],
    ]
    with pytest.raises(ValueError, match=r"a.jsonl, line 101: not JSON"):
        prepare((str(source),), out=tmp_path / "more", tokenizer="bytes", processes=1, limit=101)


# --- a given validation set -----------------------------------------------------------------------


def test_a_validation_set_as_it_is(tmp_path, capsys):
    """All its documents, including duplicates and in order, and nothing of the other sources."""
    texts, own = random_texts(60), random_texts(9, seed=1)
    own += own[:2]
    train = write_lines(tmp_path / "train.jsonl", [{"text": text} for text in [*texts, *texts[:5]]])
    (tmp_path / "val").mkdir()
    write_lines(tmp_path / "val" / "a.jsonl", [{"text": text} for text in own[:4]])
    write_lines(tmp_path / "val" / "b.jsonl", [{"text": text} for text in own[4:]])
    last = tmp_path / "last.txt"
    last.write_text("the last")
    val, options = (str(tmp_path / "val"), str(last)), {"tokenizer": "bytes", "processes": 1, "shard_tokens": 4000}
    out = tmp_path / "out"
    index = prepare((str(train),), out=out, val=val, **options)
    assert documents(out, "train") == [*texts, *texts[:5]]
    assert documents(out, "val") == [*own, "the last"]
    assert index.notes["documents"] == {"train": 65, "val": 12}
    assert index.notes["settings"]["val"] == list(val)
    assert index.notes["settings"]["val_fraction"] == 0
    assert "val is very small (fewer than 10,000 tokens)" in capsys.readouterr().out

    assert prepare((str(train),), out=out, val=val, **options) == index
    with pytest.raises(ValueError, match=r"a prepared dataset with other settings \(val = \['.*last.txt'\]\)"):
        prepare((str(train),), out=out, val=val[:1], **options)
    with pytest.raises(ValueError, match=r"other settings \(val = \['.*last.txt'\], val_fraction = 0.0\)"):
        prepare((str(train),), out=out, **options)
    last.write_text("other words")
    with pytest.raises(ValueError, match="of the same sources, but their files have changed since"):
        prepare((str(train),), out=out, val=val, **options)


def test_a_validation_set_has_the_same_bytes_for_any_number_of_processes(tmp_path):
    train = write_lines(tmp_path / "train.jsonl", [{"text": text} for text in random_texts(60)])
    val = write_lines(tmp_path / "val.jsonl", [{"text": text} for text in random_texts(30, seed=1)])
    options = {"val": (str(val),), "tokenizer": "bytes", "shard_tokens": 10_000, "limit": 50}
    done = run(train, tmp_path / "two", chunk_bytes=2000, processes=2, **options)
    assert done.returncode == 0, done.stderr
    prepare((str(train),), out=tmp_path / "one", processes=1, **options)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert len(contents(tmp_path / "one")) > 4


def test_a_limit_does_not_count_the_validation_set(tmp_path):
    train = write_lines(tmp_path / "train.jsonl", [{"text": text} for text in random_texts(20)])
    val = write_lines(tmp_path / "val.jsonl", [{"text": text} for text in random_texts(9, seed=1)])
    index = prepare((str(train),), out=tmp_path / "out", val=(str(val),), tokenizer="bytes", processes=1, limit=7)
    assert index.notes["documents"] == {"train": 7, "val": 9}
    assert documents(tmp_path / "out", "train") == random_texts(20)[:7]


def test_a_validation_set_of_examples(tmp_path):
    records = [{"question": f"{i}?", "answer": "same"} for i in range(30)]
    train, val = write_lines(tmp_path / "train.jsonl", records), write_lines(tmp_path / "val.jsonl", records[:3])
    index = prepare((str(train),), out=tmp_path / "out", val=(str(val),), tokenizer="bytes", processes=1)
    assert (index.kind, index.notes["documents"]) == ("examples", {"train": 30, "val": 3})
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ValueError, match=r"train.jsonl: found questions or chats with answers after"):
        prepare((str(train),), out=tmp_path / "no", val=(str(tmp_path / "text.txt"),), tokenizer="bytes", processes=1)


def test_a_validation_set_that_would_not_be_one(tmp_path):
    (tmp_path / "data").mkdir()
    train = write_lines(tmp_path / "data" / "train.jsonl", [{"text": "a"}])
    val = write_lines(tmp_path / "data" / "val.jsonl", [{"text": "b"}])
    empty = write_lines(tmp_path / "empty.jsonl", [{"text": ""}])
    link = tmp_path / "link.jsonl"
    link.symlink_to(val)
    for sources, given, words in [
        (tmp_path / "data", val, r"val = .*val.jsonl: is also a source of training data"),
        (tmp_path / "data", link, r"val = .*link.jsonl: is also a source"),
        ("gsm8k", "gsm8k", r"val = gsm8k: is also a source"),
        (train, tmp_path / "gone.jsonl", r"gone.jsonl is not an existing file or folder"),
        (train, empty, r"val = .*empty.jsonl: contains no documents; give other sources"),
        (empty, val, r"sources = .*empty.jsonl: contains no documents; give other sources"),
    ]:
        with pytest.raises(ValueError, match=words):
            prepare(
                (str(sources),),
                out=tmp_path / "out",
                val=(str(given),),
                tokenizer="bytes",
                processes=1,
                shard_tokens=1,
            )
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"val_fraction = 0.1 and val = .*val.jsonl: .*leave one of the two out"):
        prepare((str(train),), out=tmp_path / "out", val=(str(val),), val_fraction=0.1)


def test_an_empty_validation_set_is_reported_before_the_long_work(tmp_path, monkeypatch):
    monkeypatch.setattr("thoughtbubbles.data.sources.CHUNK_BYTES", 100)
    lines = [{"text": text} for text in random_texts(20)]
    train, val = write_lines(tmp_path / "train.jsonl", [*lines, {"broken": 1}]), tmp_path / "val.jsonl"
    val.write_text("")
    with pytest.raises(ValueError, match=r"val = .*val.jsonl: contains no documents"):
        prepare((str(train),), out=tmp_path / "out", val=(str(val),), tokenizer="bytes", processes=1)


@pytest.mark.parametrize(("tokens", "is_small"), [(9_999, True), (10_000, False)])
def test_a_small_validation_split_is_pointed_out(tokens, is_small, tmp_path, capsys):
    (tmp_path / "train.txt").write_text("a" * 500)
    (tmp_path / "val.txt").write_text("b" * (tokens - 1))
    options = {"val": (str(tmp_path / "val.txt"),), "tokenizer": "bytes", "processes": 1}
    prepare((str(tmp_path / "train.txt"),), out=tmp_path / "out", **options)
    assert ("val is very small (fewer than 10,000 tokens)" in capsys.readouterr().out) == is_small


def test_the_next_command_fits_little_text_and_odd_names(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("0123456789")
    out = tmp_path / "a folder=2"
    prepare((str(tmp_path / "a.txt"),), out=out, tokenizer="bytes", processes=1)
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == f"next: thoughtbubbles train tiny --data.mixture '{out}=1' --model.block-size 8"
    loader = Loader([Source.parse(shlex.split(command)[5])], rows=2, n_tokens=8, seed=0)
    assert loader.batch(0).ids.tolist() == [list(b"01234567")] * 2


def test_the_next_command_names_recipes_as_they_are():
    from thoughtbubbles.recipes import recipe

    for name, choices in NEXT.items():
        for recipe_name, block_size, _ in choices:
            config = recipe(recipe_name)
            assert config.model.block_size == block_size
            assert config.model.vocab_size >= tokenizer(name).size
            assert config.tokens_per_step & -config.tokens_per_step >= block_size  # so a shorter power of two fits too


# --- interruptions --------------------------------------------------------------------------------

# Kills the process before its n-th operation on files in the folder, for every n in turn, and then resumes.
EVERY_MOMENT = """
import os, signal, sys
from pathlib import Path
from thoughtbubbles.data import output, prepare, sources

sources.CHUNK_BYTES = 4000
prepare.SAVE_SECONDS = 0
folder = Path(sys.argv[1])
options = dict(tokenizer="bytes", processes=1, shard_tokens=5_000)
options |= dict(val=(str(folder / "val.jsonl"),)) if (folder / "val.jsonl").exists() else dict(val_fraction=0.2)
killed_at, seen = None, 0


def count(event, arguments):
    global seen
    if killed_at is not None and event in ("open", "os.rename", "os.remove", "os.truncate"):
        if str(folder / "out") in str(arguments[0]):
            seen += 1
            if seen == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)


def fork(out, n=None):
    global killed_at
    child = os.fork()
    if child == 0:
        killed_at = n
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        prepare.prepare((str(folder / "in"),), out=out, **options)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


sys.addaudithook(count)
assert fork(folder / "whole") == 0
whole = contents(folder / "whole")
n, resumed = 0, 0
while True:
    n += int(sys.argv[2])
    out = folder / f"out{n}"
    if fork(out, n) == 0:
        break
    resumed += (out / output.JOURNAL).exists()
    fork(out, 7 * n % 23 + 2)  # and once more
    assert fork(out) == 0
    assert contents(out) == whole, n
print(n, resumed, len(whole))
"""


@pytest.mark.parametrize(("kind", "stride"), [("text", 1), ("examples", 3), ("text with a validation set", 3)])
def test_killed_at_every_moment(kind, stride, tmp_path):
    """Only at every third one for variants that differ only in what is read or written."""
    (tmp_path / "in").mkdir()
    texts = random_texts(40, words=90)
    records = [{"question": t[:50], "answer": t[50:]} if kind == "examples" else {"text": t} for t in texts]
    if kind == "text with a validation set":
        write_lines(tmp_path / "val.jsonl", [{"text": t} for t in random_texts(9, words=90, seed=1)])
    write_lines(tmp_path / "in" / "a.jsonl", records[:25])
    write_lines(tmp_path / "in" / "b.jsonl", records[25:])
    done = subprocess.run(
        [sys.executable, "-c", EVERY_MOMENT, str(tmp_path), str(stride)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    moments, resumed, files = map(int, done.stdout.split())
    assert moments > 25
    assert resumed > moments / stride / 2
    assert files >= 5


def start_and_wait_for_a_shard(corpus, out):
    process = subprocess.Popen(
        command(corpus, out, processes=2, chunk_bytes=50_000, **CORPUS_OPTIONS),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (out / "train-00000.bin").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


def children(process):
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = status.read_text().rpartition(")")[2]
            if int(rest.split()[1]) == process and b"spawn_main" in (status.parent / "cmdline").read_bytes():
                found.append(int(status.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker processes through Linux's /proc")
def test_killed_from_outside_with_its_workers(corpus, uninterrupted, tmp_path):
    out = tmp_path / "out"
    process = start_and_wait_for_a_shard(corpus, out)
    workers = children(process.pid)
    assert workers
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "index.json").exists()

    done = run(corpus, out, processes=1, **CORPUS_OPTIONS)  # with another number of processes
    assert done.returncode == 0, done.stderr
    assert "resuming after" in done.stderr
    assert contents(out) == uninterrupted
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker processes through Linux's /proc")
def test_a_killed_worker(corpus, uninterrupted, tmp_path):
    out = tmp_path / "out"
    process = start_and_wait_for_a_shard(corpus, out)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "prepare: a tokenizing process died" in errors
    assert "run the same command again to resume" in errors
    assert "Traceback" not in errors

    done = run(corpus, out, processes=1, **CORPUS_OPTIONS)
    assert done.returncode == 0, done.stderr
    assert contents(out) == uninterrupted


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker processes through Linux's /proc")
def test_workers_killed_while_they_send(corpus, tmp_path):
    """Half a result is in the pipe, and the rest will never come: the parent must not wait for it."""
    process = start_and_wait_for_a_shard(corpus, tmp_path / "out")
    process.send_signal(signal.SIGSTOP)  # it stops reading, and its workers fill the pipe
    time.sleep(1.5)
    for child in children(process.pid):
        os.kill(child, signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "prepare: a tokenizing process died" in errors


def test_a_full_disk(tmp_path):
    """Simulated by a limit on file sizes: writing fails in the middle."""
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in random_texts(300)])
    options = {"tokenizer": "bytes", "processes": 1, "shard_tokens": 60_000, "chunk_bytes": 20_000}
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    out = tmp_path / "out"
    failed = run(source, out, before=limit, **options)
    assert failed.returncode == 1
    assert f"prepare: writing to {out} failed (File too large): free disk space or give another folder" in failed.stderr
    assert "run the same command again to resume" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert run(source, out, **options).returncode == 0
    assert run(source, tmp_path / "whole", **options).returncode == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_a_finished_folder_is_left_alone(tmp_path, capsys):
    source, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "out"
    index = prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert prepare((str(source),), out=out, tokenizer="bytes", processes=1) == index
    assert capsys.readouterr().out.startswith(f"{out} is already prepared; nothing to do\n")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(ValueError, match=r"contains a prepared dataset with other settings \(val_fraction = 0.005\)"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1, val_fraction=0.1)
    write_lines(source, [{"text": "a"}, {"text": "bb"}])
    with pytest.raises(ValueError, match="of the same sources, but their files have changed since"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_a_half_finished_folder_takes_only_the_same_settings(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(source, [{"text": "a"}, {"txt": "b"}])
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the record has the fields txt"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    with pytest.raises(ValueError, match=r"a half-finished preparation with other settings \(tokenizer = 'bytes'\)"):
        prepare((str(source),), out=out, tokenizer="gpt2", processes=1)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the record has the fields txt"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_what_came_before_a_broken_record_is_kept(tmp_path, monkeypatch, capsys):
    """The journal contains every chunk before that of the record: only that chunk is read again."""
    monkeypatch.setattr("thoughtbubbles.data.sources.CHUNK_BYTES", 1)  # a line is a chunk
    texts, source, out = random_texts(20), tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(source, [*({"text": text} for text in texts[:12]), {"txt": "b"}])
    with pytest.raises(ValueError, match=r"a.jsonl, line 13: the record has the fields txt"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    state = json.loads((out / "prepare.json").read_text())["state"]
    assert state["place"] == [0, 12]
    assert sum(counts["documents"] for counts in state["counts"].values()) == 12
    assert sum(tail["tokens"] for tail in state["tails"].values()) == sum(len(text) + 1 for text in texts[:12])
    with pytest.raises(ValueError, match=r"a.jsonl, line 13"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    assert "resuming after 12 documents" in capsys.readouterr().err


JOURNAL_EDITS = [
    (["settings"], None),
    (["settings"], 7),
    (["state"], []),
    (["state", "kind"], ["text"]),
    (["state", "kind"], "words"),
    (["state", "kind"], None),
    (["state", "place"], [0]),
    (["state", "place"], 3),
    (["state", "place"], [0, "1"]),
    (["state", "place"], [0, -1]),
    (["state", "place"], [0, True]),
    (["state", "skipped"], "0"),
    (["state", "first_keys"], [1, 2, 3]),
    (["state", "first_keys"], [2**64]),
    (["state", "first_keys"], {"a": 1}),
    (["state", "counts"], []),
    (["state", "counts", "train"], {"pages": 1}),
    (["state", "counts", "train"], None),
    (["state", "counts", "val", "bytes"], 0.5),
    (["state", "shards"], {"train": []}),
    (["state", "shards", "train"], 5),
    (["state", "shards", "train"], [{"file": "../x", "n_tokens": 1, "n_examples": 0, "crc32": 0}]),
    (["state", "shards", "train"], ["train-00000.bin"]),
    (["state", "tails"], None),
    (["state", "tails", "train"], 5),
    (["state", "tails", "train"], {"bytes": 1}),
    (["state", "tails", "train", "tokens"], -1),
    (["state", "tails", "train", "tokens"], 10**30),
    (["state", "tails", "train", "crc32"], None),
]


def halfway(folder):
    """A source whose second record is broken, and a folder in which one document is kept."""
    source, out = folder / "a.jsonl", folder / "out"
    source.write_text('{"text": "%s"}\n{"txt": 0}\n' % ("a" * (1 << 20)))
    with pytest.raises(ValueError, match=r"a.jsonl, line 2"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    return source, out


@pytest.fixture(scope="module")
def half_prepared(tmp_path_factory):
    return halfway(tmp_path_factory.mktemp("half"))


@pytest.mark.parametrize(("path", "value"), JOURNAL_EDITS)
def test_a_journal_of_wrong_kinds_is_refused(half_prepared, path, value):
    """With a wrong checksum, and with a right one."""
    source, out = half_prepared
    journal = out / "prepare.json"
    good = journal.read_text()
    try:
        record = json.loads(good)
        inner = record
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        journal.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=r"prepare.json has been altered .*: delete the folder .*/out"):
            prepare((str(source),), out=out, tokenizer="bytes", processes=1)
        del record["crc32"]
        record["crc32"] = zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
        journal.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=r"prepare.json is damaged .*: delete the folder .*/out"):
            prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    finally:
        journal.write_text(good)


@pytest.mark.parametrize("harm", [lambda shard: shard.unlink(), lambda shard: shard.write_bytes(b"ab")])
def test_shards_that_were_written_before_must_still_be_there(harm, tmp_path, monkeypatch):
    """In a finished and in a half-finished folder."""
    monkeypatch.setattr("thoughtbubbles.data.sources.CHUNK_BYTES", 1)  # a line is a chunk
    good = [{"text": text} for text in random_texts(40)]
    for name, last in (("finished", {"text": "z"}), ("half", {"txt": 0})):
        source, out = write_lines(tmp_path / f"{name}.jsonl", [*good, last]), tmp_path / name
        given = {"out": out, "tokenizer": "bytes", "processes": 1, "shard_tokens": 100, "val_fraction": 0.0}
        with suppress(ValueError):
            prepare((str(source),), **given)
        harm(out / "train-00001.bin")
        with pytest.raises(ValueError, match=r"train-00001.bin (is missing, though|has only 2 bytes)"):
            prepare((str(source),), **given)


def test_a_small_validation_set_that_was_given(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in random_texts(20)])
    small = write_lines(tmp_path / "b.jsonl", [{"text": "a"}])
    prepare((str(source),), val=(str(small),), out=tmp_path / "out", tokenizer="bytes", processes=1)
    assert (
        "val is very small (fewer than 10,000 tokens): its loss will depend on the choice of documents; give more"
        in (capsys.readouterr().out)
    )


def test_a_changed_tail_is_damage(tmp_path):
    source, out = halfway(tmp_path)
    (tail,) = out.glob("train-*.tail")
    good = tail.read_bytes()
    for place in (0, len(good) // 2, len(good) - 1):
        tail.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"train-00000.tail is damaged \(its checksum differs\): delete .*out and"):
            prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    tail.write_bytes(good + b"more")  # bytes after the last save of the journal are truncated
    with pytest.raises(ValueError, match=r"a.jsonl, line 2"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    assert tail.read_bytes() == good


def test_a_tail_shorter_than_the_journal_says(tmp_path):
    source, out = halfway(tmp_path)
    (tail,) = (path for path in out.glob("train-*.tail"))
    tail.write_bytes(tail.read_bytes()[:-1])
    message = r"train-00000.tail is missing or truncated: delete .*out and prepare it again"
    for put in (lambda: tail.unlink(), lambda: tail.mkdir(), lambda: tail.rmdir() or os.mkfifo(tail)):
        with pytest.raises(ValueError, match=message):
            prepare((str(source),), out=out, tokenizer="bytes", processes=1)
        put()
    with pytest.raises(ValueError, match=message):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_a_pipe_in_the_place_of_an_empty_tail_is_replaced(tmp_path):
    source, out = halfway(tmp_path)
    (tail,) = out.glob("val-*.tail")
    tail.unlink()
    os.mkfifo(tail)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "not JSON"), (b"[]", "a JSON list"), (b"[" * 100_000, "nested too deeply"), (None, "is not a file")],
)
def test_a_journal_that_is_not_one(content, words, tmp_path):
    source, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}]), tmp_path / "out"
    out.mkdir()
    if content is None:
        os.mkfifo(out / "prepare.json")
    else:
        (out / "prepare.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"prepare.json.*{words}.*delete the folder"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


@pytest.mark.parametrize(
    "change", [{"settings": 7}, {"documents": None}, {"bytes": {"train": 1}}, {"skipped": "no"}, {}], ids=str
)
def test_notes_of_wrong_kinds_in_a_finished_folder(change, tmp_path):
    source, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "out"
    index = prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    splits = index.splits if change else {"train": index.splits["train"]}
    write_index(out, replace(index, splits=splits, notes={**index.notes, **change}))
    with pytest.raises(ValueError, match=r"index.json is damaged .its notes are not from|made in another way"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_folders_that_cannot_be_written(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "loop").symlink_to("loop")
    for name in ("a.jsonl", "a.jsonl/out", "loop", "loop/out", "x" * 5000):
        with pytest.raises(ValueError, match=rf"writing to .*{name[:7]}.* failed \(") as error:
            prepare((str(source),), out=tmp_path / name, tokenizer="bytes", processes=1)
        assert len(str(error.value)) < 1000
    out = tmp_path / "out"
    prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    (out / "a.tail").mkdir()  # leftovers are removed, and this one cannot be
    with pytest.raises(ValueError, match=r"writing to .*out failed"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_processes_that_cannot_be_started(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))"
    done = run(source, tmp_path / "out", before=few, tokenizer="bytes", processes=8)
    assert done.returncode == 1
    assert done.stderr.startswith("prepare: --processes 8 cannot be used (Too many open files): give fewer")


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"already contains other files \(a.jsonl …\): give a new or empty folder"):
        prepare((str(source),), out=tmp_path, tokenizer="bytes", processes=1)
    assert contents(tmp_path) == {"a.jsonl": source.read_bytes()}


def test_one_at_a_time(tmp_path):
    from thoughtbubbles.files import locked

    source, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}]), tmp_path / "out"
    out.mkdir()
    with locked(out, doing="preparing"), pytest.raises(ValueError, match="another process is preparing this folder"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_text_and_examples_do_not_mix(tmp_path):
    text = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    examples = write_lines(tmp_path / "b.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match=r"b.jsonl: found questions or chats with answers after plain text"):
        prepare((str(text), str(examples)), out=tmp_path / "out", tokenizer="bytes", processes=1)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_empty_input(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"sources = .*a.jsonl: contains no documents"):
        prepare((str(tmp_path / "a.jsonl"),), out=tmp_path / "out", tokenizer="bytes", processes=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "gpt5"}, "tokenizer = 'gpt5': choose from gpt2, bytes"),
        ({"processes": 0}, "processes = 0: give 1 or more"),
        ({"val_fraction": 1.0}, "val_fraction = 1.0: give a fraction of the documents from 0 to below 1"),
        ({"val_fraction": float("nan")}, "val_fraction = nan"),
        ({"shard_tokens": 0}, "shard_tokens = 0: give 1 or more tokens"),
        ({"limit": 0}, "limit = 0: give 1 or more documents"),
        ({"limit": 2**63}, f"limit = {2**63}: give 1 or more documents, up to"),
        ({"processes": 10**6}, "processes = 1000000: give 1 or more, up to 1,024"),
        ({"processes": True}, "processes = True: give 1 or more"),
        ({"processes": "2"}, "processes = '2': give 1 or more"),
        ({"shard_tokens": 10**30}, r"shard_tokens = 10{30}: give 1 or more tokens, up to 4,294,967,296"),
        ({"shard_tokens": 1e6}, "shard_tokens = 1000000.0: give"),
        ({"val_fraction": 10**400}, "val_fraction = 10+…0+: give a fraction"),
        ({"val_fraction": -0.1}, "val_fraction = -0.1: give a fraction"),
        ({"val_fraction": True}, "val_fraction = True: give a fraction"),
        ({"val_fraction": "0.1"}, "val_fraction = '0.1': give a fraction"),
        ({"val": "a.jsonl"}, "val = 'a.jsonl': give a tuple of files"),
        ({"val": (Path("a"),)}, r"val = \(PosixPath\('a'\),\): give a tuple of files"),
        ({"tokenizer": ["gpt2"]}, r"tokenizer = \['gpt2'\]: choose from gpt2, bytes"),
    ],
)
def test_wrong_arguments(options, message, tmp_path, no_shape_checks):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=message):
        prepare((str(source),), out=tmp_path / "out", **options)
    with pytest.raises(ValueError, match="nowhere is not an existing file or folder, nor one of the names"):
        prepare(("nowhere",), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "1" + "0" * 30], "processes = 1000000000000000000000000000000: give 1 or more, up to 1,024"),
        (["--processes", "2.5"], "--processes"),
        (["--shard-tokens", "9" * 30], "shard_tokens = 9"),
        (["--shard-tokens", "9" * 5000], "--shard-tokens"),
        (["--val-fraction", "1e999"], "val_fraction = inf: give a fraction"),
        (["--val-fraction", "much"], "--val-fraction"),
        (["--limit", "-1"], "limit = -1: give 1 or more documents"),
        (["--val", "gone.jsonl"], "gone.jsonl is not an existing file or folder"),
        (["--val", "x" * 5000], "cannot be used (File name too long)"),
        (
            ["--val", "b.jsonl", "--val-fraction", "0"],
            "val_fraction = 0.0 and val = b.jsonl: with --val, all other sources are training data",
        ),
    ],
)
def test_mistakes_on_the_command_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "a.jsonl", "--out", "out", *options])
    assert stopped.value.code not in (0, None)
    assert message in f"{stopped.value} {capsys.readouterr().err}"
    assert not (tmp_path / "out").exists()


def test_several_validation_sources_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    main(
        [
            "prepare",
            "a.jsonl",
            "--val",
            "b.jsonl",
            "c.jsonl",
            "--out",
            "out",
            "--tokenizer",
            "bytes",
            "--processes",
            "1",
        ]
    )
    assert (documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")) == (["a"], ["b", "c"])


def test_preparation_needs_no_torch():
    code = """
import sys
import thoughtbubbles.data.prepare
assert not {"torch", "pyarrow", "datasets", "zstandard", "rich"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.data
def test_real_text(tmp_path):
    folder = os.environ.get("THOUGHTBUBBLES_DATA")
    if not folder:
        pytest.skip("THOUGHTBUBBLES_DATA names no folder with pretrain/val.jsonl.xz")
    source = Path(folder, "pretrain", "val.jsonl.xz")
    index = prepare((str(source),), out=tmp_path / "out", processes=2)
    with lzma.open(source, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    n_tokens = sum(shard.n_tokens for shards in index.splits.values() for shard in shards)
    assert sum(index.notes["documents"].values()) == len(texts) == 772
    assert n_tokens == 945_497 + 772  # the documents' own tokens, and end-of-text after each
    assert sum(index.notes["bytes"].values()) == sum(len(text.encode()) for text in texts)

    tok, found = tokenizer("gpt2"), []
    for split in ("train", "val"):
        tokens = np.concatenate([shard.tokens for shard in open_dataset(tmp_path / "out", split=split).shards])
        found += b"".join(tok._table[token] for token in tokens.tolist()).decode().split("<|endoftext|>")[:-1]
    assert sorted(found) == sorted(texts)
