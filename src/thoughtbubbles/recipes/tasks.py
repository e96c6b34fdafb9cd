"""Made-up tasks whose hard places are known (data/tasks): minutes on two cores, without any data."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from thoughtbubbles.data.tasks import PREFIX, TASKS, task_named
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import DataConfig, EvalConfig, OptimConfig, RunConfig, SaveConfig

VOCABULARY = 384  # 256 bytes and end-of-text, rounded up
ROWS, STEPS = 32, 1500
# The form of the other presets, except for the gate per head; forks see all forks before them.
FEEDBACK: dict[str, Any] = {
    "fork_layers": (1,),
    "fork_reach": 512,
    "feedback": True,
    "merge": "forks",
    "scores": False,
}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {  # by what the recipe's name ends with
    "": ("", FEEDBACK),
    "-causal": ("forks chosen by learned scores", {"fork_layers": (1, 2), "merge": "residual"}),
    "-plain": ("without forks", {"merge": "original"}),
}


def task_run(name: str, form: str = "") -> RunConfig:
    """About 220,000 parameters; every example is seen once."""
    task = task_named(name)
    model = ModelConfig(
        n_layer=4,
        n_head=2,
        width=64,
        vocab_size=VOCABULARY,
        block_size=task.block_size,
        **FORMS[form][1],
    )
    return RunConfig(
        name=f"task-{name}{form}",
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
        for form, (about, _) in FORMS.items():
            yield f"{PREFIX}{name}{form}", partial(task_run, name, form), about or task.what
