"""CLUTRR: how are two people of a short story related? Answered by the lowest mean loss over the relation names.

    context   "{story} {second} is {first}'s"           continuation   " {relation}"

Stories write names in brackets, which are taken off. The test parts of all the sets at hand count. Results are told
apart by the number of hops, the relations that have to be put together, and by what else is in the story: nothing,
supporting facts, facts that lead nowhere, or facts about strangers.
"""

import re
from collections.abc import Mapping
from typing import Any

from thoughtbubbles.evals.tasks.task import Choices, Task, shown, spaced, text_of

RELATIONS = (
    *("aunt", "brother", "daughter", "daughter-in-law", "father", "father-in-law", "granddaughter", "grandfather"),
    *("grandmother", "grandson", "mother", "mother-in-law", "nephew", "niece", "sister", "son", "son-in-law", "uncle"),
)
QUOTED = r"""(?:'([^'\\]*)'|"([^"\\]*)")"""
PAIR = re.compile(rf"\s*\(\s*{QUOTED}\s*,\s*{QUOTED}\s*\)\s*")  # a tuple as Python writes it; nothing is evaluated
NOISE = {"1": "none", "2": "supporting", "3": "irrelevant", "4": "disconnected"}


def document(record: Mapping[str, Any]) -> Choices | None:
    if text_of(record, "split") != "test":
        return None
    story = text_of(record, "story").replace("[", "").replace("]", "").strip()
    first, second = _names(text_of(record, "query"))
    kind, _, hops = text_of(record, "task_name").removeprefix("task_").partition(".")
    relation = text_of(record, "target")
    if relation not in RELATIONS or kind not in NOISE or not (hops.isdecimal() and len(hops) < 4):
        raise ValueError(
            f"target is {shown(relation)} and task_name {shown(record['task_name'])}: they are none of CLUTRR's"
        )
    groups = {"hops": hops, "noise": NOISE[kind]}
    return Choices(f"{story} {second} is {first}'s", spaced(RELATIONS), RELATIONS.index(relation), groups)


def _names(query: str) -> tuple[str, str]:
    found = PAIR.fullmatch(query)
    if found is None:
        raise ValueError(f"query is {shown(query)}: it must be a pair of names, as ('Ann', 'Bob')")
    first, second = (name for name in found.groups() if name is not None)
    return first, second


CLUTRR = Task(
    name="clutrr",
    version=1,
    title="CLUTRR",
    file="clutrr.data_*",
    home="https://github.com/facebookresearch/clutrr (a file for each set, all its CSV files in it)",
    fields="story, query, target, task_name, split",
    document=document,
)
