"""Budgets round exactly, for every way of writing them."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import small_config
from thoughtbubbles.model.budget import Budget

budgets = st.decimals(min_value=1, max_value=9, places=3).map(float)


def test_the_cases_that_floats_get_wrong():
    assert Budget.of(1.1).largest_ceil(50) == 55
    assert Budget.of(1.15).largest_floor(100) == 115
    assert Budget.of(1.1).ceil(torch.tensor([[50]])).item() == 55
    assert Budget.of(1.15).floor(torch.tensor([[100]])).item() == 115


@given(st.lists(budgets, min_size=1, max_size=4), st.integers(1, 4096))
def test_tensors_and_numbers_round_alike(rows, tokens):
    budget = Budget.of(rows)
    exact = [Fraction(str(r)) * tokens for r in rows]
    seen = torch.full((len(rows), 1), tokens)
    assert budget.floor(seen).flatten().tolist() == [e.__floor__() for e in exact]
    assert budget.ceil(seen).flatten().tolist() == [e.__ceil__() for e in exact]
    assert budget.largest_floor(tokens) == max(e.__floor__() for e in exact)
    assert budget.largest_ceil(tokens) == max(e.__ceil__() for e in exact)


def test_ways_to_write_one():
    numpy = pytest.importorskip("numpy")
    expected = Budget((3,), (2,))
    ways = (1.5, "1.5", "3/2", Fraction(3, 2), [1.5], expected, numpy.float64(1.5))
    assert all(Budget.of(way) == expected for way in ways)
    assert Budget.of([1, 2.5]) == Budget((1, 5), (1, 2))
    assert Budget.of("1_0") == Budget.of("1e1") == Budget.of("１０") == Budget((10,), (1,))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.99, r"budget = 0\.99 is below 1.*give 1 or more"),
        (-2, "budget = -2 is below 1"),
        ([2, 0.5], r"budget = 0\.5 is below 1"),
        (float("nan"), "budget = nan is not a number"),
        (float("inf"), "budget = inf is not a number"),
        ("many", "budget = 'many' is not a number"),
        ([], "budget is empty"),
        (torch.tensor([1.5]), r"budget is a tensor.*tolist"),
        (True, "budget = True is not a number"),
        (b"2", "is not a number"),
        ({}, r"budget = \{\} is not a number"),
        ([[2, 3]], "is not a number"),
        ("０", "is below 1"),
        ("1e99999999", "budget = '1e99999999' is not a number"),
        ("1e-99999999", "is not a number"),
        ("1e9_9999999", "is not a number"),
        ("1/3e9", "is not a number"),
        ("1/0", "is not a number"),
        ("9" * 5000, "budget = '999.*… is not a number"),
        pytest.param(10**5000, "budget = a number of very many digits is not a number", id="digits"),
        pytest.param(Fraction(10**5000, 3), "is not a number", id="digits of a fraction"),
        (Budget((2, 3), (1,)), "budget = Budget.*as many numerators as denominators"),
        (Budget((2.5,), (1,)), "all of them int"),
        (Budget("2", "1"), "all of them int"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_bad_budgets(value, message):
    with pytest.raises(ValueError, match=message):
        Budget.of(value)


def test_a_message_is_one_short_line():
    for value in ("9" * 5000, 10**5000, "many\nlines"):
        with pytest.raises(ValueError, match="is not a number") as raised:
            Budget.of(value)
        assert len(str(raised.value)) < 250
        assert "\n" not in str(raised.value)


def test_too_many_digits():
    Budget.of(4 / 3).check_range(512)
    with pytest.raises(ValueError, match=r"too many digits for 100000 tokens: round it"):
        Budget.of(4 / 3).check_range(100_000)
    with pytest.raises(ValueError, match="too large or has too many digits"):
        Budget.of(f"{10**60 + 1}/{10**60}").check_range(512)


@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_the_bound_is_that_of_integers_on_the_device(tokens):
    most = (2**63 - 1) // tokens
    Budget.of(str(most)).check_range(tokens)
    assert Budget.of(str(most)).floor(torch.tensor([[tokens]])).item() == most * tokens
    with pytest.raises(ValueError, match=f"budget is too large or has too many digits for {tokens} tokens"):
        Budget.of(str(most + 1)).check_range(tokens)


def test_from_the_largest_bubble_on_there_is_no_limit():
    config = small_config(fork_layers=(1, 3))
    assert [config.is_unlimited(r) for r in (1, 3.99, 4, 4.01, 10**9)] == [False, False, True, True, True]
    assert config.is_unlimited([4, 9])
    assert not config.is_unlimited([4, 3])
    assert small_config(fork_layers=()).is_unlimited(1), "nothing forks: a budget means nothing"
