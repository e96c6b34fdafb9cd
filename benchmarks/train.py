"""The training command end to end on a GPU: tokens per second, MFU, memory, and startup time.

python benchmarks/train.py --data DIR       DIR: a folder made by `thoughtbubbles prepare` with the gpt2 tokenizer

Every case runs a recipe in a separate process, with loader, logging, checkpoints and evaluation. Before anything is
timed, the losses of a resumed run are compared with those of an uninterrupted one.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import write_results

ROWS = {"150m": 64, "1.9b": 8}
CASES = ["150m-plain", "150m-causal", "150m-paper", "1.9b-plain", "1.9b-causal"]  # recipes


def train(
    recipe: str, data: Path, out: Path, *, steps: int, more: list[str], ranks: int = 0, end_after: int | None = None
) -> tuple[float, float]:
    """Seconds of the whole command, and from its start to the end of its first step.

    `end_after` kills it after this many steps: saving the last checkpoint of a large model is not part of its speed.
    """
    rows = ROWS[recipe.partition("-")[0]]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "thoughtbubbles", "train", recipe, "--out", str(out)]
    command += ["--data.mixture", str(data), "--tokens-per-step", str(rows * 512), "--tokens", str(steps * rows * 512)]
    command += ["--compute.micro-batch-size", str(rows), "--eval.tokens", "8192", "--eval.sample-tokens", "8", *more]
    begin, first = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryDirectory() as empty:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton"}
        process = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **caches})
        while process.poll() is None:
            time.sleep(0.05)
            done = len(losses(out)) if (out / "metrics.jsonl").exists() else 0
            if done and not first:
                first = time.perf_counter() - begin
            if end_after is not None and done >= end_after:
                process.kill()
                process.wait()
                return time.perf_counter() - begin, first
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{said.read()}")
    return time.perf_counter() - begin, first


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines(keepends=True) if "\n" in line]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out) if "loss" in line]


def check(data: Path, folder: Path) -> dict[str, Any]:
    """Resumed = uninterrupted on this device; one rank under torchrun (NCCL, FSDP2) = no torchrun."""
    more = ["--save.every", "4"]
    train("150m-causal", data, folder / "whole", steps=8, more=more)
    shutil.copytree(folder / "whole", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "step-00000008")
    train("150m-causal", data, folder / "resumed", steps=8, more=[*more, "--resume"])
    train("150m-causal", data, folder / "sharded", steps=8, more=more, ranks=1)
    whole, resumed, sharded = (losses(folder / name) for name in ("whole", "resumed", "sharded"))
    assert len(whole) == len(resumed) == len(sharded) == 8
    found = {
        "resumed_has_the_same_bits": whole == resumed,
        "largest_loss_difference_resumed": max(abs(a - b) for a, b in zip(whole, resumed, strict=True)),
        "largest_loss_difference_fsdp2_on_one_rank": max(abs(a - b) for a, b in zip(whole, sharded, strict=True)),
    }
    assert found["largest_loss_difference_resumed"] < 1e-2, found
    assert found["largest_loss_difference_fsdp2_on_one_rank"] < 1e-2, found
    for name in ("whole", "resumed", "sharded"):
        shutil.rmtree(folder / name)
    return found


def measure(recipe: str, data: Path, folder: Path, *, steps: int) -> dict[str, Any]:
    out = folder / recipe
    more = ["--save.every", "0", "--eval.every", "0", "--log.every", "5"]
    seconds, first = train(recipe, data, out, steps=10 * steps, more=more, end_after=steps)
    speeds = [line for line in lines(out) if "tokens_per_second" in line][2:]  # past compilation
    steps_logged = [line for line in lines(out) if "loss" in line]
    shutil.rmtree(out)
    return {
        "recipe": recipe,
        "rows": ROWS[recipe.partition("-")[0]],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in speeds),
        "tflops": statistics.median(line["tflops_per_device"] for line in speeds),
        "mfu": statistics.median(line["mfu"] for line in speeds) if "mfu" in speeds[0] else None,
        "peak_memory_GiB": max(line.get("peak_memory_GiB", 0) for line in steps_logged),
        "first_loss": steps_logged[0]["loss"],
        "last_loss": steps_logged[-1]["loss"],
        "seconds_to_the_first_step": first,  # from the start of the process, nothing compiled before
        "seconds_until_ended": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--no-check", action="store_true", help="only time")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark times a GPU, but none is available")
    with tempfile.TemporaryDirectory() as folder:
        checked = {} if args.no_check else check(args.data, Path(folder))
        print(checked)
        cases = []
        for recipe in args.cases:
            cases.append(measure(recipe, args.data, Path(folder), steps=args.steps))
            print(json.dumps(cases[-1]))
    print(write_results("train", "cuda", {"steps": args.steps, **checked, "cases": cases}, to=args.out))


if __name__ == "__main__":
    main()
