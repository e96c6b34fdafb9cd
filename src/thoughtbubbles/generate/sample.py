"""Sampling by recomputation: every new token reads the whole prefix again. Simple, and right for every selection."""

import torch
from jaxtyping import Int
from torch import Tensor

from thoughtbubbles.model.transformer import Thoughtbubbles


@torch.no_grad()
def sample(
    model: Thoughtbubbles,
    ids: Int[Tensor, "B T"],
    *,
    n_new: int,
    vocab_size: int,
    temperature: int | float = 1.0,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B _"]:
    """`ids` with `n_new` more tokens a row. Temperature 0 takes the likeliest; ids from `vocab_size` on never occur.

    A prefix longer than the block size is cut on the left. The generator is on the CPU, so that every device and every
    rank draws alike.
    """
    for _ in range(n_new):
        prefix = ids[:, -model.config.block_size :]
        log_probs = model(prefix, want=("log_probs",)).log_probs[:, -1, :vocab_size].double().cpu()
        if temperature == 0:
            chosen = log_probs.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial((log_probs / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, chosen.to(ids.device)], dim=1)
    return ids
