"""How the engine reads tokens: into the KV cache, or without a cache, every text again for each of its tokens."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from thoughtbubbles.generate.cache import new_cache
from thoughtbubbles.generate.chunk_blocks import RunChunk
from thoughtbubbles.generate.decode import predict_uncached
from thoughtbubbles.generate.packed import Batch, read
from thoughtbubbles.generate.padding import padded
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.model.budget import Budget, Number
from thoughtbubbles.model.config import BudgetMode
from thoughtbubbles.model.transformer import Thoughtbubbles

AT_FIRST = 1024  # initial capacity of the cache, in tokens per row


class Reading(NamedTuple):
    """What a step reads: tokens of some rows, packed, and which of them predict something that is asked for."""

    ids: list[int]
    rows: list[int]  # each at most once
    lengths: list[int]  # tokens of each row
    predict: list[int]  # packed tokens
    longest: int  # no row then has more tokens than that

    def part(self, chosen: Sequence[int]) -> tuple["Reading", list[int]]:
        """Only these of its rows, and which of its predictions are theirs."""
        begin = [0, *accumulate(self.lengths)]
        tokens = [token for i in chosen for token in range(begin[i], begin[i + 1])]
        place = {token: i for i, token in enumerate(tokens)}
        asked = [i for i, token in enumerate(self.predict) if token in place]
        own = Reading(
            ids=[self.ids[token] for token in tokens],
            rows=[self.rows[i] for i in chosen],
            lengths=[self.lengths[i] for i in chosen],
            predict=[place[self.predict[i]] for i in asked],
            longest=self.longest,
        )
        return own, asked


@runtime_checkable
class Reader(Protocol):
    """A fixed number of rows, each with a text of its own."""

    def open(self, row: int, budget: Number) -> None:
        """Empties a row."""

    def read(self, reading: Reading) -> Prediction:
        """Adds the tokens to their rows, and returns what those that are asked for predict."""


class Cached:
    """`capacity` is the most tokens that a row can reach, `budget` the largest that it can have.

    grows  whether storage is allocated as it is needed, which takes less memory for short texts. While it grows, the
           old and the new one exist together
    """

    def __init__(self, model: Thoughtbubbles, *, rows: int, capacity: int, budget: Budget, grows: bool = False):
        self.model, self.capacity = model, capacity
        weight = model.embedding.weight
        kind = weight.device.type
        self.cache = new_cache(
            model.config,
            rows=rows,
            capacity=min(AT_FIRST, capacity) if grows else capacity,
            budget=budget,
            dtype=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype,
            device=weight.device,
        )
        self._budget = budget
        self._run_fast: RunChunk | None = None

    def open(self, row: int, budget: Number) -> None:
        self.cache.clear(row, Budget.of(budget))

    def copy_prefix(self, source: int, row: int, n_tokens: int) -> None:
        """Lets an empty row begin with the first tokens of another one that has the same budget."""
        self.cache.copy_prefix(source, row, n_tokens)

    def read(self, reading: Reading) -> Prediction:
        if reading.longest > self.cache.capacity:
            room = min(self.capacity, max(reading.longest, 2 * self.cache.capacity))
            self.cache = self.cache.grown(self.model.config, room, budget=self._budget)
        device = self.cache.n_tokens.device
        batch = Batch.of(reading.rows, reading.lengths, device=device)
        predict = torch.tensor(reading.predict, dtype=torch.int64, device=device)
        ids = torch.tensor(reading.ids, device=device)
        return read(self.model, self.cache, ids, batch, predict=predict, run_fast=self._run_fast)


class Uncached:
    """Exact for every selection rule, also one that revises its decisions, but slow."""

    def __init__(self, model: Thoughtbubbles, *, rows: int, budget_mode: BudgetMode | None):
        self.model, self.budget_mode = model, budget_mode
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.budgets: list[Number] = [1] * rows

    def open(self, row: int, budget: Number) -> None:
        self.ids[row], self.budgets[row] = [], budget

    def read(self, reading: Reading) -> Prediction:
        begin = [0, *accumulate(reading.lengths)]
        for i, row in enumerate(reading.rows):
            self.ids[row] += reading.ids[begin[i] : begin[i + 1]]
        asked = [reading.rows[bisect_right(begin, token) - 1] for token in reading.predict]
        texts, lengths = padded([self.ids[row] for row in asked], device=self.model.embedding.weight.device)
        budget = [self.budgets[row] for row in asked]
        return predict_uncached(self.model, texts, lengths=lengths, budget=budget, budget_mode=self.budget_mode)
