"""Continuous batching: requests join and leave between steps, and each gets the tokens that it gets alone.

    submit → waiting → reading its prompt, a chunk per step → one token per step → finished: its row is free again

A step reads one token of every row that generates, and chunks of the oldest prompts, in one packed batch (packed.py):
a long prompt delays nobody by more than a chunk. The cache has a fixed number of rows that never move. A prompt that
begins like another one with the same budget copies those chunks from a row that has them, also from a finished one.

Chunks begin at multiples of `chunk` tokens of a row, whatever else is running. Draws depend on seed and place in the
text. So what a request gets does not depend on its company, except for rounding (equal tokens in float64).
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.cache import new_cache
from thoughtbubbles.generate.decode import Prediction
from thoughtbubbles.generate.packed import Batch, read
from thoughtbubbles.generate.requests import ActiveRequest, Completion, Finish, Request, Token, check
from thoughtbubbles.generate.sample import BatchSampling, pick, uniform
from thoughtbubbles.model.budget import Budget, Number, brief
from thoughtbubbles.model.config import is_number, is_whole
from thoughtbubbles.model.transformer import Thoughtbubbles

# The budget of a prompt and its first tokens. Another budget forks differently from the first token on.
Beginning = tuple[Budget, tuple[int, ...]]
ROWS, CHUNK = 32, 64
MAX_BUDGET = 4


class QueueFull(Exception):
    """Too many requests are waiting."""


class Stats(NamedTuple):
    waiting: int
    reading: int
    generating: int
    free: int  # rows
    tokens_read: int  # of prompts
    tokens_shared: int  # of prompts, copied from another row
    tokens_generated: int
    streams: int  # of the bubbles that predicted the generated tokens


class Event(NamedTuple):
    """Something new of a request: a token, or None if it ended without one (see `completion.finish`)."""

    handle: "Handle"
    token: Token | None


class Handle:
    """A submitted request. Iterating over it yields its tokens; it runs the engine while it has none."""

    def __init__(self, engine: "Engine", job: ActiveRequest, *, deadline: float):
        self.completion = Completion(text="" if job.text is not None else None)
        self._engine, self._job, self._deadline = engine, job, deadline
        self._fresh: deque[Token] = deque()
        self._is_cancelled = False
        self._row: int | None = None
        self._n_read = 0  # tokens in the cache
        self._next: int | None = None  # the token that is read next, once the prompt is read
        self._seen: Tensor | None = None  # ids of the text so far, for the repetition penalty

    @property
    def number(self) -> int:
        return self._job.number

    @property
    def prompt(self) -> list[int]:
        return self._job.prompt

    @property
    def is_finished(self) -> bool:
        return self.completion.finish is not None

    def cancel(self) -> None:
        """From any thread. The row is free before the next step."""
        self._is_cancelled = True

    def __iter__(self) -> Iterator[Token]:
        while self._fresh or not self.is_finished:
            if self._fresh:
                yield self._fresh.popleft()
            else:
                self._engine.step()

    def result(self) -> Completion:
        """Runs the engine until the request is finished."""
        while not self.is_finished:
            self._engine.step()
        return self.completion


class Engine:
    """Generates for many requests at the same time, each with its own budget and sampling.

    rows        requests that are worked on at the same time; others wait
    chunk       tokens of prompts that are read per step
    waiting     how many requests may wait; None: any number. Beyond it `submit` raises QueueFull
    max_budget  the largest budget of a request, which sets the memory of a row. By default 4, or the model's own
    capacity    the most tokens of a row; by default the context length (`block_size`)

    `submit` and `cancel` can be called from any thread; `step` from one at a time.
    """

    def __init__(
        self,
        model: Thoughtbubbles,
        *,
        tokenizer: Tokenizer | None = None,
        rows: int = ROWS,
        chunk: int = CHUNK,
        waiting: int | None = None,
        max_budget: Number | None = None,
        capacity: int | None = None,
    ):
        config = model.config
        for name, value in (("rows", rows), ("chunk", chunk), ("waiting", waiting), ("capacity", capacity)):
            if value is not None and (not is_whole(value) or value < (0 if name == "waiting" else 1)):
                raise ValueError(f"{name} = {brief(value)}: give a whole number of 1 or more")
        if not config.is_causal:
            raise ValueError(
                "this model has block selection, which revises its decisions, so there is no exact KV cache: use "
                "generate(…, method='uncached')"
            )
        self.model, self.tokenizer, self.rows, self.chunk, self.waiting = model, tokenizer, rows, chunk, waiting
        self.capacity = config.block_size if capacity is None else min(capacity, config.block_size)
        self.max_budget = _largest_budget(model, max_budget)
        weight = model.embedding.weight
        self.device = weight.device
        self._cache = new_cache(
            config,
            rows=rows,
            capacity=self.capacity,
            budget=self.max_budget,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._lock = threading.Lock()
        self._submitted = 0
        self._waiting: deque[Handle] = deque()
        self._live: list[Handle] = []  # in the order of arrival
        self._free: deque[int] = deque(range(rows))  # the one that is free for longest first
        self._held: dict[Beginning, set[int]] = {}  # the rows that have the beginning of a prompt
        self._read = self._shared = self._generated = self._streams = 0

    def submit(self, request: Request, *, timeout: int | float = math.inf) -> Handle:
        """`timeout`: seconds after which the request ends with what it has. A bad request raises ValueError."""
        if not is_number(timeout) or not timeout >= 0:
            raise ValueError(f"timeout = {brief(timeout)}: give a number of seconds")
        config = self.model.config
        prompt = check(config, request, self.tokenizer)
        job = ActiveRequest(0, request, prompt, config, self.tokenizer)
        if _value(Budget.of(job.budget)) > _value(self.max_budget):
            raise ValueError(f"budget = {brief(job.budget)}: this engine has room for budgets up to {self._most}")
        job.max_new = min(job.max_new, self.capacity - len(prompt))
        if job.max_new < (request.max_new or 1):
            raise ValueError(
                f"a prompt of {len(prompt)} and {request.max_new or 1} new tokens are more than this engine's capacity "
                f"of {self.capacity} tokens per row"
            )
        handle = Handle(self, job, deadline=time.monotonic() + timeout)
        with self._lock:
            if self.waiting is not None and len(self._waiting) >= self.waiting + len(self._free):
                raise QueueFull(f"{len(self._waiting)} requests are waiting already")
            job.number = self._submitted
            self._submitted += 1
            self._waiting.append(handle)
        return handle

    @property
    def _most(self) -> str:
        return str(_value(self.max_budget))

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._live)

    def run(self) -> Iterator[Event]:
        """Steps until nothing is left to do."""
        while not self.is_idle:
            yield from self.step()

    def stats(self) -> Stats:
        with self._lock:
            waiting, live = len(self._waiting), list(self._live)
        generating = sum(handle._next is not None for handle in live)
        counts = self._read, self._shared, self._generated, self._streams
        return Stats(waiting, len(live) - generating, generating, self.rows - len(live), *counts)

    def step(self) -> list[Event]:
        """Frees the rows of cancelled and late requests, lets waiting ones in, reads one batch, and draws tokens."""
        events = self._sweep()
        self._admit()
        plan = self._plan()
        if not plan:
            return events
        lengths = [n for _, n in plan]
        ids = [token for handle, n in plan for token in self._due(handle, n)]
        batch = Batch.of([_row(handle) for handle, _ in plan], lengths, device=self.device)
        for handle, n in plan:
            handle._n_read += n
        ready = [i for i, (handle, _) in enumerate(plan) if handle._n_read >= len(handle.prompt)]
        predict = batch.last[torch.tensor(ready, dtype=torch.int64, device=self.device)]
        try:
            prediction = read(self.model, self._cache, torch.tensor(ids, device=self.device), batch, predict=predict)
        except RuntimeError as error:  # such as too little memory: the rows of this batch are lost, others are not
            return events + [self._fail(handle, str(error)) for handle, _ in plan]
        for handle, n in plan:
            if handle._next is None:
                self._read += n
                self._remember(handle)
        return events + self._draw([plan[i][0] for i in ready], prediction) if ready else events

    def _sweep(self) -> list[Event]:
        now, events = time.monotonic(), []
        with self._lock:
            everyone = [*self._live, *self._waiting]
        for handle in everyone:
            if handle._is_cancelled or handle._deadline <= now:
                self._finish(handle, "cancelled" if handle._is_cancelled else "timeout")
                events.append(Event(handle, None))
        return events

    def _admit(self) -> None:
        with self._lock:
            while self._waiting and self._free:
                handle = self._waiting.popleft()
                row = self._free.popleft()
                self._forget(row)
                self._cache.clear(row, Budget.of(handle._job.budget))
                handle._row = row
                self._live.append(handle)

    def _plan(self) -> list[tuple[Handle, int]]:
        """Who is read in this step, and how many tokens: all that generate, and prompts while they fit in a chunk."""
        plan = [(handle, 1) for handle in self._live if handle._next is not None]
        room, begun = self.chunk, set()
        for handle in self._live:
            if handle._next is not None:
                continue
            self._share(handle)
            done, end = handle._n_read, len(handle.prompt)
            n = min(self.chunk - done % self.chunk, end - done)
            due = self._key(handle, done + n)
            if due in begun:
                continue  # the same chunk is being read: copy it in the next step
            if n > room:
                break
            begun.add(due)
            plan.append((handle, n))
            room -= n
        return plan

    def _due(self, handle: Handle, n: int) -> list[int]:
        return handle.prompt[handle._n_read : handle._n_read + n] if handle._next is None else [handle._next]

    def _key(self, handle: Handle, n: int) -> Beginning:
        return Budget.of(handle._job.budget), tuple(handle.prompt[:n])

    def _share(self, handle: Handle) -> None:
        """Copies chunks that another row has read already. At least one token is left: it predicts the next one."""
        done = handle._n_read
        if done % self.chunk:
            return
        best, source = done, -1
        for end in range(done + self.chunk, len(handle.prompt), self.chunk):
            rows = self._held.get(self._key(handle, end))
            if not rows:
                break
            best, source = end, min(rows)
        if best > done:
            self._cache.copy_prefix(source, _row(handle), best)
            handle._n_read = best
            self._shared += best - done
            self._remember(handle)

    def _remember(self, handle: Handle) -> None:
        """All whole chunks that the row has of its prompt."""
        for end in range(self.chunk, handle._n_read + 1, self.chunk):
            self._held.setdefault(self._key(handle, end), set()).add(_row(handle))

    def _forget(self, row: int) -> None:
        for rows in self._held.values():
            rows.discard(row)
        self._held = {key: rows for key, rows in self._held.items() if rows}

    def _draw(self, handles: list[Handle], prediction: Prediction) -> list[Event]:
        """The next token of each row whose prompt is read."""
        sampling = [handle._job.request.sampling for handle in handles]
        settings = BatchSampling.of(sampling, device=self.device)
        draws = [uniform(each.seed, handle._job.n_new) for each, handle in zip(sampling, handles, strict=True)]
        picked = pick(
            prediction.logits,
            settings,
            torch.tensor(draws, dtype=torch.float64, device=self.device),
            n_ids=self.model.config.vocab_size if self.tokenizer is None else self.tokenizer.size,
            seen=None if settings.penalty is None else torch.stack([self._seen(handle) for handle in handles]),
            n_top=max(handle._job.request.top for handle in handles),
        )
        columns = [each.tolist() for each in (picked.id, picked.log_prob, prediction.streams)]
        tops = zip(picked.top_id.tolist(), picked.top_log_prob.tolist(), strict=True)
        events = []
        for handle, token, log_prob, streams, (top_id, top) in zip(handles, *columns, tops, strict=True):
            if math.isnan(log_prob):
                events.append(self._fail(handle, "the model's logits are NaN: check its weights"))
                continue
            likeliest = tuple(zip(top_id, top, strict=True))[: handle._job.request.top]
            events.append(self._take(handle, handle._job.take(token, log_prob, likeliest, streams)))
        return events

    def _take(self, handle: Handle, token: Token) -> Event:
        handle._next = token.id
        if handle._seen is not None:
            handle._seen[token.id] = True
        self._generated += 1
        self._streams += token.streams
        handle.completion.add(token, with_text=self.tokenizer is not None)
        handle._fresh.append(token)
        if token.finish is not None:
            self._finish(handle, token.finish)
        return Event(handle, token)

    def _seen(self, handle: Handle) -> Tensor:
        if handle._seen is None:
            handle._seen = torch.zeros(self.model.config.vocab_size, dtype=torch.bool, device=self.device)
            handle._seen[torch.tensor(handle.prompt, device=self.device)] = True
        return handle._seen

    def _fail(self, handle: Handle, reason: str) -> Event:
        handle.completion.error = " ".join(reason.split())
        self._finish(handle, "error")
        return Event(handle, None)

    def _finish(self, handle: Handle, finish: Finish) -> None:
        """The row keeps its contents until it is used again: another prompt may begin with them."""
        handle.completion.finish = finish
        with self._lock:
            if handle._row is None:
                self._waiting.remove(handle)
            else:
                self._live.remove(handle)
                self._free.append(handle._row)
                handle._row = None


def _row(handle: Handle) -> int:
    assert handle._row is not None
    return handle._row


def _value(budget: Budget) -> float:
    return budget.numerator[0] / budget.denominator[0]


def _largest_budget(model: Thoughtbubbles, given: Number | None) -> Budget:
    config = model.config
    if not config.fork_layers:
        return Budget.of(1) if given is None else Budget.of(given)
    if given is not None:
        return Budget.of(given)
    own = Budget.of(config.budget)
    usual = Budget.of(min(MAX_BUDGET, config.max_bubble))
    return own if _value(own) > _value(usual) else usual
