"""A thread that runs the engine of one model, and the tickets by which HTTP requests get their tokens.

    event loop: submit → Ticket … its queue ← call_soon_threadsafe, once per step ← thread: engine.step()

The thread never waits for a reader. A queue has no limit of its own, but at most `max_new` events per completion: a
reader that stalls costs some small objects, and its row is free as soon as the text is complete.

A step that fails (such as too little memory) ends its own requests only. After an exception that the engine does not
handle, or MOST_FAILED failed steps in a row, the engine counts as broken: requests fail until the server is restarted.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from thoughtbubbles.generate.cache import cache_memory
from thoughtbubbles.generate.engine import Engine, QueueFull
from thoughtbubbles.generate.handle import Event, Handle
from thoughtbubbles.generate.jobs import Finish, Request, Token
from thoughtbubbles.serve.metrics import Metrics

RECENT = 10  # seconds over which the speed is measured
MOST_FAILED = 3  # after so many failed steps in a row the engine counts as broken
LONGEST_WAIT = 60  # seconds that a client is asked to wait at most
LOG = logging.getLogger("uvicorn.error")


class TooBusy(Exception):
    """The queue has no room."""

    def __init__(self, retry_after: int):
        super().__init__("too many requests are waiting: try again later")
        self.retry_after = retry_after  # seconds


class EngineBroken(Exception):
    """The engine cannot be used any more, and the server must be restarted."""


class WorkerClosed(Exception):
    """The server is stopping."""


class Failed(Exception):
    """A completion ended before it was complete."""

    def __init__(self, finish: Finish, reason: str | None = None):
        super().__init__(reason or finish)
        self.finish: Finish = finish  # cancelled, timeout or error


class NewToken(NamedTuple):
    """A new token of one completion, or None: it is finished and has none (`max_new` = 0)."""

    choice: int  # which completion of its ticket
    token: Token | None

    @property
    def finish(self) -> Finish | None:
        return "length" if self.token is None else self.token.finish


class Ticket:
    """The completions of one HTTP request. Belongs to the event loop that made it."""

    def __init__(self, *, tokens: int, metrics: Metrics):
        self.handles: list[Handle] = []
        self.loop = asyncio.get_running_loop()
        self.tokens_left = tokens  # at most
        self._metrics = metrics
        self._queue: asyncio.Queue[NewToken | Failed] = asyncio.Queue()
        self._peeked: NewToken | Failed | None = None
        self._submitted = time.monotonic()
        self._begun: dict[int, tuple[float, int]] = {}  # of each completion: time of the first token, number of tokens

    def put(self, item: NewToken | Failed, now: float) -> None:
        """In the event loop: what a step brought."""
        self._queue.put_nowait(item)
        if item.finish is not None:
            self._metrics.finished.labels(item.finish).inc()
        if isinstance(item, Failed) or item.token is None:
            return
        self.tokens_left -= 1
        first, n = self._begun.get(item.choice, (now, 0))
        self._begun[item.choice] = first, n + 1
        if n == 0:
            self._metrics.first_token.observe(now - self._submitted)
        elif item.finish is not None:
            self._metrics.per_token.observe((now - first) / n)

    async def first(self) -> None:
        """Waits for the first token. An error is raised here, while the HTTP status can still say so."""
        self._peeked = self._peeked or await self._queue.get()
        if isinstance(self._peeked, Failed):
            raise self._peeked

    async def news(self) -> AsyncIterator[NewToken]:
        """The tokens of all completions as they come. Raises Failed if one of them fails."""
        left = len(self.handles)
        while left:
            item = self._peeked or await self._queue.get()
            self._peeked = None
            if isinstance(item, Failed):
                raise item
            left -= item.finish is not None
            yield item

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()


class Destination(NamedTuple):
    ticket: Ticket
    choice: int


_News = dict[asyncio.AbstractEventLoop, list[tuple[Ticket, NewToken | Failed]]]


class Worker:
    """`build` makes the engine, when it is first needed: its cache takes memory. `timeout`: seconds per request."""

    def __init__(self, build: Callable[[], Engine], *, timeout: int | float):
        self.timeout = timeout
        self.metrics = Metrics()
        self._build = build
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()  # guards what follows
        self.error: str | None = None  # why the engine cannot be used any more
        self._is_closed = False
        self._destinations: dict[Handle, Destination] = {}
        self._recent: deque[tuple[float, float, int]] = deque()  # of each step: its end, its seconds, its new tokens
        self._n_failed = 0  # steps in a row

    @cached_property
    def engine(self) -> Engine:
        engine = self._build()
        self.metrics.watch(engine)
        return engine

    @property
    def memory(self) -> str:
        """How large the cache can become, in words."""
        engine = self.engine
        if engine.memory() is None:
            return "no KV cache (block selection)"
        weight = engine.model.embedding.weight
        size = cache_memory(
            engine.model.config,
            rows=engine.rows,
            capacity=engine.capacity,
            budget=engine.max_budget,
            dtype=weight.dtype,
        )
        return f"KV cache of {size.total / 2**20:,.0f} MiB at most"

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """All of the requests or none, from the event loop. Raises ValueError or one of the errors above."""
        engine = self.engine
        ticket = Ticket(tokens=sum(_most_new(engine, each) for each in requests), metrics=self.metrics)
        with self._wake:
            if self.error is not None:
                raise EngineBroken(self.error)
            if self._is_closed:
                raise WorkerClosed
            self._check_size(len(requests))
            try:
                ticket.handles = engine.submit_all(requests, timeout=self.timeout)
            except QueueFull:
                raise TooBusy(self._retry_after()) from None
            self._destinations |= {handle: Destination(ticket, choice) for choice, handle in enumerate(ticket.handles)}
            self._start()
        return ticket

    def abort(self) -> None:
        """Cancels everything that runs or waits."""
        with self._wake:
            for handle in self._destinations:
                handle.cancel()

    def close(self, *, seconds: int | float = 10) -> None:
        """Ends the thread after the step that it is in."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _check_size(self, n: int) -> None:
        """What cannot fit into an empty queue is not worth another try."""
        if self.engine.waiting is not None and n > (most := self.engine.waiting + self.engine.rows):
            raise ValueError(f"the request asks for {n} completions: this server has room for {most}")

    def _retry_after(self) -> int:
        """Seconds until everything that was accepted is done, at the speed of the last steps, without idle time."""
        self._forget_old_steps(time.monotonic())
        left = sum(ticket.tokens_left for ticket in {each.ticket for each in self._destinations.values()})
        generated = sum(n for *_, n in self._recent)
        if not generated:
            return 1
        elapsed = sum(seconds for _, seconds, _ in self._recent)
        return max(1, min(LONGEST_WAIT, round(left * elapsed / generated)))

    def _forget_old_steps(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RECENT:
            self._recent.popleft()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        self._wake.notify()

    def _run(self) -> None:
        while self._has_work():
            begin = time.monotonic()
            try:
                events = self.engine.step()
            except Exception as error:
                self._break(error)
                return
            self._deliver(events, begin)
            if (failed := self._failure(events)) is not None:
                self._break(failed)
                return

    def _has_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._is_closed or not self.engine.is_idle)
            return not self._is_closed

    def _failure(self, events: Sequence[Event]) -> Exception | None:
        """Logs what failed in a step. Returns the exception if too many steps in a row have failed."""
        failed = [event.handle for event in events if event.handle.completion.finish == "error"]
        others = [event for event in events if event.handle.completion.finish not in ("error", "cancelled", "timeout")]
        if others or not events:  # without events: parts of prompts were read
            self._n_failed = 0
        if not failed:
            return None
        for reason, error in {str(each.completion.error): each.exception for each in failed}.items():
            n = sum(str(each.completion.error) == reason for each in failed)
            LOG.error("%d completion(s) failed: %s", n, reason, exc_info=error)
        self._n_failed += not others
        return failed[-1].exception if self._n_failed >= MOST_FAILED else None

    def _deliver(self, events: Sequence[Event], begin: float) -> None:
        now = time.monotonic()
        news: _News = defaultdict(list)
        with self._wake:
            self._recent.append((now, now - begin, sum(event.token is not None for event in events)))
            self._forget_old_steps(now)
            for handle, token in events:
                is_last = token is None or token.finish is not None
                destination = self._destinations.pop(handle, None) if is_last else self._destinations.get(handle)
                if destination is not None:
                    news[destination.ticket.loop].append((destination.ticket, _item(handle, destination.choice, token)))
        _send(news, now)

    def _break(self, error: Exception) -> None:
        """The engine is in an unknown state: its requests fail, and it is not used again."""
        now = time.monotonic()
        news: _News = defaultdict(list)
        with self._wake:
            self.error = f"the engine failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            for destination in self._destinations.values():
                news[destination.ticket.loop].append((destination.ticket, Failed("error", self.error)))
            self._destinations.clear()
        LOG.error("%s; the server must be restarted", self.error, exc_info=error)
        _send(news, now)


def _most_new(engine: Engine, request: Request) -> int:
    return engine.capacity if request.max_new is None else request.max_new


def _item(handle: Handle, choice: int, token: Token | None) -> NewToken | Failed:
    finish = handle.completion.finish
    if token is None and finish is not None and finish != "length":
        return Failed(finish, handle.completion.error)
    return NewToken(choice, token)


def _send(news: _News, now: float) -> None:
    for loop, items in news.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            loop.call_soon_threadsafe(_put, items, now)


def _put(items: Sequence[tuple[Ticket, NewToken | Failed]], now: float) -> None:
    for ticket, item in items:
        ticket.put(item, now)
