"""The `reproduce` command: runs the rows of a protocol that have no record yet, lists them, or renders the report."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from thoughtbubbles.evals.documents import VARIABLE
from thoughtbubbles.files import check_folder, read_object
from thoughtbubbles.recipes.reproduce.protocols import Protocol, pairs, protocol
from thoughtbubbles.recipes.reproduce.row import Place, Stopped, compare, make_record, run_row


def reproduce(
    name: Annotated[
        Literal["long", "long-sweep", "short", "scarce", "laptop", "all"], tyro.conf.arg(metavar="PROTOCOL")
    ],
    /,
    *,
    data: Path | None = None,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROW [ROW …]")] = (),
    seed: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N …]")] = (),
    val: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=DIR […]")] = (),
    data_dir: Path | None = None,
    runs: Path = Path("runs/reproduce"),
    out: Path = Path("docs/results"),
    list: bool = False,
    report: bool = False,
    again: bool = False,
) -> None:
    """Train and measure the rows of a protocol, one JSON file per row and seed; a row that has its file is not run.

    long: a small model, four epochs: plain, r = 1 (scores without forks), r = 2, a gate per head, and more. long-sweep:
    the learning rates and weight decays behind it. short: a larger model that sees each token once. scarce: 20M tokens
    of text, many epochs. laptop: the first three rows of long, in minutes on a CPU. all: with --list and --report.

    for example: thoughtbubbles reproduce long --data data/corpus --only plain r2 --seed 0

    After an interruption, the same command resumes. On a GPU a row of long takes minutes; each runs in its own process.

    Args:
        name: The protocol.
        data: The corpus: a folder written by `thoughtbubbles prepare`, with a val split. Our own rows used the
            tokenizer bubbles-7m for long and scarce, gpt2 for short.
        only: Rows to run. Default: all that have no record yet.
        seed: Seeds to run. Default: those of the protocol.
        val: More validation text, by name, such as wiki=data/val-wiki: each is measured separately.
        data_dir: Folder with the benchmarks, for the rows that answer them. Default: the environment variable
            THOUGHTBUBBLES_DATA; without it they are left out.
        runs: Folder for the training runs, with their checkpoints.
        out: Folder for the records, ROW-seedN.json in a folder per protocol, and for the report.
        list: Only show the rows and which of them have records.
        report: Only render the tables and plots of --out from all records there are.
        again: Run rows that have a record once more, and compare the validation loss with it, bit by bit.
    """
    if list or report:
        if report:
            from thoughtbubbles.recipes.reproduce.report import write_report

            for path in write_report(out):
                print(f"written: {path}")
        else:
            show(name, out)
        return
    if name == "all":
        raise ValueError("all: goes with --list or --report; name one protocol to run its rows")
    found = protocol(name)
    chosen = choose(found, name, only, seed)
    if data is None:
        raise ValueError(f"--data is missing: {name} needs a corpus; give a folder written by `thoughtbubbles prepare`")
    given = data_dir or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    place = Place(
        protocol=name,
        data=data,
        sources=dict(named_folder(each) for each in val),
        data_dir=given,
        runs=check_folder(runs, option="--runs"),
        out=check_folder(out, option="--out"),
    )
    run_rows(found, chosen, place, again=again)


def named_folder(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise ValueError(f"--val {text}: give NAME=DIR, such as wiki=data/val-wiki")
    return name, Path(folder)


def choose(found: Protocol, name: str, only: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    for row in only:
        found.row(row, protocol=name)
    if seeds:  # any seed can be run, also one that the protocol does not plan
        return [(row, seed) for seed in dict.fromkeys(seeds) for row in (dict.fromkeys(only) or found.rows)]
    return [(row, seed) for row, seed in pairs(found) if not only or row in only]


def run_rows(found: Protocol, chosen: Sequence[tuple[str, int]], place: Place, *, again: bool) -> None:
    todo = [(row, seed) for row, seed in chosen if again == place.record(row, seed).exists()]
    for row, seed in chosen:
        if (row, seed) not in todo:
            path = place.record(row, seed)
            print(f"{row}, seed {seed}: {'no record yet' if again else f'has its record, {path}'}")
    if len(todo) > 1:  # a process per row: nothing that one leaves behind can change the next
        failed = [each for each in todo if not run_alone(*each, place, again=again)]
        if failed:
            names = ", ".join(f"{row} (seed {seed})" for row, seed in failed)
            raise ValueError(f"{len(failed)} of {len(todo)} rows failed: {names}; the same command tries them again")
        return
    for row, seed in todo:
        try:
            if again:
                repeat(found, row, seed, place)
            else:
                print(f"written: {run_row(found, row, seed, place)}")
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            sys.exit(stopped.exit_code)


def run_alone(row: str, seed: int, place: Place, *, again: bool) -> bool:
    options = {"--data": place.data, "--runs": place.runs, "--out": place.out, "--only": row, "--seed": seed}
    words = [str(word) for option in options.items() for word in option]
    words += ["--val", *(f"{name}={folder}" for name, folder in place.sources.items())] if place.sources else []
    words += ["--data-dir", str(place.data_dir)] if place.data_dir else []
    command = [sys.executable, "-m", "thoughtbubbles", "reproduce", place.protocol, *words, *["--again"] * again]
    done = subprocess.run(command).returncode
    if done > 128 or done < 0:  # stopped by a signal: so are we
        sys.exit(done if done > 0 else 128 - done)
    return done == 0


def repeat(found: Protocol, row: str, seed: int, place: Place) -> None:
    """Trains in a temporary folder; the record stays as it is."""
    before = read_object(place.record(row, seed))
    place.runs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.runs, prefix="again-") as folder:
        fresh = Place(**{**vars(place), "runs": Path(folder), "data_dir": None})
        print(compare(before, make_record(found, row, seed, fresh)))


def show(name: str, out: Path) -> None:
    from thoughtbubbles.recipes.reproduce.protocols import PROTOCOLS

    console = Console()
    for each in PROTOCOLS if name == "all" else [name]:
        found = protocol(each)
        table = Table(title=f"{each}: {found.what}", title_justify="left")
        for heading in ("row", "", "seeds", "records", "validation loss"):
            table.add_column(heading)
        for row, settings in found.rows.items():
            done = {
                int(path.stem.rpartition("-seed")[2]): read_object(path)
                for path in sorted((out / each).glob(f"{row}-seed*.json"))
                if path.stem.rpartition("-seed")[0] == row
            }
            losses = ", ".join(f"{done[seed]['validation']['nats']:.4f}" for seed in sorted(done))
            seeds, having = (", ".join(map(str, sorted(numbers))) or "–" for numbers in (settings.seeds, done))
            table.add_row(row, settings.what, seeds, having, losses)
        console.print(table)
