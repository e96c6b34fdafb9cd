"""`--profile`: times a few steps of a run, profiles a few more, and the run continues.

RUN/profile/trace.json.gz   for chrome://tracing or ui.perfetto.dev: the profiled steps on host and device
RUN/profile/table.md        throughput, time per kind of kernel, and the longest kernels
"""

import time
from collections.abc import Callable

import torch

from thoughtbubbles.distributed import World
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.log import Log
from thoughtbubbles.train.profile import markdown, profile_steps, tables

WARM_UP = 5  # steps for compilation and the first memory allocations
STEPS = 5  # timed without the profiler, then as many with it, since profiling costs time
ALL = 2 * STEPS + 1  # the profiler needs one more step to warm up


class Watch:
    def __init__(self, config: RunConfig, world: World, log: Log, *, begin: int):
        self.config, self.world, self.log, self.begin = config, world, log, begin
        self.is_wanted = config.profile

    def is_due(self, done: int) -> bool:
        """Once, after the warm-up, and only if no save or evaluation is due during the steps."""
        if not self.is_wanted or done < self.begin + WARM_UP:
            return False
        steps = range(done + 1, done + ALL + 1)  # ends before the last step of the run, which saves
        return not any(self.config.saves_after(step) or self.config.evaluates_after(step) for step in steps)

    def look(self, step: Callable[[], None], *, is_over: Callable[[], bool]) -> None:
        """Takes ALL steps of the run, or fewer if it stops; all ranks take them, the first one profiles."""

        def go_on() -> None:
            if not is_over():
                step()

        self.is_wanted = False
        self._wait()
        begin = time.perf_counter()
        for _ in range(STEPS):
            go_on()
        self._wait()
        seconds = (time.perf_counter() - begin) / STEPS
        if not self.world.is_first:
            for _ in range(STEPS + 1):
                go_on()
            return
        folder = self.config.folder / "profile"
        found = profile_steps(go_on, steps=STEPS, device=self.world.device, trace=folder / "trace.json.gz")
        if is_over():
            return
        rates = self._rates(seconds)
        (folder / "table.md").write_text(markdown(found, rates))
        for table in tables(found, rates):
            self.log.show(table)
        self.log.say(f"profile: {folder}")

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def _rates(self, seconds: float) -> dict[str, str]:
        config = self.config
        flops = config.flops_per_row_in(self.begin) * config.rows / self.world.size
        rates = {
            "ms per step": f"{seconds * 1e3:.2f}",
            "tokens/s": f"{config.tokens_per_step / seconds:,.0f}",
            "TFLOP/s per device": f"{flops / seconds / 1e12:,.3g}",
        }
        if self.world.device.type == "cuda":
            rates["peak memory"] = f"{torch.cuda.max_memory_allocated(self.world.device) / 2**30:.1f} GiB"
        return rates

    def close(self) -> None:
        if self.is_wanted:
            self.log.say(
                f"--profile needs {ALL} steps after the first {WARM_UP} without a save or an evaluation among them: "
                "raise --save.every and --eval.every, or --tokens"
            )
