"""The process in which inputs are read: without shape checks, as for a user, with little memory and a watchdog.

It reads requests from standard input, one line per range of inputs: READER SEED FIRST STOP. It answers with one line of
JSON per input, in order. If it dies, the input after the last answer has killed it; if that took too long, standard
error has the traceback. Given READER SEED NUMBER as arguments, it shows only that input.
"""

import faulthandler
import json
import os
import resource
import sys
import traceback
from pathlib import Path

from cases import SUBJECT, Case, Reader
from judge import judge
from readers import PATIENCE, make_reader

GIB = 1 << 30


def main(scratch: Path, *, seconds: float) -> None:
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # readers may print what they like
    readers: dict[str, tuple[Reader, list[object]]] = {}
    for line in sys.stdin:
        name, seed, first, stop = line.split()
        if name not in readers:
            readers[name] = opened(name, scratch)
            limit_memory()
        reader, expected = readers[name]
        for number in range(int(first), int(stop)):
            base, case = reader.make(int(seed), number)
            faulthandler.dump_traceback_later(seconds * PATIENCE.get(name, 1), exit=True)
            outcome = judge(case, scratch, expected[base])
            faulthandler.cancel_dump_traceback_later()
            os.write(answers, json.dumps(outcome).encode() + b"\n")


def opened(name: str, scratch: Path) -> tuple[Reader, list[object]]:
    """A reader, and its result for each base, which also loads everything that is imported lazily."""
    unlimited()
    reader = make_reader(name, scratch / "made")
    return reader, [base.unchanged().run(scratch) for base in reader.bases]


def limit_memory() -> None:
    """One GiB more than is used now; macOS has no such limit."""
    status = Path("/proc/self/statm")
    if status.exists():
        now = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + GIB, resource.RLIM_INFINITY))


def unlimited() -> None:
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def show(name: str, seed: int, number: int, scratch: Path, *, seconds: float) -> None:
    """One input, with all details."""
    reader, expected = opened(name, scratch)
    base, case = reader.make(seed, number)
    print(f"input {number} of {name}, seed {seed}: base {base} of {len(reader.bases)}; {'; '.join(case.notes)}")
    print(f"its files, if it has any: {scratch / SUBJECT}", flush=True)
    limit_memory()
    faulthandler.dump_traceback_later(seconds * PATIENCE.get(name, 1), exit=True)
    outcome = judge(_telling(case), scratch, expected[base])
    faulthandler.cancel_dump_traceback_later()
    print(*(part for part in outcome if part), sep=": ")


def _telling(case: Case) -> Case:
    """The same case, showing the traceback."""

    def run(folder: Path) -> object:
        try:
            found = case.run(folder)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            raise
        print(f"accepted: {found!r}"[:2000])
        return found

    return Case(run=run, names=case.names, notes=case.notes, reason=case.reason)


if __name__ == "__main__":
    faulthandler.enable()
    place, limit, *one = sys.argv[1:]
    if one:
        show(one[0], int(one[1]), int(one[2]), Path(place), seconds=float(limit))
    else:
        main(Path(place), seconds=float(limit))
