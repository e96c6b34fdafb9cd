"""Scores of answers, and their means.

A document with choices is scored in four ways, which differ in how they pick the best choice (the first one of equals):

    accuracy            lowest mean loss per token, as in the paper; the main metric of every task
    accuracy_sum        lowest total loss: lm-evaluation-harness's `acc`
    accuracy_character  lowest loss per character: its `acc_norm`
    accuracy_byte       lowest loss per byte of UTF-8: its `acc_bytes`

A single choice (LAMBADA's last word) is correct if every one of its tokens is the most likely one; `nats` is its loss.
± is the standard error of the mean over documents, from the sample standard deviation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from thoughtbubbles.evals.likelihood import Likelihood
from thoughtbubbles.evals.tasks.task import Choices, Question, Task

WAYS = {"accuracy", "accuracy_sum", "accuracy_character", "accuracy_byte"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The scores of one document, and what they were computed from."""

    scores: dict[str, float]
    groups: dict[str, str] = field(default_factory=dict)
    truncated: int = 0
    """Tokens truncated on the left: of the prompt, or of the context of the longest choice."""
    log_probs: list[float] = field(default_factory=list)
    """Of each choice, in nats."""
    tokens: list[int] = field(default_factory=list)
    """Number of tokens of each choice."""
    text: str | None = None
    """A generated answer."""


def score_choices(document: Choices, found: Sequence[Likelihood]) -> Answer:
    return Answer(
        scores=scores(document, found),
        groups=document.groups,
        truncated=max(likelihood.truncated for likelihood in found),
        log_probs=[likelihood.log_prob for likelihood in found],
        tokens=[likelihood.n_tokens for likelihood in found],
    )


def scores(document: Choices, found: Sequence[Likelihood]) -> dict[str, float]:
    if len(found) == 1:
        return {"accuracy": float(found[0].greedy), "nats": -found[0].log_prob}
    bare = [choice.removeprefix(" ") for choice in document.choices]
    sums = [likelihood.log_prob for likelihood in found]
    ways = {
        "accuracy": [likelihood.n_tokens for likelihood in found],
        "accuracy_sum": [1 for _ in bare],
        "accuracy_character": [len(text) for text in bare],
        "accuracy_byte": [len(text.encode()) for text in bare],
    }
    return {way: float(_best(sums, sizes) == document.gold) for way, sizes in ways.items()}


def fits(document: Choices | Question, answer: Answer) -> bool:
    """Whether a saved answer can belong to this document."""
    if answer.groups != document.groups:
        return False
    if isinstance(document, Question):
        return answer.scores.keys() == {"accuracy"} and answer.text is not None
    n = len(document.choices)
    ways = {"accuracy", "nats"} if n == 1 else WAYS
    return len(answer.log_probs) == len(answer.tokens) == n and 0 not in answer.tokens and answer.scores.keys() == ways


def _best(sums: Sequence[float], sizes: Sequence[int]) -> int:
    means = [total / max(size, 1) for total, size in zip(sums, sizes, strict=True)]
    return means.index(max(means))


def summary(task: Task, answers: Sequence[Answer]) -> dict[str, Any]:
    """All numbers of a benchmark, JSON-serializable."""
    names = sorted({name for answer in answers for name in answer.groups})
    cut = [answer.truncated for answer in answers if answer.truncated]
    return {
        "version": task.version,
        "title": task.title,
        "documents": len(answers),
        "truncated": {"documents": len(cut), "tokens": sum(cut)},
        **means(answers),
        "chance": chance(answers),
        **({"by": {name: _by(name, answers) for name in names}} if names else {}),
    }


def means(answers: Sequence[Answer]) -> dict[str, Any]:
    found = {}
    for name in answers[0].scores:
        mean, error = mean_and_error([answer.scores[name] for answer in answers])
        found[name] = {"mean": mean, "standard_error": error}
        if name == "nats":
            perplexity = math.exp(min(mean, 700.0))
            found["perplexity"] = {"mean": perplexity, "standard_error": error and perplexity * error}
    return found


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The error is None for a single value, and if anything is not finite."""
    n = len(values)
    try:
        mean = math.fsum(values) / n
    except (OverflowError, ValueError):  # the sum overflows, or has both +inf and −inf
        mean = sum(value / n for value in values)
    error = math.hypot(*(value - mean for value in values)) * math.sqrt(1 / (n - 1) / n) if n > 1 else math.inf
    return mean, error if math.isfinite(error) else None


def _by(name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    parts: dict[str, list[Answer]] = {}
    for answer in answers:
        parts.setdefault(answer.groups[name], []).append(answer)
    in_order = sorted(parts, key=lambda part: (len(part), part) if part.isdecimal() else (0, part))
    return {
        part: {"documents": len(parts[part]), **means(parts[part]), "chance": chance(parts[part])} for part in in_order
    }


def chance(answers: Sequence[Answer]) -> float | None:
    """The accuracy of random guessing; None if a document has no choices to guess from."""
    if any(len(answer.tokens) < 2 for answer in answers):
        return None
    return math.fsum(1 / len(answer.tokens) for answer in answers) / len(answers)
