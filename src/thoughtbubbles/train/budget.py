"""The budget of a training step, also for a model that keeps all forks.

Without scores a model cannot choose which forks to keep, so it follows no budget below 2ⁿ; but it can go without any.
Then it is the plain model with the same blocks, and costs as much. That is its budget 1, in training only: with
`--forks-from 0.75`, three quarters of a run are those of the plain model, and with `--budgets 1 2` every other step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles


def is_plain(config: ModelConfig, budget: int | float | None) -> bool:
    return budget == 1 and not config.scores


def with_budget(config: ModelConfig, budget: int | float) -> ModelConfig:
    """The model whose cost a step with this budget has."""
    return config.without_forks() if is_plain(config, budget) else replace(config, budget=budget)


@contextmanager
def at_budget(model: Thoughtbubbles, budget: int | float | None) -> Iterator[int | float | None]:
    """Gives the budget for `forward`; None is the model's own. Meanwhile the model may be plain."""
    if not is_plain(model.config, budget):
        yield budget
        return
    whole, model.config = model.config, model.config.without_forks()
    try:
        yield None
    finally:
        model.config = whole
