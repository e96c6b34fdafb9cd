"""docs/guides/serving.md: its examples run against a server, and it quotes the files and names that there are."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai")):
    pytest.skip("fastapi, uvicorn, prometheus-client or openai is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "serving.md").read_text()
EXAMPLES = ROOT / "docs" / "examples" / "serving"
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import serve

        with serve.Server() as running:
            yield running


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "NO_PROXY": "*"})
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_client(server):
    (code,) = blocks("py")
    assert code.count(ADDRESS) == 1
    assert "bubbles-7m 512 2.0 4.0" in run(
        sys.executable, "-W", "error", "-c", code.replace(ADDRESS, server.place.geturl().rstrip("/"))
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands(server):
    start, curl = (shlex.split(block, comments=True) for block in blocks("sh"))
    assert start == [".venv/bin/thoughtbubbles", "serve"]
    answer = json.loads(run(*(word.replace(ADDRESS, server.place.geturl().rstrip("/")) for word in curl)))
    shown = " ".join(blocks("text")[1].split())
    assert f'"text":"{answer["choices"][0]["text"]}"' in shown


@pytest.mark.slow
def test_the_speed_of_a_server(server):
    options = ["--address", f"{server.place.geturl()}v1", "--budgets", "1", "2", "--clients", "1", "3", "--tokens", "4"]
    lines = run(sys.executable, "-W", "error", str(EXAMPLES / "speed.py"), *options).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{clients} clients, budget {budget}" for clients in (1, 3) for budget in (1, 2)
    ]


@pytest.mark.slow
def test_all_metrics_are_listed(server):
    server.get("/v1/models")
    text = server.get("/metrics")
    there = {name for name in re.findall(r"^# TYPE (\w+)", text, re.MULTILINE) if not name.endswith("_created")}
    assert set(re.findall(r"^\| `(thoughtbubbles_\w+)", GUIDE, re.MULTILINE)) == there


def test_quoted_files():
    assert blocks("ini") == [(EXAMPLES / "thoughtbubbles@.service").read_text()]
    assert blocks("nginx") == [(EXAMPLES / "nginx.conf").read_text()]
