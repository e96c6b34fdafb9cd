"""The fuzzer: thousands of mutated files and hostile calls, each of which must end in a clean answer.

    python tests/fuzz/fuzz.py                                  1,000 inputs of every reader (of slow ones fewer)
    python tests/fuzz/fuzz.py --minutes 60 --seed 7            for an hour
    python tests/fuzz/fuzz.py --reader shards --inputs 20000   one reader
    python tests/fuzz/fuzz.py --reader shards --seed 7 --only 1234    one input, as a finding prints it

A clean answer is a one-line ValueError that names the file or field, or a result. A finding is anything else: another
exception, more than 2 seconds, more than a GiB, a warning, an executed pickle, an undetected change of a file with a
checksum. The exit code is 1 if there are findings.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from judge import PACKAGE, short
from readers import NAMES
from tally import Tally, findings, numbers, table

HERE = Path(__file__).resolve().parent
HANG_SECONDS = 2.0
STRETCH = 500  # inputs per request
# Share of the inputs: these take longer than others, which take about a millisecond.
SHARE = {"models": 0.2, "cards": 0.2, "authors": 0.2, "calls": 0.2, "hf": 0.2, "requests": 0.1, "runs": 0.02}
SHARE |= {"commands": 0.01, "journal": 0.2}


class Worker:
    """The process that reads, restarted whenever an input has killed it."""

    def __init__(self, scratch: Path, *, seconds: float):
        self.scratch, self.seconds = scratch, seconds
        self.errors = (scratch / "stderr").open("w+")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.errors.close()

    def read(self, reader: str, seed: int, first: int, stop: int) -> Iterator[list[str]]:
        """The answers to a range of inputs. One that kills is tried again: the machine may just have been busy."""
        asked = False
        for number in range(first, stop):
            if not asked:
                self._ask(reader, seed, number, stop)
                asked = True
            if (answer := self._answer()) is None:
                self._ask(reader, seed, number, number + 1)
                answer, asked = self._answer() or self._death(), False
            yield answer

    def _ask(self, *what: object) -> None:
        if self._process is None:
            self.errors.seek(0)
            self.errors.truncate()
            self._process = subprocess.Popen(
                start_worker(self.scratch, self.seconds),
                cwd=self.scratch,  # stray output of readers goes there
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=environment(self.scratch),
            )
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, what)) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> list[str] | None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._end()
        return json.loads(line) if line else None

    def _death(self) -> list[str]:
        self.errors.seek(0)
        text = self.errors.read()
        if "Timeout" not in text and "Fatal" not in text:
            raise RuntimeError(f"the process that reads has died, and not of an input:\n{text}")
        lines = re.findall(r'File "(.*)", line (\d+)', text)
        file, line = next((place for place in lines if f"/{PACKAGE}/" in place[0]), lines[0] if lines else ("", ""))
        where, trail = f"{short(file)}:{line}", " < ".join(f"{file}:{line}" for file, line in lines[:3])
        return ["finding", "a hang" if "Timeout" in text else "a crash", where, trail]

    def _end(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process.kill()
            self._process.wait()
        self._process = None


def start_worker(scratch: Path, seconds: float) -> list[str]:
    return [sys.executable, str(HERE / "worker.py"), str(scratch), str(seconds)]


def environment(scratch: Path) -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "FUZZ_CANARY": str(scratch / "canary")}


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """In memory if the system has such a folder."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fuzz(
    readers: Sequence[str],
    *,
    seed: int,
    inputs: int,
    minutes: float | None = None,
    seconds: float = HANG_SECONDS,
    progress: bool = False,
) -> dict[str, Tally]:
    """The given number of inputs per reader; with minutes, as many rounds as fit."""
    tallies = {name: Tally() for name in readers}
    begun = time.monotonic()
    with scratch_folder() as scratch, Worker(scratch, seconds=seconds) as worker:
        while not tallies[readers[0]].inputs or (minutes is not None and time.monotonic() - begun < 60 * minutes):
            for name, tally in tallies.items():
                start, first = time.monotonic(), tally.inputs
                end = first + max(1, round(inputs * SHARE.get(name, 1)))
                for begin in range(first, end, STRETCH):
                    stop = min(begin + STRETCH, end)
                    for number, answer in enumerate(worker.read(name, seed, begin, stop), begin):
                        tally.add(number, *answer)
                    if progress:
                        total = sum(tally.inputs for tally in tallies.values())
                        found = sum(tally.n_findings for tally in tallies.values())
                        line = f"{time.monotonic() - begun:6.0f} s  {total:,} inputs, {found:,} findings; now {name}"
                        print(f"\r{line:<79}", end="", file=sys.stderr, flush=True)
                tally.seconds += time.monotonic() - start
    if progress:
        print(file=sys.stderr)
    return tallies


def show_one(reader: str, seed: int, number: int, *, seconds: float) -> int:
    """In a separate process; the files stay."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{reader}-{seed}-{number}-"))
    command = [*start_worker(folder, seconds), reader, str(seed), str(number)]
    return subprocess.run(command, cwd=folder, env=environment(folder), check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", action="append", metavar="NAME", help=f"give it again for more; {', '.join(NAMES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1000, help="of each reader (of slow ones a share), or of a round")
    parser.add_argument("--minutes", type=float, help="go on for so long")
    parser.add_argument("--only", type=int, metavar="N", help="input N alone, with its traceback; its files are kept")
    parser.add_argument("--seconds", type=float, default=HANG_SECONDS, help="what takes longer is a hang")
    parser.add_argument("--json", action="store_true", help="the numbers and findings as JSON")
    given = parser.parse_args(arguments)
    readers = given.reader or list(NAMES)
    if given.only is not None:
        return show_one(readers[0], given.seed, given.only, seconds=given.seconds)
    tallies = fuzz(
        readers,
        seed=given.seed,
        inputs=given.inputs,
        minutes=given.minutes,
        seconds=given.seconds,
        progress=sys.stderr.isatty(),
    )
    found = findings(tallies, seed=given.seed)
    if given.json:
        print(json.dumps({"seed": given.seed, "readers": numbers(tallies), "findings": found}, indent=1))
    else:
        print(table(tallies))
        for one in found:
            print(f"\n{one['count']:,} × {one['reader']}: {one['what']} at {one['where']}\n  {one['message']}")
            print(f"  {one['repro']}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
