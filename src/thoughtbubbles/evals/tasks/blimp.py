"""BLiMP: of two sentences that differ in one place, which one is grammatical? 67 sets of 1,000 pairs.

    context   none, that is one end-of-text token       continuation   a space and the sentence

The space is added as in lm-evaluation-harness.
"""

from collections.abc import Mapping
from typing import Any

from thoughtbubbles.evals.tasks.task import Choices, Task, spaced, text_of


def document(record: Mapping[str, Any]) -> Choices:
    sentences = [text_of(record, name) for name in ("sentence_good", "sentence_bad")]
    return Choices("", spaced(sentences), 0, {"set": text_of(record, "UID")})


BLIMP = Task(
    name="blimp",
    version=1,
    title="BLiMP",
    file="blimp",
    home="https://huggingface.co/datasets/nyu-mll/blimp (all 67 sets in one file)",
    fields="sentence_good, sentence_bad, UID (the set)",
    document=document,
)
