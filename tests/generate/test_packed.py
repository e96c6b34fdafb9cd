"""Packed reading: any mix of pieces and single tokens, of rows that come and go, predicts what a whole prefill does."""

import random

import pytest
import torch

from helpers import SAME_ROW, lively_model, small_config
from thoughtbubbles import load
from thoughtbubbles.generate.cache import Cache, new_cache
from thoughtbubbles.generate.decode import prefill
from thoughtbubbles.generate.packed import Batch, read
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.model.budget import Budget, Number
from thoughtbubbles.model.transformer import Thoughtbubbles

CAPACITY = 40
BUDGETS: tuple[Number, ...] = (1, 1.15, 1.5, 2, "7/3", 4, 8)
CASES = {
    "mixture": {},
    "residual": {"merge": "residual"},
    "original": {"merge": "original"},
    "plain": {"fork_layers": (), "merge": "original"},
    "copies": {"fork_layers": (), "merge": "original", "copies": 2},
    "forks at once": {"fork_layers": (0, 2)},
    "no attenuation": {"gate_qk": False, "gate_v": False},
    "head gate": {"head_gate": True},
    "relative scores": {"relative_scores": True},
    "own scores": {"own_scores": True},
    "private forks": {"fork_reach": 0, "merge": "forks"},
    "feedback": {"fork_layers": (1,), "fork_reach": 0, "feedback": True, "merge": "forks"},
    "near forks": {"fork_reach": 2},
    "feedback, near forks": {"fork_layers": (1,), "fork_reach": 2, "feedback": True, "merge": "forks"},
    "without scores": {"fork_layers": (1, 3), "scores": False, "budget": 4},
    "feedback without scores": {"fork_layers": (1,), "fork_reach": 2, "feedback": True, "scores": False},
    "forks seen for long": {"fork_reach": 11, "merge": "residual"},
}


QUICK = ("mixture", "plain", "feedback", "near forks", "feedback, near forks", "feedback without scores")


def storage(model: Thoughtbubbles, rows: int) -> Cache:
    dtype = model.embedding.weight.dtype
    return new_cache(model.config, rows=rows, capacity=CAPACITY, budget=Budget.of(8), dtype=dtype, device="cpu")


def check_same(found: Prediction, i: int, model: Thoughtbubbles, ids: torch.Tensor, budget: Number) -> None:
    expected, _ = prefill(model, ids[None], budget=budget)
    logits, wanted = found.logits[i].log_softmax(-1), expected.logits[0].log_softmax(-1)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=SAME_ROW)
    assert int(found.streams[i]) == int(expected.streams[0])


def text(rng: random.Random, generator: torch.Generator, n_ids: int) -> torch.Tensor:
    """Every other one begins with one token repeated, which gives equal scores: the earlier one must win."""
    ids = torch.randint(n_ids, (rng.randint(1, 30),), generator=generator)
    if rng.random() < 0.5:
        ids[: len(ids) // 2] = ids[0]
    return ids


def interleave(model: Thoughtbubbles, *, seed: int, texts: int = 7, rows: int = 4) -> int:
    """Texts join, are read in pieces of random size in random company, leave or are cancelled; rows are used again."""
    rng, cache, checked = random.Random(seed), storage(model, rows), 0
    generator = torch.Generator().manual_seed(seed)
    budgets = BUDGETS if model.config.scores else (4,)
    waiting = [(text(rng, generator, model.config.vocab_size), rng.choice(budgets)) for _ in range(texts)]
    live: dict[int, tuple[torch.Tensor, Number, int]] = {}
    while waiting or live:
        for row in range(rows):
            if waiting and row not in live and rng.random() < 0.5:
                ids, budget = waiting.pop()
                cache.clear(row, Budget.of(budget))
                live[row] = ids, budget, 0
        if not live:
            continue
        chosen = rng.sample(sorted(live), rng.randint(1, len(live)))
        lengths = [min(rng.choice([1, 1, 1, 2, 5, 17]), len(live[row][0]) - live[row][2]) for row in chosen]
        pieces = [live[row][0][live[row][2] : live[row][2] + n] for row, n in zip(chosen, lengths, strict=True)]
        found = read(model, cache, torch.cat(pieces), Batch.of(chosen, lengths))
        for i, (row, n) in enumerate(zip(chosen, lengths, strict=True)):
            ids, budget, done = live.pop(row)
            check_same(found, i, model, ids[: done + n], budget)
            checked += 1
            if done + n < len(ids) and rng.random() > 0.05:  # else it is complete, or cancelled
                live[row] = ids, budget, done + n
    return checked


@pytest.mark.parametrize(
    "case",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_any_interleaving_predicts_what_a_prefill_does(case):
    model = lively_model(small_config(block_size=CAPACITY, **CASES[case]), seed=3)
    assert interleave(model, seed=0) > 10


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_interleavings(case):
    for seed in range(3):
        model = lively_model(small_config(block_size=CAPACITY, **CASES[case]), seed=seed)
        for trial in range(2):
            interleave(model, seed=100 * seed + trial)


def test_the_model_in_the_package():
    assert interleave(load(dtype=torch.float64), seed=0, texts=3, rows=2) > 3


def test_predictions_of_every_token_of_a_piece():
    model = lively_model(small_config(block_size=CAPACITY))
    ids = torch.arange(12) % 7
    cache = storage(model, 2)
    read(model, cache, ids[:5], Batch.of([1], [5]))
    found = read(model, cache, torch.cat([ids[5:], ids[:3]]), Batch.of([1, 0], [7, 3]), predict=torch.arange(10))
    whole = model(ids[None], budget=8, want=("logits",)).logits[0].log_softmax(-1)
    torch.testing.assert_close(found.logits[:7].log_softmax(-1), whole[5:], rtol=0, atol=SAME_ROW)
    torch.testing.assert_close(found.logits[7:].log_softmax(-1), whole[:3], rtol=0, atol=SAME_ROW)


@pytest.mark.parametrize("case", ["mixture", "plain", "forks at once", "private forks", "feedback"])
def test_a_copied_prefix_is_as_if_read(case):
    """Also from a row that has gone on since, and is used again afterwards."""
    model = lively_model(small_config(block_size=CAPACITY, **CASES[case]), seed=5)
    cache, ids = storage(model, 3), torch.randint(23, (30,), generator=torch.Generator().manual_seed(1))
    for row, budget in enumerate((1.5, 2, 1.5)):
        cache.clear(row, Budget.of(budget))
    read(model, cache, ids[:21], Batch.of([0], [21]))
    read(model, cache, ids[3:20], Batch.of([2], [17]))  # what the row had is lost
    cache.copy_prefix(0, 2, 16)
    cache.clear(0, Budget.of(4))
    read(model, cache, ids[:9], Batch.of([0], [9]))
    other = torch.cat([ids[:16], ids[25:]])
    found = read(model, cache, other[16:], Batch.of([2], [len(other) - 16]))
    check_same(found, 0, model, other, 1.5)
    found = read(model, cache, ids[9:12], Batch.of([0], [3]))
    check_same(found, 0, model, ids[:12], 4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1,) * 20, (3, 1, 7, 9)], ids=["single tokens", "pieces"])
def test_of_equal_scores_the_earlier_wins(sizes):
    """A text of one repeated token has equal scores throughout."""
    model = lively_model(small_config(block_size=CAPACITY), seed=1)
    ids = torch.full((20,), 5)
    for budget in (1.15, 1.5, "7/3"):
        cache, done = storage(model, 1), 0
        cache.clear(0, Budget.of(budget))
        for n in sizes:
            found = read(model, cache, ids[done : done + n], Batch.of([0], [n]))
            done += n
            check_same(found, 0, model, ids[:done], budget)
