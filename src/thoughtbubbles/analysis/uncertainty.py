"""Forks and uncertainty: streams per token against output entropy, over groups of 4 tokens, as in the paper.

The entropy at a token is that of the prediction of the next one. Groups do not overlap and do not cross texts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thoughtbubbles.evals.metrics import mean_and_error
from thoughtbubbles.written import signed

GROUP = 4  # tokens
BINS = 8
Z = 1.959963984540054  # of a two-sided 95% interval
Values = Sequence[int | float]


def groups(values: Values, *, size: int = GROUP) -> list[float]:
    """Means of consecutive groups; an incomplete one at the end is left out."""
    return [math.fsum(values[i : i + size]) / size for i in range(0, len(values) - size + 1, size)]


def correlation(x: Values, y: Values) -> dict[str, float] | None:
    """Pearson's r with its 95% interval by Fisher's z; None for fewer than 4 points or without variation."""
    if len(x) < 4 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    r = float(np.clip(np.corrcoef(x, y)[0, 1], -1, 1))
    if abs(r) > 1 - 1e-12:
        return dict.fromkeys(("r", "low", "high"), float(round(r)))
    half = Z / math.sqrt(len(x) - 3)
    return {"r": r, "low": math.tanh(math.atanh(r) - half), "high": math.tanh(math.atanh(r) + half)}


def parabola(x: Values, y: Values) -> dict[str, float] | None:
    """Least squares a + b·x + c·x²; the share of the variance that it explains; where it has its extreme."""
    if len(set(x)) < 3:
        return None
    c, b, a = (float(value) for value in np.polyfit(x, y, 2))
    left = np.asarray(y) - (a + b * np.asarray(x) + c * np.asarray(x) ** 2)
    spread = float(np.var(y))
    explained = 1 - float(np.var(left)) / spread if spread else 0.0
    found = {"a": a, "b": b, "c": c, "explained": explained}
    return {**found, "extreme": -b / (2 * c)} if c else found


def bins(x: Values, y: Values, *, count: int = BINS) -> list[dict[str, float | None]]:
    """Equally many points each, by x: means, and the standard error of y."""
    order = sorted(range(len(x)), key=lambda place: x[place])
    found: list[dict[str, float | None]] = []
    for number in range(count):
        part = order[number * len(x) // count : (number + 1) * len(x) // count]
        if part:
            mean, error = mean_and_error([y[place] for place in part])
            center = math.fsum(x[place] for place in part) / len(part)
            found.append({"entropy": center, "streams": mean, "standard_error": error})
    return found


def numbers(
    streams: Sequence[Sequence[int]], entropies: Mapping[str, Sequence[Values]], *, size: int = GROUP
) -> dict[str, Any]:
    """For each text, the streams of its tokens; for each source of entropies, the entropy at each token."""
    y = [value for row in streams for value in groups(row, size=size)]
    sources = {}
    for name, rows in entropies.items():
        x = [value for row in rows for value in groups(row, size=size)]
        assert len(x) == len(y)
        sources[name] = {"entropy": x, "correlation": correlation(x, y), "parabola": parabola(x, y), "bins": bins(x, y)}
    return {"group": size, "groups": len(y), "streams": y, "sources": sources}


def sentence(found: Mapping[str, Any]) -> str:
    parts = []
    for name, each in found["sources"].items():
        r, fit = each["correlation"], each["parabola"]
        if r is None or fit is None:
            parts.append(f"With the entropy of {name} there is nothing to correlate in {found['groups']} groups.")
            continue
        shape = "is concave" if fit["c"] < 0 else "is convex"
        inside = "extreme" in fit and min(each["entropy"]) < fit["extreme"] < max(each["entropy"])
        turn = f", with its turning point at {fit['extreme']:.1f} nats," if inside else ""
        clear = "" if r["low"] > 0 or r["high"] < 0 else ", which is not distinguishable from none"
        interval = f"95% interval {signed(r['low'], '.2f')} to {signed(r['high'], '.2f')}"
        parts.append(
            f"Streams per token and the entropy of {name} have a correlation of {signed(r['r'], '.2f')} ({interval}, "
            f"{found['groups']} groups of {found['group']} tokens){clear}; the fitted parabola {shape}{turn} and "
            f"explains {fit['explained']:.0%} of the variance."
        )
    return " ".join(parts)
