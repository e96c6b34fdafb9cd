"""Logging of a run: a progress bar in a terminal, plain lines otherwise, and always metrics.jsonl."""

import importlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thoughtbubbles.files import named, read_bytes, read_object, write_atomically, write_json
from thoughtbubbles.train.config import LogConfig
from thoughtbubbles.train.forks import QUANTILE_NAMES

# Dense bfloat16 TFLOP/s from the vendors' data sheets, by a substring of torch's device name.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}


# Keys that an evaluation writes to metrics.jsonl, in this and in the first version of run folders.
EVALUATED = {"validation_loss", "sample", "held_out", "held_out_sample"}


def peak_tflops(config: LogConfig, device: torch.device) -> float | None:
    if config.peak_tflops is not None or device.type != "cuda":
        return config.peak_tflops
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


class Log:
    """The log of one run, written by its first rank; the other ranks are silent."""

    def __init__(self, folder: Path, config: LogConfig, *, name: str, steps: int, is_first: bool):
        self.folder, self.config, self.steps, self.is_first = folder, config, steps, is_first
        self.console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self.metrics: TextIO | None = None
        self.failed = False
        self._progress: Progress | None = None
        self._name = name
        self._sinks: list[Any] = []

    def start(self, config: dict[str, Any], *, done: int) -> None:
        """Continues after `done` finished steps; anything that an interrupted run logged after them is removed."""
        if not self.is_first:
            return
        self._sinks = list(_sinks(self.config, self.folder, self._name, config, done=done))
        path = self.folder / "metrics.jsonl"
        with named(path, "make it a file that can be written to, or give another --out"):
            if path.exists():
                _take_back(path, done)
            self.metrics = path.open("a")
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._name, total=self.steps, completed=done, facts="")

    def step(self, facts: dict[str, Any]) -> None:
        self.write(facts)
        if self._progress is not None:
            self._progress.update(self._task, completed=facts["step"], facts=_short(facts))
        elif facts["step"] % self.config.every == 0 or facts["step"] in (1, self.steps):
            self.say(f"step {facts['step']}/{self.steps}  {_short(facts)}")

    def write(self, facts: dict[str, Any]) -> None:
        """Writes one line to metrics.jsonl, and the numbers to the other sinks."""
        if self.metrics is None:
            return
        try:
            self.metrics.write(json.dumps(_json(facts)) + "\n")
            self.metrics.flush()
        except OSError as error:
            if not self.failed:  # a broken log must not end the training
                self.say(f"metrics.jsonl cannot be written ({error.strerror}); the run continues without it")
            self.failed = True
        for sink in list(self._sinks):
            try:
                sink(facts["step"], flat(facts))
            except Exception as error:
                self._sinks.remove(sink)
                self.say(f"a log other than metrics.jsonl cannot be written ({error}); the run continues without it")

    def say(self, text: str) -> None:
        if self.is_first:
            self.console.print(text, markup=False)

    def show(self, table: RenderableType) -> None:
        if self.is_first:
            self.console.print(table)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self.metrics is not None:
            try:
                self.metrics.close()
            except OSError:
                self.failed = True


class Speed:
    """Tokens and FLOPs per second since the last reading."""

    def __init__(self, *, flops_per_token: float, peak: float | None, world: int, tokens: int):
        self.flops_per_token, self.peak, self.world = flops_per_token, peak, world
        self._at, self._tokens = time.perf_counter(), tokens

    def read(self, tokens: int, *, flops_per_token: float | None = None) -> dict[str, float]:
        """`flops_per_token`: of these tokens, if they have changed."""
        self.flops_per_token = self.flops_per_token if flops_per_token is None else flops_per_token
        now = time.perf_counter()
        rate = (tokens - self._tokens) / max(now - self._at, 1e-9)
        self._at, self._tokens = now, tokens
        tflops = rate * self.flops_per_token / 1e12 / self.world
        facts = {"tokens_per_second": rate, "tflops_per_device": tflops}
        return facts if self.peak is None else {**facts, "mfu": tflops / self.peak}

    def pause(self, tokens: int) -> None:
        """Leaves out the time since the last reading: evaluation and saving do not count."""
        self._at, self._tokens = time.perf_counter(), tokens


def _short(facts: dict[str, Any]) -> str:
    parts = [f"loss {facts['loss']:.4f}", f"lr {facts['lr']:.2e}", f"norm {facts['gradient_norm']:.3f}"]
    if facts.get("skipped"):
        parts.append("SKIPPED (not finite)")
    if "tokens_per_second" in facts:
        parts.append(f"{facts['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in facts:
        parts.append(f"MFU {facts['mfu']:.1%}")
    if facts.get("forks"):
        parts.append("streams " + " ".join(f"{fork['streams']:.2f}" for fork in facts["forks"]))
    return "  ".join(parts)


def _json(value: Any) -> Any:
    """Converts inf and nan, which JSON does not have, to strings."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def flat(facts: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by name, e.g. `forks/layer-3/streams` and `forks/layer-3/scores/p50`."""
    found: dict[str, float] = {}
    for key, value in facts.items():
        if key == "forks":
            rest = {f"layer-{fork['layer']}": {k: v for k, v in fork.items() if k != "layer"} for fork in value}
            found |= flat(rest, f"{prefix}forks/")
        elif key == "scores":
            found |= flat(dict(zip(QUANTILE_NAMES, value, strict=True)), f"{prefix}scores/")
        elif isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{key}"] = float(value)
    return found


def _take_back(path: Path, done: int) -> None:
    """Removes lines after step `done`, the evaluation at that step (it is run again), and truncated lines."""
    kept = []
    for line in read_bytes(path, remedy="delete it, and --resume again").decode(errors="replace").splitlines():
        try:
            facts = json.loads(line)
            step = int(facts["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if step < done or (step == done and not EVALUATED & facts.keys()):
            kept.append(line)
    write_atomically(path, [f"{line}\n".encode() for line in kept])


def check_sinks(config: LogConfig) -> None:
    """Raises ValueError if the package of a requested log is missing."""
    for option, wanted, package in (
        ("wandb", config.wandb is not None, "wandb"),
        ("tensorboard", config.tensorboard, "torch.utils.tensorboard"),
    ):
        if wanted:
            try:
                importlib.import_module(package)
            except ImportError:
                raise ValueError(f"--log.{option}: install it first: pip install 'thoughtbubbles[{option}]'") from None


def _sinks(
    config: LogConfig, folder: Path, name: str, run: dict[str, Any], *, done: int
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    check_sinks(config)
    if config.wandb is not None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        started = wandb.init(
            project=config.wandb, name=name, dir=folder, config=run, id=_wandb_id(folder), resume="allow"
        )
        yield lambda step, facts: started.log(facts, step=step)
    if config.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder / "tensorboard", purge_step=done + 1)

        def write(step: int, facts: dict[str, float]) -> None:
            for key, value in facts.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        yield write


def _wandb_id(folder: Path) -> str:
    """The id of the Weights & Biases run, the same one over all resumes."""
    path = folder / "wandb.json"
    if not path.exists():
        write_json(path, {"id": f"{time.time_ns():x}"})
    found = read_object(path, remedy="delete it to log to a new W&B run").get("id")
    if not (isinstance(found, str) and re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", found)):
        raise ValueError(f"{path} has no run id: delete it to log to a new W&B run")
    return found
