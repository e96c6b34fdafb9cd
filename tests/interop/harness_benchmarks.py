"""What the tests of lm-evaluation-harness share: made-up benchmarks, and small models to evaluate on them."""

import gzip
import json
from pathlib import Path
from typing import Any

import torch

from helpers import lively_model
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.model.config import ModelConfig

GPT2 = tokenizer("gpt2")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"fork_layers": (1, 2)},
    "block": {"fork_layers": (1, 2), "selection": "block"},
}

# One record of each set, in the fields that our files have; all of them made up.
RECORDS = {
    "lambada_openai.test": [
        {"context": "The cat sat on the mat, and the dog lay beside the", "target": "cat"},
        {"context": 'Anna gave Ben an apple.\n\n"Thank you," said', "target": "Ben"},
    ],
    "hellaswag.validation": [
        {
            "activity_label": "Baking bread",
            "ctx_a": "A woman kneads dough. [header] Then",
            "ctx_b": "she WAITS",
            "ctx": "not used",
            "endings": [" for it  to rise.", "in [title] the sea.", "[step] on the moon.", "never."],
            "label": 0,
        },
        {
            "activity_label": "Rowing",
            "ctx_a": "Two men push a boat into the lake.",
            "ctx_b": "",
            "ctx": "not used",
            "endings": ["they row.", "they sing.", "they sleep.", "they fly."],
            "label": 2,
        },
    ],
    "blimp": [
        {"UID": "adjunct_island", "sentence_good": "Who left?", "sentence_bad": "Left who?"},
        {"UID": "wh_island", "sentence_good": "The boys run.", "sentence_bad": "The boys runs."},
        {"UID": "wh_island", "sentence_good": "The boy runs.", "sentence_bad": "The boy run."},
    ],
    "arc_easy.test": [{"id": "a", "question": "What melts?", "choices": ["ice", "stone", "air"], "gold": 0}],
    "arc_challenge.test": [{"id": "b", "question": "What falls? ", "choices": ["up", "down"], "gold": 1}],
    "piqa.validation": [{"goal": "Dry a cup", "sol1": "use a towel", "sol2": "use a stone", "label": 0}],
    "mmlu.test": [
        {"subject": "high_school_biology", "question": " What eats? ", "choices": ["a", "b", "c", "d"], "answer": 3}
    ],
    "mmlu.dev": [{"subject": "high_school_biology", "question": "Who?", "choices": ["e", "f", "g", "h"], "answer": 0}],
    "gsm8k.test": [{"question": "Ann has 2 figs and 3 plums. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}],
    "gsm8k.train": [{"question": f"What is {n} + 1?", "answer": f"{n + 1}\n#### {n + 1}"} for n in range(6)],
}


def write_records(folder: Path, name: str, records: list[dict]) -> Path:
    path = folder / f"{name}.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def write_benchmarks(folder: Path) -> Path:
    """All records, where a user may have them: in the subfolder `eval`."""
    (folder / "eval").mkdir()
    for name, records in RECORDS.items():
        write_records(folder / "eval", name, records)
    return folder


def save_models(folder: Path, **changes: Any) -> dict[str, Path]:
    """Small models of each kind, with GPT-2's vocabulary and weights that distinguish texts."""
    for kind, of_kind in KINDS.items():
        config = ModelConfig(n_layer=3, n_head=2, width=16, **{**of_kind, **changes})
        save_model(folder / kind, lively_model(config, dtype=torch.float32), tokenizer=GPT2)
    return {kind: folder / kind for kind in KINDS}
