"""Optimizers and learning rate. Weight decay is for tensors of two dimensions or more; the schedule is a function.

The state that a checkpoint needs is a flat dictionary of tensors, sharded like the parameters, and one integer: the
number of updates made (AdamW's step, the same for every parameter).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from thoughtbubbles.train.config import OptimConfig

STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # what each keeps for a parameter


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Of step 0 … steps − 1. The warm-up ends at the peak; cosine and wsd end at `floor` times it."""
    warmup = round(optim.warmup * steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    begin = warmup if optim.schedule == "cosine" else max(warmup, steps - round(optim.decay * steps))
    progress = max(0, step - begin + 1) / max(1, steps - begin)
    fall = (1 - math.cos(math.pi * progress)) / 2 if optim.schedule == "cosine" else progress
    return optim.lr * (1 - (1 - optim.floor) * fall)


class Optimizer:
    """AdamW, alone or with Muon for the blocks' matrices, as one thing to step, save and restore."""

    def __init__(self, model: nn.Module, optim: OptimConfig):
        self.config = optim
        self.name_of: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.updates = 0
        by_kind: dict[str, list[Tensor]] = {"adamw": [], "muon": []}
        for parameter, name in self.name_of.items():
            is_matrix = parameter.ndim == 2 and name.startswith("blocks.")
            by_kind["muon" if optim.kind == "muon" and is_matrix else "adamw"].append(parameter)
        self.parameters = by_kind
        groups = [
            {"params": [p for p in by_kind["adamw"] if p.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in by_kind["adamw"] if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.parts: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
        }
        if by_kind["muon"]:
            # Updates scaled to AdamW's usual size, so that one learning rate serves both.
            self.parts["muon"] = torch.optim.Muon(
                by_kind["muon"], lr=optim.lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
            )

    def step(self, lr: float) -> None:
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        self.updates += 1

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, e.g. `exp_avg.blocks.0.mlp.up.weight`; zeros for what has not been updated yet."""
        return {
            f"{key}.{self.name_of[parameter]}": self.parts[kind].state[parameter].get(key, None)
            if self.parts[kind].state[parameter]
            else torch.zeros_like(parameter)
            for kind, parameter, key in self._entries()
        }

    def restore(self, tensors: dict[str, Tensor], updates: int) -> None:
        self.updates = updates
        if updates == 0:
            return
        for kind, parameter, key in self._entries():
            state = self.parts[kind].state[parameter]
            state[key] = tensors[f"{key}.{self.name_of[parameter]}"]
            if kind == "adamw":
                state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)

    def _entries(self) -> Iterable[tuple[str, Tensor, str]]:
        for kind, parameters in self.parameters.items():
            for parameter in parameters:
                for key in STATE[kind]:
                    yield kind, parameter, key


def clip(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scales the gradient down to a norm of at most `largest` (0: leaves it); returns the norm before."""
    norm = nn.utils.clip_grad_norm_(parameters, largest or math.inf)
    return norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm
