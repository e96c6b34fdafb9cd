"""Folders for the results of evaluations, so that none replaces another:

    RUN/eval/step-N/          of a checkpoint of a run; outside of it, so they outlive it and are not in its manifest
    MODEL/eval/               of a model folder
    runs/eval-bubbles-7m/     of the model in the package
        answers/              saved answers, shared by all evaluations
        NAME/results.json     an evaluation and its figures; NAME describes it, with a checksum of what its numbers
                              depend on: weights, config, tokenizer, budgets, dtype, the questions and the text

With --out DIR, the answers are in DIR/answers and the results in DIR itself; results of another evaluation in DIR are
moved to DIR/NAME first.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

from thoughtbubbles.checkpoint import NUMBERED, weight_files
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.files import SHIPPED, crc32, named, read_object, reason, shipped_model, short_name

RESULTS, ANSWERS = "results.json", "answers"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}")  # of a folder
FIGURES = ("perplexity.png", "benchmarks.png", "budgets.png", *(f"{task}-by-*.png" for task in TASKS))


def home_of(folder: Path) -> Path:
    """The folder for evaluations of a model folder (from `find_model`), also if the path goes through links."""
    real = folder.resolve()
    if real == shipped_model().resolve():  # an installed package is not a place for results
        return Path("runs") / f"eval-{SHIPPED}"
    folder = folder if folder.absolute() == real else real
    step = folder.parent
    return (
        step.parent / "eval" / step.name
        if folder.name == "model" and NUMBERED.fullmatch(step.name)
        else folder / "eval"
    )


def weights_of(folder: Path) -> dict[str, int]:
    """Identifies the weights by the checksums of their files."""
    return {path.name: crc32(path) for path in weight_files(folder)}


def exact(budget: object) -> str:
    """The same string for 2, 2.0 and "4/2"."""
    return str(Fraction(str(budget)))


def name_of(settings: Evaluation, depends_on: Mapping[str, Any]) -> str:
    """The settings that are not defaults, and a checksum of everything the numbers depend on."""
    words = list(settings.tasks)
    if settings.data is not None and "perplexity" in settings.names:
        words += [Path(os.path.realpath(settings.data)).name, settings.split]  # realpath: no error for a looping link
        words += [f"windows{settings.windows}", "" if settings.tokens is None else f"tokens{settings.tokens}"]
    words.append("" if settings.limit is None else f"limit{settings.limit}")
    words.append("+".join(f"r{budget}" for budget in settings.budget))
    words += ["" if settings.dtype == "float32" else settings.dtype, settings.method or ""]
    return named_by(words, depends_on)


def named_by(words: Sequence[str], depends_on: Mapping[str, Any]) -> str:
    told = re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(filter(None, words)))[:110].strip("-._+")
    return f"{told or 'eval'}-{zlib.crc32(json.dumps(depends_on, sort_keys=True).encode()):08x}"


def make_folders(home: Path, name: str, *, is_given: bool) -> Path:
    """The folder for results.json, checked to be writable before the work starts.

    With --out it is `home` itself; otherwise a subfolder of it.
    """
    folder = home if is_given else home / name
    try:
        for place in (home / ANSWERS, folder):
            place.mkdir(parents=True, exist_ok=True)
            if not os.access(place, os.W_OK):
                raise PermissionError(13, "Permission denied")
    except OSError as error:
        where, remedy = ("--out ", "give another") if is_given else ("", "give another folder with --out DIR")
        raise ValueError(f"{where}{short_name(home)}: cannot be written ({reason(error)}); {remedy}") from None
    if is_given:
        _earlier(folder, name)
    return folder


def remove_empty(home: Path, name: str) -> None:
    """Removes the folders of an evaluation without results, if they are empty."""
    for folder in (home / name, home / ANSWERS, home, home.parent):
        with suppress(OSError):
            folder.rmdir()


def move_aside(folder: Path, name: str) -> None:
    """Moves the results of another evaluation in this folder to a subfolder."""
    if (earlier := _earlier(folder, name)) is None:
        return
    with named(folder, "give another --out"):
        (folder / earlier).mkdir(exist_ok=True)
        for path in [folder / RESULTS, *(path for figure in FIGURES for path in folder.glob(figure))]:
            path.replace(folder / earlier / path.name)
    print(f"{folder} had the results of another evaluation; moved them to {folder / earlier}.", file=sys.stderr)


def _earlier(folder: Path, name: str) -> str | None:
    """The name of another evaluation whose results are in this folder."""
    path = folder / RESULTS
    if not path.exists():
        return None
    remedy = "move it away, or give another --out"
    found = read_object(path, remedy=remedy).get("name")
    if not (isinstance(found, str) and NAME.fullmatch(found)):
        raise ValueError(f"{short_name(path)} does not name the evaluation it is from: {remedy}")
    return None if found == name else found
