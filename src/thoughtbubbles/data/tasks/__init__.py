"""Made-up tasks whose hard places are known, by name. `thoughtbubbles train task:NAME` trains on one."""

from thoughtbubbles.data.tasks.chain import CHAIN
from thoughtbubbles.data.tasks.circle import CIRCLE
from thoughtbubbles.data.tasks.copying import COPY
from thoughtbubbles.data.tasks.khop import KHOP
from thoughtbubbles.data.tasks.lookups import LOOKUPS
from thoughtbubbles.data.tasks.task import Task
from thoughtbubbles.data.tasks.tracking import PARITY, PERMUTE
from thoughtbubbles.files import did_you_mean

PREFIX = "task:"
TASKS: dict[str, Task] = {task.name: task for task in (KHOP, LOOKUPS, PARITY, PERMUTE, CHAIN, CIRCLE, COPY)}


def task_named(name: str) -> Task:
    if name not in TASKS:
        hint = did_you_mean(name, TASKS, otherwise=f"choose from {', '.join(TASKS)}")
        raise ValueError(f"{PREFIX}{name}: no task has this name; {hint}")
    return TASKS[name]
