"""MMLU, 57 subjects, zero-shot; picks the answer with the lowest loss. Two forms:

mmlu, the form in which training sees such questions (data/records.py), as in the paper's mid-training:

    context   "{question}⏎A. …⏎B. …⏎C. …⏎D. …⏎Answer:"  continuation   " {letter}. {answer}"

mmlu_continuation, lm-evaluation-harness's task of that name, in which the model does not see the other answers:

    context   "The following are questions (with answers) about {subject}.⏎⏎Question: {question}⏎Answer:"
    continuation   a space and an answer
"""

from collections.abc import Mapping
from typing import Any

from thoughtbubbles.data.records import choice_answers, choices_prompt
from thoughtbubbles.evals.tasks.task import Choices, Task, place_of, spaced, text_of, texts_of

FIELDS = "subject, question, choices, answer (from 0)"
HOME = "https://huggingface.co/datasets/cais/mmlu"


def lettered(record: Mapping[str, Any]) -> Choices:
    choices = [choice.strip() for choice in texts_of(record, "choices")]
    context = choices_prompt(text_of(record, "question"), choices)
    return Choices(context, tuple(choice_answers(choices)), *_known(record, len(choices)))


def continued(record: Mapping[str, Any]) -> Choices:
    choices = texts_of(record, "choices")
    subject, question = text_of(record, "subject").replace("_", " "), text_of(record, "question").strip()
    context = f"The following are questions (with answers) about {subject}.\n\nQuestion: {question}\nAnswer:"
    return Choices(context, spaced(choices), *_known(record, len(choices)))


def _known(record: Mapping[str, Any], n_choices: int) -> tuple[int, dict[str, str]]:
    return place_of(record, "answer", n_choices), {"subject": text_of(record, "subject")}


MMLU = Task(name="mmlu", version=1, title="MMLU", file="mmlu.test", home=HOME, fields=FIELDS, document=lettered)
MMLU_CONTINUATION = Task(
    name="mmlu_continuation",
    version=1,
    title="MMLU continuation",
    file="mmlu.test",
    home=HOME,
    fields=FIELDS,
    document=continued,
)
