"""Run by kernels/interpreted.py: attention of chunks, on the CPU, against the path without kernels.

Prints one JSON object: for each case the largest difference of logits, and whether the streams agree.
"""

import json
import sys
from unittest import mock

import torch

from helpers import lively_model, small_config
from thoughtbubbles import kernels
from thoughtbubbles.generate.cache import new_cache
from thoughtbubbles.generate.packed import Batch, read
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.kernels import chunk, decode
from thoughtbubbles.model.budget import Budget

STEPS = (([2, 0], [20, 3]), ([0, 1, 2], [1, 30, 1]), ([3, 1], [5, 12]), ([0, 1, 2, 3], [1, 1, 1, 1]))
ROOM = 60


def readings(*, with_kernel: bool, **changes) -> list[Prediction]:
    """Chunks and single tokens of four rows with budgets of their own."""
    shape = {"width": 128, "n_head": 4, "n_layer": 2, "block_size": ROOM, "vocab_size": 40, "merge": "residual"}
    config = small_config(**{**shape, "fork_layers": (0, 1), **changes})
    model = lively_model(config, dtype=torch.float32)
    with torch.no_grad():  # many channels of lively weights: closer to a trained model
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "score" not in name:
                weight.mul_(0.2)
    cache = new_cache(config, rows=4, capacity=ROOM, budget=Budget.of(4), dtype=torch.float32, device="cpu")
    for row, budget in enumerate((2, 1.5, 4, 1)):
        cache.clear(row, Budget.of(budget))
    random, found = torch.Generator().manual_seed(0), []
    with mock.patch.object(kernels, "for_decoding", return_value=with_kernel):
        for rows, lengths in STEPS:
            ids = torch.randint(40, (sum(lengths),), generator=random)
            found.append(read(model, cache, ids, Batch.of(rows, lengths)))
    return found


def differences(**changes) -> dict[str, float | bool]:
    pairs = list(zip(*(readings(with_kernel=one, **changes) for one in (True, False)), strict=True))
    return {
        "logits": max(float((a.logits - b.logits).abs().max()) for a, b in pairs),
        "same_streams": all(torch.equal(a.streams, b.streams) for a, b in pairs),
    }


if __name__ == "__main__":
    chunk.CHUNK = chunk.Tile(16, 16, 1, 4)  # several blocks of a row, and several turns in each
    decode.FEW_ROWS = 1024  # the library's product in float32 is for GPUs only
    chunk.WIDEST_PRIVATE = 8
    private = {"fork_reach": 0, "fork_layers": (0, 1)}
    cases = {
        "bubbles": {},
        "plain": {"fork_layers": (), "merge": "original"},
        "no bias": {"gate_qk": False},
        "gates of heads": {"head_gate": True},
        "private": private,
        "feedback": {**private, "fork_layers": (1,), "feedback": True, "merge": "forks", "head_gate": True},
        "feedback, near forks": {**private, "fork_layers": (1,), "feedback": True, "fork_reach": 5, "scores": False},
        "private, no gates": {**private, "fork_layers": (1,), "gate_qk": False, "gate_v": False, "merge": "forks"},
    }
    json.dump({name: differences(**case) for name, case in cases.items()}, sys.stdout)
