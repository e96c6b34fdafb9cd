"""Run by kernels/interpreted.py: the kernels of a decoding step, on the CPU, against `Block`.

Prints one JSON object: for each case the largest difference of a step's logits, of what is cached, and whether the
streams agree.
"""

import json
import sys
from functools import partial

import torch

from helpers import lively_model, random_ids, small_config
from thoughtbubbles.generate.decode import prefill
from thoughtbubbles.generate.graph import run_packed, widths_within
from thoughtbubbles.generate.step import PLAIN, Parts, advance
from thoughtbubbles.kernels import decode_attention

BUDGETS = [2, 1.5, 4]
FEEDBACK = {"fork_reach": 0, "feedback": True, "fork_layers": (1,), "merge": "forks"}


def differences(
    steps: int = 3, lengths: tuple[int, ...] = (3, 7, 1), size: int | None = None, few: bool = True, **changes
) -> dict[str, float | bool]:
    decode_attention.PROGRAMS = 48 if few else 1  # 48: several parts of a short row
    shape = {"width": 128, "n_head": 4, "n_layer": 2, "block_size": max(lengths) + 5, "vocab_size": 40}
    config = small_config(**{**shape, "fork_layers": (0, 1), "merge": "residual", **changes})
    model = lively_model(config, dtype=torch.float32)
    with torch.no_grad():  # many channels of lively weights: closer to a trained model
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "score" not in name:
                weight.mul_(0.2)
    ids, widths = random_ids(config, 3, config.block_size), widths_within(config, 8)
    budget = BUDGETS if config.fork_layers and config.scores else None
    caches = [prefill(model, ids[:, : max(lengths)], lengths=list(lengths), budget=budget)[1] for _ in range(2)]
    worst, same = 0.0, True
    for step in range(steps):
        active = torch.tensor([True, True, step != 1])
        new = ids.gather(1, caches[0].n_tokens[:, None])[:, 0]
        plain, caches[0] = advance(model, caches[0], new, active, widths=widths, parts=PLAIN)
        blocks = partial(run_packed, size=size)
        fast, caches[1] = advance(model, caches[1], new, active, widths=widths, parts=Parts(blocks=blocks))
        worst = max(worst, float((plain.logits - fast.logits)[active].abs().max()))
        same &= torch.equal(plain.streams[active], fast.streams[active])
    kept = [
        float((a - b)[:, :, :, :-1].abs().max())  # the last slot is never read
        for one, other in zip(caches[0].spans, caches[1].spans, strict=True)
        for a, b in ((one.key, other.key), (one.value, other.value))
    ]
    return {"logits": worst, "kept": max(kept), "same_streams": same}


if __name__ == "__main__":
    decode_attention.SLOTS = 16  # several turns in each part of a longer row
    cases = {
        "bubbles": {},
        "packed": {"size": 9, "steps": 2},
        "packed long": {"lengths": (36, 40, 33), "steps": 2, "n_layer": 1, "fork_layers": (0,), "size": 6},
        "long": {"lengths": (36, 40, 33), "steps": 1, "n_layer": 1, "fork_layers": (0,)},
        "plain": {"fork_layers": (), "merge": "original"},
        "gates of heads": {"n_layer": 1, "fork_layers": (0,), "steps": 1, "head_gate": True},
        "narrow": {"n_layer": 1, "fork_layers": (0,), "steps": 1, "width": 192, "n_head": 3},
        "many": {"few": False, "size": 9, "steps": 2},
        "many with gaps": {"few": False, "n_layer": 3, "fork_layers": (0, 1, 2), "steps": 2},
        "many plain": {"few": False, "fork_layers": (), "merge": "original", "steps": 2},
        "private": {"fork_reach": 0, "size": 9, "steps": 2},
        "private, many": {"few": False, "fork_reach": 0, "steps": 2, "lengths": (20, 18, 2), "merge": "forks"},
        "feedback": {**FEEDBACK, "size": 5},
        "feedback, gates": {**FEEDBACK, "size": 5, "steps": 2, "head_gate": True},
        "feedback, near forks": {**FEEDBACK, "fork_reach": 3, "size": 5, "steps": 4},
        "feedback, near forks, many": {**FEEDBACK, "fork_reach": 18, "few": False, "lengths": (20, 18, 2), "steps": 2},
        "feedback without scores": {**FEEDBACK, "fork_reach": 3, "scores": False, "head_gate": True},
        "without scores": {"scores": False, "budget": 4, "steps": 2},
        "near forks": {"fork_reach": 1, "size": 9, "lengths": (20, 18, 2)},
        "no gates": {"gate_qk": False, "gate_v": False, "gate_residual": False, "steps": 2},
    }
    json.dump({name: differences(**case) for name, case in cases.items()}, sys.stdout)
