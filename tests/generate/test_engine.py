"""The engine: whatever joins, leaves or is cancelled, each request gets the tokens that it gets alone."""

import math
import threading
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from generate.completions import by_hand
from helpers import lively_model, small_config
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.engine import Engine, QueueFull
from thoughtbubbles.generate.handle import Handle
from thoughtbubbles.generate.requests import Completion, Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.transformer import Thoughtbubbles

BLOCK = 40
GREEDY = Sampling(temperature=0)
BYTES = tokenizer("bytes")


@cache
def model() -> Thoughtbubbles:
    return lively_model(small_config(block_size=BLOCK, n_layer=3, fork_layers=(1, 2)), seed=2)


@cache
def byte_model() -> Thoughtbubbles:
    return lively_model(small_config(block_size=64, vocab_size=BYTES.size), seed=4)


@cache
def alone(request: Request) -> Completion:
    """What the request gets by itself, without cache and engine."""
    return by_hand(model(), request)


def check_alone(handle: Handle, request: Request) -> None:
    """A finished request has what it gets alone; one that was stopped, the beginning of it."""
    found, expected = handle.completion, alone(request)
    if found.finish in ("cancelled", "timeout"):
        n = len(found.ids)
        assert n < len(expected.ids)
    else:
        n = len(expected.ids)
        assert found.finish == expected.finish
    assert found.ids == expected.ids[:n]
    assert found.streams == expected.streams[:n]
    assert found.log_probs == pytest.approx(expected.log_probs[:n], abs=1e-9)
    assert [[i for i, _ in top] for top in found.top] == [[i for i, _ in top] for top in expected.top[:n]]


def ids(seed: int, n: int) -> tuple[int, ...]:
    return tuple(torch.randint(23, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def mixed() -> list[Request]:
    sampled = Sampling(temperature=0.9, top_p=0.9, seed=3)
    return [
        Request(prompt=ids(0, 30), max_new=6, budget=2, sampling=GREEDY),
        Request(prompt=ids(1, 1), max_new=12, budget=1, sampling=sampled, top=3),
        Request(prompt=ids(2, 9), budget="7/3", sampling=replace(sampled, repetition_penalty=1.3)),
        Request(prompt=ids(0, 17), max_new=9, budget=2, sampling=replace(sampled, top_k=4)),
        Request(prompt=ids(3, 12), max_new=20, budget=4, sampling=GREEDY, end_ids=(3, 5, 7)),
        Request(prompt=ids(4, 22), max_new=3, sampling=replace(sampled, seed=9, min_p=0.1)),
        Request(prompt=ids(0, 30), max_new=4, budget=1.5, sampling=GREEDY),
    ]


@pytest.mark.parametrize(("rows", "chunk"), [(1, 64), (3, 5), (7, 8)])
def test_requests_together_get_what_they_get_alone(rows, chunk):
    engine = Engine(model(), rows=rows, chunk=chunk)
    handles = [engine.submit(request) for request in mixed()]
    tokens = {handle.number: [] for handle in handles}
    for event in engine.run():
        assert event.token is not None
        assert event.token.request == event.handle.number
        tokens[event.handle.number].append(event.token.id)
    for handle, request in zip(handles, mixed(), strict=True):
        check_alone(handle, request)
        assert tokens[handle.number] == handle.completion.ids
    assert engine.stats()[:4] == (0, 0, 0, rows)


def test_iterating_over_a_handle_runs_the_engine():
    engine = Engine(model(), rows=2, chunk=4)
    first, second = (engine.submit(request) for request in mixed()[:2])
    assert [token.id for token in second] == alone(mixed()[1]).ids
    assert [token.id for token in second] == []
    assert first.result().ids == alone(mixed()[0]).ids


class Interleaving(RuleBasedStateMachine):
    """Any order of submissions, steps and cancellations. Prompts share beginnings, so that chunks are copied."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.known: list[tuple[Handle, Request]] = []

    @initialize(rows=st.integers(1, 4), chunk=st.sampled_from([1, 3, 4, 8]), chunks=st.integers(1, 3))
    def start(self, rows: int, chunk: int, chunks: int) -> None:
        self.engine = Engine(model(), rows=rows, chunk=chunk, **self.options)
        self.engine._scheduler.step_tokens = chunks * chunk

    @rule(
        text=st.integers(0, 1),
        n=st.integers(1, 20),
        max_new=st.integers(1, 4),
        budget=st.sampled_from([1, 1.5, 2, 4]),
        seed=st.sampled_from([None, 0, 1]),
    )
    def submit(self, text: int, n: int, max_new: int, budget: float, seed: int | None) -> None:
        sampling = GREEDY if seed is None else Sampling(seed=seed)
        request = Request(prompt=ids(text, n), max_new=max_new, budget=budget, sampling=sampling)
        self.known.append((self.engine.submit(request), request))

    @precondition(lambda self: self.known)
    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.known))[0].cancel()

    @invariant()
    def every_row_is_free_or_in_use_once(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine._scheduler
        assert sorted([*(handle.row for handle in scheduler.live), *scheduler._free]) == list(range(self.engine.rows))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in self.engine.run():
            pass
        for handle, request in self.known:
            check_alone(handle, request)
        stats = self.engine.stats()
        assert stats[:4] == (0, 0, 0, self.engine.rows)
        assert stats.tokens_generated == sum(len(handle.completion.ids) for handle, _ in self.known)


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)


@pytest.mark.slow
class TestManyInterleavings(Interleaving.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("chunks", [1, 3])  # that a step has room for
def test_a_common_beginning_is_read_once(chunks):
    prompt = ids(5, 22)
    engine = Engine(model(), rows=4, chunk=8)
    engine._scheduler.step_tokens = 8 * chunks
    requests = [Request(prompt=prompt, max_new=3, budget=2, sampling=Sampling(seed=seed)) for seed in range(4)]
    handles = [engine.submit(request) for request in requests]
    for _ in engine.run():
        pass
    stats = engine.stats()
    assert (stats.tokens_read, stats.tokens_shared) == (22 + 3 * 6, 3 * 16)  # whole chunks; 6 tokens are left to each
    later = Request(prompt=(*prompt[:17], 1), max_new=3, budget=2, sampling=GREEDY)
    other_budget = replace(later, budget=1)
    handles += [engine.submit(later), engine.submit(other_budget)]  # the rows are free, but not yet used again
    for _ in engine.run():
        pass
    after = engine.stats()
    assert (after.tokens_read - stats.tokens_read, after.tokens_shared - stats.tokens_shared) == (2 + 18, 16)
    for handle, request in zip(handles, [*requests, later, other_budget], strict=True):
        check_alone(handle, request)


def test_a_long_prompt_stalls_nobody():
    """Rows that generate get a token in every step, while a prompt is read a chunk at a time."""
    engine = Engine(model(), rows=3, chunk=4)
    quick = [engine.submit(Request(prompt=ids(6 + i, 1), max_new=12, sampling=GREEDY)) for i in range(2)]
    engine.step()
    slow = engine.submit(Request(prompt=ids(8, 30), max_new=1, sampling=GREEDY))
    for n in range(2, 9):
        assert [len(handle.completion.ids) for handle in quick] == [n - 1] * 2
        engine.step()
        assert slow.n_read == min(30, 4 * (n - 1))
    assert slow.result().finish == "length"


def test_cancelled_requests_free_their_rows_within_a_step():
    engine = Engine(model(), rows=1, chunk=4)
    request = Request(prompt=ids(0, 10), max_new=20, sampling=GREEDY)
    running, waiting, last = (engine.submit(request) for _ in range(3))
    for _ in range(5):
        engine.step()
    assert len(running.completion.ids) == 3
    running.cancel()
    waiting.cancel()
    events = engine.step()
    assert {event.handle.number: event.token for event in events} == {0: None, 1: None}
    assert (running.completion.finish, waiting.completion.finish) == ("cancelled", "cancelled")
    assert last.row == 0
    check_alone(running, request)
    assert last.result().ids == alone(request).ids


def test_a_request_that_takes_too_long():
    engine = Engine(model(), rows=1)
    late = engine.submit(Request(prompt=(1, 2), max_new=30, sampling=GREEDY), timeout=0.05)
    never = engine.submit(Request(prompt=(1, 2), max_new=2, sampling=GREEDY), timeout=0)
    engine.step()
    assert never.completion.finish == "timeout"
    time.sleep(0.06)
    assert late.result().finish == "timeout"
    assert 1 <= len(late.completion.ids) < 30
    assert engine.is_idle


def test_a_full_queue():
    engine = Engine(model(), rows=1, waiting=1)
    request = Request(prompt=(1,), max_new=2, sampling=GREEDY)
    first = engine.submit(request)
    engine.submit(request)
    with pytest.raises(QueueFull, match="2 requests are waiting already"):
        engine.submit(request)
    engine.step()
    engine.step()
    assert first.is_finished
    engine.submit(request)


def test_text_and_stop_strings():
    engine = Engine(byte_model(), tokenizer=BYTES, rows=2)
    request = Request(prompt="The cell", max_new=20, sampling=GREEDY)
    expected = generate(byte_model(), [request], tokenizer=BYTES)[0]
    assert expected.text
    assert engine.submit(request).result().text == expected.text
    stopped = replace(request, stop=(expected.text[2],))
    handle = engine.submit(stopped)
    shown = "".join(token.text for token in handle)
    assert shown == handle.completion.text == generate(byte_model(), [stopped], tokenizer=BYTES)[0].text
    assert handle.completion.finish == "stop"


@pytest.mark.slow
def test_threads_submit_while_one_steps():
    engine = Engine(model(), rows=3, chunk=8)
    requests = [replace(each, sampling=replace(each.sampling, seed=seed)) for seed in (0, 5) for each in mixed()]
    handles: dict[int, Handle] = {}

    def submit(begin: int) -> None:
        for i in range(begin, len(requests), 3):
            handles[i] = engine.submit(requests[i])
            time.sleep(0.001)

    threads = [threading.Thread(target=submit, args=(begin,)) for begin in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not engine.is_idle:
        engine.step()
    for i, request in enumerate(requests):
        check_alone(handles[i], request)


def test_logits_that_are_not_numbers_end_only_their_request():
    broken = lively_model(small_config(block_size=BLOCK), seed=2)
    with torch.no_grad():
        broken.embedding.weight[7] = math.nan
    engine = Engine(broken, rows=2)
    handle = engine.submit(Request(prompt=(7,), max_new=3, sampling=GREEDY))
    completion = handle.result()
    assert (completion.finish, completion.error) == ("error", "the model's logits are NaN: check its weights")
    assert engine.is_idle


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=()), "the prompt is empty"),
        (Request(prompt=(1, 23)), "the prompt has the id 23"),
        (Request(prompt=(1,), budget=4), "budget = 4: this engine has room for budgets up to 2.5"),
        (Request(prompt=(1,), budget=99), "budget = 99: this engine has room for budgets up to 2.5"),
        (Request(prompt=(1,), budget=0.5), "budget = 0.5"),
        (Request(prompt=(1,) * 20, max_new=11), "more than this engine's capacity of 30 tokens per row"),
        (Request(prompt="text"), "text needs a tokenizer"),
    ],
)
def test_bad_requests(request_: Any, message: str):
    engine = Engine(model(), rows=1, capacity=30, max_budget=2.5)
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert engine.is_idle


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows = 0: give a whole number of 1 or more"),
        ({"chunk": 0}, "chunk = 0: give a whole number of 1 or more"),
        ({"capacity": 0}, "capacity = 0: give a whole number of 1 or more"),
        ({"waiting": -1}, "waiting = -1: give a whole number of 0 or more"),
        ({"max_budget": 0.5}, "max_budget = 0.5 is below 1"),
        ({"max_budget": 1e18}, "max_budget is too large"),
        ({"budget_mode": "fixed"}, "requires a model with block selection"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Engine(model(), **options)


@pytest.mark.parametrize(
    ("changes", "budgets"),
    [
        ({"fork_layers": (), "budget": 1}, (1, 2, 1e6)),
        ({"fork_layers": (), "budget": 1, "copies": 3, "merge": "original"}, (1, 2)),
        ({"fork_layers": (1,)}, (2, 3, 100)),  # two streams at most: from 2 on there is no limit
        ({"fork_layers": (1, 2)}, (4, 8)),
    ],
    ids=["plain", "copies", "one fork layer", "two fork layers"],
)
def test_budgets_without_effect_are_no_mistakes(changes: dict[str, Any], budgets: tuple[float, ...]):
    own = lively_model(small_config(block_size=12, n_layer=3, **changes))
    engine = Engine(own, rows=2, chunk=4)
    requests = [Request(prompt=ids(1, 6), max_new=4, budget=budget, sampling=GREEDY) for budget in budgets]
    for request in requests:
        expected = by_hand(own, request)
        found = engine.submit(request).result()
        assert (found.ids, found.streams) == (expected.ids, expected.streams)


@pytest.mark.parametrize("timeout", [-1, math.nan])
def test_a_bad_timeout(timeout: float):
    with pytest.raises(ValueError, match=r"timeout = .*: give a number of seconds"):
        Engine(model(), rows=1).submit(Request(prompt=(1,)), timeout=timeout)


@pytest.mark.parametrize("budget_mode", ["proportional", "fixed"])
def test_block_selection_is_read_without_a_cache(budget_mode: str):
    own = lively_model(small_config(block_size=16, selection="block", budget_mode=budget_mode))
    engine = Engine(own, rows=2)
    assert engine.memory() is None
    requests = [Request(prompt=ids(seed, 3 + seed), max_new=4, budget=2, sampling=GREEDY) for seed in range(4)]
    handles = [engine.submit(request) for request in requests]
    engine.step()
    handles[1].cancel()
    for _ in engine.run():
        pass
    for handle, request in zip(handles, requests, strict=True):
        expected = by_hand(own, request)
        assert handle.completion.ids == (expected.ids if handle is not handles[1] else expected.ids[:1])
    with pytest.raises(ValueError, match="score_prompt needs the KV cache"):
        engine.submit(Request(prompt=(1, 2), score_prompt=True))


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_scored_prompt(chunk: int):
    engine = Engine(model(), rows=4, chunk=chunk)
    prompt = ids(7, 19)
    plain = engine.submit(Request(prompt=prompt, max_new=2, budget=2, sampling=GREEDY))
    plain.result()
    only = engine.submit(Request(prompt=prompt, max_new=0, budget=2, score_prompt=True, top=2))
    again = engine.submit(Request(prompt=prompt, max_new=2, budget=2, sampling=GREEDY, score_prompt=True))
    shorter = engine.submit(Request(prompt=prompt[3:10], max_new=1, budget=2, score_prompt=True))
    first = engine.submit(Request(prompt=prompt[:1], max_new=0, score_prompt=True))
    for _ in engine.run():
        pass
    log_probs = model()(torch.tensor([prompt]), budget=2, want=("log_probs",)).log_probs[0].detach()
    expected = log_probs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    for handle in (only, again):
        assert handle.n_shared == 0
        assert handle.completion.prompt_log_probs[0] is None
        assert handle.completion.prompt_log_probs[1:] == pytest.approx(expected, abs=1e-9)
    assert (only.completion.ids, only.completion.finish) == ([], "length")
    assert again.completion.ids == plain.completion.ids
    assert again.completion.prompt_top == [()] * 19
    other = model()(torch.tensor([prompt[3:10]]), budget=2, want=("log_probs",)).log_probs[0].detach()
    expected = other[:-1].gather(1, torch.tensor(prompt[4:10])[:, None])[:, 0].tolist()
    assert shorter.completion.prompt_log_probs[1:] == pytest.approx(expected, abs=1e-9)
    assert only.completion.prompt_top[0] == ()
    for place, top in enumerate(only.completion.prompt_top[1:]):
        best = log_probs[place].topk(2)
        assert [i for i, _ in top] == best.indices.tolist()
        assert [p for _, p in top] == pytest.approx(best.values.tolist(), abs=1e-9)
    assert (first.completion.prompt_log_probs, first.completion.finish) == ([None], "length")


def test_a_prompt_that_fills_the_context_can_be_scored():
    prompt = ids(8, BLOCK)
    engine = Engine(model(), rows=1)
    found = engine.submit(Request(prompt=prompt, max_new=0, score_prompt=True)).result()
    assert len(found.prompt_log_probs) == BLOCK
    with pytest.raises(ValueError, match="ask for 1 new token or more"):
        engine.submit(Request(prompt=(1,), max_new=0))


def test_a_chunk_is_not_read_twice_in_a_step_whoever_reads_it():
    """Prompts that cannot be copied themselves, since they end with it or are scored, are copied from."""
    prompt = ids(5, 22)
    for first in (Request(prompt=prompt[:8], max_new=1), Request(prompt=prompt, max_new=1, score_prompt=True)):
        engine = Engine(model(), rows=2, chunk=8)
        engine._scheduler.step_tokens = 24
        handles = [engine.submit(first), engine.submit(Request(prompt=prompt, max_new=1))]
        for _ in engine.run():
            pass
        assert [handle.n_shared for handle in handles] == [0, 8]


@pytest.mark.parametrize(("step_tokens", "expected"), [(8, [8, 16, 24]), (16, [16, 27, 27])])
def test_a_step_reads_no_more_than_it_may(step_tokens, expected):
    """Of the prompt of 11 tokens a chunk of 8 at most."""
    engine = Engine(model(), rows=4, chunk=8)
    engine._scheduler.step_tokens = step_tokens
    handles = engine.submit_all([Request(prompt=ids(n, n), max_new=2, sampling=GREEDY) for n in (5, 3, 11, 8)])
    read = []
    for _ in range(3):
        engine.step()
        read.append(engine.stats().tokens_read)
    assert read == expected
    assert len({handle.result().finish for handle in handles}) == 1


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one():
    engine = Engine(model(), rows=3, chunk=4)
    long, short, other = engine.submit_all([Request(prompt=ids(n, n), max_new=3, sampling=GREEDY) for n in (36, 3, 9)])
    n = 0
    while not short.completion.ids:
        engine.step()
        n += 1
    assert (n, long.n_read) == (2, 4)
    for _ in range(4):
        engine.step()
    assert (long.n_read, other.n_read) == (12, 8)  # by turns
    for handle, length in ((long, 36), (short, 3), (other, 9)):
        handle.result()
        check_alone(handle, Request(prompt=ids(length, length), max_new=3, sampling=GREEDY))


def test_a_beginning_is_forgotten_with_its_row():
    engine = Engine(model(), rows=1, chunk=4)
    for seed in range(5):
        engine.submit(Request(prompt=ids(seed, 13), max_new=1, sampling=GREEDY)).result()
    scheduler = engine._scheduler
    assert len(scheduler._held) == len(scheduler._of_row[0]) == 3


def test_all_or_none_are_submitted():
    engine = Engine(model(), rows=2, waiting=1)
    requests = [Request(prompt=(1,), max_new=2, sampling=GREEDY)] * 4
    with pytest.raises(QueueFull):
        engine.submit_all(requests)
    assert engine.is_idle
    handles = engine.submit_all(requests[:3])
    with pytest.raises(QueueFull, match="3 requests are waiting already"):
        engine.submit(requests[0])
    assert len({handle.result().text for handle in handles}) == 1
