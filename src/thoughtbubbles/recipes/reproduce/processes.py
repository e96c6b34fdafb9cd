"""Rows in processes of their own, one after another or several at a time: nothing that one leaves behind changes the
next."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from thoughtbubbles.recipes.reproduce.study import Place

POLL = 0.1  # seconds between looks at the processes
Process = subprocess.Popen[bytes]


def run_apart(todo: Sequence[tuple[str, int]], place: Place, *, jobs: int, again: bool) -> list[tuple[str, int]]:
    """Runs rows and seeds, `jobs` at a time; returns those that failed.

    A signal to us is passed on to them, and then we wait for their checkpoints, however long it takes, and exit.
    """
    waiting, running, failed = deque(todo), dict[tuple[str, int], tuple[Process, float]](), list[tuple[str, int]]()
    with signals() as got:
        n_passed_on = 0
        while waiting or running:
            while waiting and len(running) < jobs and not got:
                each = waiting.popleft()
                running[each] = start(*each, place, jobs=jobs, again=again), time.monotonic()
            time.sleep(POLL)
            for number in got[n_passed_on:]:
                waiting.clear()
                n_passed_on += 1
                for process, _ in running.values():
                    process.send_signal(number)
            for each, (process, begun) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[each]
                failed += [each] * (code != 0)
                if jobs > 1:
                    n_done = len(todo) - len(waiting) - len(running)
                    report(*each, place, code=code, seconds=time.monotonic() - begun, share=f"{n_done} of {len(todo)}")
        if got:
            sys.exit(128 + got[0])
    return failed


@contextmanager
def signals() -> Iterator[list[int]]:
    """The numbers of SIGINT and SIGTERM that we get, in place of what they usually do."""
    got: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: got.append(number)) for number in numbers}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(row: str, seed: int, place: Place, *, jobs: int, again: bool) -> Process:
    """Not in our session: Ctrl-C in a terminal would reach it twice, from there and from us, and a second one means
    that a run ends without saving."""
    options = {"--runs": place.runs, "--out": place.out, "--only": row, "--seed": seed}
    options |= {} if place.data is None else {"--data": place.data}
    words = [str(word) for option in options.items() for word in option]
    words += ["--val", *(f"{name}={folder}" for name, folder in place.sources.items())] if place.sources else []
    words += ["--init", *(f"{name}={folder}" for name, folder in place.init.items())] if place.init else []
    words += ["--data-dir", str(place.data_dir)] if place.data_dir else []
    command = [sys.executable, "-m", "thoughtbubbles", "reproduce", place.protocol, *words, *["--again"] * again]
    if jobs == 1:
        return subprocess.Popen(command, start_new_session=True)
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    share = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads)
    path = log_of(row, seed, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=share | os.environ, start_new_session=True
        )


def log_of(row: str, seed: int, place: Place) -> Path:
    run = place.run(row, seed)
    return run.with_name(f"{run.name}.log")


def report(row: str, seed: int, place: Place, *, code: int, seconds: float, share: str) -> None:
    """What a row that ran beside others has to say: its last line."""
    log = log_of(row, seed, place)
    said = log.read_text(errors="replace").split("\n")
    last = next((line.rpartition("\r")[2] for line in reversed(said) if line.strip()), f"exit code {code}")
    end = f"{last} ({seconds:,.0f} s; {share})" if code == 0 else f"failed, exit code {code}: {last} (all of it: {log})"
    print(f"{row}, seed {seed}: {end}", file=sys.stdout if code == 0 else sys.stderr, flush=True)
