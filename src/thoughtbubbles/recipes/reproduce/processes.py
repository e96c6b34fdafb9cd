"""Rows in processes of their own, one after another or several at a time: nothing that one leaves behind changes the
next."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from thoughtbubbles.data.workers import processors
from thoughtbubbles.recipes.reproduce.study import Place

POLL = 0.1  # seconds between looks at the processes
Process = subprocess.Popen[bytes]


def run_apart(todo: Sequence[tuple[str, int]], place: Place, *, jobs: int, again: bool) -> list[tuple[str, int]]:
    """Runs rows and seeds, `jobs` at a time; returns those that failed.

    A signal to us is passed on to them, and then we wait for their checkpoints, however long it takes, and exit. If we
    end in any other way, they save and end too.
    """
    waiting, running, failed = deque(todo), dict[tuple[str, int], tuple[Process, float]](), list[tuple[str, int]]()
    with signals() as got, ended(running):
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
                    process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            for each, (process, begun) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[each]
                failed += [each] * (code != 0)
                if jobs > 1:
                    seconds, n_done = time.monotonic() - begun, len(todo) - len(waiting) - len(running)
                    end, log = f"({seconds:,.0f} s; {n_done} of {len(todo)})", log_of(*each, place, again=again)
                    has_failed = code != 0 and not (got and code > 128)
                    report(*each, log, f"(exit code {code}; all of it: {log})" if has_failed else end)
        if got:
            sys.exit(128 + got[0])
    return failed


@contextmanager
def ended(running: Mapping[tuple[str, int], tuple[Process, float]]) -> Iterator[None]:
    """No process is left behind by an error of ours, such as a closed pipe where we print."""
    try:
        yield
    finally:
        for process, _ in running.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in running.values():
            process.wait()


@contextmanager
def signals() -> Iterator[list[int]]:
    """The numbers of signals that we get, in place of what they usually do. SIGHUP: the terminal is closed."""
    got: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: got.append(number)) for number in numbers}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(row: str, seed: int, place: Place, *, jobs: int, again: bool) -> Process:
    """Not in our process group: Ctrl-C in a terminal would reach it twice, from there and from us, and a second one
    means that a run ends without saving."""
    options = {"--runs": place.runs, "--out": place.out, "--only": row, "--seed": seed}
    options |= {} if place.data is None else {"--data": place.data}
    words = [str(word) for option in options.items() for word in option]
    words += ["--val", *(f"{name}={folder}" for name, folder in place.sources.items())] if place.sources else []
    words += ["--init", *(f"{name}={folder}" for name, folder in place.init.items())] if place.init else []
    words += ["--data-dir", str(place.data_dir)] if place.data_dir else []
    command = [sys.executable, "-m", "thoughtbubbles", "reproduce", place.protocol, *words, *["--again"] * again]
    if jobs == 1:
        return subprocess.Popen(command, process_group=0)
    threads = str(max(1, processors() // jobs))
    share = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads)
    share["PYTHONUNBUFFERED"] = "1"  # so that the last line of the log is the last one that was said
    path = log_of(row, seed, place, again=again)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:  # what an earlier attempt said stays
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=share | os.environ, process_group=0)


def log_of(row: str, seed: int, place: Place, *, again: bool) -> Path:
    run = place.run(row, seed)
    return run.with_name(f"{run.name}{'-again' * again}.log")


def report(row: str, seed: int, log: Path, end: str) -> None:
    """What a row that ran beside others has to say: its last line."""
    said = (line.rpartition("\r")[2] for line in reversed(log.read_text(errors="replace").split("\n")))
    name, last = f"{row}, seed {seed}: ", next((line for line in said if line.strip()), "")
    print(f"{name}{last.removeprefix(name)} {end}", flush=True)
