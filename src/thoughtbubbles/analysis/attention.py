"""Who looks at whom: the attention mass that originals and forks give to each kind of stream, by block.

    from an original   to itself · to its own forks · to other originals · to other forks
    from a fork        to itself · to its siblings on the left · to other originals · to other forks

A fork is left of its original and attention is causal, so a fork never attends to its own original.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thoughtbubbles.analysis.trace import Trace, stage_of

SELF, OWN, ORIGINALS, FORKS = "itself", "forks of its bubble", "other originals", "other forks"
TO = (SELF, OWN, ORIGINALS, FORKS)
FROM = ("original", "fork")


def numbers(traces: Iterable[Trace]) -> dict[str, Any]:
    """Means over the streams that attend and over heads. Traces come one at a time: attention weights are large.

    mass     share of the attention, in the order of `to`; adds up to 1. None in blocks without such streams
    per_key  mean weight of one key of that kind; None where there is none
    """
    totals: list[dict[str, Tensor]] = []
    for trace in traces:
        assert trace.attention is not None
        totals = totals or [
            {name: torch.zeros(3, len(TO), dtype=torch.float64) for name in FROM} for _ in trace.attention
        ]
        for block, weights in enumerate(trace.attention):
            for name, found in _sums(trace, block, weights.double().mean(0)).items():
                totals[block][name] += found
    blocks = [{name: _means(total) for name, total in each.items()} for each in totals]
    return {"to": list(TO), "blocks": blocks}


def _sums(trace: Trace, block: int, weights: Tensor) -> dict[str, Tensor]:
    """Of each kind of query: sums of the mass, numbers of visible keys, and (in each column) numbers of queries."""
    streams = stage_of(trace.stages, block).streams
    token = torch.tensor([stream.token for stream in streams])
    original = torch.tensor([stream.place == 0 for stream in streams])
    same, visible = token[:, None] == token, torch.ones_like(weights, dtype=torch.bool).tril()
    if (reach := trace.settings["fork_reach"]) is not None:
        visible &= original | (token[:, None] - token <= reach)
    if trace.settings["feedback"]:  # originals see no forks, since they come first
        visible &= original | ~original[:, None]
    itself = torch.eye(len(streams), dtype=torch.bool)
    masks = (itself, same & ~itself, ~same & original, ~same & ~original)
    found = {}
    for name, rows in zip(FROM, (original, ~original), strict=True):
        mass = torch.stack([(weights * mask)[rows].sum() for mask in masks])
        keys = torch.stack([(mask & visible)[rows].sum().double() for mask in masks])
        found[name] = torch.stack([mass, keys, rows.sum().double().expand(len(TO))])
    return found


def _means(total: Tensor) -> dict[str, Any] | None:
    mass, keys, queries = total.tolist()
    if not queries[0]:
        return None
    return {
        "mass": [value / n for value, n in zip(mass, queries, strict=True)],
        "per_key": [value / n if n else None for value, n in zip(mass, keys, strict=True)],
    }


def sentence(found: Mapping[str, Any]) -> str:
    having = [
        (block, each)
        for block, each in enumerate(found["blocks"])
        if each["fork"] is not None and each["original"] is not None
    ]
    if not having:
        return "No token of this text has a fork."
    place = found["to"].index(OWN)
    if all(each["original"]["per_key"][place] is None for _, each in having):
        return "Originals see no forks: they go through the blocks first."
    block, strongest = max(having, key=lambda pair: pair[1]["original"]["mass"][place])
    own, other = (strongest["original"]["per_key"][found["to"].index(name)] for name in (OWN, ORIGINALS))
    times = f", {own / other:.1f} × that of another original" if own and other else ""
    return (
        f"Originals look at the forks of their own bubble most in block {block}: "
        f"{strongest['original']['mass'][place]:.1%} of their attention; one such fork gets a mean weight of "
        f"{own or 0:.4f}{times}."
    )
