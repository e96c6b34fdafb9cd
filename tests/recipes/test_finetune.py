"""`reproduce clutrr` and `reproduce gsm8k`: rows from end to end on made-up questions, what is measured, the tables."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import lively_model
from thoughtbubbles.checkpoint import checkpoints, load, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.shards import read_index
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.distributed import joined
from thoughtbubbles.evals.documents import open_benchmark
from thoughtbubbles.evals.results import weights_of
from thoughtbubbles.evals.run import run
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.recipes.reproduce import command
from thoughtbubbles.recipes.reproduce.finetune import measure
from thoughtbubbles.recipes.reproduce.finetune.clutrr import ClutrrStudy
from thoughtbubbles.recipes.reproduce.finetune.examples import prepared
from thoughtbubbles.recipes.reproduce.finetune.gsm8k import Gsm8kStudy
from thoughtbubbles.recipes.reproduce.finetune.protocol import CLUTRR_FORMS, GSM8K_FORMS, run_of
from thoughtbubbles.recipes.reproduce.finetune.report import clutrr_table, gsm8k_table
from thoughtbubbles.recipes.reproduce.study import Place
from thoughtbubbles.recipes.shipped import MODEL
from thoughtbubbles.train.loop import train

pytestmark = pytest.mark.slow

SET = "089907f8"
BYTES = tokenizer("bytes")
TINY = ModelConfig(
    n_layer=3, n_head=2, width=16, vocab_size=384, block_size=72, fork_layers=(1, 2), merge="residual", budget=2
)
PLAIN = replace(TINY, fork_layers=(), merge="original")
PEOPLE = ("Una", "Ivo", "Kim", "Lea", "Max", "Zoe")


def story(n: int, split: str, *, hops: int = 2, kind: int = 1) -> dict:
    a, b, c = (PEOPLE[(n + i) % 6] for i in (0, 1, 2))
    relation, word = (("aunt", "sister"), ("uncle", "brother"), ("mother-in-law", "mother"))[n % 3]
    return {
        "story": f"[{a}] is the {word} of [{b}], {n} years ago. [{b}] met [{c}].",
        "query": f"('{c}', '{a}')",
        "target": relation,
        "task_name": f"task_{kind}.{hops}",
        "split": split,
    }


STORIES = [
    *(story(n, "train") for n in range(24)),
    *(story(n, "test", hops=2 + n % 2, kind=1 + n % 3 // 2) for n in range(100, 107)),
]
EQUATIONS = [
    {"question": f"Ann has {n} figs and gets {n + 2}. How many?", "steps": [f"<<{n}+{n + 2}={2 * n + 2}>>"]}
    | {"answer": str(2 * n + 2)}
    for n in range(20)
]
QUESTIONS = [{"question": f"Ben has {n} plums. How many?", "answer": f"He has {n}.\n#### {n}"} for n in (70, 7, 71, 72)]


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Made-up benchmarks in `data`, and models to start from.

    `r2` and `plain` have a short context; `long` is plain too, and `gpt2` also has GPT-2's tokens.
    """
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "data").mkdir()
    write(folder / "data" / f"clutrr.data_{SET}.jsonl", STORIES)
    write(folder / "data" / "gsm8k_augformat.train.jsonl", EQUATIONS)
    write(folder / "data" / "gsm8k_augformat.validation.jsonl", [{**EQUATIONS[0], "question": "One fig?"}])
    write(folder / "data" / "gsm8k.test.jsonl", QUESTIONS)
    for name, config in (("r2", TINY), ("plain", PLAIN), ("long", replace(PLAIN, block_size=512))):
        save_model(folder / name, lively_model(config, dtype=torch.float32), tokenizer=BYTES)
    save_model(
        folder / "gpt2",
        Thoughtbubbles(replace(PLAIN, vocab_size=50304, block_size=512)),
        tokenizer=tokenizer("gpt2"),
    )
    return folder


def place_in(folder: Path, home: Path, protocol: str, **changes) -> Place:
    settings = {"protocol": protocol, "data": None, "sources": {}, "data_dir": home / "data"}
    settings |= {"runs": folder / "runs", "out": folder / "results", "init": {"plain": home / "plain"}}
    return Place(**{**settings, **changes})


def clutrr(home: Path, **changes) -> ClutrrStudy:
    settings = {"model": TINY, "block_size": 96, "rows_per_step": 4, "val_fraction": 0.2, "steps": 6}
    return ClutrrStudy(**{**settings, "shipped": home / "r2", **changes})


def gsm8k(home: Path, **changes) -> Gsm8kStudy:
    return Gsm8kStudy(**{"block_size": 72, "rows_per_step": 4, "steps": 6, "shipped": home / "r2", **changes})


@pytest.fixture(scope="module")
def done(home, tmp_path_factory):
    """A place with the records of three forms of CLUTRR, and the records by row."""
    place = place_in(tmp_path_factory.mktemp("clutrr"), home, "clutrr")
    rows = [f"{SET}-{form}" for form in ("scratch-plain", "shipped-plain", "shipped-r2")]
    clutrr(home).check([(row, 0) for row in rows], place)
    paths = {row: clutrr(home).run_row(row, 0, place) for row in rows}
    return place, {row.partition("-")[2]: json.loads(path.read_text()) for row, path in paths.items()}


@pytest.fixture(scope="module")
def answered(home, tmp_path_factory):
    """The same for GSM8K."""
    place = place_in(tmp_path_factory.mktemp("gsm8k"), home, "gsm8k")
    paths = {row: gsm8k(home).run_row(row, 0, place) for row in ("shipped-r2", "shipped-plain")}
    return place, {row: json.loads(path.read_text()) for row, path in paths.items()}


# Protocols


def test_every_row_of_a_set_is_one_form():
    rows = ClutrrStudy().rows
    assert len(rows) == 24
    assert rows["d83ecc3e-shipped-plain"].seeds == (0, 1, 2)
    assert ClutrrStudy().starts == ("plain",)
    assert set(Gsm8kStudy().starts) == {"plain", "large-r2", "large-plain"}
    for forms in (CLUTRR_FORMS, GSM8K_FORMS):
        for name in {name.rpartition("-")[0] for name in forms}:  # plain and bubbles: the same training
            plain, bubbles = forms[f"{name}-plain"], forms[f"{name}-r2"]
            assert (plain.lr, plain.epochs) == (bubbles.lr, bubbles.epochs)
            assert (plain.has_forks, bubbles.has_forks) == (False, True)


def test_models_of_the_rows():
    found = ClutrrStudy()
    scratch = found.model_of(CLUTRR_FORMS["scratch-r2"], None)
    assert scratch == replace(MODEL, block_size=320)
    plain = found.model_of(CLUTRR_FORMS["scratch-plain"], None)
    assert plain == replace(scratch, fork_layers=(), merge="original")
    shipped = found.start_of(f"{SET}-shipped-r2", place_in(Path("x"), Path("y"), "clutrr"))
    assert found.model_of(CLUTRR_FORMS["shipped-r2"], shipped) == scratch  # the same architecture


def test_epochs_are_rounded_up_to_steps():
    form = CLUTRR_FORMS["shipped-r2"]
    settings = {"rows": 64, "data": Path("a=b"), "seed": 3, "init_from": None, "out": Path("out")}
    config = run_of("name", form, replace(MODEL, block_size=320), n_examples=10_001, **settings)
    assert config.steps == 1563  # 10 · 10,001 / 64, rounded up
    assert (config.rows, config.optim.lr, config.data.mixture) == (64, 1e-3, ("a=b=1",))


# Checks before training


@pytest.mark.parametrize(
    ("study", "row", "init", "message"),
    [
        (clutrr, f"{SET}-shipped-plain", {}, "--init plain=DIR is missing: 089907f8-shipped-plain starts from"),
        (clutrr, f"{SET}-shipped-plain", {"plain": "r2"}, "r2: has fork layers; give a model without them"),
        (clutrr, f"{SET}-shipped-plain", {"plain": "nowhere"}, "nowhere does not exist"),
        (clutrr, f"{SET}-shipped-plain", {"plain": "gpt2"}, "was trained with tokenizer 'gpt2', but all rows use 'by"),
        (clutrr, "7c5b0e70-scratch-r2", {}, r"data has no clutrr\.data_7c5b0e70\.jsonl"),
        (gsm8k, "large-r2", {}, "--init large-r2=DIR is missing: large-r2 starts from"),
        (gsm8k, "large-r2", {"large-r2": "plain"}, "plain: has no fork layers; give a model with them"),
    ],
)
def test_what_is_missing_is_noticed_before_training(study, row, init, message, home, tmp_path):
    place = place_in(tmp_path, home, study.__name__, init={name: home / folder for name, folder in init.items()})
    with pytest.raises(ValueError, match=message):
        study(home).check([(f"{SET}-scratch-r2" if study is clutrr else "shipped-r2", 0), (row, 0)], place)
    assert not place.runs.exists()


def test_the_files_of_gsm8k_are_needed(home, tmp_path):
    shutil.copytree(home / "data", tmp_path / "data")
    (tmp_path / "data" / "gsm8k_augformat.train.jsonl").unlink()
    place = place_in(tmp_path, home, "gsm8k", data_dir=tmp_path / "data")
    message = r"has no gsm8k_augformat\.train\.jsonl .*whynlp/gsm8k-aug \(or GSM8K's own .* question, steps, answer"
    with pytest.raises(ValueError, match=message):
        gsm8k(home).check([("shipped-r2", 0)], place)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["clutrr", "--only", f"{SET}-shipped-plain"], "--init plain=DIR is missing"),
        (["clutrr", "--init", "plain"], "--init plain: give NAME=DIR, such as plain=runs/bubbles-7m-plain"),
        (["clutrr", "--init", "large-r2=x"], "no row of clutrr starts from large-r2; give plain"),
        (["tasks", "--init", "plain=x"], "no row of tasks starts from plain; leave it out"),
        (["gsm8k", "--data", "x"], "--data x: gsm8k brings its own data"),
    ],
)
def test_mistakes_end_in_one_line(words, message, home, tmp_path):
    places = ["--data-dir", str(home / "data"), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as raised:
        main(["reproduce", *words, *places])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "runs").exists()


def test_the_context_of_a_model_must_have_room_for_questions_and_answers(home, tmp_path):
    found, rows = gsm8k(home, block_size=512), [("shipped-plain", 0)]
    place = place_in(tmp_path, home, "gsm8k", init={"plain": home / "plain"})
    with pytest.raises(ValueError, match=r"--init plain=.*plain: has block_size = 72, .* give .* block_size = 512 or"):
        found.check(rows, place)
    assert not place.runs.exists()
    found.check(rows, place_in(tmp_path, home, "gsm8k", init={"plain": home / "long"}))
    assert Gsm8kStudy().block_size == 512


def test_records_of_other_examples_are_noticed_before_training(done, answered, home, tmp_path):
    """With another tokenizer or set, examples are always other ones: that is no mistake."""
    data = tmp_path / "data"
    shutil.copytree(home / "data", data)
    write(data / f"clutrr.data_{SET}.jsonl", STORIES[1:])
    write(data / "clutrr.data_db9b8f04.jsonl", STORIES[1:])
    write(data / "gsm8k_augformat.train.jsonl", EQUATIONS[1:])
    place = place_in(tmp_path, home, "clutrr", data_dir=data, out=done[0].out)
    wrong = (
        rf"clutrr/{SET}-.*-seed0\.json was trained on other examples than those of --data-dir .*; give another --out"
    )
    with pytest.raises(ValueError, match=wrong):
        clutrr(home).check([(f"{SET}-scratch-r2", 0)], place)
    clutrr(home).check([("db9b8f04-scratch-r2", 0)], place)
    init = {"plain": home / "plain", "large-plain": home / "gpt2"}
    place = place_in(tmp_path, home, "gsm8k", data_dir=data, out=answered[0].out, init=init)
    with pytest.raises(ValueError, match=r"gsm8k/shipped-.*-seed0\.json was trained on other examples"):
        gsm8k(home).check([("shipped-plain", 1)], place)
    gsm8k(home).check([("large-plain", 0)], place)
    gsm8k(home).check([("shipped-plain", 1)], replace(place, data_dir=home / "data"))


# Rows of CLUTRR


def test_a_record_says_everything_about_its_row(done, home):
    place, records = done
    record = records["shipped-r2"]
    assert (record["protocol"], record["set"], record["form"], record["seed"]) == ("clutrr", SET, "shipped-r2", 0)
    assert (record["start"], record["start_weights"]) == ("shipped", weights_of(home / "r2"))
    assert records["shipped-plain"]["start_weights"] == weights_of(home / "plain")
    assert records["shipped-plain"]["command"].endswith("--init plain=DIR")
    assert records["scratch-plain"]["start_weights"] is None
    assert (record["steps"], record["tokens"], record["config"]["model"]["block_size"]) == (6, 6 * 4 * 96, 96)
    (folder,) = (place.runs / "clutrr").glob(f"data-{SET}-*")
    index = read_index(folder)
    n_train, n_val = (index.notes["documents"][split] for split in ("train", "val"))
    assert n_train + n_val == 24  # no test story
    assert record["text"]["examples"] == n_train
    assert record["epochs"] == pytest.approx(24 / n_train)
    assert record["curve"]
    for path in (place.runs, home):
        assert str(path) not in json.dumps(record)
    assert not any(name in json.dumps(record) for name in PEOPLE)


def test_a_row_really_starts_from_its_model(done, home):
    """After six steps the weights are close to those of the start, and nowhere near other ones."""
    place, _ = done
    start, scratch = load(home / "r2"), Thoughtbubbles(TINY)
    trained = load(place.run(f"{SET}-shipped-r2", 0))
    moved = (trained.embedding.weight - start.embedding.weight).norm()
    assert 0 < moved < 0.1 * (trained.embedding.weight - scratch.embedding.weight).norm()


@pytest.mark.parametrize("form", ["shipped-r2", "scratch-plain"])
def test_the_accuracy_is_that_of_the_evaluation(form, done, home, tmp_path):
    """By hops and by noise; `thoughtbubbles eval` on a folder that has this set only."""
    place, records = done
    checkpoint = place.run(f"{SET}-{form}", 0)
    settings = Evaluation(checkpoint=checkpoint, tasks=("clutrr",), data_dir=home / "data", out=tmp_path)
    with joined("cpu") as world:
        expected = run(settings, world)["tasks"]["clutrr"]
    found = records[form]["test"]
    assert found["documents"] == expected["documents"] == 7
    assert found["accuracy"] == expected["accuracy"]
    for group in ("hops", "noise"):
        assert list(found["by"][group]) == list(expected["by"][group])
        for part, each in found["by"][group].items():
            assert each["accuracy"] == expected["by"][group][part]["accuracy"]
    assert list(found["by"]["hops"]) == ["2", "3"]
    assert sorted(found["by"]["noise"]) == ["none", "supporting"]


def test_whole_answers_end_in_end_of_text(done, home):
    """Against one forward per answer."""
    place, records = done
    model = load(place.run(f"{SET}-shipped-r2", 0), dtype=torch.float32)
    task = replace(TASKS["clutrr"], file=f"clutrr.data_{SET}")
    right = ""
    for asked in open_benchmark(task, home / "data").documents.values():
        sums = []
        for choice in asked.choices:
            prompt, answer = BYTES.encode(asked.context), [*BYTES.encode(choice), BYTES.end_of_text]
            ids = torch.tensor([[*prompt, *answer]])
            with torch.no_grad():
                log_probs = model(ids[:, :-1], want=("log_probs",)).log_probs[0, len(prompt) - 1 :]
            sums.append(float(log_probs.gather(1, ids[0, len(prompt) :, None]).sum()))
        right += str(int(sums.index(max(sums)) == asked.gold))
    found = records["shipped-r2"]["test"]
    assert found["right"] == right
    assert found["whole_answer"]["mean"] == pytest.approx(right.count("1") / 7)


def test_where_the_streams_are(done):
    place, records = done
    assert records["shipped-plain"]["test"]["streams"] is None
    found = records["shipped-r2"]["test"]["streams"]
    assert set(found) == {"names", "question", "elsewhere"}
    assert found["question"]["tokens"] == 7
    model, total = load(place.run(f"{SET}-shipped-r2", 0), dtype=torch.float32), torch.zeros(2)
    tested = [record for record in STORIES if record["split"] == "test"]
    prompts = [TASKS["clutrr"].document(record).context for record in tested]
    for prompt in prompts:
        with torch.no_grad():
            forks = model(torch.tensor([BYTES.encode(prompt)]), trace=True).forks
        total += torch.stack([record.bubble_size.sum() for record in forks])
    recorded = sum(each["tokens"] * torch.tensor(each["streams"]) for each in found.values())
    assert recorded.tolist() == pytest.approx(total.tolist())
    assert sum(each["tokens"] for each in found.values()) == sum(map(len, prompts))


def test_the_kinds_of_tokens():
    """Whole words only, whatever the tokenizer makes of them; the last token is the question's."""
    text = "Una met Unable Ivo. Ivo is Una's"
    kinds = measure.kinds_of(BYTES.encode(text), {"Una", "Ivo"}, BYTES)
    marks = "".join({"names": "n", "question": "q", "elsewhere": "."}[kind] for kind in kinds)
    assert marks == "nnn............nnn..nnn....nnn.q"
    gpt2 = tokenizer("gpt2")
    kinds = measure.kinds_of(ids := gpt2.encode(text), {"Una", "Ivo"}, gpt2)
    named = [gpt2.decode([token]) for token, kind in zip(ids, kinds, strict=True) if kind == "names"]
    assert "".join(named).replace(" ", "") == "UnaIvoIvoUna"
    assert kinds[-1] == "question"


def test_a_row_with_a_record_is_not_run(done, home):
    place, _ = done
    path = place.record(f"{SET}-shipped-r2", 0)
    before = path.stat().st_mtime_ns
    assert clutrr(home, steps=10**6).run_row(f"{SET}-shipped-r2", 0, place) == path
    assert path.stat().st_mtime_ns == before
    shown = clutrr(home).done(place.out)
    assert shown[f"{SET}-shipped-r2"] == {0: f"{json.loads(path.read_text())['test']['whole_answer']['mean']:.1%}"}


def test_a_stopped_row_resumes_to_the_same_bits(done, home, tmp_path):
    """A run that ended at step 3, as far as its folder shows."""
    place, records = place_in(tmp_path, home, "clutrr"), done[1]
    found, row = clutrr(home), f"{SET}-shipped-r2"
    config = found.config_of(row, 0, place, found.examples_of(found.planned[row], home / "r2", place))
    train(replace(config, save=replace(config.save, every=1, keep=100)))
    for checkpoint in checkpoints(config.folder):
        if int(checkpoint.name[5:]) > 3:
            shutil.rmtree(checkpoint)
    again = found.make_record(row, 0, place)
    assert again["resumed_at"] == 3
    assert found.compare(records["shipped-r2"], again) == (
        True,
        f"{row}, seed 0: the same training losses, answers and streams again",
    )
    is_same, line = found.compare({**records["shipped-r2"], "training_loss": [9.0]}, again)
    assert not is_same
    assert f"{row}, seed 0: accuracy " in line


def test_a_repeated_row_reads_the_benchmark_again(done, home, capsys):
    """`--again` trains in a temporary folder, from the same examples and the same start."""
    place, _ = done
    command.repeat(clutrr(home), f"{SET}-shipped-plain", 0, place)  # a difference would exit with 1
    assert "the same training losses, answers and streams again" in capsys.readouterr().out
    assert not list(place.runs.glob("again-*"))


def test_processes_of_rows_get_the_models_to_start_from(home, tmp_path, monkeypatch):
    started = []

    class Started(subprocess.Popen):
        def __init__(self, words, **options):
            started.append(words)
            super().__init__([sys.executable, "-c", ""], **options)

    monkeypatch.setattr(subprocess, "Popen", Started)
    words = ["--data-dir", str(home / "data"), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    init = ["--init", f"plain={home / 'long'}", f"large-plain={home / 'gpt2'}"]
    main(["reproduce", "gsm8k", "--only", "shipped-plain", "large-plain", "--seed", "0", *init, *words])
    assert len(started) == 2
    for each in started:
        at = each.index("--init")
        assert each[at : at + 3] == init


def test_examples_that_rows_share_are_prepared_once(home, tmp_path):
    """Rows that start at the same time wait for the one that does it."""
    source = home / "data" / f"clutrr.data_{SET}.jsonl"
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(prepared, source, tmp_path / "runs" / "data", tokenizer=home / "r2", val_fraction=0.2)
            for _ in range(4)
        ]
    assert len({job.result() for job in jobs}) == 1


@pytest.mark.parametrize("changed", ["train", "validation"])
def test_a_changed_file_is_prepared_again(changed, home, tmp_path, capfd):
    """In a folder of its own; and nothing suggests to train another model on it."""
    data, place = tmp_path / "data", place_in(tmp_path, home, "gsm8k", data_dir=tmp_path / "data")
    shutil.copytree(home / "data", data)
    found = gsm8k(home)

    def examples():
        return found.examples_of(found.planned["shipped-r2"], home / "r2", place)

    before = examples()
    assert examples() == before
    write(data / f"gsm8k_augformat.{changed}.jsonl", EQUATIONS[3:])
    after = examples()
    assert after.folder != before.folder
    split = {"train": "train", "validation": "val"}[changed]
    assert read_index(after.folder).notes["documents"] == {"train": 20, "val": 1, split: 17}
    assert (after.checksum != before.checksum) == (changed == "train")
    assert "thoughtbubbles train" not in "".join(capfd.readouterr())


# Rows of GSM8K


def test_gsm8k_trains_on_every_example(answered):
    place, records = answered
    (folder,) = (place.runs / "gsm8k").glob("data-bytes-*")
    index = read_index(folder)
    assert index.notes["documents"] == {"train": 20, "val": 1}
    record = records["shipped-plain"]
    assert record["text"]["examples"] == 20
    assert record["config"]["model"]["block_size"] == 72  # as the model has it
    assert (record["start"], record["steps"], record["epochs"]) == ("plain", 6, 1.2)
    assert record["curve"]  # the validation file was used


def test_gsm8k_records_have_no_question(answered):
    place, records = answered
    test = records["shipped-r2"]["test"]
    assert (test["documents"], test["method"], len(test["samples"])) == (4, "cached", 3)
    assert all(len(text) <= 300 for text in test["samples"])
    assert set(test["streams"]) == {"questions", "answers"}
    assert "plums" not in json.dumps(records["shipped-r2"]).replace(json.dumps(test["samples"]), "")
    assert records["shipped-plain"]["test"]["streams"] is None
    assert gsm8k(place.data_dir.parent).done(place.out)["shipped-r2"] == {0: f"{test['exact_match']['mean']:.1%}"}


def always(token: int) -> Thoughtbubbles:
    """A model that says one token forever."""
    model = Thoughtbubbles(TINY).eval()
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.fill_(1.0)
        model.embedding.weight.zero_()
        model.embedding.weight[token] = 1.0
    return model


def test_answers_that_end_by_themselves(home):
    benchmark = open_benchmark(TASKS["gsm8k"], home / "data")
    silent = measure.measure_answers(always(BYTES.end_of_text), BYTES, benchmark)
    assert (silent["ended"], silent["samples"], silent["answer_tokens"]) == (4, [""] * 3, 0.0)
    endless = measure.measure_answers(always(ord("7")), BYTES, benchmark)
    assert (endless["ended"], set(endless["samples"][0])) == (0, {"7"})
    assert endless["exact_match"]["mean"] == 0.0
    tokens = {kind: each["tokens"] for kind, each in endless["streams"].items()}
    assert tokens["questions"] == sum(len(each["question"]) + 1 for each in QUESTIONS)
    assert tokens["answers"] == 4 * endless["answer_tokens"] == 4 * 72 - tokens["questions"]  # to the context's end


def test_the_exact_match_is_that_of_the_last_number(home):
    """Its answer to everything is 7, which is right once."""
    benchmark = open_benchmark(replace(TASKS["gsm8k"], max_new=1), home / "data")
    found = measure.measure_answers(always(ord("7")), BYTES, benchmark)
    assert found["exact_match"]["mean"] == pytest.approx(0.25)
    assert (found["right"], found["samples"]) == ("0100", ["7"] * 3)


# Tables


def test_a_real_record_has_its_tables(done, answered, tmp_path):
    for place, _ in (done, answered):
        shutil.copytree(place.out, tmp_path, dirs_exist_ok=True)
    mean = done[1]["shipped-r2"]["test"]["by"]["hops"]["3"]["whole_answer"]["mean"]
    (line, *_) = (line for line in clutrr_table(tmp_path).splitlines() if line.startswith("| `shipped-r2` |"))
    assert line.endswith(f"| {100 * mean:.1f} |")
    assert "| `shipped-r2` | bubbles-7m | 1 |" in gsm8k_table(tmp_path)
