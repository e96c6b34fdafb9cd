"""torch.compile: the full model in one graph, the same numbers as without it, and no new graph at the next step."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run_probe(check: str) -> None:
    command = [sys.executable, "-m", "model.compile_probe", check]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="generated code needs a C++ compiler"
)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param("one graph", marks=pytest.mark.slow),
        pytest.param("one graph, other forms", marks=pytest.mark.slow),
        pytest.param("every way to call", marks=pytest.mark.slow),
        pytest.param("autocast", marks=pytest.mark.slow),
        pytest.param("no new graph", marks=pytest.mark.slow),
        pytest.param("low scores in bfloat16", marks=[pytest.mark.slow, needs_compiler]),
        pytest.param("generated code", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_compile(check):
    run_probe(check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", ["generated code on a GPU", "low scores in bfloat16 on a GPU"])
def test_compile_on_a_gpu(check):
    run_probe(check)
