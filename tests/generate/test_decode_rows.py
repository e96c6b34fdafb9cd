"""A row is read alike whatever its neighbours, its padding, its split and its storage; and without a cache."""

from fractions import Fraction

import pytest
import torch

from generate.reading import assert_reads_alike, assert_same_state, bubble_sizes, padded, read_in_steps, some_rows
from helpers import SAME_ROW, lively_model, random_ids, small_config
from thoughtbubbles.generate.decode import decode_step, predict_uncached, prefill
from thoughtbubbles.generate.step import advance

# ---- neighbours, padding, splits, storage ---------------------------------------------------------------------------


def test_how_the_prompt_is_split_does_not_matter():
    config = small_config(budget=1.5)
    model = lively_model(config, seed=4)
    read = read_in_steps(model, some_rows(config, [16]) * 4, prompts=[1, 2, 7, 15])
    for i in (1, 2, 3):
        n = len(read.log_probs[i])
        torch.testing.assert_close(read.log_probs[i], read.log_probs[0][-n:], atol=SAME_ROW, rtol=0)
        assert_same_state(read.cache, i, read.cache, 0)


def test_neighbours_do_not_matter():
    """The same row with others that are longer, shorter, richer, and that are dropped or repeated on the way."""
    config = small_config()
    model = lively_model(config, seed=6)
    mine, rich, short = some_rows(config, [15, 16, 3], seed=30)
    alone = read_in_steps(model, [mine], prompts=[4], budget=[1.5]).log_probs[0]

    ids, lengths = padded([rich[:5], mine[:4], short])
    prediction, cache = prefill(model, ids, lengths=lengths, budget=[8, 1.5, 1])
    where, got = 1, [prediction.logits[1].log_softmax(-1)]
    for n in range(4, 15):
        if n == 5:
            cache, where = cache.reorder(torch.tensor([1, 0, 0])), 0
        if n == 9:
            cache, where = cache.reorder(torch.tensor([2, 0])), 1
        if n == 13:
            cache, where = cache.reorder(torch.tensor([1])), 0
        new = torch.randint(config.vocab_size, (cache.rows,))
        new[where] = mine[n]
        prediction, cache = decode_step(model, cache, new)
        got.append(prediction.logits[where].log_softmax(-1))
    torch.testing.assert_close(torch.stack(got), alone, atol=SAME_ROW, rtol=0)


def test_padding_is_not_read():
    config = small_config(budget=2)
    model = lively_model(config)
    row = some_rows(config, [5])[0]
    alone, cache = prefill(model, row[None])
    ids, lengths = padded([row, some_rows(config, [12])[0]], filler=-99)
    together, padded_cache = prefill(model, ids, lengths=lengths.tolist())
    torch.testing.assert_close(together.logits[:1], alone.logits, atol=SAME_ROW, rtol=0)
    assert_same_state(cache, 0, padded_cache, 0)


@pytest.mark.parametrize("capacity", [12, 13])
def test_capacity_does_not_matter(capacity):
    config = small_config(budget=1.15)
    model = lively_model(config)
    rows = some_rows(config, [12, 8])
    read = read_in_steps(model, rows, prompts=[2, 8], budget=[8, "7/3"], capacity=capacity)
    assert_reads_alike(model, rows, [2, 8], [8, "7/3"], read)


def test_the_mode_of_the_model_does_not_matter():
    config = small_config()
    model = lively_model(config)
    rows = some_rows(config, [9, 9])
    evaluating = read_in_steps(model.eval(), rows, prompts=[3, 5])
    training = read_in_steps(model.train(), rows, prompts=[3, 5])
    for a, b in zip(evaluating.log_probs, training.log_probs, strict=True):
        assert torch.equal(a, b)
    assert not training.log_probs[0].requires_grad


def test_both_attention_paths_fill_the_same_cache():
    config = small_config(budget=1.5)
    fused, reference = (lively_model(config, attention=path) for path in ("fused", "reference"))
    rows = some_rows(config, [9, 12])
    ids, lengths = padded(rows)
    a, b = (prefill(model, ids, lengths=lengths)[1] for model in (fused, reference))
    for i in range(2):
        assert_same_state(a, i, b, i)


def test_a_block_model_read_with_the_causal_rule():
    """The cache has one rule, which is that of the forward with causal selection."""
    model = lively_model(small_config(selection="block", budget=1.5, budget_mode="fixed"))
    rows = some_rows(model.config, [11, 8])
    assert_reads_alike(model, rows, [2, 4], [None] * 2, read_in_steps(model, rows, prompts=[2, 4]))


@pytest.mark.parametrize("form", [{}, {"fork_layers": (0, 2)}, {"fork_layers": ()}])
def test_widths_that_are_known_in_advance_change_nothing(form):
    config = small_config(budget=2, **form)
    model = lively_model(config)
    ids = random_ids(config, 3, 6)
    budget = [1, 2, 8] if config.fork_layers else None
    one, two = (prefill(model, ids, budget=budget)[1] for _ in range(2))
    width, widths = 1, []
    for start in sorted({0, *config.fork_layers}):
        width *= 2 if start in config.fork_layers else 1
        widths.append(width)
    for step in range(6):
        new, active = random_ids(config, 1, 3, seed=step)[0], torch.tensor([True, step % 3 > 0, True])
        a, one = decode_step(model, one, new, active=active)
        b, two = advance(model, two, new, active, widths=widths)
        torch.testing.assert_close(a.logits[active], b.logits[active], atol=SAME_ROW, rtol=0)
        assert torch.equal(a.streams[active], b.streams[active])
    for i in range(3):
        assert_same_state(one, i, two, i)


def test_storage_is_used_again():
    """A cache given as `into` leads to the same predictions as a new one, whatever it held before."""
    config = small_config()
    model, ids = lively_model(config), random_ids(config, 2, 12)
    _, old = prefill(model, ids, budget=[4, 4])
    expected, fresh = prefill(model, ids[:, 3:8], lengths=[5, 2], budget=[1.5, 2])
    found, again = prefill(model, ids[:, 3:8], lengths=[5, 2], budget=[1.5, 2], into=old)
    for _ in range(3):
        torch.testing.assert_close(found.logits, expected.logits, atol=SAME_ROW, rtol=0)
        expected, fresh = decode_step(model, fresh, ids[:, 0])
        found, again = decode_step(model, again, ids[:, 0])
    # 33 streams in 16 tokens are one more than a budget of 2 has slots for.
    for wrong in ({"budget": 4}, {"budget": "33/16"}, {"ids": ids[:1, :4]}):
        _, small = prefill(model, ids, budget=2)
        with pytest.raises(ValueError, match="into is a cache of 2 rows: give one of"):
            prefill(model, **{"ids": ids[:, :4], **wrong}, into=small)


# ---- decoding without a cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["block", "causal"])
def test_decoding_without_a_cache_is_the_forward_of_each_row_alone(selection):
    model = lively_model(small_config(budget=1.5))
    rows, budgets = some_rows(model.config, [3, 11, 7]), [2, 1.15, Fraction(7, 3)]
    ids, lengths = padded(rows)
    prediction = predict_uncached(model, ids, lengths=lengths, budget=budgets, selection=selection)
    for i, row in enumerate(rows):
        alone = model(row[None], budget=budgets[i], selection=selection, want=("logits",), trace=True)
        torch.testing.assert_close(prediction.logits[i], alone.logits[0, -1], atol=SAME_ROW, rtol=0)
        assert int(prediction.streams[i]) == bubble_sizes(model, alone, len(row))[-1]
    assert not prediction.logits.requires_grad


def test_decoding_without_a_cache_with_a_fixed_budget():
    model = lively_model(small_config(budget=1.5, selection="block"))
    ids = random_ids(model.config, 1, 5)
    fixed, own = (predict_uncached(model, ids, budget_mode=mode) for mode in ("fixed", None))
    alone = model(ids, budget_mode="fixed", want=("logits",)).logits[:, -1]
    torch.testing.assert_close(fixed.logits, alone, atol=SAME_ROW, rtol=0)
    assert not torch.allclose(fixed.logits, own.logits)


# ---- rows that wait -------------------------------------------------------------------------------------------------


def test_rows_that_are_not_active_are_left_as_they_are():
    config = small_config(budget=2)
    model = lively_model(config)
    ids = random_ids(config, 3, 5)
    _, cache = prefill(model, ids, budget=[2, 8, 1.5])
    before = cache.clone()
    _, after = decode_step(model, cache, torch.tensor([4, -1, 10**9]), active=torch.tensor([True, False, False]))
    assert after.n_tokens.tolist() == [6, 5, 5]
    for i in (1, 2):
        assert_same_state(after, i, before, i)
    for ours, theirs in zip(after.spans, before.spans, strict=True):  # not even after the slots in use
        for name in ("log_score", "token", "level"):
            if getattr(ours, name) is not None:
                assert torch.equal(getattr(ours, name)[1:, :-1], getattr(theirs, name)[1:, :-1])
        for name in ("key", "value"):
            assert torch.equal(getattr(ours, name)[:, 1:, :, :-1], getattr(theirs, name)[:, 1:, :, :-1])
    _, nobody = decode_step(model, after, torch.tensor([0, 0, 0]), active=torch.zeros(3, dtype=torch.bool))
    for i in range(3):
        assert_same_state(nobody, i, after, i)
    going_on, _ = decode_step(model, after, torch.tensor([1, 2, 3]))
    alone, _ = decode_step(model, before, torch.tensor([1, 2, 3]))
    torch.testing.assert_close(going_on.logits[1:], alone.logits[1:], atol=SAME_ROW, rtol=0)


def test_a_full_row_can_wait_for_others():
    """All slots of the waiting row are taken, in every span: what it would write now must go nowhere."""
    config = small_config()
    model = lively_model(config)
    rows = some_rows(config, [16, 16])
    read = read_in_steps(model, rows, prompts=[16, 2], budget=[1, 1])
    assert read.cache.spans[-1].used.tolist() == [16, 16]
    assert_reads_alike(model, rows, [16, 2], [1, 1], read)
    for i, row in enumerate(rows):
        assert_same_state(read.cache, i, prefill(model, row[None], budget=1)[1], 0)
