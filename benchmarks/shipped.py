"""bubbles-7m, the model in the package: its numbers beside its plain counterpart, a control without forks, gzip, xz.

    thoughtbubbles train bubbles-7m --data.mixture DIR --out RUNS/bubbles-7m
    thoughtbubbles train bubbles-7m-plain --data.mixture DIR --out RUNS/bubbles-7m-plain
    thoughtbubbles train bubbles-7m --data.mixture DIR --out RUNS/bubbles-7m-gate --model.budget 1 --budgets
    python benchmarks/shipped.py measure --runs RUNS --data DIR
    python benchmarks/shipped.py pack --runs RUNS     writes src/thoughtbubbles/assets/bubbles-7m: the model, run.json
    python benchmarks/shipped.py card                 writes the model card there, README.md, from run.json
    python benchmarks/shipped.py card --check         exit 1 if the card is not what would be written

`measure` scores all of the validation text, in disjoint windows of the context length, with weights rounded to bfloat16
as they are shipped, and products in float32. `pack` takes its numbers from benchmarks/results.
"""

import argparse
import gzip
import hashlib
import json
import lzma
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, write_results
from torch import Tensor

from thoughtbubbles import load
from thoughtbubbles.checkpoint import WEIGHTS, load_tokenizer, save_model
from thoughtbubbles.data.loader import Source, ValidationSet
from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.files import SHIPPED, shipped_model, write_json
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.data import to_device

RECORD = RESULTS / "shipped-nvidia-h200.json"
EPOCH = 165_333_214  # tokens of the training text
PROMPTS = ("The cell", "In the early nineteenth century, the", "It was a dark night, and the old man")
CONTROL = {
    False: f"The control, the same scores without forks (`train {SHIPPED} --model.budget 1 --budgets`), has not been\n"
    "trained yet. Until it is, nothing here says how much of the lead is due to training with forks.",
    True: "The control has the same scores and no forks: what it gains is due to the scores alone.",
}
TEMPLATE = Path(__file__).with_name("shipped_card.md")
NAMES = (SHIPPED, f"{SHIPPED}-plain", f"{SHIPPED}-gate")
BUDGETS = (1, 1.25, 1.5, 2, 4)


def shipped(run: Path, device: str) -> tuple[Thoughtbubbles, Tokenizer]:
    """The model of a run as it is shipped: rounded to bfloat16."""
    tokenizer = load_tokenizer(run)
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


def validation_ids(data: Path) -> list[int]:
    ids: list[int] = np.concatenate([shard.tokens for shard in open_dataset(data, split="val").shards]).tolist()
    return ids


def training(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    described = json.loads((run / "run.json").read_text())
    config = {name: value for name, value in described["config"].items() if name not in ("out", "data")}
    steps = [line for line in lines if "loss" in line]
    return {
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
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
    twin_first = sorted(names, key=lambda name: not name.endswith("-plain"))  # the others are compared with it
    for name in twin_first:
        model, tokenizer = shipped(runs / name, device)
        if "text" not in found:
            ids = validation_ids(data)
            text = b"".join(b"\n" if i == tokenizer.end_of_text else tokenizer.token_bytes(i) for i in ids)
            packed = {"gzip -9": gzip.compress(text, 9), "xz -9": lzma.compress(text, preset=9)}
            n_bytes = sum(len(tokenizer.token_bytes(i)) for i in ids if i != tokenizer.end_of_text)
            found["text"] = {"bytes": n_bytes, "tokens": len(ids)}
            found["compressors"] = {name: 8 * len(each) / n_bytes for name, each in packed.items()}
        scores = {}
        for budget in budgets if name == SHIPPED else [None]:
            losses, weights = window_losses(model, data, budget, device=device, batch=batch).unbind(1)
            if name.endswith("-plain"):
                twin = losses
            key = f"{model.config.budget if budget is None else budget:g}"
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


def pack(run: Path) -> None:
    """Writes the model folder and its run card: the measured numbers, samples, and the checksum of the weights."""
    folder, record = shipped_model(), json.loads(RECORD.read_text())
    model, tokenizer = load(run, dtype=torch.bfloat16), load_tokenizer(run)
    assert tokenizer is not None
    save_model(folder, model, tokenizer=tokenizer)
    others = {name: about for name, about in record["models"].items() if name != SHIPPED}
    own = record["models"][SHIPPED]
    write_json(
        folder / "run.json",
        {
            "model": SHIPPED,
            "sha256": {WEIGHTS: hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()},
            "measured": {name: record[name] for name in ("command", "commit", "machine", "torch")},
            **own,
            "others": others,
            "text": record["text"],
            "compressors": record["compressors"],
            "samples": samples(load(folder, dtype=torch.float32), tokenizer),
        },
    )


def samples(model: Thoughtbubbles, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    found = []
    for prompt in PROMPTS:
        request = Request(prompt=prompt, max_new=70, sampling=Sampling(temperature=0.7, seed=0))
        (written,) = generate(model, [request], tokenizer=tokenizer)
        found.append({"prompt": prompt, "text": written.text, "temperature": 0.7, "seed": 0})
    return found


def card(run: dict[str, Any]) -> str:
    """The model card, in Markdown."""
    own, shape, training = run["scores"], run["training"]["config"]["model"], run["training"]
    plain = run["others"][f"{SHIPPED}-plain"]
    twin = next(iter(plain["scores"].values()))
    rows = [("plain counterpart, no forks", twin["nats"], twin["bits_per_byte"], None)]
    if gate := run["others"].get(f"{SHIPPED}-gate"):
        control = next(iter(gate["scores"].values()))
        rows.append(
            ("control: scores, no forks (r = 1)", control["nats"], control["bits_per_byte"], control["against_plain"])
        )
    rows += [
        (f"{SHIPPED}, budget {budget}", each["nats"], each["bits_per_byte"], each["against_plain"])
        for budget, each in own.items()
    ]
    lines = [
        f"| {name} | {nats:.4f} | {bits:.4f} | {'' if gap is None else signed(gap)} |" for name, nats, bits, gap in rows
    ]
    lines += [f"| `{name}` of the same text | | {bits:.4f} | |" for name, bits in run["compressors"].items()]
    best = {budget: each["against_plain"]["nats"] for budget, each in own.items()}
    return TEMPLATE.read_text().format(
        name=SHIPPED,
        parameters=run["parameters"],
        layers=shape["n_layer"],
        width=shape["width"],
        heads=shape["n_head"],
        vocabulary=shape["vocab_size"],
        context=shape["block_size"],
        forks=", ".join(map(str, shape["fork_layers"])),
        table="\n".join(lines),
        tokens=training["tokens"] / 1e6,
        steps=training["steps"],
        epochs=training["tokens"] / EPOCH,
        rows=training["config"]["tokens_per_step"] // shape["block_size"],
        lr=training["config"]["optim"]["lr"],
        budgets=", ".join(f"{budget:g}" for budget in training["config"]["budgets"]),
        commit=run["measured"]["commit"],
        trained=training["commit"],
        machine=run["measured"]["machine"],
        torch=run["measured"]["torch"],
        command=run["measured"]["command"],
        validation=run["text"]["tokens"],
        bytes=run["text"]["bytes"] / 1e6,
        gain=-best["2"],
        dial=best["1"] - best["4"],
        without=-best["1"],
        control=CONTROL[gate is not None],
        samples="\n\n".join(f"> **{each['prompt']}**{quoted(each['text'])}" for each in run["samples"]),
        sha256=run["sha256"][WEIGHTS],
    )


def signed(difference: dict[str, float]) -> str:
    return f"{difference['nats']:+.4f} ± {difference['standard_error']:.4f}".replace("-", "−")


def quoted(text: str) -> str:
    return text.strip("\n").replace("\n\n", "\n").replace("\n", "\n>\n> ") + " …"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["measure", "pack", "card"])
    parser.add_argument("--runs", type=Path, help="folder with the runs")
    parser.add_argument("--data", type=Path, help="folder made by `thoughtbubbles prepare`")
    parser.add_argument("--names", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--budgets", type=float, nargs="*", default=list(BUDGETS))
    parser.add_argument("--batch", type=int, default=64, help="windows per forward")
    parser.add_argument("--check", action="store_true", help="compare the card instead of writing it")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    if (args.action != "card" and args.runs is None) or (args.action == "measure" and args.data is None):
        parser.error(f"{args.action} needs --runs{' and --data' * (args.action == 'measure')}")
    if args.action == "measure":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = measure(args.runs, args.data, device=device, batch=args.batch, budgets=args.budgets, names=args.names)
        print(write_results("shipped", device, found, to=args.out))
        return
    if args.action == "pack":
        pack(args.runs / SHIPPED)
    written, path = card(json.loads((shipped_model() / "run.json").read_text())), shipped_model() / "README.md"
    if args.check:
        sys.exit(path.read_text(encoding="utf-8") != written and f"{path.name} is not written from run.json")
    path.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
