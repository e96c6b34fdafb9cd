"""Where it forks: the streams of each token after each fork layer, along a text."""

from collections.abc import Mapping
from typing import Any

from thoughtbubbles.analysis.trace import Trace


def numbers(found: Trace) -> dict[str, Any]:
    """The first stage, with one stream per token, is left out."""
    n_stages = len(found.stages)
    return {
        "text": found.text,
        "ends": [token.end for token in found.tokens],
        "tokens": [token.text for token in found.tokens],
        "layers": [stage.layer for stage in found.stages[1:]],
        "streams": [[token.streams[stage] for token in found.tokens] for stage in range(1, n_stages)],
        "entropy": [token.entropy for token in found.tokens],
        "nats": found.loss,
        "budget": str(found.settings["budget"]),
    }


def sentence(numbers: Mapping[str, Any]) -> str:
    last, tokens = numbers["streams"][-1], numbers["tokens"]
    mean = sum(last) / len(last)
    most = max(last)
    forked = sum(count > 1 for count in last)
    first = (
        f"With a budget of {numbers['budget']}, {forked} of {len(tokens)} tokens have more than one stream after the "
        f"last fork layer; the mean is {mean:.2f}"
    )
    if most == 1:
        return f"{first}."
    words = [visible(tokens[place]).strip("·") for place, count in enumerate(last) if count == most]
    named = list(dict.fromkeys(f"“{word}”" for word in words if word and "\ufffd" not in word))[:5]
    return f"{first}, the largest bubble has {most}, for example at {', '.join(named)}." if named else f"{first}."


def visible(text: str) -> str:
    """One line without control characters: a space becomes a middle dot, other white space an arrow."""
    marks = {"\n": "↵", "\t": "⇥", " ": "·", "": "∎"}
    return "".join(marks.get(each, each if each.isprintable() else "\ufffd") for each in text) or "∎"
