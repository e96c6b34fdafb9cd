"""Optimizer steps over tensors of awkward sizes, by kernel or by torch.

Run by kernels/interpreted.py: the kernel on the CPU against torch.optim in float64, as JSON.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thoughtbubbles.train.config import OptimConfig
from thoughtbubbles.train.optim import Optimizer

SHAPES = [(1,), (7,), (1023,), (1025,), (5000,), (1, 1), (3, 4096), (70, 33), (0, 5)]  # pieces of 4096, blocks of 1024
OPTIM = OptimConfig(weight_decay=0.3, betas=(0.9, 0.999))
STEPS = 5


class Tensors(nn.Module):
    """`offset`: how many elements after the beginning of its storage each tensor begins."""

    def __init__(self, *, device: str, dtype: torch.dtype, offset: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
        made = [shifted(tensor, offset) for tensor in made]
        self.rest = nn.ParameterList(made[:-2])
        self.blocks = nn.ParameterList(made[-2:])  # which Muon takes when it is asked to


def shifted(tensor: Tensor, offset: int) -> Tensor:
    """A copy with NaN on both sides."""
    end = offset + tensor.numel()
    storage = tensor.new_full((end + 8,), float("nan"))
    storage[offset:end] = tensor.flatten()
    return storage[offset:end].view(tensor.shape)


def give_gradients(model: nn.Module, seed: int, *, begin: int = 0, transposed: bool = False) -> None:
    """The same values for a seed, in other places or in another order in memory."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = shifted(torch.randn(parameter.shape, generator=generator).to(parameter), begin)
        parameter.grad = gradient.t().contiguous().t() if transposed and gradient.ndim == 2 else gradient


def by_kernel(model: nn.Module, optim: OptimConfig) -> Optimizer:
    """On a GPU it chooses so itself."""
    optimizer = Optimizer(model, optim)
    if optimizer._planner is None:
        from thoughtbubbles.kernels.adamw import Planner

        optimizer._planner = Planner(torch.device("cpu"))
    return optimizer


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in {**model.state_dict(), **optimizer.tensors()}.items()}


def walk(
    device: str, *, clip: float, optim: OptimConfig = OPTIM, offset: int = 0, **gradients: Any
) -> dict[str, Tensor]:
    """Parameters, moments and the last norm after some steps by kernel."""
    model = Tensors(device=device, dtype=torch.float32, offset=offset)
    optimizer = by_kernel(model, optim)
    if offset:
        optimizer.restore({name: shifted(t, offset) for name, t in optimizer.tensors().items()}, 0)
    for step in range(STEPS):
        give_gradients(model, step, **gradients)
        norm = optimizer.step(1e-2 / (step + 1), clip=clip, loss=torch.ones((), device=device))
    assert optimizer.updates == STEPS
    return {**everything(model, optimizer), "norm": norm}


def exact(*, clip: float) -> dict[str, Tensor]:
    """The same by torch.optim, in float64."""
    model = Tensors(device="cpu", dtype=torch.float64)
    named = dict(model.named_parameters())
    groups = [{"params": [p], "weight_decay": OPTIM.weight_decay * (p.ndim == 2)} for p in named.values()]
    optimizer = torch.optim.AdamW(groups, betas=OPTIM.betas, foreach=False)
    for step in range(STEPS):
        give_gradients(model, step)
        norm = nn.utils.clip_grad_norm_(named.values(), clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()
    moments = {f"{key}.{n}": optimizer.state[p][key] for n, p in named.items() for key in ("exp_avg", "exp_avg_sq")}
    return {**model.state_dict(), **moments, "norm": norm}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its size."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].cpu().double(), tensor) for name, tensor in expected.items() if tensor.numel()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def differences(device: str) -> dict[str, float]:
    found = {f"clip {clip}": worst(walk(device, clip=clip), exact(clip=clip)) for clip in (0.0, 0.5, 1e4)}
    found["not aligned"] = worst(walk(device, clip=0.5, offset=1), exact(clip=0.5))
    found["gradients not aligned"] = worst(walk(device, clip=0.5, begin=3), exact(clip=0.5))
    return found


def bits(device: str) -> dict[str, bool]:
    """What must not change a single one."""
    whole, muon = walk(device, clip=0.5), replace(OPTIM, kind="muon")
    facts = {
        "again": same(walk(device, clip=0.5), whole),
        "gradients elsewhere": same(walk(device, clip=0.5, begin=4), whole),
        "gradients not contiguous": same(walk(device, clip=0.5, transposed=True), whole),
        "muon's part counts in the norm": torch.equal(walk(device, clip=0.0, optim=muon)["norm"], whole["norm"]),
    }
    for cause in ("nan", "inf", "loss"):
        model = Tensors(device=device, dtype=torch.float32)
        optimizer = by_kernel(model, OPTIM)
        skipped = []
        for step in range(2):
            give_gradients(model, step)
            before = everything(model, optimizer)
            if cause != "loss":
                model.rest[4].grad[-1] = float(cause)
            optimizer.step(1e-2, clip=0.5, loss=torch.tensor(float("nan" if cause == "loss" else 1), device=device))
            skipped.append(same(everything(model, optimizer), before) and optimizer.updates == step)
            give_gradients(model, step)
            optimizer.step(1e-2, clip=0.5)
        facts[f"skipped for {cause}"] = all(skipped) and optimizer.updates == 2
    return facts


def tables(device: str) -> dict[str, bool]:
    """Rebuilt when something has moved, and only then."""
    model = Tensors(device=device, dtype=torch.float32)
    optimizer = by_kernel(model, OPTIM)
    give_gradients(model, 0)
    one, two = (optimizer._plan(optimizer._planner) for _ in range(2))
    gradients = [p.grad for p in model.parameters()]
    give_gradients(model, 0)
    moved = optimizer._plan(optimizer._planner)
    optimizer.restore({name: tensor.clone() for name, tensor in optimizer.tensors().items()}, 3)
    restored = optimizer._plan(optimizer._planner)
    model.rest[4].grad = None
    fewer = optimizer._plan(optimizer._planner)
    del gradients
    return {
        "kept": one.table is two.table,
        "moved": not torch.equal(moved.table, two.table) and moved.owner is two.owner,
        "restored": not torch.equal(restored.table, moved.table),
        "fewer": len(fewer.table) == len(SHAPES) - 1 and len(fewer.owner) == len(moved.owner) - 2,
    }


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # which fills every new buffer with NaN
    json.dump({"differences": differences("cpu"), "bits": bits("cpu")}, sys.stdout)
