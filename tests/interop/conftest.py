"""A finished run, trained once for a test file, and a copy of it for each test."""

import shutil
from pathlib import Path

import pytest

from interop.finished_run import finished_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def run(tmp_path, finished) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))
