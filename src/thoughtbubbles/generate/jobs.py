"""A request and its completion: their types, the validation of a request, and its progress while it is worked on."""

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.generate.text import TextStream
from thoughtbubbles.model.budget import Budget, Number, brief
from thoughtbubbles.model.config import FIXED_BUDGET, BudgetMode, ModelConfig, is_whole
from thoughtbubbles.model.inputs import check_choice

Finish = Literal["stop", "end", "length", "error", "cancelled", "timeout"]
Method = Literal["cached", "uncached"]


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
    score_prompt: bool = False
    """Whether to report the log-probabilities of the prompt's own tokens too. Then `max_new` can be 0."""


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
    prompt_log_probs: list[float | None] = field(
        default_factory=list
    )  # with `score_prompt`; nothing predicts the first
    prompt_top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def add(self, token: Token, *, with_text: bool) -> None:
        self.ids.append(token.id)
        self.log_probs.append(token.log_prob)
        self.top.append(token.top)
        self.streams.append(token.streams)
        self.finish = token.finish
        if with_text:
            self.text = (self.text or "") + token.text


def exact_method(config: ModelConfig) -> Method:
    """The method that is not an approximation: block selection revises its decisions, so it cannot be cached."""
    return "cached" if config.is_causal else "uncached"


def find_method(config: ModelConfig, method: Method | None, budget_mode: BudgetMode | None) -> Method:
    """The given method, or the exact one. A ValueError if it is impossible."""
    check_choice("method", method, Method)
    check_choice("budget_mode", budget_mode, BudgetMode)
    method = method or exact_method(config)
    if method == "uncached" or not config.fork_layers or (budget_mode or config.budget_mode) != "fixed":
        return method
    if config.selection == "causal":
        raise ValueError(f"{FIXED_BUDGET} requires a model with block selection: omit the budget mode")
    raise ValueError(
        f"{FIXED_BUDGET} cannot be cached: use the method 'uncached' with block selection, or the budget mode "
        "'proportional'"
    )


def check(config: ModelConfig, request: Request, tokenizer: Tokenizer | None, *, can_score: bool = True) -> list[int]:
    """Validates a request and returns its prompt as ids. A ValueError says what is wrong and what to do."""
    if wrong_kind := _kind_problem(request, n_ids(config, tokenizer)):
        raise ValueError(wrong_kind)
    if request.score_prompt and not can_score:
        raise ValueError("score_prompt needs the KV cache: leave it out")
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
    if len(ids) + (new := 1 if request.max_new is None else request.max_new) > limit:
        if len(ids) < limit:
            remedy = f"ask for at most {limit - len(ids)}"
        elif new < limit:
            remedy = f"shorten the prompt to {limit - new}"
        else:
            remedy = f"shorten the prompt and ask for fewer, {limit} in all"
        raise ValueError(
            f"a prompt of {len(ids)} and {brief(new)} new tokens are more than block_size = {limit}, and there is no "
            f"sliding window: {remedy}"
        )
    if request.budget is not None and (wrong_budget := budget_problem(config, request.budget)):
        raise ValueError(wrong_budget)
    return ids


def _kind_problem(request: Request, most: int) -> str | None:
    if not isinstance(request, Request):
        return f"a {type(request).__name__} is not a Request: give Request(prompt=…)"
    if not isinstance(request.stop, tuple) or not all(isinstance(text, str) and text for text in request.stop):
        return f"stop = {brief(request.stop)}: give a tuple of texts, none of them empty"
    ends = request.end_ids
    if ends is not None and not (isinstance(ends, tuple) and all(is_whole(token) for token in ends)):
        return f"end_ids = {brief(ends)}: give a tuple of ids, or None for the tokenizer's end of text"
    if not isinstance(request.sampling, Sampling):
        return f"sampling = {brief(request.sampling)}: give a Sampling"
    if not is_whole(request.top) or not 0 <= request.top <= most:
        return f"top = {brief(request.top)}: give a whole number from 0 to {most}"
    if not isinstance(request.score_prompt, bool):
        return f"score_prompt = {brief(request.score_prompt)}: give True or False"
    least = 0 if request.score_prompt else 1
    if request.max_new is not None and (not is_whole(request.max_new) or request.max_new < least):
        some = "0 new tokens" if request.score_prompt else "1 new token"
        return f"max_new = {brief(request.max_new)}: ask for {some} or more; leave it out for as many as fit"
    return None


def budget_problem(config: ModelConfig, budget: Number) -> str | None:
    """What is wrong with a budget. A needlessly large one is not an error: `budget_remark` reports it."""
    if isinstance(budget, (list, tuple)):
        return f"budget = {brief(budget)}: give one number per request"
    try:
        config.check_budget(Budget.of(budget))
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


def n_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> int:
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
        self.max_new = config.block_size - len(prompt) if request.max_new is None else request.max_new
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
