"""The protocols behind docs/results: which models are compared, on how much text, with which settings.

A protocol is a list of rows; a row is one training run per seed. Within a seed all rows read the same text in the same
order and start from the same weights wherever names and sizes match (model/initial.py), so their losses are compared
in pairs. Everything that a row changes is here, in parts.py and in screen.py.

    long         a small model, trained far past the steep stretch of its loss curve: four epochs
    long-sweep   the learning rates and weight decays that `long` was tuned on: one epoch
    short        a larger model that sees each token once
    screen       ideas for better forks, a third of `long`'s tokens, one seed: what is ahead here gets three seeds
    scarce       20M tokens of text, many epochs, each row stopped at its best validation loss
    laptop       the first three rows at a size that takes minutes on a CPU: to try the command
"""

from dataclasses import replace
from typing import Any

from thoughtbubbles.files import did_you_mean
from thoughtbubbles.recipes.reproduce.parts import (
    BLOCK,
    EVERY,
    FEEDBACK,
    LONG,
    LONG_OPTIM,
    PLAIN,
    R1,
    R2,
    STATE,
    THREE,
    TUNED,
    Protocol,
    Row,
    forks,
    gated_forks,
    gated_forks_from,
    late_forks,
    plain_model,
)
from thoughtbubbles.recipes.reproduce.screen import screen
from thoughtbubbles.train.config import OptimConfig

WIDER: dict[str, Any] = {"width": 384, "n_head": 6}


def long() -> Protocol:
    plain, forked = TUNED["plain"], TUNED["r2"]
    longer = "plain GPT, a sigmoid gate per head, {} × the tokens"
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
        "wider": Row(what="plain GPT of width 384", model=WIDER, optim=plain),
        "longer": Row(what="plain GPT, 1.8 × the tokens", optim=plain, length=1.8),
        "state-3": Row(what=EVERY.format(layer=3), model=forks(2, layers=(3,), **STATE), optim=forked),
        "feedback-3": Row(
            what=FEEDBACK.format(layer=3), model=forks(2, layers=(3,), **STATE, feedback=True), optim=forked
        ),
        **gated_forks(),
        **{f"r{budget}-late": late_forks(budget) for budget in (2, 4)},
        # As many tokens as `head-gate` reads in the GPU time of `feedback-3-reach64-gate`, by steps (long/steps.json).
        "longer-gate": Row(
            what=longer.format(1.82),
            model={"head_gate": True},
            optim=plain,
            seeds=THREE,
            length=1.82,
        ),
    }
    candidate = "feedback-3-reach64-gate"
    # At the price of the gate alone until then, so by the steps of both (long/steps.json) 1.41 and 1.20 × its GPU time.
    rows |= {
        "feedback-3-reach64-half-gate": gated_forks_from(0.5, "half"),
        "feedback-3-reach64-late-gate": gated_forks_from(0.75, "quarter"),
        "longer-gate-1.4": replace(rows["longer-gate"], what=longer.format(1.4), seeds=(0,), length=1.4),
        "longer-gate-1.2": replace(rows["longer-gate"], what=longer.format(1.2), seeds=(0,), length=1.2),
    }
    rows[candidate] = replace(rows[candidate], seeds=THREE, zero_shot=True)
    # Does what the candidate brings grow or shrink with the size of the model?
    gate = Row(what="`wider`, a sigmoid gate per head", model={**WIDER, "head_gate": True}, optim=plain)
    wider = Row(what=f"`{candidate}` of width 384", model={**rows[candidate].model, **WIDER}, optim=forked)
    rows |= {"wider-gate": gate, f"wider-{candidate}": wider}
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
        "head-gate": Row(what="plain GPT, a sigmoid gate per head", model={"head_gate": True}, optim=TUNED["plain"]),
        "feedback-3-reach64-gate": gated_forks()["feedback-3-reach64-gate"],
        "wider": Row(what="plain GPT of width 384", model=WIDER, optim=TUNED["plain"]),
        "ensemble": Row(what="the mean prediction of two plain models", optim=TUNED["plain"], ensemble=2),
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
