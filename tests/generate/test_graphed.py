"""Engines with compiled steps: what surrounds the graphs, with steps that are not captured."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from generate.test_engine import Interleaving, alone, check_alone, ids, mixed, model
from generate.uncaptured import EagerStep, on_a_cpu
from thoughtbubbles.generate.engine import GATHER, Engine
from thoughtbubbles.generate.graphed import Graphed
from thoughtbubbles.generate.jobs import Request
from thoughtbubbles.generate.readers import Reading
from thoughtbubbles.generate.sample import Sampling

GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def uncaptured(monkeypatch):
    on_a_cpu(monkeypatch)


def compiled(**options) -> tuple[Engine, EagerStep]:
    engine = Engine(model(), compiled=True, **options)
    assert isinstance(engine._reader, Graphed)
    assert isinstance(engine._reader.step, EagerStep)
    return engine, engine._reader.step


@pytest.mark.parametrize(("rows", "chunk"), [(1, 64), (3, 5), (7, 8)])
def test_requests_together_get_what_they_get_alone(rows, chunk):
    engine, step = compiled(rows=rows, chunk=chunk)
    handles = [engine.submit(request) for request in mixed()]
    for _ in engine.run():
        pass
    for handle, request in zip(handles, mixed(), strict=True):
        check_alone(handle, request)
    assert step.replayed, "no step was a graph"


class CompiledInterleaving(Interleaving):
    options = {"compiled": True}  # noqa: RUF012


@pytest.mark.slow
def test_any_interleaving_gives_each_row_what_it_gets_alone():
    run_state_machine_as_test(
        CompiledInterleaving, settings=settings(max_examples=15, stateful_step_count=25, deadline=None)
    )


def test_tokens_are_read_while_the_host_is_busy():
    """A step per token: what is read ahead is not read again. The last token of a text is never read."""
    engine, step = compiled(rows=2)
    handle = engine.submit(Request(prompt=ids(0, 3), max_new=6, sampling=GREEDY))
    engine.step()
    assert len(step.replayed) == 1, "the first token is not read yet"
    assert handle.result().ids == alone(Request(prompt=ids(0, 3), max_new=6, sampling=GREEDY)).ids
    assert len(step.replayed) == 5


def test_a_row_that_was_read_ahead_in_vain_is_empty_again_for_the_next_text():
    """Its first text ends early, with a prompt of one token after it, which is a single token too."""
    first = Request(prompt=ids(3, 12), max_new=20, budget=4, sampling=GREEDY)
    end = alone(first).ids[4]
    engine, _ = compiled(rows=1)
    requests = [
        Request(prompt=first.prompt, max_new=20, budget=4, sampling=GREEDY, end_ids=(end,)),
        Request(prompt=ids(1, 1), max_new=5, budget=2, sampling=GREEDY),
    ]
    handles = [engine.submit(request) for request in requests]
    for handle, request in zip(handles, requests, strict=True):
        handle.result()
        check_alone(handle, request)


def test_after_a_failure_other_requests_get_what_they_get_alone(monkeypatch):
    """Such as too little memory for a graph: the requests of that step fail, and nobody else notices."""
    request = Request(prompt=ids(0, 3), max_new=6, sampling=GREEDY)
    engine, _ = compiled(rows=2)
    with monkeypatch.context() as patch:
        patch.setattr(EagerStep, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        failed = engine.submit(request)
        assert failed.result().error == "out of memory"
    again = engine.submit(request)
    again.result()
    check_alone(again, request)
    assert engine.stats().free == 2


def test_a_failure_of_what_was_read_ahead_ends_the_rows_that_it_concerns(monkeypatch):
    """It is noticed when the next request is let in."""
    engine, step = compiled(rows=3)
    first = engine.submit(Request(prompt=ids(0, 3), max_new=9, sampling=GREEDY))
    engine.step()
    late = engine.submit(Request(prompt=ids(1, 2), max_new=3, sampling=GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(step, "result", lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
        engine.step()
    assert (first.completion.finish, late.completion.finish) == ("error", "error")
    request = Request(prompt=ids(1, 5), max_new=4, sampling=GREEDY)
    handle = engine.submit(request)
    handle.result()
    check_alone(handle, request)


def test_warm_up_makes_all_graphs_and_changes_nothing():
    engine, step = compiled(rows=2)
    engine.warm_up()
    assert sorted(step._captured) == step.sizes
    request = Request(prompt=ids(0, 3), max_new=6, sampling=GREEDY)
    handle = engine.submit(request)
    handle.result()
    check_alone(handle, request)


def test_parts_of_a_reading_are_packed_anew():
    reading = Reading(ids=[5, 6, 7, 8, 9, 1], rows=[4, 0, 2], lengths=[2, 1, 3], predict=[1, 2, 5, 4], longest=9)
    assert reading.part([0, 2]) == (Reading([5, 6, 8, 9, 1], [4, 2], [2, 3], [1, 4, 3], 9), [0, 2, 3])
    assert reading.part([1]) == (Reading([7], [0], [1], [0], 9), [1])


def test_prompts_wait_for_each_other_while_others_generate():
    """So that a step is worth its time; no longer than a few steps, and not at all if nobody else is waiting for it."""
    engine, _ = compiled(rows=3, chunk=16)
    engine._scheduler.step_tokens = 16
    engine.submit(Request(prompt=ids(0, 2), max_new=30, sampling=GREEDY))
    engine.step()
    assert engine.stats().generating == 1
    engine.submit(Request(prompt=ids(1, 5), max_new=2, sampling=GREEDY))
    engine.step()
    assert engine.stats().reading == 1
    engine.submit(Request(prompt=ids(2, 12), max_new=2, sampling=GREEDY))  # now they fill a step
    engine.step()
    assert engine.stats().tokens_read == 7
    for _ in range(GATHER - 1):
        engine.step()
        assert engine.stats().tokens_read == 7
    for _ in range(3):
        engine.step()
    assert engine.stats().tokens_read == 19


def test_a_prompt_of_several_chunks_does_not_wait_for_each_of_them():
    engine, _ = compiled(rows=3, chunk=4)
    engine.submit(Request(prompt=ids(0, 2), max_new=30, sampling=GREEDY))
    engine.step()
    long = engine.submit(Request(prompt=ids(1, 14), max_new=2, sampling=GREEDY))
    for n in (4, 8, 12, 14):
        engine.step()
        assert long.n_read == n
    short = engine.submit(Request(prompt=ids(2, 3), max_new=2, sampling=GREEDY))
    engine.step()
    assert short.n_read == 0
