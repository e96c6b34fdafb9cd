"""What the tests of `thoughtbubbles export` share: a saved model, and a run's folder with evaluations."""

import json
from pathlib import Path

import torch

from helpers import lively_model
from interop.hf_models import config_of
from thoughtbubbles import Thoughtbubbles
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.run import run as evaluate
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.files import write_json


def model_in(folder: Path, kind: str = "causal", *, seed: int = 0, **changes) -> Thoughtbubbles:
    core = lively_model(config_of(kind, vocab_size=300, **changes), seed=seed, dtype=torch.float32).eval()
    save_model(folder, core, tokenizer=tokenizer("bytes"))
    return core


def finished_run(folder: Path) -> Path:
    """A run's folder with two checkpoints, and real evaluations of both."""
    described = {
        "config": {"name": "first|try", "data": {"mixture": ["data/books", "web"]}},
        "versions": {"torch": "9"},
    }
    lines = [
        {"step": 40, "tokens": 4000, "loss": 4.4},
        {"step": 40, "validation_loss": {"books": 4.04}},
        {"step": 80, "tokens": 8000, "loss": 3.3},
        {"step": 80, "validation_loss": {"books": 3.03, "web": 3.13}},
    ]
    corpus = folder.parent / "corpus"
    write_synthetic(corpus, n_tokens=4_000, seed=0)
    benchmarks = Path(__file__).parents[2] / "docs" / "examples" / "benchmarks"
    for step in (40, 80):
        place = folder / f"step-{step:08}"
        model_in(place / "model", seed=step, block_size=160)
        asked = {"checkpoint": place, "data_dir": benchmarks, "data": corpus, "windows": 2, "tokens": 10}
        evaluate(Evaluation(**asked, tasks=("perplexity", "lambada", "blimp")), World(torch.device("cpu")))
        limited = Evaluation(**asked, tasks=("arc_easy",), limit=2, budget=("1.5",), out=folder / f"eval-{step}")
        evaluate(limited, World(torch.device("cpu")))
    write_json(folder / "run.json", described)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
