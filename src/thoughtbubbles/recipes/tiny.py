"""Small runs that need no GPU: to try things out, and the golden losses of the tests. The tiny ones need no data."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import ComputeConfig, DataConfig, EvalConfig, OptimConfig, RunConfig, SaveConfig


def tiny(form: str = "") -> RunConfig:
    """About 1.2M parameters on byte text made from a formula: a few minutes on a laptop."""
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
    """A laptop's model for text of one's own in GPT-2's tokens. Most of it is the table of 50,304 embeddings."""
    model = ModelConfig(n_layer=6, n_head=4, width=128, block_size=256, fork_layers=(1, 3), merge="residual")
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
    yield "tiny", tiny, "a first run: 1.2M parameters, causal selection, synthetic text, minutes on a laptop"
    yield "tiny-paper", partial(tiny, "-paper"), "the same with the paper's block selection"
    yield "tiny-plain", partial(tiny, "-plain"), "the same without forks"
    yield "small-gpt2", small_gpt2, "7.6M parameters, causal selection, GPT-2's tokens: for a folder that you prepared"
