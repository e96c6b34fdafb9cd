"""benchmarks/repeat.py: processes that train the same steps side by side, and whether their losses are equal."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

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
