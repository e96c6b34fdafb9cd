"""Requests in, completions out: prompts of different lengths, budgets and settings in one batch.

    check each request → prefill the batch → [pick a token a row → hand it out → drop finished rows → step] …

A row's text depends on its own request alone. How tokens are read is a `Decoder`'s business: through the cache (exact
for causal selection), or by recomputing all of every row (exact for any rule, and slow).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.cache import Cache
from thoughtbubbles.generate.decode import Prediction, decode_step, prefill, recompute
from thoughtbubbles.generate.sample import Picked, Rows, Sampling, pick, uniform
from thoughtbubbles.generate.text import TextStream
from thoughtbubbles.model.budget import Budget, Number
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

Finish = Literal["stop", "end", "length", "error"]
Method = Literal["cached", "recomputed"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and all that is wanted of it."""

    prompt: str | Sequence[int]
    """Text (with a tokenizer) or ids; at least one token."""
    max_new: int | None = None
    """New tokens at most; None: until the row has block_size tokens."""
    budget: Number | None = None
    """Streams per token, from 1 to what the fork layers allow; None: the model's own."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion; they are not part of it."""
    end_ids: tuple[int, ...] | None = None
    """Tokens that end the completion; None: the tokenizer's end of text, if there is a tokenizer."""
    top: int = 0
    """How many of the likeliest tokens to report at each place, with their log-probabilities."""


class Token(NamedTuple):
    """One new token of one request, as it comes."""

    request: int  # its number in the batch
    id: int
    log_prob: float  # the model's own, before penalty, temperature and cuts
    top: tuple[tuple[int, float], ...]  # the likeliest tokens
    streams: int  # size of the bubble, that of the token before, which predicted this one
    text: str  # what can be shown now; "" where a character or a stop string may still be under way
    finish: Finish | None  # why this is the last one


@dataclass
class Completion:
    ids: list[int] = field(default_factory=list)
    text: str | None = None  # without a stop string or end of text; None without a tokenizer
    log_probs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)  # of the token that predicted each new one
    finish: Finish | None = None
    error: str | None = None  # what was wrong with the request, if anything


def generate(
    model: Thoughtbubbles,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None = None,
    method: Method | None = None,
    budget_mode: str | None = None,
    batch_size: int = 32,
    on_error: Literal["raise", "return"] = "raise",
) -> list[Completion]:
    """One completion for each request.

    method       "cached" or "recomputed"; by default whichever is exact: cached for models with causal selection (and
                 without forks), recomputed for block selection, where the cache with the causal rule approximates
    budget_mode  "proportional" or "fixed" in place of the config's; fixed needs block selection and "recomputed"
    batch_size   requests at a time; those of like lengths go together
    on_error     what a bad request does. "raise": a ValueError before any work. "return": its completion has the
                 `error`, and all others are as they would be without it
    """
    problems = [problem(model.config, request, tokenizer) for request in requests]
    if on_error == "raise":
        for number, wrong in enumerate(problems):
            if wrong:
                raise ValueError(f"request {number}: {wrong}" if len(requests) > 1 else wrong)
    done = [Completion(finish="error" if wrong else None, error=wrong) for wrong in problems]
    good = [number for number, wrong in enumerate(problems) if not wrong]
    good.sort(key=lambda number: len(_ids(requests[number], tokenizer)))
    for first in range(0, len(good), batch_size):
        numbers = good[first : first + batch_size]
        batch = [requests[number] for number in numbers]
        for token in stream(model, batch, tokenizer=tokenizer, method=method, budget_mode=budget_mode):
            completion = done[numbers[token.request]]
            completion.ids.append(token.id)
            completion.log_probs.append(token.log_prob)
            completion.top.append(token.top)
            completion.streams.append(token.streams)
            completion.finish = token.finish
            if tokenizer is not None:
                completion.text = (completion.text or "") + token.text
    return done


def stream(
    model: Thoughtbubbles,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None = None,
    method: Method | None = None,
    budget_mode: str | None = None,
) -> Iterator[Token]:
    """The tokens of all requests as they come, all requests in one batch; a bad one is a ValueError at once."""
    for request in requests:
        if wrong := problem(model.config, request, tokenizer):
            raise ValueError(wrong)
    rows = [Row(number, request, model.config, tokenizer) for number, request in enumerate(requests)]
    decoder = _decoder(model, rows, method=method, budget_mode=budget_mode)
    return _run(decoder, rows, n_ids=model.config.vocab_size if tokenizer is None else tokenizer.size)


def problem(config: ModelConfig, request: Request, tokenizer: Tokenizer | None) -> str | None:
    """What is wrong with a request, in words that say what to do."""
    if tokenizer is None and (isinstance(request.prompt, str) or request.stop):
        return "text needs a tokenizer: pass tokenizer=, or give the prompt as ids and no stop strings"
    if tokenizer is not None and tokenizer.size > config.vocab_size:
        return (
            f"the tokenizer {tokenizer.name!r} has {tokenizer.size} ids, the model {config.vocab_size}: "
            "use the one it was trained with"
        )
    ids, limit = _ids(request, tokenizer), config.block_size
    if not ids:
        return "the prompt is empty: give at least one token, for example the tokenizer's end of text"
    if wrong := [i for i in ids if not 0 <= i < config.vocab_size]:
        return f"the prompt has the id {wrong[0]}: the vocabulary has ids from 0 to {config.vocab_size - 1}"
    if request.max_new is not None and request.max_new < 1:
        return f"max_new = {request.max_new}: ask for 1 new token or more"
    if len(ids) + (request.max_new or 1) > limit:
        return (
            f"{len(ids)} tokens of prompt and {request.max_new or 1} new ones are more than block_size = {limit}, and "
            "a row does not slide past it: "
            + (f"ask for at most {limit - len(ids)}" if len(ids) < limit else f"shorten the prompt to {limit - 1}")
        )
    if not 0 <= request.top <= config.vocab_size:
        return f"top = {request.top}: give from 0 to {config.vocab_size}"
    return None if request.budget is None else _budget_problem(config, request.budget)


def _budget_problem(config: ModelConfig, budget: Number) -> str | None:
    try:
        exact = Budget.of(budget)
        exact.check_range(config.block_size)
    except ValueError as error:
        return str(error)
    if not config.fork_layers:
        return f"budget = {budget}: this model has no fork layers, so every token has one stream; leave budget out"
    if exact.numerator[0] > config.max_bubble * exact.denominator[0]:
        most, layers = config.max_bubble, len(config.fork_layers)
        return f"budget = {budget}: {layers} fork layers allow at most {most} streams a token"
    return None


def _ids(request: Request, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(request.prompt, str):
        assert tokenizer is not None
        return tokenizer.encode(request.prompt)
    return [int(i) for i in request.prompt]


class Row:
    """A request on its way."""

    def __init__(self, number: int, request: Request, config: ModelConfig, tokenizer: Tokenizer | None):
        self.number, self.request = number, request
        self.prompt = _ids(request, tokenizer)
        self.budget = config.budget if request.budget is None else request.budget
        self.max_new = request.max_new or config.block_size - len(self.prompt)
        ends = request.end_ids if request.end_ids is not None else (tokenizer.end_of_text,) if tokenizer else ()
        self.end_ids = frozenset(ends)
        self.text = TextStream(tokenizer, stop=request.stop) if tokenizer else None
        self.n_new = 0

    def take(self, token: int, log_prob: float, top: tuple[tuple[int, float], ...], streams: int) -> Token:
        self.n_new += 1
        finish: Finish | None = None
        text = ""
        if token in self.end_ids:
            finish = "end"
        elif self.text is not None:
            text = self.text.feed(token)
            finish = "stop" if self.text.stopped else None
        if finish is None and self.n_new == self.max_new:
            finish = "length"
        if finish is not None and self.text is not None:
            text += self.text.finish()
        return Token(self.number, token, log_prob, top, streams, text, finish)


class Decoder(Protocol):
    """Reads tokens and predicts the next ones."""

    def start(self) -> Prediction:
        """Reads the prompts."""

    def step(self, ids: Tensor) -> Prediction:
        """Reads one more token of each row."""

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows only."""


class Cached:
    def __init__(self, model: Thoughtbubbles, rows: Sequence[Row]):
        self.model, self.rows = model, rows
        self.cache: Cache | None = None

    def start(self) -> Prediction:
        ids, lengths = padded([row.prompt for row in self.rows], device=self.model.embedding.weight.device)
        capacity = max(len(row.prompt) + row.max_new for row in self.rows)
        budget = [row.budget for row in self.rows]
        prediction, self.cache = prefill(self.model, ids, lengths=lengths, budget=budget, capacity=capacity)
        return prediction

    def step(self, ids: Tensor) -> Prediction:
        assert self.cache is not None
        prediction, self.cache = decode_step(self.model, self.cache, ids)
        return prediction

    def keep(self, rows: Tensor) -> None:
        assert self.cache is not None
        self.cache = self.cache.reorder(rows)


class Recomputed:
    def __init__(self, model: Thoughtbubbles, rows: Sequence[Row], *, budget_mode: str | None):
        self.model, self.budget_mode = model, budget_mode
        self.ids, self.lengths = padded([row.prompt for row in rows], device=model.embedding.weight.device)
        self.budgets = [row.budget for row in rows]

    def start(self) -> Prediction:
        return recompute(self.model, self.ids, lengths=self.lengths, budget=self.budgets, budget_mode=self.budget_mode)

    def step(self, ids: Tensor) -> Prediction:
        longest = int(self.lengths.max())
        self.ids = torch.nn.functional.pad(self.ids, (0, longest + 1 - self.ids.shape[1]))
        self.ids.scatter_(1, self.lengths[:, None], ids[:, None])
        self.lengths = self.lengths + 1
        return self.start()

    def keep(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        self.ids = self.ids[rows, : int(self.lengths.max())]
        self.budgets = [self.budgets[row] for row in rows.tolist()]


def padded(prompts: Sequence[Sequence[int]], *, device: torch.device | str) -> tuple[Tensor, Tensor]:
    lengths = [len(prompt) for prompt in prompts]
    ids = [[*prompt, *(0 for _ in range(max(lengths) - len(prompt)))] for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(lengths, device=device)


def _decoder(model: Thoughtbubbles, rows: Sequence[Row], *, method: Method | None, budget_mode: str | None) -> Decoder:
    block = bool(model.config.fork_layers) and model.config.selection == "block"
    fixed = (budget_mode or model.config.budget_mode) == "fixed"
    if method not in (None, "cached", "recomputed"):
        raise ValueError(f"method = {method!r}: choose 'cached' or 'recomputed'")
    if (method or ("recomputed" if block else "cached")) == "recomputed":
        return Recomputed(model, rows, budget_mode=budget_mode)
    if fixed:
        raise ValueError(
            "a fixed budget looks at the whole block, so no cache can follow it: use method='recomputed' "
            "(with block selection), or budget_mode='proportional'"
        )
    return Cached(model, rows)


def _run(decoder: Decoder, rows: list[Row], *, n_ids: int) -> Iterator[Token]:
    prediction = decoder.start()
    device = prediction.logits.device
    settings, n_top = Rows.of([row.request.sampling for row in rows], device=device), max(r.request.top for r in rows)
    seen = _seen(rows, prediction) if settings.penalty is not None else None
    while True:
        draw = torch.tensor([uniform(row.request.sampling.seed, row.n_new) for row in rows], dtype=torch.float64)
        picked = pick(prediction.logits, settings, draw.to(device), n_ids=n_ids, seen=seen, n_top=n_top)
        tokens = [row.take(*facts) for row, facts in zip(rows, _facts(rows, picked, prediction), strict=True)]
        yield from tokens
        left = [i for i, token in enumerate(tokens) if token.finish is None]
        if not left:
            return
        ids = picked.id
        if len(left) < len(rows):
            index, rows = torch.tensor(left, device=device), [rows[i] for i in left]
            decoder.keep(index)
            ids, seen = ids[index], None if seen is None else seen[index]
            settings = Rows.of([row.request.sampling for row in rows], device=device)
            n_top = max(row.request.top for row in rows)
        if seen is not None:
            seen = seen.scatter(1, ids[:, None], True)
        prediction = decoder.step(ids)


def _seen(rows: Sequence[Row], prediction: Prediction) -> Tensor:
    """Which tokens a row has already had."""
    seen = torch.zeros_like(prediction.logits, dtype=torch.bool)
    for i, row in enumerate(rows):
        seen[i, torch.tensor(row.prompt, device=seen.device)] = True
    return seen


def _facts(
    rows: Sequence[Row], picked: Picked, prediction: Prediction
) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...], int]]:
    ids, log_probs, streams = picked.id.tolist(), picked.log_prob.tolist(), prediction.streams.tolist()
    top_ids, top_log_probs = picked.top_id.tolist(), picked.top_log_prob.tolist()
    for i, row in enumerate(rows):
        top = tuple(zip(top_ids[i], top_log_probs[i], strict=True))[: row.request.top]
        yield ids[i], log_probs[i], top, streams[i]
