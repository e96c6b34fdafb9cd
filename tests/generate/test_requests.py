"""Requests in, completions out: a row's text depends on its own request only."""

import re
from dataclasses import replace

import pytest
import torch

from helpers import SAME_FUNCTION, SAME_ROW, lively_model, small_config
from thoughtbubbles.data.tokenizer import Tokenizer, tokenizer
from thoughtbubbles.generate import decoders
from thoughtbubbles.generate.decoders import Cached, check_fits
from thoughtbubbles.generate.requests import (
    DRAWS_AT_ONCE,
    Completion,
    Request,
    budget_problem,
    budget_remark,
    check,
    generate,
    stream,
)
from thoughtbubbles.generate.sample import Sampling, uniform

# Tokens of several characters, and of less than one; the models below have three ids more.
PIECES = Tokenizer("pieces", [b"a", b"b", b"ab", b"ba", b"c", b"ca", b"\xc3", b"\xa9", b"d", b"bd"])
GREEDY = Sampling(temperature=0)


def model_of(**changes):
    return lively_model(
        small_config(**{"n_layer": 3, "fork_layers": (1, 2), "vocab_size": 14, "block_size": 20, **changes}), seed=11
    )


@pytest.fixture(scope="module")
def model():
    return model_of()


def varied() -> list[Request]:
    """Prompts, lengths, budgets and settings all different; some end long before others."""
    return [
        Request(prompt=[1, 2, 3], max_new=9, budget=1, sampling=Sampling(seed=3), end_ids=()),
        Request(prompt=[5], max_new=12, budget=4, sampling=Sampling(seed=4, top_p=0.8), end_ids=(), top=2),
        Request(prompt=[4, 4, 4, 4, 9, 1, 0], max_new=2, sampling=GREEDY),
        Request(prompt=[7, 1] * 5, budget="7/3", sampling=Sampling(seed=5, temperature=1.5, repetition_penalty=1.4)),
        Request(prompt=list(range(10)), max_new=6, budget=1.5, sampling=Sampling(seed=6, top_k=3), end_ids=(2, 9)),
        Request(
            prompt=[3, 0],
            max_new=11,
            budget=1.15,
            sampling=Sampling(seed=7, min_p=0.01, temperature=3),
            stop=("ab", "d"),
            end_ids=(),
            top=4,
        ),
    ]


def assert_same_completion(ours: Completion, theirs: Completion) -> None:
    for name in ("ids", "text", "streams", "finish", "error"):
        assert getattr(ours, name) == getattr(theirs, name), name
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=SAME_ROW, rtol=0)
    assert [[i for i, _ in place] for place in ours.top] == [[i for i, _ in place] for place in theirs.top]
    for a, b in zip(ours.top, theirs.top, strict=True):
        torch.testing.assert_close([p for _, p in a], [p for _, p in b], atol=SAME_ROW, rtol=0)


def brute_force(model, request: Request, *, n_ids: int, **options) -> tuple[list[int], list[float], list[int]]:
    """Ids, log-probabilities and streams of one request, each token from a forward over all before it."""
    ids, log_probs, streams = [int(i) for i in request.prompt], [], []
    budget = request.budget
    for n in range(request.max_new):
        out = model(torch.tensor([ids]), budget=budget, want=("log_probs",), trace=True, **options)
        row = out.log_probs[0, -1].detach()
        aim, chosen = uniform(request.sampling.seed, n) * float(row[:n_ids].exp().sum()), 0
        if request.sampling.temperature == 0:
            chosen = max(range(n_ids), key=lambda i: float(row[i]))
        else:
            while (aim := aim - float(row[chosen].exp())) > 0:
                chosen += 1
        ids.append(chosen)
        log_probs.append(float(row[chosen]))
        streams.append(int(out.forks[-1].bubble_size[0, -1]) if out.forks else model.config.copies)
    return ids[len(request.prompt) :], log_probs, streams


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
    """Draws are made many at a time; after these the next ones come, and not the same again."""
    model = model_of(block_size=2 * DRAWS_AT_ONCE + 20)
    request = Request(prompt=[1], max_new=2 * DRAWS_AT_ONCE + 9, sampling=Sampling(seed=3))
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


# ---- storage that grows ---------------------------------------------------------------------------------------------


def test_storage_that_grows_changes_nothing(model, monkeypatch):
    """Bitwise, with rows that end by turns."""
    requests = [request for request in varied() if len(request.prompt) < 4]
    expected = generate(model, requests, tokenizer=PIECES)
    monkeypatch.setattr(decoders, "AT_FIRST", 1)
    assert generate(model, requests, tokenizer=PIECES) == expected
    decoder, room = Cached(model, capacity=11), []
    decoder.start([[1, 2], [3]], [2, 1.5])
    for n in range(9):
        room.append(decoder.cache.capacity)
        if n == 3:
            decoder.keep(torch.tensor([1]))
        decoder.step(torch.tensor([1, 2][: decoder.cache.rows]))
    assert room == [4, 4, 4, 8, 8, 8, 8, 11, 11]
    with pytest.raises(ValueError, match="the cache is full: its rows hold 11 tokens"):
        decoder.step(torch.tensor([1])), decoder.step(torch.tensor([1]))


def test_a_vast_block_takes_no_memory_before_it_is_needed():
    model = model_of(block_size=2**24)
    request = Request(prompt=[1, 2], max_new=5, sampling=Sampling(seed=1))
    [five] = generate(model, [request])
    [ended] = generate(model, [replace(request, max_new=None, end_ids=(five.ids[-1],))])
    assert ended.finish == "end"
    assert ended.ids == five.ids[: five.ids.index(five.ids[-1]) + 1]
    decoder = Cached(model, capacity=2**24)
    decoder.start([[1, 2]], [2])
    assert decoder.cache.memory().total < 2**22


def test_compiled_steps_say_what_does_not_fit():
    """They need all storage in advance: here 2.0 GiB of 1.5."""
    with pytest.raises(ValueError, match=r"3 rows of 16,777,216 tokens take 2.0 GiB, and 1.5 GiB are free.*max_new"):
        check_fits(2**31, free=3 * 2**29, rows=3, capacity=2**24)
    check_fits(2**31, free=2**31, rows=3, capacity=2**24)


# ---- where a completion ends ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def free(model) -> list[tuple[Request, Completion]]:
    """Texts that nothing ends but the block."""
    requests = [
        Request(prompt=[1], max_new=19, end_ids=(), sampling=Sampling(seed=seed, temperature=2)) for seed in range(6)
    ]
    completions = generate(model, requests, tokenizer=PIECES)
    for completion in completions:
        assert completion.finish == "length"
        assert completion.text == PIECES.decode(completion.ids)
    return list(zip(requests, completions, strict=True))


@pytest.mark.parametrize("seed", [0, 3])
def test_stop_strings_cut_the_free_text(model, free, seed):
    """Every piece of the free text as a stop string, all in one batch, with one that does not stop at all."""
    request, whole = free[seed]
    clean = whole.text.replace("�", " ").split(PIECES.decode([PIECES.end_of_text]))[0]
    stops = sorted({clean[i : i + n] for i in range(len(clean)) for n in (1, 2, 5)})[:40]
    requests = [replace(request, stop=(s,)) for s in stops if " " not in s] + [replace(request, stop=("zzz",))]
    *stopped, unstopped = generate(model, requests, tokenizer=PIECES)
    assert_same_completion(unstopped, whole)
    assert len(stopped) > 3
    for asked, completion in zip(requests, stopped, strict=False):
        [stop] = asked.stop
        n = len(completion.ids)
        assert completion.finish == "stop"
        assert completion.text == whole.text.partition(stop)[0]
        assert completion.ids == whole.ids[:n]
        assert stop in PIECES.decode(whole.ids[:n])
        assert stop not in PIECES.decode(whole.ids[: n - 1]), "the very token that completes it is the last"
        torch.testing.assert_close(completion.log_probs, whole.log_probs[:n], atol=SAME_ROW, rtol=0)


def test_a_stop_string_is_never_shown_not_even_partly(model, free):
    request, whole = free[1]
    stop = whole.text.split("�")[0].split("<")[0][-4:]
    assert len(stop) == 4
    shown = ""
    for token in stream(model, [replace(request, stop=(stop, "no such text"))], tokenizer=PIECES):
        shown += token.text
        assert whole.text.partition(stop)[0].startswith(shown)
    assert token.finish == "stop"
    assert shown == whole.text.partition(stop)[0]


def test_a_stop_string_in_the_first_token(model, free):
    request, whole = free[2]
    first = PIECES.decode(whole.ids[:1])
    assert first != "�"
    [completion] = generate(model, [replace(request, stop=(first[:1],))], tokenizer=PIECES)
    assert (completion.text, completion.ids, completion.finish) == ("", whole.ids[:1], "stop")


def test_stop_strings_in_the_prompt_do_not_count(model):
    request = Request(prompt=[0, 1, 0, 1], max_new=3, sampling=GREEDY, stop=("abab",))
    [completion] = generate(model, [request], tokenizer=PIECES)
    assert len(completion.ids) == 3 or "abab" in PIECES.decode(completion.ids)


def test_half_a_character_at_the_end_is_shown(model):
    """Two tokens make one é; a row that ends between them shows a replacement character."""
    requests = [
        Request(prompt=[1], max_new=3, end_ids=(), sampling=Sampling(seed=seed, temperature=4)) for seed in range(200)
    ]
    completions = generate(model, requests, tokenizer=PIECES, batch_size=200)
    request = next(r for r, c in zip(requests, completions, strict=True) if c.ids[1:] == [6, 7])
    whole = list(stream(model, [request], tokenizer=PIECES))
    half = list(stream(model, [replace(request, max_new=2)], tokenizer=PIECES))
    assert [token.text for token in whole] == [whole[0].text, "", "é"]
    assert [token.text for token in half] == [whole[0].text, "�"]


def test_end_ids(model, free):
    request, whole = free[5]
    ends = whole.ids[1:8]
    completions = generate(model, [replace(request, end_ids=(99, end)) for end in ends], tokenizer=PIECES)
    for end, completion in zip(ends, completions, strict=True):
        n = whole.ids.index(end) + 1
        assert completion.finish == "end"
        assert completion.ids == whole.ids[:n]
        assert completion.text == PIECES.decode(whole.ids[: n - 1])


def test_end_of_text_ends_a_row_by_default(model, free):
    ended = 0
    completions = generate(model, [replace(request, end_ids=None) for request, _ in free], tokenizer=PIECES)
    for (_, whole), completion in zip(free, completions, strict=True):
        if PIECES.end_of_text in whole.ids:
            n = whole.ids.index(PIECES.end_of_text) + 1
            assert (completion.finish, completion.ids) == ("end", whole.ids[:n])
            assert completion.text == PIECES.decode(whole.ids[: n - 1])
            ended += 1
        else:
            assert_same_completion(completion, whole)
    assert ended > 0
    for completion in generate(model, [Request(prompt=[1], sampling=Sampling(seed=s), max_new=6) for s in range(20)]):
        assert (len(completion.ids), completion.text) == (6, None), "without a tokenizer no id is special"


def test_max_new_and_the_block(model):
    """Without a limit a row continues to block_size tokens; the last one is generated though no step could read it."""
    requests = [
        Request(prompt=[1] * 13, sampling=GREEDY),
        Request(prompt=[1] * 19, sampling=GREEDY),
        Request(prompt=[1] * 19, sampling=GREEDY, max_new=1),
        Request(prompt=[1] * 13, sampling=GREEDY, max_new=3),
    ]
    for method in ("cached", "uncached"):
        completions = generate(model, requests, method=method)
        assert [len(completion.ids) for completion in completions] == [7, 1, 1, 3]
        assert all(completion.finish == "length" for completion in completions)
        assert completions[3].ids == completions[0].ids[:3]


def test_text_prompts():
    model = lively_model(small_config(vocab_size=260, block_size=24))
    of = tokenizer("bytes")
    words, ids = generate(
        model,
        [Request(prompt=prompt, max_new=5, sampling=GREEDY) for prompt in ("héllo", of.encode("héllo"))],
        tokenizer=of,
    )
    assert_same_completion(words, ids)


@pytest.mark.parametrize(
    "run", [generate, lambda *args, **options: list(stream(*args, **options))], ids=["generate", "stream"]
)
def test_every_text_prompt_is_tokenized_once(run, monkeypatch):
    encoded, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [encoded.append(text), encode(self, text)][1])
    requests = [Request(prompt=prompt, max_new=2) for prompt in ("one", [1, 2], "two")]
    run(model_of(vocab_size=260), requests, tokenizer=tokenizer("bytes"))
    assert encoded == ["one", "two"]


# ---- input validation -------------------------------------------------------------------------------------------

BAD = {
    "empty": (Request(prompt=[]), "the prompt is empty"),
    "id": (Request(prompt=[3, 14]), "the prompt has the id 14: the vocabulary has ids from 0 to 13"),
    "negative id": (Request(prompt=[-1]), "the prompt has the id -1"),
    "max_new": (Request(prompt=[1], max_new=0), "max_new = 0: ask for 1 new token or more"),
    "too many": (Request(prompt=[1] * 5, max_new=16), "more than block_size = 20.*ask for at most 15"),
    "too long": (Request(prompt=[1] * 20), "more than block_size = 20.*shorten the prompt to 19"),
    "far too long": (Request(prompt=[1] * 50, max_new=1), "more than block_size = 20.*shorten the prompt to 19"),
    "low budget": (Request(prompt=[1], budget=0.5), "budget = 0.5 is below 1"),
    "long budget": (Request(prompt=[1], budget="1e99999999"), "budget = '1e99999999' is not a number"),
    "no number": (Request(prompt=[1], budget="many"), "is not a number"),
    "endless budget": (Request(prompt=[1], budget=float("inf")), "is not a number"),
    "top": (Request(prompt=[1], top=-1), "top = -1"),
    "tops": (Request(prompt=[1], top=15), "top = 15"),
    "text": (Request(prompt="a"), "text needs a tokenizer"),
    "stop": (Request(prompt=[1], stop=("a",)), "text needs a tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_before_any_work(model, name):
    request, words = BAD[name]
    good = Request(prompt=[1], max_new=2)
    with pytest.raises(ValueError, match=words) as alone:
        generate(model, [request])
    assert not str(alone.value).startswith("request")
    with pytest.raises(ValueError, match=f"^request 1: .*{words}"):
        generate(model, [good, request, good])
    with pytest.raises(ValueError, match=words):
        stream(model, [good, request])  # immediately, not at the first token


def test_bad_requests_do_not_disturb_the_others(model):
    good = [replace(request, stop=()) for request in varied()]
    mixed, order = [], []
    for i, (bad, _) in enumerate(BAD.values()):
        mixed.append(bad)
        if i < len(good):
            order.append(len(mixed))
            mixed.append(good[i])
    completions = generate(model, mixed, on_error="return", batch_size=4)
    for a, b in zip([completions[i] for i in order], generate(model, good), strict=True):
        assert_same_completion(a, b)
    bad = [completion for i, completion in enumerate(completions) if i not in order]
    for completion, (_, words) in zip(bad, BAD.values(), strict=True):
        with pytest.raises(ValueError, match=words):
            raise ValueError(completion.error)
        assert completion == Completion(finish="error", error=completion.error)


def test_only_bad_requests_and_none_at_all(model):
    assert generate(model, []) == []
    [completion] = generate(model, [Request(prompt=[])], on_error="return")
    assert completion.finish == "error"


def test_budgets_that_are_no_limit():
    """Allowed wherever a budget can be given; `budget_remark` reports them."""
    idle = "budget = {}: this model has no fork layers, so a budget changes nothing"
    assert budget_remark(small_config(fork_layers=(), merge="original", copies=3), 3) == idle.format(3)
    for forks, budget, said in (
        ((), 2, idle.format(2)),
        ((), 1, idle.format(1)),
        ((2,), 2, None),
        ((2,), "5/2", "budget = 5/2: 1 fork layer make at most 2 streams per token, so this is no limit"),
        ((1, 2), 3.9, None),
        ((1, 2), 10**9, "budget = 1000000000: 2 fork layers make at most 4 streams per token, so this is no limit"),
    ):
        model = model_of(fork_layers=forks)
        asked, most = (Request(prompt=[1, 2], max_new=4, budget=r) for r in (budget, model.config.max_bubble))
        assert budget_problem(model.config, budget) is None
        assert check(model.config, asked, None) == [1, 2]
        assert budget_remark(model.config, budget) == said
        if said:
            assert generate(model, [asked]) == generate(model, [most])


def test_the_wrong_tokenizer_is_refused(model):
    with pytest.raises(ValueError, match="the tokenizer 'bytes' has 257 ids, the model 14"):
        generate(model, [Request(prompt="a")], tokenizer=tokenizer("bytes"))


def test_budgets_up_to_what_the_forks_allow(model):
    requests = [Request(prompt=[1, 2], max_new=6, budget=budget, sampling=GREEDY) for budget in (1, 4, "4.0")]
    one, most, again = generate(model, requests)
    assert one.streams == [1] * 6
    assert most.streams == again.streams == [4] * 6


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"budget_mode": "fixed"}, "a fixed budget applies to the full context"),
        ({}, {"budget_mode": "fixed", "method": "uncached"}, "a fixed budget applies to the full context"),
        ({"selection": "block"}, {"budget_mode": "fixed", "method": "cached"}, "use the method 'uncached'"),
        ({"selection": "block", "budget_mode": "fixed"}, {"method": "cached"}, "use the method 'uncached'"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, options, words):
    with pytest.raises(ValueError, match=words):
        generate(model_of(**changes), [Request(prompt=[1], max_new=2)], **options)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "fast"}, "method = 'fast': choose one of"),
        ({"budget_mode": "half"}, "budget_mode = 'half': choose one of"),
        ({"on_error": "ignore"}, "on_error = 'ignore'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": -1}, "batch_size = -1"),
        ({"batch_size": True}, "batch_size = True"),
        ({"batch_size": 2.5}, "batch_size = 2.5"),
        ({"batch_size": "a"}, "batch_size = 'a'"),
        ({"on_error": []}, r"on_error = \[\]"),
        ({"method": []}, r"method = \[\]: choose one of"),
        ({"budget_mode": 5}, "budget_mode = 5: choose one of"),
        ({"finished": 3}, "finished = 3: give a function"),
        ({"tokenizer": "gpt2"}, "tokenizer = 'gpt2': give a Tokenizer"),
        ({"compiled": "yes"}, "compiled = 'yes': give True or False"),
        ({"compiled": True}, "needs a CUDA GPU"),
        ({"compiled": True, "method": "uncached"}, "needs the cache"),
    ],
)
def test_options_out_of_range_are_refused(model, options, words):
    with pytest.raises(ValueError, match=words):
        generate(model, [Request(prompt=[1], max_new=2)], **options)


WRONG_KINDS = [
    ({"top": 258}, "top = 258: give a whole number from 0 to 257"),
    ({"top": 1.5}, "top = 1.5"),
    ({"max_new": 2.5}, "max_new = 2.5"),
    ({"budget": [2, 3]}, "give one number per request"),
    ({"prompt": [1.9]}, "neither text nor whole numbers"),
    ({"prompt": None}, "prompt = None is neither text nor whole numbers"),
    ({"prompt": 5}, "prompt = 5"),
    ({"prompt": b"ab"}, "prompt = b'ab'"),
    ({"prompt": [True]}, "prompt = [True]"),
    ({"prompt": [[1], [2]]}, "prompt = [[1], [2]]"),
    ({"prompt": ["a"]}, "prompt = ['a']"),
    ({"prompt": {1: 2}}, "prompt = {1: 2}"),
    ({"prompt": (i for i in (1, 2))}, "prompt = <generator"),
    ({"prompt": torch.tensor(1)}, "prompt = tensor(1)"),
    ({"prompt": [10**5000]}, "the prompt has the id a number of very many digits"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"max_new": True}, "max_new = True"),
    ({"max_new": "3"}, "max_new = '3'"),
    ({"max_new": 10**30}, "more than block_size = 20"),
    ({"max_new": 10**5000}, "more than block_size = 20"),
    ({"budget": True}, "budget = True is not a number"),
    ({"budget": {}}, "budget = {} is not a number"),
    ({"budget": 10**5000}, "is not a number"),
    ({"budget": "1e99999999"}, "is not a number"),
    ({"budget": torch.tensor(2)}, "budget is a tensor"),
    ({"top": "3"}, "top = '3'"),
    ({"top": 10**5000}, "top = a number of very many digits"),
    ({"end_ids": "ab"}, "end_ids = 'ab'"),
    ({"end_ids": (True,)}, "end_ids = (True,)"),
    ({"end_ids": (1.0,)}, "end_ids = (1.0,)"),
    ({"end_ids": [1]}, "end_ids = [1]"),
    ({"stop": torch.ones(2)}, "give a tuple of texts"),
    ({"stop": (b"a",)}, "give a tuple of texts"),
    ({"sampling": {"seed": 1}}, "sampling = {'seed': 1}: give a Sampling"),
    ({"stop": ("",)}, "none of them empty"),
    ({"stop": "\n"}, "give a tuple of texts"),
    ({"stop": None}, "give a tuple of texts"),
    ({"stop": (1,)}, "give a tuple of texts"),
    ({"end_ids": 5}, "end_ids = 5: give a tuple of ids"),
    ({"end_ids": ([1],)}, "give a tuple of ids"),
    ({"sampling": None}, "give a Sampling"),
    ({"top": True}, "top = True"),
]


@pytest.mark.usefixtures("no_shape_checks")
def test_requests_of_the_wrong_kind_harm_no_other():
    model, good = model_of(vocab_size=300), {"prompt": [1], "max_new": 3}
    [alone] = generate(model, [Request(**good)], tokenizer=tokenizer("bytes"))
    bad = [Request(**{**good, **wrong}) for wrong, _ in WRONG_KINDS]
    mixed = [Request(**good), *bad, Request(**good)]
    first, *refused, last = generate(model, mixed, tokenizer=tokenizer("bytes"), on_error="return")
    assert first.ids == last.ids == alone.ids
    for (_, words), completion in zip(WRONG_KINDS, refused, strict=True):
        assert words in completion.error
        assert len(completion.error) < 300
        assert completion == Completion(finish="error", error=completion.error)
    for request, (_, words) in zip(bad, WRONG_KINDS, strict=True):
        with pytest.raises(ValueError, match=re.escape(words)):
            stream(model, [request], tokenizer=tokenizer("bytes"))


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("wrong", [None, "abc", {"prompt": [1]}, Request, 3], ids=repr)
def test_what_is_not_a_request_harms_no_other(model, wrong):
    good = Request(prompt=[1], max_new=3)
    other, refused = generate(model, [good, wrong], on_error="return")
    assert [other] == generate(model, [good])
    assert "is not a Request: give Request(prompt=" in refused.error
    for requests in (good, wrong):
        if not isinstance(requests, list):
            with pytest.raises(ValueError, match=r"^requests is a .*: give a list of Request$"):
                generate(model, requests)


def test_no_requests_give_nothing(model):
    assert generate(model, []) == list(stream(model, [])) == []


def test_a_plain_model_needs_no_fixed_budget():
    """`budget_mode` means nothing where nothing forks."""
    model = model_of(fork_layers=(), selection="block", budget_mode="fixed", merge="original")
    [completion] = generate(model, [Request(prompt=[1], max_new=2)])
    assert len(completion.ids) == 2


def test_nan_weights_are_reported():
    model = model_of()
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(model, [Request(prompt=[1], max_new=2)])


def test_probabilities_add_up(model):
    [completion] = generate(model, [Request(prompt=[1], max_new=3, top=14)])
    for place in completion.top:
        assert sum(torch.tensor(p, dtype=torch.float64).exp() for _, p in place) == pytest.approx(1, abs=SAME_FUNCTION)
