"""Shared code of the training tests: a small run, and functions to start one in its own process and to compare two."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from thoughtbubbles.data.shards import Index, ShardWriter, write_index
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.recipes import recipe
from thoughtbubbles.train.config import DataConfig, RunConfig

TIMES = {"tokens_per_second", "tflops_per_device", "mfu", "peak_memory_GiB"}  # different in every run


def tiny(form: str) -> RunConfig:
    """A tiny recipe; tiny-block is tiny-causal with the paper's selection rule."""
    if form != "tiny-block":
        return recipe(form)
    config = recipe("tiny-causal")
    return replace(config, model=replace(config.model, selection="block"))


def small_run(out: Path, *, steps: int = 8, **changes: Any) -> RunConfig:
    """`tiny-causal` in small: 4 layers, 2 fork layers, 8 rows of 32 tokens. `optim_lr=…` changes a nested field."""
    base = recipe("tiny-causal")
    corpus = small_corpus(out)
    model = replace(base.model, n_layer=4, width=32, block_size=32)
    run = replace(base, out=out, model=model, tokens=steps * 8 * 32, tokens_per_step=8 * 32)
    run = replace(
        run,
        data=DataConfig(mixture=(str(corpus),)),
        save=replace(run.save, every=3),
        eval=replace(run.eval, every=4, tokens=1024, sample_tokens=3),
        log=replace(run.log, every=2),
    )
    for name, value in changes.items():
        group, _, field = name.partition("_")
        if group in ("data", "optim", "compute", "save", "eval", "log", "model") and field:
            run = replace(run, **{group: replace(getattr(run, group), **{field: value})})
        else:
            run = replace(run, **{name: value})
    return run


def small_corpus(out: Path) -> Path:
    """Next to the run, so that the runs of a test share it."""
    folder = out.parent / "corpus"
    write_synthetic(folder, n_tokens=20_000, seed=0)
    return folder


def uneven_examples(folder: Path) -> Path:
    """Examples of 3 to 31 tokens, of which 1 to 30 count."""
    splits = {}
    for split in ("train", "val"):
        writer = ShardWriter(folder, split, kind="examples", shard_tokens=100_000)
        for i in range(64):
            tokens = np.arange(i % 29 + 3, dtype=np.uint16) + 65
            writer.add_example(tokens, np.arange(len(tokens)) >= 1 + i % 2)
        writer.close()
        splits[split] = writer.finished
    write_index(folder, Index("examples", "bytes", 256, 257, splits, {}))
    return folder


def small_train(out: Path, *more: str) -> list[str]:
    """`small_run` as a command."""
    return [
        *("train", "tiny-causal", "--out", str(out), "--data.mixture", str(small_corpus(out)), "--tokens", "2048"),
        *("--tokens-per-step", "256", "--model.n-layer", "4", "--model.width", "32", "--model.block-size", "32"),
        *("--save.every", "3", "--eval.every", "4", "--eval.tokens", "1024", "--eval.sample-tokens", "3"),
        *("--log.every", "2", *more),
    ]


def command(*arguments: str, ranks: int = 0) -> list[str]:
    start = [sys.executable, "-m"]
    if ranks:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [*start, "thoughtbubbles", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run_command(*arguments: str, ranks: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, ranks=ranks), capture_output=True, text=True, env=environment(), timeout=600, **options
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Everything that was logged, without the timings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_bits(a: Path, b: Path) -> None:
    """Two checkpoints: weights and optimizer."""
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 20
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
