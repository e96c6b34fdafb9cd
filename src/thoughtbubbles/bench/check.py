"""Checks loss and gradients of a training step against the reference path (float32, uncompiled) before it is timed.

The reference shares no kernel with the fast path. Its attention materializes the S × S matrix and its loss all logits,
so it reads one row only. The fast path runs at the size that is timed, with all targets ignored except those of that
row: its loss and gradient are then those of the row, and the check runs exactly the code that is timed, without
compiling anything else.

Selection is discrete, and rounding to bfloat16 flips a few percent of the decisions; after that two models compute
different functions and their gradients cannot be compared. So the reference repeats the decisions of the fast path:
with the same survivors, loss and gradients must agree for every row. At each fork layer it also decides by itself, from
its own scores and the same earlier decisions; the share of candidates on which the two differ is bounded too, so that a
broken selection does not pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thoughtbubbles import kernels
from thoughtbubbles.model import inputs
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.selection import Rule
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.step import MicroResult


class BenchBatch(NamedTuple):
    """A batch on its device."""

    ids: Tensor
    targets: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Agreement:
    """Relative errors of the fast path against the reference, and the share of different decisions."""

    loss: float
    gradient: float  # norm of the difference over norm, of all gradients together
    worst_gradient: float  # of the parameter with the largest relative error
    worst_tensor: str  # its name
    decisions: float  # share of candidates on which the reference decides differently


class Limits(NamedTuple):
    loss: float
    gradient: float
    worst_gradient: float  # loose, since small tensors are mostly noise; a missing one or a wrong sign still fails
    decisions: float


# By the precision of the fast path. A product in bfloat16 has an error of 2⁻⁹, and a gradient goes through dozens.
LIMITS = {
    "bf16": Limits(loss=1e-2, gradient=5e-2, worst_gradient=0.5, decisions=0.1),
    "float32": Limits(loss=1e-4, gradient=1e-3, worst_gradient=0.1, decisions=1e-2),
    "float64": Limits(loss=1e-9, gradient=1e-7, worst_gradient=1e-3, decisions=1e-3),
}


class WrongResult(Exception):
    """The code to be timed computes a wrong result."""


def reference_of(model: Thoughtbubbles) -> Thoughtbubbles:
    """The reference path with the weights of `model`: shared, not copied; it has its own gradients."""
    with torch.device("meta"):
        reference = Thoughtbubbles(model.config, attention="reference")
    reference.load_state_dict(model.state_dict(), assign=True)
    return reference


def one_row_counts(batch: BenchBatch, row: int) -> BenchBatch:
    targets = torch.full_like(batch.targets, IGNORED)
    targets[row] = batch.targets[row]
    return batch._replace(targets=targets)


def compare(
    model: Thoughtbubbles,
    reference: Thoughtbubbles,
    batch: BenchBatch,
    *,
    row: int,
    forward_backward: Callable[[BenchBatch], MicroResult],
) -> Agreement:
    """`forward_backward` is the fast path; it writes its gradients to `model`."""
    found = forward_backward(one_row_counts(batch, row))
    decisions = [record.selected[row : row + 1] for record in found.forks or ()]
    alone = BenchBatch(*(tensor[row : row + 1] for tensor in batch))
    loss, differing = _reference_pass(reference, alone, decisions)
    gradient, each = _gradient_errors(model, reference)
    worst = max(each, key=lambda name: each[name])
    reference.zero_grad(set_to_none=True)
    return Agreement(
        loss=abs(found.loss.item() - loss) / abs(loss),
        gradient=gradient,
        worst_gradient=each[worst],
        worst_tensor=worst,
        decisions=differing,
    )


def require(agreement: Agreement, precision: str) -> None:
    limits = LIMITS[precision]
    for name, limit in limits._asdict().items():
        value = getattr(agreement, name)
        if not value <= limit:  # also catches NaN
            where = f" ({agreement.worst_tensor})" if name == "worst_gradient" else ""
            raise WrongResult(f"differs from the reference path: {name}{where} off by {value:.2e}, allowed {limit:g}")


class _Repeated(Rule):
    """Repeats given decisions, layer by layer, and counts where it would have decided differently."""

    decisions: list[Tensor]  # of the remaining layers
    differing: int
    candidates: int

    def survives(self, key: Tensor, token: Tensor, lengths: Tensor, n_tokens: int) -> Tensor:
        own, decided = super().survives(key, token, lengths, n_tokens), self.decisions.pop(0)
        self.differing += int((own != decided).sum())
        self.candidates += int((token < n_tokens).sum())
        return decided


def _reference_pass(reference: Thoughtbubbles, batch: BenchBatch, decisions: list[Tensor]) -> tuple[float, float]:
    """The loss, and the share of decisions that differ; gradients are written to `reference`."""
    given = inputs.check(
        reference.config,
        batch.ids,
        targets=batch.targets,
        lengths=batch.lengths,
        budget=None,
        selection=None,
        want=("log_probs",),
        trace=False,
        training=True,
    )
    rule = _Repeated(*given.rule)
    rule.decisions, rule.differing, rule.candidates = list(decisions), 0, 0
    with _exact_products(), kernels.disabled():
        log_probs = reference.run(given._replace(targets=None, rule=rule), want=("log_probs",)).log_probs
        assert log_probs is not None
        loss = F.nll_loss(log_probs.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        loss.backward()
    return loss.item(), rule.differing / max(1, rule.candidates)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Disables TF32, whatever the setting of the process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _gradient_errors(model: Thoughtbubbles, reference: Thoughtbubbles) -> tuple[float, dict[str, float]]:
    """Relative error of all gradients together, and of each; a missing one counts as zero."""
    ours, off, norms = dict(model.named_parameters()), {}, {}
    for name, parameter in reference.named_parameters():
        expected, found = parameter.grad, ours[name].grad
        assert expected is not None, name
        norms[name] = expected.norm().item()
        off[name] = norms[name] if found is None else (found - expected).norm().item()
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    smallest = 1e-9 * whole  # a gradient that is zero up to rounding has no meaningful relative error
    return (
        sum(error**2 for error in off.values()) ** 0.5 / whole,
        {name: off[name] / max(norms[name], smallest) for name in norms},
    )
