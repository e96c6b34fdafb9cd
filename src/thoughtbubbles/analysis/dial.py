"""The thinking dial: loss and speed of one model at several budgets, overall and for its hardest tokens.

Tokens that are chosen because they are hard at budget 1 look better at any other budget, also without a reason. So the
tenth that is hardest on average over all budgets is shown too: that choice favours none of them.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from thoughtbubbles.evals.autoregressive import Scores, error_of_mean
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.recipes.showcase import generation_time
from thoughtbubbles.written import plus_minus, signed

HARDEST = 0.1
PROMPT, NEW, REPEATS = 32, 12, 3
GROUPS = ("all tokens", "hardest tenth at budget 1", "hardest tenth on average")


def default_budgets(config: ModelConfig) -> list[str]:
    """1, 1.25, 1.5, 2, 3, 4, 6, 8 … up to the most streams that a token can have, and the model's own.

    Without scores, its own alone: such a model has no smaller ones.
    """
    if not config.scores:
        return [str(config.budget)]
    found, step = {Fraction(1), Fraction(5, 4), Fraction(3, 2)}, 2
    while step <= config.max_bubble:
        found |= {Fraction(step), Fraction(3 * step, 2)}
        step *= 2
    shown = {each for each in found if each <= config.max_bubble} | {Fraction(str(config.budget))}
    return [str(each.numerator) if each.denominator == 1 else str(float(each)) for each in sorted(shown)]


def hardest(nll: Tensor, counted: Tensor) -> Tensor:
    """Mask of the tenth of the tokens with the highest loss."""
    n = max(1, round(HARDEST * int(counted.sum())))
    order = nll.masked_fill(~counted, -torch.inf).flatten().topk(n).indices
    return torch.zeros(nll.numel(), dtype=torch.bool).scatter(0, order, True).reshape(nll.shape)


def numbers(scores: Mapping[str, Scores], *, own: str) -> dict[str, Any]:
    """`scores` by budget, "1" among them; differences are paired with budget 1."""
    reference = scores["1"]
    mean = torch.stack([each.nll for each in scores.values()]).mean(0)
    counted = reference.counted
    masks = (counted, hardest(reference.nll, counted), hardest(mean, counted))
    series = {}
    for name, mask in zip(GROUPS, masks, strict=True):
        n = int(mask.sum())
        rows = []
        for budget, each in scores.items():
            gap = (each.nll - reference.nll) * mask
            rows.append(
                {
                    "budget": budget,
                    "nats": float((each.nll * mask).sum()) / n,
                    "difference": float(gap.sum()) / n,
                    "standard_error": None if budget == "1" else error_of_mean(gap, mask),
                }
            )
        series[name] = {"tokens": n, "rows": rows}
    return {"own_budget": own, "series": series}


def timing(model: Thoughtbubbles, ids: Sequence[int], budget: str) -> dict[str, Any] | None:
    """Milliseconds per generated token, the best of a few repeats, without reading the prompt."""
    size = model.config.block_size
    prompt = list(ids[: max(1, min(PROMPT, size // 2))])
    new = min(NEW, size - len(prompt) - 1)
    if new < 1:
        return None
    times = [[generation_time(model, prompt, float(Fraction(budget)), n) for n in (1, 1 + new)] for _ in range(REPEATS)]
    return {"budget": budget, "milliseconds": 1000 * max(min(long - short for short, long in times), 0.0) / new}


def sentence(found: Mapping[str, Any]) -> str:
    rows = {name: {row["budget"]: row for row in each["rows"]} for name, each in found["series"].items()}
    every = rows["all tokens"]
    best = min(every, key=lambda budget: every[budget]["nats"])
    most = list(every)[-1]
    if best == "1":
        first = f"The loss is lowest at budget 1, {every['1']['nats']:.4f} nats per token."
    else:
        change = f"{signed(every[best]['difference'])}{plus_minus(every[best]['standard_error'])}"
        first = (
            f"The loss is lowest at budget {best}: {every[best]['nats']:.4f} nats per token, {change} against budget 1."
        )
    hard = rows[GROUPS[2]][best]["difference"]
    first += f" For the tenth of tokens that is hardest on average the difference is {signed(hard)}." * (best != "1")
    times = {row["budget"]: row["milliseconds"] for row in found.get("timings", [])}
    if len(times) > 1 and times["1"] > 0:
        first += (
            f" A generated token takes {times['1']:.1f} ms at budget 1 and {times[most]:.1f} ms at budget {most}, "
            f"{times[most] / times['1']:.2f} × as long ({found['device']})."
        )
    return first
