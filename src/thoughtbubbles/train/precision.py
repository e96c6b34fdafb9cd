"""Mixed precision: autocast, and the bfloat16 copies of the weights.

With bf16, matrix products take bfloat16 inputs while weights, their gradients and the optimizer's moments stay float32.
The weights are rounded once per optimizer step, for all its micro-steps. FSDP makes its own copies.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from thoughtbubbles.model.linear import Linear


class MixedPrecision:
    """Use `with products():` around every forward; it renews the copies if the weights have changed."""

    def __init__(self, model: nn.Module, precision: str, *, device: str, is_sharded: bool = False):
        self.precision, self.device = precision, device
        self.linears = [m for m in model.modules() if isinstance(m, Linear)] if not is_sharded else []
        self.copies: list[Tensor] = []
        self.made_from: list[tuple[int, int]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.bf16_copies(), self.autocast():
            yield

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    @contextmanager
    def bf16_copies(self) -> Iterator[None]:
        """The copies without autocast: for a backward with activation checkpointing, where autocast must be off."""
        if self.precision != "bf16":
            yield
            return
        self.renew()
        for linear, copy in zip(self.linears, self.copies, strict=True):
            linear.bf16_copy = copy
        try:
            yield
        finally:
            # Outside this context, nothing would notice that they are stale.
            for linear in self.linears:
                linear.bf16_copy = None

    def forget(self) -> None:
        """Makes the next forward round the weights again, as after a step of the optimizer."""
        self.made_from = []

    @torch.no_grad()
    def renew(self) -> None:
        """Rounds the weights if they have changed."""
        if self.precision != "bf16":
            return
        weights = [linear.weight for linear in self.linears]
        versions = [(weight.data_ptr(), weight._version) for weight in weights]
        if versions == self.made_from:
            return
        if not self.copies:
            self.copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
        if weights:
            torch._foreach_copy_(self.copies, weights)
        self.made_from = versions
