"""GPU memory held for the backward, compared with the prediction of `thoughtbubbles inspect`. Needs a CUDA device.

python benchmarks/memory.py
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import write_results

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import activation_bytes
from thoughtbubbles.model.transformer import Thoughtbubbles

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("150m-plain", {}, 64),
    ("150m-copy-3", {}, 16),
    ("150m-causal", {}, 64),
    ("150m-causal", {"merge": "residual", "budget": 4}, 32),
]


def measure(name: str, changes: dict[str, Any], rows: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = replace(ModelConfig.named(name), **changes)
    model = Thoughtbubbles(config).cuda()
    ids = torch.randint(config.vocab_size, (rows, config.block_size), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        model(ids[:1], targets=ids[:1]).loss.backward()  # libraries allocate their workspaces
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):  # a new context: the bfloat16 copies of the weights count
        output = model(ids, targets=ids)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert output.loss is not None
    changed = "".join(f", {key} {value}" for key, value in changes.items())
    return {
        "model": name + changed,
        "rows": rows,
        "predicted_GiB": activation_bytes(config, rows=rows) / 2**30,
        "measured_GiB": held / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures GPU memory, but no GPU is available")
    found = []
    for case in CASES:
        row = measure(*case)
        found.append(row)
        print(f"{row['model']:>40}: predicted {row['predicted_GiB']:.2f} GiB, measured {row['measured_GiB']:.2f} GiB")
    print("written to", write_results("memory", "cuda", {"cases": found}, to=args.out))


if __name__ == "__main__":
    main()
