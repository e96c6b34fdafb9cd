"""The hand-written faults of planted.py can still be planted; whether tests catch them is its own, long work."""

import pytest

import planted


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: f"{fault.file}: {fault.old.strip()[:40]}")
def test_a_fault_can_be_planted(fault):
    text = (planted.ROOT / planted.PACKAGE / fault.file).read_text()
    assert fault.old in text, "the line no longer exists: rewrite or remove the fault"
    assert fault.old != fault.new
    assert all((planted.ROOT / test.partition("::")[0]).exists() for test in fault.tests.split())
