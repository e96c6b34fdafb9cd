"""The tests of Hugging Face once more, on the oldest transformers that pyproject.toml allows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
OLDEST = Path(sys.prefix) / "oldest-hf"


def oldest_allowed() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    return re.search(r'^hf = \[.*"transformers>=([\d.]+)"', text, re.MULTILINE).group(1)


def test_the_makefile_installs_the_oldest_that_is_allowed():
    assert f"transformers=={oldest_allowed()}.0" in (ROOT / "Makefile").read_text()


@pytest.mark.slow
def test_on_the_oldest_transformers():
    if not OLDEST.is_dir():
        pytest.skip("the oldest transformers is not installed here: `make test-all` does it")
    env = {**os.environ, "PYTHONPATH": str(OLDEST)}
    say = "import transformers; print(transformers.__version__)"
    version = subprocess.run([sys.executable, "-c", say], env=env, capture_output=True, text=True, check=True)
    assert version.stdout.strip() == f"{oldest_allowed()}.0"
    tests = [path for path in sorted(HERE.glob("test_hf_*.py")) if path != Path(__file__)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        "not fresh_process",
        *tests,
    ]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
