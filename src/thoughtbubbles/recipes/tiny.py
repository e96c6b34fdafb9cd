"""Small runs without a GPU: first experiments, and the golden losses of the tests. The tiny ones need no data."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import ComputeConfig, DataConfig, EvalConfig, OptimConfig, RunConfig, SaveConfig


def tiny(form: str = "") -> RunConfig:
    """About 1.26M parameters on synthetic text, byte by byte: some five minutes on two cores."""
    name = f"tiny{form}"
    return RunConfig(
        name=name,
        model=replace(ModelConfig.named(name), vocab_size=384),
        tokens=600 * 16 * 128,
        tokens_per_step=16 * 128,
        data=DataConfig(mixture=("synthetic",)),
        optim=OptimConfig(lr=2e-3, warmup=0.05),
        save=SaveConfig(every=100),
        eval=EvalConfig(every=100, tokens=1 << 15),
    )


def small_gpt2() -> RunConfig:
    """A small model for your own text in GPT-2's tokens. Most of its parameters are the 50,304 embeddings."""
    model = replace(ModelConfig.named("tiny"), vocab_size=50304, block_size=256, fork_reach=32)
    return RunConfig(
        name="small-gpt2",
        model=model,
        tokens=1000 * 16 * 256,
        tokens_per_step=16 * 256,
        data=DataConfig(mixture=("data/mine",)),
        optim=OptimConfig(lr=2e-3, warmup=0.05),
        compute=ComputeConfig(micro_batch_size=4),
        save=SaveConfig(every=100),
        eval=EvalConfig(every=100, tokens=1 << 15),
    )


def recipes() -> Iterator[tuple[str, Callable[[], RunConfig], str]]:
    yield "tiny", tiny, "synthetic text"
    yield "tiny-causal", partial(tiny, "-causal"), "forks by learned scores, with a budget, as in the paper"
    yield "tiny-plain", partial(tiny, "-plain"), "without forks"
    yield "tiny-gate", partial(tiny, "-gate"), "without forks, with the gate per head that `tiny` has"
    yield "small-gpt2", small_gpt2, "your own text: data/mine, in GPT-2's tokens"
