"""The paper's two stages at the size of the model in the package: which models are compared, and for how long.

    stage one   warm-up, then a constant learning rate, on text alone
    stage two   from the last weights of stage one: a cosine down to 10 % of that rate, on a mixture with instructions

recipes/paper.py has both at full size, 40B and 2B tokens at 1.9B parameters. Here they have 328M and 33M tokens, of
which a row takes some minutes on one H200.

The paper's mixture is 5 % MMLU, 30 % SmolTalk, 25 % text and 40 % GSM8K-aug. SmolTalk and MMLU's auxiliary training set
are large downloads, so this mixture substitutes multiple-choice questions for both: ARC's training sets, and the few
questions of MMLU's `dev` (not `validation` or `test`, which models are evaluated on). Whatever the second stage
brings here, it is not what chats would have brought. GSM8K-aug has 385k examples in the paper; here it is whatever file
of that form the user has. Shares are of rows, and a question is one padded row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.recipes.reproduce.corpus import Corpus
from thoughtbubbles.recipes.reproduce.parts import GROUP, R1, R2
from thoughtbubbles.recipes.shipped import MODEL
from thoughtbubbles.train.config import DataConfig, EvalConfig, LogConfig, OptimConfig, RunConfig, SaveConfig

TEXT = "text"
SHARES = {"gsm8k-aug": 0.40, "multiple-choice": 0.35, TEXT: 0.25}
SUBSTITUTION = (
    "instead of the paper's 5 % MMLU and 30 % SmolTalk: 35 % multiple choice, from the training sets of ARC-Easy and "
    "ARC-Challenge and MMLU's dev; the paper's GSM8K-aug has 385k examples, here it is the file of --data-dir, whose "
    "number of examples the record has"
)
LEARNING_RATE = 3e-3  # that of the model in the package
FIRST = OptimConfig(lr=LEARNING_RATE, warmup=0.1, schedule="constant")
# Weights are carried over, AdamW's moments are not: without a few steps of warm-up its first updates are far too large.
SECOND = OptimConfig(lr=LEARNING_RATE, warmup=0.02, schedule="cosine", floor=0.1)


@dataclass(frozen=True, kw_only=True)
class TwoStageRow:
    what: str
    model: Mapping[str, Any]
    """Fields of the protocol's model that are different."""
    seeds: tuple[int, ...] = (0,)


ROWS = {
    "plain": TwoStageRow(what="plain GPT", model={"fork_layers": (), "merge": "original"}),
    "r1": TwoStageRow(what=R1, model={"budget": 1}),
    "r2": TwoStageRow(what=R2, model={"budget": 2}),
}


class MixturePart(NamedTuple):
    """A source of the data of a stage."""

    name: str
    folder: Path
    share: float  # of the rows
    size: dict[str, int]  # tokens of text, or examples
    checksum: str

    def as_dict(self) -> dict[str, Any]:
        """For the record, which names no folder of the machine."""
        return {"share": self.share, **self.size, "checksum": self.checksum}


def text_part(corpus: Corpus, share: float) -> MixturePart:
    return MixturePart(TEXT, corpus.folder, share, {"tokens": corpus.n_tokens}, corpus.checksum)


@dataclass(frozen=True, kw_only=True)
class TwoStage:
    """The sizes of the study; tests give smaller ones."""

    model: ModelConfig = MODEL
    """With fork layers; the vocabulary is replaced by the corpus's own."""
    rows_per_step: int = 128
    first_steps: int = 5000
    second_steps: int = 500
    evaluations: int = 20
    """How often the validation loss is computed in a stage."""
    eval_tokens: int = 1 << 18
    limit: int | None = None
    """Questions per benchmark; None: all."""

    def config(
        self, stage: str, row: str, seed: int, *, corpus: Corpus, mixture: Iterable[MixturePart], out: Path
    ) -> RunConfig:
        """The run of a stage, `one` or `two`; the second one also needs its initial weights."""
        steps, optim = {"one": (self.first_steps, FIRST), "two": (self.second_steps, SECOND)}[stage]
        model = replace(self.model, vocab_size=-(-corpus.vocab_size // 128) * 128, **ROWS[row].model)
        per_step = self.rows_per_step * model.block_size
        sources = tuple(f"{part.folder}={part.share}" for part in mixture)
        return RunConfig(
            name=f"two-stage/{row}-seed{seed}-{stage}",
            model=model,
            tokens=steps * per_step,
            tokens_per_step=per_step,
            data=DataConfig(mixture=sources, val=(str(corpus.folder),)),
            optim=optim,
            save=SaveConfig(every=max(1, steps // 4), keep=1),
            eval=EvalConfig(every=max(1, steps // self.evaluations), tokens=self.eval_tokens, sample_tokens=0),
            log=LogConfig(every=GROUP),
            seed=seed,
            out=out,
        )
