"""The cache of models whose forks are visible to near tokens only: forks fall out of it, and nothing else changes."""

import pytest
import torch

from helpers import SAME_ROW, lively_model, random_ids, small_config
from thoughtbubbles.generate.cache import cache_memory
from thoughtbubbles.generate.decode import decode_step, prefill
from thoughtbubbles.generate.engine import Engine
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.attention import Attention, fused_attention
from thoughtbubbles.model.budget import Budget

FEEDBACK = {"fork_layers": (1,), "feedback": True}


def private(reach: int = 0, **changes):
    return lively_model(small_config(fork_reach=reach, block_size=32, **changes), seed=4)


def going_on(model, cache, ids):
    predicted = []
    for new in ids.unbind(1):
        prediction, cache = decode_step(model, cache, new)
        predicted.append(prediction.logits.log_softmax(-1))
    return torch.stack(predicted, dim=1)


def test_private_forks_take_no_room():
    """The keys and values of a plain model; beyond them only what the selection needs to know."""
    sizes = {"rows": 2, "capacity": 20, "budget": Budget.of(4), "dtype": torch.float32}
    forking, plain = (small_config(fork_layers=layers, fork_reach=0, block_size=32) for layers in ((1, 2, 3), ()))
    private_forks, without = cache_memory(forking, **sizes), cache_memory(plain, **sizes)
    seen_by_all = cache_memory(small_config(block_size=32), **sizes)
    # One more slot in each of four spans is never read; a plain model has one span.
    assert private_forks.keys == private_forks.values == without.keys
    assert private_forks.streams == 2 * (4 * 21 * 8 + 3 * 20 * 4)
    assert seen_by_all.keys == 2 * (21 + 41 + 81 + 81) * 12 * 4
    assert private_forks.levels == seen_by_all.levels


@pytest.mark.parametrize(("reach", "forks"), [(1, (2, 6, 14)), (2, (3, 9, 21)), (50, (20, 60, 60))])
def test_room_for_forks_of_near_tokens(reach, forks):
    """Of one token more than are seen: at most 1, 3 and 7 forks per token after one, two and three fork layers; under
    r = 4 at most 60 of 20 tokens."""
    sizes = {"rows": 1, "capacity": 20, "budget": Budget.of(4), "dtype": torch.float32}
    memory = cache_memory(small_config(fork_reach=reach, block_size=32), **sizes)
    assert memory.keys == (21 + sum(21 + n for n in forks)) * 12 * 4


@pytest.mark.parametrize(("reach", "form"), [(0, {}), (2, {}), (9, {}), (0, FEEDBACK), (3, FEEDBACK)])
def test_memory_is_as_predicted(reach, form):
    model = private(reach, **form)
    for budget, rows, capacity in ((1, 1, 16), ([1.5, "7/3"], 2, 13)):
        _, cache = prefill(model, random_ids(model.config, rows, 4), budget=budget, capacity=capacity)
        expected = cache_memory(
            model.config, rows=rows, capacity=capacity, budget=Budget.of(budget), dtype=torch.float64
        )
        assert cache.memory() == expected
        _, cache = decode_step(model, cache, torch.zeros(rows, dtype=torch.int64))
        assert cache.memory() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("reach", "form"), [(0, {}), (2, {}), (9, {}), (0, FEEDBACK), (3, FEEDBACK)])
def test_a_grown_cache_continues_like_one_that_was_large_from_the_start(reach, form):
    model = private(reach, budget=4, **form)
    ids, more = random_ids(model.config, 3, 5), random_ids(model.config, 3, 20, seed=1)
    small, large = (prefill(model, ids, lengths=[5, 2, 4], budget=[1, 8, 1.5], capacity=n)[1] for n in (5, 25))
    small, large = (cache.reorder(torch.tensor([2, 0, 1])) for cache in (small, large))
    for i, new in enumerate(more.unbind(1)):
        if i in (0, 2, 7):
            small = small.grown(model.config, {0: 7, 2: 12, 7: 25}[i])
        (a, small), (b, large) = (decode_step(model, cache, new) for cache in (small, large))
        torch.testing.assert_close(a.logits, b.logits, atol=SAME_ROW, rtol=0)
        assert torch.equal(a.streams, b.streams)


@pytest.mark.parametrize("form", [{}, FEEDBACK], ids=["private", "feedback"])
@pytest.mark.parametrize("keep", [1, 3, 11])
def test_a_cropped_cache_continues_from_there(keep, form):
    model, budgets = private(**form), [1, 1.5, 8]
    ids, more = random_ids(model.config, 3, 11), random_ids(model.config, 3, 6, seed=31)
    cropped = prefill(model, ids, budget=budgets)[1].crop(keep)
    whole = model(torch.cat([ids[:, :keep], more], dim=1), budget=budgets, want=("log_probs",), trace=True)
    torch.testing.assert_close(going_on(model, cropped, more), whole.log_probs[:, keep:], atol=SAME_ROW, rtol=0)
    assert torch.equal(cropped.streams(keep), whole.forks[-1].bubble_size[:, :keep])


@pytest.mark.parametrize(
    ("reach", "tokens", "budgets"), [(2, 3, [1, 1.5, 1.15]), (9, 2, [1, 1.5, 8]), (40, 20, [1, 1.5, 8])]
)
def test_a_cropped_cache_has_the_forks_that_are_still_seen(reach, tokens, budgets):
    """As long as none of them was overwritten; and those of the tokens that are gone are not seen again."""
    model = private(reach)
    ids = random_ids(model.config, 3, 31)
    _, cache = prefill(model, ids[:, :5], budget=budgets)
    for new in ids[:, 5 : 5 + tokens].unbind(1):
        _, cache = decode_step(model, cache, new)
    more = random_ids(model.config, 3, 6, seed=31)
    whole = model(torch.cat([ids[:, :5], more], dim=1), budget=budgets, want=("log_probs",)).log_probs
    torch.testing.assert_close(going_on(model, cache.crop(5), more), whole[:, 5:], atol=SAME_ROW, rtol=0)


@pytest.mark.parametrize(
    "form", [{}, FEEDBACK, {"fork_layers": (1,)}], ids=["many forks", "feedback", "one fork layer"]
)
@pytest.mark.parametrize("budget", [1.3, 8])
@pytest.mark.parametrize("n_prompt", [2, 15])
def test_crops_continue_exactly_or_are_refused(n_prompt, budget, form):
    """After a prompt, after single tokens, after another crop: never without forks that the next tokens would see."""
    model = private(3, **form)
    ids, more, found = random_ids(model.config, 2, 15), random_ids(model.config, 2, 5, seed=31), []
    _, cache = prefill(model, ids[:, :n_prompt], budget=budget)
    for new in ids[:, n_prompt:].unbind(1):
        _, cache = decode_step(model, cache, new)
    for keep in (14, 13, 9, 2):
        try:
            cropped = cache.clone().crop(keep)
            found.append(True)
        except ValueError:
            found.append(False)
            continue
        whole = model(torch.cat([ids[:, :keep], more], dim=1), budget=budget, want=("log_probs",)).log_probs
        torch.testing.assert_close(going_on(model, cropped.clone(), more), whole[:, keep:], atol=SAME_ROW, rtol=0)
        cache = cropped
    assert found[0]
    if budget == 8:
        assert not all(found)


def test_forks_that_fell_out_do_not_come_back():
    model = private(2)
    _, cache = prefill(model, random_ids(model.config, 2, 28), budget=4)
    assert torch.equal(cache.crop(28).spans[-1].used, cache.spans[-1].used)
    with pytest.raises(ValueError, match=r"no longer in this cache.*fork_reach.*clone the cache"):
        cache.crop(10)


def test_an_empty_row_stays_empty():
    model = private()
    _, cache = prefill(model, random_ids(model.config, 2, 8))
    cache.clear(0, Budget.of(2))
    assert [int(span.used[0]) for span in cache.crop(3).spans] == [0, 0, 0, 0]


def test_storage_for_a_smaller_budget_is_not_reused():
    """Private forks take no room, but their levels do."""
    model = private()
    ids = random_ids(model.config, 1, 10)
    _, small = prefill(model, ids, budget=1, capacity=16)
    with pytest.raises(ValueError, match="made for these budgets or larger ones"):
        prefill(model, ids, budget=8, into=small)


def test_a_cache_of_another_reach_is_not_taken():
    _, cache = prefill(private(1), random_ids(small_config(), 1, 4))
    with pytest.raises(ValueError, match="is not a cache of this model"):
        decode_step(private(6), cache, torch.tensor([1]))


def test_prompts_where_there_are_kernels(monkeypatch):
    """With private forks: what the path of a prompt needs does not depend on kernels, which it never takes."""
    model = private()
    ids = random_ids(model.config, 2, 9)
    expected, _ = prefill(model, ids)
    monkeypatch.setattr(Attention, "takes_kernel", lambda self, x, path: path is fused_attention)
    found, _ = prefill(model, ids)
    assert torch.equal(found.logits, expected.logits)


def test_scores_keep_their_precision_under_autocast():
    model = private()
    with torch.autocast("cpu", torch.bfloat16):  # which the cache follows
        _, cache = prefill(model, random_ids(model.config, 2, 6))
    assert {span.log_score.dtype for span in cache.spans} == {torch.float32}


@pytest.mark.parametrize(("reach", "shares", "form"), [(0, True, {}), (3, False, {}), (0, True, FEEDBACK)])
def test_the_engine(reach, shares, form):
    """Texts equal those without a cache; a common prompt is read once, unless forks of it may be gone."""
    model = private(reach, budget=2, **form)
    prompts = [[5, 3, 8, 1, 2, 7, 7, 4, *tail] for tail in ([9], [2, 2], [6, 1, 3])]
    requests = [Request(prompt=ids, max_new=9, sampling=Sampling(temperature=0)) for ids in prompts]
    engine = Engine(model, rows=2, chunk=4)
    found = [handle.result() for handle in engine.submit_all(requests)]
    expected = generate(model, requests, method="uncached")
    assert [each.ids for each in found] == [each.ids for each in expected]
    assert (engine.stats().tokens_shared > 0) == shares
