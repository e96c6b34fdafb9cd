"""From logits to the next token: what may be drawn, and the draw.

    logits → ids that the tokenizer lacks out → repetition penalty → temperature → top-k → top-p → min-p → draw

The steps, their order and their meaning are those of Hugging Face's `generate`, so equal settings give equal
distributions. Every row has its own settings and its own seed, and a draw is a function of (seed, number of the new
token) alone: what else is in the batch, or on which device it runs, plays no part.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles.model.budget import brief
from thoughtbubbles.model.config import is_number, is_whole
from thoughtbubbles.model.streams import at_least_float32

HOTTEST = 1e6  # temperature: still far from where −inf / temperature is no number in float32
ALL = 2**31  # top-k: more tokens than any vocabulary has
SEEDS = range(-(2**63), 2**64)  # those that torch takes


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request draws its tokens."""

    temperature: int | float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Only the k likeliest tokens."""
    top_p: int | float = 1.0
    """Only the likeliest tokens that together have this probability."""
    min_p: int | float = 0.0
    """Only tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: int | float = 1.0
    """Makes tokens of the prompt and of the text so far less likely, from 1 (not at all) up."""
    seed: int = 0
    """The same seed draws the same text, whatever else is in the batch."""

    def __post_init__(self) -> None:
        top_k, top_p, min_p, penalty = self.top_k, self.top_p, self.min_p, self.repetition_penalty
        for name, right, remedy in (
            ("temperature", is_temperature(self.temperature), "give 0 (greedy) or 0.001 to a million"),
            (
                "top_k",
                top_k is None or (is_whole(top_k) and top_k >= 1),
                "give a whole number from 1 on; leave it out for all tokens",
            ),
            ("top_p", is_number(top_p) and 0 < top_p <= 1, "give a probability above 0 and up to 1 (all tokens)"),
            ("min_p", is_number(min_p) and 0 <= min_p <= 1, "give a share from 0 (all tokens) to 1"),
            (
                "repetition_penalty",
                is_number(penalty) and 0.01 <= penalty <= 100,
                "give from 0.01 to 100; 1 is none",
            ),
            ("seed", is_whole(self.seed) and self.seed in SEEDS, "give a whole number from -2^63 to 2^64 - 1"),
        ):
            if not right:
                raise ValueError(f"{name} = {brief(getattr(self, name))}: {remedy}")


def is_temperature(value: object) -> bool:
    """0, or such that dividing logits by it stays within float32."""
    return isinstance(value, (int, float)) and is_number(value) and (value == 0 or 1e-3 <= value <= HOTTEST)


class BatchSampling(NamedTuple):
    """The settings of a batch, one column of numbers each; None where no row needs the step."""

    temperature: Float[Tensor, "B 1"]  # 1 for greedy rows
    greedy: Bool[Tensor, "B"]
    top_k: Int[Tensor, "B 1"] | None
    top_p: Float[Tensor, "B 1"] | None
    min_p: Float[Tensor, "B 1"] | None
    penalty: Float[Tensor, "B 1"] | None
    only_greedy: bool

    @classmethod
    def of(cls, settings: Sequence[Sampling], *, device: torch.device | str) -> "BatchSampling":
        def column(values: Sequence[int | float], needed: bool, dtype: torch.dtype = torch.float64) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device)[:, None] if needed else None

        temperature = torch.tensor([s.temperature or 1.0 for s in settings], dtype=torch.float64, device=device)
        greedy = [s.temperature == 0 for s in settings]
        top_k = [min(s.top_k or ALL, ALL) for s in settings]
        return cls(
            temperature=temperature[:, None],
            greedy=torch.tensor(greedy, device=device),
            top_k=column(top_k, any(s.top_k for s in settings), torch.int64),
            top_p=column([s.top_p for s in settings], any(s.top_p < 1 for s in settings)),
            min_p=column([s.min_p for s in settings], any(s.min_p > 0 for s in settings)),
            penalty=column([s.repetition_penalty for s in settings], any(s.repetition_penalty != 1 for s in settings)),
            only_greedy=all(greedy),
        )


class Picked(NamedTuple):
    """One token per row, with the model's own log-probabilities: before penalty, temperature and cuts."""

    id: Int[Tensor, "B"]
    log_prob: Float[Tensor, "B"]
    top_id: Int[Tensor, "B k"]
    top_log_prob: Float[Tensor, "B k"]


def pick(
    logits: Float[Tensor, "B V"],
    rows: BatchSampling,
    draw: Float[Tensor, "B"],
    *,
    n_ids: int,
    seen: Bool[Tensor, "B V"] | None = None,
    n_top: int = 0,
) -> Picked:
    """Draws the next token. `draw` is a number in [0, 1) for each row; ids from `n_ids` on never occur."""
    log_probs = at_least_float32(logits).log_softmax(-1)
    allowed = processed(at_least_float32(logits), rows, n_ids=n_ids, seen=seen)
    chosen = allowed.argmax(-1, keepdim=True)
    if not rows.only_greedy:
        chosen = torch.where(rows.greedy[:, None], chosen, _drawn(allowed, draw))
    top_log_prob, top_id = log_probs[:, :n_ids].topk(n_top, dim=-1) if n_top else (log_probs[:, :0], chosen[:, :0])
    return Picked(chosen[:, 0], log_probs.gather(1, chosen)[:, 0], top_id, top_log_prob)


def processed(
    logits: Float[Tensor, "B V"], rows: BatchSampling, *, n_ids: int, seen: Bool[Tensor, "B V"] | None = None
) -> Float[Tensor, "B V"]:
    """Logits of what may be drawn; −inf elsewhere. At least one token is left."""
    if n_ids < logits.shape[1]:
        logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= n_ids, -math.inf)
    if rows.penalty is not None:
        assert seen is not None
        penalty = rows.penalty.to(logits.dtype)
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if rows.only_greedy:
        return logits
    uncut = logits = logits / rows.temperature.to(logits.dtype)
    if rows.top_k is not None or rows.top_p is not None:
        logits = _cut(logits, rows, n_ids)
    if rows.min_p is not None:
        probability = logits.softmax(-1)
        least = rows.min_p.to(logits.dtype) * probability.amax(-1, keepdim=True)
        logits = logits.masked_fill(probability < least, -math.inf)
    return torch.where(rows.greedy[:, None], uncut, logits)  # the likeliest token is never cut, whatever stands beside


def _cut(logits: Float[Tensor, "B V"], rows: BatchSampling, n_ids: int) -> Float[Tensor, "B V"]:
    """Top-k, and of what is left top-p: a token stays while those likelier than it have less than p together."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    if rows.top_k is not None:
        least = ranked.gather(1, (rows.top_k - 1).clamp(max=n_ids - 1))
        ranked = ranked.masked_fill(ranked < least, -math.inf)  # equals of the k-th stay
    if rows.top_p is not None:
        probability = ranked.double().softmax(-1)
        likelier = probability.cumsum(-1) - probability
        out = (likelier >= rows.top_p) & (rows.top_p < 1)
        out[:, 0] = False
        ranked = ranked.masked_fill(out, -math.inf)
    return torch.empty_like(logits).scatter_(1, order, ranked)


def _drawn(logits: Float[Tensor, "B V"], draw: Float[Tensor, "B"]) -> Int[Tensor, "B 1"]:
    """The first token whose running probability exceeds the draw."""
    running = logits.double().softmax(-1).cumsum(-1)
    total = running[:, -1:]
    aim = torch.minimum(draw[:, None].double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, aim, right=True).clamp(max=logits.shape[1] - 1)  # NaN has no place


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that only seed and index decide, on every machine alike."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
