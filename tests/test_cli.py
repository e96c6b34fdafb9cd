"""The command line: answers at once, explains itself, and turns a user's mistake into one line."""

import subprocess
import sys

import pytest

from thoughtbubbles import __version__
from thoughtbubbles.cli import _spans


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "thoughtbubbles", *arguments], capture_output=True, text=True)


def test_help_and_version():
    for arguments in ((), ("--help",), ("-h",)):
        shown = run(*arguments)
        assert shown.returncode == 0
        assert "usage: thoughtbubbles VERB" in shown.stdout
        assert "inspect" in shown.stdout
    assert run("--version").stdout == f"thoughtbubbles {__version__}\n"
    assert "parameters, FLOPs, streams" in run("inspect", "--help").stdout


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["inspect", "--help"]])
def test_help_imports_no_torch(arguments):
    code = f"""
import contextlib, sys
from thoughtbubbles.cli import main
with contextlib.suppress(SystemExit):
    main({arguments!r})
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "jaxtyping")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_inspect():
    shown = run("inspect", "150m", "--budgets", "2", "--copies", "3")
    assert shown.returncode == 0, shown.stderr
    for expected in (
        "152,040,960",
        "152,052,480",
        "plain",
        "copy-3",
        "causal, r = 2",
        "3–15: 1,024 (2)",
        "0–15: 1,536 (3)",
    ):
        assert expected in shown.stdout
    assert "block, r = 2" in run("inspect", "nano-paper").stdout
    assert "r = " not in run("inspect", "nano-plain").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "no verb 'fly'; choose from: inspect"),
        (["inspect", "huge"], "thoughtbubbles inspect: no model is named 'huge'"),
        (["inspect", "nano", "--budgets", "0.5"], "budget = 0.5 is below 1"),
        (["inspect", "nano", "--tokens", "99"], "--tokens 99: a row of nano has from 1 to 32 tokens"),
        (["inspect", "nano", "--rows", "0"], "--rows 0"),
        (["inspect"], "required"),
    ],
)
def test_mistakes(arguments, message):
    shown = run(*arguments)
    assert shown.returncode != 0
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_spans():
    assert _spans([1, 1, 2, 3, 3]) == [("0–1", 1), ("2", 2), ("3–4", 3)]
