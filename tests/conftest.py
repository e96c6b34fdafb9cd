"""Shape annotations are checked at run time in tests only; every test starts from the same seed.

Checking takes longer than a small model itself, so not all tests do it: those of the model that are not slow, and a
file of each folder that has annotated functions; without the slow tests, a third of these.
"""

import gc
import os
import zlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# Tests run side by side, one a core, and so do the processes that they start: with more threads, these would wait for
# each other most of the time.
os.environ["OMP_NUM_THREADS"] = "1"

import jaxtyping
import pytest
import torch
from hypothesis import settings

if torch.cuda.is_available() and find_spec("triton"):  # Triton reads a kernel's source and globals: no wrappers there
    for name in ("adamw", "attention", "chunk", "decode", "fork", "gelu", "loss", "norm", "reach", "rotary", "sums"):
        import_module(f"thoughtbubbles.kernels.{name}")

# Before the rest of the package is imported: every annotated function then checks the shapes it is given and returns.
jaxtyping.install_import_hook("thoughtbubbles", "shape_checks.checked")

# What is imported and collected stays: to look for garbage among its millions of objects takes seconds.
gc.disable()

FOLDER = Path(__file__).parent
WITH_SHAPE_CHECKS = [
    *(FOLDER / name for name in ("model", "generate/test_decode.py", "train/test_step.py", "evals/test_likelihood.py")),
    *(FOLDER / name for name in ("analysis/test_analyze.py", "interop/test_hf_model.py")),
]

torch.set_num_threads(1)  # here for module fixtures too, which run before those of a test
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Python tidies up when it ends, and libraries complain about what is left


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    is_checked = any(place in (request.path, *request.path.parents) for place in WITH_SHAPE_CHECKS)
    if request.config.option.markexpr == "not slow":
        is_checked = is_checked and zlib.crc32(request.node.nodeid.encode()) % 3 == 0
    is_slow = request.node.get_closest_marker("slow") is not None
    jaxtyping.config.update("jaxtyping_disable", is_slow or not is_checked)
    torch.set_num_threads(1)  # if a test has changed it: sums keep their order
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    jaxtyping.config.update("jaxtyping_disable", True)  # in fixtures of the next module


@pytest.fixture
def no_shape_checks(_same_start: None) -> None:
    """For tests of our own errors, as users have no shape checks, which would raise first; and where they take long."""
    jaxtyping.config.update("jaxtyping_disable", True)
