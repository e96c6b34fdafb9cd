"""Sampling: from logits to the next token.

    logits → mask ids that the tokenizer lacks → repetition penalty → temperature → top-k → top-p → min-p → draw

The steps, their order and their meaning are those of Hugging Face's `generate`, so equal settings give equal
distributions. Every row has its own settings and its own seed, and a draw depends only on (seed, index of the new
token), not on the rest of the batch or the device.
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

HOTTEST = 1e6  # temperature: far below where −inf / temperature is NaN in float32
ALL = 2**31  # top-k: more tokens than any vocabulary has
SEEDS = range(-(2**63), 2**64)  # the seeds that torch accepts


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request draws its tokens."""

    temperature: int | float = 1.0
    """Divides the logits; 0 always takes the most likely token (greedy)."""
    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: int | float = 1.0
    """Only the most likely tokens that together have this probability."""
    min_p: int | float = 0.0
    """Only tokens with at least this fraction of the highest probability."""
    repetition_penalty: int | float = 1.0
    """Above 1: makes tokens of the prompt and of the text so far less likely. 1: no penalty."""
    seed: int = 0
    """The same seed gives the same text, whatever else is in the batch."""

    def __post_init__(self) -> None:
        top_k, top_p, min_p, penalty = self.top_k, self.top_p, self.min_p, self.repetition_penalty
        for name, right, remedy in (
            ("temperature", is_temperature(self.temperature), "give 0 (greedy) or 0.001 to a million"),
            (
                "top_k",
                top_k is None or (is_whole(top_k) and top_k >= 1),
                "give a whole number of 1 or more; leave it out for all tokens",
            ),
            ("top_p", is_number(top_p) and 0 < top_p <= 1, "give a probability above 0 and up to 1 (all tokens)"),
            ("min_p", is_number(min_p) and 0 <= min_p <= 1, "give a share from 0 (all tokens) to 1"),
            (
                "repetition_penalty",
                is_number(penalty) and 0.01 <= penalty <= 100,
                "give a number from 0.01 to 100; 1 means no penalty",
            ),
            ("seed", is_whole(self.seed) and self.seed in SEEDS, "give a whole number from -2^63 to 2^64 - 1"),
        ):
            if not right:
                raise ValueError(f"{name} = {brief(getattr(self, name))}: {remedy}")


def is_temperature(value: object) -> bool:
    """0, or a number by which logits can be divided within the range of float32."""
    return isinstance(value, (int, float)) and is_number(value) and (value == 0 or 1e-3 <= value <= HOTTEST)


class BatchSampling(NamedTuple):
    """The settings of a batch, one column each; None where no row needs the step."""

    temperature: Float[Tensor, "B 1"]  # 1 for greedy rows
    greedy: Bool[Tensor, "B"]
    top_k: Int[Tensor, "B 1"] | None
    top_p: Float[Tensor, "B 1"] | None
    min_p: Float[Tensor, "B 1"] | None
    penalty: Float[Tensor, "B 1"] | None
    sampled: Int[Tensor, "n"] | None  # the rows that are not greedy; None if all are
    cut: Int[Tensor, "m"] | None  # of these, by their place among them, the rows with top-k or top-p

    @classmethod
    def of(cls, settings: Sequence[Sampling], *, device: torch.device | str) -> "BatchSampling":
        def column(values: Sequence[int | float], needed: bool, dtype: torch.dtype = torch.float64) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device)[:, None] if needed else None

        temperature = torch.tensor([s.temperature or 1.0 for s in settings], dtype=torch.float64, device=device)
        greedy = [s.temperature == 0 for s in settings]
        sampled = [i for i, is_greedy in enumerate(greedy) if not is_greedy]
        cut = [place for place, i in enumerate(sampled) if settings[i].top_k or settings[i].top_p < 1]
        top_k = [min(s.top_k or ALL, ALL) for s in settings]
        return cls(
            temperature=temperature[:, None],
            greedy=torch.tensor(greedy, device=device),
            top_k=column(top_k, any(s.top_k for s in settings), torch.int64),
            top_p=column([s.top_p for s in settings], any(s.top_p < 1 for s in settings)),
            min_p=column([s.min_p for s in settings], any(s.min_p > 0 for s in settings)),
            penalty=column([s.repetition_penalty for s in settings], any(s.repetition_penalty != 1 for s in settings)),
            sampled=torch.tensor(sampled, device=device) if sampled else None,
            cut=torch.tensor(cut, device=device) if cut else None,
        )


class Picked(NamedTuple):
    """One token per row, with the model's own log-probabilities: before penalty, temperature and truncation."""

    id: Int[Tensor, "B"]
    log_prob: Float[Tensor, "B"]
    top_id: Int[Tensor, "B k"]
    top_log_prob: Float[Tensor, "B k"]


def pick(
    logits: Float[Tensor, "B V"],
    rows: BatchSampling,
    draw: Float[Tensor, "B"] | None,
    *,
    n_ids: int,
    seen: Bool[Tensor, "B V"] | None = None,
    n_top: int = 0,
) -> Picked:
    """Draws the next token. `draw` is one number in [0, 1) per row, None if all rows are greedy; ids from `n_ids` on
    are never drawn."""
    log_probs = at_least_float32(logits).log_softmax(-1)
    allowed = processed(at_least_float32(logits), rows, n_ids=n_ids, seen=seen)
    chosen = allowed.argmax(-1, keepdim=True)
    if rows.sampled is not None:
        assert draw is not None
        chosen[rows.sampled] = _drawn(allowed[rows.sampled], draw[rows.sampled])
    top_log_prob, top_id = log_probs[:, :n_ids].topk(n_top, dim=-1) if n_top else (log_probs[:, :0], chosen[:, :0])
    return Picked(chosen[:, 0], log_probs.gather(1, chosen)[:, 0], top_id, top_log_prob)


def processed(
    logits: Float[Tensor, "B V"], rows: BatchSampling, *, n_ids: int, seen: Bool[Tensor, "B V"] | None = None
) -> Float[Tensor, "B V"]:
    """Logits of the tokens that may be drawn; −inf elsewhere. At least one token remains."""
    if n_ids < logits.shape[1]:
        logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= n_ids, -math.inf)
    if rows.penalty is not None:
        assert seen is not None
        penalty = rows.penalty.to(logits.dtype)
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if rows.sampled is None:
        return logits
    # Each step is computed only for the rows that need it: sorting the logits is slow.
    own = logits[rows.sampled] / rows.temperature[rows.sampled].to(logits.dtype)
    if rows.cut is not None:
        own = own.index_copy(0, rows.cut, _cut(own[rows.cut], rows, rows.sampled[rows.cut], n_ids))
    if rows.min_p is not None:
        probability = own.softmax(-1)
        least = rows.min_p[rows.sampled].to(own.dtype) * probability.amax(-1, keepdim=True)
        own = own.masked_fill(probability < least, -math.inf)
    return logits.index_copy(0, rows.sampled, own)


def _cut(
    logits: Float[Tensor, "m V"], rows: BatchSampling, which: Int[Tensor, "m"], n_ids: int
) -> Float[Tensor, "m V"]:
    """Top-k, then top-p: a token remains if all more likely tokens together have a probability below p."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    if rows.top_k is not None:
        least = ranked.gather(1, (rows.top_k[which] - 1).clamp(max=n_ids - 1))
        ranked = ranked.masked_fill(ranked < least, -math.inf)  # ties with the k-th remain
    if rows.top_p is not None:
        probability = ranked.double().softmax(-1)
        likelier = probability.cumsum(-1) - probability
        top_p = rows.top_p[which]
        out = (likelier >= top_p) & (top_p < 1)
        out[:, 0] = False
        ranked = ranked.masked_fill(out, -math.inf)
    return torch.empty_like(logits).scatter_(1, order, ranked)


def _drawn(logits: Float[Tensor, "B V"], draw: Float[Tensor, "B"]) -> Int[Tensor, "B 1"]:
    """The first token whose cumulative probability exceeds the draw."""
    running = logits.double().softmax(-1).cumsum(-1)
    total = running[:, -1:]
    aim = torch.minimum(draw[:, None].double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, aim, right=True).clamp(max=logits.shape[1] - 1)  # for NaN


class Transfer:
    """Brings a tensor to the host; a GPU can go on with other work in the meantime."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


class Draws:
    """The random numbers of a batch. While it stays the same, those of its next steps are sent to the device together:
    each time some are sent, a GPU first finishes its work."""

    MOST = 64  # steps

    def __init__(self, device: torch.device | str):
        self._device = device
        self._next: list[tuple[int, int]] = []
        self._table: Float[Tensor, "B n"] = torch.zeros(0, 0)
        self._used = 0

    def __call__(self, rows: Sequence[tuple[int, int]]) -> Float[Tensor, "B"]:
        """One number for each row: `rows` has their seeds and the indices of their new tokens."""
        goes_on = rows == self._next
        if not goes_on or self._used == self._table.shape[1]:
            n = min(2 * self._table.shape[1], self.MOST) if goes_on else 1
            numbers = [[uniform(seed, index + i) for i in range(n)] for seed, index in rows]
            self._table = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            self._used = 0
        self._used += 1
        self._next = [(seed, index + 1) for seed, index in rows]
        return self._table[:, self._used - 1]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends only on seed and index, the same on every machine."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
