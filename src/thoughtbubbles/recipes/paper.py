"""The paper's runs, with causal selection (`-causal`); the scaling suite also with the paper's own rule (`-paper`). And
the form of model that we recommend, in the same runs. A recipe begins with the name of its model (`ModelConfig.named`).

Scaling suite (its topology table): 150m, 319m and 772m, each as plain GPT, copy-3, copy-5 and with r = 2 and r = 4
(`-r4`) streams per token, on OpenWebText (`--data.mixture data/pes2o`: on peS2o): 64 × 512 tokens per step, 2.5B
tokens, 1 % warm-up, cosine to 10 %.

Scale-up (1.9b): 480 × 512 tokens per step; 40B tokens of 70 % FineWeb and 30 % peS2o with 10 % warm-up and then a
constant rate, with a checkpoint half-way; then 2B tokens of a mid-training mixture, with a cosine to 10 %.

Ablations: the original stream alone decides ("keep rightmost"), attention not attenuated ("don't mask attn"), no
attenuation at all, and fork layers before every fourth block ("extended forking").

Data is read from data/openwebtext, data/pes2o and so on: `thoughtbubbles prepare NAME --out data/NAME` makes them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from thoughtbubbles.model.config import ModelConfig, every_fourth_layer
from thoughtbubbles.train.config import ComputeConfig, DataConfig, OptimConfig, RunConfig, SaveConfig

SUITE = {"150m": 8, "319m": 4, "772m": 2}  # size: rows per forward in the paper
FORMS = {
    "plain": "plain GPT",
    "copy-3": "every embedding three times",
    "copy-5": "every embedding five times",
    "causal": "2 streams per token, causal selection",
    "causal-r4": "4 streams per token, causal selection",
    "paper": "2 streams per token, the paper's selection",
    "paper-r4": "4 streams per token, the paper's selection",
}
OURS = {"": "every token forks once, with feedback; a gate per head", "-gate": "plain GPT with that gate: the control"}
PRETRAINING = ("data/fineweb=0.7", "data/pes2o=0.3")
MIDTRAINING = (
    "data/mmlu=0.05",
    "data/smoltalk=0.30",
    "data/fineweb=0.175",  # 25 % pretraining mixture: 70 % and 30 % of it
    "data/pes2o=0.075",
    "data/gsm8k-aug=0.40",
)


def suite(name: str, size: str, model: ModelConfig) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        tokens=2_500_000_000,
        tokens_per_step=64 * 512,
        data=DataConfig(mixture=("data/openwebtext",)),
        optim=OptimConfig(lr=2.5e-4, warmup=0.01, schedule="cosine", floor=0.1),
        compute=ComputeConfig(micro_batch_size=SUITE[size]),
    )


def scale_up(name: str, form: str) -> RunConfig:
    """Stage one at 1.9b: warm-up, then constant, so the checkpoint half-way is itself a complete run of 20B tokens."""
    return RunConfig(
        name=name,
        model=ModelConfig.named(f"1.9b-{form}"),
        tokens=40_000_000_000,
        tokens_per_step=480 * 512,
        data=DataConfig(mixture=PRETRAINING),
        optim=OptimConfig(lr=2.5e-4, warmup=0.1, schedule="constant"),
        compute=ComputeConfig(micro_batch_size=4),
        save=SaveConfig(every=1000, milestones=(0.5,)),
    )


def midtrain(name: str, form: str) -> RunConfig:
    """Stage two at 1.9b, from the newest checkpoint of stage one (--init-from takes another, such as the half-way one).

    Shares are of rows, and an example is one padded row, so questions and chats are a smaller share of real tokens.
    """
    return replace(
        scale_up(name, form),
        init_from=Path("runs") / f"1.9b-{form}",
        tokens=2_000_000_000,
        data=DataConfig(mixture=MIDTRAINING),
        optim=OptimConfig(lr=2.5e-4, warmup=0.0, schedule="cosine", floor=0.1),
        save=SaveConfig(every=1000),
    )


# name: (size, changes to the model, the run's tokens, what it shows)
ABLATIONS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "original-merge": ("150m", {"merge": "original"}, 2_400_000_000, "only the original stream is decoded"),
    "attention-gates-off": (
        "150m",
        {"gate_qk": False, "gate_v": False},
        2_400_000_000,
        "scores do not attenuate attention",
    ),
    "all-gates-off": (
        "150m",
        {"gate_qk": False, "gate_v": False, "gate_residual": False},
        2_400_000_000,
        "scores attenuate nothing; only the merge uses them",
    ),
    "extended-forking": (
        "772m",
        {"fork_layers": every_fourth_layer(36)},
        25_000 * 64 * 512,
        "fork layers before every fourth block",
    ),
}


def ablation(name: str, kind: str) -> RunConfig:
    size, changes, tokens, _ = ABLATIONS[kind]
    return replace(suite(name, size, replace(ModelConfig.named(f"{size}-causal"), **changes)), tokens=tokens)


def recipes() -> dict[str, list[tuple[str, Callable[[], RunConfig], str]]]:
    """Group: name, config and summary of each recipe."""
    return {
        "the form that we recommend, on OpenWebText": [
            (name, partial(suite, name, size, ModelConfig.named(name)), words)
            for size in SUITE
            for form, words in OURS.items()
            for name in [size + form]
        ],
        "scaling suite, on OpenWebText": [
            (name, partial(suite, name, size, ModelConfig.named(name)), words)
            for size in SUITE
            for form, words in FORMS.items()
            for name in [f"{size}-{form}"]
        ],
        "scale-up, FineWeb and peS2o, then mid-training": [
            (name, partial(make, name, form), words)
            for form in ("plain", "causal")
            for name, make, words in [
                (f"1.9b-{form}", scale_up, FORMS[form]),
                (f"1.9b-{form}-midtrain", midtrain, f"{FORMS[form]}: second stage"),
            ]
        ],
        "ablations, 2 streams per token, on OpenWebText": [
            (name, partial(ablation, name, kind), words)
            for kind, (size, _, _, words) in ABLATIONS.items()
            for name in [f"{size}-{kind}"]
        ],
    }
