"""Requests in, completions out: prompts of different lengths, budgets and settings at the same time.

    check each request → an engine with a row for each of them, or for `batch_size` at a time → their tokens

A row's text depends on its own request only, except for rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.engine import Engine, check_compiled
from thoughtbubbles.generate.handle import Event
from thoughtbubbles.generate.jobs import (
    ActiveRequest,
    Completion,
    Finish,
    Method,
    Request,
    Token,
    budget_problem,
    budget_remark,
    check,
    exact_method,
    find_method,
)
from thoughtbubbles.model.budget import Budget, brief
from thoughtbubbles.model.config import BudgetMode, ModelConfig, is_whole
from thoughtbubbles.model.transformer import Thoughtbubbles

__all__ = [
    "Completion",
    "Finish",
    "Method",
    "Request",
    "Token",
    "budget_problem",
    "budget_remark",
    "check",
    "exact_method",
    "generate",
    "stream",
]
CHUNK = 2048  # tokens of prompts per step: nobody waits for the steps of others, so they are as large as is fast


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
    batch_size   how many requests are worked on at the same time
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
    is_cached = _check_options(model, method, budget_mode, compiled)
    good, errors = _checked(model.config, requests, tokenizer, can_score=is_cached)
    if on_error == "raise":
        _raise_first(errors)
    done = [Completion(finish="error" if error else None, error=error) for error in errors]
    if not good:
        return done
    options: dict[str, Any] = {"method": method, "budget_mode": budget_mode, "compiled": compiled}
    for handle, _ in _run(model, good, tokenizer=tokenizer, rows=batch_size, **options):
        if handle.is_finished:  # this was its last event
            done[handle.number] = handle.completion
            finished(handle.number, handle.completion)
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
    """Yields the tokens of all requests as they are generated; a bad request raises ValueError here."""
    is_cached = _check_options(model, method, budget_mode, compiled)
    jobs, errors = _checked(model.config, requests, tokenizer, can_score=is_cached)
    _raise_first(errors)
    if not jobs:
        return iter(())
    options: dict[str, Any] = {"method": method, "budget_mode": budget_mode, "compiled": compiled}
    events = _run(model, jobs, tokenizer=tokenizer, rows=len(jobs), **options)
    return (token for _, token in events if token is not None)


def _check_options(
    model: Thoughtbubbles, method: Method | None, budget_mode: BudgetMode | None, compiled: bool
) -> bool:
    """Whether there is a KV cache."""
    is_cached = find_method(model.config, method, budget_mode) == "cached"
    check_compiled(compiled, is_cached=is_cached, device=model.embedding.weight.device)
    return is_cached


def _run(
    model: Thoughtbubbles,
    jobs: Sequence[ActiveRequest],
    *,
    tokenizer: Tokenizer | None,
    rows: int,
    compiled: bool,
    **options: Any,
) -> Iterator[Event]:
    engine = Engine(
        model,
        tokenizer=tokenizer,
        rows=min(rows, len(jobs)),
        chunk=CHUNK,
        max_budget=Budget.of([job.budget for job in jobs]).largest,
        capacity=_longest(jobs),
        grows=not compiled,
        compiled=compiled,
        **options,
    )
    engine.submit_jobs(jobs)
    return _events(engine)


def _events(engine: Engine) -> Iterator[Event]:
    for event in engine.run():
        if event.handle.exception is not None:
            raise event.handle.exception
        yield event


def _longest(jobs: Sequence[ActiveRequest]) -> int:
    return max(len(job.prompt) + job.max_new for job in jobs)


def _checked(
    config: ModelConfig, requests: Sequence[Request], tokenizer: Tokenizer | None, *, can_score: bool
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
            good.append(
                ActiveRequest(
                    number, request, check(config, request, tokenizer, can_score=can_score), config, tokenizer
                )
            )
            errors.append(None)
        except ValueError as error:
            errors.append(str(error))
    return good, errors


def _raise_first(errors: Sequence[str | None]) -> None:
    for number, error in enumerate(errors):
        if error:
            raise ValueError(f"request {number}: {error}" if len(errors) > 1 else error)
