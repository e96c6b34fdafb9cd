"""ARC, easy and challenge: grade-school science questions with three to five answers.

context   "Question: {question}⏎Answer:"            continuation   a space and an answer
"""

from collections.abc import Mapping
from typing import Any

from thoughtbubbles.evals.tasks.task import Choices, Task, place_of, spaced, text_of, texts_of


def document(record: Mapping[str, Any]) -> Choices:
    choices = texts_of(record, "choices")
    context = f"Question: {text_of(record, 'question')}\nAnswer:"
    return Choices(context, spaced(choices), place_of(record, "gold", len(choices)))


ARC_EASY, ARC_CHALLENGE = (
    Task(
        name=name,
        version=1,
        title=title,
        file=f"{name}.test",
        home="https://huggingface.co/datasets/allenai/ai2_arc",
        fields="question, choices, gold (from 0)",
        document=document,
    )
    for name, title in (("arc_easy", "ARC-Easy"), ("arc_challenge", "ARC-Challenge"))
)
