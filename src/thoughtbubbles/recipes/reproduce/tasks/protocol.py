"""Which models are compared on which made-up tasks (data/tasks), and for how long each is trained.

All forms of a task are trained with the same FLOPs: `r2` for 6,000 steps, every other one for as many as its FLOPs
allow, with the learning rate schedule stretched. Data never ends, so no example is seen twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from thoughtbubbles.data.tasks import PREFIX, TASKS, task_named
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import DataConfig, EvalConfig, LogConfig, OptimConfig, RunConfig, SaveConfig

SEEDS = (0, 1, 2)
VOCABULARY = 384  # 256 bytes and end-of-text, rounded up
FORKS = {"fork_layers": (1, 2, 3), "merge": "residual"}
REFERENCE = "r2"  # the form whose FLOPs all others get


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of everything."""

    width: int = 128
    rows: int = 64
    """Per step."""
    steps: int = 6000
    """Of the reference form."""
    evaluations: int = 20
    """Of the validation loss, while training."""
    eval_tokens: int = 1 << 17
    examples: int = 2048
    """Of each split, to measure the trained model on."""


FULL = Scale()


@dataclass(frozen=True, kw_only=True)
class Form:
    what: str
    model: Mapping[str, Any]
    """Fields of the model that differ from plain."""


FORMS = {
    "plain": Form(what="plain GPT, 2 heads", model={}),
    "heads": Form(what="plain GPT, 4 heads", model={"n_head": 4}),
    "r1": Form(what="scores and attenuation, no fork survives", model={**FORKS, "budget": 1}),
    "copy-2": Form(what="every embedding twice", model={"copies": 2}),
    "block-r2": Form(what="block selection, 2 streams per token", model={**FORKS, "selection": "block", "budget": 2}),
    "block-r4": Form(what="block selection, 4 streams per token", model={**FORKS, "selection": "block", "budget": 4}),
    "r2": Form(what="causal selection, 2 streams per token", model={**FORKS, "budget": 2}),
    "r4": Form(what="causal selection, 4 streams per token", model={**FORKS, "budget": 4}),
}


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    task: str
    form: str
    seeds: tuple[int, ...] = SEEDS

    @property
    def what(self) -> str:
        return f"{TASKS[self.task].what}; {FORMS[self.form].what}"


def task_rows() -> dict[str, TaskRow]:
    return {f"{task}-{form}": TaskRow(task=task, form=form) for task in TASKS for form in FORMS}


def model_of(row: TaskRow, scale: Scale = FULL) -> ModelConfig:
    plain: dict[str, Any] = {"n_layer": 4, "n_head": 2, "width": scale.width, "merge": "original"}
    size = task_named(row.task).block_size
    return ModelConfig(**{**plain, "vocab_size": VOCABULARY, "block_size": size, **FORMS[row.form].model})


def run_of(name: str, row: TaskRow, seed: int, scale: Scale = FULL) -> RunConfig:
    model = model_of(row, scale)
    per_step = scale.rows * model.block_size
    config = RunConfig(
        name=f"tasks/{name}-seed{seed}",
        model=model,
        tokens=per_step,
        tokens_per_step=per_step,
        data=DataConfig(mixture=(PREFIX + row.task,)),
        optim=OptimConfig(lr=2e-3, warmup=0.05),
        log=LogConfig(every=50),
        seed=seed,
    )
    reference = replace(config, model=model_of(TaskRow(task=row.task, form=REFERENCE), scale))
    own = max(1, round(scale.steps * reference.flops_per_row / config.flops_per_row))
    return replace(
        config,
        tokens=own * per_step,
        save=SaveConfig(every=max(1, own // 4), keep=1),
        eval=EvalConfig(every=max(1, own // scale.evaluations), tokens=scale.eval_tokens, sample_tokens=0),
    )
