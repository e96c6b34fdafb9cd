"""The fuzzer finds nothing in our readers, and everything in readers that are broken on purpose."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cases import SUBJECT
from judge import names
from mutate import Files
from readers import NAMES, make_reader

FUZZ = Path(__file__).with_name("fuzz.py")
MANY = 9_400  # all readers together: 50,000


def run_fuzz(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In separate processes, without the shape checks of the tests, as for users."""
    command = [sys.executable, str(FUZZ), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800)


def fuzzed(*arguments: object) -> dict[str, Any]:
    done = run_fuzz(*arguments, "--json")
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["findings"] else 0)
    return found


def in_words(findings: list[dict[str, Any]]) -> str:
    return "\n".join(f"{f['count']} × {f['what']} at {f['where']}: {f['message']}\n  {f['repro']}" for f in findings)


# What is fuzzed


@pytest.mark.slow
@pytest.mark.parametrize("reader", NAMES)
def test_many_inputs(reader):
    found = fuzzed("--reader", reader, "--inputs", MANY, "--seed", 1)
    assert not found["findings"], in_words(found["findings"])
    numbers = found["readers"][reader]
    # Many mutations must have an effect; fewest for answers, since lost ones are simply answered again.
    assert numbers["refused"] + sum(numbers["changed"].values()) > numbers["inputs"] / 5


@pytest.mark.slow
def test_commands_can_be_found_out(tmp_path):
    """Their output is compared, and their own name before a message does not count as naming the input."""
    inspect, *_ = make_reader("commands", tmp_path).bases
    printed = inspect.unchanged().run(tmp_path)
    assert "streams" in printed
    assert inspect.call({**inspect.arguments, "--tokens": 9}) != printed
    with pytest.raises(SystemExit) as error:
        inspect.call({**inspect.arguments, "--rows": -1})
    assert str(error.value.code).startswith("--rows -1: ")
    assert not any(names(name, "thoughtbubbles inspect: something is wrong") for name in inspect.names)


# The fuzzer itself

FOUND_OUT = {
    "key": "KeyError",
    "class": "BaseException",
    "call": "TypeError",
    "memory": "too much memory",
    "hidden": "too much memory",
    "lines": "a message of several lines",
    "long": "a message of more than a thousand characters",
    "unnamed": "a message that does not name its input",
    "part": "a message that does not name its input",
    "warning": "a warning",
    "pickle": "a pickle was executed",
    "blind": "a change that a checksum should have shown",
}


@pytest.fixture(scope="module")
def broken() -> dict[str, Any]:
    return fuzzed(
        *(word for kind in (*FOUND_OUT, "nothing") for word in ("--reader", f"broken-{kind}")), "--inputs", 300
    )


@pytest.mark.parametrize("kind", FOUND_OUT)
@pytest.mark.slow
def test_a_broken_reader_is_found_out(broken, kind):
    findings = [finding for finding in broken["findings"] if finding["reader"] == f"broken-{kind}"]
    assert {finding["what"] for finding in findings} == {FOUND_OUT[kind]}
    assert all(finding["where"].startswith("broken.py:") for finding in findings if kind not in ("blind", "pickle"))


@pytest.mark.slow
def test_a_reader_that_is_right_is_left_alone(broken):
    numbers = broken["readers"]["broken-nothing"]
    assert numbers["findings"] == 0
    assert numbers["refused"] + numbers["unchanged"] == numbers["inputs"] == 300
    assert numbers["refused"] > 250


@pytest.mark.parametrize("kind", ["key", "blind"])
@pytest.mark.slow
def test_the_repro_shows_the_finding_and_keeps_its_files(broken, kind):
    repro = next(finding["repro"] for finding in broken["findings"] if finding["reader"] == f"broken-{kind}")
    shown = run_fuzz(*repro.split()[2:])  # less the interpreter and the file
    assert f"finding: {FOUND_OUT[kind]}" in shown.stdout
    assert ("Traceback" in shown.stdout) == (kind == "key")
    folder = Path(shown.stdout.partition("its files, if it has any: ")[2].splitlines()[0])
    assert list(folder.iterdir()) == [folder / "file.json"]
    shutil.rmtree(folder.parent)


@pytest.mark.slow
def test_a_hang_is_found_out_and_the_next_inputs_are_read():
    found = fuzzed("--reader", "broken-hang", "--inputs", 2, "--seconds", 0.2)
    assert {finding["what"] for finding in found["findings"]} == {"a hang"}
    assert found["findings"][0]["where"].startswith("broken.py:")
    assert found["readers"]["broken-hang"]["inputs"] == 2


def test_an_input_is_a_function_of_reader_seed_and_number(tmp_path):
    def laid(seed: int, number: int) -> Files:
        _, case = make_reader("broken-nothing", tmp_path).make(seed, number)
        with suppress(ValueError):
            case.run(tmp_path)
        return {str(path): path.read_bytes() for path in (tmp_path / SUBJECT).iterdir() if path.is_file()}

    assert all(laid(1, number) == laid(1, number) for number in range(20))
    assert len({str(laid(seed, number)) for seed in (1, 2) for number in range(50)}) > 50
