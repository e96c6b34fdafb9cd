"""The instructions of stage two: question files of --data-dir, as prepared folders in the tokens of the corpus.

Each kind of question becomes one file of JSON lines in the forms that data/records.py reads (ARC calls the right choice
`gold`, records call it `answer`), and one folder of examples. Both are made once for a tokenizer and these very
questions, and shared by all rows.
"""

import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.records import read_record
from thoughtbubbles.data.shards import INDEX
from thoughtbubbles.evals.documents import find_files, records
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.evals.tasks.task import Task, place_of, text_of, texts_of
from thoughtbubbles.files import locked, write_atomically
from thoughtbubbles.recipes.reproduce.corpus import Corpus
from thoughtbubbles.recipes.reproduce.finetune.gsm8k_aug import examples_file
from thoughtbubbles.recipes.reproduce.two_stage.protocol import SHARES, TEXT, MixturePart, text_part

Line = Mapping[str, Any]


class QuestionFile(NamedTuple):
    task: Task
    """Says which file it is, where to get it, and its fields; the test set of the same benchmark has another file."""
    record: Callable[[Line], dict[str, Any]]
    """A line in the form that data/records.py reads; KeyError or ValueError if it has none."""


def with_steps(line: Line) -> dict[str, Any]:
    record = {name: line[name] for name in ("question", "steps", "answer")}
    read_record(record)
    return record


def with_choices(line: Line, *, gold: str) -> dict[str, Any]:
    """`gold`: the field that has the right choice."""
    choices = texts_of(line, "choices")
    return {"question": text_of(line, "question"), "choices": choices, "answer": place_of(line, gold, len(choices))}


FILES: dict[str, tuple[QuestionFile, ...]] = {
    "gsm8k-aug": (QuestionFile(examples_file("train"), with_steps),),
    "multiple-choice": (
        *(
            QuestionFile(replace(TASKS[name], file=f"{name}.train"), lambda line: with_choices(line, gold="gold"))
            for name in ("arc_easy", "arc_challenge")
        ),
        QuestionFile(replace(TASKS["mmlu"], file="mmlu.dev"), lambda line: with_choices(line, gold="answer")),
    ),
}


def mixture_of(corpus: Corpus, questions: Path, home: Path) -> tuple[MixturePart, ...]:
    """The sources of stage two. `home`: the folder to prepare the questions in."""
    found = {name: "".join(_lines(files, questions)).encode() for name, files in FILES.items()}
    home.mkdir(parents=True, exist_ok=True)
    with locked(home, doing="preparing questions in", wait=True):  # rows may be started at the same time
        parts = [_prepared(name, content, corpus, home) for name, content in found.items()]
    return (*parts, text_part(corpus, SHARES[TEXT]))


def _lines(files: tuple[QuestionFile, ...], folder: Path) -> Iterator[str]:
    for file in files:
        for path in find_files(file.task, folder):
            for number, line in records(path):
                try:
                    yield json.dumps(file.record(line)) + "\n"
                except KeyError as error:
                    raise ValueError(
                        f"{path}, line {number}: field {error} is missing; expected {file.task.fields}"
                    ) from None
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None


def _prepared(name: str, content: bytes, corpus: Corpus, home: Path) -> MixturePart:
    checksum = f"{zlib.crc32(content):08x}"
    folder = home / f"{name}-{corpus.tokenizer}-{checksum}"
    lines = folder.with_name(f"{folder.name}.jsonl")
    if not (folder / INDEX).is_file():
        if not lines.is_file():  # left by an interrupted preparation, which continues
            write_atomically(lines, [content])
        with redirect_stdout(io.StringIO()):  # it would suggest to train on this folder alone
            prepare((str(lines),), out=folder, tokenizer=str(corpus.folder.resolve()), val_fraction=0.0, processes=1)
    return MixturePart(name, folder, SHARES[name], {"examples": content.count(b"\n")}, checksum)
