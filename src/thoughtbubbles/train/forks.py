"""Statistics of the fork layers on a batch: streams per token, scores, dropped candidates."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from thoughtbubbles.model.fork import ForkRecord

QUANTILES = (0.1, 0.5, 0.9)
QUANTILE_NAMES = ("p10", "p50", "p90")
ALIVE = 0.05  # a stream with a lower score is attenuated to almost nothing


@torch.no_grad()
def fork_statistics(records: Sequence[ForkRecord], lengths: Int[Tensor, "B"], n_tokens: int) -> list[dict[str, Any]]:
    """For each fork layer, over real tokens and candidates only:

    streams   mean number of streams per token after the layer
    dropped   share of the candidates that did not survive
    scores    quantiles (10, 50, 90 %) of the candidates' scores
    alive     share of the surviving streams with a score above 0.05
    """
    found = []
    token = torch.arange(n_tokens, device=lengths.device)
    token = torch.where(token < lengths[:, None], token, n_tokens)  # of the streams that enter the layer
    for record in records:
        real = (token < n_tokens).repeat_interleave(2, dim=1)
        scores = record.log_score[real].float().exp()
        quantiles = torch.quantile(_at_most(scores, 1 << 20), torch.tensor(QUANTILES, device=scores.device))
        kept = record.selected.sum() / real.sum()
        streams = record.bubble_size.sum() / lengths.sum()
        alive = (scores[record.selected[real]] > ALIVE).float().mean()
        numbers = torch.stack([streams, 1 - kept, alive, *quantiles]).tolist()
        names = ("streams", "dropped", "alive")
        found.append({"layer": record.layer, **dict(zip(names, numbers, strict=False)), "scores": numbers[3:]})
        token = record.token
    return found


def _at_most(values: Tensor, n: int) -> Tensor:
    """Evenly spaced values, since torch.quantile takes at most 16M."""
    return values[:: -(-len(values) // n)] if len(values) > n else values
