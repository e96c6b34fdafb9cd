"""Progress of an evaluation: one bar per part in a terminal, a plain line every few seconds otherwise."""

import sys
import time
from types import TracebackType

from rich import progress
from rich.console import Console

from thoughtbubbles.evals.autoregressive import Report

LINE_SECONDS = 10.0
BAR_SECONDS = 0.05


class Progress:
    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet` shows nothing: only one of several ranks prints."""
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True, quiet=quiet)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def begin(self, title: str) -> Report:
        """Starts a part; call the returned function with the fraction of it that is done."""
        task = self._bars.add_task(title, total=1.0)
        begun = said = time.monotonic()
        moved = 0.0

        def report(share: float) -> None:
            nonlocal said, moved
            now = time.monotonic()
            if now - moved >= BAR_SECONDS or share >= 1:
                moved = now
                self._bars.update(task, completed=share)
            if not self._console.is_terminal and (share >= 1 or now - said >= LINE_SECONDS):
                said = now
                left = (now - begun) * (1 - share) / share
                rest = f"about {left:.0f} s left" if share < 1 else f"done in {now - begun:.1f} s"
                self._console.print(f"{title}: {share:.0%}, {rest}", markup=False)

        return report
