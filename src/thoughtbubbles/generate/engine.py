"""Continuous batching: requests join and leave between steps, and each gets the tokens that it gets alone.

    submit → waiting → reading its prompt, a chunk per step → one token per step → finished: its row is free again

A step reads one token of every row that generates, and a chunk of prompts (if compiled, chunks of several), in one
packed batch (packed.py). Prompts take turns: nobody waits for the end of a long one. The cache has a fixed number of
rows that never move. A prompt that begins like another one with the same budget copies those chunks from a row that has
them, also from a finished one (scheduler.py).

Draws depend on seed and place in the text. So what a request gets does not depend on its company, except for rounding
(equal tokens in float64).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.cache import CacheMemory
from thoughtbubbles.generate.handle import Drawn, Event, Handle, Scored
from thoughtbubbles.generate.jobs import (
    ActiveRequest,
    Finish,
    Method,
    Request,
    budget_problem,
    check,
    find_method,
    n_ids,
)
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.generate.readers import Cached, Reader, Reading, Uncached
from thoughtbubbles.generate.sample import BatchSampling, Draws, Picked, Transfer, pick
from thoughtbubbles.generate.scheduler import QueueFull as QueueFull
from thoughtbubbles.generate.scheduler import Scheduler
from thoughtbubbles.model.budget import Budget, Number, brief
from thoughtbubbles.model.config import BudgetMode, ModelConfig, is_number, is_whole
from thoughtbubbles.model.streams import at_least_float32
from thoughtbubbles.model.transformer import Thoughtbubbles

ROWS, CHUNK = 32, 64
# Around the graphs of a chunk the host has work of its own, however long the chunk is: chunks are long, several of them
# are read in one step, and they wait for each other for some steps.
COMPILED_CHUNK, COMPILED_STEP, GATHER = 512, 1024, 16
MAX_BUDGET = 4


class Stats(NamedTuple):
    waiting: int
    reading: int
    generating: int
    free: int  # rows
    tokens_read: int  # of prompts
    tokens_shared: int  # of prompts, copied from another row
    tokens_generated: int
    streams: int  # of the bubbles that predicted the generated tokens


class Engine:
    """Generates for many requests at the same time, each with its own budget and sampling.

    rows         requests that are worked on at the same time; others wait
    chunk        tokens of prompts that are read per step, and the unit in which prompts share their beginnings. By
                 default 64, and 512 with `compiled`, where a step reads chunks of several prompts: 1,024 tokens, or one
                 chunk if that is more
    waiting      how many requests may wait; None: any number. Beyond it `submit` raises QueueFull
    max_budget   the largest budget of a request, which sets the memory of a row. By default 4, or the model's own
    capacity     the most tokens of a row; by default the context length (`block_size`)
    method       "cached" or "uncached"; by default the exact one, as in `generate`
    budget_mode  "proportional" or "fixed", overrides the config, as in `generate`
    grows        whether the cache is allocated as it is needed; by default all of it at the beginning
    compiled     on a GPU: decoding steps as CUDA graphs, many times faster after about twenty seconds of compiling

    `submit` and the `cancel` of a handle can be called from any thread; `step` from one at a time.
    """

    def __init__(
        self,
        model: Thoughtbubbles,
        *,
        tokenizer: Tokenizer | None = None,
        rows: int = ROWS,
        chunk: int | None = None,
        waiting: int | None = None,
        max_budget: Number | None = None,
        capacity: int | None = None,
        method: Method | None = None,
        budget_mode: BudgetMode | None = None,
        grows: bool = False,
        compiled: bool = False,
    ):
        config = model.config
        for name, value in (("rows", rows), ("chunk", chunk), ("waiting", waiting), ("capacity", capacity)):
            least = 0 if name == "waiting" else 1
            if value is not None and (not is_whole(value) or value < least):
                raise ValueError(f"{name} = {brief(value)}: give a whole number of {least} or more")
        chunk = (COMPILED_CHUNK if compiled is True else CHUNK) if chunk is None else chunk
        self.model, self.tokenizer, self.device = model, tokenizer, model.embedding.weight.device
        self.rows, self.waiting = rows, waiting
        self.capacity = config.block_size if capacity is None else min(capacity, config.block_size)
        self.max_budget = _largest_budget(config, max_budget)
        self._reader: Reader
        self._read_tokens_ahead: Callable[[list[int], Tensor], None] | None = None
        copy = None
        self._n_ids = n_ids(config, tokenizer)
        is_cached = find_method(config, method, budget_mode) == "cached"
        check_compiled(compiled, is_cached=is_cached, device=self.device)
        if is_cached:
            options: dict[str, Any] = {"rows": rows, "capacity": self.capacity, "budget": self.max_budget}
            if compiled:
                from thoughtbubbles.generate.graphed import Graphed  # needs a GPU

                self._reader = graphed = Graphed(model, n_ids=self._n_ids, **options)
                self._read_tokens_ahead = graphed.read_ahead
            else:
                self._reader = Cached(model, grows=grows, **options)
            may_lose_forks = bool(config.fork_reach and config.fork_layers)  # those of a prefix that is to be copied
            copy = None if may_lose_forks else self._reader.copy_prefix
        else:  # whole prompts: every text is read again in any case
            self._reader, chunk = Uncached(model, rows=rows, budget_mode=budget_mode), rows * self.capacity
        together: dict[str, Any] = {"step_tokens": COMPILED_STEP, "gather": GATHER} if compiled else {}
        self._scheduler: Scheduler[Handle] = Scheduler(rows=rows, chunk=chunk, waiting=waiting, copy=copy, **together)
        self._numbers = count()
        self._read = self._generated = self._streams = 0
        self._drawing: list[Handle] = []  # those that drew in the step before, and their settings
        self._settings = BatchSampling.of([], device=self.device)
        self._draws = Draws(self.device)

    def submit(self, request: Request, *, timeout: int | float = math.inf) -> Handle:
        """`timeout`: seconds after which the request ends with what it has. A bad request raises ValueError."""
        return self.submit_all([request], timeout=timeout)[0]

    def submit_all(self, requests: Sequence[Request], *, timeout: int | float = math.inf) -> list[Handle]:
        """All of them, or none if the queue has no room for all."""
        if not is_number(timeout) or not timeout >= 0:
            raise ValueError(f"timeout = {brief(timeout)}: give a number of seconds")
        jobs = [self._job(request) for request in requests]
        for job in jobs:
            job.number = next(self._numbers)
        return self.submit_jobs(jobs, deadline=time.monotonic() + timeout)

    def submit_jobs(self, jobs: Sequence[ActiveRequest], *, deadline: float = math.inf) -> list[Handle]:
        """Requests that are checked and numbered already."""
        handles = [Handle(self, job, deadline=deadline) for job in jobs]
        self._scheduler.add(handles)
        return handles

    def _job(self, request: Request) -> ActiveRequest:
        config = self.model.config
        prompt = check(config, request, self.tokenizer, can_score=isinstance(self._reader, Cached))
        job = ActiveRequest(0, request, prompt, config, self.tokenizer)
        if _needed(config, Budget.of(job.budget)) > self.max_budget.largest:
            most = float(self.max_budget.largest)
            raise ValueError(f"budget = {brief(job.budget)}: this engine has room for budgets up to {most:g}")
        least = 1 if request.max_new is None else request.max_new
        job.max_new = min(job.max_new, self.capacity - len(prompt))
        if job.max_new < least:
            raise ValueError(
                f"a prompt of {len(prompt)} and {least} new tokens are more than this engine's capacity "
                f"of {self.capacity} tokens per row"
            )
        return job

    def cancel(self, handle: Handle) -> None:
        """From any thread. The row is free before the next step."""
        self._scheduler.cancel(handle)

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    def run(self) -> Iterator[Event]:
        """Steps until nothing is left to do."""
        while not self.is_idle:
            yield from self.step()

    def stats(self) -> Stats:
        waiting, reading, generating = self._scheduler.counts()
        free = self.rows - reading - generating
        shared = self._scheduler.n_shared
        return Stats(waiting, reading, generating, free, self._read, shared, self._generated, self._streams)

    def warm_up(self) -> None:
        """Compiles all that steps can need, if they are compiled: else it is compiled when it is first needed."""
        from thoughtbubbles.generate.graphed import Graphed

        if isinstance(self._reader, Graphed):
            self._reader.warm_up()

    def memory(self) -> CacheMemory | None:
        """Of the cache, now; None without one."""
        return self._reader.cache.memory() if isinstance(self._reader, Cached) else None

    def step(self) -> list[Event]:
        """Frees the rows of cancelled and late requests, lets waiting ones in, reads one batch, and draws tokens."""
        expired = self._scheduler.expired()
        events = [self._end(handle, "cancelled" if handle.is_cancelled else "timeout") for handle in expired]
        try:
            for handle in self._scheduler.admit():
                self._reader.open(handle.own_row, handle.job.budget)
        except RuntimeError as error:  # of a step that was read ahead: all rows are lost
            return events + [self._fail(handle, error) for handle in list(self._scheduler.live)]
        plan = self._scheduler.plan()
        return events + self._advance(plan) if plan else events

    def _advance(self, plan: Sequence[tuple[Handle, int]]) -> list[Event]:
        ends = list(accumulate(n for _, n in plan))
        ready = [i for i, (handle, n) in enumerate(plan) if handle.n_read + n >= len(handle.prompt)]
        scored = _scored(plan)
        try:
            reading = Reading(
                ids=[token for handle, n in plan for token in handle.due(n)],
                rows=[handle.own_row for handle, _ in plan],
                lengths=[n for _, n in plan],
                predict=[ends[i] - 1 for i in ready] + [each.place for each in scored],
                longest=max(handle.n_read + n for handle, n in plan),
            )
            prediction = self._reader.read(reading)
            scores = self._scores(scored, prediction.logits[len(ready) :])
            drawing = [i for i, of_plan in enumerate(ready) if plan[of_plan][0].job.max_new]
            drawn = self._draw([plan[ready[i]][0] for i in drawing], _rows(prediction, drawing))
        except RuntimeError as error:  # such as too little memory: the rows of this batch are lost, others are not
            return [self._fail(handle, error) for handle, _ in plan]
        for handle, n in plan:
            self._read += n if handle.next is None else 0
            self._scheduler.done(handle, n)
        for (handle, *_), log_prob, top in scores:
            handle.completion.prompt_log_probs.append(log_prob)
            handle.completion.prompt_top.append(top)
        wrong = {handle for (handle, *_), log_prob, _ in scores if math.isnan(log_prob)}
        wrong |= {each.handle for each in drawn if math.isnan(each.log_prob)}
        ended = [plan[i][0] for i in ready if not plan[i][0].job.max_new]
        return [
            *(self._fail(handle, ValueError("the model's logits are NaN: check its weights")) for handle in wrong),
            *(self._end(handle, "length") for handle in ended if handle not in wrong),
            *(self._take(each) for each in drawn if each.handle not in wrong),
        ]

    def _draw(self, handles: list[Handle], prediction: Prediction) -> list[Drawn]:
        """The next token of each row whose prompt is read."""
        if not handles:
            return []
        if handles != self._drawing:
            self._drawing = handles
            self._settings = BatchSampling.of([each.job.request.sampling for each in handles], device=self.device)
        picked = self._pick(handles, self._settings, prediction)
        facts = Transfer(_packed(picked, prediction.streams))
        self._read_ahead(handles, picked.id)
        found = []
        for handle, (token, log_prob, streams, *top) in zip(handles, facts.wait().tolist(), strict=True):
            ids, log_probs = top[: len(top) // 2], top[len(top) // 2 :]
            likeliest = [(int(i), p) for i, p in zip(ids, log_probs, strict=True)][: handle.job.request.top]
            found.append(Drawn(handle, int(token), log_prob, tuple(likeliest), int(streams)))
        return found

    def _read_ahead(self, handles: list[Handle], ids: Tensor) -> None:
        """Lets a GPU read the new tokens already. Those of requests that turn out to be finished are read in vain."""
        if self._read_tokens_ahead is None:
            return
        more = [i for i, handle in enumerate(handles) if handle.job.n_new + 1 < handle.job.max_new]
        if more:
            own = ids if len(more) == len(handles) else ids[torch.tensor(more, device=self.device)]
            self._read_tokens_ahead([handles[i].own_row for i in more], own)

    def _pick(self, handles: list[Handle], settings: BatchSampling, prediction: Prediction) -> Picked:
        n_top = max(handle.job.request.top for handle in handles)
        if prediction.likeliest is not None and settings.sampled is None and settings.penalty is None and not n_top:
            token, log_prob = prediction.likeliest
            return Picked(token, log_prob, token[:, None][:, :0], log_prob[:, None][:, :0])
        seen = None
        if settings.penalty is not None:
            vocab_size = self.model.config.vocab_size
            seen = torch.stack([handle.seen(vocab_size, self.device) for handle in handles])
        draws = None
        if settings.sampled is not None:
            draws = self._draws([(handle.job.request.sampling.seed, handle.job.n_new) for handle in handles])
        return pick(prediction.logits, settings, draws, n_ids=self._n_ids, seen=seen, n_top=n_top)

    def _take(self, drawn: Drawn) -> Event:
        handle = drawn.handle
        token = handle.job.take(drawn.id, drawn.log_prob, drawn.top, drawn.streams)
        self._generated += 1
        self._streams += token.streams
        handle.add(token)
        if token.finish is not None:
            self._end(handle, token.finish)
        return Event(handle, token)

    def _scores(
        self, scored: Sequence[Scored], logits: Tensor
    ) -> list[tuple[Scored, float, tuple[tuple[int, float], ...]]]:
        """The log-probability of each token, and the likeliest ones in its place."""
        if not scored:
            return []
        log_probs = at_least_float32(logits).log_softmax(-1)
        token = torch.tensor([each.token for each in scored], device=self.device)
        asked = [each.handle.job.request.top for each in scored]
        top = log_probs[:, : self._n_ids].topk(max(asked), dim=-1)
        own = log_probs.gather(1, token[:, None])[:, 0].tolist()
        return list(zip(scored, own, _tops(top.indices, top.values, asked), strict=True))

    def _fail(self, handle: Handle, error: Exception) -> Event:
        handle.exception, handle.completion.error = error, " ".join(str(error).split())
        return self._end(handle, "error")

    def _end(self, handle: Handle, finish: Finish) -> Event:
        handle.completion.finish = finish
        self._scheduler.release(handle)
        return Event(handle, None)


def _scored(plan: Sequence[tuple[Handle, int]]) -> list[Scored]:
    """The tokens of prompts to be scored that are predicted by the tokens of this plan."""
    found, first = [], 0
    for handle, n in plan:
        if handle.job.request.score_prompt and handle.next is None:
            predicted = handle.prompt[handle.n_read + 1 : handle.n_read + n + 1]
            found += [Scored(handle, first + i, token) for i, token in enumerate(predicted)]
        first += n
    return found


def _packed(picked: Picked, streams: Tensor) -> Tensor:
    """All results that the host needs, as one tensor, so that they take one transfer from a GPU."""
    columns = [picked.id[:, None], picked.log_prob[:, None], streams[:, None], picked.top_id, picked.top_log_prob]
    return torch.cat([column.double() for column in columns], dim=1)


def _tops(ids: Tensor, log_probs: Tensor, asked: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """As many of the likeliest tokens as are asked for in each place."""
    places = zip(ids.tolist(), log_probs.tolist(), asked, strict=True)
    return [tuple(zip(ids[:n], log_probs[:n], strict=True)) for ids, log_probs, n in places]


def _rows(prediction: Prediction, rows: Sequence[int]) -> Prediction:
    if len(rows) == len(prediction.streams):
        return prediction
    return prediction.at(torch.tensor(rows, dtype=torch.int64, device=prediction.streams.device))


def check_compiled(compiled: bool, *, is_cached: bool, device: torch.device) -> None:
    if not isinstance(compiled, bool):
        raise ValueError(f"compiled = {brief(compiled)}: give True or False")
    if compiled and not is_cached:
        raise ValueError("compiling needs the cache: without it every prefix would be a new shape to compile for")
    if compiled and device.type != "cuda":
        raise ValueError("compiling needs a CUDA GPU: do not compile on other devices")


def _needed(config: ModelConfig, budget: Budget) -> Fraction:
    """The budget that a row must have room for: without fork layers any, and never more than they can use."""
    return min(budget.largest, Fraction(config.max_bubble)) if config.fork_layers else Fraction(1)


def _largest_budget(config: ModelConfig, given: Number | None) -> Budget:
    if given is not None and (wrong := budget_problem(config, given)):
        raise ValueError(f"max_{wrong}")
    least = [Budget.of(config.budget), Budget.of(MAX_BUDGET)] if given is None else [Budget.of(given)]
    return Budget.of(max(_needed(config, budget) for budget in least))
