"""Does training repeat to the bit? The same steps in several processes at the same time, and their losses compared.

    python benchmarks/repeat.py                                            every case as it is: minutes on a GPU
    python benchmarks/repeat.py --cases circle-r2 --without all            with one thing after another left out
    python benchmarks/repeat.py --cases circle-r2 --operators              each operator's results, nothing compiled
    python benchmarks/repeat.py --device cpu --cases circle-r2 --steps 3   to try the command

Processes that share a GPU disturb each other's timing, and each has a cache of its own for compiled code, as another
machine would. So what is chosen by timing, or depends on which program comes first, shows as losses that differ.
`--without` finds the cause: whatever makes losses equal when it is left out. Without `fixed-choices` they should
differ, which shows that the benchmark can see it.

`--operators` runs each operator of the first steps several times on the same inputs. It names those that gave more than
one result within a process, and the first whose results differ between processes.

Cases are rows of `thoughtbubbles reproduce tasks`, and of `long` (with long- before their name) on synthetic text.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from common import write_results
from operators import Recorder, compare_operators

from thoughtbubbles.recipes.reproduce.protocols import protocol
from thoughtbubbles.recipes.reproduce.tasks.protocol import run_of, task_rows
from thoughtbubbles.train import parallel
from thoughtbubbles.train.config import ComputeConfig, DataConfig, EvalConfig, LogConfig, RunConfig, SaveConfig
from thoughtbubbles.train.loop import train

Device = Literal["cpu", "cuda"]
CASES = ("circle-plain", "circle-copy-2", "circle-r2", "circle-feedback", "long-plain", "long-r2")
LONG = "long-"
FIXED_CHOICES = "fixed-choices"
# What may be left out, as environment variables and settings of the run.
WITHOUT: dict[str, tuple[dict[str, str], ComputeConfig]] = {
    "nothing": ({}, ComputeConfig()),
    FIXED_CHOICES: ({}, ComputeConfig()),  # the compiler then times several forms of a sum, as it does by default
    "compiling": ({}, ComputeConfig(compile=False)),
    "cuda-graph": ({}, ComputeConfig(graph=False)),
    "both": ({}, ComputeConfig(compile=False, graph=False)),
    "shared-cublas-workspace": ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, ComputeConfig()),
}
OPERATOR_STEPS, TIMES = 2, 8  # of --operators; TIMES: how often each one runs
FOUND = "found.json"  # of a process


def run_for(case: str, steps: int, compute: ComputeConfig, out: Path, device: Device) -> RunConfig:
    """The first steps of a row; with the settings of the whole row but for its schedule."""
    if case.startswith(LONG):
        row, settings = case.removeprefix(LONG), {"protocol": "long", "seed": 0, "data": "synthetic"}
        run = protocol("long").config(row, **settings, n_tokens=1 << 30, vocab_size=8192)  # type: ignore[arg-type]
        data = run.data
    else:
        row = case
        run = run_of(row, task_rows()[row], 0, data="replaced")
        data = DataConfig(mixture=(f"task:{task_rows()[row].task}",))
    return replace(
        run,
        out=out,
        device=device,
        data=data,
        tokens=steps * run.tokens_per_step,
        compute=compute,
        save=SaveConfig(every=0),
        eval=EvalConfig(every=0, tokens=run.model.block_size, sample_tokens=0),
        log=LogConfig(every=steps),
    )


def record_operators(case: str, out: Path, device: Device) -> None:
    run = run_for(case, OPERATOR_STEPS, WITHOUT["both"][1], out / "run", device)
    with Recorder(device, TIMES) as recorder:
        train(run)
    (out / FOUND).write_text(json.dumps([recorder.names, recorder.sums()]))


def worker(case: str, steps: int, without: str, out: Path, device: Device) -> None:
    run = run_for(case, steps, WITHOUT[without][1], out / "run", device)
    if without == FIXED_CHOICES:
        parallel.COMPILATION = {"dynamic": False}
    train(run)
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [float(line["loss"]).hex() for line in map(json.loads, lines) if "loss" in line]
    (out / FOUND).write_text(json.dumps(losses))


def found_by(case: str, steps: int, without: str | None, processes: int, device: str) -> list[Any]:
    """The losses of every process, or its operators if `without` is None."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(i) for i in range(processes)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for place in places:
                place.mkdir()
                own = {"TORCHINDUCTOR_CACHE_DIR": str(place / "compiled"), **WITHOUT[without or "both"][0]}
                words = [sys.executable, __file__, "--worker", str(place), "--cases", case, "--device", device]
                words += ["--operators"] if without is None else ["--without", without, "--steps", str(steps)]
                with (place / "log").open("wb") as log:
                    running.append(subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **own}))
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        for place, code in zip(places, codes, strict=True):
            if code:
                said = (place / "log").read_text()[-2000:]
                raise SystemExit(f"{case}: a process ended with exit code {code}\n{said}")
        return [json.loads((place / FOUND).read_text()) for place in places]


def compare(found: list[list[str]]) -> dict[str, Any]:
    """How many ways the losses went, the first step at which two differ (from 1 on), and by how much at the end."""
    values = [[float.fromhex(loss) for loss in each] for each in found]
    differing = [step for step, losses in enumerate(zip(*found, strict=True), 1) if len(set(losses)) > 1]
    return {
        "ways": len({tuple(each) for each in found}),
        "first_step": differing[0] if differing else None,
        "spread_at_end": max(each[-1] for each in values) - min(each[-1] for each in values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="rows (default: %(default)s)")
    parser.add_argument("--without", nargs="+", choices=[*WITHOUT, "all"], default=["nothing"], help="what is left out")
    parser.add_argument("--operators", action="store_true", help=f"each operator of {OPERATOR_STEPS} steps instead")
    parser.add_argument("--steps", type=int, default=100, help="of training (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="at the same time (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder (default: benchmarks/results)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.operators and (arguments.without != ["nothing"] or arguments.steps != parser.get_default("steps")):
        parser.error(f"--operators: {OPERATOR_STEPS} steps with nothing compiled; leave out --without and --steps")
    known = [*task_rows(), *(LONG + row for row in protocol("long").rows)]
    if wrong := [case for case in arguments.cases if case not in known]:
        parser.error(f"--cases: no row of tasks or of long is named {', '.join(wrong)}")
    if arguments.steps < 1 or arguments.processes < 2:
        parser.error("--steps: 1 or more; --processes: 2 or more")
    if arguments.worker:
        case, out, device = arguments.cases[0], arguments.worker, arguments.device
        if arguments.operators:
            record_operators(case, out, device)
        else:
            worker(case, arguments.steps, arguments.without[0], out, device)
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark is about a GPU, but none is available; use --device cpu to try it")
    steps = OPERATOR_STEPS if arguments.operators else arguments.steps
    of_losses = list(WITHOUT) if "all" in arguments.without else arguments.without
    variants: list[str | None] = [None] if arguments.operators else of_losses
    results = []
    for case in arguments.cases:
        for without in variants:
            found = found_by(case, steps, without, arguments.processes, arguments.device)
            said = compare_operators(found) if without is None else {"without": without, **compare(found)}
            results.append({"case": case, **said})
            print(json.dumps(results[-1]), flush=True)
            numbers = {"steps": steps, "processes": arguments.processes, "cases": results}
            name = "repeat" if without else "repeat-operators"
            write_results(name, arguments.device, numbers, to=arguments.out)


if __name__ == "__main__":
    main()
