"""The benchmark of the training step: it measures real steps, and does not time wrong results."""

import json
import math
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thoughtbubbles.bench.cases import ROWS, default_cases, draw, find_cases, forms
from thoughtbubbles.bench.check import BenchBatch, WrongResult, compare, one_row_counts, reference_of, require
from thoughtbubbles.bench.measure import Failed, Measured, forward_backward, make_ready, product_tflops, run_cases
from thoughtbubbles.cli import main
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.model.cost import cost
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.recipes.reproduce.records import STEPS_FILE
from thoughtbubbles.train.config import ComputeConfig

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def prepared(name: str, precision: str = "float32"):
    (case,) = find_cases([name])
    ready = make_ready(case.config, CPU, ComputeConfig(precision=precision))
    batch = draw(case)
    return ready, BenchBatch(*(torch.from_numpy(array) for array in (batch.ids, batch.targets, batch.lengths)))


def agreement(ready, reference, batch, row=1):
    def run(given):
        return forward_backward(ready, given, trace=True)

    return compare(ready.model, reference, batch, row=row, forward_backward=run)


@pytest.mark.slow
def test_the_numbers_belong_together():
    names = ["nano-plain-double", "nano-r4-causal-mixture", "nano-r2-block-residual", "nano-r2-private-residual"]
    cases, reported = find_cases(names, rows=3), []
    product = product_tflops(CPU)
    found = run_cases(cases, CPU, product=product, repeats=3, report=reported.append)
    assert found == reported
    assert product > 0
    for case, measured in zip(cases, found, strict=True):
        assert isinstance(measured, Measured), measured
        assert (measured.name, measured.rows, measured.tokens) == (case.name, 3, case.config.block_size)
        assert measured.flops == 3 * cost(case.config).flops
        assert measured.parameters == cost(case.config).parameters
        for speed in (measured.forward_backward, measured.step):
            assert 0 < speed.low <= speed.milliseconds <= speed.high
            seconds = speed.milliseconds / 1000
            assert speed.tokens_per_second * seconds == pytest.approx(3 * case.config.block_size)
            assert speed.tflops * seconds == pytest.approx(measured.flops / 1e12)
            assert speed.share_of_product == pytest.approx(speed.tflops / product)
        assert measured.same_bits_twice
        assert measured.compile_seconds >= 0
        assert math.isfinite(measured.check.worst_gradient)


@pytest.mark.parametrize("form", ["plain", "copy-3", "r2-causal-mixture", "r4-block-residual"])
def test_the_check_passes_in_bfloat16(form):
    ready, batch = prepared(f"nano-{form}", "bf16")
    found = agreement(ready, reference_of(ready.model), batch)
    require(found, "bf16")
    assert found.gradient > 1e-4, "rounding must show, or nothing was rounded"


@pytest.mark.parametrize(
    ("name", "amount", "complaint"),
    [
        ("blocks.2.mlp.up.weight", 0.01, "gradient off by"),
        ("embedding.weight", 1.0, "loss off by"),
        ("forks.2.score.weight", 0.1, "gradient off by"),
    ],
)
def test_the_check_catches_other_weights(name, amount, complaint):
    ready, batch = prepared("nano-r2-causal-residual")
    reference = deepcopy(reference_of(ready.model))
    require(agreement(ready, reference, batch), "float32")
    with torch.no_grad():
        ready.model.get_parameter(name).add_(torch.randn_like(ready.model.get_parameter(name)), alpha=amount)
    with pytest.raises(WrongResult, match=complaint):
        require(agreement(ready, reference, batch), "float32")


def test_the_check_catches_other_decisions():
    """Survivors that do not follow from the scores: given them, the gradient is right; the decisions are not."""
    ready, batch = prepared("nano-r2-block-residual")
    causal = make_ready(find_cases(["nano-r2-causal-residual"])[0].config, CPU, ComputeConfig())
    causal.model.load_state_dict(ready.model.state_dict())
    found = agreement(causal, reference_of(ready.model), batch)
    assert found.gradient < 1e-3
    with pytest.raises(WrongResult, match="decisions"):
        require(found, "float32")


def test_the_check_catches_a_gradient_that_is_missing():
    """Too small to show in the global gradient error."""
    ready, batch = prepared("nano-r2-causal-residual")
    name, parameter = "forks.3.score.weight", ready.model.get_parameter("forks.3.score.weight")
    reference = reference_of(ready.model)
    parameter.register_hook(torch.zeros_like)
    found = agreement(ready, reference, batch)
    assert (found.worst_tensor, found.worst_gradient) == (name, pytest.approx(1.0))
    with pytest.raises(WrongResult, match=name):
        require(found, "bf16")


def test_numbers_that_are_not_numbers_are_wrong():
    ready, batch = prepared("nano-plain")
    reference = deepcopy(reference_of(ready.model))
    with torch.no_grad():
        ready.model.final_norm.bias.fill_(math.nan)
    with pytest.raises(WrongResult, match="loss"):
        require(agreement(ready, reference, batch), "float32")


def test_one_row_of_a_batch_has_the_gradient_that_it_has_alone():
    ready, batch = prepared("nano-r2-causal-mixture")
    only = one_row_counts(batch, 2)
    assert (only.targets[[0, 1, 3]] == IGNORED).all()
    assert torch.equal(only.targets[2], batch.targets[2])
    assert agreement(ready, reference_of(ready.model), batch, row=2).gradient < 1e-5


def test_a_case_that_fails_does_not_lose_the_others():
    nano = find_cases(["nano-plain"], rows=1)[0]
    huge = nano._replace(name="huge", config=replace(nano.config, width=2**22, vocab_size=1))  # 200 TB for one matrix
    found = run_cases([huge, nano], CPU, product=1.0, repeats=1)
    assert isinstance(found[0], Failed)
    assert "allocate" in found[0].error
    assert isinstance(found[1], Measured)
    assert found[1].name == "nano-plain"


def test_names():
    assert {case.name for case in find_cases([f"{size}-{form}" for size in ROWS for form in forms(size)])}
    assert [case.name for case in find_cases(["nano-plain", "nano-plain"])] == ["nano-plain"]
    double = find_cases(["nano-plain-double"], tokens=20)[0]
    assert double.config.block_size == 40
    # TFLOP of a batch, as they are known from counting by hand
    expected = {"150m-plain": 31.1, "150m-r2-causal-residual": 52.2, "150m-r4-block-residual": 85.6}
    expected |= {"1.9b-r2-causal-residual": 91.4}
    for case in find_cases(list(expected)):
        assert case.rows * cost(case.config).flops / 1e12 == pytest.approx(expected[case.name], abs=0.05)
    for device in ("cpu", "cuda"):
        assert set(default_cases(device, quick=True)) < set(default_cases(device))


def test_an_unknown_case_suggests_similar_names():
    with pytest.raises(ValueError, match=r"'nano-r2-casual-mixture': did you mean nano-r2-causal-mixture .* copy-3"):
        find_cases(["nano-plain", "nano-r2-casual-mixture"])


def test_random_tokens_are_uneven_and_data_is_read(tmp_path):
    (case,) = find_cases(["tiny-plain"])
    batch = draw(case)
    assert (batch.ids[:, 1:] == batch.targets[:, :-1]).all()
    assert (batch.ids < 10).sum() > 3 * (batch.ids >= 256).sum() / 10
    write_synthetic(tmp_path / "text", n_tokens=5000, seed=0)
    assert not (draw(case, tmp_path / "text").ids == batch.ids).all()
    with pytest.raises(ValueError, match="vocab_size = 64 is too small"):
        draw(find_cases(["nano-plain"])[0], tmp_path / "text")


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    out = tmp_path / "speed.json"
    main(
        [
            "bench",
            "nano-plain",
            "nano-r2-causal-mixture",
            "--quick",
            "--rows",
            "2",
            "--device",
            "cpu",
            "--out",
            str(out),
        ]
    )
    shown = capsys.readouterr()
    for expected in ("nano-r2-causal-mixture", "TFLOP/s", "same bits twice", "2 × 32", str(out)):
        assert expected in shown.out
    assert "nano-plain: forward and backward" in shown.err
    written = json.loads(out.read_text())
    assert [case["name"] for case in written["cases"]] == ["nano-plain", "nano-r2-causal-mixture"]
    assert written["cases"][0]["step"]["milliseconds"] > 0
    main(["bench", "--list"])
    assert "r4-block-mixture" in capsys.readouterr().out
    for wrong in (["nano-plan"], ["nano-plain", "--repeats", "0"], ["nano-plain", "--out", "no/where.json"]):
        with pytest.raises(SystemExit, match="thoughtbubbles bench: "):
            main(["bench", *wrong, "--device", "cpu"])


@pytest.mark.slow
def test_the_benchmark_writes_its_numbers_and_ratios(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import train_step

    monkeypatch.setattr(train_step, "BARS", [("time", "nano-copy-3", "nano-plain", "milliseconds"), train_step.BARS[0]])
    monkeypatch.setattr(train_step, "STEPS", ["nano-plain", "1.9b-plain"])
    arguments = ["--device", "cpu", "--cases", "nano-plain", "nano-copy-3", "--repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/train_step.py", *arguments])
    train_step.main()
    (path,) = tmp_path.glob("train_step-*.json")
    record = json.loads(path.read_text())
    assert record["benchmark"] == "train_step"
    plain, copies = (case["forward_backward"]["milliseconds"] for case in record["cases"])
    time, step = record["bars"]  # nothing about cases that were not measured
    assert time["ratio"] == pytest.approx(copies / plain)
    assert step["ratio"] == pytest.approx(record["cases"][0]["step"]["milliseconds"] / plain)
    assert record["product_tflops"] > 0
    assert "nano-copy-3: forward and backward" in capsys.readouterr().out


@pytest.mark.slow
def test_steps_of_a_protocol_are_added_to_those_that_are_known(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import train_step

    path = tmp_path / "laptop" / STEPS_FILE
    for rows in (["plain", "r2"], ["r1"]):
        arguments = ["--device", "cpu", "--protocol", "laptop", "--repeats", "2", "--out", str(tmp_path), "--cases"]
        monkeypatch.setattr(sys, "argv", ["benchmarks/train_step.py", *arguments, *rows])
        train_step.main()
    found = json.loads(path.read_text())
    assert list(found["rows"]) == ["plain", "r2", "r1"]
    assert all(row["low"] <= row["milliseconds"] <= row["high"] for row in found["rows"].values())
    assert found["rows"]["r2"]["command"].endswith("--protocol laptop --repeats 2 --cases plain r2")
    assert found["tokens"] == 8 * 128
    monkeypatch.setattr(sys, "argv", ["benchmarks/train_step.py", *arguments, "r7"])
    with pytest.raises(SystemExit):
        train_step.main()
    path.write_text(json.dumps({**found, "device": "another"}))
    monkeypatch.setattr(sys, "argv", ["benchmarks/train_step.py", *arguments, "plain"])
    with pytest.raises(SystemExit, match=r"was measured with \{'device': 'another'\}"):
        train_step.main()
    assert json.loads(path.read_text())["rows"] == found["rows"]


def test_rows_without_one_speed_have_no_step_of_their_own(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import train_step

    names = {case.name for case in train_step.cases_of("screen", None)}
    assert {"plain", "state-3"} <= names
    assert not names & {"r2-late", "r2-elastic"}
    assert "ensemble" not in {case.name for case in train_step.cases_of("scarce", None)}
    assert {case.config.vocab_size for case in train_step.cases_of("short", None)} == {50304}  # GPT-2's, of whole tiles


def test_bars_name_existing_cases(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import train_step

    usual = default_cases("cuda")
    assert {name for bar in train_step.BARS for name in bar[1:3]} | set(train_step.STEPS) <= set(usual)


def test_the_figure_comes_from_the_file(tmp_path):
    """In a copy of the docs: without results nothing is drawn, and the check sees when the numbers have changed."""
    tree = tmp_path / "tree"
    for folder in ("benchmarks/results", "docs/figures", "docs/guides"):
        (tree / folder).mkdir(parents=True)
    figure = tree / "docs/figures/train_step.py"
    figure.write_text((BENCHMARKS.parent / "docs/figures/train_step.py").read_text())

    def draw_figures(*more: str) -> int:
        return subprocess.run([sys.executable, figure, *more], capture_output=True).returncode

    assert draw_figures() == draw_figures("--check") == 0
    assert not list(figure.parent.glob("*.png"))
    speed = {"milliseconds": 2.0, "low": 1.9, "high": 2.1, "tokens_per_second": 1e3, "tflops": 3.0}
    speed |= {"share_of_product": 0.5, "peak_memory_GiB": None}
    case = {"name": "nano-plain", "forward_backward": speed, "step": speed | {"milliseconds": 2.5}}
    record = {"benchmark": "train_step", "machine": "M", "product_tflops": 6.0}
    record["cases"] = [case, {"name": "nano-copy-3", "error": "no memory"}]
    source = tree / "benchmarks/results/train_step-m.json"
    source.write_text(json.dumps(record))
    assert draw_figures("--check") == 1
    assert draw_figures() == 0
    assert draw_figures("--check") == 0
    assert (figure.parent / "train_step-m.png").read_bytes().startswith(b"\x89PNG")
    source.write_text(json.dumps(record | {"product_tflops": 7.0}))
    assert draw_figures("--check") == 1
