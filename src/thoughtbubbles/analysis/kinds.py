"""Kinds of token: which of them get bubbles, and for which of them streams lower the loss.

Every token has one of the disjoint kinds; some also have one or both of the extra kinds.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thoughtbubbles.analysis.trace import Trace
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.autoregressive import Scores, error_of_mean
from thoughtbubbles.evals.metrics import mean_and_error
from thoughtbubbles.written import plus_minus, signed

START, PART, PUNCTUATION, DIGITS, NEWLINE, END, OTHER = (
    *("start of a word", "part of a word", "punctuation", "digits", "newline", "end of text", "other"),
)
AFTER_STOP, RARE = "first word after a full stop", "rare word"
DISJOINT = (START, PART, PUNCTUATION, DIGITS, NEWLINE, END, OTHER)
KINDS = (*DISJOINT, AFTER_STOP, RARE)
RARE_SHARE = 0.25  # of all words
STOPS, CLOSING = (".", "!", "?"), "\"'”’)] \n\t"


def disjoint_kind(text: str, before: str) -> str:
    """`before`: the text before the token, at least its last character; "" at the beginning of a document."""
    stripped = text.strip()
    if text == "":
        return END
    if stripped == "":
        return NEWLINE if "\n" in text else OTHER
    if "\ufffd" in stripped:  # a part of a character
        return OTHER
    if stripped[0].isdigit():
        return DIGITS
    if not any(character.isalnum() for character in stripped):
        return PUNCTUATION
    follows = text[0] == stripped[0] and before[-1:].isalnum()
    return PART if follows or (text[0] in "'’" and before[-1:].isalnum()) else START


def kinds_of(texts: Sequence[str], rare: Sequence[bool] | None = None) -> list[set[str]]:
    """The kinds of each token of a row; `rare` from `rare_tokens`."""
    found, before = [], ""
    for place, text in enumerate(texts):
        kinds = {disjoint_kind(text, before)}
        if START in kinds and before.rstrip(CLOSING).endswith(STOPS) and not before[-1:].isalnum():
            kinds.add(AFTER_STOP)
        if START in kinds and rare is not None and rare[place]:
            kinds.add(RARE)
        found.append(kinds)
        before = (before + text)[-64:] if text else ""
    return found


def rare_tokens(rows: Sequence[Sequence[int]], starts: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """The least frequent words of the text, by their first tokens: together at most a quarter, or those that occur
    once if these are more."""
    counts = Counter(
        token for row, flags in zip(rows, starts, strict=True) for token, flag in zip(row, flags, strict=True) if flag
    )
    by_count = Counter(counts.values())
    words, seen, limit = sum(counts.values()), 0, 1
    for count in sorted(by_count):
        seen += count * by_count[count]
        if seen > RARE_SHARE * words:
            break
        limit = max(limit, count)
    return [[counts[token] <= limit for token in row] for row in rows]


def kinds_of_rows(rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[list[set[str]]]:
    texts = [["" if i == tokenizer.end_of_text else tokenizer.decode([i]) for i in row] for row in rows]
    starts = [[START in kinds for kinds in kinds_of(row)] for row in texts]
    rare = rare_tokens(rows, starts)
    return [kinds_of(row, flags) for row, flags in zip(texts, rare, strict=True)]


def bubble_numbers(traces: Sequence[Trace], kinds: Sequence[Sequence[set[str]]]) -> dict[str, Any]:
    """Mean streams of each kind after the last fork layer, and in each stage."""
    sizes: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in KINDS}
    for trace, row in zip(traces, kinds, strict=True):
        for token, of_token in zip(trace.tokens, row, strict=True):
            for kind in of_token:
                sizes[kind].append(token.streams)
    every = [token.streams for trace in traces for token in trace.tokens]
    found = {}
    for kind, values in [*sizes.items(), ("all tokens", every)]:
        if values:
            mean, error = mean_and_error([float(each[-1]) for each in values])
            stages = [math.fsum(column) / len(values) for column in zip(*values, strict=True)]
            found[kind] = {"tokens": len(values), "streams": mean, "standard_error": error, "by_stage": stages}
    return {"kinds": found}


def bubble_sentence(numbers: Mapping[str, Any]) -> str:
    kinds = {kind: each for kind, each in numbers["kinds"].items() if each["tokens"] >= 10 and kind != "all tokens"}
    mean = numbers["kinds"]["all tokens"]["streams"]
    if len(kinds) < 2:
        return f"A token has {mean:.2f} streams on average."
    most, least = (pick(kinds, key=lambda kind: kinds[kind]["streams"]) for pick in (max, min))
    return (
        f"The largest bubbles belong to the kind “{most}” ({kinds[most]['streams']:.2f} streams per token), the "
        f"smallest to “{least}” ({kinds[least]['streams']:.2f}); the mean of all tokens is {mean:.2f}."
    )


def gain_numbers(
    scores: Scores, without: Scores, kinds: Sequence[Sequence[set[str]]], *, budget: object
) -> dict[str, Any]:
    """Loss by kind of the predicted token, with the model's budget and with forks cut away; `kinds` of the targets."""
    found = {}
    for kind in (*KINDS, "all tokens"):
        mask = torch.zeros_like(scores.counted)
        for place, row in enumerate(kinds):
            flags = torch.tensor([kind == "all tokens" or kind in of_token for of_token in row], dtype=torch.bool)
            mask[place, : len(row)] = flags
        mask &= scores.counted
        n = int(mask.sum())
        if n:
            gap = (scores.nll - without.nll) * mask
            found[kind] = {
                "tokens": n,
                "with_forks": float((scores.nll * mask).sum()) / n,
                "without": float((without.nll * mask).sum()) / n,
                "difference": float(gap.sum()) / n,
                "standard_error": error_of_mean(gap, mask) if int(mask.any(1).sum()) > 1 else None,
            }
    return {"budget": str(budget), "kinds": found}


def gain_sentence(numbers: Mapping[str, Any]) -> str:
    every = numbers["kinds"]["all tokens"]
    error = every["standard_error"]
    first = (
        f"With its budget of {numbers['budget']} the model has a loss of {every['with_forks']:.3f} nats per token, "
        f"with forks cut away {every['without']:.3f}: a difference of "
        f"{signed(every['difference'])}{plus_minus(error)}."
    )
    if error is None:
        return f"{first} One window is too little to say how certain that is."
    clear = {
        kind: each
        for kind, each in numbers["kinds"].items()
        if kind != "all tokens" and each["standard_error"] and abs(each["difference"]) > 2 * each["standard_error"]
    }
    if not clear:
        return f"{first} For no kind of token is the difference larger than two standard errors."
    strongest = max(clear, key=lambda kind: abs(clear[kind]["difference"]))
    change = f"{signed(clear[strongest]['difference'])}{plus_minus(clear[strongest]['standard_error'])}"
    return f"{first} The largest clear change is at “{strongest}”, by {change}."
