"""Readers of models: their folders, runs that are resumed, model cards, and checkpoints of the authors' code."""

import io
import json
import zlib
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import FileBase, gather
from mutate import Files
from safetensors.torch import save, save_file

from thoughtbubbles.checkpoint import INDEX, WEIGHTS, load, load_tokenizer, save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.files import MANIFEST, write_manifest
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

SMALL = ModelConfig(n_layer=2, n_head=2, width=8, vocab_size=260, block_size=16, fork_layers=(1,))
NO_CHECKSUM = "this file has no checksum"


def models(folder: Path) -> Sequence[FileBase]:
    """As saved, with the weights in two files, and with a manifest."""
    whole = save_model(folder / "whole", small_model(), tokenizer=tokenizer("bytes"))
    listed = save_model(folder / "listed", small_model(), tokenizer=tokenizer("bytes"))
    write_manifest(listed)
    read = ("*.json", "*.safetensors")
    return [
        FileBase(files=gather(whole), read=opened, reason=NO_CHECKSUM),
        FileBase(files=gather(split(folder / "split")), read=opened, reason=NO_CHECKSUM),
        FileBase(
            files=gather(listed), read=opened, checked=read, reason="the manifest is gone", repair=repair_manifests
        ),
    ]


def small_model() -> Thoughtbubbles:
    torch.manual_seed(0)
    return Thoughtbubbles(SMALL)


def split(folder: Path) -> Path:
    """As Hugging Face writes large weights."""
    save_model(folder, small_model(), tokenizer=tokenizer("bytes"))
    weights, places = small_model().state_dict(), dict[str, str]()
    for part in (0, 1):
        name = f"model-{part + 1:05d}-of-00002.safetensors"
        own = {key: weights[key] for key in sorted(weights)[part::2]}
        save_file(own, folder / name)
        places |= dict.fromkeys(own, name)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return folder


def opened(path: Path) -> tuple[Any, ...]:
    """A model that is accepted can be used, if its weights are numbers: else generation says that they are not."""
    model, tok = load(path), load_tokenizer(path)
    if model.config != SMALL and all(weight.isfinite().all() for weight in model.state_dict().values()):
        generate(model, [Request(prompt=[1, 2], max_new=2)], on_error="return")
    return model.config, tensors(model), repr(tok)


def tensors(model: Thoughtbubbles) -> int:
    value = 0
    for name, weight in sorted(model.state_dict().items()):
        value = zlib.crc32(f"{name} {weight.dtype} {tuple(weight.shape)}".encode(), value)
        value = zlib.crc32(weight.contiguous().flatten().view(torch.uint8).numpy().data, value)
    return value


def repair_manifests(files: Files, touched: list[str]) -> Files:
    """Updates the manifests' entries of the files that have changed, as far as possible."""
    files = dict(files)
    for home in [name for name in files if name.rpartition("/")[2] == MANIFEST and isinstance(files[name], bytes)]:
        try:
            listed = json.loads(bytes(files[home]))
            prefix = home.removesuffix(MANIFEST)
            for name in touched:
                content = files.get(name)
                if name.startswith(prefix) and name != home and isinstance(content, bytes):
                    listed[name.removeprefix(prefix)] = {"bytes": len(content), "crc32": zlib.crc32(content)}
                elif name.startswith(prefix) and name != home:
                    listed.pop(name.removeprefix(prefix), None)
            files[home] = json.dumps(listed).encode()
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass
    return files


def runs(folder: Path) -> Sequence[FileBase]:
    """A run of two steps with two checkpoints: opened as a model, and resumed up to its next step."""
    from thoughtbubbles.data.synthetic import write_synthetic
    from thoughtbubbles.recipes import recipe
    from thoughtbubbles.train.config import DataConfig, EvalConfig, SaveConfig
    from thoughtbubbles.train.loop import train

    write_synthetic(folder / "corpus", n_tokens=2000, seed=0)
    config = replace(
        recipe("tiny-causal"),
        model=SMALL,
        tokens=64,
        tokens_per_step=32,
        device="cpu",
        data=DataConfig(mixture=(str(folder / "corpus"),)),
        save=SaveConfig(every=1, keep=2),
        eval=EvalConfig(every=0, tokens=64, sample_tokens=0),
        out=folder / "run",
    )
    with redirect_stderr(io.StringIO()):
        train(config)
    files = gather(folder / "run")
    read = ("step-*/model/*.json", "step-*/model/*.safetensors")
    return [
        FileBase(
            files=files, read=newest_model, checked=read, reason="another checkpoint is found", repair=repair_manifests
        ),
        *(
            FileBase(
                files=files,
                read=lambda path: resumed(path, config),
                checked=(),
                reason="an earlier checkpoint, or what the run's own log says",
                repair=repair_manifests,
            )
            for _ in range(2)
        ),
    ]


def newest_model(path: Path) -> tuple[Any, ...]:
    model = load(path)
    return model.config, tensors(model)


def resumed(path: Path, config: Any) -> tuple[Any, ...]:
    """Both steps are done: the run finds its newest checkpoint, compares, restores, evaluates and ends."""
    from thoughtbubbles.train.loop import train

    with redirect_stderr(io.StringIO()):
        result = train(replace(config, out=path), resume=True)
    return result.step, newest_model(path), sorted(found.name for found in path.iterdir())


def cards(folder: Path) -> Sequence[FileBase]:
    """A checkpoint inside its run, with results; and an export that already has a card."""
    run, model = folder / "run", folder / "run" / "step-00000080" / "model"
    save_model(model, small_model(), tokenizer=tokenizer("bytes"))
    lines = [{"step": 80, "tokens": 8000, "loss": 3.3}, {"step": 80, "validation_loss": {"books": 3.03, "web": 3.13}}]
    described = {"config": {"name": "first", "data": {"mixture": ["data/books"]}}, "versions": {"torch": "9"}}
    (run / "run.json").write_text(json.dumps(described))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    evaluate(folder / "data", model)
    files = gather(run)
    [results] = [json.loads(content) for name, content in files.items() if name.endswith("results.json")]
    assert results["budgets"]["others"]["2"]["tasks"]
    export = {name: files[f"step-00000080/model/{name}"] for name in ("config.json", WEIGHTS)}
    export |= {"modeling_thoughtbubbles.py": b"", "README.md": CARD}
    reason = "numbers of a run have no checksum"
    aims = ("run.json", "metrics.jsonl", "*results.json", "README.md", "*config.json")
    return [
        FileBase(files=files, at="step-00000080/model", read=written, aim=aims, is_given=False, reason=reason),
        FileBase(files=export, read=written, aim=aims, is_given=False, reason=reason),
    ]


CARD = b"""\
---
license: mit
---
# name

## Training

| a | b |

## Evaluation

The numbers below are those of the float32 weights.
"""


def evaluate(data: Path, model: Path) -> None:
    """Perplexity and a benchmark with two budgets, by the command."""
    from thoughtbubbles import cli
    from thoughtbubbles.data.synthetic import write_synthetic

    write_synthetic(data, n_tokens=2000, seed=0)
    (data / "piqa.validation.jsonl").write_text(
        '{"goal": "Open it", "sol1": "Turn.", "sol2": "Eat.", "label": 0}\n' * 2
    )
    words = ["eval", "--checkpoint", model, "--tasks", "perplexity", "piqa", "--data", data, "--data-dir", data]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        cli.main([*map(str, words), "--windows", "1", "--device", "cpu", "--budget", "1", "2"])


def written(path: Path) -> str:
    from thoughtbubbles.interop.card import card

    return card("name", SMALL, parameters=1, dtype="float32", folder=path, has_tokenizer=True)


def authors(folder: Path) -> Sequence[FileBase]:
    from thoughtbubbles.interop.authors import import_model, parameter_names

    config = replace(SMALL, selection="block", merge="residual", authors_compat=True, vocab_size=23)
    ours = Thoughtbubbles(config).state_dict()
    arrays = {
        theirs: (ours[own].T if theirs.endswith("kernel") else ours[own]).contiguous()
        for theirs, own in parameter_names(config).items()
    }
    plan = ["fork" if layer in config.fork_layers else "regular" for layer in range(config.n_layer)]
    told = {"n_head": 2, "n_embd": 8, "vocab_size": 23, "plan": plan, "bias": True, "block_size": 16}
    told |= {"max_block_size": 32, "averaging_method": "residual"}
    described = json.dumps({"config": told, "steps": 40}).encode()
    packed = io.BytesIO()
    np.savez(packed, **{name: array.numpy() for name, array in arrays.items()})
    dotted = save({name.replace("/", "."): array for name, array in arrays.items()})

    def imported(path: Path) -> tuple[Any, ...]:
        model = import_model(path)
        return tuple(asdict(model.config).items()), tensors(model)

    return [
        FileBase(files={"config.json": described, name: content}, at=at, read=imported, reason=NO_CHECKSUM)
        for name, content in (("params.npz", packed.getvalue()), ("params.safetensors", dotted))
        for at in ("", name)
    ]
