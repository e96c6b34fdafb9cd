"""Muon: momentum whose matrices are made nearly orthogonal before they become an update (Jordan et al., 2024).

The same step as torch.optim.Muon's, for many matrices at a time: those of a shape are stacked, since one by one the
iterations of a small model are more than a thousand kernels that each do next to nothing. Large matrices are done a few
at a time, for the sake of memory.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from thoughtbubbles.train.parallel import local, own_shard, whole

Entry = tuple[Tensor, Tensor, Tensor]  # a matrix, its gradient and its momentum
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic that is steep at 0: singular values come near 1 in few steps
ITERATIONS = 5
SMALLEST_NORM = 1e-7
MOST_ELEMENTS = 1 << 26  # of a stack: about half a gibibyte for all that is computed from it


def update_matrices(
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    lr: float,
    decay: float,
    factor: Tensor | None,
    finite: Tensor,
) -> None:
    """One step; gradients are overwritten.

    Updates have AdamW's usual size, so that both can share a learning rate (Liu et al., 2025).

    Args:
        parameters: Matrices; those without a gradient are left alone.
        momenta: Changed in place.
        lr: Learning rate.
        decay: Weight decay.
        factor: What the gradients are multiplied by.
        finite: If it is false, nothing changes.
    """
    by_shape = defaultdict[torch.Size, list[Entry]](list)
    for parameter, momentum in zip(parameters, momenta, strict=True):
        if parameter.grad is not None:
            by_shape[parameter.shape].append((parameter, parameter.grad, momentum))
    for shape, group in chunks(by_shape):
        weights, gradients, averages = ([local(entry[i]) for entry in group] for i in range(3))
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        for gradient, average in zip(gradients, averages, strict=True):
            torch.where(finite, gradient, average, out=gradient)  # a mean of equal numbers: the momentum stays
        torch._foreach_lerp_(averages, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, averages, MOMENTUM)  # Nesterov's
        directions = orthogonalise(torch.stack([whole(gradient.bfloat16()) for _, gradient, _ in group]))
        taken = finite.to(weights[0].dtype)
        torch._foreach_copy_(gradients, [own_shard(d, like=p) for d, (p, _, _) in zip(directions, group, strict=True)])
        torch._foreach_mul_(gradients, 0.2 * math.sqrt(max(shape)) * lr * taken)
        torch._foreach_mul_(weights, 1 - lr * decay * taken)
        torch._foreach_sub_(weights, gradients)
        torch.autograd.graph.increment_version([parameter for parameter, _, _ in group])


def chunks(by_shape: Mapping[torch.Size, list[Entry]]) -> Iterator[tuple[torch.Size, list[Entry]]]:
    for shape, entries in by_shape.items():
        n = max(1, MOST_ELEMENTS // max(1, shape.numel()))
        for begin in range(0, len(entries), n):
            yield shape, entries[begin : begin + n]


def orthogonalise(matrices: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """U Vᵀ of each matrix U S Vᵀ, roughly: five steps of an odd polynomial that pulls singular values towards 1."""
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[1:]
    x = matrices.mT if rows > columns else matrices  # the product with its transpose is then the smaller one
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x
