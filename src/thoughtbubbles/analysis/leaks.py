"""Does it see the future: the leak audit of one model by each selection rule, at its own budget."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from thoughtbubbles.analysis.audit import TOKENS, Audit
from thoughtbubbles.model.transformer import Thoughtbubbles

RULES = ("causal", "block")
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
        found = each.as_dict()
        assert each.selection is not None
        rules[each.selection] = {name: found[name] for name in ("leaks", "total", "by_distance")}
    return {"own": own, **about, "rules": rules}


def sentence(found: Mapping[str, Any]) -> str:
    own = found["own"]
    rules = sorted(found["rules"], key=lambda rule: rule != own)  # its own first
    return " ".join(_of_rule(rule, found["rules"][rule], is_own=rule == own) for rule in rules)


def _of_rule(rule: str, found: Mapping[str, Any], *, is_own: bool) -> str:
    total = found["total"]
    name = f"With {rule} selection{', the rule of this model,' if is_own else ''}"
    if not found["leaks"]:
        return f"{name} none of {total['predictions']:,} predictions moves when the tokens after it are changed."
    reach = max(part["farthest"] for part in found["by_distance"] if part["moved"])
    return (
        f"{name} {total['moved']:,} of {total['predictions']:,} predictions "
        f"({total['moved'] / total['predictions']:.1%}) move when the tokens after them are changed, up to {reach} "
        f"tokens before the change; log p of the next token moves by up to {total['largest']:.2g} nats, and by "
        f"{total['mean']:.2g} on average."
    )
