"""`thoughtbubbles reproduce`: protocols, the records of rows, and what is measured of them, on small models."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from interop.harness_benchmarks import RECORDS
from thoughtbubbles.checkpoint import checkpoints, load, load_tokenizer
from thoughtbubbles.cli import main
from thoughtbubbles.data.shards import Index, ShardWriter, open_dataset, read_index, write_index
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.evals.autoregressive import blockwise
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.recipes.reproduce.corpus import open_corpus, part_of
from thoughtbubbles.recipes.reproduce.measure import all_windows, copying, forks
from thoughtbubbles.recipes.reproduce.parts import GROUP, TUNED, Protocol, Row
from thoughtbubbles.recipes.reproduce.protocols import PROTOCOLS, protocol
from thoughtbubbles.recipes.reproduce.row import compare, make_record
from thoughtbubbles.recipes.reproduce.sentences import PRESET
from thoughtbubbles.recipes.reproduce.studies import study
from thoughtbubbles.recipes.reproduce.study import Place
from thoughtbubbles.recipes.reproduce.text_study import TextStudy
from thoughtbubbles.recipes.reproduce.training import Trained, curve, gpu_seconds, skipped_steps, speed, training_loss
from thoughtbubbles.train.config import OptimConfig
from thoughtbubbles.train.loop import train

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TOKENS = 165_333_214  # of the corpus of our own rows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """4,000 tokens: also the protocol `laptop` has only 15 steps on them."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    write_synthetic(folder, n_tokens=4_000, seed=0)
    return folder


def place_in(folder: Path, data: Path, **changes) -> Place:
    settings = {"protocol": "laptop", "data": data, "sources": {}, "data_dir": None}
    return Place(**{**settings, "runs": folder / "runs", "out": folder / "results", **changes})


SMALL = ModelConfig(n_layer=3, n_head=2, width=16, block_size=32, merge="original")
FORKS = {"fork_layers": (1, 2), "merge": "residual", "budget": 2}
# As the protocols of the package, with smaller models.
LITTLE = Protocol(
    what="15 steps of 8 × 32 tokens",
    model=SMALL,
    optim=OptimConfig(lr=4e-3, warmup=0.05),
    rows={"plain": Row(what="plain GPT", zero_shot=True), "r2": Row(what="2 streams per token", model=FORKS)},
    epochs=4.0,
    most=15 * 8 * 32,
    rows_per_step=8,
    evaluations=7,
    eval_tokens=512,
    ar_windows=4,
)


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """A place with the record of r2, seed 0."""
    place = place_in(tmp_path_factory.mktemp("done"), corpus, sources={"again": corpus})
    TextStudy("laptop", LITTLE).run_row("r2", 0, place)
    return place


def read(place: Place, row: str, seed: int = 0):
    return json.loads(place.record(row, seed).read_text())


def config(name: str, row: str, **changes):
    settings = {"seed": 0, "data": "corpus", "n_tokens": TOKENS, "vocab_size": 8192, **changes}
    return protocol(name).config(row, protocol=name, **settings)


# Protocols


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_row_is_a_run(name):
    found = protocol(name)
    for row in found.rows:
        model = config(name, row).model
        assert parameter_count(model) > 0
        if model.fork_layers and (name == "screen" or row.removeprefix("wider-").startswith(("state", "feedback"))):
            continue  # they compare merges
        assert model.merge == ("residual" if model.fork_layers else "original")


def test_the_protocol_long():
    plain = config("long", "plain")
    shape = plain.model.n_layer, plain.model.width, plain.model.n_head, plain.model.block_size, plain.model.vocab_size
    assert shape == (12, 256, 4, 512, 8192)
    assert (plain.rows, plain.steps) == (64, 20_182)  # four epochs
    assert 57 < plain.tokens / parameter_count(plain.model) < 60  # tokens per parameter
    r2 = config("long", "r2").model
    assert (r2.fork_layers, r2.budget, r2.selection) == ((3, 7, 11), 2, "causal")
    assert config("long", "r1").model == replace(r2, budget=1)
    assert config("long", "r4").model == replace(r2, budget=4)
    assert config("long", "block").model == replace(r2, selection="block")
    assert config("long", "head-gate").model == replace(plain.model, head_gate=True)
    assert config("long", "copy-3").model == replace(plain.model, copies=3)
    preset = config("long", "feedback-3-reach64-gate").model
    wide = {"width": 384, "n_head": 6}
    assert config("long", "wider-feedback-3-reach64-gate").model == replace(preset, **wide)
    assert config("long", "wider-gate").model == replace(plain.model, head_gate=True, **wide)
    assert config("long", "longer").steps == int(1.8 * 4 * TOKENS) // (64 * 512)
    three = {row for row, settings in protocol("long").rows.items() if settings.seeds == (0, 1, 2)}
    assert three == {"plain", "r1", "r2", "head-gate", "feedback-3-reach64-gate", "longer-gate"}


def test_the_presets_have_the_form_of_their_row():
    shape = {"n_layer": 12, "n_head": 4, "width": 256, "vocab_size": 8192}
    preset = ModelConfig.named("150m")
    assert (preset.fork_layers, preset.n_layer) == ((4,), 16), "a quarter of the way up"
    assert config("long", PRESET).model == replace(preset, **shape, fork_layers=(3,))
    assert config("long", "head-gate").model == replace(ModelConfig.named("150m-gate"), **shape)
    learned = config("screen", "feedback-3-reach64-scores-gate")
    assert learned.model == replace(config("long", PRESET).model, scores=True)
    elastic = config("screen", "feedback-3-reach64-elastic-gate")
    assert (elastic.model, set(elastic.budgets)) == (learned.model, {1, 1.25, 1.5, 1.75, 2})


def test_the_protocol_screen():
    """A third of `long`, each row at the settings of its kind; all reaches with all merges."""
    runs = {row: config("screen", row) for row in protocol("screen").rows}
    assert {run.steps for run in runs.values()} == {config("long", "plain").steps // 3}
    for run in runs.values():
        tuned = TUNED["r2" if run.model.fork_layers else "plain"]
        assert {name: getattr(run.optim, name) for name in tuned} == tuned
    gated = ("r1-gate", "r2-gate", "state-3-gate", "feedback-3-gate")
    for row in ("plain", "head-gate", "r1", "r2", "state-3", "feedback-3", *gated):
        assert runs[row].model == config("long", row).model
    r2 = runs["r2"].model
    usual = [run.model for run in runs.values() if not (run.forks_from or run.budgets)]
    for reach in (None, 64, 0):
        for merge in ("residual", "mixture", "forks"):
            assert usual.count(replace(r2, fork_reach=reach, merge=merge)) == 1
    assert runs["modern-r2"].model == replace(r2, block="modern")
    assert runs["feedback-6"].model == replace(runs["state-6"].model, feedback=True)
    late = runs["r2-late"]
    assert [late.budget_of(step) for step in (0, 5044, 5046, 6726)] == [1.0, 1.0, None, None]
    assert set(runs["r2-elastic"].budgets) == {1, 1.5, 2, 3, 4}


def test_the_protocol_short():
    run = config("short", "r2", n_tokens=140_000_000, vocab_size=50257)
    assert (run.model.n_layer, run.model.width, run.model.vocab_size) == (12, 512, 50304)
    assert (run.steps, run.optim.lr, run.optim.warmup, run.optim.floor) == (3072, 1.2e-3, 0.05, 0.1)
    assert round(parameter_count(run.model) / 1e6, 1) == 63.6


def test_rows_of_a_seed_come_together():
    found = [seed for _, seed in study("long").pairs()]
    assert found == sorted(found)
    assert len(found) == sum(len(row.seeds) for row in protocol("long").rows.values())


@pytest.mark.parametrize("kind", TUNED)
def test_long_is_tuned_by_its_sweep(kind):
    """As far as the sweep is recorded."""
    found = [json.loads(path.read_text()) for path in (RESULTS / "long-sweep").glob(f"{kind}-*.json")]
    planned = [row for row in protocol("long-sweep").rows if row.startswith(f"{kind}-")]
    if len(found) < len(planned):
        pytest.skip(f"{len(found)} of {len(planned)} rows of the sweep have a record")
    best = min(found, key=lambda record: record["validation"]["nats"])["config"]["optim"]
    assert {name: best[name] for name in TUNED[kind]} == TUNED[kind]


# Text


def test_the_checksum_does_not_depend_on_how_shards_are_cut(corpus, tmp_path):
    index = read_index(corpus)
    splits = {}
    for split in index.splits:
        writer = ShardWriter(tmp_path, split, kind="text", shard_tokens=700)
        for shard in open_dataset(corpus, split=split).shards:
            writer.add(shard.tokens)
        writer.close()
        splits[split] = writer.finished
    write_index(tmp_path, Index(index.kind, index.tokenizer, index.end_of_text, index.vocab_size, splits, {}))
    assert len(splits["train"]) > len(index.splits["train"])
    assert open_corpus(tmp_path).checksum == open_corpus(corpus).checksum


def test_part_of_a_corpus_has_every_kth_document(tmp_path):
    documents = [bytes([65 + n]) * (5 + n) for n in range(20)]
    end = tokenizer("bytes").end_of_text
    folder = prepared(tmp_path / "all", documents)
    n_tokens = open_corpus(folder).n_tokens
    part = part_of(folder, tmp_path / "part", n_tokens=n_tokens // 4)
    ids = open_dataset(part, split="train").shards[0].tokens.tolist()
    assert len(ids) == n_tokens // 4
    firsts = [chr(ids[0])] + [chr(after) for before, after in pairwise(ids) if before == end]
    assert "".join(firsts) == "AEIMQB"  # documents 0, 4, 8, …, which are not long enough, then 1
    whole, kept = (open_dataset(each, split="val").shards[0].tokens.tolist() for each in (folder, part))
    assert whole == kept
    assert part_of(folder, tmp_path / "part", n_tokens=n_tokens // 4) == part  # already there
    with pytest.raises(ValueError, match="but 10,000 are needed"):
        part_of(folder, tmp_path / "other", n_tokens=10_000)


def prepared(folder: Path, documents: list[bytes]) -> Path:
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": each.decode()}) + "\n" for each in documents))
    held = folder.with_name("held.jsonl")
    held.write_text(json.dumps({"text": "held out"}) + "\n")
    main(["prepare", str(source), "--val", str(held), "--tokenizer", "bytes", "--out", str(folder), "--processes", "1"])
    return folder


def test_examples_are_not_text(tmp_path):
    source = tmp_path / "questions.jsonl"
    source.write_text("".join(json.dumps({"question": f"{n}?", "answer": f"{n}"}) + "\n" for n in range(40)))
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"question": "x?", "answer": "y"}) + "\n")
    main(["prepare", str(source), "--val", str(held), "--tokenizer", "bytes", "--out", str(tmp_path / "data")])
    with pytest.raises(ValueError, match="has examples; a protocol needs text"):
        open_corpus(tmp_path / "data")


# Records


def test_a_record_says_everything_about_its_row(done, corpus):
    record = read(done, "r2")
    assert (record["protocol"], record["row"], record["seed"], record["steps"]) == ("laptop", "r2", 0, 15)
    assert record["tokens"] == 15 * 8 * 32
    assert record["config"]["model"]["fork_layers"] == [1, 2]
    assert record["text"] == {"tokens": 4000, "tokenizer": "bytes", "checksum": open_corpus(corpus).checksum}
    assert "out" not in record["config"]  # no path of the machine
    assert str(corpus) not in json.dumps(record)
    lines = [json.loads(line) for line in (done.run("r2", 0) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    (speed,) = (line["tokens_per_second"] for line in lines if "tokens_per_second" in line)  # logged at the end only
    assert record["gpu_seconds"] == pytest.approx(15 * 8 * 32 / speed)
    assert record["training_loss"] == [pytest.approx(sum(losses) / 15, abs=1e-5)]
    assert record["skipped_steps"] == 0
    assert [step for step, _ in record["curve"]] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert len(done.record("r2", 0).read_text().splitlines()) == len(record) + 2  # one line per field


def test_the_validation_loss_is_that_of_every_window(done, corpus):
    record = read(done, "r2")["validation"]
    model, words = load(done.run("r2", 0)), load_tokenizer(done.run("r2", 0))
    windows = all_windows(done.run("r2", 0), model, words, corpus)
    scores = blockwise(model, windows, batch=3)
    assert record["nats"] == pytest.approx(scores.mean, abs=1e-6)
    assert record["tokens"] == open_dataset(corpus, split="val").n_tokens - 1 == scores.n_tokens
    assert record["windows"] == [pytest.approx(mean, abs=2e-5) for mean in scores.window_means]
    targets = windows.targets[windows.counted].tolist()
    assert record["bytes"] == sum(target != words.end_of_text for target in targets)
    assert record["bits_per_byte"] == pytest.approx(record["nats"] * record["tokens"] / math.log(2) / record["bytes"])
    again = read(done, "r2")["by_source"]["again"]
    assert again == {name: value for name, value in record.items() if name != "windows"}


def test_causal_models_have_the_same_loss_token_by_token(done):
    found = read(done, "r2")["autoregressive"]
    assert found["windows"] == 4
    assert abs(found["nats"]["autoregressive"] - found["nats"]["blockwise"]) < 1e-4


def test_nothing_is_run_twice(done, capsys):
    before = done.record("r2", 0).stat().st_mtime_ns
    TextStudy("laptop", LITTLE).run_row("r2", 0, done)
    words = ["reproduce", "laptop", "--data", str(done.data), "--runs", str(done.runs), "--out", str(done.out)]
    main([*words, "--only", "r2", "--seed", "0"])
    assert done.record("r2", 0).stat().st_mtime_ns == before
    assert "r2, seed 0: has its record" in capsys.readouterr().out


def test_a_stopped_row_resumes_to_the_same_bits(done, corpus, tmp_path):
    """A run that ended at step 8, as far as its folder shows."""
    place = place_in(tmp_path, corpus, sources=done.sources)
    run = LITTLE.config("r2", protocol="laptop", seed=0, data=str(corpus), n_tokens=4000, vocab_size=257)
    train(replace(run, out=place.run("r2", 0), save=replace(run.save, keep=100)))
    for checkpoint in checkpoints(place.run("r2", 0)):
        if int(checkpoint.name[5:]) > 8:
            shutil.rmtree(checkpoint)
    again, before = make_record(LITTLE, "r2", 0, place), read(done, "r2")
    assert (before["resumed_at"], again["resumed_at"]) == (None, 8)
    for name in ("validation", "by_source", "training_loss", "curve", "forks", "copying"):
        assert again[name] == before[name]


def test_a_repeated_row_is_compared_bit_by_bit(done):
    before = read(done, "r2")
    nats = before["validation"]["nats"]
    assert compare(before, before) == (True, f"r2, seed 0: validation loss {nats!r} again, to the bit")
    other = {**before, "validation": {**before["validation"], "nats": nats + 1e-9}}
    is_same, line = compare(before, other)
    assert not is_same
    assert "differs by +1.00e-09" in line


def test_the_speed_is_that_of_nine_in_ten_groups():
    """A device that another process used for most of the time."""
    lines = [{"tokens_per_second": float(each)} for each in (5, 100, 5, 5, 5, 100, 5, 5, 5, 5, 5)]
    assert speed(lines, 0.9) == 100
    assert speed(lines, 0.5) == 5


def test_losses_that_are_not_finite_are_counted_and_left_out_of_the_mean():
    """Metrics have them as text, since JSON has no such numbers. A loss may be finite where the gradient is not."""
    lines = [{"loss": 2.0, "skipped": False} for _ in range(GROUP)] + [{"validation_loss": {"text": 2.0}}]
    lines[3] = {"loss": "nan", "skipped": True}
    lines[4] = {"loss": "inf", "skipped": True}
    lines[5] = {"loss": 2.0, "gradient_norm": "nan", "skipped": True}
    lines += [{"loss": 1.0, "skipped": False}, {"loss": "nan", "skipped": True}]
    assert training_loss(lines) == [2.0, 1.0]
    assert skipped_steps(lines) == 4
    evaluations = [{"step": 1, "validation_loss": {"text": "nan"}}, {"step": 2, "validation_loss": {"text": 3.0}}]
    assert curve(evaluations) == [(2, 3.0)]


def test_the_time_of_a_run_that_forks_late():
    """A quarter of the steps at half the speed, each part at its own; of drawn budgets the median speed."""
    lines = [{"step": step, "tokens_per_second": 100.0 if step <= 150 else 50.0} for step in range(10, 201, 10)]
    late = replace(config("screen", "r2-late"), tokens=200 * 64 * 512)
    run = Trained(config=late, checkpoint=Path(), step=200, seconds=0.0, resumed_at=None, lines=lines)
    assert late.steps_before_forks == 150
    assert gpu_seconds(run) == pytest.approx(64 * 512 * (150 / 100 + 50 / 50))
    drawn = replace(config("screen", "r2-elastic"), tokens=200 * 64 * 512)
    slow = [{"step": step, "tokens_per_second": 10.0 + step} for step in range(10, 201, 10)]
    assert gpu_seconds(replace(run, config=drawn, lines=slow)) == pytest.approx(64 * 512 * 200 / 110)


def test_text_that_rows_share_is_written_once(corpus, tmp_path):
    """Rows that start at the same time wait for the one that writes it."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: part_of(corpus, tmp_path / "part", n_tokens=2000), range(4)))
    assert set(found) == {tmp_path / "part"}
    assert open_corpus(tmp_path / "part").n_tokens == 2000


# A protocol that stops at the best validation loss, and its ensemble


@pytest.fixture(scope="module")
def best(corpus, tmp_path_factory):
    """The records of two plain models and their ensemble. A high learning rate makes the loss rise again."""
    found = replace(
        LITTLE,
        optim=OptimConfig(lr=0.3, warmup=0.1, schedule="constant"),
        rows={"plain": Row(what="plain GPT", seeds=(0, 1)), "ensemble": Row(what="two of them", ensemble=2)},
        text=2000,
        is_best=True,
        evaluations=10,
        eval_tokens=1 << 14,
        ar_windows=0,
    )
    place = place_in(tmp_path_factory.mktemp("best"), corpus)
    records = {(row, seed): make_record(found, row, seed, place) for row, seed in TextStudy("laptop", found).pairs()}
    return place, records


@pytest.mark.slow
def test_the_best_weights_are_measured(best):
    place, records = best
    rose = 0
    for seed in (0, 1):
        record = records["plain", seed]
        step, loss = min(record["curve"], key=lambda point: point[1])
        assert record["steps"] == step
        assert record["tokens"] == step * 8 * 32
        assert record["validation"]["nats"] == pytest.approx(loss, abs=1e-4)
        rose += step < record["curve"][-1][0]
        assert record["text"]["tokens"] == 2000
        assert len(checkpoints(place.run("plain", seed))) <= 2  # the best one, and the last one to resume from
    assert rose, "no curve rose again, so this test has shown nothing"


def test_an_ensemble_averages_probabilities(best):
    place, records = best
    data = next((place.runs / "laptop").glob("data-*"))
    steps = [records["plain", seed]["steps"] for seed in (0, 1)]
    folders = [place.run("plain", seed) / f"step-{step:08d}" for seed, step in zip((0, 1), steps, strict=True)]
    models = [load(folder) for folder in folders]
    windows = all_windows(folders[0], models[0], load_tokenizer(folders[0]), data)
    with torch.no_grad():
        probs = [
            model(windows.ids, lengths=windows.lengths, want=("log_probs",)).log_probs.double().exp()
            for model in models
        ]
    picked = sum(probs).div(2).gather(-1, windows.targets.clamp(min=0)[..., None])[..., 0]
    expected = -picked.log()[windows.counted].mean().item()
    found = records["ensemble", 0]
    assert found["validation"]["nats"] == pytest.approx(expected, abs=1e-5)
    assert found["parameters"] == 2 * records["plain", 0]["parameters"]
    assert found["flops"] == pytest.approx(sum(records["plain", seed]["flops"] for seed in (0, 1)))


# What is measured


def test_copying_is_the_loss_on_a_repetition():
    """A model that knows nothing has ln V everywhere; end-of-text is never among the random tokens."""
    model = Thoughtbubbles(replace(SMALL, vocab_size=384, block_size=256)).eval()
    torch.nn.init.zeros_(model.embedding.weight)
    found = copying(model, tokenizer("bytes"))
    assert found["tokens"] == 128
    assert found["first"] == pytest.approx(math.log(384), abs=1e-5)
    assert found["second"] == pytest.approx(math.log(384), abs=1e-5)


class Copier(Thoughtbubbles):
    """Predicts the token that followed the last occurrence of the current one."""

    def forward(self, ids, *, targets=None, **_):
        seen = [{} for _ in ids]
        nll = torch.full(ids.shape, 9.0)
        for row, tokens in enumerate(ids.tolist()):
            for t, token in enumerate(tokens):
                if t:
                    seen[row][tokens[t - 1]] = token
                if seen[row].get(token) == int(targets[row, t]):
                    nll[row, t] = 0.0
        return type("Output", (), {"token_nll": nll})


def test_copying_sees_a_model_that_copies():
    """Most tokens of the repetition follow from the last occurrence of the one before (not those that occur twice)."""
    found = copying(Copier(replace(SMALL, vocab_size=384, block_size=256)), tokenizer("bytes"))
    assert found["first"] > 8.5
    assert found["second"] < 4.0


@pytest.mark.parametrize(("bias", "alive"), [(60, 1.0), (-4, 0.0)])
def test_streams_with_a_low_score_are_not_alive(bias, alive, corpus, done):
    """σ(60) is 1, and σ(−4) is 0.018, below 0.05, whatever the input: the weights of the scores are 0."""
    config = replace(SMALL, fork_layers=(1,), merge="residual", score_bias=bias, vocab_size=384)
    model = Thoughtbubbles(config).eval()
    torch.nn.init.zeros_(model.forks["1"].score.weight)
    windows = all_windows(done.run("r2", 0), model, tokenizer("bytes"), corpus)
    (found,) = forks(model, windows)
    assert found["alive"] == alive
    assert found["streams"] == 2.0


@pytest.mark.slow
def test_a_row_answers_the_benchmarks(corpus, tmp_path):
    benchmarks = tmp_path / "benchmarks"
    benchmarks.mkdir()
    for name, records in RECORDS.items():
        (benchmarks / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = replace(LITTLE, model=replace(SMALL, block_size=128), rows_per_step=2, ar_windows=0)
    record = make_record(found, "plain", 0, place_in(tmp_path, corpus, data_dir=benchmarks))
    scores = record["zero_shot"]
    assert list(scores) == ["lambada", "hellaswag", "blimp", "piqa", "arc_easy", "arc_challenge"]
    assert scores["hellaswag"]["documents"] == 2
    assert scores["hellaswag"]["chance"] == 0.25
    assert 0 <= scores["blimp"]["accuracy"] <= 1
    (benchmarks / "piqa.validation.jsonl").unlink()
    with pytest.raises(ValueError, match="piqa"):
        make_record(found, "plain", 1, place_in(tmp_path, corpus, data_dir=benchmarks))


# The command


@pytest.mark.slow
def test_the_command(corpus, tmp_path, capfd, monkeypatch):
    """Two rows, each in its own process; their list; and both again, at the same time, to the bit."""
    words = ["reproduce", "laptop", "--data", str(corpus), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    main([*words, "--only", "plain", "r1", "--seed", "0"])
    found = sorted(path.name for path in (tmp_path / "laptop").iterdir())
    assert found == ["plain-seed0.json", "r1-seed0.json"]
    text = (tmp_path / "laptop" / "r1-seed0.json").read_text()
    loss = json.loads(text)["validation"]["nats"]
    capfd.readouterr()
    main(["reproduce", "laptop", "--list", "--out", str(tmp_path)])
    assert f"{loss:.4f}" in capfd.readouterr().out
    main([*words, "--only", "plain", "r1", "r2", "--seed", "0", "--again", "--jobs", "2"])
    shown = capfd.readouterr().out
    again = re.findall(r"(\w+), seed 0: validation loss ([\d.]+) again, to the bit \(\d+ s; (\d of 2)\)", shown)
    assert dict(each[:2] for each in again)["r1"] == repr(loss)
    assert sorted(each[2] for each in again) == ["1 of 2", "2 of 2"]
    assert "validation loss" in (tmp_path / "runs" / "laptop" / "plain-seed0-again.log").read_text()
    assert "r2, seed 0: no record yet" in shown
    assert (tmp_path / "laptop" / "r1-seed0.json").read_text() == text
    assert not list((tmp_path / "runs").glob("again-*"))


def test_an_ensemble_is_run_after_the_rows_whose_runs_it_uses(corpus, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "thoughtbubbles.recipes.reproduce.command.run_apart", lambda *args, **how: calls.append(args) or []
    )
    monkeypatch.setattr(TextStudy, "check", lambda *_: None)
    words = ["--data", str(corpus), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--jobs", "9"]
    main(["reproduce", "scarce", *words])
    first, second = ([row for row, _ in todo] for todo, *_ in calls)
    assert sorted(first) == ["feedback-3-reach64-gate", "head-gate", "plain", "plain", "r1", "r2", "r4", "wider"]
    assert second == ["ensemble"]


@pytest.mark.slow
def test_rows_that_fail_beside_each_other_are_named_with_their_logs(corpus, tmp_path, capfd):
    words = ["reproduce", "laptop", "--data", str(corpus), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    runs = tmp_path / "runs" / "laptop"
    runs.mkdir(parents=True)
    for row in ("plain", "r1"):
        (runs / f"{row}-seed0").write_text("a file where the run's folder should be")
    with pytest.raises(SystemExit, match="2 of 2 rows failed: "):
        main([*words, "--only", "plain", "r1", "--seed", "0", "--jobs", "2"])
    said = capfd.readouterr().out
    for row in ("plain", "r1"):
        assert re.search(rf"{row}, seed 0: thoughtbubbles reproduce: .+ \(exit code 1; all of it: {runs}/{row}-", said)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGTERM, 1), (signal.SIGHUP, 2)])
def test_a_signal_stops_after_saving_and_the_command_resumes(number, jobs, tmp_path):
    """Two rows, so the training is in a process of the process that gets the signal. Signals as a terminal sends them:
    to all processes of its foreground group."""
    data = tmp_path / "corpus"
    write_synthetic(data, n_tokens=40_000, seed=0)  # 156 steps
    words = ["reproduce", "laptop", "--data", str(data), "--only", "plain", "r1", "--seed", "0", "--jobs", str(jobs)]
    command = [sys.executable, "-m", "thoughtbubbles", *words, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    metrics = tmp_path / "runs" / "laptop" / "plain-seed0" / "metrics.jsonl"
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None, "it ended"
        assert time.monotonic() < until, "it never trained"
        time.sleep(0.1)
    os.killpg(process.pid, number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + number
    said += metrics.parent.with_name("plain-seed0.log").read_text() if jobs > 1 else ""
    assert "the same command resumes it" in said
    (kept,) = checkpoints(metrics.parent)
    assert not (tmp_path / "laptop").exists()
    subprocess.run([*command, "--only", "plain"], check=True, capture_output=True)
    record = json.loads((tmp_path / "laptop" / "plain-seed0.json").read_text())
    assert record["resumed_at"] == int(kept.name[5:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["laptop", "--data", "DATA", "--only", "r22"], "--only r22: laptop has no such row; did you mean"),
        (["laptop"], "--data is missing: laptop needs a corpus"),
        (["all", "--data", "DATA"], "all: goes with --list or --report"),
        (["laptop", "--data", "DATA", "--val", "wiki"], "--val wiki: give NAME=DIR, such as wiki=data/val-wiki"),
        (["laptop", "--data", "DATA", "--val", "a=DATA", "a=DATA"], "a is given twice"),
        (["laptop", "--data", "DATA", "--val", "wiki=nowhere"], "nowhere/index.json is missing"),
        (["laptop", "--data", "DATA", "--seed", "-1"], "--seed -1: give 0 or more"),
        (["laptop", "--data", "DATA", "--jobs", "0"], "--jobs 0: give 1 or more"),
        (["long", "--data", "DATA", "--data-dir", "nowhere"], "--data-dir nowhere: does not exist"),
        (["laptop", "--data", "nowhere", "--only", "r2", "--seed", "0"], "nowhere/index.json is missing"),
        (["scarce", "--data", "DATA", "--only", "plain", "--seed", "0"], "but 20,000,000 are needed"),
    ],
)
def test_mistakes_end_in_one_line(words, message, corpus, tmp_path):
    words = [word.replace("DATA", str(corpus)) for word in words]
    with pytest.raises(SystemExit) as raised:
        main(["reproduce", *words, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_records_of_other_text_are_noticed_before_training(done, tmp_path):
    other = tmp_path / "other"
    write_synthetic(other, n_tokens=4_000, seed=1)
    words = ["reproduce", "laptop", "--only", "plain", "--seed", "0", "--runs", str(tmp_path / "runs")]
    with pytest.raises(SystemExit, match=r"laptop/r2-seed0\.json is a record of other text than --data"):
        main([*words, "--data", str(other), "--out", str(done.out)])
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_another_run_is_not_resumed(done, tmp_path):
    other = tmp_path / "other"
    write_synthetic(other, n_tokens=4_000, seed=1)
    place = place_in(tmp_path, other, runs=done.runs)
    with pytest.raises(ValueError, match="cannot be resumed: delete it, or give another --runs"):
        make_record(LITTLE, "r2", 0, place)
