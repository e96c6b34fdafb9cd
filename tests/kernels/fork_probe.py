"""Run by kernels/interpreted.py: the fork layer's kernels, on the CPU, against their references.

Rows of bubbles of all sizes, padded, with ties and with runs of one level; odd numbers of candidates, below and above
the kernels' tiles. The tiles are made small, so that a bubble can be longer than one. Prints one JSON object: how many
cases there were, and those that differ.
"""

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thoughtbubbles.kernels import fork as kernels
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.selection import Rule, candidate_keys, candidate_levels, pack, ranks
from thoughtbubbles.model.streams import is_original

POISON = 1_000_000_007


def poisoned(tensor_maker: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A slot that a kernel forgets to write must not be right by luck."""

    def make(*args: Any, **options: Any) -> Tensor:
        return tensor_maker(*args, **options).fill_(POISON)

    return make


def candidates(seed: int, *, rows: int, n_tokens: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and tokens of rows of different lengths, and these lengths."""
    rng = random.Random(seed)
    lengths = [n_tokens, *(rng.randint(1, n_tokens) for _ in range(rows - 1))]
    owners = [[t for t in range(n) for _ in range(rng.randint(1, largest))] for n in lengths]
    width = max(map(len, owners)) + rng.randint(0, 2)
    token = torch.tensor([owner + [n_tokens] * (width - len(owner)) for owner in owners])
    original = is_original(token, n_tokens)
    forced = torch.stack([torch.zeros_like(original), original], dim=-1).flatten(1)
    token = token.repeat_interleave(2, dim=1)
    generator = torch.Generator().manual_seed(seed)
    log_score = -torch.rand(token.shape, generator=generator) * rng.choice([2.0, 0.01, 0.0])  # 0.01: many ties
    key = candidate_keys(candidate_levels(log_score, token, forced, n_tokens))
    return key, token, torch.tensor(lengths)


def differing(seed: int) -> list[str]:
    rng = random.Random(seed)
    kernels.MINE, kernels.THEIRS = rng.choice([(16, 16), (32, 16), (64, 64)])
    kernels.PACKED = rng.choice([16, 64])
    n_tokens = rng.choice([1, 2, 7, 20, 45])
    key, token, lengths = candidates(seed, rows=2, n_tokens=n_tokens, largest=rng.choice([1, 4, 12]))
    wrong = []
    for name, found, expected in zip(
        ("rank", "rank in bubble"), kernels.ranks(key, token), ranks(key, token, n_tokens), strict=True
    ):
        wrong += [] if torch.equal(found, expected) else [name]
    in_row = (key[:, None] > key[..., None]).sum(-1, dtype=torch.int32)
    wrong += [] if torch.equal(kernels.rank_in_row(key), in_row) else ["rank in row"]
    for budget in (1, 1.5, 2, 4):
        for selection in ("block", "causal"):
            rule = Rule(selection, Budget.of(budget))  # type: ignore[arg-type]
            survives = rule.survives(key, token, lengths, n_tokens)
            n_slots = rule.n_slots(key.shape[1] // 2, n_tokens)
            for n in (n_slots, max(1, n_slots // 3)):
                pairs = zip(kernels.pack(survives, n), pack(survives, n), strict=True)
                wrong += [] if all(torch.equal(a, b) for a, b in pairs) else [f"pack {selection} {budget}"]
    return wrong


if __name__ == "__main__":
    torch.empty = poisoned(torch.empty)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)  # type: ignore[method-assign]
    found = {seed: differing(seed) for seed in range(int(sys.argv[1]))}
    json.dump({"cases": len(found), "wrong": {s: wrong for s, wrong in found.items() if wrong}}, sys.stdout)
