"""Properties of selection, over random rows of streams: hypothesis draws scores, bubbles, budgets and padding."""

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import oracle
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.selection import UNUSED, NextToken, Rule, candidate_keys, candidate_levels, pack, ranks

SCORES = st.one_of(
    st.floats(-6, 0, width=32),
    st.sampled_from([0.0, -1.0, -20.0, -1 / 4096, -1 / 8192]),  # many ties, forks of probability 1, edges of rounding
)


@st.composite
def rows(draw):
    """A row of bubbles: (sizes of the bubbles, a score for each candidate, padding tokens, padding streams)."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    n = 2 * sum(sizes)
    equal = draw(st.booleans())
    scores = [draw(SCORES)] * n if equal else draw(st.lists(SCORES, min_size=n, max_size=n))
    return sizes, scores, draw(st.integers(0, 3)), draw(st.integers(0, 3))


budgets = st.sampled_from(["1", "1.1", "1.15", "1.5", "2", "3.333", "4"])
rules = st.sampled_from(["block", "causal"])


class Case:
    """One row as tensors, and the survivors that a rule picks."""

    def __init__(self, row, budget: str, rule: str):
        self.sizes, self.scores, pad_tokens, pad_streams = row
        self.tokens = len(self.sizes)
        self.n_tokens = self.tokens + pad_tokens
        owner = [t for t, size in enumerate(self.sizes) for _ in range(2 * size)]
        self.original = [c % 2 == 1 and (c + 1 == len(owner) or owner[c + 1] != owner[c]) for c in range(len(owner))]
        self.owner = owner
        unused = 2 * (pad_streams + pad_tokens)
        self.token = torch.tensor([[*owner, *[self.n_tokens] * unused]])
        log_score = torch.tensor([[*self.scores, *[0.0] * unused]])
        forced = torch.tensor([[*self.original, *[False] * unused]])
        self.key = candidate_keys(candidate_levels(log_score, self.token, forced, self.n_tokens))
        self.rule = Rule(rule, Budget.of(budget))
        self.lengths = torch.tensor([self.tokens])
        self.mask = self.rule.survives(self.key, self.token, self.lengths, self.n_tokens)
        self.survivors = [c for c, yes in enumerate(self.mask[0].tolist()) if yes]


@given(rows(), budgets, rules)
def test_originals_survive_and_unused_slots_do_not(row, budget, rule):
    case = Case(row, budget, rule)
    assert {c for c, original in enumerate(case.original) if original} <= set(case.survivors)
    assert all(c < len(case.owner) for c in case.survivors)


@given(rows(), budgets)
def test_block_keeps_exactly_its_budget(row, budget):
    case = Case(row, budget, "block")
    assert len(case.survivors) == min(len(case.owner), (Fraction(budget) * case.tokens).__ceil__())


@given(rows(), budgets)
def test_block_keeps_the_best(row, budget):
    case = Case(row, budget, "block")
    dropped = [c for c in range(len(case.owner)) if c not in case.survivors]
    keys = case.key[0].tolist()
    assert not dropped or min(keys[c] for c in case.survivors) > max(keys[c] for c in dropped)


@given(rows(), budgets)
def test_causal_never_exceeds_its_budget_at_any_token(row, budget):
    case = Case(row, budget, "causal")
    for t in range(case.tokens):
        assert sum(case.owner[c] <= t for c in case.survivors) <= (Fraction(budget) * (t + 1)).__floor__()


@given(rows(), budgets)
def test_causal_decisions_are_never_revised(row, budget):
    sizes, scores, *_ = row
    whole = Case((sizes, scores, 0, 0), budget, "causal").survivors
    for t in range(1, len(sizes)):
        n = 2 * sum(sizes[:t])
        assert Case((sizes[:t], scores[:n], 0, 0), budget, "causal").survivors == [c for c in whole if c < n]


# Token 1 is refused a stream, token 2 asks for none: what was refused stays so, and token 3 may have three.
LATER_NEED = [-3, -3, -3, -3, -0.5, -0.6, -0.7, -3, -19, -19, -19, -19, -0.1, -0.2, -0.3, -3]


@given(rows(), budgets)
@example(([2, 2, 2, 2], LATER_NEED, 0, 0), "2")
def test_causal_equals_the_rule_written_as_a_loop(row, budget):
    case = Case(row, budget, "causal")
    ranked = [(case.original[c], round(case.scores[c] * 4096), -c) for c in range(len(case.owner))]
    expected, kept = [], 0
    for t in range(case.tokens):
        cap = (Fraction(budget) * (t + 1)).__floor__()
        mine = [c for c, owner in enumerate(case.owner) if owner == t]
        seen = [c for c, owner in enumerate(case.owner) if owner <= t]
        passing = [
            c
            for c in mine
            if sum(ranked[r][:2] > ranked[c][:2] or (ranked[r][:2] == ranked[c][:2] and r < c) for r in seen) < cap
        ]
        best = sorted(passing, key=lambda c: ranked[c], reverse=True)[: cap - kept]
        kept += len(best)
        expected += best
    assert case.survivors == sorted(expected)


@given(rows(), budgets, rules)
def test_padding_changes_nothing(row, budget, rule):
    sizes, scores, *_ = row
    assert Case(row, budget, rule).survivors == Case((sizes, scores, 0, 0), budget, rule).survivors


@given(st.lists(rows(), min_size=2, max_size=3), st.data(), rules)
def test_rows_do_not_know_each_other(several, data, rule):
    """Rows of different lengths, each with its own budget, padded into one batch."""
    chosen = data.draw(st.lists(budgets, min_size=len(several), max_size=len(several)))
    alone = [
        Case((sizes, scores, 0, 0), budget, rule) for (sizes, scores, *_), budget in zip(several, chosen, strict=True)
    ]
    n_tokens, width = max(c.tokens for c in alone), max(len(c.owner) for c in alone)
    token = torch.full((len(alone), width), n_tokens)
    log_score = torch.zeros(len(alone), width)
    forced = torch.zeros(len(alone), width, dtype=torch.bool)
    for i, case in enumerate(alone):
        n = len(case.owner)
        token[i, :n], log_score[i, :n], forced[i, :n] = (
            torch.tensor(case.owner),
            torch.tensor(case.scores),
            torch.tensor(case.original),
        )
    key = candidate_keys(candidate_levels(log_score, token, forced, n_tokens))
    together = Rule(rule, Budget.of(chosen))
    mask = together.survives(key, token, torch.tensor([c.tokens for c in alone]), n_tokens)
    for i, case in enumerate(alone):
        assert [c for c, yes in enumerate(mask[i].tolist()) if yes] == case.survivors
    assert together.n_slots(width // 2, n_tokens) >= int(mask.sum(-1).max()), "there is a slot for every survivor"


@given(rows())
def test_keys_differ_and_break_ties_by_place(row):
    case = Case(row, "2", "block")
    keys = case.key[0].tolist()
    assert len(set(keys)) == len(keys)
    level = [2 if o else 1 + round(s * 4096) / 1e6 for o, s in zip(case.original, case.scores, strict=True)]
    n = len(level)
    assert sorted(range(n), key=lambda c: -keys[c]) == sorted(range(n), key=lambda c: (-level[c], c))


def test_a_fork_of_probability_one_does_not_push_out_an_original():
    """All scores 1: the forks of the first tokens tie with every keep candidate and come before them."""
    row = ([1, 1, 1, 1], [0.0] * 8, 0, 0)
    assert Case(row, "1", "block").survivors == Case(row, "1", "causal").survivors == [1, 3, 5, 7]
    assert Case(row, "1.5", "block").survivors == [0, 1, 2, 3, 5, 7]


def test_exact_budgets_at_scale():
    torch.manual_seed(0)
    row = lambda tokens: ([2] * tokens, torch.randn(4 * tokens).clamp(max=0).tolist(), 0, 0)  # noqa: E731
    assert len(Case(row(50), "1.1", "block").survivors) == 55
    rising = ([2] * 100, torch.linspace(-5, -0.1, 400).tolist(), 0, 0)
    assert len(Case(rising, "1.15", "causal").survivors) == 115, "with rising scores the causal rule uses its budget up"


def test_falling_scores_use_less_than_the_budget():
    """Dropped candidates hold their rank: a documented property of the causal rule."""
    falling = ([2] * 40, torch.linspace(-0.1, -5, 160).tolist(), 0, 0)
    assert 40 <= len(Case(falling, "1.5", "causal").survivors) < 60


@pytest.mark.parametrize("tokens", [1, 3, 40, 100])
def test_ranks_are_counts_over_all_pairs(tokens):
    """Also with more candidates than one run holds."""
    size = torch.randint(1, 6, (tokens,))
    token = torch.arange(tokens).repeat_interleave(size).repeat(3, 1)
    key = torch.stack([torch.randperm(token.shape[1]) for _ in range(3)])
    beaten = key[:, None, :] > key[:, :, None]
    rank, rank_in_bubble = ranks(key, token, tokens)
    assert torch.equal(rank, (beaten & (token[:, None, :] <= token[:, :, None])).sum(-1, dtype=torch.int32))
    assert torch.equal(rank_in_bubble, (beaten & (token[:, None, :] == token[:, :, None])).sum(-1, dtype=torch.int32))


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12))
def test_pack(mask, n_slots):
    n_slots = min(n_slots, len(mask))  # a fork layer never has more slots than candidates
    packed, place = pack(torch.tensor([mask]), n_slots)
    chosen = [i for i, yes in enumerate(mask) if yes]
    assert packed[0].tolist() == (chosen + [len(mask)] * n_slots)[:n_slots]
    assert place[0].tolist() == [chosen.index(i) if i in chosen[:n_slots] else n_slots for i in range(len(mask))]


def test_fixed_budget_ignores_the_length():
    case = Case(([2, 2, 2], [-0.5] * 12, 0, 0), "1.5", "block")
    fixed = case.rule._replace(fixed_tokens=5)
    assert fixed.survives(case.key, case.token, case.lengths, case.n_tokens).sum() == 8  # ceil(1.5 · 5)
    assert fixed._replace(fixed_tokens=1).survives(case.key, case.token, case.lengths, case.n_tokens).sum() == 3


@pytest.mark.parametrize(("rule", "slots"), [("block", 56), ("causal", 55)])
def test_slots_do_not_depend_on_scores(rule, slots):
    assert Rule(rule, Budget.of(1.11)).n_slots(50, 50) == slots
    assert Rule(rule, Budget.of(4)).n_slots(50, 50) == 100


# ---- the causal rule, one token at a time ---------------------------------------------------------------------------


def levels_of(case: Case) -> list[int]:
    """Rounded log scores, originals above all: of every candidate, as a cache keeps them."""
    return [1 if original else round(s * 4096) for s, original in zip(case.scores, case.original, strict=True)]


def next_token(cases: list[Case], budgets: list[str], t: int, *, unread: int) -> torch.Tensor:
    """Who survives of token t in each row, from what is known of the tokens before; rows that have no token t idle.

    After the slots that a cache has written there are `unread` slots of garbage that would outrank everything.
    """
    earlier = [[lvl for lvl, o in zip(levels_of(c), c.owner, strict=True) if o < t] for c in cases]
    own = [[lvl for lvl, o in zip(levels_of(c), c.owner, strict=True) if o == t] or [1] for c in cases]
    width, room = max(map(len, own)), max(map(len, earlier)) + unread
    level = torch.tensor([[*row, *[UNUSED] * (width - len(row))] for row in own])
    known = torch.tensor([[*row, *[1] * (room - len(row))] for row in earlier], dtype=torch.int32)
    rule = NextToken(
        earlier=known.reshape(len(cases), room),
        n_earlier=torch.tensor([len(row) for row in earlier]),
        kept=torch.tensor([sum(c.owner[s] < t for s in c.survivors) for c in cases]),
        cap=torch.tensor([(Fraction(budget) * (t + 1)).__floor__() for budget in budgets]),
        width=width,
    )
    token = (level == UNUSED).long()
    return rule.survives(candidate_keys(level), token, torch.ones(len(cases), dtype=torch.int64), 1)


@given(st.lists(rows(), min_size=1, max_size=3), st.data())
def test_one_token_at_a_time_decides_as_all_at_once(several, data):
    chosen = data.draw(st.lists(budgets, min_size=len(several), max_size=len(several)))
    unread = data.draw(st.integers(0, 3))
    cases = [
        Case((sizes, scores, 0, 0), budget, "causal")
        for (sizes, scores, *_), budget in zip(several, chosen, strict=True)
    ]
    for t in range(max(case.tokens for case in cases)):
        mask = next_token(cases, chosen, t, unread=unread)
        for i, case in enumerate(cases):
            if t < case.tokens:
                first = 2 * sum(case.sizes[:t])
                survivors = [first + c for c, yes in enumerate(mask[i].tolist()) if yes]
                assert survivors == [s for s in case.survivors if case.owner[s] == t]


@given(rows(), budgets)
def test_one_token_at_a_time_decides_as_the_oracle(row, budget):
    case = Case((*row[:2], 0, 0), budget, "causal")
    settings = oracle.Settings(n_layer=1, n_head=1, width=2, vocab_size=2, block_size=99, budget=budget)
    keys = oracle.make_keys(case.scores, case.original)
    expected = oracle.select_causal(keys, case.owner, case.tokens, settings)
    got = [yes for t in range(case.tokens) for yes in next_token([case], [budget], t, unread=1)[0].tolist()]
    assert got == expected


def test_a_tie_with_an_earlier_candidate_is_lost():
    """Two tokens, all scores equal, r = 1.5: the cap of 3 is met by two originals and the fork that came first."""
    for dropped, survives in ((-4096, [False, True]), (-4097, [True, True])):
        rule = NextToken(
            earlier=torch.tensor([[dropped, 1]], dtype=torch.int32),
            n_earlier=torch.tensor([2]),
            kept=torch.tensor([1]),
            cap=torch.tensor([3]),
            width=2,
        )
        key = candidate_keys(torch.tensor([[-4096, 1]]))
        got = rule.survives(key, torch.tensor([[0, 0]]), torch.tensor([1]), 1)
        assert got.tolist() == [survives], "the dropped candidate of the first token holds its rank"


def test_the_running_cap_of_one_more_token():
    """Everything passes, but only what the cap leaves may stay: the best, and the original first of all."""
    key = candidate_keys(torch.tensor([[-5, -9, -1, 1]] * 4))
    for kept, expected in ((0, [1, 1, 1, 1]), (5, [1, 0, 1, 1]), (6, [0, 0, 1, 1]), (7, [0, 0, 0, 1])):
        rule = NextToken(
            earlier=torch.full((4, 8), -10, dtype=torch.int32),
            n_earlier=torch.tensor([8] * 4),
            kept=torch.tensor([kept] * 4),
            cap=torch.tensor([8] * 4),
            width=4,
        )
        got = rule.survives(key, torch.zeros(4, 4, dtype=torch.int64), torch.ones(4, dtype=torch.int64), 1)
        assert got.long().tolist() == [expected] * 4
    assert rule.n_slots(1, 1) == 2
    assert rule.n_slots(8, 1) == 4
