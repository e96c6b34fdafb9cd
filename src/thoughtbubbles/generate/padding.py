"""Rows of different lengths as one tensor."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def padded(prompts: Sequence[Sequence[int]], *, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pads prompts on the right. Uses NumPy, since torch converts nested lists very slowly."""
    lengths = [len(prompt) for prompt in prompts]
    ids = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return torch.from_numpy(ids).to(device), torch.tensor(lengths, device=device)
