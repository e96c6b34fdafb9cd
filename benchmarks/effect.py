"""What do bubbles bring, and what of it do the forks bring? Four models on the same real text, in minutes on a GPU.

python benchmarks/effect.py --data DIR       DIR: a folder made by `thoughtbubbles prepare` with the gpt2 tokenizer

plain: no fork layers. gate: r = 1, scores and attenuation as in the others, but no fork survives. causal, block: r = 2.

12 layers of width 512 (63.6M parameters), fork layers 3, 7, 11, residual merge; 64 × 512 tokens per step, cosine
to 10 % with 5 % warm-up: the training command with the options below. Writes the validation loss curves.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import write_results

OPTIONS = {
    "model.n-layer": 12,
    "model.n-head": 8,
    "model.width": 512,
    "tokens-per-step": 64 * 512,
    "compute.micro-batch-size": 64,
    "optim.lr": 1.2e-3,
    "optim.warmup": 0.05,
    "save.every": 0,
    "eval.tokens": 262_144,
    "eval.sample-tokens": 0,
    "log.every": 20,
}
FORKS = {"model.merge": "residual"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # recipe and options
    "plain": ("150m-plain", {}),
    "gate": ("150m-causal", {**FORKS, "model.budget": 1}),
    "causal": ("150m-causal", FORKS),
    "block": ("150m-paper", FORKS),
}


def train(variant: str, data: Path, out: Path, *, steps: int, seed: int, lr: float | None) -> dict[str, Any]:
    recipe, changes = VARIANTS[variant]
    options = {**OPTIONS, **changes, "tokens": steps * 64 * 512, "eval.every": steps // 8, "seed": seed}
    options |= {"data.mixture": data, "out": out} | ({} if lr is None else {"optim.lr": lr})
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "thoughtbubbles", "train", recipe, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = {line["step"]: next(iter(line["validation_loss"].values())) for line in lines if "validation_loss" in line}
    forks = [line["forks"] for line in lines if "forks" in line]
    return {
        "variant": variant,
        "seed": seed,
        "lr": options["optim.lr"],
        "steps": steps,
        "validation_loss": list(curve.values())[-1],
        "curve": curve,
        "tokens_per_second": statistics.median(
            line["tokens_per_second"] for line in lines if "tokens_per_second" in line
        ),
        "streams_per_token": [round(fork["streams"], 3) for fork in forks[-1]] if forks else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1280)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--lr", type=float)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--runs", type=Path, help="keep the folders of the runs here")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for variant in args.variants:
                out = (args.runs or Path(folder)) / f"{variant}-{seed}"
                runs.append(train(variant, args.data, out, steps=args.steps, seed=seed, lr=args.lr))
                print(json.dumps(runs[-1]), flush=True)
                print(write_results("effect", device, {"runs": runs}, to=args.out))


if __name__ == "__main__":
    main()
