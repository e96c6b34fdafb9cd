"""What the tests of Hugging Face share: one small model of each kind, in our form and in theirs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

from helpers import lively_model, small_config
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.interop.hf import ThoughtbubblesForCausalLM
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

PLAIN: dict[str, Any] = {"fork_layers": (), "merge": "original"}
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "copy-3": {**PLAIN, "copies": 3},
    "gated": {**PLAIN, "head_gate": True, "block": "modern"},
    "causal": {},
    "causal-residual": {"merge": "residual", "budget": 1.5},
    "private": {"fork_layers": (1,), "fork_reach": 0, "merge": "forks", "relative_scores": True, "feedback": True},
    "near": {"fork_layers": (1,), "fork_reach": 3, "merge": "forks", "scores": False, "feedback": True},
    "block": {"selection": "block"},
    "block-residual": {"selection": "block", "merge": "residual"},
    "block-fixed": {"selection": "block", "budget_mode": "fixed", "merge": "original"},
}
CACHED = ("plain", "copy-3", "gated", "causal", "causal-residual", "private", "near")


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Some cases for `make test`, the others for `make test-all`."""
    return [pytest.param(*many(case), marks=[] if case in fast else [pytest.mark.slow]) for case in cases]


def many(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def config_of(kind: str, **changes: Any) -> ModelConfig:
    return small_config(**{**KINDS[kind], **changes})


def pair(folder: Any, kind: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Thoughtbubbles]:
    """A model opened by Hugging Face from the folder that ours wrote, and ours."""
    core = lively_model(config_of(kind, **changes), dtype=dtype).eval()
    save_model(folder, core)
    return ThoughtbubblesForCausalLM.from_pretrained(folder).eval(), core


def logits(core, ids, **options):
    with torch.no_grad():
        return core(ids, want=("logits",), **options).logits


def padded(rows, side, width):
    """Ids 0 as padding, which are ids of the vocabulary too."""
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        start = {"left": width - len(row), "right": 0, "both": (width - len(row)) // 2}[side]
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = row, 1
    return ids, mask
