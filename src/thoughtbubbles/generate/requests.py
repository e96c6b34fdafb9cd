"""Requests in, completions out: prompts of different lengths, budgets and settings in one batch.

    check each request → prefill the batch → [pick a token per row → yield it → drop finished rows → step] …

A row's text depends on its own request only. A `Decoder` reads the tokens: with the KV cache (exact for causal
selection), or without a cache by reading every row again for each token (exact for any rule, but slow).
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.decode import Prediction
from thoughtbubbles.generate.decoders import Cached, Decoder, Graphed, Uncached
from thoughtbubbles.generate.sample import BatchSampling, Picked, Sampling, pick, uniform
from thoughtbubbles.generate.text import TextStream
from thoughtbubbles.model.budget import Budget, Number, brief
from thoughtbubbles.model.config import FIXED_BUDGET, BudgetMode, ModelConfig, is_whole
from thoughtbubbles.model.inputs import check_choice
from thoughtbubbles.model.transformer import Thoughtbubbles

Finish = Literal["stop", "end", "length", "error", "cancelled", "timeout"]
Method = Literal["cached", "uncached"]
DRAWS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and the settings for its completion."""

    prompt: str | Sequence[int]
    """Text (with a tokenizer) or ids; at least one token."""
    max_new: int | None = None
    """Maximum number of new tokens; None: until the row has block_size tokens."""
    budget: Number | None = None
    """Streams per token, at least 1 (with n fork layers, 2^n or more means no limit); None: the model's own."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn."""
    stop: tuple[str, ...] = ()
    """Stop strings: they end the completion and are not part of it."""
    end_ids: tuple[int, ...] | None = None
    """Tokens that end the completion; None: the tokenizer's end of text, if there is a tokenizer."""
    top: int = 0
    """How many of the most likely tokens to report at each position, with their log-probabilities."""


class Token(NamedTuple):
    """One new token of one request."""

    request: int  # its index in the batch
    id: int
    log_prob: float  # the model's own, before penalty, temperature and truncation
    top: tuple[tuple[int, float], ...]  # the most likely tokens
    streams: int  # size of the bubble that predicted this token, which is the bubble of the token before
    text: str  # what can be shown now; "" while a character or a possible stop string is incomplete
    finish: Finish | None  # why this is the last token


@dataclass
class Completion:
    ids: list[int] = field(default_factory=list)
    text: str | None = None  # without a stop string or end of text; None without a tokenizer
    log_probs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)  # of the bubble that predicted each token
    finish: Finish | None = None
    error: str | None = None  # what was wrong with the request, if anything

    def add(self, token: Token, *, with_text: bool) -> None:
        self.ids.append(token.id)
        self.log_probs.append(token.log_prob)
        self.top.append(token.top)
        self.streams.append(token.streams)
        self.finish = token.finish
        if with_text:
            self.text = (self.text or "") + token.text


def generate(
    model: Thoughtbubbles,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None = None,
    method: Method | None = None,
    budget_mode: BudgetMode | None = None,
    batch_size: int = 32,
    on_error: Literal["raise", "return"] = "raise",
    compiled: bool = False,
    finished: Callable[[int, Completion], object] = lambda number, completion: None,
) -> list[Completion]:
    """Returns one completion per request.

    method       "cached" or "uncached"; by default the exact one: cached for models with causal selection (or without
                 forks), uncached for block selection, which the cache approximates by the causal rule
    budget_mode  "proportional" or "fixed", overrides the config; fixed requires block selection and "uncached"
    batch_size   requests per batch; requests of similar length are batched together
    on_error     what happens to bad requests. "raise": a ValueError before any work. "return": their completions have
                 an `error`, and all other requests are unaffected
    compiled     on a GPU: steps as CUDA graphs, many times faster after about twenty seconds of compiling
    finished     called with the index of each request and its completion as soon as that is complete
    """
    if not is_whole(batch_size) or batch_size < 1:
        raise ValueError(f"batch_size = {brief(batch_size)}: give a whole number of 1 or more")
    if not isinstance(on_error, str) or on_error not in ("raise", "return"):
        raise ValueError(f"on_error = {brief(on_error)}: choose 'raise' or 'return'")
    if not callable(finished):
        raise ValueError(f"finished = {brief(finished)}: give a function of a number and a Completion")
    good, errors = _checked(model.config, requests, tokenizer)
    if on_error == "raise":
        _raise_first(errors)
    done = [Completion(finish="error" if error else None, error=error) for error in errors]
    if not good:
        return done
    good.sort(key=lambda row: len(row.prompt))
    decoder = _decoder(model, good, method, budget_mode, rows=min(batch_size, len(good)), compiled=compiled)
    n_ids = _n_ids(model.config, tokenizer)
    for first in range(0, len(good), batch_size):
        for token in _run(decoder, good[first : first + batch_size], n_ids=n_ids):
            done[token.request].add(token, with_text=tokenizer is not None)
            if token.finish is not None:
                finished(token.request, done[token.request])
    return done


def stream(
    model: Thoughtbubbles,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None = None,
    method: Method | None = None,
    budget_mode: BudgetMode | None = None,
    compiled: bool = False,
) -> Iterator[Token]:
    """Yields the tokens of all requests, in one batch, as they are generated; a bad request raises ValueError here."""
    rows, errors = _checked(model.config, requests, tokenizer)
    _raise_first(errors)
    if not rows:
        return iter(())
    decoder = _decoder(model, rows, method, budget_mode, rows=len(rows), compiled=compiled)
    return _run(decoder, rows, n_ids=_n_ids(model.config, tokenizer))


def exact_method(config: ModelConfig) -> Method:
    """The method that is not an approximation: block selection revises its decisions, so it cannot be cached."""
    return "cached" if config.is_causal else "uncached"


def _checked(
    config: ModelConfig, requests: Sequence[Request], tokenizer: Tokenizer | None
) -> tuple[list["ActiveRequest"], list[str | None]]:
    """The good requests, and for every request what is wrong with it, if anything."""
    if not isinstance(requests, Sequence) or isinstance(requests, (str, bytes)):
        raise ValueError(f"requests is a {type(requests).__name__}: give a list of Request")
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"tokenizer = {brief(tokenizer)}: give a Tokenizer, such as data.tokenizer.tokenizer('gpt2')")
    good: list[ActiveRequest] = []
    errors: list[str | None] = []
    for number, request in enumerate(requests):
        try:
            good.append(ActiveRequest(number, request, check(config, request, tokenizer), config, tokenizer))
            errors.append(None)
        except ValueError as error:
            errors.append(str(error))
    return good, errors


def check(config: ModelConfig, request: Request, tokenizer: Tokenizer | None) -> list[int]:
    """Validates a request and returns its prompt as ids. A ValueError says what is wrong and what to do."""
    if wrong_kind := _kind_problem(request, _n_ids(config, tokenizer)):
        raise ValueError(wrong_kind)
    if tokenizer is None and (isinstance(request.prompt, str) or request.stop):
        raise ValueError("text needs a tokenizer: pass tokenizer=, or give the prompt as ids and no stop strings")
    if tokenizer is not None and tokenizer.size > config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.size} ids, the model {config.vocab_size}: "
            "use the one it was trained with"
        )
    limit = config.block_size
    try:
        ids = _ids(request, tokenizer)
    except (TypeError, ValueError):
        raise ValueError(
            f"prompt = {brief(request.prompt)} is neither text nor whole numbers: give a string, or a list of ids"
        ) from None
    if not ids:
        raise ValueError("the prompt is empty: give at least one token, for example the tokenizer's end of text")
    if wrong := [i for i in ids if not 0 <= i < config.vocab_size]:
        raise ValueError(
            f"the prompt has the id {brief(wrong[0])}: the vocabulary has ids from 0 to {config.vocab_size - 1}"
        )
    if len(ids) + (new := request.max_new or 1) > limit:
        raise ValueError(
            f"a prompt of {len(ids)} and {brief(new)} new tokens are more than block_size = {limit}, and "
            "there is no sliding window: "
            + (f"ask for at most {limit - len(ids)}" if len(ids) < limit else f"shorten the prompt to {limit - 1}")
        )
    if request.budget is not None and (wrong_budget := budget_problem(config, request.budget)):
        raise ValueError(wrong_budget)
    return ids


def _kind_problem(request: Request, n_ids: int) -> str | None:
    if not isinstance(request, Request):
        return f"a {type(request).__name__} is not a Request: give Request(prompt=…)"
    if not isinstance(request.stop, tuple) or not all(isinstance(text, str) and text for text in request.stop):
        return f"stop = {brief(request.stop)}: give a tuple of texts, none of them empty"
    ends = request.end_ids
    if ends is not None and not (isinstance(ends, tuple) and all(is_whole(token) for token in ends)):
        return f"end_ids = {brief(ends)}: give a tuple of ids, or None for the tokenizer's end of text"
    if not isinstance(request.sampling, Sampling):
        return f"sampling = {brief(request.sampling)}: give a Sampling"
    if not is_whole(request.top) or not 0 <= request.top <= n_ids:
        return f"top = {brief(request.top)}: give a whole number from 0 to {n_ids}"
    if request.max_new is not None and (not is_whole(request.max_new) or request.max_new < 1):
        return f"max_new = {brief(request.max_new)}: ask for 1 new token or more; leave it out for as many as fit"
    return None


def budget_problem(config: ModelConfig, budget: Number) -> str | None:
    """What is wrong with a budget. A needlessly large one is not an error: `budget_remark` reports it."""
    if isinstance(budget, (list, tuple)):
        return f"budget = {brief(budget)}: give one number per request"
    try:
        Budget.of(budget).check_range(config.block_size)
    except ValueError as error:
        return str(error)
    return None


def budget_remark(config: ModelConfig, budget: Number) -> str | None:
    """A remark for the user if this budget changes nothing or limits nothing."""
    if not config.fork_layers:
        return f"budget = {budget}: this model has no fork layers, so a budget changes nothing"
    if not config.is_unlimited(budget) or Budget.of(budget) == Budget.of(config.max_bubble):
        return None
    layers = f"{len(config.fork_layers)} fork layer{'s' * (len(config.fork_layers) > 1)}"
    return f"budget = {budget}: {layers} make at most {config.max_bubble} streams per token, so this is no limit"


def _raise_first(errors: Sequence[str | None]) -> None:
    for number, error in enumerate(errors):
        if error:
            raise ValueError(f"request {number}: {error}" if len(errors) > 1 else error)


def _n_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> int:
    """The number of ids that may be generated: without the padding of the vocabulary, if the tokenizer is known."""
    return config.vocab_size if tokenizer is None else tokenizer.size


def _ids(request: Request, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(request.prompt, str):
        assert tokenizer is not None
        return tokenizer.encode(request.prompt)
    ids = request.prompt
    if isinstance(ids, (bytes, bytearray, memoryview, Mapping, Set)) or not hasattr(ids, "__len__"):
        raise TypeError(ids)  # also a generator, which can be read only once
    if any(isinstance(i, bool) for i in ids):
        raise TypeError(ids)
    return [operator.index(i) for i in ids]


class ActiveRequest:
    """A request in progress."""

    def __init__(
        self, number: int, request: Request, prompt: list[int], config: ModelConfig, tokenizer: Tokenizer | None
    ):
        self.number, self.request, self.prompt = number, request, prompt
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


def _decoder(
    model: Thoughtbubbles,
    all_rows: Sequence[ActiveRequest],
    method: Method | None,
    budget_mode: BudgetMode | None,
    *,
    rows: int,
    compiled: bool,
) -> Decoder:
    config = model.config
    check_choice("method", method, Method)
    check_choice("budget_mode", budget_mode, BudgetMode)
    if not isinstance(compiled, bool):
        raise ValueError(f"compiled = {brief(compiled)}: give True or False")
    if (method or exact_method(config)) == "uncached":
        if compiled:
            raise ValueError("compiling needs the cache: without it every prefix would be a new shape to compile for")
        return Uncached(model, budget_mode=budget_mode)
    if config.fork_layers and (budget_mode or config.budget_mode) == "fixed" and config.selection == "causal":
        raise ValueError(f"{FIXED_BUDGET} requires a model with block selection: omit the budget mode")
    if config.fork_layers and (budget_mode or config.budget_mode) == "fixed":
        raise ValueError(
            f"{FIXED_BUDGET} cannot be cached: use the method 'uncached' with block selection, or the budget mode "
            "'proportional'"
        )
    capacity = max(len(row.prompt) + row.max_new for row in all_rows)
    if not compiled:
        return Cached(model, capacity=capacity)
    if model.embedding.weight.device.type != "cuda":
        raise ValueError("compiling needs a CUDA GPU: do not compile on other devices")
    return Graphed(model, rows=rows, capacity=capacity, budgets=[row.budget for row in all_rows])


def _run(decoder: Decoder, rows: list[ActiveRequest], *, n_ids: int) -> Iterator[Token]:
    prediction = decoder.start([row.prompt for row in rows], [row.budget for row in rows])
    device = prediction.logits.device
    settings, n_top = (
        BatchSampling.of([row.request.sampling for row in rows], device=device),
        max(r.request.top for r in rows),
    )
    seen = _seen(rows, prediction) if settings.penalty is not None else None
    while True:
        if (now := rows[0].n_new % DRAWS_AT_ONCE) == 0:  # all rows of a batch have as many new tokens
            draws = _draws(rows, device)
        picked = pick(prediction.logits, settings, draws[:, now], n_ids=n_ids, seen=seen, n_top=n_top)
        facts, ids = _packed(picked, prediction), picked.id
        seen = None if seen is None else seen.scatter(1, ids[:, None], True)
        tokens = [row.take(*of_row) for row, of_row in zip(rows, _unpacked(facts, rows), strict=True)]
        yield from tokens
        left = [i for i, token in enumerate(tokens) if token.finish is None]
        if not left:
            return
        if len(left) < len(rows):
            index, rows = torch.tensor(left, device=device), [rows[i] for i in left]
            decoder.keep(index)
            ids, draws, seen = ids[index], draws[index], None if seen is None else seen[index]
            settings = BatchSampling.of([row.request.sampling for row in rows], device=device)
            n_top = max(row.request.top for row in rows)
        prediction = decoder.step(ids)


def _draws(rows: Sequence[ActiveRequest], device: torch.device) -> Tensor:
    """Random numbers for the next steps, sent together: sending data to a GPU waits until it has finished its work."""
    steps = range(rows[0].n_new, rows[0].n_new + DRAWS_AT_ONCE)
    draws = [[uniform(row.request.sampling.seed, step) for step in steps] for row in rows]
    return torch.tensor(draws, dtype=torch.float64, device=device)


def _seen(rows: Sequence[ActiveRequest], prediction: Prediction) -> Tensor:
    """Which tokens each row already contains."""
    seen = torch.zeros_like(prediction.logits, dtype=torch.bool)
    for i, row in enumerate(rows):
        seen[i, torch.tensor(row.prompt, device=seen.device)] = True
    return seen


def _packed(picked: Picked, prediction: Prediction) -> Tensor:
    """All results that the host needs, as one tensor, so that they take one transfer."""
    columns = [picked.id[:, None], picked.log_prob[:, None], prediction.streams[:, None]]
    return torch.cat([column.double() for column in (*columns, picked.top_id, picked.top_log_prob)], dim=1)


def _unpacked(
    facts: Tensor, rows: Sequence[ActiveRequest]
) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...], int]]:
    for (token, log_prob, streams, *top), row in zip(facts.tolist(), rows, strict=True):
        if math.isnan(log_prob):
            raise ValueError("the model's logits are NaN: check its weights")
        n = len(top) // 2
        likeliest = tuple((int(i), p) for i, p in zip(top[:n], top[n:], strict=True))
        yield int(token), log_prob, likeliest[: row.request.top], int(streams)
