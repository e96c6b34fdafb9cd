"""The files of GSM8K-aug, chains of equations to train on: shared by `reproduce gsm8k` and `reproduce two-stage`."""

from dataclasses import replace

from thoughtbubbles.evals.tasks.gsm8k import GSM8K
from thoughtbubbles.evals.tasks.task import Task


def examples_file(split: str) -> Task:
    """As a benchmark, for its file: question, steps and answer on each line."""
    return replace(
        GSM8K,
        name="gsm8k-aug",
        file=f"gsm8k_augformat.{split}",
        home=("https://huggingface.co/datasets/whynlp/gsm8k-aug (or GSM8K's own training questions in its form)"),
        fields="question, steps, answer",
    )
