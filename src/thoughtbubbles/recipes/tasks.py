"""Made-up tasks whose hard places are known (data/tasks): minutes on two cores, without any data."""

from collections.abc import Callable, Iterator
from functools import partial

from thoughtbubbles.data.tasks import PREFIX, TASKS, task_named
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import DataConfig, EvalConfig, OptimConfig, RunConfig, SaveConfig

VOCABULARY = 384  # 256 bytes and end-of-text, rounded up
ROWS, STEPS = 32, 1500
FORKS = {"fork_layers": (1, 2), "merge": "residual"}
NO_FORKS = {"merge": "original"}


def task_run(name: str, *, is_plain: bool = False) -> RunConfig:
    """About 220,000 parameters; every example is seen once."""
    task = task_named(name)
    forks = NO_FORKS if is_plain else FORKS
    model = ModelConfig(
        n_layer=4,
        n_head=2,
        width=64,
        vocab_size=VOCABULARY,
        block_size=task.block_size,
        **forks,  # type: ignore[arg-type]
    )
    return RunConfig(
        name=f"task-{name}{'-plain' * is_plain}",
        model=model,
        tokens=STEPS * ROWS * task.block_size,
        tokens_per_step=ROWS * task.block_size,
        data=DataConfig(mixture=(PREFIX + name,)),
        optim=OptimConfig(lr=2e-3, warmup=0.05),
        save=SaveConfig(every=500),
        eval=EvalConfig(every=250, tokens=1 << 16, sample_tokens=0),
    )


def recipes() -> Iterator[tuple[str, Callable[[], RunConfig], str]]:
    for name, task in TASKS.items():
        yield PREFIX + name, partial(task_run, name), task.what
        yield f"{PREFIX}{name}-plain", partial(task_run, name, is_plain=True), "the same without forks"
