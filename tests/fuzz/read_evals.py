"""Readers of evaluations: the documents of every task, and the answers of an evaluation that was interrupted."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cases import FileBase
from packed import PACKINGS

from thoughtbubbles.evals.answers import Answers, _line
from thoughtbubbles.evals.documents import data_folder, open_benchmark
from thoughtbubbles.evals.metrics import Answer
from thoughtbubbles.evals.tasks import TASKS

SCIENCE = {"question": "What is ice?", "choices": ["water", "stone", "air"], "gold": 0}
SUBJECTS = {"subject": "abstract_algebra", "question": "Which?", "choices": ["1", "2", "3", "4"], "answer": 2}
RECORDS = {
    "lambada": {"context": "She opened the door and saw the", "target": "dog"},
    "hellaswag": {
        "activity_label": "Baking",
        "ctx_a": "A man [step] bakes.",
        "ctx_b": "he",
        "label": "1",
        "endings": ["eats.", "sleeps.", "runs [title] far.", "bakes."],
    },
    "blimp": {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps.", "UID": "agreement"},
    "piqa": {"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": "Eat the lid.", "label": 0},
    "arc_easy": SCIENCE,
    "arc_challenge": SCIENCE,
    "mmlu": SUBJECTS,
    "mmlu_continuation": SUBJECTS,
    "clutrr": {
        "story": "[Ann] took her son [Bob] out.",
        "query": "('Ann', 'Bob')",
        "target": "son",
        "task_name": "task_1.2",
        "split": "test",
    },
    "gsm8k": {"question": "What is 2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
}


def tasks(folder: Path) -> Sequence[FileBase]:
    """Each with two documents, uncompressed and compressed."""
    bases = []
    for number, (name, task) in enumerate(TASKS.items()):
        lines = f"{json.dumps(RECORDS[name])}\n".encode() * 2
        packing = ("", ".gz", ".xz")[number % 3]
        for ending in {"", packing}:
            file = task.file.replace("*", "one") + ".jsonl" + ending
            content = PACKINGS[ending][1](lines) if ending else lines
            bases.append(
                FileBase(
                    files={file: content},
                    read=lambda path, task=task: repr(open_benchmark(task, data_folder(path))),
                    reason="the documents are the user's own",
                )
            )
    return bases


def answers(folder: Path) -> Sequence[FileBase]:
    """Answers of two ranks. Those that are read are unchanged; the others are answered again."""
    about = {"task": "piqa", "weights": [[1, 2]]}
    scores = {"accuracy": 1.0, "accuracy_sum": 0.0}
    given = {
        number: Answer(scores=scores, groups={"set": "a"}, log_probs=[-1.5, -2.5 - number], tokens=[3, 4])
        for number in range(8)
    }

    def read(path: Path) -> str:
        again = Answers(path, "piqa", about)
        known = again.read()
        assert known.items() <= given.items(), "a change that a checksum should have shown"
        with again:
            again.add(9, Answer(scores={"accuracy": 1.0}))
        return repr(sorted(known.items(), key=str))

    first = Answers(folder, "piqa", about)
    lines = [_line({"document": number, "time": 1.5, **asdict(answer)}) for number, answer in given.items()]
    files = {
        f"{first.name}{rank}.jsonl": "".join([first.about, "\n", *share]).encode()
        for rank, share in (("", lines[:4]), (".rank-1", lines[4:]))
    }
    return [FileBase(files=files, read=read, is_given=False, reason="a line that cannot be used is answered again")]
