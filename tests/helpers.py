"""Shared code of the tests: small models, calls of the oracle, and every tolerance."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oracle
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.fork import ForkRecord
from thoughtbubbles.model.layout import Layout
from thoughtbubbles.model.rope import rotary
from thoughtbubbles.model.transformer import Output, Thoughtbubbles

# Tolerances live here and are never loosened to make a test pass.
ORACLE_OUTPUT = 1e-9  # float64, against the oracle
ORACLE_GRADIENT = 1e-7  # float64, against the oracle
SAME_ROW = 1e-10  # float64: a row alone and in a padded batch, a prefix alone and inside a longer row
SAME_ROW_FLOAT32 = 1e-4
EDGE_FLOAT32 = 1e-5  # how close to a rounding boundary a log score must be for noise to flip a decision
SAME_FUNCTION = 1e-12  # float64: two ways to compute one formula
SAME_FUNCTION_FLOAT32 = 2e-5  # also compiled against eager: code generation may reorder sums
GOLDEN = 1e-6  # float64: losses written down on another machine
SAME_TRAINING = 1e-6  # float64: losses and weights after a few steps on one rank and on several
LOW_PRECISION_TRAINING = 2e-3  # the same in float32 or with bfloat16 products
BFLOAT16 = 1e-2  # relative error of a result with bfloat16 operands, against float64
FLOAT16 = 2e-3  # likewise with float16 operands, whose rounding is 8 times finer
BFLOAT16_GRADIENT = 3e-2  # of a gradient that also went through bfloat16 outputs


def scores_only(key_bias: Tensor | None = None, value_gate: Tensor | None = None, gate: Tensor | None = None) -> Layout:
    """For attention paths, which get q and k already rotated."""
    return Layout(rotary(torch.zeros(1, 1), 2), key_bias, value_gate, gate)


def run_probe(module: str, *words: object, interpreted: bool = False) -> Any:
    """What a module of tests prints as JSON, in a process of its own, so without the run-time checks of shapes.

    `interpreted`: with kernels on the CPU, through Triton's interpreter, which is chosen when Triton is imported.
    """
    through = ["kernels.interpreted"] if interpreted else []
    command = [sys.executable, "-m", *through, module, *map(str, words)]
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if interpreted else {})}
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout or "null")


def named(name: str, **changes: Any) -> ModelConfig:
    return replace(ModelConfig.named(name), **changes)


def small_config(**changes: Any) -> ModelConfig:
    """Odd sizes on purpose, three fork layers, big enough for bubbles of eight."""
    base: dict[str, Any] = {
        "n_layer": 4,
        "n_head": 3,
        "width": 12,
        "vocab_size": 23,
        "block_size": 16,
        "fork_layers": (1, 2, 3),
    }
    return ModelConfig(**{**base, **changes})


def lively_model(
    config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any
) -> Thoughtbubbles:
    """Weights much larger than the initial ones: scores spread, selection matters, and errors are easy to see."""
    torch.manual_seed(seed)
    model = Thoughtbubbles(config, **options).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("score.weight"):
                parameter.normal_(std=1.0)
            else:
                parameter.normal_(std=0.35)
    return model


def random_ids(config: ModelConfig, rows: int, tokens: int, *, seed: int = 1) -> Tensor:
    return torch.randint(config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def ask_oracle(
    model: Thoughtbubbles, ids: Tensor, targets: Tensor | None = None, **settings: Any
) -> tuple[oracle.Result, dict[str, Tensor]]:
    """Runs one row through the oracle; the second result is its copies of the weights, which collect gradients."""
    known = {field.name for field in fields(oracle.Settings)}
    chosen = {**{k: v for k, v in asdict(model.config).items() if k in known}, **settings}
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    result = oracle.run(weights, oracle.Settings(**chosen), ids.tolist(), None if targets is None else targets.tolist())
    return result, weights


def hangs_on_an_edge(ours: ForkRecord, theirs: ForkRecord, *, candidates: int, tolerance: float) -> bool:
    """Whether two runs decided differently only because a log score is at a boundary of the rounding to 1/4096.

    Selection is discrete, so noise in the last bits can flip a decision there, and only there. The records are those of
    the first fork layer that differs, `candidates` those that both runs have; the consequences of a flipped decision
    are not checked.
    """
    a, b = ours.log_score[:, :candidates] * 4096, theirs.log_score[:, :candidates] * 4096
    flipped = a.round() != b.round()
    to_edge = ((a - a.floor()) - 0.5).abs() / 4096
    return bool(flipped.any()) and bool((to_edge[flipped] < tolerance).all())


def assert_same_decisions(output: Output, results: list[oracle.Result]) -> None:
    assert output.forks is not None
    for index in range(len(output.forks)):
        for row, result in enumerate(results):
            ours, theirs = output.forks[index], result.forks[index]
            used = int((ours.parent[row] >= 0).sum())
            candidates = len(theirs.selected)
            assert ours.layer == theirs.layer
            assert ours.selected[row, :candidates].tolist() == theirs.selected
            assert not ours.selected[row, candidates:].any()
            assert ours.parent[row, :used].tolist() == theirs.parent
            assert ours.is_fork[row, :used].tolist() == theirs.is_fork
            assert ours.token[row, :used].tolist() == theirs.token
            assert ours.bubble_size[row, : len(theirs.bubble_size)].tolist() == theirs.bubble_size
            torch.testing.assert_close(
                ours.log_score[row, :candidates],
                torch.tensor(theirs.log_score, dtype=torch.float64),
                atol=ORACLE_OUTPUT,
                rtol=0,
            )


@contextmanager
def no_waiting_for_the_gpu() -> Iterator[None]:
    """Inside, everything that makes the host wait for the device raises an error."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
