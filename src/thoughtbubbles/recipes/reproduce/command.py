"""The `reproduce` command: runs the rows of a protocol that have no record yet, lists them, or renders the report."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table
from tyro.extras import literal_type_from_choices

from thoughtbubbles.evals.documents import VARIABLE
from thoughtbubbles.files import check_folder, read_object
from thoughtbubbles.recipes.reproduce.processes import run_apart
from thoughtbubbles.recipes.reproduce.studies import STUDIES, study
from thoughtbubbles.recipes.reproduce.study import Place, Stopped, Study


def reproduce(
    name: Annotated[str, tyro.conf.arg(metavar="PROTOCOL", constructor=literal_type_from_choices([*STUDIES, "all"]))],
    /,
    *,
    data: Path | None = None,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROW [ROW …]")] = (),
    seed: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N …]")] = (),
    val: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=DIR […]")] = (),
    init: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=DIR […]")] = (),
    data_dir: Path | None = None,
    runs: Path = Path("runs/reproduce"),
    out: Path = Path("runs/results"),
    list: bool = False,
    report: bool = False,
    again: bool = False,
    jobs: int = 1,
) -> None:
    """Train and measure the rows of a protocol, one JSON file per row and seed; a row that has its file is not run.

    long: a small model, four epochs: plain, r = 1 (scores without forks), r = 2, a gate per head, and more. long-sweep:
    the learning rates and weight decays behind it. short: a larger model that sees each token once. scarce: 20M tokens
    of text, many epochs. screen: ideas for better forks, on a third of the tokens of long. laptop: the first three rows
    of long, in minutes on a CPU.

    tasks: made-up tasks whose hard places are known; tasks-sweep: the learning rates behind it. clutrr, gsm8k:
    fine-tuning on the benchmarks of those names in --data-dir. two-stage: the paper's pretraining and its second stage
    with instructions, in small. all: with --list and --report.

    --list shows the rows of a protocol, with the results of those in --out; --out docs/results has our own.

    for example: thoughtbubbles reproduce long --data data/corpus --only plain r2 --seed 0

    After an interruption, the same command resumes. On a GPU a row of long takes minutes; each runs in its own process.

    With --jobs, rows share a GPU under NVIDIA's MPS (nvidia-cuda-mps-control -d), and divide the cores of a CPU, which
    changes last bits: use the same number with --again.

    Args:
        name: long, long-sweep, short, scarce, screen, laptop, tasks, tasks-sweep, clutrr, gsm8k, two-stage, or all.
        data: The corpus: a folder written by `thoughtbubbles prepare`, with a val split. Our own rows used the
            tokenizer bubbles-7m, those of short gpt2.
        only: Rows to run, as --list shows them. Default: all that have no record yet.
        seed: Seeds to run, for every row. Default: those that the protocol plans for a row.
        val: More validation text, by name, such as wiki=data/val-wiki: each is measured separately.
        init: Models that rows of clutrr and gsm8k start from, by name, where the package does not have them, such as
            plain=runs/bubbles-7m-plain.
        data_dir: Folder with the benchmarks, for the rows that are evaluated on them. Default: the environment variable
            THOUGHTBUBBLES_DATA; without it they are left out. clutrr, gsm8k and two-stage train on it.
        runs: Folder for the training runs, with their checkpoints.
        out: Folder for the records, ROW-seedN.json in a folder per protocol, and for the report.
        jobs: Rows to run at the same time, each with its output in RUNS/PROTOCOL/ROW-seedN.log.
        list: Only show the rows and which of them have records.
        report: Only render the tables and plots of --out from all records there are.
        again: Run rows that have a record once more, and compare the validation loss with it, bit by bit; exit code 1
            if it differs.
    """
    if list or report:
        if report:
            from thoughtbubbles.recipes.reproduce.report import write_report

            for path in write_report(out):
                print(f"written: {path}")
        else:
            if only or seed:
                raise ValueError("--list shows all rows: leave out --only and --seed")
            show(name, out)
        return
    if name == "all":
        raise ValueError("all: goes with --list or --report; name one protocol to run its rows")
    found = study(name)
    chosen = choose(found, only, seed)
    if data is None and not found.has_own_data:
        raise ValueError(f"--data is missing: {name} needs a corpus; give a folder written by `thoughtbubbles prepare`")
    if data is not None and found.has_own_data:
        raise ValueError(f"--data {data}: {name} brings its own data; leave it out")
    given = data_dir or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    place = Place(
        protocol=name,
        data=data,
        sources=named_folders(val),
        init=starting_models(found, init),
        data_dir=given,
        runs=check_folder(runs, option="--runs"),
        out=check_folder(out, option="--out"),
    )
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: give 1 or more")
    found.check(chosen, place)
    run_rows(found, chosen, place, jobs=jobs, again=again)


def named_folders(
    given: Sequence[str], *, option: str = "--val", such_as: str = "wiki=data/val-wiki"
) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ValueError(f"{option} {text}: give NAME=DIR, such as {such_as}")
        if name in found:
            raise ValueError(f"{option} {text}: {name} is given twice; give each folder its own name")
        found[name] = Path(folder)
    return found


def starting_models(found: Study, given: Sequence[str]) -> dict[str, Path]:
    models = named_folders(given, option="--init", such_as="plain=runs/bubbles-7m-plain")
    for name, folder in models.items():
        if name not in found.starts:
            known = f"give {', '.join(found.starts)}" if found.starts else "leave it out"
            raise ValueError(f"--init {name}={folder}: no row of {found.name} starts from {name}; {known}")
    return models


def choose(found: Study, only: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    for row in only:
        found.check_row(row)
    for number in seeds:
        if number < 0:
            raise ValueError(f"--seed {number}: give 0 or more")
    if seeds:  # any seed can be run, also one that the protocol does not plan
        return [(row, seed) for seed in dict.fromkeys(seeds) for row in (dict.fromkeys(only) or found.rows)]
    return [(row, seed) for row, seed in found.pairs() if not only or row in only]


def run_rows(found: Study, chosen: Sequence[tuple[str, int]], place: Place, *, jobs: int, again: bool) -> None:
    todo = [(row, seed) for row, seed in chosen if again == place.record(row, seed).exists()]
    for row, seed in chosen:
        if (row, seed) not in todo:
            path = place.record(row, seed)
            print(f"{row}, seed {seed}: {'no record yet' if again else f'has its record, {path}'}")
    if len(todo) > 1:
        later = [each for each in todo if found.is_built_on_others(each[0])]
        failed = run_apart([each for each in todo if each not in later], place, jobs=jobs, again=again)
        if failed := [*failed, *run_apart(later, place, jobs=1, again=again)]:
            names = ", ".join(f"{row} (seed {seed})" for row, seed in failed)
            raise ValueError(f"{len(failed)} of {len(todo)} rows failed: {names}; the same command tries them again")
        return
    for row, seed in todo:
        try:
            if again:
                repeat(found, row, seed, place)
            else:
                print(f"written: {found.run_row(row, seed, place)}")
        except Stopped as stopped:
            print(f"{stopped}; the same command {'starts again' if again else 'resumes it'}", file=sys.stderr)
            sys.exit(stopped.exit_code)


def repeat(found: Study, row: str, seed: int, place: Place) -> None:
    """Trains in a temporary folder; the record stays as it is."""
    before = read_object(place.record(row, seed))
    place.runs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.runs, prefix="again-") as folder:
        data_dir = place.data_dir if found.trains_on_benchmarks else None  # of the others, only the loss is compared
        fresh = Place(**{**vars(place), "runs": Path(folder), "data_dir": data_dir})
        is_same, line = found.compare(before, found.make_record(row, seed, fresh))
    print(line)
    if not is_same:
        sys.exit(1)


def show(name: str, out: Path) -> None:
    console = Console()
    for each in STUDIES if name == "all" else [name]:
        found = study(each)
        done = found.done(out)
        table = Table(title=f"{each}: {found.what}", title_justify="left")
        for heading in ("row", "", "seeds", "records", found.result):
            table.add_column(heading, no_wrap=heading == "row", overflow="fold")  # --only takes the whole name
        for row in dict.fromkeys([*found.rows, *done]):
            planned, having = found.rows.get(row), done.get(row, {})
            seeds = planned.seeds if planned else ()
            shown = (", ".join(map(str, numbers)) or "–" for numbers in (seeds, having))
            table.add_row(row, planned.what if planned else "", *shown, ", ".join(having.values()))
        console.print(table)
