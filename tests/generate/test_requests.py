"""Requests in, completions out: a row's text depends on its own request only."""

from dataclasses import replace

import pytest
import torch

from generate.completions import GREEDY, PIECES, assert_same_completion, brute_force, model_of, varied
from helpers import SAME_FUNCTION, SAME_ROW
from thoughtbubbles.generate import readers
from thoughtbubbles.generate.graphed import check_fits
from thoughtbubbles.generate.readers import Cached, Reading
from thoughtbubbles.generate.requests import Request, generate, stream
from thoughtbubbles.generate.sample import Sampling, uniform
from thoughtbubbles.model.budget import Budget


@pytest.fixture(scope="module")
def model():
    return model_of()


# ---- one and many ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["cached", "uncached"])
def test_a_mixed_batch_is_each_request_alone(model, method):
    requests = varied()
    together = generate(model, requests, tokenizer=PIECES, method=method)
    for request, completion in zip(requests, together, strict=True):
        [alone] = generate(model, [request], tokenizer=PIECES)
        assert_same_completion(completion, alone)
    assert len({len(completion.ids) for completion in together}) > 3, "rows ended by turns"
    assert {completion.finish for completion in together} >= {"length", "stop"}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_size_of_a_batch_does_not_matter(model, batch_size):
    requests = varied()
    whole = generate(model, requests, tokenizer=PIECES)
    for a, b in zip(generate(model, requests, tokenizer=PIECES, batch_size=batch_size), whole, strict=True):
        assert_same_completion(a, b)


@pytest.mark.parametrize("merge", ["mixture", "residual", "original"])
def test_cached_is_uncached_is_brute_force(merge):
    model = model_of(merge=merge)
    requests = [
        Request(prompt=[1, 2, 3], max_new=6, budget=1.5, sampling=Sampling(seed=1)),
        Request(prompt=[9], max_new=8, budget=4, sampling=Sampling(seed=2)),
        Request(prompt=[4, 4], max_new=4, sampling=GREEDY),
    ]
    cached, uncached = (generate(model, requests, method=m) for m in ("cached", "uncached"))
    for request, a, b in zip(requests, cached, uncached, strict=True):
        assert_same_completion(a, b)
        ids, log_probs, streams = brute_force(model, request, n_ids=14)
        assert a.ids == ids
        assert a.streams == streams
        torch.testing.assert_close(a.log_probs, log_probs, atol=SAME_ROW, rtol=0)


@pytest.mark.parametrize("mode", [None, "fixed", "proportional"])
@pytest.mark.parametrize("own_mode", ["proportional", "fixed"])
def test_a_block_model_is_uncached(own_mode, mode):
    """Its rule revises decisions: only the forward over the full prefix is exact, and it is the default."""
    model = model_of(selection="block", budget=1.5, budget_mode=own_mode)
    requests = [
        Request(prompt=[1, 2, 3], max_new=6, sampling=Sampling(seed=1)),
        Request(prompt=[9], max_new=8, budget=3, sampling=GREEDY),
    ]
    completions = generate(model, requests, budget_mode=mode)
    for request, completion in zip(requests, completions, strict=True):
        ids, log_probs, streams = brute_force(model, request, n_ids=14, budget_mode=mode)
        assert completion.ids == ids
        assert completion.streams == streams
        torch.testing.assert_close(completion.log_probs, log_probs, atol=SAME_ROW, rtol=0)


def test_a_block_model_through_the_cache_follows_the_causal_rule():
    model = model_of(selection="block", budget=1.5)
    request = Request(prompt=[1, 2, 3], max_new=12, sampling=Sampling(seed=1))
    [cached] = generate(model, [request], method="cached")
    ids, log_probs, streams = brute_force(model, request, n_ids=14, selection="causal")
    assert (cached.ids, cached.streams) == (ids, streams)
    torch.testing.assert_close(cached.log_probs, log_probs, atol=SAME_ROW, rtol=0)
    [own] = generate(model, [request])
    assert own.log_probs != pytest.approx(cached.log_probs, abs=SAME_ROW), "an approximation, and not by default"


@pytest.mark.parametrize("form", [{"fork_layers": ()}, {"fork_layers": (), "copies": 3, "merge": "original"}])
def test_baselines(form):
    model = model_of(**form)
    request = Request(prompt=[1, 2, 3], max_new=6, sampling=Sampling(seed=1))
    cached, uncached = (generate(model, [request], method=m)[0] for m in ("cached", "uncached"))
    assert_same_completion(cached, uncached)
    ids, _, streams = brute_force(model, request, n_ids=14)
    assert cached.ids == ids
    assert cached.streams == streams == [model.config.copies] * 6


def test_the_mode_of_the_model_does_not_matter(model):
    requests = [varied()[0], varied()[2]]
    training = generate(model.train(), requests)
    assert model.training, "and it is left as it was"
    for a, b in zip(generate(model.eval(), requests), training, strict=True):
        assert a == b


def test_seeds(model):
    requests = [Request(prompt=[1], max_new=10, sampling=Sampling(seed=seed)) for seed in (1, 2, 3, 1)]
    texts = [completion.ids for completion in generate(model, requests)]
    assert texts[0] == texts[3]
    assert len({tuple(text) for text in texts}) == 3


def test_every_new_token_has_its_own_draw():
    model = model_of(block_size=60)
    request = Request(prompt=[1], max_new=50, sampling=Sampling(seed=3))
    [completion] = generate(model, [request])
    log_probs = model(torch.tensor([[1, *completion.ids]]), want=("log_probs",)).log_probs[0, :-1].detach()
    draws = torch.tensor([uniform(3, n) for n in range(request.max_new)], dtype=torch.float64)
    expected = (log_probs.exp().cumsum(-1) <= draws[:, None]).sum(-1)
    assert completion.ids == expected.tolist()


def test_a_stream_is_the_completion_token_by_token(model):
    requests = varied()
    whole = generate(model, requests, tokenizer=PIECES)
    ids, texts, finish = [[] for _ in whole], [""] * len(whole), [None] * len(whole)
    for token in stream(model, requests, tokenizer=PIECES):
        assert finish[token.request] is None, "nothing comes after the last token"
        ids[token.request].append(token.id)
        texts[token.request] += token.text
        finish[token.request] = token.finish
        assert len(token.top) == requests[token.request].top
    assert ids == [completion.ids for completion in whole]
    assert texts == [completion.text for completion in whole]
    assert finish == [completion.finish for completion in whole]


def test_a_stream_that_is_left_harms_nothing(model):
    requests = varied()
    left = stream(model, requests, tokenizer=PIECES)
    next(left)
    whole = generate(model, requests, tokenizer=PIECES)
    rest = list(left)
    assert len(rest) + 1 == sum(len(completion.ids) for completion in whole)


def test_log_probabilities_and_top(model):
    request = Request(prompt=[1, 2], max_new=5, sampling=Sampling(seed=2, temperature=3, top_k=5), top=3)
    [completion] = generate(model, [request], tokenizer=PIECES)
    log_probs = model(torch.tensor([[1, 2, *completion.ids]]), want=("log_probs",)).log_probs[0, 1:-1]
    expected = log_probs.gather(1, torch.tensor(completion.ids)[:, None])[:, 0].tolist()
    torch.testing.assert_close(completion.log_probs, expected, atol=SAME_ROW, rtol=0)
    best = log_probs[:, : PIECES.size].sort(dim=-1, descending=True)
    for place, ids, values in zip(completion.top, best.indices, best.values, strict=True):
        assert [i for i, _ in place] == ids[:3].tolist()
        torch.testing.assert_close([p for _, p in place], values[:3].tolist(), atol=SAME_ROW, rtol=0)


def test_probabilities_add_up(model):
    [completion] = generate(model, [Request(prompt=[1], max_new=3, top=14)])
    for place in completion.top:
        assert sum(torch.tensor(p, dtype=torch.float64).exp() for _, p in place) == pytest.approx(1, abs=SAME_FUNCTION)


def test_ids_that_the_tokenizer_lacks_never_occur(model):
    requests = [Request(prompt=[12, 13], max_new=3, sampling=Sampling(seed=s, temperature=9)) for s in range(60)]
    without = {i for completion in generate(model, requests) for i in completion.ids}
    requests = [replace(request, end_ids=()) for request in requests]
    with_tokenizer = {i for completion in generate(model, requests, tokenizer=PIECES) for i in completion.ids}
    assert without == set(range(14))
    assert with_tokenizer == set(range(PIECES.size))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)], ids=["greedy", "drawn"])
def test_the_repetition_penalty_knows_prompt_and_text(model, sampling):
    """So heavy a penalty makes every token new, also after a neighbour that has none and ends early."""
    requests = [
        Request(prompt=[2, 5], max_new=1, sampling=sampling),
        Request(prompt=[0, 1, 2], max_new=11, sampling=replace(sampling, repetition_penalty=100)),
    ]
    model = model_of(merge="mixture")  # log-probabilities: the penalty makes all of them smaller
    ids = generate(model, requests)[1].ids
    assert sorted(ids) == list(range(3, 14))


def test_scored_prompts(model):
    requests = [
        Request(prompt=[1, 2, 3, 4], max_new=0, score_prompt=True, top=1),
        Request(prompt=[5, 6], max_new=2, sampling=GREEDY),
        Request(prompt=[3, 3, 3], max_new=1, score_prompt=True, sampling=GREEDY),
    ]
    ended = []
    found = generate(model, requests, batch_size=2, finished=lambda number, _: ended.append(number))
    assert sorted(ended) == [0, 1, 2]
    assert [completion.finish for completion in found] == ["length"] * 3
    assert [len(completion.prompt_log_probs) for completion in found] == [4, 0, 3]
    assert [len(completion.ids) for completion in found] == [0, 2, 1]
    log_probs = model(torch.tensor([[1, 2, 3, 4]]), want=("log_probs",)).log_probs[0].detach()
    expected = [float(log_probs[i, token]) for i, token in enumerate([2, 3, 4])]
    assert found[0].prompt_log_probs[1:] == pytest.approx(expected, abs=SAME_FUNCTION)
    assert found[0].prompt_top[1] == ((int(log_probs[0].argmax()), pytest.approx(float(log_probs[0].max()))),)
    assert [token.request for token in stream(model, requests)].count(0) == 0
    [refused, _, _] = generate(model, requests, method="uncached", on_error="return")
    assert refused.error == "score_prompt needs the KV cache: leave it out"


# ---- storage that grows ---------------------------------------------------------------------------------------------


def test_storage_that_grows_changes_nothing(model, monkeypatch):
    """Bitwise, with rows that end by turns."""
    requests = [request for request in varied() if len(request.prompt) < 4]
    expected = generate(model, requests, tokenizer=PIECES)
    monkeypatch.setattr(readers, "AT_FIRST", 1)
    assert generate(model, requests, tokenizer=PIECES) == expected
    reader, room = Cached(model, rows=2, capacity=11, budget=Budget.of(2), grows=True), []
    for row in range(2):
        reader.open(row, 1.5)
    for n in range(1, 12):
        rows = [0, 1] if n < 9 else [1]
        reader.read(Reading([n % 5] * len(rows), rows, [1] * len(rows), list(range(len(rows))), longest=n))
        room.append(reader.cache.capacity)
    assert room == [1, 2, 4, 4, 8, 8, 8, 8, 11, 11, 11]
    assert reader.cache.n_tokens.tolist() == [8, 11]
    reader.open(0, 2)  # the storage that has grown has room for the largest budget, though no row had it then
    reader.read(Reading([3] * 11, [0], [11], [10], longest=11))
    assert int(reader.cache.streams(11)[0].sum()) > 16


def test_a_vast_block_takes_no_memory_before_it_is_needed():
    model = model_of(block_size=2**24)
    request = Request(prompt=[1, 2], max_new=5, sampling=Sampling(seed=1))
    [five] = generate(model, [request])
    [ended] = generate(model, [replace(request, max_new=None, end_ids=(five.ids[-1],))])
    assert ended.finish == "end"
    assert ended.ids == five.ids[: five.ids.index(five.ids[-1]) + 1]
    reader = Cached(model, rows=1, capacity=2**24, budget=Budget.of(2), grows=True)
    assert reader.cache.memory().total < 2**22


def test_compiled_steps_say_what_does_not_fit():
    """They need all storage in advance: here 2.0 GiB of 1.5."""
    with pytest.raises(ValueError, match=r"3 rows of 16,777,216 tokens take 2.0 GiB, and 1.5 GiB are free.*max_new"):
        check_fits(2**31, free=3 * 2**29, rows=3, capacity=2**24)
    check_fits(2**31, free=2**31, rows=3, capacity=2**24)
