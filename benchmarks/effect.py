"""Does forking help, and from where on? Plain GPT, causal and block selection on real text, at a size of minutes.

python benchmarks/effect.py --data DIR       DIR: a folder made by `thoughtbubbles prepare` with the gpt2 tokenizer

12 layers of width 512 (63.6M parameters), fork layers 3, 7, 11, r = 2, residual merge; 64 × 512 tokens per step, cosine
to 10 % with 5 % warm-up: the training command with the options below. Validation losses on the way go to the results.
"""

import argparse
import json
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
    "eval.every": 160,
    "eval.tokens": 262_144,
    "eval.sample-tokens": 0,
    "log.every": 20,
}
VARIANTS = {"plain": "150m-plain-owt", "causal": "150m-r2-owt", "block": "150m-r2-paper-owt"}


def train(variant: str, data: Path, out: Path, *, steps: int, seed: int, lr: float | None) -> dict[str, Any]:
    options = {**OPTIONS, "tokens": steps * 64 * 512, "seed": seed, "data.mixture": data, "out": out}
    if lr is not None:
        options["optim.lr"] = lr
    if variant != "plain":
        options["model.merge"] = "residual"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "thoughtbubbles", "train", VARIANTS[variant], *words]
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
        "streams_per_token": [round(fork["streams"], 3) for fork in forks[-1]] if forks else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1280)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--lr", type=float)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for variant in args.variants:
                out = Path(folder) / f"{variant}-{seed}"
                runs.append(train(variant, args.data, out, steps=args.steps, seed=seed, lr=args.lr))
                print(json.dumps(runs[-1]), flush=True)
                print(write_results("effect", device, {"runs": runs}, to=args.out))


if __name__ == "__main__":
    main()
