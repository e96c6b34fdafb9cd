"""Progress of a preparation: a bar in a terminal, a plain line every few seconds otherwise."""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any, TypeVar

from thoughtbubbles.data.output import PrepareState
from thoughtbubbles.data.sources import Chunk, Input

LINE_SECONDS = 10.0
Shown = TypeVar("Shown", bound="_Progress")


class _Progress:
    def __init__(self, inputs: Sequence[Input]):
        self._before = [0, *accumulate(found.bytes for found in inputs)]
        self._total = None if any(found.path is None for found in inputs) else self._before[-1]
        self._printed = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self: Shown) -> Shown:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = progress.BarColumn(), progress.TaskProgressColumn(), progress.TextColumn("{task.description}")
            self._bar = progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task("reading", total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, chunk: Chunk, text: Callable[[], str]) -> None:
        now = time.monotonic()
        if self._bar is None and now - self._printed < LINE_SECONDS:
            return
        read = self._before[chunk.input] + chunk.read
        if self._bar is not None:
            self._bar.update(self._task, description=text(), completed=read)
            return
        self._printed = now
        share = f", {100 * read // self._total} %" if self._total else ""
        print(f"{chunk.name}: {text()}{share}", file=sys.stderr, flush=True)


class PrepareProgress(_Progress):
    """Of the tokenization."""

    def __init__(self, inputs: Sequence[Input], *, resumed: int | None):
        super().__init__(inputs)
        self._begun = time.monotonic()
        self._bytes_begun: int | None = None
        if resumed is not None:
            print(f"resuming after {resumed:,} documents", file=sys.stderr)

    def update(self, chunk: Chunk, state: PrepareState) -> None:
        now = time.monotonic()
        n_bytes = sum(counts.bytes for counts in state.counts.values())
        if self._bytes_begun is None:
            self._bytes_begun = n_bytes
            self._begun = now  # before the first chunk, processes are starting
        begun = self._bytes_begun

        def text() -> str:
            documents = sum(counts.documents for counts in state.counts.values())
            tokens = sum(counts.tokens for counts in state.counts.values())
            speed = (n_bytes - begun) / 1e6 / max(now - self._begun, 1e-9)
            return f"{documents:,} documents, {tokens:,} tokens, {speed:.1f} MB/s"

        self._show(chunk, text)


class VocabularyProgress(_Progress):
    """Of reading the sources to train a vocabulary."""

    def update(self, chunk: Chunk) -> None:
        self._show(chunk, lambda: "training the vocabulary")
