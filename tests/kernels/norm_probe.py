"""Cases of block_probe.py: a residual add with the norm after it, and sums over streams."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from thoughtbubbles.kernels import ops, sums

Found = dict[str, float | bool]
FORMS = ("update_bias", "gate", "save_sum", "read_later")


def error(ours: Tensor, exact: Tensor) -> float:
    """Relative; absolute where the exact result is zero throughout (a single stream can attend only to itself)."""
    return float((ours.detach().double() - exact.detach()).norm() / (float(exact.norm().detach()) or 1.0))


class Adds:
    """Random streams and an update, and the way through the kernel and through torch's norm."""

    def __init__(
        self, rows: int, channels: int, *, update: bool = True, update_bias: bool = True, gate: bool = True,
        save_sum: bool = True, read_later: bool = True, mean: float = 0.5, spread: float = 1.0,
        dtype: torch.dtype = torch.float32, streams: torch.dtype = torch.float32, batch: int = 2, device: str = "cpu",
    ):  # fmt: skip
        self.save_sum, self.read_later, self.dtype = save_sum, read_later, dtype

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        x = (spread * random(batch, rows, channels) + mean).to(streams)
        self.given = {"x": x, "weight": random(channels), "bias": random(channels)}
        if update:
            self.given["update"] = random(batch, rows, channels).to(dtype)
        if update and update_bias:
            self.given["update_bias"] = random(channels)
        if update and gate:
            self.given["gate"] = torch.rand(batch, rows, device=device)
        self.upstream = random(batch, rows, channels).to(dtype), random(batch, rows, channels).to(streams)

    def through_kernel(self) -> dict[str, Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in self.given.items()}
        return self._named(leaves, *ops.add_norm(
            leaves["x"], leaves.get("update"), update_bias=leaves.get("update_bias"), gate=leaves.get("gate"),
            weight=leaves["weight"], bias=leaves["bias"], eps=1e-5, dtype=self.dtype, save_sum=self.save_sum,
        ))  # fmt: skip

    def exact(self) -> dict[str, Tensor]:
        leaves = {name: x.detach().double().requires_grad_() for name, x in self.given.items()}
        x = leaves["x"]
        if "update" in leaves:
            update = leaves["update"] + leaves.get("update_bias", 0.0)
            x = x + (update * leaves["gate"][..., None] if "gate" in leaves else update)
        return self._named(leaves, x, F.layer_norm(x, x.shape[-1:], leaves["weight"], leaves["bias"], 1e-5))

    def _named(self, leaves: dict[str, Tensor], x: Tensor, h: Tensor) -> dict[str, Tensor]:
        results = [h, x] if self.read_later else [h]
        upstream = [g.to(result.dtype) for g, result in zip(self.upstream, results, strict=False)]
        grads = torch.autograd.grad(results, list(leaves.values()), upstream)
        named = {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {"x'": x.detach(), "h": h.detach(), **named}

    def errors(self, ours: dict[str, Tensor] | None = None) -> Found:
        ours, exact = ours or self.through_kernel(), self.exact()
        return {name: error(ours[name], exact[name]) for name in exact}


def rounded_streams() -> Found:
    """With streams in bfloat16 a backward that recomputes x' gets exactly the x' of the forward."""
    adds = Adds(9, 24, streams=torch.bfloat16)
    kept = adds.through_kernel()
    adds.save_sum = False
    made = adds.through_kernel()
    return {name: torch.equal(kept[name], made[name]) for name in kept}


def what_is_saved() -> Found:
    """An update is kept only where the backward needs it; the same bits twice."""
    kept: dict[bool, list[int]] = {}
    for scored in (True, False):
        adds, sizes = Adds(9, 24, gate=scored), []

        def count(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            first = adds.through_kernel()
        second = adds.through_kernel()
        kept[scored] = sizes
    whole = 2 * 9 * 24
    return {
        "with scores x' and the update": kept[True].count(whole) == 2,
        "without scores x' alone": kept[False].count(whole) == 1,
        "same bits twice": all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True)),
    }


def column_sums(rows: int, columns: int) -> Found:
    x = torch.randn(rows, columns).bfloat16()
    return {"sums": error(sums.column_sums(x), x.double().sum(0))}


def cases() -> dict[str, Callable[[], Found]]:
    return {
        "sums": lambda: column_sums(37, 21),
        "add and norm": lambda: Adds(9, 24, save_sum=False).errors(),
        "norm alone": lambda: Adds(9, 24, update=False).errors(),
        "norm of next to nothing": lambda: Adds(9, 24, update=False, mean=0.0, spread=1e-3).errors(),  # eps counts
        **{
            f"add {form}": lambda form=form: Adds(5, 40, **dict(zip(FORMS, form, strict=True))).errors()
            for form in itertools.product((True, False), repeat=len(FORMS))
        },
        **{f"add {shape}": lambda shape=shape: Adds(*shape).errors() for shape in ((1, 2), (1, 8), (70, 100))},
        "add to a single row": lambda: Adds(1, 40, batch=1).errors(),
        "add to bfloat16": rounded_streams,
        "add, far from zero": lambda: Adds(3, 64, mean=50.0).errors(),
        **{f"sums {shape}": lambda shape=shape: column_sums(*shape) for shape in ((1, 1), (5, 40), (700, 33))},
        "what is saved": what_is_saved,
    }
