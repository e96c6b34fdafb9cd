"""Scoring each token from its own prefix: with and without a cache, against the parallel forward and plain loops."""

import math
import statistics

import pytest
import torch

from helpers import SAME_FUNCTION, SAME_ROW, SAME_ROW_FLOAT32, lively_model, random_ids, small_config
from thoughtbubbles.evals.autoregressive import (
    UNKNOWN,
    Scores,
    Windows,
    blockwise,
    compare,
    through_cache,
    without_cache,
)
from thoughtbubbles.evals.perplexity import describe, differences, perplexity, remarks, ways_of
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.transformer import Thoughtbubbles

LENGTHS = [10, 4, 1, 7]  # tokens of uneven windows; a block has 10


def small_model(**changes) -> Thoughtbubbles:
    return lively_model(small_config(block_size=10, **changes), seed=2)


def some_windows(config: ModelConfig, *, rows: int = 3, tokens: int = 10, lengths: list[int] | None = None) -> Windows:
    ids = random_ids(config, rows, tokens + 1)
    sizes = None if lengths is None else torch.tensor(lengths)
    return Windows.of(config, ids[:, :-1], targets=ids[:, 1:], lengths=sizes)


def ragged_windows(config: ModelConfig) -> Windows:
    return some_windows(config, rows=len(LENGTHS), lengths=LENGTHS)


def assert_same_losses(ours: Scores, theirs: Scores) -> None:
    assert torch.equal(ours.counted, theirs.counted)
    torch.testing.assert_close(ours.nll, theirs.nll, atol=SAME_ROW, rtol=0)


def prefix_by_prefix(model: Thoughtbubbles, windows: Windows, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and most likely tokens, one window and one prefix at a time."""
    nll = torch.zeros(windows.ids.shape, dtype=torch.float64)
    likeliest = torch.full(windows.ids.shape, UNKNOWN)
    for row, t in windows.counted.nonzero().tolist():
        out = model(windows.ids[row : row + 1, : t + 1], want=("log_probs",), **options)
        nll[row, t] = -out.log_probs[0, -1, windows.targets[row, t]].detach()
        likeliest[row, t] = out.log_probs[0, -1].argmax()
    return nll, likeliest


CAUSAL = [
    *({"merge": merge, "budget": budget} for merge in ("mixture", "residual", "original") for budget in (2, 1.3, 4)),
    {"fork_layers": (), "merge": "original"},
    {"fork_layers": (), "merge": "original", "copies": 3},
]


@pytest.mark.parametrize(
    "changes", [CAUSAL[0], *(pytest.param(c, marks=pytest.mark.slow) for c in CAUSAL[1:])], ids=str
)
def test_through_the_cache_a_causal_model_gives_the_parallel_losses(changes):
    model = small_model(**changes)
    windows = ragged_windows(model.config)
    parallel = blockwise(model, windows, batch=2)
    assert_same_losses(through_cache(model, windows, batch=2), parallel)
    assert_same_losses(without_cache(model, windows, batch=3), parallel)


@pytest.mark.parametrize("budget", [1, 1.7, "5/3"])
def test_another_budget_reaches_every_way(budget):
    model = small_model()
    windows = some_windows(model.config)
    given = blockwise(model, windows, budget=budget)
    assert_same_losses(through_cache(model, windows, budget=budget), given)
    assert compare(given, blockwise(model, windows)).largest > SAME_ROW_FLOAT32


@pytest.mark.parametrize("mode", ["proportional", "fixed"])
@pytest.mark.parametrize("budget", [None, 1.5])
def test_decoding_without_a_cache_is_a_loop_over_windows_and_prefixes(mode, budget):
    model = small_model(selection="block")
    windows = ragged_windows(model.config)
    found = without_cache(model, windows, budget=budget, budget_mode=mode, batch=3)
    options = {"selection": "block", "budget": budget, "budget_mode": mode}
    nll, likeliest = prefix_by_prefix(model, windows, **options)
    torch.testing.assert_close(found.nll, nll, atol=SAME_ROW, rtol=0)
    assert torch.equal(found.likeliest, likeliest)


def test_a_fixed_budget_is_another_one_until_the_block_is_full():
    model = small_model(selection="block")
    windows = some_windows(model.config)
    proportional = without_cache(model, windows)
    fixed = without_cache(model, windows, budget_mode="fixed")
    apart = (proportional.nll - fixed.nll).abs()
    assert (apart[:, 1:5] > SAME_ROW_FLOAT32).any()
    torch.testing.assert_close(proportional.nll[:, -1], fixed.nll[:, -1], atol=SAME_ROW, rtol=0)


def test_a_model_with_a_fixed_budget_is_scored_with_the_proportional_one_unless_asked():
    model = small_model(selection="block", budget_mode="fixed")
    windows = some_windows(model.config, tokens=6)
    expected = model(windows.ids, targets=windows.targets, budget_mode="proportional", want=("token_nll",)).token_nll
    torch.testing.assert_close(blockwise(model, windows).nll, expected.detach(), atol=SAME_ROW, rtol=0)
    nll, _ = prefix_by_prefix(model, windows, budget_mode="proportional")
    torch.testing.assert_close(without_cache(model, windows).nll, nll, atol=SAME_ROW, rtol=0)


def test_block_selection_sees_the_future_only_blockwise():
    """The last target of a window has no future: only there must both agree."""
    model = small_model(selection="block")
    windows = ragged_windows(model.config)
    apart = (blockwise(model, windows).nll - without_cache(model, windows).nll).abs()
    last = apart.gather(1, windows.lengths[:, None] - 1)
    assert last.max() < SAME_ROW
    assert apart.max() > SAME_ROW_FLOAT32


def test_the_cached_approximation_is_the_causal_rule_with_the_same_weights():
    model = small_model(selection="block")
    windows = ragged_windows(model.config)
    found = through_cache(model, windows)
    out = model(
        windows.ids, targets=windows.targets, lengths=windows.lengths, selection="causal", want=("token_nll", "logits")
    )
    torch.testing.assert_close(found.nll, out.token_nll.detach(), atol=SAME_ROW, rtol=0)
    greedy = out.logits.argmax(-1)
    assert torch.equal(found.likeliest[windows.counted], greedy[windows.counted])


@pytest.mark.slow
@pytest.mark.parametrize("score", [blockwise, through_cache, without_cache])
@pytest.mark.parametrize("selection", ["causal", "block"])
def test_the_size_of_batches_and_padding_change_nothing(score, selection):
    model = small_model(selection=selection)
    windows = ragged_windows(model.config)
    together = score(model, windows, batch=8)
    assert_same_losses(score(model, windows, batch=1), together)
    for row, tokens in enumerate(LENGTHS):
        alone = Windows.of(
            model.config, windows.ids[row : row + 1, :tokens], targets=windows.targets[row : row + 1, :tokens]
        )
        expected = score(model, alone).nll[0]
        torch.testing.assert_close(together.nll[row, :tokens], expected, atol=SAME_ROW, rtol=0)
        assert not together.nll[row, tokens:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("score", [blockwise, through_cache, without_cache])
def test_windows_go_to_the_device_of_the_model(score):
    model = small_model(selection="block")
    windows = ragged_windows(model.config)
    expected = score(model, windows)
    found = score(model.cuda(), windows)
    assert_same_losses(found, expected)
    assert torch.equal(found.likeliest, expected.likeliest)


@pytest.mark.parametrize("score", [blockwise, through_cache, without_cache])
def test_targets_that_do_not_count(score):
    model = small_model()
    whole = some_windows(model.config)
    targets = whole.targets.clone()
    targets[:, :4] = IGNORED
    targets[1, 6:9] = IGNORED
    masked = score(model, Windows.of(model.config, whole.ids, targets=targets))
    assert masked.n_tokens == 3 * 6 - 3
    assert not masked.nll[targets == IGNORED].any()
    expected = score(model, whole).nll[targets != IGNORED]
    torch.testing.assert_close(masked.nll[targets != IGNORED], expected, atol=SAME_ROW, rtol=0)
    assert masked.mean == pytest.approx(float(expected.mean()), abs=SAME_FUNCTION)


def test_ids_without_text_are_never_the_likeliest():
    model = small_model()
    windows = some_windows(model.config)
    every = through_cache(model, windows)
    few = through_cache(model, windows, vocab_size=7)
    assert every.likeliest.max() >= 7
    assert few.likeliest.max() < 7
    assert torch.equal(few.nll, every.nll)


def test_statistics():
    nll = torch.tensor([[1.0, 2.0, 3.0, 6.0], [2.0, 2.0, 2.0, 4.0], [0.5, 0.5, 1.5, 1.5]], dtype=torch.float64)
    unknown = torch.full(nll.shape, UNKNOWN)
    scores = Scores(nll, unknown, torch.ones_like(nll, dtype=torch.bool), 1.0)
    assert scores.window_means == [3.0, 2.5, 1.0]
    assert scores.mean == pytest.approx(26 / 12)
    assert scores.perplexity == pytest.approx(math.exp(26 / 12))
    assert scores.window_perplexities == pytest.approx([math.exp(3), math.exp(2.5), math.e])
    assert scores.standard_error == pytest.approx(statistics.stdev([3, 2.5, 1]) / math.sqrt(3))
    # A shift shared by all windows is their mean difference, without spread.
    gap = compare(scores._replace(nll=nll + 0.25), scores)
    assert gap.mean == pytest.approx(0.25)
    assert gap.standard_error == pytest.approx(0, abs=SAME_FUNCTION)
    assert (gap.largest, gap.same_greedy) == (0.25, None)


def test_uneven_windows_count_by_their_tokens():
    nll = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]], dtype=torch.float64)
    counted = torch.tensor([[True, True, True], [True, False, False]])
    scores = Scores(nll, torch.full(nll.shape, UNKNOWN), counted, 1.0)
    assert scores.mean == pytest.approx(11 / 4)
    assert scores.window_means == [2.0, 5.0]
    # Sums 6 and 5 against 2.75 · 3 and 2.75: both 2.25 apart.
    assert scores.standard_error == pytest.approx(math.sqrt(2 * 2 * 2.25**2) / 4)
    alone = Scores(nll[:1], torch.full((1, 3), UNKNOWN), counted[:1], 1.0)
    assert alone.standard_error is None


def test_agreement_is_counted_over_the_targets_alone():
    model = small_model(selection="block")
    windows = ragged_windows(model.config)
    exact, cached = without_cache(model, windows), through_cache(model, windows)
    same = [a == b for a, b in zip(exact.likeliest[exact.counted], cached.likeliest[exact.counted], strict=True)]
    gap = compare(cached, exact)
    assert gap.same_greedy == pytest.approx(sum(same) / sum(LENGTHS))
    assert 0 < gap.same_greedy < 1
    assert gap.largest == float((cached.nll - exact.nll).abs().max())


@pytest.mark.parametrize(
    ("changes", "names", "missing"),
    [
        ({"selection": "block"}, ["blockwise", "autoregressive", "fixed", "cached"], []),
        ({}, ["blockwise", "autoregressive"], ["fixed"]),
        ({"fork_layers": (), "selection": "block", "merge": "original"}, ["blockwise", "autoregressive"], []),
        ({"fork_layers": (), "copies": 3, "merge": "original"}, ["blockwise", "autoregressive"], []),
    ],
)
def test_the_ways_of_each_kind_of_model(changes, names, missing):
    model = small_model(**changes)
    windows = some_windows(model.config)
    told = {}
    scores = perplexity(
        model, windows, vocab_size=23, report=lambda title: lambda share: told.setdefault(title, []).append(share)
    )
    assert list(scores) == names
    for shares in told.values():
        assert shares == sorted(shares)
        assert shares[-1] == 1
    assert list(told) == [way.title for way in ways_of(model.config, vocab_size=23).values()]
    found = describe(model.config, scores, vocab_size=23, n_bytes=100)
    assert list(found["missing"]) == missing
    assert found["ways"]["autoregressive"]["nats"] == scores["autoregressive"].mean
    gaps = differences(scores)
    assert ("cached - autoregressive" in gaps) == ("cached" in names)
    if "cached" in names:
        assert found["differences"]["cached - autoregressive"]["largest"] > SAME_ROW_FLOAT32
        assert any("greedy predictions agree" in line for line in remarks(found))
    else:
        assert gaps["autoregressive - blockwise"].largest < SAME_ROW


@pytest.mark.usefixtures("no_shape_checks")
def test_mistakes():
    model = small_model()
    config = model.config
    ids = random_ids(config, 2, 11)
    with pytest.raises(ValueError, match="11 tokens per row, more than block_size = 10"):
        Windows.of(config, ids, targets=ids)
    with pytest.raises(ValueError, match="ids has 23"):
        Windows.of(config, torch.full((1, 4), 23), targets=ids[:1, :4])
    targets = ids[:, 1:].clone()
    targets[1] = IGNORED
    with pytest.raises(ValueError, match="window 1 has no targets that count: leave it out"):
        Windows.of(config, ids[:, :-1], targets=targets)
    with pytest.raises(ValueError, match="batch = 0: give 1 or more"):
        blockwise(model, some_windows(config), batch=0)
    with pytest.raises(ValueError, match=r"budget = 0\.5 is below 1"):
        through_cache(model, some_windows(config), budget=0.5)
    with pytest.raises(ValueError, match="a fixed budget applies to the full context"):
        without_cache(model, some_windows(config), budget_mode="fixed")
