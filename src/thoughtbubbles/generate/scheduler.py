"""Who is read in the next step: the queue, the free rows, the chunks of prompts, and which of them are shared.

    add → waiting → admit: takes a free row → plan: a chunk of its prompt per step, then one token per step → release

No tensors and no model: the engine reads what is planned. Two rules make a text independent of its company. Chunks
begin at multiples of `chunk` tokens of a row: what else is running decides when one is read, never where it begins. And
a chunk is copied only from a row with the same budget whose text is the same up to the chunk's end.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from thoughtbubbles.model.budget import Budget

# The budget of a prompt and its first tokens. Another budget forks differently from the first token on.
Beginning = tuple[Budget, tuple[int, ...]]


class QueueFull(Exception):
    """Too many requests are waiting."""


class Work:
    """A prompt to read and then to continue."""

    def __init__(self, prompt: Sequence[int], budget: Budget, *, deadline: float, can_share: bool = True):
        self.prompt, self.budget, self.deadline, self.can_share = prompt, budget, deadline, can_share
        self.is_cancelled = False
        self.row: int | None = None  # None while it is waiting and when it is finished
        self.n_read = 0  # tokens that its row has
        self.n_shared = 0  # of them, tokens of the prompt that were copied from another row
        self.next: int | None = None  # the token to be read next, once the prompt is read

    @property
    def own_row(self) -> int:
        assert self.row is not None
        return self.row

    def due(self, n: int) -> Sequence[int]:
        """The next n tokens to read."""
        return self.prompt[self.n_read : self.n_read + n] if self.next is None else [self.next]

    def beginning(self, n: int) -> Beginning:
        return self.budget, tuple(self.prompt[:n])


W = TypeVar("W", bound=Work)


class Scheduler(Generic[W]):
    """Its methods are called by one thread, `add` and the counts by any.

    waiting  how many requests may wait besides those that find a free row; None: any number
    copy     `copy(source, row, n_tokens)` lets a row begin with the first tokens of another one
    """

    def __init__(
        self,
        *,
        rows: int,
        chunk: int,
        waiting: int | None = None,
        copy: Callable[[int, int, int], object] | None = None,
    ):
        self.rows, self.chunk, self.most_waiting = rows, chunk, waiting
        self.live: list[W] = []  # in the order of arrival
        self.n_shared = 0
        self._copy = copy
        self._lock = threading.Lock()
        self._waiting: deque[W] = deque()
        self._free: deque[int] = deque(range(rows))  # the one that is free for longest first
        self._held: dict[Beginning, set[int]] = {}  # the rows that have the beginning of a prompt

    def add(self, all_new: Sequence[W]) -> None:
        """All of them, or none: QueueFull."""
        with self._lock:
            room = len(self._free) - len(self._waiting)
            if self.most_waiting is not None and len(all_new) > room + self.most_waiting:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already: try again later")
            self._waiting.extend(all_new)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self.live)

    def counts(self) -> tuple[int, int, int]:
        """Requests that wait, that read their prompt, and that generate."""
        with self._lock:
            waiting, live = len(self._waiting), list(self.live)
        generating = sum(work.next is not None for work in live)
        return waiting, len(live) - generating, generating

    def expired(self) -> list[W]:
        """Requests that are cancelled or late."""
        now = time.monotonic()
        with self._lock:
            everyone = [*self.live, *self._waiting]
        return [work for work in everyone if work.is_cancelled or work.deadline <= now]

    def admit(self) -> list[W]:
        """Gives free rows to those who wait for longest."""
        admitted = []
        with self._lock:
            while self._waiting and self._free:
                work = self._waiting.popleft()
                work.row = self._free.popleft()
                self._forget(work.row)
                self.live.append(work)
                admitted.append(work)
        return admitted

    def plan(self) -> list[tuple[W, int]]:
        """Who is read in this step, and how many tokens: all that generate, and prompts while they fit in a chunk."""
        plan = [(work, 1) for work in self.live if work.next is not None]
        room = self.chunk
        for work in self.live:
            if work.next is not None:
                continue
            self._share(work)
            n = min(self.chunk - work.n_read % self.chunk, len(work.prompt) - work.n_read)
            if n > room:  # a whole chunk leaves no room, so no step reads the same one twice: it is copied in the next
                break
            plan.append((work, n))
            room -= n
        return plan

    def done(self, work: W, n: int) -> None:
        """Its next n tokens were read."""
        work.n_read += n
        if work.next is None:
            self._remember(work)

    def release(self, work: W) -> None:
        """The row keeps its contents until it is used again: another prompt may begin with them."""
        with self._lock:
            if work.row is None:
                self._waiting.remove(work)
            else:
                self.live.remove(work)
                self._free.append(work.row)
                work.row = None

    def _share(self, work: W) -> None:
        """Copies chunks that another row has read already. At least one token is left: it predicts the next one."""
        done = work.n_read
        if done % self.chunk or not work.can_share or self._copy is None:
            return
        best, source = done, -1
        for end in range(done + self.chunk, len(work.prompt), self.chunk):
            rows = self._held.get(work.beginning(end))
            if not rows:
                break
            best, source = end, min(rows)
        if best > done:
            self._copy(source, work.own_row, best)
            work.n_read = best
            work.n_shared += best - done
            self.n_shared += best - done
            self._remember(work)

    def _remember(self, work: W) -> None:
        """All whole chunks that the row has of its prompt."""
        for end in range(self.chunk, min(work.n_read, len(work.prompt)) + 1, self.chunk):
            self._held.setdefault(work.beginning(end), set()).add(work.own_row)

    def _forget(self, row: int) -> None:
        for rows in self._held.values():
            rows.discard(row)
        self._held = {key: rows for key, rows in self._held.items() if rows}
