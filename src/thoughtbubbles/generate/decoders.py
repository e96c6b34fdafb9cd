"""Decoders: with the KV cache, without a cache, or with the cache and steps as CUDA graphs."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thoughtbubbles.generate.cache import Cache, cache_memory, new_cache
from thoughtbubbles.generate.decode import Prediction, decode_step, predict_uncached, prefill
from thoughtbubbles.generate.graph import GraphStep
from thoughtbubbles.model.budget import Budget, Number
from thoughtbubbles.model.config import BudgetMode
from thoughtbubbles.model.transformer import Thoughtbubbles


@runtime_checkable
class Decoder(Protocol):
    """Reads one batch of prompts after another, each of them token by token."""

    def start(self, prompts: Sequence[Sequence[int]], budgets: Sequence[Number]) -> Prediction:
        """Reads the prompts."""

    def step(self, ids: Tensor) -> Prediction:
        """Reads one more token per row."""

    def keep(self, rows: Tensor) -> None:
        """Continues with these rows only, in this order."""


AT_FIRST = 1024  # initial capacity of the cache, in tokens per row


class Cached:
    """`capacity` is the most tokens that a row can reach; the storage of the cache grows with the tokens."""

    def __init__(self, model: Thoughtbubbles, *, capacity: int):
        self.model, self.capacity = model, capacity
        self.cache: Cache | None = None

    def start(self, prompts: Sequence[Sequence[int]], budgets: Sequence[Number]) -> Prediction:
        ids, lengths = padded(prompts, device=self.model.embedding.weight.device)
        self._longest = ids.shape[1]
        room = min(self.capacity, max(AT_FIRST, 2 * self._longest))
        prediction, self.cache = prefill(self.model, ids, lengths=lengths, budget=list(budgets), capacity=room)
        return prediction

    def step(self, ids: Tensor) -> Prediction:
        assert self.cache is not None
        self._longest += 1  # an upper bound, if the longest row was dropped; does not synchronise with a GPU
        if self.cache.capacity < min(self._longest, self.capacity):
            self.cache = self.cache.grown(self.model.config, min(self.capacity, 2 * self.cache.capacity))
        prediction, self.cache = decode_step(self.model, self.cache, ids)
        return prediction

    def keep(self, rows: Tensor) -> None:
        assert self.cache is not None
        self.cache = self.cache.reorder(rows)


class Uncached:
    def __init__(self, model: Thoughtbubbles, *, budget_mode: BudgetMode | None):
        self.model, self.budget_mode = model, budget_mode

    def start(self, prompts: Sequence[Sequence[int]], budgets: Sequence[Number]) -> Prediction:
        self.ids, self.lengths = padded(prompts, device=self.model.embedding.weight.device)
        self.budgets = list(budgets)
        return self._read()

    def step(self, ids: Tensor) -> Prediction:
        longest = int(self.lengths.max())
        self.ids = F.pad(self.ids, (0, longest + 1 - self.ids.shape[1]))
        self.ids.scatter_(1, self.lengths[:, None], ids[:, None])
        self.lengths = self.lengths + 1
        return self._read()

    def keep(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        self.ids = self.ids[rows, : int(self.lengths.max())]
        self.budgets = [self.budgets[row] for row in rows.tolist()]

    def _read(self) -> Prediction:
        return predict_uncached(
            self.model, self.ids, lengths=self.lengths, budget=self.budgets, budget_mode=self.budget_mode
        )


class Graphed:
    """`Cached` with steps replayed as CUDA graphs, over storage that all batches share."""

    def __init__(self, model: Thoughtbubbles, *, rows: int, capacity: int, budgets: Sequence[Number]):
        self.model = model
        exact = [Budget.of(budget) for budget in budgets]
        largest = Budget.of(max(Fraction(b.numerator[0], b.denominator[0]) for b in exact))
        weight = model.embedding.weight
        need = cache_memory(model.config, rows=rows, capacity=capacity, budget=largest, dtype=weight.dtype).total
        check_fits(need, free=free_memory(weight.device), rows=rows, capacity=capacity)
        self.cache = new_cache(
            model.config, rows=rows, capacity=capacity, budget=largest, dtype=weight.dtype, device=weight.device
        )
        self._step = GraphStep(model, self.cache, most=most_streams(largest, capacity))

    def start(self, prompts: Sequence[Sequence[int]], budgets: Sequence[Number]) -> Prediction:
        n, rows = len(prompts), self.cache.rows
        idle = rows - n  # rows that this batch does not need get one token
        ids, lengths = padded([*prompts, *([[0]] * idle)], device=self.cache.n_tokens.device)
        budget = Budget.of([*budgets, *([1] * idle)])
        prediction, filled = prefill(self.model, ids, lengths=lengths, budget=budget, into=self.cache)
        for span, new in zip(self.cache.spans, filled.spans, strict=True):
            span.used.copy_(new.used)
        for old, now in zip(self.cache[1:4], filled[1:4], strict=True):
            old.copy_(now)
        self._rows = torch.arange(rows, device=ids.device)
        self.keep(self._rows[:n])
        return Prediction(*(part[:n] for part in prediction))

    def step(self, ids: Tensor) -> Prediction:
        if len(ids) == self.cache.rows:
            self._step.ids.copy_(ids)
            return self._step()
        self._step.ids[self._rows] = ids
        return Prediction(*(part[self._rows] for part in self._step()))

    def keep(self, rows: Tensor) -> None:
        """Rows never move: the remaining ones keep their order."""
        self._rows = self._rows[rows]
        self._step.active.zero_()
        self._step.active[self._rows] = True


def most_streams(budget: Budget, capacity: int) -> int:
    """The most streams of a bubble within `capacity` tokens: with a budget of 1 no fork ever survives."""
    return 1 if budget == Budget.of(1) else budget.largest_floor(capacity)


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


def padded(prompts: Sequence[Sequence[int]], *, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pads prompts on the right. Uses NumPy, since torch converts nested lists very slowly."""
    lengths = [len(prompt) for prompt in prompts]
    ids = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return torch.from_numpy(ids).to(device), torch.tensor(lengths, device=device)
