"""The fork layer: order, parentage, scores, gradients, and what each budget must keep or drop."""

import importlib.util
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import SAME_FUNCTION, lively_model, random_ids, run_probe, small_config
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.fork import FLOOR, ForkLayer
from thoughtbubbles.model.selection import Rule, candidate_keys, candidate_levels, pack
from thoughtbubbles.model.streams import Streams, is_original, take

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
    after, record = layer(before, torch.tensor([n_tokens]), n_tokens=n_tokens, rule=Rule(rule, Budget.of(budget)))
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
            neighbour = record.parent[0, slot + 1], record.is_fork[0, slot + 1]
            assert neighbour == (parent, False), "a fork is directly left of its parent where that survives"
    assert after.log_score.isfinite().all()
    assert record.bubble_size[0].tolist() == [after.token[0].tolist().count(t) for t in range(n_tokens)]


@pytest.mark.parametrize("selection", ["block", "causal"])
def test_noise_changes_the_choice_in_training_alone(selection):
    """Other candidates survive, never fewer than the originals, and their scores have no noise."""
    config = small_config(budget=1.5, selection=selection, score_noise=2)
    noisy, ids = lively_model(config), random_ids(config, 2, 14)
    exact = lively_model(replace(config, score_noise=0))
    with torch.random.fork_rng():
        found = [noisy(ids, trace=True) for _ in range(3)]
    expected = exact(ids, trace=True, want=("logits",))
    chosen = {tuple(out.forks[0].selected.flatten().tolist()) for out in found}
    assert len(chosen | {tuple(expected.forks[0].selected.flatten().tolist())}) == 4
    for out in found:
        assert torch.equal(out.forks[0].log_score, expected.forks[0].log_score)
        for record in out.forks:
            assert (record.bubble_size >= 1).all()
            assert (record.bubble_size.sum(1) <= 21).all()
    with torch.no_grad():
        assert torch.equal(noisy(ids, want=("logits",)).logits, expected.logits), "a model that generates"
    assert torch.equal(noisy.eval()(ids, want=("logits",)).logits, expected.logits)


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
    after, _ = layer(streams, torch.tensor([5]), n_tokens=5, rule=Rule("causal", Budget.of(1)))
    after.log_score.sum().backward()
    assert layer.score.weight.grad[0].abs().sum() == 0, "at r = 1 no fork survives, so fork scores reach nothing"
    assert layer.score.weight.grad[1].abs().sum() > 0


# ---- gradients ------------------------------------------------------------------------------------------------------

# Rows of three tokens, of two, and of one; 3 marks unused slots.
TOKEN = torch.tensor([[0, 1, 1, 1, 2, 2], [0, 0, 1, 3, 3, 3], [0, 3, 3, 3, 3, 3]])
LENGTHS = torch.tensor([3, 2, 1])


def forked(layer: ForkLayer, x: torch.Tensor, log_score: torch.Tensor, selection: str, budget: float):
    rule = Rule(selection, Budget.of(budget))
    return layer(Streams(x, log_score, TOKEN), LENGTHS, n_tokens=3, rule=rule)


def as_autograd_has_it(layer: ForkLayer, x: torch.Tensor, log_score: torch.Tensor, record):
    """The survivors by plain indexing, whose gradient autograd scatters."""
    used = record.parent >= 0
    parent = record.parent.clamp(min=0)
    normed = torch.nn.functional.layer_norm(x, (WIDTH,), layer.norm.weight, layer.norm.bias, layer.norm.eps)
    own = torch.nn.functional.logsigmoid(normed @ layer.score.weight.T).clamp(min=FLOOR)
    candidates = (log_score[..., None] + own).flatten(1)
    survivors = take(x, parent) + torch.where(record.is_fork[..., None], layer.embedding, 0)
    scores = take(candidates, 2 * parent + ~record.is_fork)
    return torch.where(used[..., None], survivors, 0), torch.where(used, scores, 0)


@pytest.mark.parametrize(("selection", "budget"), [*product(["block", "causal"], [1, 1.5, 2, 4])])
def test_the_gradient_is_that_of_plain_indexing(selection, budget):
    layer = fork_layer(1)
    x = torch.randn(3, 6, WIDTH).double().requires_grad_()
    log_score = (-torch.rand(3, 6).double()).requires_grad_()
    after, record = forked(layer, x, log_score, selection, budget)
    expected = as_autograd_has_it(layer, x, log_score, record)
    upstream = [torch.randn_like(t) for t in expected]
    leaves = [x, log_score, *layer.parameters()]
    assert torch.equal(after.x, expected[0])
    torch.testing.assert_close(after.log_score, expected[1], atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    grads = [torch.autograd.grad(out, leaves, upstream) for out in ((after.x, after.log_score), expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


def test_gradients_of_scores_against_differences():
    layer = fork_layer(4)
    x = (5 + 3 * torch.randn(2, 3, WIDTH)).double().requires_grad_()
    weights = [layer.norm.weight, layer.norm.bias, layer.score.weight]
    assert torch.autograd.gradcheck(lambda x, *_: layer.log_scores(x), [x, *weights])  # which moves them in place


def test_gradients_of_padded_rows_against_differences():
    layer = fork_layer(2)
    x, log_score = torch.randn(3, 6, WIDTH).double(), -torch.rand(3, 6).double()

    def run(x, log_score, embedding):
        moved, _ = torch.func.functional_call(
            layer,
            {"embedding": embedding},
            (Streams(x, log_score, TOKEN), LENGTHS),
            {"n_tokens": 3, "rule": Rule("causal", Budget.of(1.5))},
        )
        return moved.x, moved.log_score

    leaves = [t.requires_grad_() for t in (x, log_score, layer.embedding.detach().clone())]
    assert torch.autograd.gradcheck(run, leaves)


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
def test_kernels_count_and_pack_as_the_reference_does():
    assert run_probe("kernels.fork_probe", 20, interpreted=True) == {"cases": 20, "wrong": {}}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("selection", "budget"), [*product(["block", "causal"], [1, 1.5, 2, 4])])
def test_a_gpu_decides_as_the_cpu_and_gives_the_same_bits_twice(selection, budget):
    torch.manual_seed(0)
    n_tokens, rows = 333, 5
    lengths = torch.tensor([333, 300, 77, 2, 1])
    token = torch.arange(n_tokens).repeat_interleave(3).repeat(rows, 1)
    token = torch.where(token < lengths[:, None], token, n_tokens)
    log_score = -torch.rand(token.shape)
    log_score[:, ::7] = -0.5  # ties
    original = is_original(token, n_tokens)
    forced = torch.stack([torch.zeros_like(original), original], dim=-1).flatten(1)
    both, owner = log_score.repeat_interleave(2, dim=1), token.repeat_interleave(2, dim=1)
    key = candidate_keys(candidate_levels(both, owner, forced, n_tokens))
    rule = Rule(selection, Budget.of(budget))
    n_slots, found = rule.n_slots(token.shape[1], n_tokens), []
    for device in ("cpu", "cuda"):
        mask = rule.survives(key.to(device), owner.to(device), lengths.to(device), n_tokens)
        found.append([mask.cpu(), *(t.cpu() for t in pack(mask, n_slots))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    layer = fork_layer(0).float().cuda()
    x = torch.randn(*token.shape, WIDTH, device="cuda", requires_grad=True)
    scores = log_score.cuda().requires_grad_()
    twice = []
    for _ in range(2):
        after, _ = layer(Streams(x, scores, token.cuda()), lengths.cuda(), n_tokens=n_tokens, rule=rule)
        loss = after.x.square().sum() + after.log_score.sin().sum()
        twice.append(torch.autograd.grad(loss, [x, scores, *layer.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))
