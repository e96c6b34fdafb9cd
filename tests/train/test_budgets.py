"""`--budgets`: each step draws one at random, by seed and step. `--forks-from`: until then the budget is 1."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest
from runs import assert_same_bits, small_run
from safetensors.torch import load_file

from thoughtbubbles.checkpoint import load
from thoughtbubbles.model.cost import cost
from thoughtbubbles.train.config import RunConfig, differences
from thoughtbubbles.train.fields import from_record
from thoughtbubbles.train.loop import train

BUDGETS = (1.0, 1.5, 4.0)
PLAIN = {"model_merge": "original", "model_fork_layers": ()}
UNSCORED = {"model_fork_layers": (1,), "model_scores": False}
FED = {"model_merge": "forks", "model_fork_reach": 8, "model_head_gate": True, **UNSCORED, "model_feedback": True}


def steps_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def validated(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["validation_loss"] for line in lines if "validation_loss" in line]


def sampled(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["sample"] for line in lines if "sample" in line]


@pytest.mark.slow
def test_all_budgets_come_about_equally_often_and_another_seed_draws_others(tmp_path):
    run = small_run(tmp_path / "run", budgets=BUDGETS)
    drawn = [run.budget_of(step) for step in range(3000)]
    assert set(drawn) == set(BUDGETS)
    assert all(900 < n < 1100 for n in Counter(drawn).values())
    assert drawn != [replace(run, seed=1).budget_of(step) for step in range(3000)]
    assert replace(run, budgets=()).budget_of(0) is None


def test_a_run_uses_the_budget_that_it_reports(tmp_path):
    run = small_run(tmp_path / "run", budgets=BUDGETS, log_every=1)
    result = train(run)
    steps = steps_of(run.out)
    assert [step["budget"] for step in steps] == [run.budget_of(n) for n in range(run.steps)]
    for step in steps:
        assert all(fork["streams"] <= step["budget"] for fork in step["forks"])
    assert {step["forks"][-1]["streams"] for step in steps if step["budget"] == 1} == {1.0}
    own = train(small_run(tmp_path / "own", log_every=1))
    assert result.validation_loss != own.validation_loss
    assert "budget" not in steps_of(own.folder)[0]


def test_a_resumed_run_draws_the_same_budgets(tmp_path):
    whole = small_run(tmp_path / "whole", budgets=BUDGETS, optim_schedule="constant")
    train(whole)
    train(small_run(tmp_path / "resumed", budgets=BUDGETS, optim_schedule="constant", steps=6))
    train(replace(whole, out=tmp_path / "resumed"), resume=True)
    assert_same_bits(tmp_path / "resumed" / "step-00000008", tmp_path / "whole" / "step-00000008")


def test_other_budgets_are_another_run(tmp_path):
    run = small_run(tmp_path / "run", budgets=BUDGETS)
    assert differences(run.as_dict(), replace(run, budgets=(1.0, 2.0)).as_dict())
    train(replace(run, tokens=run.tokens_per_step))
    with pytest.raises(ValueError, match="budgets was"):
        train(replace(run, budgets=(1.0, 2.0)), resume=True)


def test_flops_are_the_mean_over_the_budgets(tmp_path):
    run = small_run(tmp_path / "run")
    one, four = (cost(replace(run.model, budget=budget)).flops for budget in (1, 4))
    assert run.flops_per_row == cost(run.model).flops
    assert replace(run, budgets=(1.0, 4.0)).flops_per_row == (one + four) / 2


def test_forks_begin_late(tmp_path):
    """The steps before are those of a run with budget 1, bit by bit; from then on every step has the model's own."""
    late = small_run(tmp_path / "late", forks_from=0.5, log_every=1, eval_every=2, steps=8)
    train(late)
    train(small_run(tmp_path / "never", model_budget=1, log_every=1, eval_every=2, steps=8))
    ours, never = (steps_of(tmp_path / name) for name in ("late", "never"))
    assert [line["loss"] for line in ours[:4]] == [line["loss"] for line in never[:4]]
    assert [line["loss"] for line in ours[4:]] != [line["loss"] for line in never[4:]]
    ours, never = (validated(tmp_path / name) for name in ("late", "never"))
    assert [a == b for a, b in zip(ours, never, strict=True)] == [True, True, False, False]
    assert [late.budget_of(step) for step in range(8)] == [1.0] * 4 + [None] * 4
    assert [late.validation_budget(done) for done in range(9)] == [*[1.0] * 5, *[None] * 4]
    assert replace(late, forks_from=1.0).validation_budget(8) is None  # the model that is kept
    assert small_run(tmp_path / "run").validation_budget(0) is None
    assert late.flops_per_row == (cost(late.model).flops + cost(replace(late.model, budget=1)).flops) / 2


@pytest.mark.parametrize("model", [FED, UNSCORED], ids=["feedback", "copies"])
def test_without_scores_a_run_whose_forks_begin_late_begins_as_the_plain_model(tmp_path, model):
    """Bit by bit: losses, validation and samples."""
    late = small_run(tmp_path / "late", log_every=1, eval_every=2, forks_from=0.5, **model)
    plain = replace(late, out=tmp_path / "plain", model=late.model.without_forks(), forks_from=0.0)
    train(late)
    train(plain)
    ours, never = (steps_of(run.out) for run in (late, plain))
    assert [line["loss"] for line in ours[:4]] == [line["loss"] for line in never[:4]]
    assert all(a["loss"] != b["loss"] for a, b in zip(ours[5:], never[5:], strict=True))
    assert [line["gradient_norm"] for line in ours[:4]] == [line["gradient_norm"] for line in never[:4]]
    for found in (validated, sampled):
        a, b = found(late.out), found(plain.out)
        half = len(a) // 2
        assert a[:half] == b[:half]
        assert all(one != other for one, other in zip(a[half:], b[half:], strict=True))
    assert ["forks" in line for line in ours] == [False] * 4 + [True] * 4
    assert late.flops_per_row == (cost(late.model).flops + cost(plain.model).flops) / 2
    assert plain.model == small_run(tmp_path / "other", **PLAIN, model_head_gate=late.model.head_gate).model


def test_without_scores_budgets_of_1_are_the_plain_model(tmp_path):
    """A step with budget 1 moves none of the forks' parameters; the run can be resumed between the two kinds."""
    run = small_run(tmp_path / "run", budgets=(1.0, 2.0), log_every=1, save_every=1, save_keep=9, **FED)
    train(run)
    assert {run.budget_of(n) for n in range(run.steps)} == {1.0, 2.0}
    assert [line["forks"][0]["streams"] if "forks" in line else 1 for line in steps_of(run.out)] == [
        run.budget_of(n) for n in range(run.steps)
    ]
    weights = [load_file(run.out / f"step-{n:08}" / "model" / "model.safetensors") for n in range(1, run.steps + 1)]
    for n in range(1, run.steps):
        moved = {name for name, weight in weights[n].items() if not weight.equal(weights[n - 1][name])}
        assert moved == {name for name in weights[n] if run.budget_of(n) == 2 or ".forks." not in f".{name}"}
    resumed = replace(run, out=tmp_path / "resumed")
    shutil.copytree(run.out, resumed.out)
    for n in range(4, run.steps + 1):
        shutil.rmtree(resumed.out / f"step-{n:08}")
    train(resumed, resume=True)
    assert_same_bits(resumed.out / "step-00000008", run.out / "step-00000008")


def test_a_checkpoint_from_before_the_forks_is_one_of_the_whole_model(tmp_path):
    """It is written while validation runs, and the model is plain for that."""
    run = small_run(tmp_path / "run", forks_from=0.75, save_every=1, save_keep=9, eval_every=1, **FED)
    train(run)
    for step in range(1, run.steps + 1):
        assert load(run.out / f"step-{step:08}").config == run.model, step


def test_a_longer_run_does_not_take_back_its_forks(tmp_path):
    options = {"forks_from": 0.5, "optim_schedule": "constant", "optim_warmup": 0.0, "save_every": 1, "save_keep": 9}
    short = small_run(tmp_path / "run", steps=4, **options)
    train(short)
    with pytest.raises(ValueError, match=r"--forks-from 0\.5 tokens would fork after step 4, not after step 2\. Start"):
        train(replace(short, tokens=2 * short.tokens), resume=True)
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / f"step-{step:08}")
    assert train(replace(short, tokens=2 * short.tokens), resume=True).finished  # none had forked yet


def test_a_run_from_before_a_setting_existed_is_the_same_run(tmp_path):
    now = small_run(tmp_path / "run").as_dict()
    before = {name: value for name, value in now.items() if name not in ("forks_from", "budgets")}
    before["model"] = {name: value for name, value in now["model"].items() if name not in ("fork_reach", "own_scores")}
    assert not differences(before, now)
    assert differences(before, {**now, "model": {**now["model"], "own_scores": True}}) == [
        "model.own_scores was False, is True"
    ]
    assert differences(before, {**now, "forks_from": 0.5}) == ["forks_from was 0.0, is 0.5"]


def test_a_run_with_a_setting_that_is_gone(tmp_path):
    """`second_pass` is: a run that did not use it goes on."""
    now = small_run(tmp_path / "run")
    before = now.as_dict()
    before["model"]["second_pass"] = None
    assert from_record(RunConfig, before, where="run.json") == now
    before["model"]["second_pass"] = 3
    with pytest.raises(ValueError, match="second_pass = 3: this version does not have it"):
        from_record(RunConfig, before, where="run.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budgets": (0.5,)}, "--budgets = 0.5 is below 1"),
        ({"budgets": (1.0, 1e18)}, "--budgets is too large"),
        ({"budgets": (2.0,), "model_fork_layers": (), "model_merge": "original"}, "without fork layers has no budget"),
        ({"forks_from": 1.5}, "--forks-from 1.5: give a fraction"),
        ({"forks_from": float("nan")}, "--forks-from nan: give a fraction"),
        ({"forks_from": 0.5, "model_fork_layers": (), "model_merge": "original"}, "without fork layers never forks"),
        (
            {"budgets": (1.5,), "model_scores": False, "model_fork_layers": (1,)},
            "--budgets = 1.5: without scores .* give 2 or more",
        ),
    ],
)
def test_budgets_that_make_no_sense(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        small_run(tmp_path / "run", **dict(reversed(changes.items())))
