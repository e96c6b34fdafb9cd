"""What the studies of fine-tuning share: a row's start is found and checked, it is trained, measured and recorded."""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from thoughtbubbles.checkpoint import find_model, load, load_tokenizer, read_config
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.distributed import joined
from thoughtbubbles.evals.documents import data_folder
from thoughtbubbles.evals.results import weights_of
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.provenance import device_name, provenance
from thoughtbubbles.recipes.reproduce.finetune.examples import Examples
from thoughtbubbles.recipes.reproduce.finetune.protocol import (
    SHIPPED_START,
    FinetuneRow,
    Form,
    names_of_init,
    run_of,
)
from thoughtbubbles.recipes.reproduce.finetune.records import read_finetune_records
from thoughtbubbles.recipes.reproduce.study import Place, Record, Study
from thoughtbubbles.recipes.reproduce.training import Trained, curve, skipped_steps, speed, train_run, training_loss
from thoughtbubbles.train.config import RunConfig

VERSION = 1


class FinetuneStudy(Study):
    has_own_data = True
    trains_on_benchmarks = True
    metric: str
    """The field of a record's `test` that is its result."""

    def __init__(
        self,
        forms: Mapping[str, Form],
        rows: dict[str, FinetuneRow],
        *,
        rows_per_step: int,
        shipped: Path | None,
        steps: int | None,
        limit: int | None,
    ) -> None:
        """`shipped`: instead of the model in the package. `steps`: of every row. `limit`: of the test questions."""
        self.forms, self.rows, self.planned = forms, rows, rows
        self.starts = names_of_init(forms)
        self.rows_per_step, self.shipped, self.steps, self.limit = rows_per_step, shipped, steps, limit

    @abstractmethod
    def check_files(self, row: FinetuneRow, folder: Path) -> None:
        """Raises ValueError if a file of the benchmark is missing."""

    @abstractmethod
    def model_of(self, form: Form, start: Path | None) -> ModelConfig: ...

    @abstractmethod
    def examples_of(self, row: FinetuneRow, start: Path | None, place: Place) -> Examples: ...

    @abstractmethod
    def measure(self, row: FinetuneRow, model: Thoughtbubbles, tokenizer: Tokenizer, folder: Path) -> Record:
        """Of the test questions in the folder of the benchmarks."""

    def check(self, chosen: Sequence[tuple[str, int]], place: Place) -> None:
        """The files of the benchmark and the models to start from are there, and fit each other and the records."""
        folder = data_folder(place.data_dir)
        needed: dict[tuple[str | None, Path | None], FinetuneRow] = {}  # by the examples that rows are trained on
        for name in dict.fromkeys(name for name, _ in chosen):
            row = self.planned[name]
            self.check_files(row, folder)
            needed[row.set, self.start_of(name, place)] = row
        records = read_finetune_records(place.out, self.name, self.rows)
        for (_, start), row in needed.items():
            self._check_examples(row.set, self.examples_of(row, start, place), records, place)

    def _check_examples(
        self, of_set: str | None, ours: Examples, records: Mapping[str, Mapping[int, Record]], place: Place
    ) -> None:
        """Records of other examples in the same folder could never be compared with those of these."""
        for record in (record for seeds in records.values() for record in seeds.values()):
            text = record["text"]
            is_comparable = (record.get("set"), text["tokenizer"]) == (of_set, ours.tokenizer)
            if is_comparable and text["checksum"] != ours.checksum:
                raise ValueError(
                    f"--out {place.out}: {self.name}/{record['row']}-seed{record['seed']}.json was trained on other "
                    f"examples than those of --data-dir {data_folder(place.data_dir)}; give another --out"
                )

    def start_of(self, name: str, place: Place) -> Path | None:
        """The model folder that a row starts from; None: random weights."""
        form = self.forms[self.planned[name].form]
        if form.start is None:
            return None
        if form.start == SHIPPED_START:
            return find_model(self.shipped)
        if form.start not in place.init:
            raise ValueError(
                f"--init {form.start}=DIR is missing: {name} starts from {form.what}; give its folder, or choose "
                "other rows with --only"
            )
        given = f"--init {form.start}={place.init[form.start]}"
        folder = find_model(place.init[form.start])
        if bool(read_config(folder).fork_layers) != form.has_forks:
            wrong = (
                "has no fork layers; give a model with" if form.has_forks else "has fork layers; give a model without"
            )
            raise ValueError(f"{given}: {wrong} them, which {name} starts from")
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise ValueError(f"{given}: has no tokenizer.json; give a model that was saved with its tokenizer")
        self.check_tokenizer(tokenizer, given)
        self.check_model(read_config(folder), given)
        return folder

    def check_tokenizer(self, tokenizer: Tokenizer, given: str) -> None:
        """Of a model that was given with --init."""

    def check_model(self, model: ModelConfig, given: str) -> None:
        """One that was given with --init."""

    def config_of(self, row: str, seed: int, place: Place, examples: Examples) -> RunConfig:
        form, start = self.forms[self.planned[row].form], self.start_of(row, place)
        return run_of(
            f"{self.name}/{row}-seed{seed}",
            form,
            self.model_of(form, start),
            rows=self.rows_per_step,
            data=examples.folder,
            n_examples=examples.n_examples,
            seed=seed,
            init_from=start,
            out=place.run(row, seed),
            steps=self.steps,
        )

    def make_record(self, row: str, seed: int, place: Place) -> Record:
        known = self.planned[row]
        examples = self.examples_of(known, self.start_of(row, place), place)
        trained = train_run(self.config_of(row, seed, place, examples))
        with joined("auto") as world:
            model_folder = find_model(trained.checkpoint)
            model, tokenizer = (
                load(model_folder, device=world.device, dtype=torch.float32),
                load_tokenizer(model_folder),
            )
            assert tokenizer is not None, "training saves the tokenizer"
            begun = time.monotonic()
            measured = self.measure(known, model, tokenizer, data_folder(place.data_dir))
            measured["seconds"] = time.monotonic() - begun
            device = device_name(world.device)
        return {**self.describe(row, seed, trained, examples), "device": device, "test": measured}

    def describe(self, row: str, seed: int, trained: Trained, examples: Examples) -> Record:
        """What the row is and where it comes from, without any path of this machine."""
        known, config, source = self.planned[row], trained.config, provenance()
        form = self.forms[known.form]
        left_out = ("out", "data", "name", "init_from")
        init = f" --init {form.init}=DIR" if form.init else ""
        return {
            "version": VERSION,
            "protocol": self.name,
            "row": row,
            "form": known.form,
            **({} if known.set is None else {"set": known.set}),
            "seed": seed,
            "what": known.what,
            "start": form.start,
            "start_weights": None if config.init_from is None else weights_of(config.init_from),
            "parameters": parameter_count(config.model),
            "steps": config.steps,
            "epochs": config.steps * config.rows / examples.n_examples,
            "tokens": config.tokens,  # with padding
            "flops": config.flops_per_row * config.rows * config.steps,
            "tokens_per_second": speed(trained.lines, 0.9),
            "wall_seconds": trained.seconds,
            "resumed_at": trained.resumed_at,
            "skipped_steps": skipped_steps(trained.lines),
            "command": f"thoughtbubbles reproduce {self.name} --data-dir DIR --only {row} --seed {seed}{init}",
            **{name: source[name] for name in ("commit", "versions", "time")},
            "text": {
                "examples": examples.n_examples,
                "tokens": examples.n_tokens,
                "tokenizer": examples.tokenizer,
                "checksum": examples.checksum,
            },
            "config": {name: value for name, value in config.as_dict().items() if name not in left_out},
            "curve": [[step, round(loss, 5)] for step, loss in curve(trained.lines)],
            "training_loss": training_loss(trained.lines),
        }

    def done(self, out: Path) -> Mapping[str, Mapping[int, str]]:
        return {
            row: {seed: f"{record['test'][self.metric]['mean']:.1%}" for seed, record in seeds.items()}
            for row, seeds in read_finetune_records(out, self.name, self.rows).items()
        }

    def compare(self, before: Record, again: Record) -> tuple[bool, str]:
        name = f"{before['row']}, seed {before['seed']}"
        same = ("right", "streams")
        if before["training_loss"] == again["training_loss"] and all(
            before["test"][each] == again["test"][each] for each in same
        ):
            return True, f"{name}: the same training losses, answers and streams again"
        old, new = (record["test"][self.metric]["mean"] for record in (before, again))
        return False, f"{name}: {self.result} {new:.4%}, was {old:.4%} (then on {before['device']})"
