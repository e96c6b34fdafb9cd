"""The task `perplexity`: scores the same windows in several ways, as in the paper's table on autoregression.

The ways depend on the model:

    block selection    blockwise · autoregressive with the proportional and with the fixed budget, without a cache ·
                       through the cache with the causal rule, an approximation whose difference is measured
    causal selection   blockwise · autoregressive through the cache, which is exact; a fixed budget does not exist
    plain, copy-N      blockwise · autoregressive through the cache
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table

from thoughtbubbles.evals.autoregressive import (
    Difference,
    Report,
    Scores,
    Windows,
    blockwise,
    compare,
    through_cache,
    without_cache,
)
from thoughtbubbles.generate.requests import exact_method
from thoughtbubbles.model.budget import BudgetLike
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

NO_FIXED = "does not exist: causal selection decides at each token and cannot know the block"


class Way(NamedTuple):
    title: str
    score: Callable[..., Scores]


def ways_of(config: ModelConfig, *, vocab_size: int) -> dict[str, Way]:
    cached = partial(through_cache, vocab_size=vocab_size)
    ways = {"blockwise": Way("blockwise", blockwise)}
    if exact_method(config) == "cached":
        budget = ", proportional budget" if config.fork_layers else ""
        return {**ways, "autoregressive": Way(f"autoregressive{budget}", cached)}
    uncached = partial(without_cache, vocab_size=vocab_size)
    return {
        **ways,
        "autoregressive": Way("autoregressive, proportional budget", uncached),
        "fixed": Way("autoregressive, fixed budget", partial(uncached, budget_mode="fixed")),
        "cached": Way("approximation: cache, causal rule", cached),
    }


def perplexity(
    model: Thoughtbubbles,
    windows: Windows,
    *,
    vocab_size: int,
    budget: BudgetLike | None = None,
    batch: int = 8,
    report: Callable[[str], Report] = lambda title: lambda share: None,
) -> dict[str, Scores]:
    """Scores by the name of the way. `report(title)` returns a function that is called with the fraction done."""
    return {
        name: way.score(model, windows, budget=budget, batch=batch, report=report(way.title))
        for name, way in ways_of(model.config, vocab_size=vocab_size).items()
    }


def join(shares: Sequence[dict[str, Scores]]) -> dict[str, Scores]:
    """The scores of all windows from those of several ranks; of n ranks, each has every n-th window."""
    return {name: _join([share[name] for share in shares]) for name in shares[0]}


def _join(shares: Sequence[Scores]) -> Scores:
    if len(shares) == 1:
        return shares[0]
    total = sum(len(share.nll) for share in shares)
    joined = [torch.empty(total, *part.shape[1:], dtype=part.dtype) for part in shares[0][:3]]
    for rank, share in enumerate(shares):
        for whole, part in zip(joined, share[:3], strict=True):
            whole[rank :: len(shares)] = part
    return Scores(joined[0], joined[1], joined[2], max(share.seconds for share in shares))


def differences(scores: dict[str, Scores]) -> dict[str, Difference]:
    """Every way against the parallel forward, and the approximation against the exact one."""
    found = {
        f"{name} - blockwise": compare(each, scores["blockwise"])
        for name, each in scores.items()
        if name != "blockwise"
    }
    if "cached" in scores:
        found["cached - autoregressive"] = compare(scores["cached"], scores["autoregressive"])
    return found


def describe(config: ModelConfig, scores: dict[str, Scores], *, vocab_size: int, n_bytes: int) -> dict[str, Any]:
    """All numbers, JSON-serializable; table and figure are made from these. `n_bytes`: UTF-8 bytes of the targets."""
    ways = ways_of(config, vocab_size=vocab_size)
    return {
        "ways": {name: {"title": ways[name].title, **_numbers(each, n_bytes)} for name, each in scores.items()},
        "differences": {name: difference._asdict() for name, difference in differences(scores).items()},
        "bytes": n_bytes,
        "missing": {} if exact_method(config) == "uncached" or not config.fork_layers else {"fixed": NO_FIXED},
    }


def _numbers(scores: Scores, n_bytes: int) -> dict[str, Any]:
    error = scores.standard_error
    sizes = scores.counted.sum(1).tolist()
    return {
        "nats": scores.mean,
        "standard_error": error,
        "perplexity": scores.perplexity,
        "perplexity_standard_error": None if error is None else scores.perplexity * error,
        "bits_per_byte": scores.mean * scores.n_tokens / math.log(2) / n_bytes if n_bytes else None,
        "tokens": scores.n_tokens,
        "seconds": scores.seconds,
        "windows": [
            {"tokens": tokens, "nats": nats, "perplexity": perplexity}
            for tokens, nats, perplexity in zip(sizes, scores.window_means, scores.window_perplexities, strict=True)
        ],
    }


def table_of(found: dict[str, Any], *, title: str) -> Table:
    """From the numbers of `describe`."""
    windows = [window["tokens"] for window in found["ways"]["blockwise"]["windows"]]
    up_to = "up to " * (min(windows) < max(windows))
    table = Table(title=f"{title}; {len(windows)} window{'s' * (len(windows) > 1)} of {up_to}{max(windows)} tokens")
    table.add_column("")
    for heading in (
        "nats per token",
        "perplexity",
        "against\nblockwise",
        "bits/\nbyte",
        "seconds",
    ):  # fits in 80 columns
        table.add_column(heading, justify="right", no_wrap=True)
    for name, way in found["ways"].items():
        gap = found["differences"].get(f"{name} - blockwise")
        form = ".3f" if way["perplexity"] < 1000 else ",.0f"
        table.add_row(
            way["title"],
            f"{way['nats']:.4f}{_plus_minus(way['standard_error'], '.4f')}",
            f"{way['perplexity']:{form}}{_plus_minus(way['perplexity_standard_error'], form)}",
            "" if gap is None else f"{gap['mean']:+.4f}{_plus_minus(gap['standard_error'], '.4f')}",
            "–" if way["bits_per_byte"] is None else f"{way['bits_per_byte']:.4f}",
            f"{way['seconds']:.1f}",
        )
    if "fixed" in found["missing"]:
        table.add_row("autoregressive, fixed budget", *["–"] * 5)
    return table


def remarks(found: dict[str, Any]) -> list[str]:
    """Facts that are not in the table, as sentences."""
    gaps = found["differences"]
    exact, lines = gaps["autoregressive - blockwise"], []
    lines.append(f"Autoregressive against blockwise: no token differs by more than {exact['largest']:.2g} nats.")
    if "cached - autoregressive" in gaps:
        gap = gaps["cached - autoregressive"]
        lines.append(
            f"The cache with the causal rule against exact autoregression: {gap['mean']:+.4f}"
            f"{_plus_minus(gap['standard_error'], '.4f', before=' ')} nats per token, "
            f"at most {gap['largest']:.2g} at one token; {gap['same_greedy']:.1%} of the greedy predictions agree."
        )
    lines += [f"A {name} budget {why}." for name, why in found["missing"].items()]
    lines.append("± is the standard error over windows; differences are paired, in nats per token.")
    return lines


def _plus_minus(error: float | None, form: str, *, before: str = "\n") -> str:
    return "" if error is None else f"{before}± {error:{form}}"
