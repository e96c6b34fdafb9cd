"""How much each block writes: norms of the updates of attention and MLP, before and after attenuation by the score."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thoughtbubbles.analysis.trace import Trace, stage_of, trace
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.model.transformer import Thoughtbubbles

PARTS = ("attention", "mlp")


@contextmanager
def recorded(model: Thoughtbubbles) -> Iterator[list[dict[str, Tensor | None]]]:
    """Inside, each forward fills the list: for each block the updates, before attenuation, and the gate."""
    kept: list[dict[str, Tensor | None]] = []
    handles = []

    def begin(module: Any, arguments: tuple[Any, ...]) -> None:
        kept.append({"gate": arguments[1].gate})

    def keep(name: str) -> Any:
        def hook(module: Any, arguments: Any, update: Any) -> None:
            kept[-1][name] = update.with_bias()

        return hook

    for block in model.blocks:
        handles.append(block.register_forward_pre_hook(begin))
        handles += [getattr(block, name).register_forward_hook(keep(name)) for name in PARTS]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def numbers(model: Thoughtbubbles, rows: Sequence[Sequence[int]], *, tokenizer: Tokenizer) -> dict[str, Any]:
    """Mean norms over all streams: what is computed (before), and what is added to the residual (after)."""
    sums = torch.zeros(model.config.n_layer, len(PARTS), 2, dtype=torch.float64)
    n_streams = torch.zeros(model.config.n_layer, dtype=torch.float64)
    for row in rows:
        with recorded(model) as kept:
            found = trace(model, row, tokenizer=tokenizer, top=0)
        for block, used, each in zip(*_passes(model, found), kept, strict=False):
            n_streams[block] += used
            sums[block] += _norms(each, used)
    means = (sums / n_streams[:, None, None]).tolist()
    return {
        "blocks": [
            {name: {"before": pair[0], "after": pair[1]} for name, pair in zip(PARTS, block, strict=True)}
            for block in means
        ],
        "fork_layers": list(model.config.fork_layers),
    }


def _passes(model: Thoughtbubbles, found: Trace) -> tuple[list[int], list[int]]:
    """The blocks in the order in which they are run, and how many streams each has then."""
    blocks = list(range(model.config.n_layer))
    used = [_used(found, block) for block in blocks]
    if not model.config.feedback:
        return blocks, used
    (first,), n_tokens = model.config.fork_layers, len(found.tokens)  # originals; then forks, from there on
    return blocks + blocks[first:], [n_tokens] * len(blocks) + [n - n_tokens for n in used[first:]]


def _used(found: Trace, block: int) -> int:
    """Unused slots are at the right end."""
    return len(stage_of(found.stages, block).streams)


def _norms(kept: Mapping[str, Tensor | None], used: int) -> Tensor:
    gate, found = kept["gate"], []
    for name in PARTS:
        update = kept[name]
        assert update is not None
        norm = update[0, :used].double().norm(dim=-1)
        written = norm if gate is None else norm * gate[0, :used].double()
        found.append(torch.stack([norm.sum(), written.sum()]).cpu())
    return torch.stack(found)


def sentence(found: Mapping[str, Any]) -> str:
    shares = [
        sum(block[name]["after"] for name in PARTS) / max(sum(block[name]["before"] for name in PARTS), 1e-300)
        for block in found["blocks"]
    ]
    firsts = [layer for layer in found["fork_layers"] if layer < len(shares)]
    ends = [*firsts[1:], len(shares)]
    parts = [
        f"{sum(shares[a:b]) / (b - a):.0%} in {f'block {a}' if b - a == 1 else f'blocks {a}–{b - 1}'}"
        for a, b in zip(firsts, ends, strict=True)
    ]
    return f"Of the norm that a block computes, this share is left after attenuation by the score: {', '.join(parts)}."
