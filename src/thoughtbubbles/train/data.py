"""The data of a run as one rank sees it: its rows of every training batch, and of every held-out batch."""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from thoughtbubbles.data.loader import IGNORED, Batch, HeldOut, Loader, Source, micro_steps, rows_of_rank
from thoughtbubbles.data.stdlib import write_stdlib
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.evals.heldout import move, to_device
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.parallel import World

# Data that needs no preparation; one seed, so that runs with other seeds see the same text.
MADE_HERE: dict[str, Callable[[Path], None]] = {
    "synthetic": partial(write_synthetic, n_tokens=1_000_000, seed=0),
    "stdlib": write_stdlib,
}


class StepInputs(NamedTuple):
    """What one rank needs for a step, on its device."""

    step: int
    micros: list[tuple[Tensor, Tensor, Tensor]]  # ids, targets and lengths of each forward
    real: Tensor  # how many real targets each forward has
    all_real: Tensor  # of the whole step, over all ranks


class RunData:
    def __init__(self, config: RunConfig, world: World):
        self.rows, self.world = config.rows, world
        self.micro_rows = config.compute.micro_rows or max(1, config.rows // world.size)
        self.n_micro = micro_steps(config.rows, micro_rows=self.micro_rows, world=world.size)
        sources = [_source(entry, config.folder) for entry in config.data.mixture]
        verify = config.data.verify and world.is_first  # once is enough
        n_tokens = config.model.block_size
        self.loader = Loader(sources, rows=config.rows, n_tokens=n_tokens, seed=config.seed, verify=verify)
        self.held_out = HeldOut(
            sources,
            rows=self.micro_rows * world.size,
            n_tokens=n_tokens,
            max_tokens=config.eval.tokens,
            verify=verify,
        )
        for part in (self.loader, self.held_out):
            part.check_vocab(config.model.vocab_size)
        self.tokenizer = tokenizer(self.loader.tokenizer)
        names = [source.path.name for source in sources]
        self.names = [name if names.count(name) == 1 else str(s.path) for name, s in zip(names, sources, strict=True)]
        self.shares = [facts.share for facts in self.loader.describe()]
        # What a resumed run compares: folders may have moved, but the indexes hold the checksums of all shards.
        self.fingerprints = [
            {"name": source.path.name, "share": share, "index": zlib.crc32((source.path / "index.json").read_bytes())}
            for source, share in zip(sources, self.shares, strict=True)
        ]
        world.wait()

    def micro_batches(self, n: int) -> list[Batch]:
        """This rank's part of global batch n, one for each forward."""
        parts = (
            rows_of_rank(
                self.rows, micro_rows=self.micro_rows, micro_step=index, rank=self.world.rank, world=self.world.size
            )
            for index in range(self.n_micro)
        )
        return [self.loader.batch(n, first, count) for first, count in parts]

    def inputs(self, n: int) -> StepInputs:
        """Step n on the device. Nothing here waits for it: made while it works on step n − 1, they are there in time.

        A collective where there are several ranks.
        """
        batches, device = self.micro_batches(n), self.world.device
        wide = np.float32 if device.type == "mps" else np.float64
        counts = np.array([(batch.targets != IGNORED).sum() for batch in batches], dtype=wide)
        real = move(counts, device)
        return StepInputs(n, [to_device(batch, device) for batch in batches], real, self.world.total(real.sum()))

    def held_out_batches(self) -> Iterator[Batch]:
        """This rank's rows of every held-out batch: all ranks go through equally many forwards."""
        mine = slice(self.world.rank * self.micro_rows, (self.world.rank + 1) * self.micro_rows)
        return (Batch(*(array[mine] for array in batch)) for batch in self.held_out)

    def describe(self, steps: int) -> list[str]:
        lines = []
        for facts in self.loader.describe():
            epochs = steps * self.rows * facts.share / facts.rows_per_epoch
            left_out = f", {facts.n_excluded} examples without targets left out" if facts.n_excluded else ""
            lines.append(
                f"{facts.path}: {facts.n_tokens:,} tokens, {facts.share:.1%} of the rows, {epochs:.2f} epochs{left_out}"
            )
        return lines


def _source(entry: str, run: Path) -> Source:
    source = Source.parse(entry)
    make = MADE_HERE.get(str(source.path))
    if make is None:
        return source
    folder = run / "data" / source.path
    make(folder)
    return Source(folder, source.weight)
