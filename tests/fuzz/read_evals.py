"""Readers of evaluations: the documents of every task, and the answers of an evaluation that was interrupted."""

import json
from collections.abc import Sequence
from pathlib import Path

from cases import FileBase, gather
from packed import PACKINGS

from thoughtbubbles.evals.answers import Answers
from thoughtbubbles.evals.documents import data_folder, open_exam
from thoughtbubbles.evals.marks import Answer
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
    """Each with two documents, as they are and packed."""
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
                    read=lambda path, task=task: repr(open_exam(task, data_folder(path))),
                    reason="the documents are the user's own",
                )
            )
    return bases


def answers(folder: Path) -> Sequence[FileBase]:
    about = {"task": "piqa", "weights": [[1, 2]]}
    found = Answers(folder, "piqa", about)
    with found:
        for number in range(4):
            scores = {"accuracy": 1.0, "accuracy_sum": 0.0}
            found.add(number, Answer(scores=scores, groups={"set": "a"}, log_probs=[-1.5, -2.5], tokens=[3, 4]))

    def read(path: Path) -> str:
        again = Answers(path, "piqa", about)
        known = again.read()
        with again:
            again.add(9, Answer(scores={"accuracy": 1.0}))
        return repr(sorted(known.items(), key=str))

    (name, content), *_ = gather(folder).items()
    files = {name: content, name.replace(".jsonl", ".rank-1.jsonl"): content}
    return [FileBase(files=files, read=read, is_given=False, reason="a line that cannot be used is answered again")]
