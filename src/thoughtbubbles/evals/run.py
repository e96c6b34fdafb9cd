"""`thoughtbubbles eval`: opens a checkpoint and its data, runs the tasks, shows a table, writes results.json.

Everything that can be wrong with the settings is found before the first forward. The figure is drawn from results.json.
"""

import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from thoughtbubbles import __version__
from thoughtbubbles.checkpoint import find_model, load_folder_tokenizer, load_model, write_json
from thoughtbubbles.data.loader import HeldOut, Source
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.autoregressive import Windows
from thoughtbubbles.evals.figures import draw_perplexity
from thoughtbubbles.evals.perplexity import describe, perplexity, remarks, table_of
from thoughtbubbles.evals.progress import Progress
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.generate.requests import budget_problem
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

RESULTS = "results.json"


def run(settings: Evaluation, *, device: str) -> dict[str, Any]:
    """What results.json holds. `device` is one that this machine has."""
    folder = find_model(settings.checkpoint)
    tokenizer = _tokenizer(folder)
    if settings.dtype == "float64" and device == "mps":
        raise ValueError("--dtype float64: mps has none; take --device cpu")
    model = load_model(folder, device=device, dtype=torch.float64 if settings.dtype == "float64" else torch.float32)
    model.eval()
    budget = model.config.budget if settings.budget is None else settings.budget
    if settings.budget is not None and (wrong := budget_problem(model.config, settings.budget)):
        raise ValueError(f"--{wrong}")
    windows = windows_for(settings, model.config, tokenizer)
    path = _make_folder(settings) / RESULTS
    found = _perplexity(settings, model, windows, tokenizer)
    results = {
        "tasks": {"perplexity": found},
        "checkpoint": str(folder),
        "budget": budget if model.config.fork_layers else None,
        "selection": model.config.selection if model.config.fork_layers else None,
        "config": asdict(model.config),
        "settings": {**settings.as_dict(), "device": device},
        **_circumstances(),
    }
    write_json(path, results)
    _show(results, path)
    return results


def windows_for(settings: Evaluation, config: ModelConfig, tokenizer: Tokenizer) -> Windows:
    """Windows of the held-out data as training has them, evenly spread over the split."""
    n_tokens = config.block_size if settings.tokens is None else settings.tokens
    if n_tokens > config.block_size:
        raise ValueError(
            f"--tokens {n_tokens}: the model reads at most block_size = {config.block_size} tokens; give no more"
        )
    source = Source(_data_folder(settings.data))
    held_out = HeldOut([source], rows=1, n_tokens=n_tokens, split=settings.split)
    if held_out.tokenizer != tokenizer.name:
        raise ValueError(
            f"--data {source.path}: made with tokenizer {held_out.tokenizer!r}, but the model has learned the ids of "
            f"{tokenizer.name!r}: prepare the text with --tokenizer {tokenizer.name}"
        )
    held_out.check_vocab(config.vocab_size)
    n_windows = min(settings.windows, len(held_out))
    chosen = [held_out[i * len(held_out) // n_windows] for i in range(n_windows)]
    ids, targets, lengths = (
        torch.from_numpy(np.concatenate([getattr(batch, name) for batch in chosen]))
        for name in ("ids", "targets", "lengths")
    )
    return Windows.of(config, ids, targets=targets, lengths=lengths)


def _data_folder(data: Path | None) -> Path:
    if data is None:
        raise ValueError(
            "--data is missing: perplexity needs held-out text; give a folder that `thoughtbubbles prepare` wrote, or "
            "RUN/data/synthetic of a tiny run"
        )
    if data.is_file():
        remedy = (
            f"give its folder, {data.parent}"
            if data.suffix == ".bin"
            else f"prepare it first: thoughtbubbles prepare {data} --out DIR, then --data DIR"
        )
        raise ValueError(f"--data {data} is a file: {remedy}")
    return data


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_folder_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(
            f"--checkpoint {folder} has no tokenizer.json, so nobody can tell whether the data's ids are the model's: "
            "save the model with save_model(…, tokenizer=…)"
        )
    return tokenizer


def _make_folder(settings: Evaluation) -> Path:
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(settings.folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ValueError(f"--out {settings.folder}: cannot be written ({error.strerror}); give another") from None
    return settings.folder


def _perplexity(settings: Evaluation, model: Thoughtbubbles, windows: Windows, tokenizer: Tokenizer) -> dict[str, Any]:
    device = model.embedding.weight.device.type
    narrow: AbstractContextManager[object] = nullcontext()
    if settings.dtype == "bfloat16":
        narrow = torch.autocast(device, torch.bfloat16)
    with Progress() as progress, narrow:
        scores = perplexity(
            model,
            windows,
            vocab_size=tokenizer.size,
            budget=settings.budget,
            batch=settings.batch,
            report=progress.begin,
        )
    return describe(model.config, scores, vocab_size=tokenizer.size)


def _circumstances() -> dict[str, Any]:
    """As run.json of a training run has them."""
    return {
        "command": sys.argv,
        "versions": {"thoughtbubbles": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.platform(),
        "commit": os.environ.get("THOUGHTBUBBLES_COMMIT"),
    }


def _show(results: dict[str, Any], path: Path) -> None:
    found = results["tasks"]["perplexity"]
    rule = "no forks"
    if results["selection"] is not None:
        rule = f"{results['selection']} selection, r = {results['budget']}"
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table_of(found, title=rule))
    for line in remarks(found):
        console.print(line, soft_wrap=True)
    figure = draw_perplexity(path)
    drawn = f" and {figure}" if figure else "; for a figure, pip install 'thoughtbubbles[analysis]'"
    console.print(f"Written: {path}{drawn}", soft_wrap=True, markup=False)
