"""bubbles-7m, the model that comes with the package, and its plain counterpart.

Both see the same text in the same order, from the same initial weights: encyclopedia, books, articles, textbooks and
abstracts, in the 8,192 ids of a vocabulary trained on them (`prepare … --tokenizer bpe`). The model with bubbles draws
the budget of each step at random, so that it works with any from 1 to 4 streams per token. The control, the same scores
without forks, is `train bubbles-7m --model.budget 1 --budgets`.

The width is what fits into 16 MB in bfloat16 with twelve layers and the vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial

from thoughtbubbles.files import SHIPPED
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.config import DataConfig, EvalConfig, LogConfig, OptimConfig, RunConfig, SaveConfig

MODEL = ModelConfig(
    n_layer=12, n_head=3, width=192, vocab_size=8192, block_size=512, fork_layers=(3, 7, 11), merge="residual"
)
FORMS = {
    "": "the model in the package: 2 streams per token, budgets 1 to 4 while training",
    "-plain": "its plain counterpart",
}


def shipped(form: str = "") -> RunConfig:
    models = {"": MODEL, "-plain": MODEL.without_forks()}
    return RunConfig(
        name=f"{SHIPPED}{form}",
        model=models[form],
        tokens=14_500 * 128 * 512,
        tokens_per_step=128 * 512,
        budgets=() if form else (1.0, 1.5, 2.0, 4.0),
        data=DataConfig(mixture=("data/bubbles",)),
        optim=OptimConfig(lr=3e-3, warmup=0.02, floor=0.02),
        save=SaveConfig(every=0),
        eval=EvalConfig(every=1000, tokens=1 << 21, sample_tokens=0),
        log=LogConfig(every=50),
    )


def recipes() -> Iterator[tuple[str, Callable[[], RunConfig], str]]:
    for form, words in FORMS.items():
        yield f"{SHIPPED}{form}", partial(shipped, form), words
