"""CLUTRR: how are two people in a short story related? The answer is the relation with the lowest mean loss.

    context   "{story} {second} is {first}'s"           continuation   " {relation}"

The prompt is that of training (data/records.py), which removes the brackets around names in the stories. The test
splits of all available sets are used. Results are grouped by the number of hops (relations to combine) and by the noise
in the story: none, supporting facts, irrelevant facts, or disconnected facts.
"""

from collections.abc import Mapping
from typing import Any

from thoughtbubbles.data.records import relation_prompt
from thoughtbubbles.evals.tasks.task import Choices, Task, shown, spaced, text_of

RELATIONS = (
    *("aunt", "brother", "daughter", "daughter-in-law", "father", "father-in-law", "granddaughter", "grandfather"),
    *("grandmother", "grandson", "mother", "mother-in-law", "nephew", "niece", "sister", "son", "son-in-law", "uncle"),
)
NOISE = {"1": "none", "2": "supporting", "3": "irrelevant", "4": "disconnected"}


def document(record: Mapping[str, Any]) -> Choices | None:
    if text_of(record, "split") != "test":
        return None
    prompt = relation_prompt(text_of(record, "story"), text_of(record, "query"))
    kind, _, hops = text_of(record, "task_name").removeprefix("task_").partition(".")
    relation = text_of(record, "target")
    if relation not in RELATIONS or kind not in NOISE or not (hops.isdecimal() and len(hops) < 4):
        raise ValueError(
            f"target is {shown(relation)} and task_name {shown(record['task_name'])}: not a relation and task of CLUTRR"
        )
    groups = {"hops": hops, "noise": NOISE[kind]}
    return Choices(prompt, spaced(RELATIONS), RELATIONS.index(relation), groups)


CLUTRR = Task(
    name="clutrr",
    version=1,
    title="CLUTRR",
    file="clutrr.data_*",
    home="https://github.com/facebookresearch/clutrr (one file per set, with all its CSV files)",
    fields="story, query, target, task_name, split",
    document=document,
)
