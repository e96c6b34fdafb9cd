"""PIQA: which of two solutions reaches an everyday goal?

context   "Question: {goal}⏎Answer:"                continuation   a space and a solution
"""

from collections.abc import Mapping
from typing import Any

from thoughtbubbles.evals.tasks.task import Choices, Task, place_of, spaced, text_of


def document(record: Mapping[str, Any]) -> Choices:
    ways = [text_of(record, name) for name in ("sol1", "sol2")]
    return Choices(f"Question: {text_of(record, 'goal')}\nAnswer:", spaced(ways), place_of(record, "label", 2))


PIQA = Task(
    name="piqa",
    version=1,
    title="PIQA",
    file="piqa.validation",
    home="https://huggingface.co/datasets/ybisk/piqa",
    fields="goal, sol1, sol2, label (0 or 1)",
    document=document,
)
