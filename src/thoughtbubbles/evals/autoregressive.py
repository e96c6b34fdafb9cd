"""Scores each token from its own prefix, as in generation, for comparison with one parallel forward.

    blockwise         one forward over the whole window. With block selection later tokens influence which streams of
                      earlier ones survive, so every prediction leaks a little of the future
    through the cache token by token with causal selection: exact for causal selection, plain GPT and copy-N, where it
                      gives the same numbers as blockwise; for block selection an approximation
    without cache     a new forward for every prefix, with the model's own selection: exact for block selection, with a
                      cap of ceil(r·t) streams for a prefix of t tokens (proportional) or that of a full block (fixed)

A window is ids x_0 … x_{T−1} with targets x_1 … x_T: token t predicts target t from x_0 … x_t, and every target counts
once. All ways return the loss of every target; means, perplexities and errors are derived from these.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles.generate.decode import decode_step, predict_uncached, prefill
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.model import inputs
from thoughtbubbles.model.budget import BudgetLike
from thoughtbubbles.model.config import BudgetMode, ModelConfig
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.streams import at_least_float32
from thoughtbubbles.model.transformer import Thoughtbubbles

UNKNOWN = -1  # instead of the most likely token, where it was not predicted or not computed


class Windows(NamedTuple):
    """Rows to score, padded on the right."""

    ids: Int[Tensor, "W T"]
    targets: Int[Tensor, "W T"]  # −100 where nothing counts
    lengths: Int[Tensor, "W"]

    @classmethod
    def of(cls, config: ModelConfig, ids: Tensor, *, targets: Tensor, lengths: Tensor | None = None) -> "Windows":
        """Checked for a model: ids in its vocabulary, at most `block_size` tokens, a target in every window."""
        given = inputs.check(
            config,
            ids,
            targets=targets,
            lengths=lengths,
            budget=None,
            selection=None,
            want=(),
            trace=False,
            training=False,
        )
        assert given.targets is not None
        empty = (given.targets == IGNORED).all(1).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"window {empty[0]} has no targets that count: leave it out")
        return cls(given.ids, given.targets, given.lengths)

    @property
    def counted(self) -> Bool[Tensor, "W T"]:
        return self.targets != IGNORED

    def every(self, step: int, *, first: int) -> "Windows":
        """The share of rank `first` of `step` ranks."""
        return Windows(*(values[first::step] for values in self))

    def part(self, rows: slice, device: torch.device) -> "Windows":
        """Some of the windows, without padding beyond the longest of them."""
        widest = int(self.lengths[rows].max())
        return Windows(
            self.ids[rows, :widest].to(device), self.targets[rows, :widest].to(device), self.lengths[rows].to(device)
        )


class Scores(NamedTuple):
    """The scores of every target from one way of scoring, on the CPU."""

    nll: Float[Tensor, "W T"]  # float64, nats; 0 where the target does not count
    likeliest: Int[Tensor, "W T"]  # the greedy prediction; `UNKNOWN` where there is none
    counted: Bool[Tensor, "W T"]
    seconds: float

    @property
    def n_tokens(self) -> int:
        return int(self.counted.sum())

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.nll.sum()) / self.n_tokens

    @property
    def standard_error(self) -> float | None:
        return error_of_mean(self.nll, self.counted)

    @property
    def perplexity(self) -> float:
        return _exp(self.mean)

    @property
    def window_means(self) -> list[float]:
        """Nats per token in each window."""
        return (self.nll.sum(1) / self.counted.sum(1)).tolist()

    @property
    def window_perplexities(self) -> list[float]:
        return [_exp(mean) for mean in self.window_means]


class Difference(NamedTuple):
    """Difference of two ways to score the same targets, token by token."""

    mean: float  # nats per token
    standard_error: float | None
    largest: float  # absolute, of any token
    same_greedy: float | None  # share of targets at which both have the same most likely token


def compare(scores: Scores, reference: Scores) -> Difference:
    assert torch.equal(scores.counted, reference.counted), "the two scored different targets"
    gap = scores.nll - reference.nll
    pairs = torch.stack([scores.likeliest, reference.likeliest])[:, scores.counted]
    return Difference(
        mean=float(gap.sum()) / scores.n_tokens,
        standard_error=error_of_mean(gap, scores.counted),
        largest=float(gap.abs().max()),
        same_greedy=None if bool((pairs == UNKNOWN).any()) else float((pairs[0] == pairs[1]).double().mean()),
    )


def error_of_mean(values: Float[Tensor, "W T"], counted: Bool[Tensor, "W T"]) -> float | None:
    """Standard error of the mean over all tokens, with windows as independent samples; None for a single window.

    With n_i tokens in window i, their sum s_i and the mean m:  sqrt(W / (W − 1) · Σ_i (s_i − m·n_i)²) / Σ_i n_i.
    For windows of equal size that is the standard deviation of the windows' means over sqrt(W).
    """
    windows = len(values)
    if windows < 2:
        return None
    sizes, sums = counted.sum(1), values.sum(1)
    apart = sums - sums.sum() / sizes.sum() * sizes
    return math.sqrt(windows / (windows - 1) * float(apart.square().sum())) / int(sizes.sum())


class Step(NamedTuple):
    """One step of a batch of windows: the losses of `nll.shape[1]` tokens from `first` on."""

    first: int
    nll: Float[Tensor, "B n"]
    likeliest: Int[Tensor, "B n"]
    share: float  # fraction of the batch's work done after this step


Report = Callable[[float], object]
Steps = Callable[[Windows], Iterator[Step]]


def blockwise(
    model: Thoughtbubbles,
    windows: Windows,
    *,
    budget: BudgetLike | None = None,
    batch: int = 8,
    report: Report = lambda share: None,
) -> Scores:
    """One parallel forward, with the model's own selection and the proportional budget."""

    def steps(part: Windows) -> Iterator[Step]:
        out = model(
            part.ids,
            targets=part.targets,
            lengths=part.lengths,
            budget=budget,
            budget_mode="proportional",
            want=("token_nll",),
        )
        yield Step(0, out.token_nll, torch.full_like(part.ids, UNKNOWN), 1.0)

    return _score(model, windows, steps, batch=batch, report=report)


def through_cache(
    model: Thoughtbubbles,
    windows: Windows,
    *,
    budget: BudgetLike | None = None,
    batch: int = 8,
    vocab_size: int | None = None,
    report: Report = lambda share: None,
) -> Scores:
    """One token at a time with causal selection. Ids from `vocab_size` on are never the most likely."""

    def steps(part: Windows) -> Iterator[Step]:
        n_tokens = part.ids.shape[1]
        prediction, cache = prefill(model, part.ids[:, :1], budget=budget, capacity=n_tokens)
        yield _step(part, 0, prediction, part.counted[:, 0], vocab_size, share=1 / n_tokens)
        for t in range(1, n_tokens):
            prediction, cache = decode_step(model, cache, part.ids[:, t], active=part.lengths > t)
            yield _step(part, t, prediction, part.counted[:, t], vocab_size, share=(t + 1) / n_tokens)

    return _score(model, windows, steps, batch=batch, report=report)


def without_cache(
    model: Thoughtbubbles,
    windows: Windows,
    *,
    budget: BudgetLike | None = None,
    budget_mode: BudgetMode = "proportional",
    batch: int = 8,
    vocab_size: int | None = None,
    report: Report = lambda share: None,
) -> Scores:
    """A new forward for every prefix, with the model's own selection: T forwards of half a window on average.

    Prefixes whose target does not count are skipped.
    """

    def steps(part: Windows) -> Iterator[Step]:
        n_tokens = part.ids.shape[1]
        for t in range(n_tokens):
            rows = part.counted[:, t]
            if not bool(rows.any()):
                continue
            prediction = predict_uncached(model, part.ids[rows, : t + 1], budget=budget, budget_mode=budget_mode)
            share = (t + 1) * (t + 2) / (n_tokens * (n_tokens + 1))
            yield _step(part, t, prediction, rows, vocab_size, share=share)

    return _score(model, windows, steps, batch=batch, report=report)


def _step(
    part: Windows, t: int, prediction: Prediction, rows: Bool[Tensor, "B"], vocab_size: int | None, *, share: float
) -> Step:
    """The column of token t. The prediction is for `rows` only, or for the whole batch."""
    logits = at_least_float32(prediction.logits)
    logits = logits[rows] if len(logits) == len(rows) else logits
    nll = logits.new_zeros(len(rows), 1)
    likeliest = torch.full_like(part.ids[:, :1], UNKNOWN)
    nll[rows, 0] = F.cross_entropy(logits, part.targets[rows, t], reduction="none")
    likeliest[rows, 0] = logits[:, :vocab_size].argmax(-1)
    return Step(t, nll, likeliest, share)


@torch.no_grad()
def _score(model: Thoughtbubbles, windows: Windows, steps: Steps, *, batch: int, report: Report) -> Scores:
    if batch < 1:
        raise ValueError(f"batch = {batch}: give 1 or more")
    nll = torch.zeros(windows.ids.shape, dtype=torch.float64)
    likeliest = torch.full(windows.ids.shape, UNKNOWN)
    n_windows, begun = len(windows.ids), time.perf_counter()
    for first in range(0, n_windows, batch):
        rows = slice(first, min(first + batch, n_windows))
        for step in steps(windows.part(rows, model.embedding.weight.device)):
            columns = slice(step.first, step.first + step.nll.shape[1])
            nll[rows, columns] = step.nll.cpu().double()
            likeliest[rows, columns] = step.likeliest.cpu()
            share = (first + step.share * (rows.stop - first)) / n_windows
            if share < 1:
                report(share)
    report(1.0)
    return Scores(nll, likeliest, windows.counted.cpu(), time.perf_counter() - begun)


def _exp(value: float) -> float:
    """inf instead of an OverflowError."""
    return float(torch.tensor(value, dtype=torch.float64).exp())
