"""Generation with steps as CUDA graphs: one batch of requests after another."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thoughtbubbles.generate.cache import cache_memory, new_cache
from thoughtbubbles.generate.decode import Prediction, prefill
from thoughtbubbles.generate.graph import GraphStep
from thoughtbubbles.generate.jobs import ActiveRequest, Token
from thoughtbubbles.generate.padding import padded
from thoughtbubbles.generate.sample import BatchSampling, Picked, pick, uniform
from thoughtbubbles.model.budget import Budget, Number
from thoughtbubbles.model.transformer import Thoughtbubbles

DRAWS_AT_ONCE = 64


class Graphed:
    """Decoding with steps that are replayed as CUDA graphs, over storage that all batches share."""

    def __init__(self, model: Thoughtbubbles, *, rows: int, capacity: int, budgets: Sequence[Number]):
        self.model = model
        largest = Budget.of(Budget.of(list(budgets)).largest)
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


def run(graphs: Graphed, jobs: Sequence[ActiveRequest], *, rows: int, n_ids: int) -> Iterator[Token]:
    """Requests of similar length are batched together."""
    ordered = sorted(jobs, key=lambda job: len(job.prompt))
    for first in range(0, len(ordered), rows):
        yield from _run_batch(graphs, ordered[first : first + rows], n_ids=n_ids)


def _run_batch(decoder: Graphed, rows: list[ActiveRequest], *, n_ids: int) -> Iterator[Token]:
    prediction = decoder.start([row.prompt for row in rows], [row.budget for row in rows])
    device = prediction.logits.device
    settings, n_top = (
        BatchSampling.of([row.request.sampling for row in rows], device=device),
        max(r.request.top for r in rows),
    )
    seen = _seen(rows, prediction) if settings.penalty is not None else None
    while True:
        if (now := rows[0].n_new % DRAWS_AT_ONCE) == 0:  # all rows of a batch have as many new tokens
            draws = _draws(rows, device)
        picked = pick(prediction.logits, settings, draws[:, now], n_ids=n_ids, seen=seen, n_top=n_top)
        facts, ids = _packed(picked, prediction), picked.id
        seen = None if seen is None else seen.scatter(1, ids[:, None], True)
        tokens = [row.take(*of_row) for row, of_row in zip(rows, _unpacked(facts, rows), strict=True)]
        yield from tokens
        left = [i for i, token in enumerate(tokens) if token.finish is None]
        if not left:
            return
        if len(left) < len(rows):
            index, rows = torch.tensor(left, device=device), [rows[i] for i in left]
            decoder.keep(index)
            ids, draws, seen = ids[index], draws[index], None if seen is None else seen[index]
            settings = BatchSampling.of([row.request.sampling for row in rows], device=device)
            n_top = max(row.request.top for row in rows)
        prediction = decoder.step(ids)


def _draws(rows: Sequence[ActiveRequest], device: torch.device) -> Tensor:
    """Random numbers for the next steps, sent together: sending data to a GPU waits until it has finished its work."""
    steps = range(rows[0].n_new, rows[0].n_new + DRAWS_AT_ONCE)
    draws = [[uniform(row.request.sampling.seed, step) for step in steps] for row in rows]
    return torch.tensor(draws, dtype=torch.float64, device=device)


def _seen(rows: Sequence[ActiveRequest], prediction: Prediction) -> Tensor:
    """Which tokens each row already contains."""
    seen = torch.zeros_like(prediction.logits, dtype=torch.bool)
    for i, row in enumerate(rows):
        seen[i, torch.tensor(row.prompt, device=seen.device)] = True
    return seen


def _packed(picked: Picked, prediction: Prediction) -> Tensor:
    """All results that the host needs, as one tensor, so that they take one transfer."""
    columns = [picked.id[:, None], picked.log_prob[:, None], prediction.streams[:, None]]
    return torch.cat([column.double() for column in (*columns, picked.top_id, picked.top_log_prob)], dim=1)


def _unpacked(
    facts: Tensor, rows: Sequence[ActiveRequest]
) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...], int]]:
    for (token, log_prob, streams, *top), row in zip(facts.tolist(), rows, strict=True):
        if math.isnan(log_prob):
            raise ValueError("the model's logits are NaN: check its weights")
        n = len(top) // 2
        likeliest = tuple((int(i), p) for i, p in zip(top[:n], top[n:], strict=True))
        yield int(token), log_prob, likeliest[: row.request.top], int(streams)


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
