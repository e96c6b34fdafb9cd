"""CLUTRR: how are two people of a short story related? Answered by the lowest mean loss over the relation names.

    context   "{story} {second} is {first}'s"           continuation   " {relation}"

Stories write names in brackets, which are taken off. The test parts of all the sets at hand count. Results are told
apart by the number of hops, the relations that have to be put together, and by what else is in the story: nothing,
supporting facts, facts that lead nowhere, or facts about strangers.
"""

import ast
from collections.abc import Mapping
from typing import Any

from thoughtbubbles.evals.tasks.task import Choices, Task, spaced, text_of

RELATIONS = (
    *("aunt", "brother", "daughter", "daughter-in-law", "father", "father-in-law", "granddaughter", "grandfather"),
    *("grandmother", "grandson", "mother", "mother-in-law", "nephew", "niece", "sister", "son", "son-in-law", "uncle"),
)
NOISE = {"1": "none", "2": "supporting", "3": "irrelevant", "4": "disconnected"}


def document(record: Mapping[str, Any]) -> Choices | None:
    if text_of(record, "split") != "test":
        return None
    story = text_of(record, "story").replace("[", "").replace("]", "").strip()
    first, second = _names(text_of(record, "query"))
    kind, _, hops = text_of(record, "task_name").removeprefix("task_").partition(".")
    relation = text_of(record, "target")
    if relation not in RELATIONS or kind not in NOISE or not hops.isdecimal():
        raise ValueError(f"target is {relation!r} and task_name {record['task_name']!r}: they are none of CLUTRR's")
    groups = {"hops": hops, "noise": NOISE[kind]}
    return Choices(f"{story} {second} is {first}'s", spaced(RELATIONS), RELATIONS.index(relation), groups)


def _names(query: str) -> tuple[str, str]:
    try:
        first, second = ast.literal_eval(query)
    except (SyntaxError, ValueError, TypeError):
        raise ValueError(f"query is {query!r}: it must be a pair of names, as ('Ann', 'Bob')") from None
    return str(first), str(second)


CLUTRR = Task(
    name="clutrr",
    version=1,
    title="CLUTRR",
    file="clutrr.data_*",
    home="https://github.com/facebookresearch/clutrr (a file for each set, all its CSV files in it)",
    fields="story, query, target, task_name, split",
    document=document,
)
