"""bubbles-7m, the model in the package: its numbers, beside its plain twin, the control without forks, gzip and xz.

    for form in "" -plain -gate; do
      thoughtbubbles train bubbles-7m$form --data.mixture DIR --out RUNS/bubbles-7m$form
    done
    python benchmarks/shipped.py measure --runs RUNS --data DIR
    python benchmarks/shipped.py pack --runs RUNS          writes src/thoughtbubbles/assets/bubbles-7m

`measure` scores all of the validation text, in disjoint windows of the context length, with weights rounded to bfloat16
as they are shipped, and products in float32.
"""

import argparse
import gzip
import json
import lzma
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_results
from torch import Tensor

from thoughtbubbles import load
from thoughtbubbles.checkpoint import load_folder_tokenizer
from thoughtbubbles.data.loader import Source, ValidationSet
from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.files import SHIPPED
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.data import to_device

NAMES = (SHIPPED, f"{SHIPPED}-plain", f"{SHIPPED}-gate")
BUDGETS = (1, 1.25, 1.5, 2, 4)


def shipped(run: Path, device: str) -> tuple[Thoughtbubbles, Tokenizer]:
    """The model of a run as it is shipped: rounded to bfloat16."""
    tokenizer = load_folder_tokenizer(run)
    assert tokenizer is not None
    return load(run, dtype=torch.bfloat16).to(device, torch.float32).eval(), tokenizer


@torch.no_grad()
def window_losses(model: Thoughtbubbles, data: Path, budget: float | None, *, device: str, batch: int) -> Tensor:
    """Per window of the validation text: the sum of the losses and the number of targets."""
    rows = []
    for each in ValidationSet([Source(data)], rows=batch, n_tokens=model.config.block_size):
        ids, targets, lengths = to_device(each, torch.device(device))
        nll = model(ids, targets=targets, lengths=lengths, budget=budget, want=("token_nll",)).token_nll
        rows.append(torch.stack([nll.double().sum(1), (targets != IGNORED).double().sum(1)], dim=1).cpu())
    found = torch.cat(rows)
    return found[found[:, 1] > 0]  # the last batch may be padded with empty rows


def mean(losses: Tensor, weights: Tensor) -> dict[str, float]:
    """Nats per token over all windows, and the standard error over windows of this ratio."""
    total = weights.sum()
    value = losses.sum() / total
    spread = (losses - value * weights).square().sum().sqrt() / total
    return {"nats": value.item(), "standard_error": spread.item()}


def text_of(data: Path, tokenizer: Tokenizer) -> tuple[bytes, int]:
    """The validation text, with a newline at the end of each document, and its number of tokens."""
    ids = np.concatenate([shard.tokens for shard in open_dataset(data, split="val").shards]).tolist()
    return b"".join(b"\n" if i == tokenizer.end_of_text else tokenizer.token_bytes(i) for i in ids), len(ids)


def training(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    described = json.loads((run / "run.json").read_text())
    config = {name: value for name, value in described["config"].items() if name not in ("out", "data")}
    steps = [line for line in lines if "loss" in line]
    return {
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "tokens_per_second": statistics.median(
            line["tokens_per_second"] for line in steps if "tokens_per_second" in line
        ),
        "curve": {
            line["step"]: next(iter(line["validation_loss"].values())) for line in lines if "validation_loss" in line
        },
        "forks": next((line["forks"] for line in reversed(steps) if line.get("budget") == 2 and "forks" in line), None),
        "config": config,
        "versions": described["versions"],
        "commit": described["commit"],
    }


def measure(
    runs: Path, data: Path, *, device: str, batch: int, budgets: Sequence[float], names: Sequence[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {"models": {}}
    twin: Tensor | None = None
    for name in sorted(
        names, key=lambda name: not name.endswith("-plain")
    ):  # the twin first: others are compared with it
        model, tokenizer = shipped(runs / name, device)
        if "text" not in found:
            text, n_tokens = text_of(data, tokenizer)
            packed = {"gzip -9": gzip.compress(text, 9), "xz -9": lzma.compress(text, preset=9)}
            found["text"] = {"bytes": len(text), "tokens": n_tokens}
            found["compressors"] = {name: 8 * len(each) / len(text) for name, each in packed.items()}
        scores = {}
        for budget in budgets if name == SHIPPED else [None]:
            losses, weights = window_losses(model, data, budget, device=device, batch=batch).unbind(1)
            if name.endswith("-plain"):
                twin = losses
            key = str(model.config.budget if budget is None else budget)
            scores[key] = {
                **mean(losses, weights),
                "bits_per_byte": losses.sum().item() / math.log(2) / found["text"]["bytes"],
                **({} if twin is None else {"against_plain": mean(losses - twin, weights)}),
            }
            print(name, key, scores[key], flush=True)
        found["models"][name] = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "scores": scores,
            "training": training(runs / name),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["measure", "pack"])
    parser.add_argument("--runs", type=Path, required=True, help="folder with the runs, named after their recipes")
    parser.add_argument("--data", type=Path, help="folder made by `thoughtbubbles prepare`")
    parser.add_argument("--names", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--budgets", type=float, nargs="*", default=list(BUDGETS))
    parser.add_argument("--batch", type=int, default=64, help="windows per forward")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = measure(args.runs, args.data, device=device, batch=args.batch, budgets=args.budgets, names=args.names)
    print(write_results("shipped", device, found, to=args.out))


if __name__ == "__main__":
    main()
