"""A reader whose decoding steps are CUDA graphs, and so are the blocks that read chunks of prompts."""

import torch
from jaxtyping import Int
from torch import Tensor

from thoughtbubbles.generate.cache import cache_memory
from thoughtbubbles.generate.chunk_blocks import ChunkGraphs
from thoughtbubbles.generate.graph import GraphStep, mean_streams
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.generate.readers import Cached, Reading
from thoughtbubbles.model.budget import Budget, Number
from thoughtbubbles.model.transformer import Thoughtbubbles


class Graphed(Cached):
    """Rows that read a single token take part in a graph over all rows, in which the others are not active."""

    def __init__(self, model: Thoughtbubbles, *, rows: int, capacity: int, budget: Budget, n_ids: int):
        weight = model.embedding.weight
        on_gpu = weight.device.type == "cuda"  # elsewhere there are no graphs: tests run the steps themselves
        if on_gpu:
            need = cache_memory(model.config, rows=rows, capacity=capacity, budget=budget, dtype=weight.dtype).total
            check_fits(need, free=free_memory(weight.device), rows=rows, capacity=capacity)
        super().__init__(model, rows=rows, capacity=capacity, budget=budget)
        self.step = GraphStep(model, self.cache, budget=budget, n_ids=n_ids)
        if on_gpu and self.step.on_kernels:
            self._run_fast = ChunkGraphs(model.config, self.cache)
        self._streams = [0.0] * rows  # per token, in the mean
        self._ids = torch.zeros(rows, dtype=torch.int64, pin_memory=on_gpu)
        self._active: list[int] = []
        self._index: Tensor | None = None  # of the active rows; None if they are all, in their order
        self._ahead: set[int] | None = None  # the rows that have read their next token already

    def warm_up(self) -> None:
        """Makes all graphs of steps and of chunks, so that no request waits for one of them."""
        for size in self.step.sizes:
            self.step.captured(size)
        if isinstance(self._run_fast, ChunkGraphs):
            self._run_fast.warm_up(self.model)

    def open(self, row: int, budget: Number) -> None:
        if self._ahead is not None:  # the cache must not be changed before the step is done
            ahead, self._ahead = self._ahead, None
            self.step.result()
            self._ahead = ahead - {row}
        super().open(row, budget)
        self._streams[row] = mean_streams(self.model.config, Budget.of(budget))

    def read(self, reading: Reading) -> Prediction:
        of_rows = zip(reading.rows, reading.lengths, strict=True)
        tokens = [i for i, (row, n) in enumerate(of_rows) if n == 1 and (self._ahead is None or row in self._ahead)]
        if len(tokens) == len(reading.rows):
            return self._read_tokens(reading)
        if not tokens:
            self._ahead = None
            return super().read(reading)
        chosen = set(tokens)
        of_step, places = reading.part(tokens)
        others, other_places = reading.part([i for i in range(len(reading.rows)) if i not in chosen])
        found = [self._read_tokens(of_step), super().read(others)]
        place = torch.tensor([*places, *other_places]).argsort().to(self.cache.n_tokens.device)
        return Prediction(
            torch.cat([each.logits for each in found])[place], torch.cat([each.streams for each in found])[place]
        )

    def read_ahead(self, rows: list[int], ids: Int[Tensor, "n"]) -> None:
        """Begins with the next token of these rows, while the host is still busy with the one before.

        A row that is not read after all has one token more than it should: it must be opened before it is used again.
        """
        self._choose(rows)
        if self._index is None:
            self.step.ids.copy_(ids)
        else:
            self.step.ids[self._index] = ids
        self._launch()
        self._ahead = set(rows)

    def _read_tokens(self, reading: Reading) -> Prediction:
        if self._ahead is None:
            self._choose(reading.rows)
            self._ids.numpy()[reading.rows] = reading.ids
            self.step.ids.copy_(self._ids, non_blocking=True)  # it is not written again before the step has ended
            self._launch()
        self._ahead = None
        prediction = self.step.result()
        rows = [reading.rows[i] for i in reading.predict]
        if rows == self._active:
            return prediction if self._index is None else prediction.at(self._index)
        return prediction.at(torch.tensor(rows, dtype=torch.int64, device=prediction.streams.device))

    def _launch(self) -> None:
        self.step.launch(sum(self._streams[row] for row in self._active))

    def _choose(self, rows: list[int]) -> None:
        if rows == self._active:
            return
        index = torch.tensor(rows, device=self.cache.n_tokens.device)
        self.step.active.zero_()
        self.step.active[index] = True
        self._active = list(rows)
        self._index = None if rows == list(range(self.cache.rows)) else index


def check_fits(need: int, *, free: int, rows: int, capacity: int) -> None:
    if need > free:
        raise ValueError(
            f"compiled steps need the full cache in advance: {rows} rows of {capacity:,} tokens take "
            f"{need / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free. Ask for fewer new tokens (max_new), for "
            "fewer rows at a time, or decode without compiling, where the cache grows with the tokens"
        )


def free_memory(device: torch.device) -> int:
    """Free bytes on the GPU, including memory that torch has reserved but does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
