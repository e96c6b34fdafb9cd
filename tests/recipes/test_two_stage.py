"""`thoughtbubbles reproduce two-stage`: both stages on a tiny model and made-up questions, and the table."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from thoughtbubbles.checkpoint import checkpoints, load
from thoughtbubbles.cli import main
from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.evals.results import weights_of
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.recipes.reproduce.corpus import open_corpus
from thoughtbubbles.recipes.reproduce.finetune.gsm8k_aug import examples_file
from thoughtbubbles.recipes.reproduce.studies import study
from thoughtbubbles.recipes.reproduce.study import Place
from thoughtbubbles.recipes.reproduce.two_stage.mixture import FILES, mixture_of
from thoughtbubbles.recipes.reproduce.two_stage.protocol import ROWS, SHARES, TwoStage, text_part
from thoughtbubbles.recipes.reproduce.two_stage.report import two_stage_table
from thoughtbubbles.recipes.reproduce.two_stage.study import TwoStageStudy
from thoughtbubbles.recipes.shipped import MODEL
from thoughtbubbles.train.loop import train

pytestmark = pytest.mark.slow

SMALL = TwoStage(
    model=ModelConfig(n_layer=3, n_head=2, width=16, block_size=40, fork_layers=(1, 2), merge="residual"),
    rows_per_step=4,
    first_steps=8,
    second_steps=4,
    evaluations=4,
    eval_tokens=512,
    limit=2,
)
QUESTIONS = {
    "gsm8k_augformat.train": [
        {"question": f"Twice {n}?", "steps": [f"<<2*{n}={2 * n}>>"], "answer": str(2 * n)} for n in range(9)
    ],
    "arc_easy.train": [{"id": "a", "question": "Melts?", "choices": ["air", "ice", "tin"], "gold": 1}],
    "arc_challenge.train": [{"id": "b", "question": "Falls?", "choices": ["rain", "fog"], "gold": 0}],
    "mmlu.dev": [{"subject": "art", "question": "Who?", "choices": ["e", "f", "g", "h"], "answer": 3}],
    "gsm8k.test": [{"question": f"What is {n} + 1?", "answer": f"{n} + 1\n#### {n + 1}"} for n in range(3)],
    "arc_easy.test": [{"id": "c", "question": "What burns?", "choices": ["wood", "sand"], "gold": 0}],
}


def write_questions(folder: Path, **changes: list[dict]) -> Path:
    """Directly in the folder, or in its eval/, as users may have them."""
    (folder / "eval").mkdir(parents=True)
    for name, records in {**QUESTIONS, **changes}.items():
        place = folder if name == "mmlu.dev" else folder / "eval"
        (place / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-stage") / "corpus"
    write_synthetic(folder, n_tokens=4_000, seed=0)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("questions") / "data")


def place_in(folder: Path, data: Path, questions: Path | None, **changes) -> Place:
    places = {"runs": folder / "runs", "out": folder / "results"}
    return Place(**{"protocol": "two-stage", "data": data, "sources": {}, "data_dir": questions, **places, **changes})


@pytest.fixture(scope="module")
def done(corpus, questions, tmp_path_factory):
    """A place with the record of r2, seed 3."""
    place = place_in(tmp_path_factory.mktemp("done"), corpus, questions)
    found = TwoStageStudy(SMALL)
    found.check([("r2", 3)], place)
    found.run_row("r2", 3, place)
    return place


def read(place: Place, row: str = "r2", seed: int = 3):
    return json.loads(place.record(row, seed).read_text())


def steps_of(place: Place, stage: str) -> list[dict]:
    lines = (place.run("r2", 3) / stage / "metrics.jsonl").read_text().splitlines()
    return [found for line in lines if "loss" in (found := json.loads(line))]


def numbers(stage: dict) -> dict:
    return {name: stage[name] for name in ("training_loss", "curve", "validation", "forks", "benchmarks")}


# The protocol


def test_the_sizes_are_those_of_the_package_and_the_paper(corpus, tmp_path):
    found = open_corpus(corpus)._replace(vocab_size=8192)
    mixture, planned = (text_part(found, 1.0),), TwoStage()
    runs = {
        (stage, row): planned.config(stage, row, 0, corpus=found, mixture=mixture, out=tmp_path)
        for stage in ("one", "two")
        for row in ROWS
    }
    assert runs["one", "r2"].model == MODEL
    assert runs["one", "r1"].model == replace(MODEL, budget=1)
    assert runs["one", "plain"].model == replace(MODEL, fork_layers=(), merge="original")
    for row in ROWS:
        one, two = runs["one", row], runs["two", row]
        assert 3.2e8 < one.tokens < 3.4e8
        assert 3.2e7 < two.tokens < 3.4e7
        assert (one.optim.schedule, two.optim.schedule, two.optim.floor) == ("constant", "cosine", 0.1)
        assert one.optim.lr == two.optim.lr
        assert one.model == two.model
    assert SHARES == {"gsm8k-aug": 0.40, "multiple-choice": 0.35, "text": 0.25}
    assert list(study("two-stage").rows) == ["plain", "r1", "r2"]


# Records


def test_a_record_says_everything_about_both_stages(done, corpus, questions):
    record = read(done)
    one, two = record["one"], record["two"]
    assert (record["protocol"], record["row"], record["seed"], record["steps"]) == ("two-stage", "r2", 3, 12)
    assert (one["steps"], two["steps"]) == (8, 4)
    assert (one["tokens"], two["tokens"]) == (8 * 4 * 40, 4 * 4 * 40)
    assert record["wall_seconds"] == one["wall_seconds"] + two["wall_seconds"]
    assert [step for step, _ in one["curve"]] == [2, 4, 6, 8]
    assert [step for step, _ in two["curve"]] == [1, 2, 3, 4]
    assert one["data"] == {"text": {"share": 1.0, "tokens": 4000, "checksum": record["text"]["checksum"]}}
    assert {name: part["share"] for name, part in two["data"].items()} == SHARES
    assert (two["data"]["gsm8k-aug"]["examples"], two["data"]["multiple-choice"]["examples"]) == (9, 3)
    for stage in (one, two):
        assert stage["config"]["model"]["budget"] == 2
        assert stage["config"]["model"]["vocab_size"] == 384
        assert stage["validation"]["tokens"] == open_dataset(corpus, split="val").n_tokens - 1
        assert stage["validation"]["bits_per_byte"] > 0
        assert stage["benchmarks"]["gsm8k"]["documents"] == 2  # of three: the limit
        assert stage["benchmarks"]["arc_easy"] == {**stage["benchmarks"]["arc_easy"], "documents": 1, "chance": 0.5}
        assert [layer["layer"] for layer in stage["forks"]] == [1, 2]
        assert 1 <= stage["forks"][-1]["streams"] <= 2
    model = checkpoints(done.run("r2", 3) / "one")[-1] / "model"
    assert two["start_weights"] == one["weights"] == weights_of(model)
    assert two["weights"] != one["weights"]
    assert "start_weights" not in one
    assert record["resumed_at"] is None
    assert "SmolTalk" in record["substitution"]
    assert "the paper's GSM8K-aug has 385k examples, here it is the file of --data-dir" in record["substitution"]
    for name in ("device", "commit", "versions", "time", "command"):
        assert name in record
    for place in (done.runs, done.out, corpus, questions):  # no path of the machine
        assert str(place) not in json.dumps(record)


def test_the_rate_is_constant_then_decays(done):
    peak = read(done)["one"]["config"]["optim"]["lr"]
    first, second = ([step["lr"] for step in steps_of(done, stage)] for stage in ("one", "two"))
    assert first[1:] == [peak] * 7
    assert peak > second[0] > second[1] > second[2] > second[3]
    assert second[3] == pytest.approx(0.1 * peak)


def test_stage_two_starts_from_the_last_weights_of_stage_one(done):
    """A step of warm-up and three of decay are far shorter than the way from other initial weights."""
    first, second = (load(done.run("r2", 3) / stage) for stage in ("one", "two"))
    between = (first.embedding.weight - second.embedding.weight).norm()
    assert 0 < between < 0.3 * first.embedding.weight.norm()
    run = json.loads((done.run("r2", 3) / "two" / "run.json").read_text())
    assert run["config"]["init_from"] == str(checkpoints(done.run("r2", 3) / "one")[-1])


def test_questions_become_examples(done):
    """In the forms of data/records.py: ARC's `gold` and MMLU's `answer` are letters, GSM8K-aug's steps lines."""
    words = tokenizer("bytes")
    texts = {}
    for name in ("gsm8k-aug", "multiple-choice"):
        (folder,) = (path for path in (done.runs / "two-stage").glob(f"{name}-bytes-*") if path.is_dir())
        (shard,) = open_dataset(folder, split="train").shards
        texts[name] = words.decode(shard.tokens.tolist()).split("<|endoftext|>")
    assert "Twice 4?\n2*4=8\n#### 8" in texts["gsm8k-aug"]
    assert texts["multiple-choice"][:3] == [
        "Melts?\nA. air\nB. ice\nC. tin\nAnswer: B. ice",
        "Falls?\nA. rain\nB. fog\nAnswer: A. rain",
        "Who?\nA. e\nB. f\nC. g\nD. h\nAnswer: D. h",
    ]


def test_gsm8k_aug_is_the_file_that_gsm8k_trains_on():
    (file,) = FILES["gsm8k-aug"]
    assert file.task == examples_file("train")
    assert file.task.home.endswith("whynlp/gsm8k-aug (or GSM8K's own training questions in its form)")


def test_plain_has_no_forks(corpus, questions, tmp_path):
    record = TwoStageStudy(SMALL).make_record("plain", 0, place_in(tmp_path, corpus, questions))
    assert record["two"]["forks"] == []
    assert record["two"]["config"]["model"]["merge"] == "original"
    assert record["two"]["config"]["seed"] == 0


# Interruptions


@pytest.fixture
def copied(done, tmp_path):
    """The runs of `done`, without its record."""
    shutil.copytree(done.runs, tmp_path / "runs")
    return place_in(tmp_path, done.data, done.data_dir)


def test_between_the_stages(copied, done):
    """Stage one is not touched; stage two gives the same bits."""
    home = copied.run("r2", 3)
    shutil.rmtree(home / "two")
    before = {path: path.stat().st_mtime_ns for path in (home / "one").rglob("*") if path.is_file()}
    again, record = TwoStageStudy(SMALL).make_record("r2", 3, copied), read(done)
    assert {path: path.stat().st_mtime_ns for path in (home / "one").rglob("*") if path.is_file()} == before
    assert again["one"] == record["one"]
    assert numbers(again["two"]) == numbers(record["two"])


@pytest.mark.parametrize("stage", ["one", "two"])
def test_after_training_before_measuring(stage, copied, done):
    (copied.run("r2", 3) / stage / "stage.json").unlink()
    again = TwoStageStudy(SMALL).make_record("r2", 3, copied)
    assert again["resumed_at"] == again[stage]["resumed_at"] == again[stage]["steps"]
    assert numbers(again[stage]) == numbers(read(done)[stage])


def test_a_stage_from_before_skipped_steps_were_counted(copied, done):
    path = copied.run("r2", 3) / "one" / "stage.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "skipped_steps"}))
    assert TwoStageStudy(SMALL).make_record("r2", 3, copied)["skipped_steps"] == read(done)["skipped_steps"] == 0


def test_in_the_middle_of_stage_two(copied, done):
    """As far as the folder shows: the checkpoint of step 2 is the newest."""
    corpus, home = open_corpus(copied.data), copied.run("r2", 3) / "two"
    shutil.rmtree(home)
    mixture = mixture_of(corpus, copied.data_dir, copied.runs / "two-stage")
    run = SMALL.config("two", "r2", 3, corpus=corpus, mixture=mixture, out=home)
    train(replace(run, init_from=copied.run("r2", 3) / "one", save=replace(run.save, keep=9)))
    shutil.copy(done.run("r2", 3) / "two" / "start.json", home)
    for checkpoint in checkpoints(home)[2:]:
        shutil.rmtree(checkpoint)
    again = TwoStageStudy(SMALL).make_record("r2", 3, copied)
    assert again["two"]["resumed_at"] == 2
    assert numbers(again["two"]) == numbers(read(done)["two"])


def test_a_stage_of_other_settings_is_not_taken_for_this_one(copied):
    with pytest.raises(
        ValueError, match="one is a stage with other settings or data: delete it, or give another --runs"
    ):
        TwoStageStudy(replace(SMALL, first_steps=9)).make_record("r2", 3, copied)


@pytest.fixture
def changed(copied):
    """Stage one was trained again, with the same settings, but its weights are different ones."""
    home = copied.run("r2", 3)
    one, two = (json.loads((home / stage / "stage.json").read_text()) for stage in ("one", "two"))
    shutil.rmtree(home / "one")
    shutil.copytree(home / "two", home / "one")
    (home / "one" / "stage.json").write_text(json.dumps({**one, "weights": two["weights"]}))
    return copied


OTHER_START = "two was trained from other weights than those of .*one: delete it, or give another --runs"


def test_a_stage_two_of_other_weights_is_not_used(changed):
    with pytest.raises(ValueError, match=OTHER_START):
        TwoStageStudy(SMALL).make_record("r2", 3, changed)


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_stage_two_of_other_weights_is_not_resumed(is_noted, changed):
    home = changed.run("r2", 3) / "two"
    (home / "stage.json").unlink()
    if not is_noted:
        (home / "start.json").unlink()
    with pytest.raises(ValueError, match=OTHER_START):
        TwoStageStudy(SMALL).make_record("r2", 3, changed)
    assert not (home / "stage.json").exists()


def test_weights_that_stage_one_does_not_know(changed):
    """Its checkpoint was replaced, its results were not."""
    home = changed.run("r2", 3)
    shutil.rmtree(home / "two")
    path = home / "one" / "stage.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "weights": {"model.safetensors": 1}}))
    with pytest.raises(
        ValueError, match=r"has other weights than those that .*stage\.json is about: delete stage\.json"
    ):
        TwoStageStudy(SMALL).make_record("r2", 3, changed)


def test_the_checkpoint_of_stage_one_is_needed_for_training_only(copied, done):
    home, record = copied.run("r2", 3), read(done)
    for checkpoint in checkpoints(home / "one"):
        shutil.rmtree(checkpoint)
    again = TwoStageStudy(SMALL).make_record("r2", 3, copied)
    assert (again["one"], again["two"]) == (record["one"], record["two"])
    shutil.rmtree(home / "two")
    with pytest.raises(ValueError, match=r"one has results but no checkpoint, .* delete this folder to train"):
        TwoStageStudy(SMALL).make_record("r2", 3, copied)


def test_results_without_the_weights_are_measured_again(copied):
    path = copied.run("r2", 3) / "one" / "stage.json"
    path.write_text(
        json.dumps({name: each for name, each in json.loads(path.read_text()).items() if name != "weights"})
    )
    with pytest.raises(ValueError, match=r"stage\.json has no checksums of the weights: delete it, and the stage is"):
        TwoStageStudy(SMALL).make_record("r2", 3, copied)


# Repeating a row


def test_a_row_repeats_to_the_bit(done, tmp_path):
    found = TwoStageStudy(SMALL)
    fresh = place_in(tmp_path, done.data, done.data_dir)
    is_same, line = found.compare(read(done), found.make_record("r2", 3, fresh))
    assert is_same, line
    other = read(done)
    other["two"]["validation"]["nats"] += 1e-9
    is_same, line = found.compare(other, read(done))
    assert not is_same
    assert "r2, seed 3: validation loss" in line


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_dir": None}, "--data-dir is missing: give the folder"),
        ({"data_dir": Path("nowhere")}, "--data-dir nowhere: does not exist"),
        (
            {"missing": "arc_challenge.train"},
            r"has no arc_challenge\.train\.jsonl \(\.gz or \.xz\): `thoughtbubbles download arc_challenge\.train --out",
        ),
        ({"missing": "gsm8k_augformat.train"}, "with the fields question, steps, answer"),
        ({"missing": "gsm8k.test"}, r"has no gsm8k\.test\.jsonl"),
        ({"sources": {"wiki": Path("wiki")}}, "--val wiki=wiki: two-stage measures the corpus's own"),
        ({"data": "examples"}, "has examples; a protocol needs text"),
        (
            {"wrong": {"arc_easy.train": [{"question": "Why?", "choices": ["a", "b"], "gold": 2}]}},
            r"arc_easy\.train\.jsonl, line 1: gold is 2: it must be a number from 0 to 1",
        ),
        (
            {"wrong": {"mmlu.dev": [{"question": "Why?", "choices": ["a", "b"]}]}},
            r"mmlu\.dev\.jsonl, line 1: field 'answer' is missing; expected subject, question",
        ),
        (
            {"wrong": {"gsm8k_augformat.train": [{"question": "Why?", "steps": 3, "answer": "1"}]}},
            "line 1: steps is int, not a list: give a list",
        ),
        (
            {"wrong": {"arc_easy.test": [{"question": "Why?", "choices": ["a", "b" * 100], "gold": 0}]}},
            "a choice has 101 tokens, more than the model's block_size = 40",
        ),
    ],
)
def test_mistakes_are_found_before_training(changes, message, corpus, tmp_path, monkeypatch):
    monkeypatch.delenv("THOUGHTBUBBLES_DATA", raising=False)
    folder = write_questions(tmp_path / "data", **changes.get("wrong", {}))
    if "missing" in changes:
        (folder / "eval" / f"{changes['missing']}.jsonl").unlink()
    if "data" in changes:
        changes = {"data": examples(tmp_path)}
    fields = {name: value for name, value in changes.items() if name not in ("wrong", "missing")}
    place = replace(place_in(tmp_path, corpus, folder), **fields)
    with pytest.raises(ValueError, match=message) as raised:
        TwoStageStudy(SMALL).check([("plain", 0)], place)
    assert "\n" not in str(raised.value)
    assert not place.run("plain", 0).exists()
    assert not place.out.exists()


def examples(folder: Path) -> Path:
    source, held = folder / "questions.jsonl", folder / "held.jsonl"
    source.write_text("".join(json.dumps({"question": f"{n}?", "answer": f"{n}"}) + "\n" for n in range(9)))
    held.write_text(json.dumps({"question": "x?", "answer": "y"}) + "\n")
    out = folder / "examples"
    main(["prepare", str(source), "--val", str(held), "--tokenizer", "bytes", "--out", str(out), "--processes", "1"])
    return out


def test_records_of_other_data_are_noticed_before_training(done, questions, tmp_path):
    other = tmp_path / "other"
    write_synthetic(other, n_tokens=4_000, seed=1)
    with pytest.raises(ValueError, match=r"two-stage/r2-seed3\.json is a record of other text than --data"):
        TwoStageStudy(SMALL).check([("plain", 0)], place_in(tmp_path, other, questions, out=done.out))
    fewer = write_questions(tmp_path / "fewer", **{"mmlu.dev": QUESTIONS["mmlu.dev"] * 2})
    with pytest.raises(ValueError, match=r"two-stage/r2-seed3\.json is a record of another mixture than"):
        TwoStageStudy(SMALL).check([("plain", 0)], place_in(tmp_path, done.data, fewer, out=done.out))


def test_the_command_knows_it(done, capsys, monkeypatch):
    monkeypatch.delenv("THOUGHTBUBBLES_DATA", raising=False)
    main(["reproduce", "two-stage", "--list", "--out", str(done.out)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "GSM8K exact match" in shown
    with pytest.raises(SystemExit, match="--data-dir is missing"):
        main(["reproduce", "two-stage", "--data", str(done.data), "--out", str(done.out), "--runs", str(done.runs)])


# The table


def made_up(row: str, seed: int, nats: float, gsm8k: float) -> dict:
    """Two windows of 4 tokens; after stage two the loss is 0.1 higher, and twice as many answers are right."""

    def stage(loss: float, right: float, tokens: int) -> dict:
        return {
            "config": {"model": {"block_size": 4}},
            "data": {
                "gsm8k-aug": {"share": 0.4, "examples": 6973, "checksum": "1"},
                "text": {"share": 0.25, "tokens": 800, "checksum": "2"},
            },
            "steps": 5,
            "tokens": tokens,
            "wall_seconds": 100.4,
            "validation": {
                "nats": loss,
                "bits_per_byte": loss / 2,
                "tokens": 8,
                "windows": [loss - 0.01 * seed, loss + 0.01 * seed],
            },
            "forks": [] if row == "plain" else [{"streams": 1.9}, {"streams": 1.876}],
            "benchmarks": {
                "gsm8k": {"accuracy": right, "standard_error": 0.002, "documents": 1319},
                "arc_easy": {"accuracy": 0.3, "standard_error": None, "documents": 2376},
            },
        }

    return {
        "version": 1,
        "protocol": "two-stage",
        "row": row,
        "seed": seed,
        "what": f"model {row}",
        "device": "NVIDIA H200",
        "commit": "abc1234",
        "command": "…",
        "versions": {"torch": "2.11.0"},
        "time": "2026-01-02",
        "wall_seconds": 200.8,
        "substitution": "no chats",
        "text": {"tokens": 800, "tokenizer": "bytes", "checksum": "12345678"},
        "one": stage(nats, gsm8k, 300_000_000),
        "two": stage(nats + 0.1, 2 * gsm8k, 30_000_000),
    }


def write_records(out: Path, *records: dict) -> Path:
    (out / "two-stage").mkdir(parents=True, exist_ok=True)
    for record in records:
        path = out / "two-stage" / f"{record['row']}-seed{record['seed']}.json"
        path.write_text(json.dumps(record))
    return out


def test_the_table(tmp_path):
    assert two_stage_table(tmp_path) == "Not measured yet."
    write_records(
        tmp_path, made_up("plain", 0, 3.5, 0.011), made_up("r2", 0, 3.47, 0.0125), made_up("r2", 7, 3.4, 0.01)
    )
    table, about = two_stage_table(tmp_path).split("\n\n")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [line[:4] for line in lines] == [
        ["`plain`", "model plain", "0", "one"],
        ["`plain`", "model plain", "0", "two"],
        ["`r1`", ROWS["r1"].what, "not run", "–"],
        ["`r2`", "model r2", "0", "one"],
        ["`r2`", "model r2", "0", "two"],
        ["`r2`", "model r2", "7", "one"],
        ["`r2`", "model r2", "7", "two"],
    ]
    assert lines[0][4:] == ["300.0M", "100", "3.5000", "1.7500", "–", "1.1 ± 0.2", "30.0", "1.00"]
    assert lines[4][4:] == ["30.0M", "100", "3.5700", "1.7850", "−0.0300 ± 0.0000", "2.5 ± 0.2", "30.0", "1.88"]
    assert lines[5][8] == "–"  # there is no plain model with this seed
    assert all(len(line) == len(lines[0]) for line in lines)
    assert "40% gsm8k-aug (6,973 examples), 25% text; no chats." in about
    assert "1,319 of GSM8K" in about


def test_the_error_against_plain_is_over_windows(tmp_path):
    """Differences of −0.03 ± 0.07 in two windows of equal size: their standard error is 0.07."""
    plain, r2 = made_up("plain", 7, 3.5, 0.01), made_up("r2", 7, 3.47, 0.01)
    r2["one"]["validation"]["windows"] = [3.47 - 0.14, 3.47 + 0.14]  # plain has 3.5 ± 0.07
    lines = two_stage_table(write_records(tmp_path, plain, r2)).splitlines()
    assert "−0.0300 ± 0.0700" in next(line for line in lines if line.startswith("| `r2` ") and "| one |" in line)


@pytest.mark.parametrize("absent", ["two", "text", "versions", "wall_seconds"])
def test_a_damaged_record_is_named(absent, tmp_path):
    record = made_up("r1", 0, 3.0, 0.01)
    del record[absent]
    with pytest.raises(ValueError, match=rf"r1-seed0\.json: has no {absent}: it is not a record"):
        two_stage_table(write_records(tmp_path, record))
