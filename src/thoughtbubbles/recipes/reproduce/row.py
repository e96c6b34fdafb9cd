"""Runs one row of a text protocol for one seed: trains or resumes, and measures.

The record has everything that a table or plot needs, and where it comes from.
"""

import shutil
import statistics
from dataclasses import replace
from typing import Any

from thoughtbubbles.checkpoint import checkpoints, find_model
from thoughtbubbles.distributed import World, joined
from thoughtbubbles.files import read_object
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.provenance import device_name, provenance
from thoughtbubbles.recipes.reproduce.corpus import Corpus, open_corpus, part_of
from thoughtbubbles.recipes.reproduce.measure import measure, zero_shot
from thoughtbubbles.recipes.reproduce.parts import PLAIN, Protocol
from thoughtbubbles.recipes.reproduce.study import Place
from thoughtbubbles.recipes.reproduce.training import (
    Trained,
    curve,
    gpu_seconds,
    skipped_steps,
    speed,
    train_run,
    training_loss,
)

VERSION = 1


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
    assert place.data is not None, "the command asks for it"
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
    trained = train_run(replace(config, out=place.run(row, seed)))
    if not found.is_best:
        return trained
    best = best_step(trained.lines)
    kept = {int(each.name[5:]): each for each in checkpoints(trained.config.folder)}
    for step, folder in kept.items():
        if step not in (best, trained.step):
            shutil.rmtree(folder)
    return replace(trained, checkpoint=kept[best], step=best)


def best_step(lines: list[dict[str, Any]]) -> int:
    return min(curve(lines), key=lambda point: point[1])[0]


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
    seconds = [gpu_seconds(each) for each in trained]
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
        "tokens_per_second": statistics.fmean(n / time for n, time in zip(tokens, seconds, strict=True)),
        "median_tokens_per_second": statistics.fmean(speed(each.lines, 0.5) for each in trained),
        "gpu_seconds": sum(seconds),
        "wall_seconds": sum(each.seconds for each in trained),
        "resumed_at": first.resumed_at,
        "skipped_steps": sum(skipped_steps(each.lines) for each in trained),
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
