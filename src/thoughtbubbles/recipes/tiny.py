"""Small runs that need no data and no GPU: to try things out, and the golden losses of the tests."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import DataConfig, EvalConfig, OptimConfig, RunConfig, SaveConfig


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
        eval=EvalConfig(every=100, tokens=1 << 15, prompts=("reverse ", "12+")),
    )


def recipes() -> Iterator[tuple[str, Callable[[], RunConfig], str]]:
    yield "tiny", tiny, "a first run: 1.2M parameters, causal selection, synthetic text, minutes on a laptop"
    yield "tiny-paper", partial(tiny, "-paper"), "the same with the paper's block selection"
    yield "tiny-plain", partial(tiny, "-plain"), "the same without forks"
