"""Speed of the evaluation benchmarks on a GPU, in documents per second, for models with random weights.

python benchmarks/evals.py --data-dir DIR     DIR: the files of `thoughtbubbles eval --data-dir`

This runs the code of the command, from opening the files to writing results.json. Before anything is timed, rows scored
in batches are compared with rows scored alone, in float32.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import write_results

from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.documents import open_benchmark
from thoughtbubbles.evals.likelihood import encode_choices, log_likelihoods
from thoughtbubbles.evals.run import run
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.evals.tasks.task import Choices
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

CHOICES = tuple(name for name, task in TASKS.items() if not task.max_new)


def check(model: Thoughtbubbles, data: Path) -> float:
    """The largest difference of a log-probability between rows in a batch and rows alone."""
    gpt2 = tokenizer("gpt2")
    documents = open_benchmark(TASKS["hellaswag"], data, limit=32).documents.values()
    pairs = [(d.context, d.choices) for d in documents if isinstance(d, Choices)]
    queries = [query for context, choices in pairs for query in encode_choices(gpt2, context, choices)]
    together = log_likelihoods(model, queries, vocab_size=gpt2.size)
    alone = [log_likelihoods(model, [query], vocab_size=gpt2.size)[0] for query in queries]
    return max(abs(a.log_prob - b.log_prob) for a, b in zip(together, alone, strict=True))


def evaluate(folder: Path, data: Path, tasks: tuple[str, ...], device: str, **more: Any) -> dict[str, Any]:
    settings = Evaluation(checkpoint=folder, tasks=tasks, data_dir=data, dtype="bfloat16", fresh=True, **more)
    begun = time.perf_counter()
    found = run(settings, World(torch.device(device)))["tasks"]
    return {
        "seconds": time.perf_counter() - begun,
        "tasks": {
            name: {
                key: benchmark[key] for key in ("version", "documents", "seconds", "documents_per_second", "truncated")
            }
            for name, benchmark in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--models", nargs="+", default=["150m-causal", "150m-plain", "150m-paper"])
    parser.add_argument("--limit", type=int, help="maximum number of documents per benchmark")
    parser.add_argument("--answers-at-once", type=int, default=256)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    numbers: dict[str, Any] = {"dtype": "bfloat16", "answers_at_once": arguments.answers_at_once, "models": {}}
    for name in arguments.models:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            with torch.device(arguments.device):
                model = Thoughtbubbles(ModelConfig.named(name)).eval()
            found: dict[str, Any] = {"largest_difference_in_float32": check(model, arguments.data_dir)}
            save_model(Path(folder), model, tokenizer=tokenizer("gpt2"))
            del model
            common: dict[str, Any] = {"limit": arguments.limit, "out": Path(folder) / "out"}
            found["choices"] = evaluate(Path(folder), arguments.data_dir, CHOICES, arguments.device, **common)
            if name != "150m-paper":  # block selection decodes without a cache, which is not measured here
                more = {"compile": arguments.device == "cuda", "answers_at_once": arguments.answers_at_once, **common}
                found["gsm8k"] = evaluate(Path(folder), arguments.data_dir, ("gsm8k",), arguments.device, **more)
        numbers["models"][name] = found
        path = write_results("evals", arguments.device, numbers, to=arguments.out)
    print(path.read_text())


if __name__ == "__main__":
    main()
