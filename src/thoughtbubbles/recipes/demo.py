"""`make demo`: the model in the package at work, then a small model with bubbles and a plain GPT, trained side by side.

Both are ordinary training runs, one process and one core each, on the docstrings of Python's standard library, which
every machine has. demo.json has the same comparison over three seeds.

    thoughtbubbles demo                            what `make demo` runs
    thoughtbubbles demo --record --seeds 0 1 2     write demo.json again
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thoughtbubbles.checkpoint import load, load_tokenizer
from thoughtbubbles.files import write_json
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.generate.show import coloured, legend, streams_per_token
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.plotting import BLUE, RED, has_matplotlib, panels, save
from thoughtbubbles.recipes.showcase import showcase
from thoughtbubbles.train.config import DataConfig, EvalConfig, LogConfig, OptimConfig, RunConfig, SaveConfig

NEXT = {  # what to try next
    'generate "The cell" --show-bubbles --budget 4': "the model in the package, with more streams per token",
    'generate "Return the" --checkpoint {trained}': "the model that you have just trained",
    "prepare FILES --tokenizer bubbles-7m --out data/mine": "your own text, and the model trained on with it:",
    "train bubbles-7m --init-from bubbles-7m --data.mixture data/mine --tokens 2e5 --tokens-per-step 4096": "",
}
RECORD = Path(__file__).with_name("demo.json")
NAMES = {"demo-bubbles": "bubbles, 2 streams per token", "demo-plain": "plain GPT"}
# With a score bias the model starts almost as a plain GPT, which is steadier in so short a run (docs/log.md).
BUBBLES = ModelConfig(
    n_layer=3, n_head=2, width=64, vocab_size=384, block_size=128, fork_layers=(1, 2), score_bias=3, merge="residual"
)
LINE_SECONDS = 5.0  # between lines of progress, if the output is not a terminal


def demo(name: str) -> RunConfig:
    return RunConfig(
        name=name,
        model=BUBBLES.without_forks() if name == "demo-plain" else BUBBLES,
        tokens=330 * 8 * 128,
        tokens_per_step=8 * 128,
        data=DataConfig(mixture=("stdlib",)),
        optim=OptimConfig(lr=4e-3, warmup=0.05),
        save=SaveConfig(every=0),
        eval=EvalConfig(every=110, tokens=25_000, sample_tokens=0),
        log=LogConfig(every=10),
    )


def recipes() -> Iterator[tuple[str, Callable[[], RunConfig], str]]:
    for name, words in NAMES.items():
        yield name, partial(demo, name), f"half of `make demo`: {words}"


@dataclass
class Watched:
    """A training run in another process, followed through its metrics.jsonl."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def numbers(self) -> dict[str, Any]:
        """Of a finished run."""
        lines = self.lines()
        speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        forks = [line["forks"] for line in lines if "forks" in line]
        losses = [line["validation_loss"]["stdlib"] for line in lines if "validation_loss" in line]
        return {
            "validation_loss": losses[-1],
            "tokens_per_second": sorted(speeds)[len(speeds) // 2],
            "streams_per_token": forks[-1][-1]["streams"] if forks else 1.0,  # a plain model has none
        }


def start(name: str, out: Path, *, seed: int, more: list[str]) -> Watched:
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "thoughtbubbles", "train", name, "--out", str(folder), "--seed", str(seed), *more]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    return Watched(name, folder, process)


def watch(runs: list[Watched], steps: int, console: Console) -> None:
    """Shows progress until all runs are done; if one fails, the others are stopped."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    last_shown = time.monotonic()
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
            tasks = {run.name: progress.add_task(NAMES[run.name], total=steps, facts="starting") for run in runs}
            while True:
                alive = any(run.process.poll() is None for run in runs)
                for run in runs:
                    if run.process.poll():
                        tail = (run.folder / "output.txt").read_text(errors="replace")[-2000:]
                        raise RuntimeError(f"{run.name} failed:\n{tail}")
                    done, facts = _state(run.lines())
                    progress.update(tasks[run.name], completed=done, facts=facts)
                if not console.is_terminal and (time.monotonic() - last_shown > LINE_SECONDS or not alive):
                    console.print(_line(runs, steps), soft_wrap=True)
                    last_shown = time.monotonic()
                if not alive:
                    return
                time.sleep(0.5)
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.terminate()
            run.process.wait()


def _line(runs: list[Watched], steps: int) -> str:
    states = {run.name: _state(run.lines()) for run in runs}
    return "; ".join(f"{NAMES[name].split(',')[0]}: {done}/{steps}, {facts}" for name, (done, facts) in states.items())


def _state(lines: list[dict[str, Any]]) -> tuple[int, str]:
    steps = [line for line in lines if "loss" in line]
    losses = [line["validation_loss"]["stdlib"] for line in lines if "validation_loss" in line]
    if not steps:
        return 0, "starting"
    facts = f"loss {steps[-1]['loss']:.3f}" + (f", validation {losses[-1]:.3f}" if losses else "")
    return steps[-1]["step"], facts


def draw(runs: list[Watched], path: Path) -> bool:
    """Training loss (a running mean) and validation loss of both; False without matplotlib."""
    return has_matplotlib() and bool(save(lambda: _curves(runs), path))


def _curves(runs: list[Watched]) -> Any:
    figure, ((axes,),) = panels(height=4.5)
    for run, colour in zip(runs, (RED, BLUE), strict=True):
        lines = run.lines()
        losses = [line["loss"] for line in lines if "loss" in line]
        width = max(1, min(25, len(losses) // 4))
        smooth = [sum(losses[i - width : i]) / width for i in range(width, len(losses) + 1)]
        axes.plot(range(width, len(losses) + 1), smooth, color=colour, alpha=0.45, linewidth=1)
        losses = [(line["step"], line["validation_loss"]["stdlib"]) for line in lines if "validation_loss" in line]
        axes.plot(*zip(*losses, strict=True), "o-", color=colour, label=f"{NAMES[run.name]}: {losses[-1][1]:.3f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(top=min(4.0, axes.get_ylim()[1]))
    axes.set_title("Python's own documentation, byte by byte: validation loss (dots) and training loss")
    axes.legend()
    return figure


def show_sample(run: Watched, console: Console) -> None:
    model, tokenizer = load(run.folder), load_tokenizer(run.folder)
    assert tokenizer is not None
    prompt = tokenizer.encode("Return the ")
    request = Request(prompt=prompt, sampling=Sampling(temperature=0.7), end_ids=())
    (written,) = generate(model, [request], tokenizer=tokenizer)
    ids = [*prompt, *written.ids]
    text, numbers = coloured(tokenizer, ids, streams_per_token(model, ids))
    console.print("\nA sample, with its bubbles:\n", text, "\n", legend(model))
    if not console.is_terminal:
        console.print(numbers)


def verdict(record: dict[str, Any]) -> str:
    """How far the comparison can be trusted, from the recorded seeds."""
    losses = {name: [run[name]["validation_loss"] for run in record["runs"]] for name in NAMES}
    shown = {name: ", ".join(f"{loss:.3f}" for loss in values) for name, values in losses.items()}
    gaps = [p - b for b, p in zip(losses["demo-bubbles"], losses["demo-plain"], strict=True)]
    mean, seeds = sum(gaps) / len(gaps), len(gaps)
    slower = median(
        run["demo-plain"]["tokens_per_second"] / run["demo-bubbles"]["tokens_per_second"] for run in record["runs"]
    )
    if all(gap > 0 for gap in gaps):
        words = f"bubbles were ahead in {seeds} of {seeds} seeds, by {mean:.3f} nats on average"
    elif all(gap < 0 for gap in gaps):
        words = f"the plain model was ahead in {seeds} of {seeds} seeds, by {-mean:.3f} nats on average"
    else:
        words = f"the two are equal within noise: bubbles were ahead in {sum(g > 0 for g in gaps)} of {seeds} seeds"
    return (
        f"How much of this is chance? Over {seeds} seeds of this run ({record['machine']}): bubbles "
        f"{shown['demo-bubbles']}; plain {shown['demo-plain']}. So at this size and length {words}, after equally many "
        f"steps; a step with bubbles takes {slower:.1f} times as long. What two minutes show may be gone later: "
        "docs/results has experiments of 661M tokens, with a form of forks that does better than this one."
    )


def run_demo(
    *, out: Path = Path("runs/demo"), seeds: tuple[int, ...] = (0,), record: bool = False, tokens: int | None = None
) -> None:
    """Show the model in the package at work, then train a small model with bubbles and a plain GPT, and compare them.

    Args:
        out: Folder of the demo; an earlier demo there is replaced.
        seeds: Seeds to run, one after the other.
        record: Write the results of all seeds to demo.json.
        tokens: Train on this many tokens instead, for a quick look.
    """
    console = Console(width=None if sys.stdout.isatty() else 110)
    if not record:
        showcase(out, console)
    begin = time.monotonic()
    more = [] if tokens is None else ["--tokens", str(tokens)]
    steps = demo("demo-bubbles").steps if tokens is None else -(-tokens // demo("demo-bubbles").tokens_per_step)
    found = []
    for seed in seeds:
        both = " and ".join(NAMES.values())
        console.print(
            f"\nNow two small models learn side by side, on Python's own documentation ({both}): {steps} steps, "
            f"seed {seed}",
            soft_wrap=True,
        )
        runs = [start(name, out, seed=seed, more=more) for name in NAMES]
        watch(runs, steps, console)
        found.append({"seed": seed, **{run.name: run.numbers() for run in runs}})
    if record:
        machine = f"{platform.machine()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
        command = "thoughtbubbles demo --record --seeds " + " ".join(map(str, seeds))
        write_json(RECORD, {"command": command, "machine": machine, "runs": found})
    _report(runs, found[-1], out, console, seconds=time.monotonic() - begin)


def _report(runs: list[Watched], numbers: dict[str, Any], out: Path, console: Console, *, seconds: float) -> None:
    table = Table(title=f"{seconds:.0f} seconds")
    for heading in ("", "parameters", "validation loss (nats per byte)", "tokens/s", "streams per token"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for run in runs:
        facts = numbers[run.name]
        parameters = sum(weight.numel() for weight in load(run.folder).parameters())
        table.add_row(
            NAMES[run.name],
            f"{parameters:,}",
            f"{facts['validation_loss']:.4f}",
            f"{facts['tokens_per_second']:,.0f}",
            f"{facts['streams_per_token']:.2f}",
        )
    console.print(table)
    show_sample(runs[0], console)
    if RECORD.exists():
        console.print("\n" + verdict(json.loads(RECORD.read_text())), soft_wrap=True)
    curves = str(out / "loss.png") if draw(runs, out / "loss.png") else "need matplotlib, which is not installed"
    console.print(f"\nloss curves: {curves}\ncheckpoint:  {next(iter(runs[0].folder.glob('step-*')))}", soft_wrap=True)
    commands = [f"{_command()} {words.format(trained=runs[0].folder)}" for words in NEXT]
    width = max(map(len, commands))
    console.print("\nWhat to try next:")
    for command, what in zip(commands, NEXT.values(), strict=True):
        console.print(f"  {command:<{width}}  {what}", highlight=False, soft_wrap=True)


def _command() -> str:
    """How this command was called, such as .venv/bin/thoughtbubbles."""
    program = Path(sys.argv[0])
    if program.name != "thoughtbubbles":
        return "python -m thoughtbubbles"
    return program.name if shutil.which(program.name) else os.path.relpath(program)
