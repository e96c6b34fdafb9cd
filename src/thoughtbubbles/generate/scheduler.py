"""Who is read in the next step: the queue, the free rows, the chunks of prompts, and which of them are shared.

    add → waiting → admit: takes a free row → plan: a chunk of its prompt per turn, then one token per step → release

No tensors and no model: the engine reads what is planned. Two rules make a text independent of its company. Chunks
begin at multiples of `chunk` tokens of a row: what else is running decides when one is read, never where it begins. And
a chunk is copied only from a row with the same budget whose text is the same up to the chunk's end.
"""

import hashlib
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from thoughtbubbles.model.budget import Budget


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
        self._beginnings: list[bytes] = []

    @property
    def own_row(self) -> int:
        assert self.row is not None
        return self.row

    def due(self, n: int) -> Sequence[int]:
        """The next n tokens to read."""
        return self.prompt[self.n_read : self.n_read + n] if self.next is None else [self.next]

    def beginning(self, n_chunks: int, chunk: int) -> bytes:
        """A key for its first chunks. The budget is a part of it: another one forks differently from the start on."""
        known = self._beginnings
        while len(known) < n_chunks:
            before = known[-1] if known else repr(self.budget).encode()
            own = array("q", self.prompt[len(known) * chunk : (len(known) + 1) * chunk]).tobytes()
            known.append(hashlib.blake2b(before + own, digest_size=16).digest())
        return known[n_chunks - 1]


W = TypeVar("W", bound=Work)


class Scheduler(Generic[W]):
    """Its methods are called by one thread; `add`, `cancel` and `counts` by any.

    waiting      how many requests may wait besides those that find a free row; None: any number
    step_tokens  tokens of prompts that a step reads at most, each of them a chunk or less; by default one chunk
    gather       for how many steps of others short prompts may wait until there are as many tokens of them
    copy         `copy(source, row, n_tokens)` lets a row begin with the first tokens of another one
    """

    def __init__(
        self,
        *,
        rows: int,
        chunk: int,
        waiting: int | None = None,
        step_tokens: int | None = None,
        gather: int = 0,
        copy: Callable[[int, int, int], object] | None = None,
    ):
        self.gather, self._gathered = gather, 0
        self.rows, self.chunk, self.most_waiting = rows, chunk, waiting
        self.step_tokens = max(chunk, step_tokens or 0)
        self.live: list[W] = []  # in the order of arrival
        self.n_shared = 0
        self._copy = copy
        self._lock = threading.Lock()
        self._waiting: deque[W] = deque()
        self._reading: deque[W] = deque()  # of those that live; the one that is read next first
        self._free: deque[int] = deque(range(rows))  # the one that is free for longest first
        self._held: dict[bytes, set[int]] = {}  # by a prompt's beginning: the rows that have it
        self._of_row: list[list[bytes]] = [[] for _ in range(rows)]  # the beginnings that a row has
        self._soonest = math.inf  # no deadline is earlier
        self._has_cancelled = False

    def add(self, all_new: Sequence[W]) -> None:
        """All of them, or none: QueueFull."""
        with self._lock:
            room = len(self._free) - len(self._waiting)
            if self.most_waiting is not None and len(all_new) > room + self.most_waiting:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already: try again later")
            self._waiting.extend(all_new)
            self._soonest = min([self._soonest, *(work.deadline for work in all_new)])

    def cancel(self, work: W) -> None:
        work.is_cancelled = True  # before the flag: whoever sees the flag finds it
        self._has_cancelled = True

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
        """Requests that are cancelled or late. Looks at all of them only if there can be any."""
        now = time.monotonic()
        if not self._has_cancelled and now < self._soonest:
            return []
        self._has_cancelled = False
        with self._lock:
            everyone = [*self.live, *self._waiting]
            self._soonest = min((work.deadline for work in everyone if work.deadline > now), default=math.inf)
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
                self._reading.append(work)
                admitted.append(work)
        return admitted

    def plan(self) -> list[tuple[W, int]]:
        """Who is read in this step, and how many tokens: all that generate, and chunks of prompts while they fit."""
        plan = [(work, 1) for work in self.live if work.next is not None]
        if plan and self._should_wait():
            self._gathered += 1
            return plan
        self._gathered, room = 0, self.step_tokens
        planned: set[bytes] = set()
        for work in self._reading:
            self._share(work)
            n = self._due(work)
            if n > room:
                break
            if n == self.chunk and self._copy is not None:
                key = work.beginning(work.n_read // self.chunk + 1, self.chunk)
                if key in planned and work.can_share and work.n_read + n < len(work.prompt):
                    continue  # another prompt reads the same chunk now: it is copied in the next step
                planned.add(key)
            plan.append((work, n))
            room -= n
        return plan

    def _due(self, work: W) -> int:
        """Tokens of its prompt up to the end of a chunk."""
        return min(self.chunk - work.n_read % self.chunk, len(work.prompt) - work.n_read)

    def _should_wait(self) -> bool:
        """Whether others may come whose prompts are read in the same step: only short ones that have not begun wait."""
        if not self._reading or self._gathered >= self.gather:
            return False
        due = [self._due(work) for work in self._reading]
        return sum(due) < self.step_tokens and max(due) < self.chunk and not any(w.n_read for w in self._reading)

    def done(self, work: W, n: int) -> None:
        """Its next n tokens were read. Prompts take turns, so a short one does not wait for the end of a long one."""
        work.n_read += n
        if work.next is not None:
            return
        self._remember(work)
        self._reading.remove(work)
        if work.n_read < len(work.prompt):
            self._reading.append(work)

    def release(self, work: W) -> None:
        """The row keeps its contents until it is used again: another prompt may begin with them."""
        with self._lock:
            if work.row is None:
                self._waiting.remove(work)
                return
            self.live.remove(work)
            if work in self._reading:
                self._reading.remove(work)
            self._free.append(work.row)
            work.row = None

    def _share(self, work: W) -> None:
        """Copies chunks that another row has read already. At least one token is left: it predicts the next one."""
        if work.n_read % self.chunk or not work.can_share or self._copy is None:
            return
        done = best = work.n_read // self.chunk
        source = -1
        while (best + 1) * self.chunk < len(work.prompt):
            rows = self._held.get(work.beginning(best + 1, self.chunk))
            if not rows:
                break
            best, source = best + 1, min(rows)
        if best > done:
            self._copy(source, work.own_row, best * self.chunk)
            work.n_read = best * self.chunk
            work.n_shared += (best - done) * self.chunk
            self.n_shared += (best - done) * self.chunk
            self._remember(work)

    def _remember(self, work: W) -> None:
        """The whole chunks of its prompt that the row now has."""
        own = self._of_row[work.own_row]
        for n_chunks in range(len(own) + 1, work.n_read // self.chunk + 1):
            own.append(work.beginning(n_chunks, self.chunk))
            self._held.setdefault(own[-1], set()).add(work.own_row)

    def _forget(self, row: int) -> None:
        for key in self._of_row[row]:
            self._held[key].discard(row)
            if not self._held[key]:
                del self._held[key]
        self._of_row[row] = []
