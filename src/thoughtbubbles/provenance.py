"""Provenance of results: the command, the versions, the commit and the machine that produced them."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from thoughtbubbles import __version__


def provenance() -> dict[str, Any]:
    """As a JSON-serializable dictionary."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": sys.argv,
        "versions": {"thoughtbubbles": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.platform(),
        "commit": commit(),
    }


@cache
def commit() -> str | None:
    """Git commit of the running code, or the environment variable THOUGHTBUBBLES_COMMIT if it is set."""
    if told := os.environ.get("THOUGHTBUBBLES_COMMIT"):
        return told
    home = Path(__file__).parents[2]
    if not (home / ".git").exists():  # installed from a wheel: a repository around it is not ours
        return None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(describe, cwd=home, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device: str | torch.device) -> str:
    """The name of the GPU, or the CPU's architecture and its threads."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_name(device)
    if kind != "cpu":  # a GPU whose name torch does not know
        return f"{platform.machine()} {kind}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
