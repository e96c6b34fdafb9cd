"""The benchmarks by name, one file per benchmark; data/records.py has the prompts shared with training."""

from thoughtbubbles.evals.tasks.arc import ARC_CHALLENGE, ARC_EASY
from thoughtbubbles.evals.tasks.blimp import BLIMP
from thoughtbubbles.evals.tasks.clutrr import CLUTRR
from thoughtbubbles.evals.tasks.gsm8k import GSM8K
from thoughtbubbles.evals.tasks.hellaswag import HELLASWAG
from thoughtbubbles.evals.tasks.lambada import LAMBADA
from thoughtbubbles.evals.tasks.mmlu import MMLU, MMLU_CONTINUATION
from thoughtbubbles.evals.tasks.piqa import PIQA
from thoughtbubbles.evals.tasks.task import Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(LAMBADA, HELLASWAG, BLIMP, PIQA, ARC_EASY, ARC_CHALLENGE),
        *(MMLU, MMLU_CONTINUATION, CLUTRR, GSM8K),
    )
}
