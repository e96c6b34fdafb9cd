"""The cost of causal selection: the rule alone at 2048 candidates per row, and inside the forward of a 150m model.

    python benchmarks/selection.py                      one row of 512 tokens, float32 on the CPU
    python benchmarks/selection.py --device cuda        64 rows, bfloat16 products, on a GPU; add --compile

At r = 2 a row of 512 tokens has 1024, 2048 and 2048 candidates at its three fork layers. The survivors of the parallel
rule are first compared with those of a plain loop over tokens.
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
from common import seconds, write_results
from torch import Tensor

from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.selection import Rule, candidate_keys, candidate_levels
from thoughtbubbles.model.transformer import Thoughtbubbles

TOKENS, STREAMS, BUDGET = 512, 1024, 2


def candidates(rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Keys and tokens of rows with two streams per token, so four candidates each."""
    generator = torch.Generator().manual_seed(0)
    token = torch.arange(TOKENS).repeat_interleave(4).repeat(rows, 1)
    log_score = -2 * torch.rand(rows, 2 * STREAMS, generator=generator)
    forced = (torch.arange(2 * STREAMS) % 4 == 3).repeat(rows, 1)
    key = candidate_keys(candidate_levels(log_score, token, forced, TOKENS))
    return key.to(device), token.to(device)


def loop(key: list[int], token: list[int]) -> list[bool]:
    """The causal rule token by token, as in the documentation."""
    survives, kept = [False] * len(key), 0
    for t in range(TOKENS):
        cap = BUDGET * (t + 1)
        seen = sorted((k for k, owner in zip(key, token, strict=True) if owner <= t), reverse=True)
        passing = set(seen[:cap])
        mine = sorted((i for i, owner in enumerate(token) if owner == t and key[i] in passing), key=lambda i: -key[i])
        mine = mine[: cap - kept]
        kept += len(mine)
        for i in mine:
            survives[i] = True
    return survives


@torch.no_grad()
def behaviour(model: Thoughtbubbles, ids: Tensor) -> dict[str, float]:
    """How much of the budget the causal rule uses, and what bfloat16 products change (with random weights)."""
    targets = ids.roll(-1, 1)
    exact = model(ids, targets=targets, trace=True)
    with torch.autocast(ids.device.type, torch.bfloat16):
        rounded = model(ids, targets=targets, trace=True)
    pairs = list(zip(exact.forks or (), rounded.forks or (), strict=True))
    differing = sum(int((a.selected != b.selected).sum()) for a, b in pairs)
    return {
        "budget_used": float((exact.streams.token < TOKENS).sum() / (len(ids) * BUDGET * TOKENS)),
        "decisions_that_differ_in_bfloat16": differing / sum(a.selected.numel() for a, _ in pairs),
        "loss_difference_in_bfloat16": float(rounded.loss) - float(exact.loss),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, help="default: 1 on the CPU, 64 on a GPU")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="compile the rule alone and the whole forward")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    device, rows = args.device, args.rows or (64 if args.device == "cuda" else 1)

    rules = {name: Rule(name, Budget.of(BUDGET)) for name in ("causal", "block")}  # type: ignore[arg-type]
    key, token = candidates(rows, device)
    lengths = torch.full((rows,), TOKENS, device=device)
    if rules["causal"].survives(key, token, lengths, TOKENS)[0].tolist() != loop(key[0].tolist(), token[0].tolist()):
        raise SystemExit("the parallel rule and the loop disagree")

    torch.manual_seed(0)
    model = Thoughtbubbles(ModelConfig.named("150m-causal")).to(device).eval()
    ids = torch.randint(50257, (rows, TOKENS), device=device)
    maybe: Any = torch.compile if args.compile else (lambda function: function)

    def forward(selection: str) -> Any:
        call = maybe(lambda ids: model(ids, selection=selection).streams.x)

        def run() -> None:
            products = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
            with torch.no_grad(), products:
                call(ids)

        return run

    def alone(selection: str) -> Any:
        call = maybe(lambda key, token: rules[selection].survives(key, token, lengths, TOKENS))
        return lambda: call(key, token)

    variants = {f"forward, {s}": forward(s) for s in rules} | {f"{s} rule alone": alone(s) for s in rules}
    time = {name: 1e3 * t for name, t in seconds(variants, device=device, repeats=args.repeats).items()}
    # Three fork layers, of which the first has half as many candidates: counting all three as full overestimates.
    share = 3 * time["causal rule alone"] / (time["forward, causal"] - 3 * time["causal rule alone"])
    for name, milliseconds in time.items():
        print(f"{name:>20}: {milliseconds:9.3f} ms")
    over_block = time["forward, causal"] / time["forward, block"]
    print(f"causal selection adds {share:.2%} to the forward; over block selection {over_block:.3f}×")
    found = behaviour(model, ids[:8])
    print(", ".join(f"{name.replace('_', ' ')}: {value:.4g}" for name, value in found.items()))
    numbers: dict[str, Any] = {
        "rows": rows,
        "compiled": args.compile,
        "milliseconds": time,
        "share_of_forward": share,
        **found,
    }
    name = "selection-compiled" if args.compile else "selection"
    print("written to", write_results(name, device, numbers, to=args.out))


if __name__ == "__main__":
    main()
