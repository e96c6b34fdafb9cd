"""Which models are fine-tuned on CLUTRR and GSM8K, from which weights, and for how long.

Plain models and models with bubbles have the same learning rate, epochs and order of examples, and the last weights
are measured: nothing is chosen by a result. Random weights need a higher learning rate and more epochs than trained
ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import DataConfig, EvalConfig, LogConfig, OptimConfig, RunConfig, SaveConfig

SEEDS = (0, 1, 2)
SHIPPED_START = "shipped"
PLAIN_START = "plain"
VAL_FRACTION = 0.02  # of CLUTRR's training stories: about 200
CLUTRR_ROWS = 64  # per step; a row has only two to six tokens that count in the loss
GSM8K_ROWS = 32
GSM8K_BLOCK = 512  # tokens: the longest question and an answer of 256
CLUTRR_BLOCK = 320
"""Tokens per row. With the tokenizer bubbles-7m the longest training story has 222 tokens, the longest test story 258
with its answer; the longest answer needs four more."""

# The official sets, by the first part of their names. Each is trained on stories of 2 and 3 hops, if nothing else is
# said, and tested on others. The first two are tested on more hops, the others on all kinds of noise.
SETS = {
    "089907f8": "no noise, tested on up to 10 hops",
    "db9b8f04": "2 to 4 hops, no noise, tested on up to 10 hops",
    "7c5b0e70": "no noise, tested on all kinds of noise",
    "06b8f2a1": "supporting facts, tested on all kinds of noise",
    "523348e6": "irrelevant facts, tested on all kinds of noise",
    "d83ecc3e": "disconnected facts, tested on all kinds of noise",
}
LONG_SETS = ("089907f8", "db9b8f04")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A model to fine-tune."""

    what: str
    has_forks: bool
    start: str | None
    """Where its weights come from: `shipped`, the model in the package; a name of `--init`; None: they are random."""
    lr: float
    epochs: int

    @property
    def init(self) -> str | None:
        """The name that `--init` must give, if any."""
        return None if self.start in (None, SHIPPED_START) else self.start


@dataclass(frozen=True, kw_only=True)
class FinetuneRow:
    what: str
    form: str
    set: str | None = None
    """Of CLUTRR."""
    seeds: tuple[int, ...] = SEEDS


PLAIN, R2 = "plain GPT", "2 streams per token"
CLUTRR_FORMS = {
    "scratch-plain": Form(what=f"{PLAIN}, random weights", has_forks=False, start=None, lr=3e-3, epochs=40),
    "scratch-r2": Form(what=f"{R2}, random weights", has_forks=True, start=None, lr=3e-3, epochs=40),
    "shipped-plain": Form(what="bubbles-7m-plain", has_forks=False, start=PLAIN_START, lr=1e-3, epochs=10),
    "shipped-r2": Form(what="bubbles-7m", has_forks=True, start=SHIPPED_START, lr=1e-3, epochs=10),
}
GSM8K_FORMS = {
    "shipped-plain": Form(what="bubbles-7m-plain", has_forks=False, start=PLAIN_START, lr=1e-3, epochs=10),
    "shipped-r2": Form(what="bubbles-7m", has_forks=True, start=SHIPPED_START, lr=1e-3, epochs=10),
    "large-plain": Form(what=f"{PLAIN}, size 150m", has_forks=False, start="large-plain", lr=3e-4, epochs=6),
    "large-r2": Form(what=f"{R2}, size 150m", has_forks=True, start="large-r2", lr=3e-4, epochs=6),
}


def clutrr_rows() -> dict[str, FinetuneRow]:
    return {
        f"{name}-{form}": FinetuneRow(what=f"{about}; {CLUTRR_FORMS[form].what}", form=form, set=name)
        for name, about in SETS.items()
        for form in CLUTRR_FORMS
    }


def gsm8k_rows() -> dict[str, FinetuneRow]:
    return {form: FinetuneRow(what=settings.what, form=form) for form, settings in GSM8K_FORMS.items()}


def names_of_init(forms: Mapping[str, Form]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(form.init for form in forms.values() if form.init is not None))


def run_of(
    name: str,
    form: Form,
    model: ModelConfig,
    *,
    rows: int,
    data: Path,
    n_examples: int,
    seed: int,
    init_from: Path | None,
    out: Path,
    steps: int | None = None,
) -> RunConfig:
    """`rows`: examples per step. `steps`: instead of the epochs of the form."""
    steps = ceil(form.epochs * n_examples / rows) if steps is None else steps
    per_step = rows * model.block_size
    return RunConfig(
        name=name,
        model=model,
        tokens=steps * per_step,
        tokens_per_step=per_step,
        data=DataConfig(mixture=(f"{data}=1",)),  # with a weight: a path may have a "="
        optim=OptimConfig(lr=form.lr, warmup=0.05, floor=0.02),
        save=SaveConfig(every=max(1, steps // 4), keep=1),
        eval=EvalConfig(every=max(1, steps // 20), tokens=1 << 17, sample_tokens=0),
        log=LogConfig(every=50),
        seed=seed,
        out=out,
        init_from=init_from,
    )
