"""benchmarks/serve.py, checked: many clients at the same time for half a minute, clients that misbehave for a minute.

THOUGHTBUBBLES_SOAK sets the seconds of the second (600 before a release).
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client")):
    pytest.skip("fastapi, uvicorn or prometheus-client is not installed", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MORE_MEMORY = 64 << 20  # bytes by which a server that leaks nothing may still grow: buffers, fragments
pytestmark = pytest.mark.slow


@pytest.fixture
def serve(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serve

    return serve


def test_64_clients_get_their_serial_answers(serve):
    """The throughput bar is 4 × serial."""
    with serve.Server("--dtype", "float64", "--rows", "64") as server:
        found = serve.load(server, clients=64, seconds=30)
        assert found["problems"] == []
        assert found["answers"]["equal"] > 64
        assert found["over_serial"] >= 4
        if sys.platform == "linux":
            middle, last = found["resident_bytes"]
            assert last - middle < MORE_MEMORY
        assert serve.in_use(server)["requests"] == 0


def test_clients_that_misbehave_leave_nothing_behind(serve):
    seconds = float(os.environ.get("THOUGHTBUBBLES_SOAK", "60"))
    with serve.Server("--dtype", "float64", "--rows", "8", "--waiting", "16", "--timeout", "30") as server:
        found = serve.soak(server, clients=16, seconds=seconds)
    assert found["problems"] == []
    assert set(found["counts"]) >= {"equal", "left", "stalled", "refused", "several"}
    before, after = found["before"], found["after"]
    assert before["requests"] == after["requests"] == 0
    if sys.platform == "linux":
        assert after["open_files"] <= before["open_files"] + 2
        assert after["resident_bytes"] - before["resident_bytes"] < MORE_MEMORY
