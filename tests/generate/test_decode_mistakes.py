"""Wrong ids, caches, capacities and prompts are refused by prefill and steps, and harm nothing."""

import pytest
import torch

from generate.reading import assert_same_state
from helpers import lively_model, random_ids, small_config
from thoughtbubbles.generate.decode import decode_step, predict_uncached, prefill


@pytest.fixture
def started():
    config = small_config(budget=2)
    model = lively_model(config)
    _, cache = prefill(model, random_ids(config, 2, 5), capacity=6)
    return model, cache


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([1]), r"shape \(1,\).*one id for each of 2 rows"),
        (torch.tensor([1, 2, 3]), r"shape \(3,\).*one id for each of 2 rows"),
        (torch.tensor([[1], [2]]), r"shape \(2, 1\).*one id for each of 2 rows"),
        (torch.tensor([1.0, 2.0]), r"torch.float32.*one id for each of 2 rows"),
        (torch.tensor([1, 23]), "ids has 23: the vocabulary has ids from 0 to 22"),
        (torch.tensor([-1, 0]), "ids has -1: the vocabulary has ids from 0 to 22"),
        ([1, 2], "ids is a list: give a tensor of one id for each of 2 rows"),
        ("ab", "ids is a str"),
        (None, "ids is a NoneType"),
        (3, "ids is a int"),
        (torch.tensor([True, False]), "torch.bool.*one id for each of 2 rows"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "ids are on meta.*the cache is on cpu"),
    ],
)
def test_wrong_ids_are_refused_and_harm_nothing(started, ids, words):
    model, cache = started
    before = cache.clone()
    with pytest.raises(ValueError, match=words):
        decode_step(model, cache, ids)
    for i in range(2):
        assert_same_state(cache, i, before, i)
    a, b = (decode_step(model, c, torch.tensor([3, 4]))[0].logits for c in (cache, before))
    assert torch.equal(a, b)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("active", [[True, False], "ab", torch.ones(2), torch.ones(3, dtype=torch.bool), True])
def test_wrong_active_rows_are_refused(started, active):
    model, cache = started
    with pytest.raises(ValueError, match=r"active = .*: give a tensor with True or False for each of 2 rows"):
        decode_step(model, cache, torch.tensor([3, 4]), active=active)


OTHER_MODELS = {
    "heads": ({"n_head": 2}, {}),
    "width": ({"width": 24}, {}),
    "layers": ({"n_layer": 5}, {}),
    "a fork layer less": ({"fork_layers": (1, 2)}, {}),
    "other fork layers": ({"fork_layers": (0, 1, 3)}, {}),
    "no fork layers": ({"fork_layers": ()}, {}),
    "a longer block": ({"block_size": 32}, {}),
    "dtype": ({}, {"dtype": torch.float32}),
}


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_s_cache_is_refused(started, name):
    changes, options = OTHER_MODELS[name]
    model, _ = started
    other = lively_model(small_config(budget=2, **changes), **options)
    ids = random_ids(model.config, 2, 5)
    _, cache = prefill(other, ids)
    with pytest.raises(ValueError, match="cache is not a cache of this model"):
        decode_step(model, cache, torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="into is not a cache of this model"):
        prefill(model, ids, into=cache)


@pytest.mark.usefixtures("no_shape_checks")
def test_what_is_not_a_cache_is_refused(started):
    model, cache = started
    for wrong in (None, "abc", 3, [cache], tuple(cache)):
        with pytest.raises(ValueError, match=r"cache is a .*: give the Cache that prefill or a step returned"):
            decode_step(model, wrong, torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="into is a str: give the Cache"):
        prefill(model, random_ids(model.config, 2, 5), into="abc")
    with pytest.raises(ValueError, match=r"ids of shape \(0,\).*each of 0 rows"):
        decode_step(model, cache.reorder(torch.tensor([], dtype=torch.int64)), torch.tensor([], dtype=torch.int64))


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("read", [prefill, predict_uncached])
@pytest.mark.parametrize("ids", [[[1, 2]], "ab", None, 3, torch.ones(1, 2), torch.tensor([[True]])], ids=repr)
def test_prompts_of_the_wrong_kind_are_refused(started, read, ids):
    with pytest.raises(ValueError, match=r"^ids (is a|of shape)"):
        read(started[0], ids)


def test_a_full_cache_is_refused_and_not_harmed(started):
    model, cache = started
    _, full = decode_step(model, cache, torch.tensor([1, 2]), active=torch.tensor([False, True]))
    before = full.clone()
    with pytest.raises(ValueError, match=r"the cache is full: its rows hold 6 tokens \(block_size = 16\)"):
        decode_step(model, full, torch.tensor([1, 2]))
    for i in range(2):
        assert_same_state(full, i, before, i)
    _, other = decode_step(model, full, torch.tensor([1, 2]), active=torch.tensor([True, False]))
    assert other.n_tokens.tolist() == [6, 6]
    with pytest.raises(ValueError, match="the cache is full"):
        decode_step(model, other, torch.tensor([1, 2]), active=torch.tensor([True, False]))


@pytest.mark.parametrize("capacity", [4, 0, -1, 17])
def test_a_capacity_is_from_the_prompt_to_the_block(capacity):
    model = lively_model(small_config())
    with pytest.raises(ValueError, match=rf"capacity = {capacity}: give a number from 5.*to block_size = 16"):
        prefill(model, random_ids(model.config, 2, 5), capacity=capacity)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": [5, 6]}, "lengths has 6"),
        ({"lengths": [0, 5]}, "lengths has 0"),
        ({"lengths": [5]}, "one whole number for each of the 2 rows"),
        ({"budget": 0.9}, "below 1"),
        ({"budget": [1, 2, 3]}, "3 numbers for a batch of 2 rows"),
        ({"lengths": "abc"}, "lengths = 'abc': give one whole number for each of the 2 rows"),
        ({"lengths": [True, True]}, "lengths have shape .* torch.bool"),
        ({"capacity": "abc"}, "capacity = 'abc': give a number from 5.*to block_size = 16"),
        ({"capacity": True}, "capacity = True"),
        ({"capacity": 7.0}, "capacity = 7.0"),
        ({"capacity": 10**30}, "capacity = 1000"),
        ({"budget": "abc"}, "budget = 'abc' is not a number"),
    ],
)
def test_wrong_prompts_are_refused(options, words):
    model = lively_model(small_config())
    with pytest.raises(ValueError, match=words):
        prefill(model, random_ids(model.config, 2, 5), **options)


@pytest.mark.usefixtures("no_shape_checks")
def test_wrong_prompt_ids_are_refused():
    model = lively_model(small_config())
    with pytest.raises(ValueError, match="ids has 23"):
        prefill(model, torch.tensor([[1, 23]]))
    with pytest.raises(ValueError, match="more than block_size = 16"):
        prefill(model, random_ids(model.config, 1, 17))
    with pytest.raises(ValueError, match="ids of shape"):
        prefill(model, torch.tensor([1, 2]))


def test_ids_may_be_int32(started):
    model, cache = started
    a, b = (
        decode_step(model, cache.clone(), torch.tensor([3, 4], dtype=dtype))[0].logits
        for dtype in (torch.int32, torch.int64)
    )
    assert torch.equal(a, b)
