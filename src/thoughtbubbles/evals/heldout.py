"""Held-out loss: mean negative log-likelihood over the targets of each source's held-out split."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from thoughtbubbles.data.loader import Batch
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.transformer import Thoughtbubbles


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets and lengths on the device."""
    return move(batch.ids, device), move(batch.targets, device), move(batch.lengths, device)


def move(array: np.ndarray, device: torch.device) -> Tensor:
    """To the device without waiting for it: a GPU copies from pinned memory when it gets there."""
    pin = device.type == "cuda"
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)


@torch.no_grad()
def held_out_sums(
    model: Thoughtbubbles,
    batches: Iterable[Batch],
    *,
    n_sources: int,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Float[Tensor, "sources 2"]:
    """Of each source: the sum of the losses and the number of targets, to be added up over ranks."""
    sums = torch.zeros(n_sources, 2, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    for batch in batches:
        ids, targets, lengths = to_device(batch, device)
        with precision():
            nll = model(ids, targets=targets, lengths=lengths, want=("token_nll",)).token_nll
        sums[int(batch.source[0]), 0] += nll.sum(dtype=sums.dtype)
        sums[int(batch.source[0]), 1] += (targets != IGNORED).sum()
    return sums
