"""A run resumes from its folder alone, longer or shorter if its schedule allows; a new one takes a model's shape."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import thoughtbubbles
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.cli import main
from thoughtbubbles.train.loop import train
from thoughtbubbles.train.resume import read_run
from train.runs import assert_same_bits, losses, metrics, small_run, small_train


def command(*words: object) -> object:
    """In this process; returns the exit code or message."""
    try:
        main([str(word) for word in words])
    except SystemExit as stopped:
        return stopped.code
    return 0


def forget_after(run: Path, step: int) -> None:
    for folder in run.glob("step-*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Path:
    """A run of 8 steps, started by command, with settings that no recipe has."""
    out = tmp_path_factory.mktemp("once") / "run"
    assert command(*small_train(out, "--optim.lr", "3e-3", "--seed", "7", "--save.keep", "9")) == 0
    return out


@pytest.fixture
def run(once, tmp_path) -> Path:
    return shutil.copytree(once, tmp_path / "moved")


def test_nothing_is_typed_again(once, run):
    forget_after(run, 3)
    assert command("train", "--resume", run) == 0
    assert metrics(run) == metrics(once)
    assert_same_bits(run / "step-00000008", once / "step-00000008")
    described = json.loads((run / "run.json").read_text())
    assert [entry["step"] for entry in described["resumed"]] == [3]
    assert command("train", f"--resume={run}", "--log.every", 5, "--eval.prompts", "12+") == 0  # what may change, may
    assert read_run(run).log.every == 5  # as it was last resumed
    assert read_run(run).optim.lr == 3e-3


def test_a_run_without_a_checkpoint_starts_from_its_folder(once, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(once / "run.json", tmp_path / "run")
    assert command("train", "--save.every", 0, "--resume", tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(once)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--resume", "RUN", "--optim.lr", "1e-3"), "optim.lr was 0.003, is 0.001"),
        (("--resume", "RUN", "--tokens", "1e4"), "tokens was 2048, is 10000.*cosine.*--init-from"),
        (("--resume", "RUN", "--out", "elsewhere"), "a run is resumed in its own folder"),
        (("tiny-causal", "--resume", "RUN"), "give the folder alone"),
        (("--tokens", "5"), "a recipe comes first, or --resume DIR"),
        (("--resume",), "a recipe comes first, or --resume DIR"),
        (("--resume", "nowhere"), "--resume nowhere: contains no run.json"),
        (("--resume", "x" * 5000), "File name too long"),
    ],
)
def test_what_cannot_be_resumed(once, words, message):
    said = str(command("train", *(once if word == "RUN" else word for word in words)))
    assert said.startswith("thoughtbubbles train: ")
    assert re.search(message, said), said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"run\.json contains a JSON list"),
        ("{", r"run\.json: not JSON"),
        ('{"a":' * 100_000, r"run\.json: the JSON is nested too deeply"),
        ("{}", r"run\.json: config is not an object"),
        ('{"config": {}}', r"run\.json: name is missing"),
        ('{"config": {"seeds": 1}}', r"run\.json: unknown field seeds"),
        ('{"resumed": 3}', "resumed is not a list"),
        ('{"resumed": [[]]}', "resumed is not a list"),
        ({"tokens": True}, "--tokens True: give a whole number"),
        ({"tokens": 10**21}, "--tokens 1000000000000000000000"),
        ({"seed": 1.5}, "--seed 1.5: give a whole number"),
        ({"seed": 10**30}, "--seed"),
        ({"profile": 1}, "--profile 1: give True or False"),
        ({"out": 3}, "--out 3: give a path"),
        ({"data": []}, r"run\.json: data is not an object"),
        ({"data": {"mixture": "text"}}, r"--data.mixture 'text': give a tuple \(in JSON a list\), each text"),
        ({"data": {"mixture": [3]}}, "--data.mixture"),
        ({"optim": {"betas": [0.9]}}, "--optim.betas"),
        ({"optim": {"lr": "fast"}}, "--optim.lr 'fast': give a number"),
        ({"optim": {"lr": 10**400}}, r"--optim.lr .*: give a number"),
        ({"optim": {"clip": 10**400}}, r"--optim.clip .*: give a number"),
        ({"log": {"peak_tflops": 10**400}}, r"--log.peak-tflops .*: give a number"),
        ({"optim": {"schedule": ["cosine"]}}, "--optim.schedule .*: give one of cosine, wsd, constant"),
        ({"compute": {"micro_batch_size": False}}, "--compute.micro-batch-size False"),
        ({"log": {"every": 10**16}}, "--log.every"),
        ({"model": {"n_layer": 2, "n_head": 2}}, r"run\.json: model.width is missing"),
        ({"model": {"n_layer": True, "n_head": 2, "width": 8}}, "n_layer = True"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_a_damaged_description_is_one_line(once, tmp_path, text, message):
    if isinstance(text, dict):
        described = json.loads((once / "run.json").read_text())
        for name, value in text.items():
            described["config"][name] = value
        text = json.dumps(described)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        read_run(tmp_path)
    assert "run.json" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_a_longer_run_is_the_one_that_had_that_length_from_the_start(schedule, tmp_path):
    """Extended twice within its warm-up, which was 3 of 4 steps: for a run of 8 steps that is a fraction of 3/8."""
    options = {
        "optim_schedule": schedule,
        "optim_decay": 0.25,
        "save_every": 1,
        "save_keep": 9,
        "eval_every": 0,
        "eval_sample_tokens": 0,
    }
    whole = train(small_run(tmp_path / "whole", steps=8, optim_warmup=0.375, **options))
    short = small_run(tmp_path / "longer", steps=4, optim_warmup=0.75, **options)
    train(short)
    if schedule == "wsd":  # its decay has begun
        with pytest.raises(ValueError, match=r"with --optim\.schedule wsd its finished steps"):
            train(replace(short, tokens=8 * 256), resume=True)
    forget_after(tmp_path / "longer", 1)
    assert command("train", "--resume", tmp_path / "longer", "--tokens", 6 * 256) == 0
    forget_after(tmp_path / "longer", 2)
    assert train(replace(short, tokens=8 * 256), resume=True).step == 8
    assert losses(tmp_path / "longer") == losses(tmp_path / "whole")
    assert [line["lr"] for line in metrics(tmp_path / "longer") if "lr" in line] == [
        line["lr"] for line in metrics(tmp_path / "whole") if "lr" in line
    ]
    assert_same_bits(tmp_path / "longer" / "step-00000008", whole.checkpoint)
    with pytest.raises(ValueError, match=r"has 8 steps, but tokens was 2048, is 1024 \(4 steps\)"):
        train(short, resume=True)


def test_wsd_may_begin_its_decay_sooner(tmp_path):
    options = {
        "optim_schedule": "wsd",
        "optim_decay": 0.5,
        "save_every": 2,
        "save_keep": 9,
        "eval_every": 0,
        "eval_sample_tokens": 0,
    }
    short = train(small_run(tmp_path / "short", steps=4, optim_warmup=0.25, **options))
    train(small_run(tmp_path / "run", steps=8, optim_warmup=0.125, **options))
    forget_after(tmp_path / "run", 2)
    train(small_run(tmp_path / "run", steps=4, optim_warmup=0.125, **options), resume=True)
    assert_same_bits(tmp_path / "run" / "step-00000004", short.checkpoint)


def test_a_new_run_takes_the_shape_of_the_model_it_starts_from(once, tmp_path):
    """The recipe's own model has 6 layers of width 128."""
    small = ("--tokens", "512", "--tokens-per-step", "256", "--eval.sample-tokens", "0", "--eval.tokens", "512")
    begin = ("train", "tiny-causal", "--init-from", once, "--data.mixture", once.parent / "corpus", *small)
    assert command(*begin, "--out", tmp_path / "a") == 0
    assert thoughtbubbles.load(tmp_path / "a").config == thoughtbubbles.load(once).config
    assert command(*begin, "--out", tmp_path / "b", "--model.fork-layers", 1, 2, 3, "--model.budget", 3) == 0
    config = thoughtbubbles.load(tmp_path / "b").config
    assert (config.fork_layers, config.budget, config.width) == ((1, 2, 3), 3, 32)
    assert "does not fit the model" in str(command(*begin, "--out", tmp_path / "c", "--model.width", 64))
    shutil.rmtree(tmp_path / "a" / "step-00000002")
    gone = [word if word != once else tmp_path / "a" for word in begin]
    assert "nowhere does not exist" in str(command("train", "tiny-causal", "--init-from", "nowhere"))
    assert "has no config.json" in str(command(*gone, "--out", tmp_path / "d"))


def test_a_resumed_run_does_not_need_the_model_it_started_from(once, tmp_path):
    start = save_model(tmp_path / "start", thoughtbubbles.load(once))
    words = (
        "train",
        "tiny-causal",
        "--init-from",
        start,
        "--out",
        tmp_path / "run",
        "--data.mixture",
        once.parent / "corpus",
    )
    small = ("--tokens", "512", "--tokens-per-step", "256", "--eval.sample-tokens", "0", "--eval.tokens", "512")
    assert command(*words, *small) == 0
    shutil.rmtree(start)
    assert command(*words, *small, "--resume") == 0
    assert command("train", "--resume", tmp_path / "run") == 0


def test_the_shape_is_not_taken_from_a_run_of_another_name(once, tmp_path, monkeypatch):
    """`runs/tiny-causal` is not the run that is resumed here."""
    monkeypatch.chdir(tmp_path)
    small = ("--tokens", "512", "--tokens-per-step", "256", "--eval.sample-tokens", "0", "--eval.tokens", "512")
    data = ("--data.mixture", once.parent / "corpus")
    begin = ("train", "tiny-causal", "--init-from", once, *data, *small, "--resume")
    other = ("--model.budget", 1, "--model.selection", "block")
    assert command(*begin, *other) == 0
    assert thoughtbubbles.load("runs/tiny-causal").config.budget == 1
    assert command(*begin, "--name", "foo") == 0
    assert thoughtbubbles.load("runs/foo").config == thoughtbubbles.load(once).config


def test_fresh_weights_where_a_recipe_would_start_from_others(once, tmp_path):
    """`None` stands for an optional field that is not given."""
    words = ("train", "tiny-causal", "--init-from", "None", "--data.mixture", once.parent / "corpus", "--dry-run")
    assert command(*words, "--out", tmp_path / "run") == 0


def test_a_refused_resume_writes_nothing(run):
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    assert "belongs to another run" in str(command("train", "tiny-causal", "--out", run, "--resume"))
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_weights_to_start_from_are_checked_against_their_manifest(run, tmp_path):
    path = run / "step-00000008" / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"step-00000008 is damaged \(model/model.safetensors has been altered"):
        train(small_run(tmp_path / "new", steps=1, init_from=run))
