"""torch.compile: the full model in one graph, the same numbers as without it, and no new graph at the next step."""

import shutil

import pytest
import torch

from helpers import run_probe
from model.compile_probe import FORMS

has_compiler = shutil.which("g++") is not None or shutil.which("clang++") is not None


@pytest.mark.slow
@pytest.mark.parametrize("check", ["every way to call", "autocast", "no new graph"])
def test_compile(check):
    run_probe("model.compile_probe", check)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_compiled_models_give_the_same_numbers(form):
    """Generated code is one graph too."""
    has_code = has_compiler and form != "nano-gate"
    run_probe("model.compile_probe", "generated code" if has_code else "one graph", form)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler, reason="generated code needs a C++ compiler")
def test_compile_low_scores():
    run_probe("model.compile_probe", "low scores in bfloat16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", ["generated code on a GPU", "low scores in bfloat16 on a GPU"])
def test_compile_on_a_gpu(check):
    run_probe("model.compile_probe", check)
