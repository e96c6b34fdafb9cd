"""Shape annotations are checked at run time in tests only; every test starts from the same seed.

Checking takes longer than a small model itself. The core suite has the checks; tests marked slow, most of which run the
same code on more inputs, do without.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import jaxtyping
import pytest
import torch
from hypothesis import settings

if torch.cuda.is_available() and find_spec("triton"):  # Triton reads a kernel's source and globals: no wrappers there
    for name in ("adamw", "attention", "decode", "fork", "gelu", "loss", "norm", "reach", "sums"):
        import_module(f"thoughtbubbles.kernels.{name}")

# Before the rest of the package is imported: every annotated function then checks the shapes it is given and returns.
jaxtyping.install_import_hook("thoughtbubbles", "beartype.beartype")

torch.set_num_threads(1)  # tests run side by side; here for module fixtures too, which run before those of a test
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", request.node.get_closest_marker("slow") is not None)
    torch.set_num_threads(1)  # if a test has changed it: sums keep their order
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    jaxtyping.config.update("jaxtyping_disable", False)  # for fixtures of the next module


@pytest.fixture
def no_shape_checks(_same_start: None) -> None:
    """For tests of our own errors: users have no shape checks, which would raise first."""
    jaxtyping.config.update("jaxtyping_disable", True)
