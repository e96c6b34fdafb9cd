"""`reproduce clutrr`: each of the six official sets, trained on its own stories and tested on its own."""

from dataclasses import replace
from pathlib import Path

from thoughtbubbles.checkpoint import find_model, load_tokenizer, read_config
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.documents import data_folder, find_files, open_benchmark, records
from thoughtbubbles.evals.tasks.clutrr import CLUTRR
from thoughtbubbles.evals.tasks.task import Task
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.recipes.reproduce.finetune.examples import Examples, prepared
from thoughtbubbles.recipes.reproduce.finetune.measure import WHOLE, measure_stories, names_in
from thoughtbubbles.recipes.reproduce.finetune.protocol import (
    CLUTRR_BLOCK,
    CLUTRR_FORMS,
    CLUTRR_ROWS,
    VAL_FRACTION,
    FinetuneRow,
    Form,
    clutrr_rows,
)
from thoughtbubbles.recipes.reproduce.finetune.study import FinetuneStudy
from thoughtbubbles.recipes.reproduce.study import Place, Record
from thoughtbubbles.recipes.shipped import MODEL


class ClutrrStudy(FinetuneStudy):
    name = "clutrr"
    what = "the six official sets of CLUTRR: trained on the stories of each, then tested"
    result = "accuracy"
    metric = WHOLE

    def __init__(
        self,
        *,
        model: ModelConfig = MODEL,
        block_size: int = CLUTRR_BLOCK,
        rows_per_step: int = CLUTRR_ROWS,
        val_fraction: float = VAL_FRACTION,
        shipped: Path | None = None,
        steps: int | None = None,
        limit: int | None = None,
    ) -> None:
        """`model`: of the rows that start from random weights."""
        super().__init__(
            CLUTRR_FORMS, clutrr_rows(), rows_per_step=rows_per_step, shipped=shipped, steps=steps, limit=limit
        )
        self.model, self.block_size, self.val_fraction = model, block_size, val_fraction

    def check_files(self, row: FinetuneRow, folder: Path) -> None:
        find_files(task_of(row), folder)

    def check_tokenizer(self, tokenizer: Tokenizer, given: str) -> None:
        ours = load_tokenizer(self.shipped)
        if ours is not None and tokenizer.name != ours.name:
            raise ValueError(
                f"{given}: was trained with tokenizer {tokenizer.name!r}, but all rows use {ours.name!r}; give a model "
                "that was trained with it"
            )

    def model_of(self, form: Form, start: Path | None) -> ModelConfig:
        """With a context length that just fits the stories: the rest of a row would be padding."""
        if start is not None:
            return replace(read_config(start), block_size=self.block_size)
        model = replace(self.model, block_size=self.block_size)
        return model if form.has_forks else model.without_forks()

    def examples_of(self, row: FinetuneRow, start: Path | None, place: Place) -> Examples:
        (source,) = find_files(task_of(row), data_folder(place.data_dir))
        folder = place.runs / place.protocol / f"data-{row.set}"
        return prepared(source, folder, tokenizer=find_model(self.shipped), val_fraction=self.val_fraction)

    def measure(self, row: FinetuneRow, model: Thoughtbubbles, tokenizer: Tokenizer, folder: Path) -> Record:
        task = task_of(row)
        benchmark = open_benchmark(task, folder, limit=self.limit)
        (source,) = find_files(task, folder)
        tested = [record for _, record in records(source) if record["split"] == "test"]
        names = {number: names_in(tested[number]["story"]) for number in benchmark.documents}
        return measure_stories(model, tokenizer, benchmark, names)


def task_of(row: FinetuneRow) -> Task:
    """The benchmark with the file of one set only."""
    return replace(CLUTRR, file=f"clutrr.data_{row.set}")
