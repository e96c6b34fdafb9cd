"""Results are neither lost nor mixed up: by a run that fails, with --fresh, or with another model."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from evals.test_results import checkpoint, evaluate, questions, save, written  # noqa: F401 (fixtures)
from evals.test_tasks import RECORDS, write
from helpers import lively_model
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.tokenizer import Bytes, save_tokenizer, tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.answers import Answers
from thoughtbubbles.evals.errors import agree
from thoughtbubbles.evals.metrics import Answer, mean_and_error
from thoughtbubbles.evals.results import home_of, make_folders, remove_empty
from thoughtbubbles.model.config import ModelConfig

# ruff: noqa: F811 (fixtures are arguments)


def block_answers(checkpoint: Path, task: str) -> list[Path]:
    """Puts folders in place of answer files: the task opens, and fails later."""
    paths = sorted((home_of(checkpoint / "model") / "answers").glob(f"{task}-*.jsonl"))
    for path in paths:
        path.unlink()
        path.mkdir()
    return paths


@pytest.mark.parametrize("budgets", [(), ("1", "2")])
def test_numbers_of_a_task_that_fails_later_stay(checkpoint, questions, budgets, capsys):
    tasks = ("piqa", "blimp")
    whole = evaluate(checkpoint, questions, *tasks, budget=budgets)
    block_answers(checkpoint, "piqa")
    for _ in range(2):
        results = evaluate(checkpoint, questions, *tasks, budget=budgets)
        assert results["kept"] == {"piqa": whole["time"]}
        assert f"piqa could not run now: its numbers in {home_of(checkpoint / 'model')}" in capsys.readouterr().err
        assert list(results["failed"]) == ["piqa"]
        assert list(results["tasks"]) == [*tasks]
        assert results["tasks"]["piqa"] == whole["tasks"]["piqa"]
        if budgets:
            assert results["budgets"]["tasks"]["piqa"] == whole["budgets"]["tasks"]["piqa"]
            assert (
                results["budgets"]["others"]["2"]["tasks"]["piqa"] == whole["budgets"]["others"]["2"]["tasks"]["piqa"]
            )
    (found,) = written(checkpoint.parent / "eval").values()
    assert found["tasks"]["piqa"] == whole["tasks"]["piqa"]
    (path,) = checkpoint.parent.glob("eval/*/*/results.json")
    path.write_text(path.read_text().replace('"kept"', '"lost"'))  # damaged: as if it did not exist
    assert list(evaluate(checkpoint, questions, *tasks, budget=budgets)["tasks"]) == ["blimp"]


def test_where_all_fail_later_no_folder_is_left(checkpoint, questions):
    evaluate(checkpoint, questions)
    (path,) = block_answers(checkpoint, "piqa")
    eval_folder = checkpoint.parent / "eval"
    shutil.rmtree(next(eval_folder.glob("*/piqa-*")))
    with pytest.raises(ValueError, match=r"^piqa: .* is not a file"):
        evaluate(checkpoint, questions)
    assert list(path.parent.parent.iterdir()) == [path.parent]
    model = lively_model(ModelConfig(n_layer=1, n_head=1, width=8, vocab_size=300, block_size=64), dtype=torch.float32)
    torch.nn.init.constant_(model.final_norm.weight, math.nan)
    save_model(checkpoint.parent.parent / "nan", model, tokenizer=tokenizer("bytes"))
    with pytest.raises(ValueError, match="the model's logits are NaN"):
        evaluate(checkpoint.parent.parent / "nan", questions)
    assert [path for path in (checkpoint.parent.parent / "nan").glob("eval/*") if path.name != "answers"] == []


def test_folders_that_are_empty_are_removed_and_no_others(tmp_path):
    home = tmp_path / "run" / "eval" / "step-8"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    make_folders(home, "one", is_given=False)
    (make_folders(home, "two", is_given=False) / "results.json").write_text("{}")
    remove_empty(home, "one")
    assert [path.name for path in home.iterdir()] == ["two"]
    remove_empty(home, "two")
    shutil.rmtree(home / "two")
    remove_empty(home, "two")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_another_tokenizer_is_another_evaluation(questions, tmp_path):
    folder = save(tmp_path / "model", seed=0, vocab_size=50_304)
    first = evaluate(folder, questions)
    save_tokenizer(tokenizer("gpt2"), folder)
    second = evaluate(folder, questions)
    assert second["weights"] == first["weights"]
    assert second["tasks"]["piqa"]["answered_before"] == 0
    assert set(written(folder / "eval")) == {first["name"], second["name"]}


def test_a_model_that_is_saved_again_keeps_its_evaluations(questions, tmp_path):
    class Broken(Bytes):
        def _hugging_face_model(self):
            raise OSError("the disk is full")

    folder = save(tmp_path / "model", seed=0)
    first = evaluate(folder, questions)
    everything = {path.relative_to(folder): path.read_bytes() for path in folder.glob("eval/**/*") if path.is_file()}
    model = lively_model(ModelConfig(n_layer=1, n_head=1, width=8, vocab_size=300, block_size=64), dtype=torch.float32)
    with pytest.raises(OSError, match="the disk is full"):
        save_model(folder, model, tokenizer=Broken())
    assert evaluate(folder, questions)["tasks"]["piqa"]["answered_before"] == 3
    save_model(folder, model, tokenizer=tokenizer("bytes"))
    assert {path: (folder / path).read_bytes() for path in everything if path.suffix == ".jsonl"} == {
        path: content for path, content in everything.items() if path.suffix == ".jsonl"
    }
    assert set(written(folder / "eval")) == {first["name"]}
    assert evaluate(folder, questions)["tasks"]["piqa"]["answered_before"] == 0  # they are for other weights


def test_a_fresh_start_with_few_documents_leaves_the_others(checkpoint, questions):
    evaluate(checkpoint, questions)
    few = evaluate(checkpoint, questions, fresh=True, limit=1)["tasks"]["piqa"]
    assert (few["documents"], few["answered_before"]) == (1, 0)
    assert evaluate(checkpoint, questions)["tasks"]["piqa"]["answered_before"] == 3


def test_the_newest_answer_counts_whoever_gave_it(tmp_path):
    for rank, right in ((0, 0.0), (1, 0.25), (2, 0.5), (0, 1.0)):
        with Answers(tmp_path, "gsm8k", {"a": 1}, rank=rank) as answers:
            answers.add(7, Answer(scores={"accuracy": right}, text="x"))
        assert Answers(tmp_path, "gsm8k", {"a": 1}).read()[7].scores == {"accuracy": right}


def test_running_out_of_cpu_memory_is_an_error_like_any_other():
    def too_much() -> torch.Tensor:
        return torch.empty(1 << 55, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="memory"):
        too_much()
    with pytest.raises(ValueError, match=r"^out of memory: use smaller batches"):
        agree(World(torch.device("cpu")), too_much)
    with pytest.raises(RuntimeError, match="shape"):  # a bug of ours is not caught
        agree(World(torch.device("cpu")), lambda: torch.ones(3).view(2))


def test_a_looping_link_does_not_cancel_the_others(checkpoint, questions, tmp_path):
    (loop := tmp_path / "loop").symlink_to(loop)
    results = evaluate(checkpoint, questions, "perplexity", "piqa", data=loop)
    assert list(results["tasks"]) == ["piqa"]
    assert str(loop) in results["failed"]["perplexity"]
    assert "\n" not in results["failed"]["perplexity"]


def test_means_of_what_is_not_finite_or_nearly_not():
    assert mean_and_error([math.inf, 1.0]) == (math.inf, None)
    mean, error = mean_and_error([math.inf, -math.inf])
    assert math.isnan(mean)
    assert error is None
    assert mean_and_error([math.nan])[1] is None
    assert mean_and_error([1e200, -1e200]) == pytest.approx((0.0, 1e200))
    assert mean_and_error([1.5e308, 1.5e308]) == (1.5e308, 0.0)
    assert mean_and_error([1.7e308, -1.7e308, -1.7e308])[1] is None


def test_several_budgets_report_truncation_and_draw_the_groups(checkpoint, tmp_path, capsys):
    benchmarks, out = tmp_path / "benchmarks", tmp_path / "out"
    benchmarks.mkdir()
    write(benchmarks, "blimp", [{**RECORDS["blimp"], "UID": name} for name in ("one", "two")])
    write(benchmarks, "lambada", [{**RECORDS["lambada"], "context": "many words " * 20}])
    arguments = ["--tasks", "blimp", "lambada", "--data-dir", str(benchmarks), "--out", str(out), "--budget", "1", "2"]
    main(["eval", "--checkpoint", str(checkpoint), "--device", "cpu", *arguments])
    shown = capsys.readouterr().out
    assert "With r = 1, LAMBADA: 1 of 1 documents were longer than the model's context length; " in shown
    assert "With r = 1, LAMBADA: perplexity of the last word " in shown
    assert {path.name for path in out.glob("*.png")} == {"budgets.png", "benchmarks.png", "blimp-by-set.png"}
    assert f"{out / 'blimp-by-set.png'}" in shown
    assert "acc_norm" not in shown  # which the table does not have


def test_other_pictures_stay_where_they_are(checkpoint, questions, tmp_path):
    (tmp_path / "loss-by-step.png").write_text("mine")
    benchmarks = Path(shutil.copytree(questions, tmp_path / "benchmarks"))
    write(benchmarks, "blimp", [{**RECORDS["blimp"], "UID": name} for name in ("one", "two")])
    few = evaluate(checkpoint, benchmarks, "blimp", out=tmp_path)
    evaluate(checkpoint, benchmarks, "piqa", out=tmp_path)
    assert (tmp_path / "loss-by-step.png").read_text() == "mine"
    assert {path.name for path in (tmp_path / few["name"]).iterdir()} == {
        "results.json",
        "benchmarks.png",
        "blimp-by-set.png",
    }
