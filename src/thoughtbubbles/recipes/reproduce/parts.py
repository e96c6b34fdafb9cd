"""What protocols are made of: rows, their runs, and the models and settings that several protocols have."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from thoughtbubbles.files import did_you_mean
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import DataConfig, EvalConfig, LogConfig, OptimConfig, RunConfig, SaveConfig

PLAIN = "plain"  # the row that all others are compared with
GROUP = 50  # steps whose mean training loss is recorded


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model of a protocol."""

    what: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the protocol's model that are different."""
    optim: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the protocol's optimizer settings that are different."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the run that are different."""
    seeds: tuple[int, ...] = (0,)
    length: float = 1.0
    """Training tokens, as a multiple of the protocol's."""
    zero_shot: bool = False
    """Also answer the zero-shot benchmarks."""
    ensemble: int = 1
    """More than 1: the mean prediction of this many models of row `plain`, with this and the following seeds."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    what: str
    model: ModelConfig
    """With a vocabulary that is replaced by the corpus's own."""
    optim: OptimConfig
    rows: Mapping[str, Row]
    epochs: float
    """Passes over the text."""
    text: int | None = None
    """Use only this many tokens of the training text: every k-th document."""
    most: int | None = None
    """Train on at most this many tokens."""
    rows_per_step: int = 64
    is_best: bool = False
    """Measure the weights with the best validation loss, not the last ones."""
    evaluations: int = 20
    """How often the validation loss is computed while training."""
    eval_tokens: int = 1 << 18
    ar_windows: int = 64
    """Windows of the validation text that are also scored token by token."""

    def row(self, name: str, *, protocol: str) -> Row:
        if name not in self.rows:
            hint = did_you_mean(name, self.rows, otherwise=f"it has {', '.join(self.rows)}")
            raise ValueError(f"--only {name}: {protocol} has no such row; {hint}")
        return self.rows[name]

    def config(self, name: str, *, protocol: str, seed: int, data: str, n_tokens: int, vocab_size: int) -> RunConfig:
        """The run of a row on a corpus of `n_tokens` tokens."""
        row = self.row(name, protocol=protocol)
        per_step = self.rows_per_step * self.model.block_size
        wanted = self.epochs * n_tokens
        steps = max(1, int(row.length * (wanted if self.most is None else min(self.most, wanted))) // per_step)
        model = replace(self.model, vocab_size=-(-vocab_size // 128) * 128, **row.model)
        evaluate_every = max(1, steps // self.evaluations)
        run = RunConfig(
            name=f"{protocol}/{name}-seed{seed}",
            model=model,
            tokens=steps * per_step,
            tokens_per_step=per_step,
            data=DataConfig(mixture=(data,)),
            optim=replace(self.optim, **row.optim),
            # The best weights may be those of any evaluation, so all are kept until the end.
            save=SaveConfig(every=evaluate_every, keep=1000 if self.is_best else 1),
            eval=EvalConfig(every=evaluate_every, tokens=self.eval_tokens, sample_tokens=0),
            log=LogConfig(every=GROUP),
            seed=seed,
        )
        return replace(run, **row.run)


def plain_model(**shape: Any) -> ModelConfig:
    return ModelConfig(merge="original", **shape)


def forks(budget: int, *, layers: tuple[int, ...] = (3, 7, 11), **changes: Any) -> dict[str, Any]:
    return {"fork_layers": layers, "merge": "residual", "budget": budget, **changes}


THREE = (0, 1, 2)
R1, R2 = "scores and attenuation, no fork survives (r = 1)", "causal selection, 2 streams per token"
BLOCK = "block selection (the paper's), 2 streams per token"

# For the rows without forks and for those with them: the best of `long-sweep`, with which a test compares them.
TUNED = {"plain": {"lr": 3e-3, "weight_decay": 0.1}, "r2": {"lr": 3e-3, "weight_decay": 0.1}}
# Every fork is seen inside its bubble alone, has score 1, and predicts; originals carry state for later tokens.
STATE: dict[str, Any] = {"fork_reach": 0, "merge": "forks", "scores": False}
EVERY = "every token forked once before block {layer}, all scores 1, private; forks predict"
FEEDBACK = "`state-{layer}`, forks start from the last state of the previous token too"
LONG = plain_model(n_layer=12, n_head=4, width=256)
LONG_OPTIM = OptimConfig(warmup=0.02)


def gated_forks() -> dict[str, Row]:
    """Candidates for better forks with the gate per head, and their control without a fork."""
    models = {
        "r1-gate": ("r = 1", forks(1)),
        "r2-gate": ("r = 2", forks(2)),
        "state-3-gate": (EVERY.format(layer=3), forks(2, layers=(3,), **STATE)),
        "feedback-3-gate": (FEEDBACK.format(layer=3), forks(2, layers=(3,), **STATE, feedback=True)),
        "feedback-3-reach64-gate": (
            "`feedback-3`, forks see forks of the 64 tokens before",
            forks(2, layers=(3,), **{**STATE, "fork_reach": 64}, feedback=True),
        ),
    }
    return {
        name: Row(what=f"{what}; a sigmoid gate per head", model={**model, "head_gate": True}, optim=TUNED["r2"])
        for name, (what, model) in models.items()
    }


def late_forks(budget: int) -> Row:
    """Most of the training at the price of the gate alone."""
    what = f"r = {budget} in the last quarter, r = 1 before"
    return Row(what=what, model=forks(budget), optim=TUNED["r2"], run={"forks_from": 0.75})


def gated_forks_from(begin: float, when: str) -> Row:
    """The presets' form, trained as the plain model with the same gate until then."""
    what = f"`feedback-3-reach64-gate` in the last {when}, `head-gate` before"
    return replace(gated_forks()["feedback-3-reach64-gate"], what=what, run={"forks_from": begin})
