"""Optimizers and learning rate schedule. Weight decay applies to tensors with two or more dimensions.

The state that a checkpoint needs is a flat dictionary of tensors, sharded like the parameters, and one integer: the
number of updates made (AdamW's step, the same for every parameter: where forks begin late, the first updates of their
own parameters are not corrected for empty moments; with betas of 0.9 and 0.95 that is a factor from 0.45 to 1.1, with
0.9 and 0.999 one up to 6).

A step is memory-bound: AdamW reads p, g, m, v and writes p, m, v, and the norm reads g once more. So clipping is not a
separate pass but a factor inside AdamW's kernel. The kernel also skips a step that is not finite, which the device
finds out by itself: the host queues everything and never waits. Each rank updates its own shards.
float32 on a GPU uses kernels/adamw.py, one launch for all parameters; everything else uses torch's fused kernel.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thoughtbubbles import kernels
from thoughtbubbles.train.config import OptimConfig
from thoughtbubbles.train.muon import update_matrices
from thoughtbubbles.train.parallel import local

if TYPE_CHECKING:
    from thoughtbubbles.kernels.adamw import Plan, Planner

STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # tensors per parameter
EPSILON = 1e-8  # added to the root of the second moment
TINY = 1e-6  # added to the norm, as in torch's clip_grad_norm_


def warmup_steps(optim: OptimConfig, steps: int) -> int:
    return round(optim.warmup * steps)


def learning_rate(optim: OptimConfig, step: int, steps: int, warmup: int | None = None) -> float:
    """The learning rate of step 0 … steps − 1. The warm-up ends at the peak; cosine and wsd end at `floor` · peak.

    `warmup` overrides the number of warm-up steps: an extended run keeps the number it started with.
    """
    warmup = warmup_steps(optim, steps) if warmup is None else warmup
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    begin = warmup if optim.schedule == "cosine" else max(warmup, steps - round(optim.decay * steps))
    progress = max(0, step - begin + 1) / max(1, steps - begin)
    fall = (1 - math.cos(math.pi * progress)) / 2 if optim.schedule == "cosine" else progress
    return optim.lr * (1 - (1 - optim.floor) * fall)


class Optimizer:
    """AdamW, alone or with Muon for the blocks' matrices, as one object to step, save and restore."""

    def __init__(self, model: nn.Module, optim: OptimConfig):
        self.config = optim
        self.name_of: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        by_kind: dict[str, list[Tensor]] = {"adamw": [], "muon": []}
        for parameter, name in self.name_of.items():
            is_matrix = parameter.ndim == 2 and name.startswith("blocks.")
            by_kind["muon" if optim.kind == "muon" and is_matrix else "adamw"].append(parameter)
        self.parameters = by_kind
        self._state = {
            f"{key}.{self.name_of[parameter]}": torch.zeros_like(parameter, requires_grad=False)
            for _, parameter, key in self._entries()
        }
        self._updates = torch.zeros((), device=next(iter(self.name_of)).device)  # the device decides whether to count
        self._planner = _find_planner(list(self.name_of))

    @property
    def updates(self) -> int:
        """Number of steps taken, not counting skipped ones. Waits for the device."""
        return int(self._updates.item())

    @torch.no_grad()
    def step(self, lr: float, *, clip: float, loss: Tensor | None = None) -> Tensor:
        """One update with the gradient norm clipped to `clip` (0: not clipped); returns the norm before clipping.

        If the norm, or the loss if given, is not finite, nothing changes: no weight, no moment, no count. The device
        decides this; the host does not wait.
        """
        gradients = [parameter.grad for parameter in self.name_of if parameter.grad is not None]
        plan = None if self._planner is None else self._plan(self._planner)
        norm = gradient_norm(gradients, plan)
        finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
        if norm.device.type == "mps" and not finite:  # the MPS kernel can neither skip nor scale
            return norm
        self._updates += finite
        if plan is not None:
            self._launch_adamw(plan, lr, norm, clip, finite)
        else:
            for has_decay in (True, False):
                parameters = [p for p in self.parameters["adamw"] if (p.ndim >= 2) == has_decay]
                self._step_adamw(parameters, lr, self.config.weight_decay * has_decay, norm, clip, finite)
        if matrices := self.parameters["muon"]:
            update_matrices(
                matrices,
                [self._state[f"momentum_buffer.{self.name_of[matrix]}"] for matrix in matrices],
                lr=lr,
                decay=self.config.weight_decay,
                factor=_factor(norm, clip) if clip else None,
                finite=finite,
            )
        return norm

    def _plan(self, planner: "Planner") -> "Plan":
        from thoughtbubbles.kernels.adamw import Entry

        entries = []
        for parameter in self.parameters["adamw"]:
            if parameter.grad is not None:
                first, second = (local(self._state[f"{key}.{self.name_of[parameter]}"]) for key in STATE["adamw"])
                gradient = local(parameter.grad).contiguous()
                entries.append(Entry(local(parameter), gradient, first, second, decays=parameter.ndim >= 2))
        others = [local(p.grad).contiguous() for p in self.parameters["muon"] if p.grad is not None]
        return planner.plan(entries, others)

    def _launch_adamw(self, plan: "Plan", lr: float, norm: Tensor, clip: float, finite: Tensor) -> None:
        from thoughtbubbles.kernels.adamw import update

        update(
            plan,
            lr,
            factor=_factor(norm, clip) if clip else torch.ones_like(norm),
            taken=finite,
            updates=self._updates,
            betas=self.config.betas,
            epsilon=EPSILON,
            decay=self.config.weight_decay,
        )
        torch.autograd.graph.increment_version([p for p in self.parameters["adamw"] if p.grad is not None])

    def _step_adamw(
        self, parameters: list[Tensor], lr: float, decay: float, norm: Tensor, clip: float, finite: Tensor
    ) -> None:
        parameters = [p for p in parameters if p.grad is not None and local(p).numel()]
        if not parameters:
            return
        names = [self.name_of[p] for p in parameters]
        first, second = ([local(self._state[f"{key}.{name}"]) for name in names] for key in STATE["adamw"])
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        on_mps = norm.device.type == "mps"
        in_kernel = norm.dtype == torch.float32 and not on_mps  # the kernel's scale is a float32
        if clip and not in_kernel:
            torch._foreach_mul_(gradients, _factor(norm, clip))
        torch._fused_adamw_(
            [local(p) for p in parameters],
            gradients,
            first,
            second,
            [],
            [self._updates] * len(parameters),
            lr=lr,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            weight_decay=decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=((norm + TINY) / clip).clamp(min=1.0) if clip and in_kernel else None,  # divides
            found_inf=None if on_mps else (~finite).float(),
        )
        torch.autograd.graph.increment_version(parameters)  # the kernel does not, and bf16 copies would look up to date

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, e.g. `exp_avg.blocks.0.mlp.up.weight`; zeros before the first update."""
        return dict(self._state)

    def restore(self, tensors: dict[str, Tensor], updates: int) -> None:
        self._state = {name: tensors[name] for name in self._state}
        self._updates.fill_(updates)

    def _entries(self) -> Iterable[tuple[str, Tensor, str]]:
        for kind, parameters in self.parameters.items():
            for parameter in parameters:
                for key in STATE[kind]:
                    yield kind, parameter, key


def gradient_norm(gradients: Sequence[Tensor], plan: "Plan | None" = None) -> Tensor:
    """Global norm of all gradients over all ranks, on the device. With a plan, it is computed by our kernel."""
    first = gradients[0]
    if plan is None:
        own = [local(gradient) for gradient in gradients]
        norm = nn.utils.get_total_norm([gradient for gradient in own if gradient.numel()])
        if not isinstance(first, DTensor):
            return norm
        squared = norm.square()
    else:
        from thoughtbubbles.kernels.adamw import sum_of_squares

        squared = sum_of_squares(plan)
    if isinstance(first, DTensor):
        dist.all_reduce(squared, group=first.device_mesh.get_group())
    return squared.sqrt().to(first.dtype)


def _find_planner(parameters: Sequence[Tensor]) -> "Planner | None":
    """The planner of our kernel, which handles float32 on a GPU; None elsewhere."""
    own = [local(parameter) for parameter in parameters]
    if not own or not kernels.for_adamw(own):
        return None
    from thoughtbubbles.kernels.adamw import Planner

    return Planner(own[0].device)


def _factor(norm: Tensor, clip: float) -> Tensor:
    return (clip / (norm + TINY)).clamp(max=1.0)
