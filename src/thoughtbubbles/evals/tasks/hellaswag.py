"""HellaSwag: which of four endings follows?

    context   "{activity_label}: {ctx_a} {Ctx_b}"       continuation   a space and an ending

Ctx_b is capitalized (first letter upper case, the rest lower case). The markers of the WikiHow part ("[header]",
"[title]", "[step]") are removed from context and endings, in the same order as in lm-evaluation-harness.
"""

from collections.abc import Mapping
from typing import Any

from thoughtbubbles.evals.tasks.task import Choices, Task, place_of, spaced, text_of, texts_of


def cleaned(text: str) -> str:
    lines = text.strip().replace(" [title]", ". ").split("\n")
    return "\n".join(map(_without_marks, lines)).replace("  ", " ")


def _without_marks(line: str) -> str:
    """Removes bracketed text, each up to the next closing bracket. (On "[[[[…" a regular expression takes n² steps.)"""
    kept, begin = [], 0
    while (opened := line.find("[", begin)) >= 0 and (closed := line.find("]", opened)) >= 0:
        kept.append(line[begin:opened])
        begin = closed + 1
    return "".join([*kept, line[begin:]])


def document(record: Mapping[str, Any]) -> Choices:
    label, first, second = (text_of(record, name) for name in ("activity_label", "ctx_a", "ctx_b"))
    endings = [cleaned(ending) for ending in texts_of(record, "endings")]
    context = cleaned(f"{label}: {first} {second.capitalize()}")
    return Choices(context, spaced(endings), place_of(record, "label", len(endings)))


HELLASWAG = Task(
    name="hellaswag",
    version=1,
    title="HellaSwag",
    file="hellaswag.validation",
    home="https://huggingface.co/datasets/Rowan/hellaswag",
    fields="activity_label, ctx_a, ctx_b, endings, label (0 to 3)",
    document=document,
)
