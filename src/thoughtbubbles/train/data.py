"""The data of a run on one rank: its rows of every training and validation batch."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thoughtbubbles.data.loader import IGNORED, Batch, Loader, Source, ValidationSet, micro_steps, rows_of_rank
from thoughtbubbles.data.shards import SMALL_VALIDATION, has_split, open_dataset
from thoughtbubbles.data.stdlib import write_stdlib
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tasks import PREFIX, task_named
from thoughtbubbles.data.tasks.task import write_task
from thoughtbubbles.data.tokenizer import saved_tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.train.config import RunConfig

# Built-in data that needs no preparation. The seed is fixed, so that runs with other seeds see the same text.
MADE_HERE: dict[str, Callable[[Path], None]] = {
    "synthetic": partial(write_synthetic, n_tokens=1_000_000, seed=0),
    "stdlib": write_stdlib,
}
PROMPT_TOKENS = 16  # length of the default prompts of samples


@dataclass(frozen=True, kw_only=True)
class Made:
    """Writes built-in data where a run keeps its own."""

    home: Path
    n_rows: int  # of the whole run: a task gets as many examples, so that none is seen twice
    seed: int

    def source(self, source: Source) -> Source:
        """The source itself, or the folder that was written for its name."""
        name = str(source.path)
        if name.startswith(PREFIX):
            task = task_named(name.removeprefix(PREFIX))
            folder = self.home / "data" / f"task-{task.name}"
            write_task(folder, task, n_examples=self.n_rows, seed=self.seed)
        elif name in MADE_HERE:
            folder = self.home / "data" / name
            MADE_HERE[name](folder)
        else:
            return source
        return Source(folder, source.weight)


class StepInputs(NamedTuple):
    """The inputs of one rank for a step, on its device."""

    step: int
    micros: list[tuple[Tensor, Tensor, Tensor]]  # ids, targets and lengths of each forward
    real: Tensor  # number of real targets per forward
    all_real: Tensor  # of the whole step, over all ranks


class Validation(NamedTuple):
    """A folder to measure the validation loss on, and the name that the loss is reported under."""

    name: str
    source: Source
    split: str


class RunData:
    def __init__(self, config: RunConfig, world: World, *, made_in: Path | None = None):
        """Opens and checks all data; built-in data is written to the run's folder, or to `made_in`."""
        self.rows, self.world = config.rows, world
        self.micro_batch_size = config.compute.micro_batch_size or max(1, config.rows // world.size)
        self.n_micro = micro_steps(config.rows, micro_batch_size=self.micro_batch_size, world=world.size)
        # Short examples: padding costs time. A compiled model and a CUDA graph need batches of one shape, and all ranks
        # must run the same blocks.
        self._trims = world.device.type == "cpu" and not (config.compute.compiles("cpu") or world.is_distributed)
        home = made_in or config.folder
        made = Made(home=home, n_rows=config.rows * config.steps, seed=config.seed)
        sources = [made.source(Source.parse(entry)) for entry in config.data.mixture]
        verify = config.data.verify and world.is_first  # one rank is enough
        n_tokens = config.model.block_size
        self.loader = Loader(sources, rows=config.rows, n_tokens=n_tokens, seed=config.seed, verify=verify)
        self.shares = [facts.share for facts in self.loader.describe()]
        self.is_own = not config.data.val and all(has_split(source.path, "val") for source in sources)
        self.validation = _own(sources) if not config.data.val else _others(config.data.val, sources, made)
        self.validation_sets = [
            ValidationSet(
                [source],
                rows=self.micro_batch_size * world.size,
                n_tokens=n_tokens,
                max_tokens=config.eval.tokens,
                split=split,
                verify=verify,
            )
            for _, source, split in self.validation
        ]
        self._check(config.model.vocab_size)
        self.tokenizer = saved_tokenizer(self.loader.tokenizer, sources[0].path)
        self.beginnings = self._beginnings()
        self.notes = self._notes(sources, is_given=bool(config.data.val))
        # A resumed run compares these: folders may have moved, but the indexes hold the checksums of all shards.
        self.fingerprints = [
            {"name": source.path.name, "share": share, "index": zlib.crc32((source.path / "index.json").read_bytes())}
            for source, share in zip(sources, self.shares, strict=True)
        ]
        world.wait()

    def _check(self, vocab_size: int) -> None:
        """All data must have the same tokenizer, and the model's vocabulary must cover its ids."""
        ours = self.loader.tokenizer
        for (_, source, _), found in zip(self.validation, self.validation_sets, strict=True):
            if found.tokenizer != ours:
                raise ValueError(
                    f"--data.val {source.path} was made with tokenizer {found.tokenizer!r}, the training data with "
                    f"{ours!r}: prepare both with the same one"
                )
        if (needed := max(part.largest_id for part in (self.loader, *self.validation_sets)) + 1) > vocab_size:
            raise ValueError(
                f"--model.vocab-size {vocab_size} is too small: the data, made with tokenizer {ours!r}, has ids up to "
                f"{needed - 1}; give {needed} or more{', such as 50304 (recipe small-gpt2)' * (ours == 'gpt2')}, or "
                "prepare the data with another --tokenizer"
            )

    def _notes(self, sources: list[Source], *, is_given: bool) -> list[str]:
        """Remarks on the validation data, for the log, one line each."""
        having = {source.path for _, source, _ in self.validation}
        lacking = [str(source.path) for source in sources if source.path not in having]
        notes = []
        if not self.validation:
            notes.append(
                f"no validation loss: {', '.join(lacking)} has no val split; pass another folder with --data.val DIR, "
                "or make one by `prepare` with --val-fraction or --val"
            )
        elif lacking and not is_given:
            notes.append(f"no validation loss for {', '.join(lacking)}, which has no val split")
        for (name, *_), found in zip(self.validation, self.validation_sets, strict=True):
            if found.n_tokens_in_split < SMALL_VALIDATION:
                notes.append(
                    f"the validation split of {name} is very small ({found.n_tokens_in_split:,} tokens): its loss "
                    "is a rough estimate"
                )
        return notes

    def micro_batches(self, n: int) -> list[Batch]:
        """This rank's part of global batch n, one batch per forward."""
        parts = (
            rows_of_rank(
                self.rows,
                micro_batch_size=self.micro_batch_size,
                micro_step=index,
                rank=self.world.rank,
                world=self.world.size,
            )
            for index in range(self.n_micro)
        )
        batches = [self.loader.batch(n, first, count) for first, count in parts]
        return [batch.trimmed() if self._trims else batch for batch in batches]

    def inputs(self, n: int) -> StepInputs:
        """The inputs of step n on the device. Does not wait for it: they are copied while it works on step n − 1.

        A collective if there are several ranks.
        """
        batches, device = self.micro_batches(n), self.world.device
        dtype = np.float32 if device.type == "mps" else np.float64
        counts = np.array([(batch.targets != IGNORED).sum() for batch in batches], dtype=dtype)
        real = move(counts, device)
        return StepInputs(n, [to_device(batch, device) for batch in batches], real, self.world.total(real.sum()))

    def validation_batches(self) -> Iterator[Batch]:
        """This rank's rows of every validation batch; all ranks get the same number of batches."""
        mine = slice(self.world.rank * self.micro_batch_size, (self.world.rank + 1) * self.micro_batch_size)
        for index, found in enumerate(self.validation_sets):
            for batch in found:
                ids, targets, lengths, source = (array[mine] for array in batch)
                own = Batch(ids, targets, lengths, np.full_like(source, index))
                yield own.trimmed() if self._trims else own

    def _beginnings(self) -> list[list[int]]:
        """The first tokens of each source's validation text, or of its training text if no source has any.

        Read once: a folder may be moved while the run uses the files it has opened.
        """
        texts = [(source, split) for _, source, split in self.validation]
        found = []
        for source, split in texts or [(source, "train") for source in self.loader.sources]:
            shards = open_dataset(source.path, split=split, verify=False).shards
            ids = next(shard.tokens[:PROMPT_TOKENS] for shard in shards if len(shard.tokens)).tolist()
            end = ids.index(self.tokenizer.end_of_text) if self.tokenizer.end_of_text in ids else len(ids)
            found.append(ids[: max(1, end)])
        return found

    def describe(self, steps: int) -> list[str]:
        lines = []
        for facts in self.loader.describe():
            epochs = steps * self.rows * facts.share / facts.rows_per_epoch
            left_out = f", {facts.n_excluded} examples without targets left out" if facts.n_excluded else ""
            lines.append(
                f"{facts.path}: {facts.n_tokens:,} tokens, {facts.share:.1%} of the rows, {epochs:.2f} epochs{left_out}"
            )
        return lines


def _own(sources: list[Source]) -> list[Validation]:
    """The `val` splits of the sources that have one."""
    having = [source for source in sources if has_split(source.path, "val")]
    return [Validation(name, source, "val") for name, source in zip(_names(having), having, strict=True)]


def _others(entries: tuple[str, ...], sources: list[Source], made: Made) -> list[Validation]:
    """The folders of `--data.val`: the `val` split of each, or all of it if it has none."""
    found = [made.source(Source(Path(entry))) for entry in entries]
    if len({source.path for source in found}) < len(found):
        raise ValueError(f"--data.val {' '.join(entries)}: names a folder twice; give it once")
    trained_on = {source.path.resolve() for source in sources}
    splits = ["val" if has_split(source.path, "val") else "train" for source in found]
    for source, split in zip(found, splits, strict=True):
        if split == "train" and source.path.resolve() in trained_on:
            raise ValueError(f"--data.val {source.path}: is training data and has no val split; give another folder")
    return [Validation(*each) for each in zip(_names(found), found, splits, strict=True)]


def _names(sources: list[Source]) -> list[str]:
    names = [source.path.name for source in sources]
    return [name if names.count(name) == 1 else str(s.path) for name, s in zip(names, sources, strict=True)]


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets and lengths on the device."""
    return move(batch.ids, device), move(batch.targets, device), move(batch.lengths, device)


def move(array: np.ndarray, device: torch.device) -> Tensor:
    """To the device without waiting for it; to a GPU from pinned memory."""
    pin = device.type == "cuda"
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)
