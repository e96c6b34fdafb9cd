"""Which models are compared on which made-up tasks (data/tasks), and for how long each is trained.

    tasks         every form on every task, three seeds; on `circle` also variants of `feedback`
    tasks-sweep   the learning rates that these use: two forms on two tasks, nine on another

All forms of a task are trained with the same FLOPs: `r2` for 6,000 steps, every other one for as many as its FLOPs
allow, with the learning rate schedule stretched. Within a seed all forms read the same examples in the same order, and
none is seen twice.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

from thoughtbubbles.data.tasks import TASKS, task_named
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import flops
from thoughtbubbles.recipes.reproduce.parts import GROUP
from thoughtbubbles.recipes.tasks import FEEDBACK, VOCABULARY
from thoughtbubbles.train.config import DataConfig, EvalConfig, LogConfig, OptimConfig, RunConfig, SaveConfig

SEEDS = (0, 1, 2)
FORKS = {"fork_layers": (1, 2, 3), "merge": "residual"}
SAMPLE = 256  # training examples whose lengths stand for all
REFERENCE = "r2"  # the form whose FLOPs all others get
# Learning rates of the forms without fork layers and of those with them, and in some tasks of single forms: the best
# ones of `tasks-sweep`, with which a test compares them.
TUNED = {"plain": 5e-4, "r2": 5e-4}
TUNED_FOR = {
    "circle": {
        "plain": 4e-3,
        "heads": 2e-3,
        "deep": 5e-4,
        "copy-2": 2e-3,
        "r2": 5e-4,
        "feedback": 1e-3,
        "forked": 4e-3,
        "feedback-private": 1e-3,
        "feedback-residual": 5e-4,
    },
}
SWEPT = {"lookups": TUNED, "parity": TUNED, **TUNED_FOR}  # forms by task
SWEPT_RATES = (5e-4, 1e-3, 2e-3, 4e-3)


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
    budgets: tuple[float, ...] = ()
    """Of which each step draws one, instead of the model's own."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """On which it is run."""


FORMS = {
    "plain": Form(what="plain GPT, 2 heads", model={}),
    "heads": Form(what="plain GPT, 4 heads", model={"n_head": 4}),
    "deep": Form(what="plain GPT, 7 layers, as deep as `feedback`", model={"n_layer": 7}),
    "r1": Form(what="scores and attenuation, no fork survives", model={**FORKS, "budget": 1}),
    "copy-2": Form(what="every embedding twice", model={"copies": 2}),
    "block-r2": Form(what="block selection, 2 streams per token", model={**FORKS, "selection": "block", "budget": 2}),
    "block-r4": Form(what="block selection, 4 streams per token", model={**FORKS, "selection": "block", "budget": 4}),
    "r1.25": Form(what="causal selection, 5 streams per 4 tokens", model={**FORKS, "budget": 1.25}),
    "r2": Form(what="causal selection, 2 streams per token", model={**FORKS, "budget": 2}),
    "r4": Form(what="causal selection, 4 streams per token", model={**FORKS, "budget": 4}),
    "r2-elastic": Form(
        what="`r2`, each step with 1 or 2 streams per token", model={**FORKS, "budget": 2}, budgets=(1.0, 2.0)
    ),
    "feedback": Form(
        what="forks before block 1, after all originals, from the last state of the previous token too; they see forks",
        model=FEEDBACK,
    ),
    "forked": Form(
        what="`feedback` without feedback: forks go through the blocks beside the originals, and all streams see all",
        model={**FEEDBACK, "fork_reach": None, "feedback": False},
        tasks=("circle",),
    ),
    "feedback-private": Form(
        what="`feedback`, but forks do not see forks", model={**FEEDBACK, "fork_reach": 0}, tasks=("circle",)
    ),
    "feedback-residual": Form(
        what="`feedback`, but the mean of original and fork predicts",
        model={**FEEDBACK, "merge": "residual"},
        tasks=("circle",),
    ),
}


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    task: str
    form: str
    seeds: tuple[int, ...] = SEEDS
    lr: float | None = None
    """Instead of the tuned one."""

    @property
    def what(self) -> str:
        rate = "" if self.lr is None else f", lr {self.lr:g}"
        return f"{TASKS[self.task].what}; {FORMS[self.form].what}{rate}"


def forms_of(task: str) -> list[str]:
    return [form for form, settings in FORMS.items() if task in settings.tasks]


def task_rows() -> dict[str, TaskRow]:
    return {f"{task}-{form}": TaskRow(task=task, form=form) for task in TASKS for form in forms_of(task)}


def sweep_rows() -> dict[str, TaskRow]:
    return {
        f"{task}-{form}-lr{lr:g}": TaskRow(task=task, form=form, seeds=SEEDS[:1], lr=lr)
        for task, forms in SWEPT.items()
        for form in forms
        for lr in SWEPT_RATES
    }


def learning_rate(row: TaskRow) -> float:
    if row.lr is not None:
        return row.lr
    tuned = {**TUNED, **TUNED_FOR.get(row.task, {})}
    return tuned.get(row.form) or tuned["r2" if "fork_layers" in FORMS[row.form].model else "plain"]


def model_of(row: TaskRow, scale: Scale = FULL) -> ModelConfig:
    plain: dict[str, Any] = {"n_layer": 4, "n_head": 2, "width": scale.width, "merge": "original"}
    size = task_named(row.task).block_size
    return ModelConfig(**{**plain, "vocab_size": VOCABULARY, "block_size": size, **FORMS[row.form].model})


def run_of(name: str, row: TaskRow, seed: int, scale: Scale = FULL, *, data: str) -> RunConfig:
    """`data`: the folder of `n_examples` examples."""
    model = model_of(row, scale)
    per_step = scale.rows * model.block_size
    steps = steps_of(row, scale)
    return RunConfig(
        name=name,
        model=model,
        tokens=steps * per_step,
        tokens_per_step=per_step,
        budgets=FORMS[row.form].budgets,
        data=DataConfig(mixture=(f"{data}=1",)),  # with a weight: a path may have a "="
        optim=OptimConfig(lr=learning_rate(row), warmup=0.05),
        save=SaveConfig(every=max(1, steps // 4), keep=1),
        eval=EvalConfig(every=max(1, steps // scale.evaluations), tokens=scale.eval_tokens, sample_tokens=0),
        log=LogConfig(every=GROUP),
        seed=seed,
    )


def steps_of(row: TaskRow, scale: Scale = FULL) -> int:
    """As many as cost what the steps of the reference form cost."""
    own, reference = (flops_per_row(each, scale) for each in (row, TaskRow(task=row.task, form=REFERENCE)))
    return max(1, round(scale.steps * reference / own))


def flops_per_row(row: TaskRow, scale: Scale = FULL) -> float:
    """Forward and backward of a training example at its real length: padding does not count as work."""
    model, counts = model_of(row, scale), lengths(row.task)
    each = [replace(model, budget=budget) for budget in FORMS[row.form].budgets] or [model]
    whole = sum(n * flops(one, n_tokens) for one in each for n_tokens, n in counts.items())
    return whole / len(each) / sum(counts.values())


@cache
def lengths(task: str) -> Counter[int]:
    """How often each length occurs among some training examples."""
    some = islice(task_named(task).examples("train", seed=0), SAMPLE)
    return Counter(len(example.tokens) - 1 for example in some)


def n_examples(task: str, scale: Scale = FULL) -> int:
    """Enough for every form, so that all can read the same ones."""
    return scale.rows * max(steps_of(TaskRow(task=task, form=form), scale) for form in forms_of(task))
