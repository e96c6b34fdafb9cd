"""A submitted request, as the caller has it in hand, and what happens to it."""

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from thoughtbubbles.generate.jobs import ActiveRequest, Completion, Token
from thoughtbubbles.generate.scheduler import Work
from thoughtbubbles.model.budget import Budget


@runtime_checkable
class Runs(Protocol):
    """What a request needs of its engine."""

    def step(self) -> object: ...

    def cancel(self, handle: "Handle") -> None: ...


class Event(NamedTuple):
    """Something new of a request: a token, or None if it ended without one (see `completion.finish`)."""

    handle: "Handle"
    token: Token | None


class Drawn(NamedTuple):
    handle: "Handle"
    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]
    streams: int


class Scored(NamedTuple):
    """A token of a prompt whose log-probability is asked for."""

    handle: "Handle"
    place: int  # the packed token that predicts it
    token: int


class Handle(Work):
    """A submitted request. Iterating over it yields its tokens; it runs the engine while it has none."""

    def __init__(self, engine: Runs, job: ActiveRequest, *, deadline: float = math.inf):
        scored = job.request.score_prompt  # needs the predictions of all its tokens, which the cache does not have
        super().__init__(job.prompt, Budget.of(job.budget), deadline=deadline, can_share=not scored)
        self.completion = Completion(text="" if job.text is not None else None)
        if scored:
            self.completion.prompt_log_probs, self.completion.prompt_top = [None], [()]
        self.job = job
        self.exception: Exception | None = None  # what went wrong, if the finish is "error"
        self._engine = engine
        self._fresh: deque[Token] = deque()
        self._seen: Tensor | None = None  # ids of the text so far, for the repetition penalty

    @property
    def number(self) -> int:
        return self.job.number

    @property
    def is_finished(self) -> bool:
        return self.completion.finish is not None

    def cancel(self) -> None:
        """From any thread. The row is free before the next step."""
        self._engine.cancel(self)

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

    def add(self, token: Token) -> None:
        self.next = token.id
        if self._seen is not None:
            self._seen[token.id] = True
        self.completion.add(token, with_text=self.job.text is not None)
        self._fresh.append(token)

    def seen(self, vocab_size: int, device: torch.device) -> Tensor:
        """Which tokens the text has already."""
        if self._seen is None:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor([*self.prompt, *self.completion.ids], device=device)] = True
        return self._seen
