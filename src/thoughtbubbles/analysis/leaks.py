"""Does it see the future: the leak audit of one model by each selection rule, at its own budget."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch

from thoughtbubbles.analysis.audit import TOKENS, Audit, extent
from thoughtbubbles.model.transformer import Thoughtbubbles

RULES = ("causal", "block")
NO_RULE = "no"  # of a model that keeps all forks
ROWS = 4


def in_float64(model: Thoughtbubbles) -> Thoughtbubbles:
    """A copy, in which a causal model gives the same bits; mps has no float64."""
    copy = deepcopy(model)
    return (copy.cpu() if copy.embedding.weight.device.type == "mps" else copy).double()


def same_length(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The beginnings of the first rows that are long enough."""
    n_tokens = min(TOKENS, max(map(len, rows)))
    return torch.tensor([row[:n_tokens] for row in rows if len(row) >= n_tokens][:ROWS])


def numbers(audits: Sequence[Audit], *, own: str) -> dict[str, Any]:
    """Of one text, one audit per rule; `own` is the rule of the model."""
    first = audits[0]
    about = {name: getattr(first, name) for name in ("budget", "dtype", "tolerance", "rows", "tokens", "cuts")}
    rules = {}
    for each in audits:
        rules[each.selection or NO_RULE] = {
            "leaks": each.leaks,
            "reach": each.reach,
            "total": asdict(each.total),
            "by_distance": [{"label": part.label, **asdict(part)} for part in each.by_distance],
        }
    return {"own": own, **about, "rules": rules}


def sentence(found: Mapping[str, Any]) -> str:
    own = found["own"]
    rules = sorted(found["rules"], key=lambda rule: rule != own)  # its own first
    return " ".join(_of_rule(rule, found["rules"][rule], is_own=rule == own) for rule in rules)


def _of_rule(rule: str, found: Mapping[str, Any], *, is_own: bool) -> str:
    total = found["total"]
    name = f"With {rule} selection{', the rule of this model' * (is_own and rule != NO_RULE)}"
    line = f"{name}, {extent(moved=total['moved'], comparisons=total['comparisons'], reach=found['reach'])}"
    if not found["leaks"]:
        return f"{line}."
    return (
        f"{line}; log p of the next token moves by up to {total['largest']:.2g} nats, and by {total['mean']:.2g} on "
        "average."
    )
