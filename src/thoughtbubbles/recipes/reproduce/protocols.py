"""The protocols behind docs/results: which models are compared, on how much text, with which settings.

A protocol is a list of rows; a row is one training run per seed. Within a seed all rows read the same text in the same
order and start from the same weights wherever names and sizes match (model/initial.py), so their losses are compared
in pairs. Everything that a row changes is in this file.

    long         a small model, trained far past the steep stretch of its loss curve: four epochs
    long-sweep   the learning rates and weight decays that `long` was tuned on: one epoch
    short        a larger model that sees each token once
    screen       ideas for better forks, a third of `long`'s tokens, one seed: what is ahead here gets three seeds
    scarce       20M tokens of text, many epochs, each row stopped at its best validation loss
    laptop       the first three rows at a size that takes minutes on a CPU: to try the command
"""

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

# For the rows without forks and for those with them. Once `long-sweep` is recorded, a test compares them with its best
# settings.
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


def long() -> Protocol:
    plain, forked = TUNED["plain"], TUNED["r2"]
    rows = {
        PLAIN: Row(what="plain GPT", optim=plain, seeds=THREE, zero_shot=True),
        "r1": Row(what=R1, model=forks(1), optim=forked, seeds=THREE, zero_shot=True),
        "r2": Row(what=R2, model=forks(2), optim=forked, seeds=THREE, zero_shot=True),
        "head-gate": Row(
            what="plain GPT, a sigmoid gate per head on the attention output",
            model={"head_gate": True},
            optim=plain,
            seeds=THREE,
            zero_shot=True,
        ),
        "block": Row(what=BLOCK, model=forks(2, selection="block"), optim=forked, zero_shot=True),
        "all-forked": Row(
            what="every token forked once before block 3, all scores 1",
            model=forks(2, layers=(3,), scores=False),
            optim=forked,
        ),
        "r4": Row(what="causal selection, 4 streams per token", model=forks(4), optim=forked),
        "copy-3": Row(what="copy-3: every embedding three times", model={"copies": 3}, optim=plain),
        "wider": Row(what="plain GPT of width 384", model={"width": 384, "n_head": 6}, optim=plain),
        "longer": Row(what="plain GPT, 1.8 × the tokens", optim=plain, length=1.8),
        "state-3": Row(what=EVERY.format(layer=3), model=forks(2, layers=(3,), **STATE), optim=forked),
        "feedback-3": Row(
            what=FEEDBACK.format(layer=3), model=forks(2, layers=(3,), **STATE, feedback=True), optim=forked
        ),
        **gated_forks(),
        **{f"r{budget}-late": late_forks(budget) for budget in (2, 4)},
        # As many tokens as `head-gate` reads in the GPU time of `feedback-3-gate`, by their steps (long/steps.json).
        "longer-gate": Row(
            what="plain GPT, a sigmoid gate per head, 2.05 × the tokens",
            model={"head_gate": True},
            optim=plain,
            length=2.05,
        ),
    }
    candidate = "feedback-3-reach64-gate"
    rows[candidate] = replace(rows[candidate], seeds=THREE, zero_shot=True)
    return Protocol(
        what="12 layers of width 256, four epochs of the text", model=LONG, optim=LONG_OPTIM, rows=rows, epochs=4.0
    )


def long_sweep() -> Protocol:
    """A cross: three learning rates at one weight decay, and two more weight decays at the middle learning rate."""
    points = [(1.5e-3, 0.1), (3e-3, 0.1), (6e-3, 0.1), (3e-3, 0.03), (3e-3, 0.3)]
    models: dict[str, tuple[str, dict[str, Any]]] = {PLAIN: ("plain GPT", {}), "r2": (R2, forks(2))}
    rows = {
        f"{name}-lr{lr:g}-wd{decay:g}": Row(
            what=f"{what}, lr {lr:g}, weight decay {decay:g}", model=model, optim={"lr": lr, "weight_decay": decay}
        )
        for name, (what, model) in models.items()
        for lr, decay in points
    }
    return Protocol(
        what="learning rate and weight decay for `long`: one epoch",
        model=LONG,
        optim=LONG_OPTIM,
        rows=rows,
        epochs=1.0,
        ar_windows=0,
    )


def screen() -> Protocol:
    """Where forks are visible, and who predicts; forks that every token has; gates; when forks begin.

    The gates of plain models are `head-gate`, `r1` and `r1-gate`: what has one of them too is compared with it.
    """
    seen = {"": "seen by all", "-reach64": "seen by 64 tokens", "-private": "private"}
    reach: dict[str, int | None] = {"": None, "-reach64": 64, "-private": 0}
    merges = {"": "residual", "-mixture": "mixture", "-forks": "forks"}
    modern: dict[str, Any] = {"block": "modern"}
    muon: dict[str, Any] = {"kind": "muon"}  # its updates have the size of AdamW's, so learning rates are the same
    plain, forked = TUNED["plain"], TUNED["r2"]
    rows = {
        PLAIN: Row(what="plain GPT", optim=plain),
        "head-gate": Row(what="plain GPT, a sigmoid gate per head", model={"head_gate": True}, optim=plain),
        "r1": Row(what=R1, model=forks(1), optim=forked),
        **{
            f"r2{far}{how}": Row(
                what=f"r = 2, forks {seen[far]}, merge `{merges[how]}`",
                model=forks(2, fork_reach=reach[far], merge=merges[how]),
                optim=forked,
            )
            for far in seen
            for how in merges
        },
        **{
            f"state-{layer}": Row(
                what=EVERY.format(layer=layer),
                model=forks(2, layers=(layer,), **STATE),
                optim=forked,
            )
            for layer in (0, 3, 6)
        },
        **{
            f"feedback-{layer}": Row(
                what=FEEDBACK.format(layer=layer),
                model=forks(2, layers=(layer,), **STATE, feedback=True),
                optim=forked,
            )
            for layer in (0, 3, 6)
        },
        "feedback-3-scores": Row(
            what="`feedback-3` with learned scores, which attenuate",
            model=forks(2, layers=(3,), fork_reach=0, merge="forks", feedback=True),
            optim=forked,
        ),
        "feedback-3-residual": Row(
            what="`feedback-3`, originals predict too",
            model=forks(2, layers=(3,), **{**STATE, "merge": "residual"}, feedback=True),
            optim=forked,
        ),
        **gated_forks(),
        "feedback-3-reach512-gate": Row(
            what="`feedback-3-gate`, forks see forks of all tokens before",
            model=forks(2, layers=(3,), **{**STATE, "fork_reach": 512}, feedback=True, head_gate=True),
            optim=forked,
        ),
        "feedback-0-reach64-gate": Row(
            what="`feedback-0`, forks see forks of the 64 tokens before; a sigmoid gate per head",
            model=forks(2, layers=(0,), **{**STATE, "fork_reach": 64}, feedback=True, head_gate=True),
            optim=forked,
        ),
        "r2-private-gate": Row(
            what="r = 2, private forks, a sigmoid gate per head",
            model=forks(2, fork_reach=0, head_gate=True),
            optim=forked,
        ),
        "r2-own": Row(
            what="r = 2, scores of the last fork layer alone, no product", model=forks(2, own_scores=True), optim=forked
        ),
        "r2-bias": Row(what="r = 2, all scores near 0.95 at first", model=forks(2, score_bias=3), optim=forked),
        "r2-relative": Row(
            what="r = 2, scores relative to the best of the bubble", model=forks(2, relative_scores=True), optim=forked
        ),
        "r2-relative-gate": Row(
            what="r = 2, relative scores, a sigmoid gate per head",
            model=forks(2, relative_scores=True, head_gate=True),
            optim=forked,
        ),
        "r2-private-relative-gate": Row(
            what="r = 2, private forks, relative scores, a sigmoid gate per head",
            model=forks(2, fork_reach=0, relative_scores=True, head_gate=True),
            optim=forked,
        ),
        "r2-once": Row(what="r = 2, a single fork layer, before block 3", model=forks(2, layers=(3,)), optim=forked),
        "r2-noise": Row(what="r = 2, forks chosen by scores with noise", model=forks(2, score_noise=0.5), optim=forked),
        "r2-full-writes": Row(
            what="r = 2, residual updates not attenuated", model=forks(2, gate_residual=False), optim=forked
        ),
        "modern": Row(what="plain, with RMSNorm, SwiGLU, query-key norm", model=modern, optim=plain),
        "modern-gate": Row(what="`modern`, a sigmoid gate per head", model={**modern, "head_gate": True}, optim=plain),
        "modern-r2": Row(what="`r2` with the blocks of `modern`", model=forks(2, **modern), optim=forked),
        "modern-state-3": Row(
            what="`state-3` with the blocks of `modern`", model=forks(2, layers=(3,), **STATE, **modern), optim=forked
        ),
        "modern-feedback-3-reach64-gate": Row(
            what="`feedback-3-reach64-gate` with the blocks of `modern`",
            model=forks(2, layers=(3,), **{**STATE, "fork_reach": 64}, feedback=True, head_gate=True, **modern),
            optim=forked,
        ),
        "modern-muon": Row(what="`modern`, trained with Muon", model=modern, optim={**plain, **muon}),
        "modern-muon-gate": Row(
            what="`modern-gate`, trained with Muon", model={**modern, "head_gate": True}, optim={**plain, **muon}
        ),
        "modern-muon-r2": Row(
            what="`modern-r2`, trained with Muon", model=forks(2, **modern), optim={**forked, **muon}
        ),
        "r2-late": late_forks(2),
        "r2-elastic": Row(
            what="r drawn from 1, 1.5, 2, 3 and 4, measured at 2",
            model=forks(2),
            optim=forked,
            run={"budgets": (1.0, 1.5, 2.0, 3.0, 4.0)},
        ),
    }
    return Protocol(
        what="ideas for better forks: the model of `long` on a third of its tokens",
        model=LONG,
        optim=LONG_OPTIM,
        rows=rows,
        epochs=4 / 3,
        ar_windows=0,
    )


def short() -> Protocol:
    rows = {
        PLAIN: Row(what="plain GPT", seeds=THREE),
        "r1": Row(what=R1, model=forks(1), seeds=THREE),
        "r2": Row(what=R2, model=forks(2), seeds=THREE),
        "block": Row(what=BLOCK, model=forks(2, selection="block"), seeds=THREE),
    }
    return Protocol(
        what="12 layers of width 512, 100.7M tokens, each seen once",
        model=plain_model(n_layer=12, n_head=8, width=512),
        optim=OptimConfig(lr=1.2e-3, warmup=0.05),
        rows=rows,
        epochs=1.0,
        most=3072 * 64 * 512,
    )


def scarce() -> Protocol:
    rows = {
        PLAIN: Row(what="plain GPT", optim=TUNED["plain"], seeds=(0, 1)),
        "r1": Row(what=R1, model=forks(1), optim=TUNED["r2"]),
        "r2": Row(what=R2, model=forks(2), optim=TUNED["r2"]),
        "r4": Row(what="causal selection, 4 streams per token", model=forks(4), optim=TUNED["r2"]),
        "wider": Row(what="plain GPT of width 384", model={"width": 384, "n_head": 6}, optim=TUNED["plain"]),
        "ensemble": Row(what="the mean prediction of two plain models", ensemble=2),
    }
    return Protocol(
        what="the model of `long` on 20M tokens of text, 12 epochs, stopped at the best validation loss",
        model=LONG,
        optim=LONG_OPTIM,
        rows=rows,
        epochs=12.0,
        text=20_000_000,
        is_best=True,
        evaluations=36,
        eval_tokens=1 << 19,
    )


def laptop() -> Protocol:
    layers = (1, 2)
    rows = {
        PLAIN: Row(what="plain GPT", seeds=(0, 1)),
        "r1": Row(what=R1, model=forks(1, layers=layers), seeds=(0, 1)),
        "r2": Row(what=R2, model=forks(2, layers=layers), seeds=(0, 1)),
    }
    return Protocol(
        what="3 layers of width 64, at most 300 steps of 8 × 128 tokens",
        model=plain_model(n_layer=3, n_head=2, width=64, block_size=128),
        optim=OptimConfig(lr=4e-3, warmup=0.05),
        rows=rows,
        epochs=4.0,
        most=300 * 8 * 128,
        rows_per_step=8,
        evaluations=6,
        eval_tokens=1 << 14,
        ar_windows=8,
    )


PROTOCOLS = {
    "long": long,
    "long-sweep": long_sweep,
    "screen": screen,
    "short": short,
    "scarce": scarce,
    "laptop": laptop,
}


def protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        hint = did_you_mean(name, PROTOCOLS, otherwise=f"choose from {', '.join(PROTOCOLS)}")
        raise ValueError(f"no protocol is named {name!r}: {hint}")
    return PROTOCOLS[name]()
