"""GSM8K: grade-school math, with generated answers (zero-shot chain of thought, greedy).

    prompt    "{question}⏎", the form in which training sees such questions (data/records.py)

An answer is correct if its last number equals the one after "####" in the dataset's answer. Numbers are compared by
value: "1,000", "$1000" and "1000.0" are equal.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from thoughtbubbles.data.records import question_prompt
from thoughtbubbles.evals.tasks.task import Question, Task, shown, text_of

NUMBER = re.compile(r"(?:(?<![\d.)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")  # "20-18" ends in 18


def document(record: Mapping[str, Any]) -> Question:
    _, mark, answer = (part.strip() for part in text_of(record, "answer").rpartition("####"))
    if not mark or last_number(answer) is None:
        raise ValueError(f"answer ends in {shown(answer)}: it must end in #### and a number")
    return Question(question_prompt(text_of(record, "question")), answer)


def last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def is_right(text: str, answer: str) -> bool:
    return last_number(text) == last_number(answer)


GSM8K = Task(
    name="gsm8k",
    version=1,
    title="GSM8K",
    file="gsm8k.test",
    home="https://huggingface.co/datasets/openai/gsm8k",
    fields="question, answer (ending in #### and a number)",
    document=document,
    max_new=256,
    is_right=is_right,
)
