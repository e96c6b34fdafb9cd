"""Preparation that is killed at any moment gives the same bytes when it is run again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.prepared import CORPUS_OPTIONS, command, contents, random_texts, run, write_lines

# Kills the process before its n-th operation on files in the folder, for every n in turn, and then resumes.
EVERY_MOMENT = """
import os, signal, sys
from pathlib import Path
from thoughtbubbles.data import output, prepare, sources

sources.CHUNK_BYTES = 4000
prepare.SAVE_SECONDS = 0
folder = Path(sys.argv[1])
options = dict(tokenizer="bytes", processes=1, shard_tokens=5_000)
options |= dict(tokenizer="bpe", vocab_size=290) if sys.argv[3] == "text with a vocabulary of its own" else {}
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


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        pytest.param("text", 1, marks=pytest.mark.slow),
        ("examples", 3),
        pytest.param("text with a validation set", 3, marks=pytest.mark.slow),
        pytest.param("text with a vocabulary of its own", 2, marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_moment(kind, stride, tmp_path):
    """Not at all of them for variants that differ only in what is read or written."""
    (tmp_path / "in").mkdir()
    texts = random_texts(40, words=90)
    records = [{"question": t[:50], "answer": t[50:]} if kind == "examples" else {"text": t} for t in texts]
    if kind == "text with a validation set":
        write_lines(tmp_path / "val.jsonl", [{"text": t} for t in random_texts(9, words=90, seed=1)])
    write_lines(tmp_path / "in" / "a.jsonl", records[:25])
    write_lines(tmp_path / "in" / "b.jsonl", records[25:])
    done = subprocess.run(
        [sys.executable, "-c", EVERY_MOMENT, str(tmp_path), str(stride), kind], capture_output=True, text=True
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


@pytest.mark.slow
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
@pytest.mark.slow
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


@pytest.mark.slow
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
