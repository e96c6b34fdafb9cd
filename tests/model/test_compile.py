"""torch.compile: the whole model in one graph, the same numbers as without it, and no new graph at the next step."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="generated code needs a C++ compiler"
)


@pytest.mark.parametrize(
    "check",
    [
        "one graph",
        "every way to call",
        "autocast",
        "no new graph",
        pytest.param("low scores in bfloat16", marks=needs_compiler),
        pytest.param("generated code", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_compile(check):
    probe = Path(__file__).with_name("compile_probe.py")
    run = subprocess.run([sys.executable, probe, check], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
