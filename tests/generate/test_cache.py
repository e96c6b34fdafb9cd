"""The cache as a value: its contents, its memory, and what reorder, clone and crop make of it."""

from collections import Counter

import pytest
import torch

from generate.reading import assert_same_state, padded, read_at_once, read_in_steps, state
from helpers import ORACLE_OUTPUT, SAME_ROW, ask_oracle, lively_model, named, random_ids, small_config
from thoughtbubbles.generate.cache import CacheMemory, cache_memory, new_cache
from thoughtbubbles.generate.decode import decode_step, prefill
from thoughtbubbles.model.budget import Budget


@pytest.fixture
def model():
    return lively_model(small_config(budget=1.5))


def started(model, tokens: int = 6, *, rows: int = 3, **options):
    ids = random_ids(model.config, rows, tokens)
    return ids, prefill(model, ids, **options)[1]


def going_on(model, cache, ids):
    """Log-probabilities after each further token: (rows, new tokens, V)."""
    predicted = []
    for new in ids.unbind(1):
        prediction, cache = decode_step(model, cache, new)
        predicted.append(prediction.logits.log_softmax(-1))
    return torch.stack(predicted, dim=1), cache


# ---- contents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"fork_layers": (0, 2)}, {"fork_layers": ()}], ids=["three", "first", "plain"])
def test_steps_leave_what_a_prefill_leaves(form):
    model = lively_model(small_config(**form))
    budgets = [1, 1.5, 2, 4, "7/3"]
    rows = list(random_ids(model.config, 5, 10))
    read = read_in_steps(model, rows, prompts=[1, 4, 9, 2, 6], budget=budgets)
    _, at_once = prefill(model, torch.stack(rows), budget=budgets)
    for i in range(5):
        assert_same_state(read.cache, i, at_once, i)


def test_the_contents_are_those_of_the_parallel_forward():
    """Decisions, levels of all candidates and log scores, against the trace of each row alone."""
    model = lively_model(small_config(), seed=5)
    budgets, lengths, prompts = [1, 1.5, 8], [13, 16, 11], [2, 9, 1]
    rows = [random_ids(model.config, 1, n, seed=n)[0] for n in lengths]
    cache = read_in_steps(model, rows, prompts=prompts, budget=budgets).cache
    for i, row in enumerate(rows):
        whole, spans = read_at_once(model, row, budget=budgets[i]), state(cache, i)
        assert spans[0].token.tolist() == list(range(lengths[i]))
        assert spans[0].log_score.tolist() == [0.0] * lengths[i]
        for record, span in zip(whole.forks, spans[1:], strict=True):
            used = int((record.parent >= 0).sum())
            assert span.used == used
            assert torch.equal(span.token.long(), record.token[0, :used])
            assert torch.equal(span.level.long(), record.level[0, : len(span.level)])
            assert bool((record.level[0, len(span.level) :] == -(2**30)).all()), "no candidate is missing"
            kept = record.log_score[0][record.selected[0]]
            torch.testing.assert_close(span.log_score, kept, atol=SAME_ROW, rtol=0)
        torch.testing.assert_close(whole.streams.log_score[0, :used], spans[-1].log_score, atol=SAME_ROW, rtol=0)


def test_the_contents_are_those_of_the_oracle():
    model = lively_model(small_config(budget=1.5), seed=7)
    row = random_ids(model.config, 1, 9)[0]
    cache = read_in_steps(model, [row], prompts=[2]).cache
    result, _ = ask_oracle(model, row)
    for theirs, ours in zip(result.forks, state(cache, 0)[1:], strict=True):
        assert ours.token.tolist() == theirs.token
        assert ours.used == sum(theirs.selected)
        kept = [score for score, chosen in zip(theirs.log_score, theirs.selected, strict=True) if chosen]
        torch.testing.assert_close(ours.log_score.tolist(), kept, atol=ORACLE_OUTPUT, rtol=0)
        ordinary = [level for level in ours.level.tolist() if level != 1]
        assert len(ours.level) == len(theirs.log_score)
        assert len(ordinary) == len(theirs.log_score) - 9, "one candidate of each token is forced"
        assert not Counter(ordinary) - Counter(round(score * 4096) for score in theirs.log_score)
    assert cache.streams(9)[0].tolist() == result.forks[-1].bubble_size


def test_streams_of_fewer_or_more_tokens_than_there_are(model):
    ids, cache = started(model, rows=2)
    sizes = model(ids, trace=True).forks[-1].bubble_size
    assert sizes.max() > 1
    for n in (1, 5, 6, 9):
        expected = torch.nn.functional.pad(sizes, (0, 9))[:, :n]
        assert torch.equal(cache.streams(n), expected)


def test_the_next_cap_is_exact():
    model = lively_model(small_config(block_size=128))
    ids = random_ids(model.config, 3, 99)
    _, cache = prefill(model, ids, budget=[1.15, "7/3", 1.1])
    assert cache.next_cap().tolist() == [115, 233, 110]


# ---- reorder, clone, crop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1], [0, 0, 2, 0], [2, 2]])
def test_reorder(model, order):
    ids, cache = started(model, budget=[1, 2, 8])
    after = cache.reorder(torch.tensor(order))
    assert after.rows == len(order)
    for place, row in enumerate(order):
        assert_same_state(after, place, cache, row)
    more = random_ids(model.config, len(order), 4, seed=8)
    predicted, _ = going_on(model, after, more)
    for place, row in enumerate(order):
        alone = model(torch.cat([ids[row], more[place]])[None], budget=[[1, 2, 8][row]], want=("log_probs",)).log_probs[
            0, 6:
        ]
        torch.testing.assert_close(predicted[place], alone, atol=SAME_ROW, rtol=0)


def test_what_is_reordered_shares_nothing(model):
    _, cache = started(model)
    before, after = cache.clone(), cache.reorder(torch.tensor([0, 1, 2]))
    going_on(model, after, random_ids(model.config, 3, 4, seed=8))
    for i in range(3):
        assert_same_state(cache, i, before, i)


def test_two_ways_on_from_a_clone(model):
    """Neither disturbs the other, in whatever order they go; beams and branching depend on this."""
    ids, cache = started(model)
    ways = [random_ids(model.config, 3, 5, seed=seed) for seed in (21, 22)]
    caches, got = [cache.clone(), cache], [[], []]
    for t in range(5):
        for i in (0, 1):
            prediction, caches[i] = decode_step(model, caches[i], ways[i][:, t])
            got[i].append(prediction.logits.log_softmax(-1))
    for i in (0, 1):
        whole = model(torch.cat([ids, ways[i]], dim=1), want=("log_probs",)).log_probs[:, 6:]
        torch.testing.assert_close(torch.stack(got[i], dim=1), whole, atol=SAME_ROW, rtol=0)


def test_a_step_leaves_the_cache_before_it_readable(model):
    """Storage is shared, but a step only writes after the existing contents."""
    _, cache = started(model)
    before = cache.clone()
    going_on(model, cache, random_ids(model.config, 3, 3, seed=5))
    for i in range(3):
        assert_same_state(cache, i, before, i)


@pytest.mark.parametrize("keep", [1, 3, 5, 6, 11, 99])
def test_crop_is_the_cache_of_before(model, keep):
    ids, cache = started(model, 11, budget=[1, 1.5, 8])
    cropped = cache.crop(keep)
    _, fresh = prefill(model, ids[:, :keep], budget=[1, 1.5, 8])
    for i in range(3):
        assert_same_state(cropped, i, fresh, i)
    more = random_ids(model.config, 3, min(16 - min(keep, 11), 5), seed=31)
    again, after = going_on(model, cropped, more)
    whole = model(torch.cat([ids[:, :keep], more], dim=1), budget=[1, 1.5, 8], want=("log_probs",)).log_probs
    torch.testing.assert_close(again, whole[:, -more.shape[1] :], atol=SAME_ROW, rtol=0)
    assert after.streams(16).sum(1).tolist() == after.spans[-1].used.tolist()


def test_crop_of_each_row_to_its_own_length(model):
    rows = [random_ids(model.config, 1, n, seed=n)[0] for n in (12, 7, 9)]
    cache = read_in_steps(model, rows, prompts=[3, 7, 1]).cache
    keep = [5, 9, 1]
    cropped = cache.crop(torch.tensor(keep))
    ids, lengths = padded([row[:n] for row, n in zip(rows, keep, strict=True)])
    assert lengths.tolist() == cropped.n_tokens.tolist() == [5, 7, 1]
    _, fresh = prefill(model, ids, lengths=lengths)
    for i in range(3):
        assert_same_state(cropped, i, fresh, i)


@pytest.mark.parametrize("keep", [0, -1, torch.tensor([1, 0, 3])])
def test_crop_leaves_at_least_one_token(model, keep):
    _, cache = started(model)
    with pytest.raises(ValueError, match="a row keeps at least its first token"):
        cache.crop(keep)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda cache: cache.crop("abc"), "n_tokens = 'abc': give a whole number of 1 or more"),
        (lambda cache: cache.crop(None), "n_tokens = None"),
        (lambda cache: cache.crop(True), "n_tokens have shape .* torch.bool"),
        (lambda cache: cache.crop(2.0), "n_tokens have shape .* torch.float32"),
        (lambda cache: cache.crop(10**30), "n_tokens = 1000"),
        (lambda cache: cache.crop([1, 2]), r"n_tokens = \[1, 2\]"),
        (lambda cache: cache.reorder("abc"), "rows = 'abc': give a tensor of row indices, from 0 to 2"),
        (lambda cache: cache.reorder(None), "rows = None"),
        (lambda cache: cache.reorder(torch.tensor([0.0])), "rows have shape .* torch.float32"),
        (lambda cache: cache.reorder(torch.tensor([True, False, True])), "rows have shape .* torch.bool"),
        (lambda cache: cache.reorder(torch.tensor([[0]])), r"rows = tensor\(\[\[0\]\]\)"),
        (lambda cache: cache.reorder(torch.tensor([0, 3])), r"rows = tensor\(\[0, 3\]\)"),
        (lambda cache: cache.reorder(torch.tensor([-1])), r"rows = tensor\(\[-1\]\)"),
        (lambda cache: cache.streams("abc"), "n_tokens = 'abc': give a whole number"),
        (lambda cache: cache.streams(-1), "n_tokens = -1"),
        (lambda cache: cache.streams(True), "n_tokens = True"),
        (lambda cache: cache.streams(10**12), "n_tokens = 1000000000000"),
        *(
            (
                lambda cache, n=n: cache.grown(small_config(), n),
                f"capacity = {n!r}: give a whole number from 6, .* to bl",
            )
            for n in ("8", None, True, 8.0, -1, 0, 5, 17, 10**12)
        ),
    ],
)
def test_wrong_kinds_are_refused(model, call, words):
    _, cache = started(model)
    with pytest.raises(ValueError, match=words):
        call(cache)


# ---- growth ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"fork_layers": (0, 2)}, {"fork_layers": ()}], ids=str)
def test_a_grown_cache_continues_like_one_that_was_large_from_the_start(form):
    """Bitwise, also in float32, with any rows left in any order."""
    model = lively_model(small_config(**form), dtype=torch.float32)
    ids, more = random_ids(model.config, 3, 5), random_ids(model.config, 3, 8, seed=1)
    small, large = (prefill(model, ids, lengths=[5, 2, 4], budget=[1, 8, 1.5], capacity=n)[1] for n in (5, 13))
    small, large = (cache.reorder(torch.tensor([2, 0, 1])) for cache in (small, large))
    for i, new in enumerate(more.unbind(1)):
        if i in (0, 2, 5):
            small = small.grown(model.config, {0: 7, 2: 10, 5: 13}[i])
        (a, small), (b, large) = (decode_step(model, cache, new) for cache in (small, large))
        assert torch.equal(a.logits, b.logits)
        assert torch.equal(a.streams, b.streams)
    assert small.capacity == large.capacity == 13
    assert small.memory() == cache_memory(
        model.config, rows=3, capacity=13, budget=Budget.of([1, 8, 1.5]), dtype=torch.float32
    )


def test_a_grown_cache_shares_nothing_and_fits_its_own_budgets(model):
    """Storage that was made for larger budgets than the rows now have is not made again."""
    ids, roomy = started(model, budget=8)
    _, cache = prefill(model, ids, budget=1, into=roomy)
    grown = cache.grown(model.config, 16)
    assert_same_state(grown, 0, cache, 0)
    going_on(model, cache, random_ids(model.config, 3, 4, seed=2))
    expected, _ = going_on(model, cache, random_ids(model.config, 3, 4))
    found, _ = going_on(model, grown, random_ids(model.config, 3, 4))
    assert torch.equal(found, expected)
    assert grown.memory().total < cache.memory().total


def test_a_cache_can_be_made_as_small_as_what_it_holds(model):
    """No slot too few: all of a row's streams, their levels too, move into storage that they fill to the last one."""
    _, cache = started(model, budget=8)
    full = cache.crop(4).grown(model.config, 4)
    assert full.capacity == 4
    assert_same_state(full, 0, cache.crop(4), 0)
    found, _ = going_on(model, full.grown(model.config, 10), random_ids(model.config, 3, 4))
    expected, _ = going_on(model, cache.crop(4), random_ids(model.config, 3, 4))
    assert torch.equal(found, expected)


# ---- memory ---------------------------------------------------------------------------------------------------------

CONFIGS = {
    "three": small_config(),
    "first": small_config(fork_layers=(0, 2), merge="residual"),
    "plain": small_config(fork_layers=()),
    "copies": small_config(fork_layers=(), copies=3, merge="original"),
    "nano": named("nano-causal", budget=1.15),
    "without scores": small_config(scores=False, budget=8),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_as_predicted(name, dtype):
    config = CONFIGS[name]
    model = lively_model(config, dtype=dtype)
    some = (1, [1.5, "7/3"]) if config.scores else (8, [9, "17/2"])
    for budget, rows, capacity in ((some[0], 1, 16), (some[1], 2, 13)):
        _, cache = prefill(model, random_ids(config, rows, 4), budget=budget, capacity=capacity)
        expected = cache_memory(config, rows=rows, capacity=capacity, budget=Budget.of(budget), dtype=dtype)
        assert cache.memory() == expected
        _, cache = decode_step(model, cache, torch.zeros(rows, dtype=torch.int64))
        assert cache.memory() == expected, "storage does not grow"
        assert cache.reorder(torch.tensor([0] * 3)).memory() == cache_memory(
            config, rows=3, capacity=capacity, budget=Budget.of(budget), dtype=dtype
        )


def test_memory_of_a_plain_model_by_hand():
    """2 vectors of 12 numbers per layer, 4 layers, 16 slots and one more, for each of 2 rows."""
    memory = cache_memory(CONFIGS["plain"], rows=2, capacity=16, budget=Budget.of(2), dtype=torch.bfloat16)
    assert memory == CacheMemory(
        keys=2 * 4 * 17 * 12 * 2, values=2 * 4 * 17 * 12 * 2, streams=2 * 17 * 8, levels=0, counts=2 * 4 * 8
    )
    assert memory.total == sum(memory)


def test_memory_with_forks_by_hand():
    """Under r = 1.5 a row of 10 tokens has spans of 10, 15, 15 and 15 streams, and 20, 30 and 30 candidates."""
    config = CONFIGS["three"]
    memory = cache_memory(config, rows=1, capacity=10, budget=Budget.of(1.5), dtype=torch.float32)
    assert memory.keys == memory.values == (11 + 3 * 16) * 12 * 4
    assert memory.streams == (11 + 3 * 16) * (4 + 4)
    assert memory.levels == (21 + 31 + 31) * 4
    # No bubble doubles more than once per fork layer, however large the budget is.
    most = cache_memory(config, rows=1, capacity=10, budget=Budget.of(100), dtype=torch.float32)
    assert most.streams == (11 + 21 + 41 + 81) * (4 + 4)


def test_the_report_adds_up(model):
    _, cache = started(model)
    memory = cache.memory()
    assert memory.report().startswith(f"{memory.total / 2**20:,.2f} MiB: keys ")


def test_a_new_cache_has_read_nothing():
    config = small_config()
    cache = new_cache(
        config, rows=2, capacity=5, budget=Budget.of([1.5, "7/3"]), dtype=torch.float32, device=torch.device("cpu")
    )
    assert cache.rows == 2
    assert cache.n_tokens.tolist() == [0, 0]
    assert cache.next_cap().tolist() == [1, 2]
    assert cache.streams(3).tolist() == [[0, 0, 0]] * 2
    assert cache.memory() == cache_memory(
        config, rows=2, capacity=5, budget=Budget.of([1.5, "7/3"]), dtype=torch.float32
    )


def test_steps_can_begin_from_an_empty_cache(model):
    """The first token needs no prefill either."""
    cache = new_cache(
        model.config, rows=2, capacity=16, budget=Budget.of(1.5), dtype=torch.float64, device=torch.device("cpu")
    )
    ids = random_ids(model.config, 2, 8)
    predicted, _ = going_on(model, cache, ids)
    torch.testing.assert_close(predicted, model(ids, want=("log_probs",)).log_probs, atol=SAME_ROW, rtol=0)
