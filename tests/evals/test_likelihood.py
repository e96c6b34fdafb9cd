"""log p(continuation | context): exactly the tokens of the continuation count, and batching changes nothing."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import SAME_FUNCTION, SAME_ROW, lively_model, random_ids, small_config
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.evals.likelihood import Query, batches, encode_choices, encode_pair, log_likelihoods
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

FORMS = {
    "mixture": {},
    "residual": {"merge": "residual"},
    "block": {"selection": "block"},
    "fixed block": {"selection": "block", "budget_mode": "fixed"},
    "plain": {"fork_layers": ()},
    "copies": {"fork_layers": (), "copies": 3, "merge": "original"},
}


def some_queries(n: int = 32) -> list[Query]:
    """Queries of all lengths, some longer than the context length of 16 tokens."""
    dice = random.Random(0)
    ids = lambda most: tuple(dice.randrange(23) for _ in range(dice.randint(1, most)))  # noqa: E731
    return [Query(ids(14), ids(8)) for _ in range(n)]


def bigram_model() -> Thoughtbubbles:
    """Two tokens. Whatever came before, after a 0 the odds of a 0 are 3 to 1, after a 1 they are 1 to 9.

    The only block adds nothing, and the final norm of a width of 2 leaves (1, −1) or (−1, 1) of any embedding.
    """
    model = Thoughtbubbles(ModelConfig(n_layer=1, n_head=1, width=2, vocab_size=2, block_size=8)).double()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()
        # Logits are scale·(±1, ∓1)·W^T + bias·W^T: their differences must be log 3 after 0 and −log 9 after 1.
        model.embedding.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
        model.final_norm.weight.fill_((math.log(3) + math.log(9)) / 8 / (1 / math.sqrt(1 + 1e-5)))
        model.final_norm.bias.copy_(torch.tensor([1.0, -1.0]).double() * (math.log(3) - math.log(9)) / 8)
    return model


AFTER = {(0, 0): 3 / 4, (0, 1): 1 / 4, (1, 0): 1 / 10, (1, 1): 9 / 10}


@pytest.mark.parametrize(
    ("context", "continuation"),
    [((0,), (0,)), ((0,), (1,)), ((1,), (0, 1)), ((0, 1, 1), (0, 0, 1, 1)), ((1,) * 7, (0, 1)), ((0,), (1,) * 8)],
)
def test_a_model_that_can_be_worked_out_by_hand(context, continuation):
    """Catches off-by-one errors: the first token of the continuation counts, the context does not."""
    (found,) = log_likelihoods(bigram_model(), [Query(context, continuation)], vocab_size=2)
    pairs = list(zip((context[-1], *continuation[:-1]), continuation, strict=True))
    assert found.log_prob == pytest.approx(sum(math.log(AFTER[pair]) for pair in pairs), abs=SAME_FUNCTION)
    assert found.n_tokens == len(continuation)
    assert found.greedy == all(AFTER[pair] > 0.5 for pair in pairs)
    assert found.truncated == 0


@pytest.mark.parametrize("form", FORMS)
def test_against_the_whole_distribution(form):
    """With the model's selection and the proportional budget, even if the config says otherwise."""
    model = lively_model(small_config(**FORMS[form])).requires_grad_(False)
    for query, found in zip(some_queries(12), log_likelihoods(model, some_queries(12), vocab_size=23), strict=True):
        row = torch.tensor([(*query.context, *query.continuation)])[:, -17:]
        out = model(row[:, :-1], budget_mode="proportional", want=("log_probs",)).log_probs[0]
        tail = out[-len(query.continuation) :]
        expected = tail.gather(1, row[0, -len(query.continuation) :, None]).sum()
        assert found.log_prob == pytest.approx(float(expected), abs=SAME_ROW)
        assert found.greedy == (tail.argmax(-1).tolist() == list(query.continuation))
        assert found.truncated == max(0, len(query.context) + len(query.continuation) - 17)


@pytest.mark.parametrize("form", FORMS)
def test_batching_changes_nothing(form):
    """32 rows in a batch equal 32 single rows, in any order of the requests."""
    model, queries = lively_model(small_config(**FORMS[form])), some_queries()
    together = log_likelihoods(model, queries, vocab_size=23, batch_tokens=10**6)
    shuffled = random.Random(1).sample(range(32), 32)
    again = log_likelihoods(model, [queries[i] for i in shuffled], vocab_size=23, batch_tokens=100)
    for i, query in enumerate(queries):
        (alone,) = log_likelihoods(model, [query], vocab_size=23)
        for found in (together[i], again[shuffled.index(i)]):
            assert found.log_prob == pytest.approx(alone.log_prob, abs=1e-8)
            assert found[1:] == alone[1:]
    assert any(found.truncated for found in together)


def test_padding_of_the_vocabulary_is_never_the_likeliest():
    model = lively_model(small_config())
    queries = [Query((a,), (b,)) for a in range(5) for b in range(23)]
    best = {}
    for vocab_size in (23, 4):
        found = log_likelihoods(model, queries, vocab_size=vocab_size)
        best[vocab_size] = [query.continuation[0] for query, f in zip(queries, found, strict=True) if f.greedy]
        assert len(best[vocab_size]) == 5  # one token per context
    assert max(best[4]) < 4 <= max(best[23])


def test_another_budget():
    model, queries = lively_model(small_config()).requires_grad_(False), some_queries(6)
    for budget in (1, 1.5, "4/3"):
        found = log_likelihoods(model, queries, vocab_size=23, budget=budget)
        row = torch.tensor([(*queries[2].context, *queries[2].continuation)])[:, -17:]
        nll = model(row[:, :-1], targets=row[:, 1:], budget=budget, want=("token_nll",)).token_nll
        assert found[2].log_prob == pytest.approx(-float(nll[0, -found[2].n_tokens :].sum()), abs=SAME_ROW)


def test_a_single_row_of_nan_is_an_error():
    """Comparisons would not show it: NaN is not below any other loss."""
    model = lively_model(small_config(fork_layers=())).requires_grad_(False)
    model.embedding.register_forward_hook(lambda _, ids, x: x.masked_fill((ids[0] == 7)[..., None], math.nan))
    queries = [Query((1, 2), (3,)), Query((1, 7), (3,)), Query((4, 5), (6,))]
    assert len(log_likelihoods(model, [queries[0], queries[2]], vocab_size=23)) == 2
    with pytest.raises(ValueError, match="logits are NaN"):
        log_likelihoods(model, queries, vocab_size=23)


def test_progress_is_reported():
    shares = []
    log_likelihoods(lively_model(small_config()), some_queries(10), vocab_size=23, report=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_many_targets_are_decoded_in_parts(monkeypatch):
    model, queries = lively_model(small_config()), some_queries()
    expected = log_likelihoods(model, queries, vocab_size=23)
    monkeypatch.setattr("thoughtbubbles.evals.likelihood.DECODED_AT_ONCE", {"cpu": 7})
    for a, b in zip(log_likelihoods(model, queries, vocab_size=23), expected, strict=True):
        assert a.log_prob == pytest.approx(b.log_prob, abs=SAME_ROW)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 200))
def test_batches_hold_every_row_once_within_the_limit(sizes, limit):
    found = list(batches(sizes, limit=limit))
    assert sorted(i for batch in found for i in batch) == list(range(len(sizes)))
    assert all(len(batch) == 1 or len(batch) * max(sizes[i] for i in batch) <= limit for batch in found)
    longest = [sizes[i] for batch in found for i in batch]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
class TestEncoding:
    @given(context=st.text(max_size=12), continuation=st.text(min_size=1, max_size=12))
    def test_a_pair_is_one_text(self, name, context, continuation):
        """The rule of lm-evaluation-harness, written out; the shortcut for words must give the same."""
        tok = tokenizer(name)
        for follows in (continuation, f" {continuation}"):
            query = encode_pair(tok, context, follows)
            bare = context.rstrip()
            whole = tok.encode(context + follows)
            ids = tok.encode(bare)
            assert query.context == (tuple(ids) or (tok.end_of_text,))
            assert query.continuation == tuple(whole[len(ids) :])

    def test_choices_share_their_context(self, name):
        tok, choices = tokenizer(name), (" one", "two", "  three", "\nfour", " 5")
        for context in ("What follows?", "ends in a space ", "", "Ünïcode…"):
            assert encode_choices(tok, context, choices) == [encode_pair(tok, context, text) for text in choices]

    def test_white_space_moves_to_the_continuation(self, name):
        tok = tokenizer(name)
        assert encode_pair(tok, "Answer: ", "yes") == encode_pair(tok, "Answer:", " yes")
        assert encode_pair(tok, "", " yes") == Query((tok.end_of_text,), tuple(tok.encode(" yes")))


def test_mistakes():
    model = lively_model(small_config())
    ids = tuple(random_ids(model.config, 1, 17)[0].tolist())
    for query, message in (
        (Query((), (1,)), "query 1 has an empty context: give at least one token"),
        (Query((1,), ()), "query 1 has an empty continuation"),
        (Query((1,), ids), "a continuation of 17 tokens, more than block_size = 16: a context can be truncated, a"),
    ):
        with pytest.raises(ValueError, match=message):
            log_likelihoods(model, [Query((1,), (2,)), query], vocab_size=23)
    with pytest.raises(ValueError, match="batch_tokens = -3"):
        log_likelihoods(model, some_queries(2), vocab_size=23, batch_tokens=-3)
