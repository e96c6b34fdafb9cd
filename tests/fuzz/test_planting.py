"""The exit code of tests/planted.py: a fault that survives, or can no longer be planted, is a failure."""

import pytest

import planted

REAL = planted.Fault("generate/text.py", "text.endswith(stop[:n])", "text.startswith(stop[:n])", "--version")  # no test


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(REAL, "survived"), (REAL._replace(old="a line that is nowhere"), "stale")],
    ids=["survived", "stale"],
)
def test_what_is_not_caught_is_a_failure(monkeypatch, capsys, fault, outcome):
    monkeypatch.setattr(planted, "FAULTS", [fault])
    assert planted.main([]) == 1
    assert capsys.readouterr().out.startswith(outcome)


def test_nothing_to_plant_is_a_failure(monkeypatch):
    """As with a misspelled --only."""
    with pytest.raises(SystemExit, match="no fault contains 'nowhere'"):
        planted.main(["--only", "nowhere"])


@pytest.mark.slow
def test_a_fault_that_is_caught_is_a_success(monkeypatch, tmp_path, capsys):
    """A test outside of the copied tree sees the copy, since it comes first on its path."""
    test = tmp_path / "test_it.py"
    test.write_text(
        "from pathlib import Path\n\n\n"
        "def test_it():\n"
        f"    assert {REAL.new!r} not in Path('src/thoughtbubbles/generate/text.py').read_text()\n"
    )
    monkeypatch.setattr(planted, "FAULTS", [REAL._replace(tests=f"--noconftest {test}")])
    assert planted.main([]) == 0
    assert capsys.readouterr().out.startswith("caught")
