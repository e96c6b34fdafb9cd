"""`reproduce gsm8k`: fine-tuned on chains of equations (the form of GSM8K-aug), then tested on all questions."""

from pathlib import Path

from thoughtbubbles.checkpoint import load_tokenizer, read_config
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.documents import data_folder, find_files, open_benchmark
from thoughtbubbles.evals.tasks.gsm8k import GSM8K
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.recipes.reproduce.finetune.examples import Examples, prepared
from thoughtbubbles.recipes.reproduce.finetune.gsm8k_aug import examples_file
from thoughtbubbles.recipes.reproduce.finetune.measure import measure_answers
from thoughtbubbles.recipes.reproduce.finetune.protocol import (
    GSM8K_BLOCK,
    GSM8K_FORMS,
    GSM8K_ROWS,
    FinetuneRow,
    Form,
    gsm8k_rows,
)
from thoughtbubbles.recipes.reproduce.finetune.study import FinetuneStudy
from thoughtbubbles.recipes.reproduce.study import Place, Record


class Gsm8kStudy(FinetuneStudy):
    name = "gsm8k"
    what = "GSM8K: fine-tuned on chains of equations, then all test questions"
    result = "exact match"
    metric = "exact_match"

    def __init__(
        self,
        *,
        block_size: int = GSM8K_BLOCK,
        rows_per_step: int = GSM8K_ROWS,
        shipped: Path | None = None,
        steps: int | None = None,
        limit: int | None = None,
    ) -> None:
        """`block_size`: the smallest one that a model given with --init may have."""
        super().__init__(
            GSM8K_FORMS, gsm8k_rows(), rows_per_step=rows_per_step, shipped=shipped, steps=steps, limit=limit
        )
        self.block_size = block_size

    def check_files(self, row: FinetuneRow, folder: Path) -> None:
        for task in (GSM8K, examples_file("train")):
            find_files(task, folder)

    def check_model(self, model: ModelConfig, given: str) -> None:
        if model.block_size < self.block_size:
            raise ValueError(
                f"{given}: has block_size = {model.block_size}, too short for the longest question and an answer of "
                f"{GSM8K.max_new} tokens; give a model with block_size = {self.block_size} or more"
            )

    def model_of(self, form: Form, start: Path | None) -> ModelConfig:
        """As it was trained: its context length has room for the longest question and an answer of 256 tokens."""
        assert start is not None, "every form has a start"
        return read_config(start)

    def examples_of(self, row: FinetuneRow, start: Path | None, place: Place) -> Examples:
        """All of the training file. The validation loss is that of the validation file, if there is one."""
        tokenizer, folder = load_tokenizer(start), data_folder(place.data_dir)
        assert start is not None, "every form has a start"
        assert tokenizer is not None, "start_of has checked it"
        (source,) = find_files(examples_file("train"), folder)
        return prepared(
            source,
            place.runs / place.protocol / f"data-{tokenizer.name}",
            tokenizer=start,
            val=validation_file(folder),
            val_fraction=0.0,
        )

    def measure(self, row: FinetuneRow, model: Thoughtbubbles, tokenizer: Tokenizer, folder: Path) -> Record:
        return measure_answers(model, tokenizer, open_benchmark(GSM8K, folder, limit=self.limit))


def validation_file(folder: Path) -> Path | None:
    try:
        return find_files(examples_file("validation"), folder)[0]
    except ValueError:
        return None
