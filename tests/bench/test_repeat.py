"""benchmarks/repeat.py: processes that train the same steps side by side, and whether their losses are equal."""

import json
import subprocess
import sys
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_losses_that_part_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    compare = import_module("repeat").compare
    one, other = ([loss.hex() for loss in losses] for losses in ([3.0, 2.5, 2.0], [3.0, 2.5 + 2**-50, 2.25]))
    assert compare([one, one]) == {"ways": 1, "first_step": None, "spread_at_end": 0.0}
    assert compare([one, other, one]) == {"ways": 2, "first_step": 2, "spread_at_end": 0.25}


@pytest.mark.slow
def test_two_processes_on_a_cpu_repeat_to_the_bit(tmp_path: Path):
    words = ["--device", "cpu", "--cases", "circle-r2", "--without", "nothing", "--steps", "2", "--processes", "2"]
    command = [sys.executable, str(BENCHMARKS / "repeat.py"), *words, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["cases"] == [
        {"case": "circle-r2", "without": "nothing", "ways": 1, "first_step": None, "spread_at_end": 0.0}
    ]
    wrong = subprocess.run([*command[:2], "--cases", "circle-r5"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.endswith("--cases: no row of tasks or of long is named circle-r5\n")


def test_operators_that_do_not_repeat_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    operators = import_module("operators")
    calls = count()

    def sum_in_any_order(x: torch.Tensor) -> torch.Tensor:
        return x + 2.0**-50 * (next(calls) % 2)

    operator = torch.library.custom_op("test_repeat::sum", sum_in_any_order, mutates_args=())
    operator.register_fake(torch.empty_like)

    def recorded() -> tuple[list[str], list[list[int]]]:
        x = torch.ones(5, dtype=torch.float64, requires_grad=True)
        with operators.Recorder("cpu", 3) as recorder:
            (x.exp() @ x).backward()
            operator(x.detach().clone().add_(1))
            torch.rand(3)
        return recorder.names, recorder.sums()

    first, second = recorded(), recorded()
    assert "aten.exp.default" in first[0]
    found = operators.compare_operators([first, second])
    assert found["differ_within_a_process"] == {"test_repeat.sum.default": 2}  # once in each
    assert found["results"] == len(first[0]) == len(second[1])
    changed = [first[1][0][:], *first[1][1:]]
    changed[0][0] += 1
    found = operators.compare_operators([first, (first[0], changed)])
    assert (found["first_between_processes"], found["differ_between_processes"]) == (f"{first[0][0]}, result 0", 1)
    with pytest.raises(SystemExit, match="different operators"):
        operators.compare_operators([first, ([], [])])


def test_small_differences_show(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bits = import_module("operators").bits
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = torch.ones(3, 4).to(dtype)
        changed = x.clone()
        changed.view(torch.uint8)[2, -1] ^= 1
        assert bits(x) != bits(changed)
        assert bits(x) == bits(x.T.contiguous().T)
    x = torch.tensor([1.0, 2.0, 3.0])
    assert bits(x) != bits(x[[1, 0, 2]])
    up, down = (torch.nextafter(x, torch.full_like(x, to)) for to in (9.0, -9.0))
    assert bits(x) != bits(torch.stack([up[0], down[1], x[2]]))
