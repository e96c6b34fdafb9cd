"""Folders of results, several budgets in one evaluation, and tasks that cannot run."""

import io
import json
import os
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from evals.test_tasks import RECORDS, write
from helpers import SAME_FUNCTION, SAME_ROW, lively_model
from thoughtbubbles.checkpoint import load, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.answers import Answers
from thoughtbubbles.evals.autoregressive import blockwise, compare
from thoughtbubbles.evals.budgets import budget_table
from thoughtbubbles.evals.figures import draw_budgets
from thoughtbubbles.evals.likelihood import Likelihood
from thoughtbubbles.evals.metrics import Answer, fits, score_choices
from thoughtbubbles.evals.results import NAME, home_of, name_of
from thoughtbubbles.evals.run import _budgets, _depends_on, _open_tasks, run
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.evals.tasks.task import Question
from thoughtbubbles.evals.windows import windows_for
from thoughtbubbles.files import damage, write_json, write_manifest
from thoughtbubbles.model.config import ModelConfig

PIQA = TASKS["piqa"].document(RECORDS["piqa"])
PNG = b"\x89PNG\r\n\x1a\n"
SHAPE = {"n_layer": 3, "n_head": 2, "width": 16, "vocab_size": 300, "block_size": 64, "merge": "residual"}
SHAPE |= {"fork_layers": (1, 2), "budget": 1.5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "corpus", seed=0)


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Questions of two benchmarks, three documents each."""
    folder = tmp_path_factory.mktemp("benchmarks")
    write(folder, "piqa", [{**RECORDS["piqa"], "goal": f"Open {what}"} for what in ("a jar", "a door", "a box")])
    good = ("Cats sleep.", "Dogs bark.", "They sing.")
    write(folder, "blimp", [{**RECORDS["blimp"], "sentence_good": text} for text in good])
    return folder


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A checkpoint of a run, with its manifest."""
    step = tmp_path / "run" / "step-00000008"
    save(step / "model", seed=0)
    write_json(step / "state.json", {"step": 8})
    write_manifest(step)
    return step


def write_text(folder: Path, *, seed: int) -> Path:
    write_synthetic(folder, n_tokens=2_000, seed=seed)
    return folder


def save(folder: Path, *, seed: int, **changes) -> Path:
    model = lively_model(ModelConfig(**{**SHAPE, **changes}), seed=seed, dtype=torch.float32)
    return save_model(folder, model, tokenizer=tokenizer("bytes"))


def evaluate(checkpoint: Path, questions: Path, *tasks: str, **changes) -> dict:
    settings = {"tasks": tasks or ("piqa",), "dtype": "float64", **changes}
    return run(Evaluation(checkpoint=checkpoint, data_dir=questions, **settings), World(torch.device("cpu")))


def written(place: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in place.glob("**/results.json")}


# Folders of results


def test_other_settings_have_separate_named_folders(checkpoint, questions, corpus, tmp_path):
    text = {"data": corpus, "windows": 2, "tokens": 8}
    asked = [
        (("piqa",), {}, "piqa-float64"),
        (("piqa",), {"limit": 2, "budget": ("1.25",)}, "piqa-limit2-r1.25-float64"),
        (("piqa",), {"budget": ("1.25", "2"), "dtype": "float32"}, "piqa-r1.25+r2"),
        (("perplexity",), text, "perplexity-corpus-val-windows2-tokens8-float64"),
        (("perplexity",), {**text, "split": "train"}, "perplexity-corpus-train-windows2-tokens8-float64"),
    ]
    found = [evaluate(checkpoint, questions, *tasks, **changes) for tasks, changes, _ in asked]
    assert [each["name"][:-9] for each in found] == [name for *_, name in asked]
    home = checkpoint.parent / "eval" / checkpoint.name
    assert written(home) == {each["name"]: json.loads(json.dumps(each)) for each in found}
    again = evaluate(checkpoint, questions, "piqa", limit=2, budget=("5/4",), batch_tokens=100)  # the same numbers
    assert again["name"][-8:] == found[1]["name"][-8:]


def test_the_name_follows_what_the_numbers_depend_on(corpus, questions, tmp_path):
    """It changes with every setting, and with the content of the text and the questions."""
    model = lively_model(ModelConfig(**SHAPE), dtype=torch.float32)
    benchmarks, text = shutil.copytree(questions, tmp_path / "benchmarks"), shutil.copytree(corpus, tmp_path / "corpus")

    def name(**changes) -> str:
        given = {"data": text, "windows": 2, "tokens": 8, "tasks": ("perplexity", "piqa"), "data_dir": benchmarks}
        settings = Evaluation(checkpoint=Path("x"), **{**given, **changes})
        failed: dict[str, str] = {}
        work = _open_tasks(settings, model, tokenizer("bytes"), World(torch.device("cpu")), failed)
        about = {"weights": 1, "dtype": settings.dtype}
        return name_of(settings, _depends_on(settings, model, _budgets(model, settings), about, work))

    alike = {name(), name(batch=1, batch_tokens=9, answers_at_once=2, fresh=True, out=tmp_path, method="uncached")}
    assert len({each[-8:] for each in alike}) == 1
    changes = {"windows": 3}, {"tokens": 9}, {"split": "train"}, {"limit": 2}, {"dtype": "float64"}, {"budget": ("2",)}
    changes += {"budget": ("1.5", "2")}, {"budget": ("2", "1.5")}, {"tasks": ("piqa",)}, {"tasks": ("piqa", "blimp")}
    every = [name()] + [name(**change) for change in changes]
    shutil.rmtree(text)
    write_text(text, seed=1)
    every.append(name())
    write(benchmarks, "piqa", [RECORDS["piqa"]])
    every += [name(), name(tasks=("piqa", "hellaswag"))]
    assert len({each[-8:] for each in every}) == len(changes) + 4
    assert all(NAME.fullmatch(each) for each in every)
    long = name(tasks=("piqa",) * 50 + ("perplexity",), data=text)
    assert NAME.fullmatch(long)


def test_answers_are_shared_by_all_lists_and_names(checkpoint, questions):
    """A checkpoint is the same by the name of its run, its step or its model; and it is undamaged afterwards."""
    run_folder = checkpoint.parent
    evaluate(run_folder, questions, "piqa", "blimp")
    link = run_folder / "latest"
    link.symlink_to(checkpoint, target_is_directory=True)
    for name, tasks in ((checkpoint, ("blimp",)), (checkpoint / "model", ("blimp", "piqa")), (link, ("piqa",))):
        found = evaluate(name, questions, *tasks)["tasks"]
        assert {task["answered_before"] for task in found.values()} == {3}
    assert home_of(checkpoint / "model") == home_of(link / "model") == run_folder / "eval" / checkpoint.name
    assert damage(checkpoint, required=("state.json",)) is None
    load(run_folder)
    alone = shutil.copytree(checkpoint / "model", run_folder.parent / "alone")
    evaluate(alone, questions)
    assert len(written(alone / "eval")) == 1
    load(alone)


def test_other_weights_of_the_same_name_have_separate_results(checkpoint, questions):
    """A run that was started again: answers and results of the old weights are neither used nor lost."""
    first = evaluate(checkpoint, questions)
    shutil.rmtree(checkpoint)
    save(checkpoint / "model", seed=5)
    second = evaluate(checkpoint, questions)
    assert second["tasks"]["piqa"]["answered_before"] == 0
    assert {first["name"], second["name"]} == set(written(checkpoint.parent / "eval"))
    assert first["weights"] != second["weights"]


def test_a_given_folder_loses_nothing(checkpoint, questions, tmp_path, capsys):
    out = tmp_path / "out"
    few = evaluate(checkpoint, questions, out=out, limit=2)
    assert evaluate(checkpoint, questions, out=out, limit=2)["name"] == few["name"]
    assert set(written(out)) == {"out"}
    whole = evaluate(checkpoint, questions, out=out)
    assert whole["tasks"]["piqa"]["answered_before"] == 2
    assert f"moved them to {out / few['name']}." in capsys.readouterr().err
    assert {name: found["name"] for name, found in written(out).items()} == {
        "out": whole["name"],
        few["name"]: few["name"],
    }
    assert all((folder / "benchmarks.png").read_bytes().startswith(PNG) for folder in (out, out / few["name"]))
    assert not (checkpoint.parent / "eval").exists()


@pytest.mark.parametrize(
    "content", ['{"name": "../../x"}', '{"results": {}}', '{"name": ["x"]}', "[1]", "{", "[" * 10**5]
)
def test_a_file_that_is_not_an_evaluation_is_not_touched(checkpoint, questions, tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"results\.json.*: move it away, or give another --out"):
        evaluate(checkpoint, questions, out=tmp_path)
    assert path.read_text() == content
    assert not list((tmp_path / "answers").iterdir())  # before any work


def test_places_that_cannot_be_written_or_read(checkpoint, questions, corpus, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("x")
    (loop := tmp_path / "loop").symlink_to(loop)
    os.mkfifo(pipe := tmp_path / "pipe")
    piqa, text = ["--tasks", "piqa", "--data-dir", str(questions)], ["--tasks", "perplexity", "--data"]
    long = "x" * 5000
    for arguments, message in (
        ([*piqa, "--out", str(file)], f"--out {file}: cannot be written (Not a directory); give another"),
        ([*piqa, "--out", long], "cannot be written (File name too long); give another"),
        ([*piqa, "--out", str(loop)], f"--out {loop}: cannot be written ("),
        (["--tasks", "piqa", "--data-dir", str(file)], f"--data-dir {file}: is not a folder: give the one with the"),
        (["--tasks", "piqa", "--data-dir", long], "File name too long): give the folder with the benchmarks"),
        (["--tasks", "piqa", "--data-dir", str(loop)], f"--data-dir {loop}: "),
        ([*text, str(pipe)], f"{pipe}"),
        ([*text, long], "File name too long): give a folder written by `thoughtbubbles prepare`"),
        ([*text, str(loop)], f"{loop}"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "--checkpoint", str(checkpoint), "--device", "cpu", *arguments])
        told = str(stopped.value)
        assert message in told
        assert "\n" not in told
        assert len(told) < 1000
    (checkpoint.parent / "eval").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot be written \(.*\); give another folder with --out DIR"):
        evaluate(checkpoint, questions)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_checkpoint(checkpoint, questions, tmp_path):
    checkpoint.parent.chmod(0o555)
    try:
        with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\); give another folder with"):
            evaluate(checkpoint, questions)
        evaluate(checkpoint, questions, out=tmp_path / "out")
    finally:
        checkpoint.parent.chmod(0o755)


# Answers


def good_lines(checkpoint: Path, questions: Path) -> tuple[Path, list[str]]:
    evaluate(checkpoint, questions)
    (path,) = home_of(checkpoint / "model").glob("answers/piqa-*.jsonl")
    return path, path.read_text().splitlines()


def two_answers(folder: Path) -> tuple[Answer, Path, list[bytes]]:
    """An answer that was given to two documents, its file, and the three lines in it."""
    good = score_choices(PIQA, [Likelihood(-1.0, 2, False, 0), Likelihood(-2.0, 1, False, 0)])
    with Answers(folder, "piqa", {"a": 1}) as answers:
        answers.add(0, good)
        answers.add(1, good)
    (path,) = folder.iterdir()
    return good, path, path.read_bytes().splitlines()


def test_damaged_answers_are_left_out(tmp_path):
    """Even if a line is still valid JSON and only its scores have changed."""
    good, path, (header, first, last) = two_answers(tmp_path)
    record = json.loads(first)
    changes = {"scores": dict.fromkeys(good.scores, 0.5)}, {"log_probs": [-9.0, -1.0]}, {"document": 2}, {"more": 1}
    damaged = [json.dumps({**record, **change}).encode() for change in changes]
    damaged += [json.dumps({name: value for name, value in record.items() if name != "crc32"}).encode()]
    damaged += [first[:i] + bytes([first[i] ^ 1]) + first[i + 1 :] for i in range(len(first))]
    damaged += [
        first[:-1],
        b"",
        b"[" * 10**5,
        b"1" * 5000,
        b"\0",
        b'{"document": 1}',
        b"[]",
        b', "crc32": 0}',
        b"\xff\xfe",
    ]
    for line in damaged:
        path.write_bytes(b"\n".join([header, line, last]) + b"\n")
        assert Answers(tmp_path, "piqa", {"a": 1}).read() == {1: good}, line[:80]
    path.write_bytes(b"\n".join([header, first, last]))  # truncated by one byte
    assert Answers(tmp_path, "piqa", {"a": 1}).read() == {0: good}
    path.write_bytes(b"\n".join([b"another header", first, last]) + b"\n")
    assert Answers(tmp_path, "piqa", {"a": 1}).read() == {}
    with Answers(tmp_path, "piqa", {"a": 1}) as answers:
        answers.add(0, good)
    assert Answers(tmp_path, "piqa", {"a": 1}).read() == {0: good}


@pytest.mark.parametrize(
    "change",
    [
        {"document": True},
        {"document": "0"},
        {"time": "now"},
        {"time": None},
        {"truncated": -1},
        {"scores": [1.0]},
        {"scores": {"accuracy": None}},
        {"scores": {"accuracy": 10**400}},
        {"groups": {"a": 1}},
        {"log_probs": ["x"]},
        {"tokens": 3},
        {"text": 5},
    ],
    ids=str,
)
def test_wrong_kinds_under_a_right_checksum_are_left_out(change, tmp_path):
    good, path, (header, first, last) = two_answers(tmp_path)
    record = {name: value for name, value in json.loads(first).items() if name != "crc32"}
    for changed, expected in ((record, {0: good, 1: good}), ({**record, **change}, {1: good})):
        text = json.dumps(changed)[:-1].encode()
        line = text + b', "crc32": %d}' % zlib.crc32(text)
        path.write_bytes(b"\n".join([header, line, last]) + b"\n")
        assert Answers(tmp_path, "piqa", {"a": 1}).read() == expected


def test_an_answer_to_something_else_does_not_fit():
    good = score_choices(PIQA, [Likelihood(-1.0, 2, False, 0), Likelihood(-2.0, 1, False, 0)])
    assert fits(PIQA, good)
    for change in (
        {"scores": {"accuracy": 1.0}},
        {"groups": {"set": "x"}},
        {"log_probs": [-1.0]},
        {"tokens": [1, 1, 1]},
        {"tokens": [0, 1]},
    ):
        assert not fits(PIQA, replace(good, **change)), change
    free = Answer(scores={"accuracy": 1.0}, text="12")
    assert fits(Question("?", "12"), free)
    assert not fits(Question("?", "12"), replace(free, text=None))
    assert not fits(PIQA, free)


def test_a_damaged_answer_is_computed_again(checkpoint, questions):
    whole = evaluate(checkpoint, questions)["tasks"]["piqa"]
    path, (header, first, *others) = good_lines(checkpoint, questions)
    wrong = {**json.loads(first), "scores": dict.fromkeys(json.loads(first)["scores"], 0.5)}
    path.write_text("\n".join([header, json.dumps(wrong), *others]) + "\n")
    again = evaluate(checkpoint, questions)["tasks"]["piqa"]
    assert again["answered_before"] == 2
    assert again["accuracy"] == whole["accuracy"]


def test_concurrent_commands_do_not_truncate_each_others_answers(tmp_path):
    def answer(right: float) -> Answer:
        return Answer(scores={"accuracy": right}, text="x")

    with Answers(tmp_path, "gsm8k", {"a": 1}) as one:
        one.add(0, answer(1.0))
        with Answers(tmp_path, "gsm8k", {"a": 1}) as two:
            two.add(1, answer(0.0))
            one.add(2, answer(1.0))
    assert len(list(tmp_path.iterdir())) == 2
    with Answers(tmp_path, "gsm8k", {"a": 1}) as later:
        assert sorted(later.read()) == [0, 1, 2]
    assert Answers(tmp_path, "gsm8k", {"a": 2}).read() == {}


# Several budgets


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["causal", "block"])
def test_budgets_are_compared_on_the_same_tokens_and_documents(questions, corpus, tmp_path, selection):
    folder = save(tmp_path / "model", seed=0, selection=selection)
    text = {"data": corpus, "windows": 3, "tokens": 8, "out": tmp_path / "many"}
    names, budgets = ("perplexity", "piqa", "blimp"), ("1", "1.5", "2")
    many = evaluate(folder, questions, *names, budget=budgets, **text)
    paired = many["budgets"]
    assert (many["budget"], paired["reference"], list(paired["others"])) == ("1", "1", ["1.5", "2"])
    assert json.loads((tmp_path / "many" / "results.json").read_text())["budgets"]["tasks"] == paired["tasks"]

    model = load(folder, dtype=torch.float64)
    settings = Evaluation(checkpoint=folder, data=corpus, windows=3, tokens=8)
    windows = windows_for(settings, model.config, tokenizer("bytes"))
    scores = [blockwise(model, windows, budget=budget) for budget in budgets]
    rows = paired["tasks"]["perplexity"]["series"]["blockwise"]["rows"]
    assert len(paired["tasks"]["perplexity"]["series"]) == (2 if selection == "causal" else 4)
    assert rows[0]["difference"] is None
    for row, each in zip(rows[1:], scores[1:], strict=True):
        expected = compare(each, scores[0])
        assert row["difference"]["mean"] == pytest.approx(expected.mean, abs=SAME_FUNCTION)
        assert row["difference"]["standard_error"] == pytest.approx(expected.standard_error, abs=SAME_FUNCTION)
        assert row["difference"]["standard_error"] < row["standard_error"]

    alone = {b: evaluate(folder, questions, "piqa", budget=(b,), out=tmp_path / f"r{b}") for b in budgets}
    gold, losses, right = RECORDS["piqa"]["label"], [], []
    for budget in budgets:
        (path,) = (tmp_path / f"r{budget}" / "answers").glob("piqa-*.jsonl")
        lines = sorted((json.loads(line) for line in path.read_text().splitlines()[1:]), key=lambda a: a["document"])
        losses.append(np.array([-line["log_probs"][gold] / line["tokens"][gold] for line in lines]))
        right.append(np.array([line["scores"]["accuracy"] for line in lines]))
        found = many if budget == "1" else paired["others"][budget]
        assert found["tasks"]["piqa"]["accuracy"] == alone[budget]["tasks"]["piqa"]["accuracy"]
    for name, values in (("loss", losses), ("accuracy", right)):
        for row, each in zip(paired["tasks"]["piqa"]["series"][name]["rows"], values, strict=True):
            assert row["mean"] == pytest.approx(each.mean(), abs=SAME_ROW)
            if row["difference"] is not None:
                gap = each - values[0]
                assert row["difference"]["mean"] == pytest.approx(gap.mean(), abs=SAME_ROW)
                assert row["difference"]["standard_error"] == pytest.approx(gap.std(ddof=1) / np.sqrt(3), abs=SAME_ROW)
    assert np.abs(losses[1] - losses[0]).max() > 1e-3  # the budgets do differ here


def test_the_dial_in_80_columns_and_as_a_figure(checkpoint, questions, corpus, tmp_path, capsys):
    text = ("--data", str(corpus), "--windows", "3", "--tokens", "8")
    arguments = ["--tasks", "perplexity", "piqa", "--data-dir", str(questions), *text, "--out", str(tmp_path / "out")]
    main(["eval", "--checkpoint", str(checkpoint), "--device", "cpu", *arguments, "--budget", "1", "1.0", "2", "4/3"])
    shown = capsys.readouterr().out
    assert "against r = 1" in shown
    assert f"Written: {tmp_path / 'out' / 'results.json'} and {tmp_path / 'out' / 'budgets.png'}" in shown
    path = tmp_path / "out" / "results.json"
    results = json.loads(path.read_text())
    assert [row["budget"] for row in results["budgets"]["tasks"]["piqa"]["series"]["loss"]["rows"]] == ["1", "2", "4/3"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(budget_table(results["budgets"], title="title", is_causal=False))
    lines = console.export_text().splitlines()
    assert "…" not in "".join(lines)
    assert all(len(line) <= 80 and line[-1] in "┓┃┩│┘┤" for line in lines[1:])
    moved = tmp_path / "elsewhere" / "results.json"
    moved.parent.mkdir()
    shutil.copy(path, moved)  # from the file alone
    assert draw_budgets(moved).read_bytes().startswith(PNG)


def test_every_budget_of_the_list_is_checked_first(checkpoint, questions):
    for budgets, message in ((("1", "0.5"), "--budget = 0.5 is below 1"), (("1", "1e99999999"), "--budget = ")):
        with pytest.raises(ValueError, match=message):
            evaluate(checkpoint, questions, budget=budgets)
    assert not (checkpoint.parent / "eval").exists()


def test_a_budget_that_is_not_a_limit_says_so(checkpoint, questions, capsys):
    evaluate(checkpoint, questions, budget=("1", "99"), limit=1)
    assert "budget = 99: " in capsys.readouterr().err


def test_the_harness_takes_one_budget():
    with pytest.raises(ValueError, match="--budget 1 2: with --harness give one, or leave out --harness"):
        Evaluation(checkpoint=Path("x"), tasks=("piqa",), harness=True, budget=("1", "2"))
    Evaluation(checkpoint=Path("x"), tasks=("perplexity",), harness=True, budget=("1",))  # it has its own task names


# Tasks that cannot run


def test_one_that_cannot_run_does_not_cancel_the_others(checkpoint, questions, corpus, tmp_path, capsys):
    """A missing or damaged file, a choice longer than the context length, text of another tokenizer: all reported."""
    benchmarks = shutil.copytree(questions, tmp_path / "benchmarks")
    write(benchmarks, "lambada", [RECORDS["lambada"], "{"])
    write(benchmarks, "arc_easy", [{**RECORDS["arc_easy"], "choices": ["a", "b" * 100]}])
    (tmp_path / "some.txt").write_text("some text " * 100)
    main(
        [
            "prepare",
            str(tmp_path / "some.txt"),
            "--out",
            str(tmp_path / "gpt2"),
            "--tokenizer",
            "gpt2",
            "--val-fraction",
            "0",
        ]
    )
    tasks = ["perplexity", "lambada", "arc_easy", "hellaswag", "piqa"]
    data = ["--data-dir", str(benchmarks), "--data", str(tmp_path / "gpt2"), "--split", "train"]
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "--checkpoint", str(checkpoint), "--device", "cpu", "--tasks", *tasks, *data])
    assert stopped.value.code == (
        "thoughtbubbles eval: 4 of 5 tasks could not run: perplexity, lambada, arc_easy, hellaswag"
    )
    (results,) = written(checkpoint.parent / "eval").values()
    assert list(results["tasks"]) == ["piqa"]
    assert results["tasks"]["piqa"]["documents"] == 3
    shown = capsys.readouterr()
    for name, reason in {
        "perplexity": "made with tokenizer 'gpt2', but the model was trained with 'bytes'",
        "lambada": "lambada_openai.test.jsonl, line 2: ",
        "arc_easy": "document 0: a choice has 101 tokens, more than the model's block_size = 64",
        "hellaswag": "has no hellaswag.validation.jsonl",
    }.items():
        assert reason in results["failed"][name].removeprefix(f"{name}, ")
        assert f"│ {name} " in shown.out
        assert f"{name} cannot run: " in shown.err
    assert "hellaswag.validation.jsonl" in shown.out
    evaluate(checkpoint, benchmarks, "piqa", "hellaswag")  # in Python the caller looks at what failed


def test_one_that_fails_later_does_not_cancel_the_others(checkpoint, questions):
    path, _ = good_lines(checkpoint, questions)
    path.unlink()
    path.mkdir()
    results = evaluate(checkpoint, questions, "piqa", "blimp")
    assert results["failed"] == {"piqa": f"{path} is not a file: delete it; its documents are answered again"}
    assert results["tasks"]["blimp"]["documents"] == 3


def test_where_nothing_can_run_nothing_is_written(checkpoint, questions, tmp_path):
    with pytest.raises(ValueError, match=r"^hellaswag: .* has no hellaswag.*\(lambada cannot run either\)$"):
        evaluate(checkpoint, questions, "hellaswag", "lambada")
    with pytest.raises(ValueError, match="--tasks helaswag: there is no such task"):
        evaluate(checkpoint, questions, "piqa", "helaswag")
    with pytest.raises(ValueError, match="--data is missing"):
        evaluate(checkpoint, questions, "piqa", "perplexity")
    assert not (checkpoint.parent / "eval").exists()


@pytest.mark.slow
def test_ranks_agree_on_what_cannot_run(checkpoint, questions):
    """An error on one rank is an error on all; no rank waits, and the other tasks run."""
    path, _ = good_lines(checkpoint, questions)
    path.unlink()
    path.with_name(path.name.replace(".jsonl", ".rank-1.jsonl")).mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "thoughtbubbles", "eval", "--checkpoint", str(checkpoint), "--tasks", "piqa", "blimp", "lambada"]
    command += ["--data-dir", str(questions), "--device", "cpu", "--dtype", "float64"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert told.returncode != 0
    assert "2 of 3 tasks could not run: piqa, lambada" in told.stderr
    assert "Traceback" not in told.stderr.split("ChildFailedError")[0].split("torch/distributed")[0]
    found = [found for found in written(checkpoint.parent / "eval").values() if found["failed"]]
    assert [list(each["failed"]) for each in found] == [["piqa", "lambada"]]
    assert found[0]["tasks"]["blimp"]["documents"] == 3
