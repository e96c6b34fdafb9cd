"""The fork layer: order, parentage, scores, gradients, and what each budget must keep or drop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import lively_model, random_ids, small_config
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.fork import FLOOR, ForkLayer
from thoughtbubbles.model.selection import Rule
from thoughtbubbles.model.streams import Streams

WIDTH = 6


def fork_layer(seed: int) -> ForkLayer:
    torch.manual_seed(seed)
    layer = ForkLayer(WIDTH, score_bias=None).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.sampled_from([1, 1.15, 1.5, 2, 4]),
    st.sampled_from(["block", "causal"]),
    st.integers(0, 99),
)
def test_order_parentage_and_content(sizes, budget, rule, seed):
    layer, n_tokens = fork_layer(seed), len(sizes)
    token = torch.tensor([[t for t, size in enumerate(sizes) for _ in range(size)]])
    before = Streams(torch.randn(1, sum(sizes), WIDTH).double(), -torch.rand(1, sum(sizes)).double(), token)
    after, record = layer(
        before, torch.tensor([n_tokens]), n_tokens=n_tokens, rule=Rule(rule, Budget.of(budget)), layer=0
    )
    chosen = record.selected[0].nonzero().flatten().tolist()
    used = len(chosen)
    assert record.parent[0, :used].tolist() == [c // 2 for c in chosen], "survivors keep the order of candidates"
    assert record.is_fork[0, :used].tolist() == [c % 2 == 0 for c in chosen]
    assert (record.parent[0, used:] == -1).all()
    assert (after.token[0, used:] == n_tokens).all()
    assert after.token[0].tolist() == sorted(after.token[0].tolist())
    for slot, candidate in enumerate(chosen):
        parent = candidate // 2
        assert after.token[0, slot] == token[0, parent]
        expected = before.x[0, parent] + (layer.embedding if candidate % 2 == 0 else 0)
        torch.testing.assert_close(after.x[0, slot], expected, atol=0, rtol=0)
        own = record.own_log_score[0, parent, candidate % 2]
        assert after.log_score[0, slot] == before.log_score[0, parent] + own
        if record.is_fork[0, slot] and record.selected[0, 2 * record.parent[0, slot] + 1]:
            beside = record.parent[0, slot + 1], record.is_fork[0, slot + 1]
            assert beside == (parent, False), "a fork stands directly left of its parent where that survives"
    assert after.log_score.isfinite().all()
    assert record.bubble_size[0].tolist() == [after.token[0].tolist().count(t) for t in range(n_tokens)]


def test_a_fork_may_outlive_its_parent():
    """Only originals are safe: look for a fork whose parent, itself a fork, was dropped."""
    config = small_config(budget=1.5)
    for seed in range(20):
        output = lively_model(config, seed=seed)(random_ids(config, 2, 12), trace=True)
        for record in output.forks:
            forks, keeps = record.selected[:, 0::2], record.selected[:, 1::2]
            if (forks & ~keeps).any():
                return
    pytest.fail("no fork outlived its parent in 20 models")


def test_scores_are_logs_of_probabilities_and_never_below_the_floor():
    layer = fork_layer(0)
    with torch.no_grad():
        layer.score.weight.mul_(1e3)
    scores = layer.log_scores(torch.randn(2, 50, WIDTH).double())
    assert (scores <= 0).all()
    assert (scores >= FLOOR).all()
    assert (scores == FLOOR).any(), "the floor is reached here"
    assert (scores == 0).any(), "and so is probability 1"


@pytest.mark.parametrize("selection", ["block", "causal"])
def test_what_each_budget_keeps(selection):
    config = small_config(selection=selection)
    model, ids = lively_model(config), random_ids(config, 3, 11)

    def sizes(budget: float) -> list[torch.Tensor]:
        return [record.bubble_size for record in model(ids, budget=budget, trace=True).forks]

    assert all((size == 1).all() for size in sizes(1)), "r = 1 drops every fork"
    first, second, third = sizes(2)
    assert (first == 2).all(), "r = 2: the first fork layer keeps everything"
    assert (second != 2).any(), "and the second decides"
    first, second, third = sizes(4)
    assert (first == 2).all(), "r = 4: the first two fork layers keep everything"
    assert (second == 4).all()
    assert (third != 4).any(), "and the third decides"
    assert all((size == 2 ** (i + 1)).all() for i, size in enumerate(sizes(8))), "r = 8 allows all"
    assert all(int(size.max()) <= 2 ** (i + 1) for i, size in enumerate(sizes(64))), "no bubble grows beyond doubling"


def test_selection_has_no_gradient_but_scores_do():
    layer = fork_layer(3)
    x = torch.randn(1, 5, WIDTH).double()
    streams = Streams(x, torch.zeros(1, 5).double(), torch.arange(5)[None])
    after, _ = layer(streams, torch.tensor([5]), n_tokens=5, rule=Rule("causal", Budget.of(1)), layer=0)
    after.log_score.sum().backward()
    assert layer.score.weight.grad[0].abs().sum() == 0, "at r = 1 no fork survives, so fork scores reach nothing"
    assert layer.score.weight.grad[1].abs().sum() > 0
