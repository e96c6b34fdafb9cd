"""Made-up records of `thoughtbubbles reproduce`, with known numbers."""

import json
from pathlib import Path
from typing import Any

from thoughtbubbles.recipes.reproduce.protocols import protocol as find

CURVE_STEPS = (100, 200, 300, 400)
PER_STEP = 64 * 512


def made_up(protocol: str, row: str, seed: int, nats: float, **changes: Any) -> dict[str, Any]:
    """A record whose fields follow from its loss; windows of 512, 512 and 256 tokens, all with the mean loss."""
    settings = {"model": {"block_size": 512}, "optim": {"lr": 3e-3, "weight_decay": 0.1}}
    if row in (planned := find(protocol)).rows:
        run = planned.config(row, protocol=protocol, seed=seed, data="corpus", n_tokens=800, vocab_size=128)
        settings = {name: run.as_dict()[name] for name in settings}
    gap = {"mean": 0.0, "standard_error": 0.0, "largest": 2e-6, "same_greedy": 1.0}
    record: dict[str, Any] = {
        "version": 1,
        "protocol": protocol,
        "row": row,
        "seed": seed,
        "what": f"model {row}",
        "parameters": 12_000_000,
        "steps": CURVE_STEPS[-1],
        "tokens": CURVE_STEPS[-1] * PER_STEP,
        "epochs": 4.0,
        "flops": 1e18,
        "tokens_per_second": 1e6,
        "gpu_seconds": 300.0,
        "wall_seconds": 400.0,
        "resumed_at": None,
        "peak_memory_GiB": 3.0,
        "device": "NVIDIA H200",
        "command": f"thoughtbubbles reproduce {protocol} --only {row} --seed {seed}",
        "commit": "abc1234",
        "versions": {"thoughtbubbles": "0.1.0", "torch": "2.11.0", "python": "3.12.0"},
        "time": "2026-01-02T03:04:05.000000+00:00",
        "text": {"tokens": 800, "tokenizer": "bubbles-7m", "checksum": "12345678"},
        "config": {**settings, "tokens_per_step": PER_STEP, "eval": {"tokens": 1024}},
        "curve": [[step, round(nats + 40 / step, 5)] for step in CURVE_STEPS],
        "training_loss": [round(nats + 1 / (i + 1), 5) for i in range(8)],
        "validation": {
            "nats": nats,
            "standard_error": 0.02,
            "bits_per_byte": nats / 3,
            "tokens": 1280,
            "bytes": 5120,
            "windows": [nats] * 3,
        },
        "by_source": {"wiki": {"nats": nats - 0.5, "bits_per_byte": nats / 4, "tokens": 10, "bytes": 40}},
        "autoregressive": {
            "windows": 64,
            "nats": {"blockwise": nats, "autoregressive": nats},
            "differences": {"autoregressive - blockwise": gap},
        },
        "copying": {"tokens": 128, "first": 9.5, "second": 0.25},
        "forks": [],
    }
    return {**record, **changes}


def write(folder: Path, *records: dict[str, Any]) -> Path:
    for record in records:
        path = folder / record["protocol"] / f"{record['row']}-seed{record['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    return folder


def rows(protocol: str, losses: dict[str, list[float]], **changes: Any) -> list[dict[str, Any]]:
    """`losses`: by row, one per seed from 0 on."""
    return [
        made_up(protocol, row, seed, nats, **changes)
        for row, found in losses.items()
        for seed, nats in enumerate(found)
    ]
