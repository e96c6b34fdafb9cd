"""Counts and reports the outcomes of inputs."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """The outcomes of the inputs of one reader."""

    refused: int = 0
    unchanged: int = 0
    changed: Counter[str] = field(default_factory=Counter)  # by the reason why that is right
    findings: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=dict)  # what, where: the inputs
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        return self.refused + self.unchanged + self.changed.total() + self.n_findings

    @property
    def n_findings(self) -> int:
        return sum(map(len, self.findings.values()))

    def add(self, number: int, kind: str, about: str, where: str, message: str) -> None:
        if kind == "finding":
            self.findings.setdefault((about, where), []).append((number, message))
        elif kind == "changed":
            self.changed[about] += 1
        else:
            setattr(self, kind, getattr(self, kind) + 1)


def table(tallies: dict[str, Tally]) -> str:
    lines = [
        f"{'reader':<12}{'inputs':>9}{'refused':>9}{'unchanged':>11}{'changed':>9}{'findings':>10}{'a second':>10}"
    ]
    for name, tally in tallies.items():
        numbers = (tally.inputs, tally.refused, tally.unchanged, tally.changed.total(), tally.n_findings)
        widths = (9, 9, 11, 9, 10)
        cells = "".join(f"{number:>{width},}" for number, width in zip(numbers, widths, strict=True))
        lines.append(f"{name:<12}{cells}{tally.inputs / max(tally.seconds, 1e-9):>10,.0f}")
    lines += [
        f"  {name}: {count:,} changed: {reason}"
        for name, tally in tallies.items()
        for reason, count in tally.changed.most_common()
    ]
    return "\n".join(lines)


def findings(tallies: dict[str, Tally], *, seed: int) -> list[dict[str, Any]]:
    """Each kind once, the most frequent first, with the command that shows it."""
    every = [
        {
            "reader": name,
            "what": what,
            "where": where,
            "count": len(found),
            "message": found[0][1],
            "repro": f"python tests/fuzz/fuzz.py --reader {name} --seed {seed} --only {found[0][0]}",
        }
        for name, tally in tallies.items()
        for (what, where), found in tally.findings.items()
    ]
    return sorted(every, key=lambda finding: -finding["count"])


def numbers(tallies: dict[str, Tally]) -> dict[str, dict[str, Any]]:
    """As a JSON-serializable dictionary."""
    return {
        name: {
            "inputs": tally.inputs,
            "refused": tally.refused,
            "unchanged": tally.unchanged,
            "changed": dict(tally.changed),
            "findings": tally.n_findings,
        }
        for name, tally in tallies.items()
    }
