"""What is measured of a trained row: validation loss in several ways, copying, forks, zero-shot benchmarks.

All losses are computed in float32, from the weights of one checkpoint, or as the mean prediction of several (an
ensemble). Every target of the validation text counts once, in disjoint windows of the context length.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thoughtbubbles.checkpoint import load, load_tokenizer
from thoughtbubbles.data.shards import has_split
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.autoregressive import Scores, Windows, blockwise
from thoughtbubbles.evals.perplexity import describe, perplexity
from thoughtbubbles.evals.run import run
from thoughtbubbles.evals.settings import MOST, Evaluation
from thoughtbubbles.evals.windows import text_bytes, windows_for
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.forks import fork_statistics

BATCH = 64  # windows per forward
COPY_ROWS, COPY_TOKENS = 64, 128  # random sequences, each followed by itself


def measure(
    models: Sequence[Path],
    data: Path,
    sources: Mapping[str, Path],
    *,
    ar_windows: int,
    device: torch.device,
) -> dict[str, Any]:
    """`models`: one checkpoint, or the members of an ensemble. `sources`: further validation text, by name."""
    tokenizer = load_tokenizer(models[0])
    assert tokenizer is not None, "training saves the tokenizer"
    loaded = [load(model, device=device, dtype=torch.float32) for model in models]
    first, windows = loaded[0], all_windows(models[0], loaded[0], tokenizer, data)
    found: dict[str, Any] = {
        "validation": _numbers(ensemble(loaded, windows), windows, tokenizer, each=True),
        "by_source": {
            name: _numbers(ensemble(loaded, windows), windows, tokenizer)
            for name, folder in sources.items()
            for windows in [all_windows(models[0], first, tokenizer, folder)]
        },
    }
    if len(loaded) == 1:
        found |= {
            "autoregressive": autoregressive(first, windows, tokenizer, n=ar_windows) if ar_windows else None,
            "copying": copying(first, tokenizer),
            "forks": forks(first, windows),
        }
    return found


def all_windows(model: Path, loaded: Thoughtbubbles, tokenizer: Tokenizer, data: Path) -> Windows:
    """Of the validation split, or of everything if there is none."""
    split = "val" if has_split(data, "val") else "train"
    settings = Evaluation(checkpoint=model, data=data, split=split, windows=MOST)
    return windows_for(settings, loaded.config, tokenizer)


def ensemble(models: Sequence[Thoughtbubbles], windows: Windows) -> Scores:
    """The loss of the mean of the models' distributions."""
    each = [blockwise(model, windows, batch=BATCH) for model in models]
    nll = -torch.logsumexp(-torch.stack([scores.nll for scores in each]), dim=0) + math.log(len(each))
    return each[0]._replace(nll=torch.where(each[0].counted, nll, 0.0))


def _numbers(scores: Scores, windows: Windows, tokenizer: Tokenizer, *, each: bool = False) -> dict[str, Any]:
    n_bytes = text_bytes(windows, tokenizer)
    return {
        "nats": scores.mean,
        "standard_error": scores.standard_error,
        "bits_per_byte": scores.mean * scores.n_tokens / math.log(2) / n_bytes,
        "tokens": scores.n_tokens,
        "bytes": n_bytes,
        # Nats per token of every window, from which differences between rows get their error.
        **({"windows": [round(mean, 5) for mean in scores.window_means]} if each else {}),
    }


def autoregressive(model: Thoughtbubbles, windows: Windows, tokenizer: Tokenizer, *, n: int) -> dict[str, Any]:
    """Windows spread evenly over the text, scored in one forward and token by token."""
    n = min(n, len(windows.ids))
    some = Windows(*(part[[i * len(windows.ids) // n for i in range(n)]] for part in windows))
    found = describe(
        model.config,
        perplexity(model, some, vocab_size=tokenizer.size, batch=BATCH),
        vocab_size=tokenizer.size,
        n_bytes=text_bytes(some, tokenizer),
    )
    return {
        "windows": n,
        "nats": {name: way["nats"] for name, way in found["ways"].items()},
        "differences": found["differences"],
    }


@torch.no_grad()
def copying(model: Thoughtbubbles, tokenizer: Tokenizer) -> dict[str, Any]:
    """Loss on random tokens, and on their repetition, which only a model that copies from its context predicts.

    The first token of the repetition is not counted: nothing announces it.
    """
    n = min(COPY_TOKENS, model.config.block_size // 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(tokenizer.size - 1, (COPY_ROWS, n), generator=generator)
    ids = ids + (ids >= tokenizer.end_of_text)  # any id but end-of-text
    row = torch.cat([torch.full((COPY_ROWS, 1), tokenizer.end_of_text), ids, ids], dim=1)
    row = row.to(model.embedding.weight.device)
    nll: Tensor = model(row[:, :-1], targets=row[:, 1:], want=("token_nll",)).token_nll
    return {
        "tokens": n,
        "first": float(nll[:, :n].double().mean()),
        "second": float(nll[:, n + 1 :].double().mean()),
    }


@torch.no_grad()
def forks(model: Thoughtbubbles, windows: Windows) -> list[dict[str, Any]]:
    some = windows.part(slice(0, BATCH), model.embedding.weight.device)
    records = model(some.ids, lengths=some.lengths, trace=True).forks
    return fork_statistics(records, some.lengths, some.ids.shape[1])


def zero_shot(model: Path, *, data_dir: Path | None, out: Path, world: World) -> dict[str, Any]:
    """On the zero-shot benchmarks, the paper's way of choosing."""
    return accuracies(Evaluation(checkpoint=model, tasks=("zero-shot",), data_dir=data_dir, out=out), world)


def accuracies(settings: Evaluation, world: World) -> dict[str, Any]:
    """Accuracy on each benchmark; also writes the evaluation's own results to its folder."""
    results = run(settings, world)
    if results["failed"]:
        raise ValueError("; ".join(f"{task}: {why}" for task, why in results["failed"].items()))
    return {
        name: {
            "accuracy": task["accuracy"]["mean"],
            "standard_error": task["accuracy"]["standard_error"],
            "documents": task["documents"],
            "chance": task["chance"],
        }
        for name, task in results["tasks"].items()
    }
