"""LAMBADA, OpenAI's version: predict the last word of a passage, which needs the whole passage.

    context   the passage up to its last space          continuation   a space and the last word

A passage is solved if every token of the word is the most likely one. `nats` is the loss of the word; perplexity, as in
lm-evaluation-harness, is the exponential of its mean over passages.
"""

from collections.abc import Mapping
from typing import Any

from thoughtbubbles.evals.tasks.task import Choices, Task, text_of


def document(record: Mapping[str, Any]) -> Choices:
    context, word = f"{text_of(record, 'context')} {text_of(record, 'target')}".rsplit(" ", 1)
    return Choices(context, (f" {word}",), 0)


LAMBADA = Task(
    name="lambada",
    version=1,
    title="LAMBADA",
    file="lambada_openai.test",
    home="https://huggingface.co/datasets/EleutherAI/lambada_openai",
    fields="context, target (the last word)",
    document=document,
)
