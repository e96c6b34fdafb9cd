"""Runs one row of a text protocol for one seed: trains or resumes, and measures.

The record has everything that a table or plot needs, and where it comes from.
"""

import json
import shutil
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thoughtbubbles.checkpoint import checkpoints, find_model
from thoughtbubbles.distributed import World, joined
from thoughtbubbles.files import read_object
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.provenance import device_name, provenance
from thoughtbubbles.recipes.reproduce.corpus import Corpus, open_corpus, part_of
from thoughtbubbles.recipes.reproduce.measure import measure, zero_shot
from thoughtbubbles.recipes.reproduce.protocols import GROUP, PLAIN, Protocol
from thoughtbubbles.recipes.reproduce.study import Place, Stopped
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.loop import train

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run, and the checkpoint to be measured."""

    config: RunConfig
    checkpoint: Path
    step: int
    seconds: float  # of this process
    resumed_at: int | None
    lines: list[dict[str, Any]]  # of metrics.jsonl


def make_record(found: Protocol, row: str, seed: int, place: Place) -> dict[str, Any]:
    settings = found.row(row, protocol=place.protocol)
    corpus = text_of(found, place)
    members = [(row, seed)]
    if settings.ensemble > 1:
        members = [(PLAIN, seed + i) for i in range(settings.ensemble)]
    trained = [train_row(found, *member, place, corpus) for member in members]
    with joined("auto") as world:
        models = [find_model(each.checkpoint) for each in trained]
        measured = measure(models, corpus.folder, place.sources, ar_windows=found.ar_windows, device=world.device)
        if settings.zero_shot and place.data_dir is not None:
            out = place.run(row, seed) / "zero-shot"
            measured["zero_shot"] = zero_shot(models[0], data_dir=place.data_dir, out=out, world=world)
        return describe(found, row, seed, place, corpus, trained, world) | measured


def text_of(found: Protocol, place: Place) -> Corpus:
    """The corpus, or the part of it that the protocol uses."""
    assert place.data is not None, "TextStudy.check asks for it"
    corpus = open_corpus(place.data)
    if found.text is None:
        return corpus
    folder = place.runs / place.protocol / f"data-{corpus.checksum}-{found.text}"
    return open_corpus(part_of(place.data, folder, n_tokens=found.text))


def check_text(place: Place, corpus: Corpus) -> None:
    """Records of other text in the same folder could never be compared with this one: say so before training."""
    for path in sorted((place.out / place.protocol).glob("*-seed*.json")):
        other = read_object(path).get("text", {}).get("checksum")
        if other != corpus.checksum:
            raise ValueError(
                f"--out {place.out}: {place.protocol}/{path.name} is a record of other text than --data {place.data}; "
                "give another --out"
            )


def train_row(found: Protocol, row: str, seed: int, place: Place, corpus: Corpus) -> Trained:
    config = found.config(
        row,
        protocol=place.protocol,
        seed=seed,
        data=str(corpus.folder),
        n_tokens=corpus.n_tokens,
        vocab_size=corpus.vocab_size,
    )
    folder = place.run(row, seed)
    config, earlier = replace(config, out=folder), checkpoints(folder)
    begun = time.monotonic()
    try:
        result = train(config, resume=bool(earlier))
    except ValueError as error:
        if not earlier:
            raise
        raise ValueError(f"{folder} cannot be resumed: delete it, or give another --runs ({error})") from None
    if not result.finished:
        raise Stopped(result)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step = best_step(lines) if found.is_best else result.step
    for other in checkpoints(folder):
        if found.is_best and int(other.name[5:]) not in (step, result.step):
            shutil.rmtree(other)
    return Trained(
        config=config,
        checkpoint=next(each for each in checkpoints(folder) if int(each.name[5:]) == step),
        step=step,
        seconds=time.monotonic() - begun,
        resumed_at=int(earlier[-1].name[5:]) if earlier else None,
        lines=lines,
    )


def curve(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Validation loss by step, on the part of the text that is used while training."""
    return [(line["step"], next(iter(line["validation_loss"].values()))) for line in lines if "validation_loss" in line]


def best_step(lines: list[dict[str, Any]]) -> int:
    return min(curve(lines), key=lambda point: point[1])[0]


def training_loss(lines: list[dict[str, Any]]) -> list[float]:
    """The mean of every `GROUP` steps."""
    losses = [line["loss"] for line in lines if "loss" in line]
    return [round(statistics.fmean(losses[i : i + GROUP]), 5) for i in range(0, len(losses), GROUP)]


def speed(lines: list[dict[str, Any]], share: float) -> float:
    """Tokens per second of a group of steps; this share of the groups was slower."""
    speeds = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    return speeds[int(share * (len(speeds) - 1))]


def describe(
    found: Protocol,
    row: str,
    seed: int,
    place: Place,
    corpus: Corpus,
    trained: list[Trained],
    world: World,
) -> dict[str, Any]:
    """What the row is, where it was run and what it cost; an ensemble costs the sum of its members."""
    first, config = trained[0], trained[0].config
    settings = {name: value for name, value in config.as_dict().items() if name not in ("out", "data", "name")}
    speeds = [speed(each.lines, 0.9) for each in trained]
    tokens = [each.step * each.config.tokens_per_step for each in trained]
    peaks = [line["peak_memory_GiB"] for each in trained for line in each.lines if "peak_memory_GiB" in line]
    source = provenance()
    return {
        "version": VERSION,
        "protocol": place.protocol,
        "row": row,
        "seed": seed,
        "what": found.rows[row].what,
        "parameters": sum(parameter_count(each.config.model) for each in trained),
        "steps": sum(each.step for each in trained),
        "tokens": sum(tokens),
        "epochs": tokens[0] / corpus.n_tokens,
        "flops": sum(each.config.flops_per_row * each.config.rows * each.step for each in trained),
        "tokens_per_second": statistics.fmean(speeds),
        "median_tokens_per_second": statistics.fmean(speed(each.lines, 0.5) for each in trained),
        "gpu_seconds": sum(n / speed for n, speed in zip(tokens, speeds, strict=True)),
        "wall_seconds": sum(each.seconds for each in trained),
        "resumed_at": first.resumed_at,
        "peak_memory_GiB": max(peaks) if peaks else None,
        "device": device_name(world.device),
        "command": f"thoughtbubbles reproduce {place.protocol} --data CORPUS --only {row} --seed {seed}",
        **{name: source[name] for name in ("commit", "versions", "time")},
        "text": {
            "tokens": corpus.n_tokens,
            "tokenizer": corpus.tokenizer,
            "checksum": corpus.checksum,
        },
        "config": settings,
        "curve": [[step, round(loss, 5)] for step, loss in curve(first.lines)],
        "training_loss": training_loss(first.lines),
    }


def compare(before: dict[str, Any], again: dict[str, Any]) -> tuple[bool, str]:
    """Whether a repeated row has the same validation loss, to the bit; and that in one line."""
    old, new = (record["validation"]["nats"] for record in (before, again))
    name = f"{before['row']}, seed {before['seed']}"
    if old == new and before["validation"]["windows"] == again["validation"]["windows"]:
        return True, f"{name}: validation loss {new!r} again, to the bit"
    where = f" (then on {before['device']}, torch {before['versions']['torch']})"
    return False, f"{name}: validation loss {new!r}, was {old!r}: differs by {new - old:+.2e}{where}"
