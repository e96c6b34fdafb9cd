"""The leak audit: do predictions depend on tokens that come after them?

A causal language model predicts token p + 1 from tokens 0 … p. So if all tokens from t on are replaced, predictions at
positions p < t must not move. The audit replaces them and compares, for several t in several rows:

    true    a b c d e f         the distance of a prediction is t − p: here, with t = 3, the prediction at c has
    false   a b c x y z         distance 1, at b 2, at a 3

Both runs have the same shapes, so in float64 a causal model gives the same bits, and the tolerance is 0. Kernels may
round differently in low precision: there, changes of a log-probability up to the tolerance do not count as moved, and a
leak smaller than that is not seen.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles.analysis.sample import PASSAGES
from thoughtbubbles.analysis.subjects import Predict, Subject, open_model, subject_of
from thoughtbubbles.model.budget import BudgetLike

VERSION = 1
TOKENS = 128  # per row, unless the context is shorter
TOLERANCE = {torch.float64: 0.0, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
LOWEST = -1e30  # in place of a log-probability of −inf: its differences are numbers
LARGEST_BATCH = 2**24  # numbers in the predictions of a batch


@dataclass(frozen=True, kw_only=True)
class Change:
    """How much predictions moved, in nats. A comparison is of one prediction, with the true and with a false future; a
    prediction is compared once for each change after it."""

    comparisons: int
    moved: int
    """Comparisons in which any log-probability changed by more than the tolerance."""
    largest: float
    """Largest |Δ log p| of the true next token."""
    mean: float
    """Mean |Δ log p| of the true next token, over all comparisons."""
    largest_any: float
    """Largest |Δ log p| of any token of the vocabulary."""
    mean_kl: float
    """KL divergence of the prediction with a false future from that with the true one."""
    largest_kl: float
    loss_difference: float
    """Mean loss with the true future minus with a false one: below 0, knowing the future helps."""

    @property
    def share(self) -> float:
        return self.moved / self.comparisons


@dataclass(frozen=True, kw_only=True)
class AtDistance(Change):
    """Predictions from `nearest` to `farthest` tokens before the first changed token."""

    nearest: int
    farthest: int

    @property
    def label(self) -> str:
        return str(self.nearest) if self.nearest == self.farthest else f"{self.nearest}–{self.farthest}"


@dataclass(frozen=True, kw_only=True)
class Audit:
    selection: str | None
    """The rule and the budget of a model with forks."""
    budget: str | None
    dtype: str
    tolerance: float
    rows: int
    tokens: int
    """Per row."""
    cuts: int
    """Changes per row."""
    reach: int
    """The largest distance of a prediction that moved; 0 if none did."""
    total: Change
    by_distance: tuple[AtDistance, ...]

    @property
    def leaks(self) -> bool:
        return self.total.moved > 0

    @property
    def subject(self) -> str:
        """What was audited, in words."""
        if self.selection:
            return f"{self.selection} selection, r = {self.budget}"
        return "no forks" if self.budget is None else "all forks kept"

    def as_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        return {"leaks": self.leaks, **asdict(self), "by_distance": [asdict(each) for each in self.by_distance]}


def extent(*, moved: int, comparisons: int, reach: int) -> str:
    """How many predictions moved, and how far from the change, as a part of a sentence."""
    first = "changing later tokens moves the prediction in"
    if not moved:
        return f"{first} none of {comparisons:,} comparisons"
    share, distance = f"{moved / comparisons:.1%}", f"{reach} token{'s' * (reach != 1)}"
    return f"{first} {moved:,} of {comparisons:,} comparisons ({share}), up to {distance} before the change"


def audit(
    model: Any,
    text: str | Int[Tensor, "R T"] | None = None,
    *,
    tokenizer: Any = None,
    selection: str | None = None,
    budget: BudgetLike | None = None,
    rows: int = 4,
    tokens: int | None = None,
    cuts: int = 4,
    tolerance: float | None = None,
    seed: int = 0,
) -> Audit:
    """Measures how much predictions move when the tokens after them are changed.

    model      a Thoughtbubbles or Hugging Face model; a folder or name of one, which is opened in float64; None for the
               model in the package; or any function from ids (B, T) to log-probabilities of the next token (B, T, V)
    text       default: a text of our own, or random ids if there is no tokenizer; ids (rows, tokens) are also taken
    tokenizer  of a loaded model, ours or one of Hugging Face; a folder has its own
    selection  "causal" or "block", instead of the model's own
    budget     streams per token, instead of the model's own
    rows       at most, as far as the text is long enough
    tokens     per row; by default 128, or less if the context or the text is shorter
    cuts       positions per row from which on tokens are changed
    tolerance  by default 0 in float64, 1e-4 in float32, 0.02 in float16, 0.1 in bfloat16
    """
    if model is None or isinstance(model, (str, Path)):
        opened = open_model(model)
        model, tokenizer = opened.model, opened.tokenizer if tokenizer is None else tokenizer
    subject = subject_of(model, tokenizer=tokenizer, selection=selection, budget=budget)
    random = torch.Generator().manual_seed(seed)
    ids = text if isinstance(text, Tensor) else _ids(subject, text, rows, tokens, random)
    if ids.ndim != 2 or ids.is_floating_point() or not len(ids):
        raise ValueError(
            f"text of shape {tuple(ids.shape)} and {ids.dtype}: give whole numbers of shape (rows, tokens)"
        )
    n_rows, n_tokens = ids.shape
    if n_tokens < 2:
        raise ValueError(f"a row has {n_tokens} tokens: give at least 2, so that one of them can be changed")
    if subject.context is not None and n_tokens > subject.context:
        raise ValueError(f"tokens = {n_tokens:,}: more than the model's context length, {subject.context:,}")
    if cuts < 1:
        raise ValueError(f"cuts = {cuts}: give 1 or more")
    cuts = min(cuts, n_tokens - 1)
    was_training = subject.module is not None and subject.module.training
    if subject.module is not None:
        subject.module.eval()
    try:
        found = _compare(subject, ids, cuts, tolerance, random)
    finally:
        if subject.module is not None:
            subject.module.train(was_training)
    return Audit(
        selection=subject.selection,
        budget=subject.budget,
        dtype=str(found.dtype).removeprefix("torch."),
        tolerance=found.tolerance,
        rows=n_rows,
        tokens=n_tokens,
        cuts=cuts,
        reach=int((found.distance * found.moved).max()),
        total=Change(**_summary(found, torch.ones_like(found.distance, dtype=torch.bool))),
        by_distance=tuple(_by_distance(found)),
    )


def _ids(
    subject: Subject, text: str | None, rows: int, tokens: int | None, random: torch.Generator
) -> Int[Tensor, "R T"]:
    for name, value, least in (("rows", rows, 1), ("tokens", tokens, 2)):
        if value is not None and value < least:
            raise ValueError(f"{name} = {value}: give {least} or more")
    if tokens is not None and subject.context is not None and tokens > subject.context:
        raise ValueError(f"tokens = {tokens:,}: more than the model's context length, {subject.context:,}")
    longest = min(TOKENS, subject.context or TOKENS)
    if subject.encode is None:
        if text is not None:
            raise ValueError("text needs a tokenizer, which this model does not have: pass tokenizer=, or leave it out")
        if subject.n_ids is None:
            raise ValueError("text is missing: give ids of shape (rows, tokens), or a text and tokenizer=")
        return torch.randint(subject.n_ids, (rows, tokens or longest), generator=random)
    ids = subject.encode("\n\n".join(PASSAGES) if text is None else text)
    if not ids:
        raise ValueError("text is empty: give at least two tokens")
    n_tokens = tokens or min(longest, len(ids))
    if n_tokens > len(ids):
        raise ValueError(f"tokens = {n_tokens:,}: the text has only {len(ids):,}; give less, or a longer text")
    n_rows = min(rows, len(ids) // n_tokens)
    return torch.tensor(ids[: n_rows * n_tokens]).view(n_rows, n_tokens)


class Compared(NamedTuple):
    """One entry per prediction and change."""

    distance: Int[Tensor, "n"]
    log_p: Float[Tensor, "n"]  # of the true next token: with the true future minus with the false one
    any_log_p: Float[Tensor, "n"]  # largest |Δ log p| in the vocabulary
    kl: Float[Tensor, "n"]
    dtype: torch.dtype
    tolerance: float

    @property
    def moved(self) -> Bool[Tensor, "n"]:
        return self.any_log_p > self.tolerance


@torch.no_grad()
def _compare(
    subject: Subject, ids: Int[Tensor, "R T"], cuts: int, tolerance: float | None, random: torch.Generator
) -> Compared:
    n_rows, n_tokens = ids.shape
    at_once = n_rows if subject.n_ids is None else max(1, LARGEST_BATCH // (n_tokens * subject.n_ids))
    columns, dtype = [], subject.dtype
    for begin in range(0, n_rows, at_once):
        batch = ids[begin : begin + at_once]
        true = _checked(subject.predict, batch)
        dtype = dtype or true.dtype
        before = true.double().clamp(min=LOWEST)
        has_moved = False
        for cut in range(cuts):
            at = [_position(n_tokens, cuts, cut, (begin + row + 0.5) / n_rows) for row in range(len(batch))]
            changed = batch.clone()
            for row, t in enumerate(at):
                n_ids = subject.n_ids or true.shape[-1]
                changed[row, t:] = _false_future(ids, begin + row, n_ids, random)[t:]
            after = _checked(subject.predict, changed).double().clamp(min=LOWEST)
            for row, t in enumerate(at):
                columns.append(_of_row(before[row, :t], after[row, :t], batch[row, 1 : t + 1]))
                has_moved |= bool((columns[-1][2] > 0).any())
        if has_moved:  # what does not give the same twice cannot be audited
            noise = float((_checked(subject.predict, batch).double().clamp(min=LOWEST) - before).abs().max())
            if noise > (_tolerance(dtype) if tolerance is None else tolerance):
                raise ValueError(
                    f"the same ids gave predictions that differ by up to {noise:.2g}: the audit needs a deterministic "
                    "model, without dropout or sampling"
                )
    assert dtype is not None
    distance, log_p, any_log_p, kl = (torch.cat(parts) for parts in zip(*columns, strict=True))
    return Compared(distance, log_p, any_log_p, kl, dtype, _tolerance(dtype) if tolerance is None else tolerance)


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])


def _position(n_tokens: int, cuts: int, cut: int, offset: float) -> int:
    """Evenly spread from 1 to T − 1; rows have different offsets from 0 to 1, so that many distances are seen."""
    return 1 + int((cut + offset) / cuts * (n_tokens - 1))


def _false_future(ids: Int[Tensor, "R T"], row: int, n_ids: int, random: torch.Generator) -> Int[Tensor, "T"]:
    """Shuffled tokens of the other rows; nowhere the true one."""
    pool = torch.cat([ids[:row], ids[row + 1 :]]).flatten() if len(ids) > 1 else ids.flatten()
    drawn = pool[torch.randperm(len(pool), generator=random)[: ids.shape[1]]]
    return torch.where(drawn == ids[row], (drawn + 1) % n_ids, drawn)


def _checked(predict: Predict, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
    found = predict(ids)
    if not isinstance(found, Tensor) or found.shape[:2] != ids.shape or found.ndim != 3:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"ids of shape {tuple(ids.shape)} gave {shape}: a model gives one row of numbers for each id")
    found = found.cpu()
    total = found.double().logsumexp(-1)
    if bool(total.isnan().any()):
        raise ValueError("the model predicts NaN: there is nothing to compare")
    if bool((total.abs() > 0.1).any()):
        raise ValueError("predictions are not log-probabilities: apply log_softmax(-1) to the logits")
    return found


def _of_row(
    before: Float[Tensor, "t V"], after: Float[Tensor, "t V"], following: Int[Tensor, "t"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    difference = before - after
    n = len(following)
    return (
        torch.arange(n, 0, -1),
        difference.gather(1, following[:, None])[:, 0],
        difference.abs().amax(-1),
        (before.exp() * difference).sum(-1).clamp(min=0),  # rounding may leave it just below 0
    )


def _summary(found: Compared, where: Tensor) -> dict[str, Any]:
    log_p, any_log_p, kl = found.log_p[where], found.any_log_p[where], found.kl[where]
    return {
        "comparisons": len(log_p),
        "moved": int(found.moved[where].sum()),
        "largest": float(log_p.abs().max()),
        "mean": float(log_p.abs().mean()),
        "largest_any": float(any_log_p.max()),
        "mean_kl": float(kl.mean()),
        "largest_kl": float(kl.max()),
        "loss_difference": -float(log_p.mean()) + 0.0,  # not −0
    }


def _by_distance(found: Compared) -> Iterator[AtDistance]:
    """1, 2–3, 4–7, 8–15, …"""
    nearest, most = 1, int(found.distance.max())
    while nearest <= most:
        farthest = min(2 * nearest - 1, most)
        where = (found.distance >= nearest) & (found.distance <= farthest)
        yield AtDistance(nearest=nearest, farthest=farthest, **_summary(found, where))
        nearest *= 2
