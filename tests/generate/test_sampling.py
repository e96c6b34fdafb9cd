"""What may be drawn, and the draw: against Hugging Face, against a plain reference, and against counting."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import SAME_FUNCTION, SAME_FUNCTION_FLOAT32, SAME_ROW, lively_model, random_ids, small_config
from thoughtbubbles.generate.decode import prefill
from thoughtbubbles.generate.sample import BatchSampling, Sampling, pick, processed, uniform

CPU = torch.device("cpu")

SETTINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.3),
    Sampling(temperature=7.5),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=1000),
    Sampling(top_p=0.9),
    Sampling(top_p=0.31),
    Sampling(top_p=1e-12),
    Sampling(min_p=0.1),
    Sampling(min_p=1),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.7),
    Sampling(temperature=0, repetition_penalty=4),
    Sampling(temperature=1.7, top_k=9, top_p=0.8, min_p=0.07, repetition_penalty=1.2),
    Sampling(temperature=0.6, top_k=3, top_p=0.99),
    Sampling(temperature=2, top_p=0.5, min_p=0.4),
]


def plain(
    logits: list[float], sampling: Sampling, *, n_ids: int, seen: set[int], margins: list[float] | None = None
) -> list[float]:
    """Of one row, by the meaning of the words: penalty, temperature, top-k, top-p, min-p, in this order.

    `margins` collects how near each decision was: rounding decides those at 0.
    """
    margins = [] if margins is None else margins
    left = dict(enumerate(logits[:n_ids]))
    for i in seen & left.keys():
        left[i] = left[i] * sampling.repetition_penalty if left[i] < 0 else left[i] / sampling.repetition_penalty
    if sampling.temperature > 0:
        left = {i: value / sampling.temperature for i, value in left.items()}

        def probabilities() -> dict[int, float]:
            largest = max(left.values())
            weight = {i: math.exp(value - largest) for i, value in left.items()}
            return {i: w / sum(weight.values()) for i, w in weight.items()}

        ranked = sorted(left.values())
        margins += [b - a for a, b in pairwise(ranked)]
        if sampling.top_k is not None:
            least = sorted(left.values(), reverse=True)[: sampling.top_k][-1]
            left = {i: value for i, value in left.items() if value >= least}
        if sampling.top_p < 1:
            together, kept = 0.0, set()
            for i, p in sorted(probabilities().items(), key=lambda item: -item[1]):
                margins.append(abs(together - sampling.top_p))
                if kept and together >= sampling.top_p:
                    break
                kept.add(i)
                together += p
            left = {i: value for i, value in left.items() if i in kept}
        chances = probabilities()
        least = sampling.min_p * max(chances.values())
        margins += [abs(p - least) for p in chances.values() if p < max(chances.values())]
        left = {i: value for i, value in left.items() if chances[i] >= least}
    return [left.get(i, -math.inf) for i in range(len(logits))]


def settings_of(*each: Sampling) -> BatchSampling:
    return BatchSampling.of(each, device=CPU)


def some_logits(rows: int, n: int = 40, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (3 * torch.randn(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def some_seen(rows: int, n: int = 40) -> torch.Tensor:
    return torch.rand(rows, n, generator=torch.Generator().manual_seed(9)) < 0.4


def assert_same_logits(ours, theirs, tolerance: float = SAME_FUNCTION) -> None:
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs, dtype=ours.dtype), atol=tolerance, rtol=0)


# ---- what may be drawn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_steps_mean_what_their_names_say(sampling):
    logits, seen = some_logits(6), some_seen(6)
    for n_ids in (40, 33):
        ours = processed(logits, settings_of(*[sampling] * 6), n_ids=n_ids, seen=seen)
        for i in range(6):
            already = set(seen[i].nonzero()[:, 0].tolist())
            assert_same_logits(ours[i], plain(logits[i].tolist(), sampling, n_ids=n_ids, seen=already))


@settings(max_examples=60)
@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=9, unique=True),
    st.floats(0.05, 5),
    st.one_of(st.none(), st.integers(1, 12)),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0.2, 5),
    st.sets(st.integers(0, 8)),
)
def test_any_settings_mean_what_their_names_say(logits, temperature, top_k, top_p, min_p, penalty, already):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    n = len(logits)
    seen = torch.tensor([[i in already for i in range(n)]])
    ours = processed(torch.tensor([logits], dtype=torch.float64), settings_of(sampling), n_ids=n, seen=seen)[0]
    margins: list[float] = []
    theirs = plain(logits, sampling, n_ids=n, seen=already, margins=margins)
    assert bool((ours > -math.inf).any()), "at least one token is left"
    assume(min(margins, default=1) > SAME_ROW)
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("sampling", [s for s in SETTINGS if s.temperature > 0], ids=repr)
def test_the_steps_of_hugging_face(sampling):
    transformers = pytest.importorskip("transformers")
    prompt = torch.randint(40, (6, 12), generator=torch.Generator().manual_seed(3))
    logits, theirs = some_logits(6), some_logits(6)
    steps = [
        transformers.RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)),
        transformers.TemperatureLogitsWarper(float(sampling.temperature)),
        *([transformers.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
        *([transformers.TopPLogitsWarper(float(sampling.top_p))] if sampling.top_p < 1 else []),
        *([transformers.MinPLogitsWarper(float(sampling.min_p))] if sampling.min_p else []),
    ]
    for step in steps:
        theirs = step(prompt, theirs)
    seen = torch.zeros(6, 40, dtype=torch.bool).scatter(1, prompt, True)
    assert_same_logits(processed(logits, settings_of(*[sampling] * 6), n_ids=40, seen=seen), theirs)


def test_rows_with_their_own_settings_are_as_if_alone():
    logits, seen = some_logits(len(SETTINGS)), some_seen(len(SETTINGS))
    together = processed(logits, settings_of(*SETTINGS), n_ids=37, seen=seen)
    draws = torch.linspace(0.01, 0.99, len(SETTINGS), dtype=torch.float64)
    picked = pick(logits, settings_of(*SETTINGS), draws, n_ids=37, seen=seen, n_top=3)
    for i, sampling in enumerate(SETTINGS):
        row = slice(i, i + 1)
        alone = processed(logits[row], settings_of(sampling), n_ids=37, seen=seen[row])
        if sampling.temperature > 0:
            assert_same_logits(together[row], alone)
        one = pick(logits[row], settings_of(sampling), draws[row], n_ids=37, seen=seen[row], n_top=3)
        for mine, theirs in zip(picked, one, strict=True):
            assert torch.equal(mine[row], theirs)


def test_ids_that_the_tokenizer_lacks_never_occur():
    logits = some_logits(2000, 12)
    logits[:, 9:] += 20
    draws = torch.rand(2000, dtype=torch.float64)
    draws[:2] = torch.tensor([0.0, math.nextafter(1, 0)])
    for sampling in SETTINGS:
        seen = torch.zeros(2000, 12, dtype=torch.bool)
        picked = pick(logits, settings_of(*[sampling] * 2000), draws, n_ids=9, seen=seen, n_top=9)
        assert int(picked.id.max()) < 9
        assert int(picked.top_id.max()) < 9


# ---- the draw -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=2.5, top_k=6), Sampling(top_p=0.9, min_p=0.01)], ids=repr
)
def test_draws_follow_the_distribution(sampling):
    n = 20_000
    logits = some_logits(1, 10, seed=4) / 2
    draws = torch.tensor([uniform(seed=11, index=i) for i in range(n)], dtype=torch.float64)
    picked = pick(logits.expand(n, -1), settings_of(*[sampling] * n), draws, n_ids=10)
    counts = Counter(picked.id.tolist())
    left = plain(logits[0].tolist(), sampling, n_ids=10, seen=set())
    weight = [math.exp(value) for value in left]
    expected = {i: n * w / sum(weight) for i, w in enumerate(weight) if w > 0}
    assert counts.keys() <= expected.keys(), "what was cut off is never drawn"
    off = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
    free = len(expected) - 1
    assert off < free + 5 * math.sqrt(2 * free), "chi-square: five deviations above its mean"


def test_the_draw_is_a_place_in_the_cumulative_probability():
    logits = torch.tensor([[0.1, 0.0, 0.4, 0.5]], dtype=torch.float64).log()  # 0 is -inf
    drawn = lambda u: int(  # noqa: E731
        pick(logits, settings_of(Sampling()), torch.tensor([u], dtype=torch.float64), n_ids=4).id
    )
    assert [drawn(u) for u in (0.0, 0.0999, 0.1001, 0.4999, 0.5001, math.nextafter(1, 0))] == [0, 0, 2, 2, 3, 3]


def test_uniform_is_even_and_below_one():
    n, bins = 40_000, 64
    numbers = [uniform(seed, index) for seed in range(8) for index in range(n // 8)]
    assert all(0 <= u < 1 for u in numbers)
    assert len(set(numbers)) == n
    counts = Counter(int(u * bins) for u in numbers)
    off = sum((counts[i] - n / bins) ** 2 / (n / bins) for i in range(bins))
    assert off < bins - 1 + 5 * math.sqrt(2 * (bins - 1))
    pairs = Counter((int(uniform(seed, 0) * 8), int(uniform(seed, 1) * 8)) for seed in range(6400))
    off = sum((pairs[i, j] - 100) ** 2 / 100 for i in range(8) for j in range(8))
    assert off < 63 + 5 * math.sqrt(2 * 63), "neither the seed nor the place leaves a trace"


def test_uniform_depends_on_seed_and_index():
    assert uniform(1, 23) != uniform(12, 3)
    assert uniform(-1, 0) != uniform(1, 0)
    assert uniform(2**80, 5) == uniform(2**80, 5)
    assert uniform(0, 0) == uniform(0, 0) != uniform(0, 1)


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    for sampling in ([Sampling(temperature=0)] * 2, [Sampling(temperature=0), Sampling(top_k=4)]):
        picked = pick(logits, settings_of(*sampling), torch.tensor([0.9, 0.0], dtype=torch.float64), n_ids=4)
        assert picked.id.tolist() == [1, 0]


def test_top_p_that_is_reached_exactly_is_reached():
    """Two equal tokens with one half each: the first alone has the requested probability."""
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    left = processed(logits, settings_of(Sampling(top_p=0.5)), n_ids=4)
    assert left.isfinite().tolist() == [[True, False, False, False]]
    both = processed(logits, settings_of(Sampling(top_p=0.5000001)), n_ids=4)
    assert both.isfinite().tolist() == [[True, True, False, False]]


def test_the_largest_settings_are_harmless():
    """More tokens than there are, and heat under which all that may be drawn are alike; the ids cut off stay out."""
    logits = torch.tensor([[3.0, -math.inf, 1.0, 2.0]])
    settings = settings_of(Sampling(temperature=1e6, top_k=10**30, seed=2**64 - 1))
    allowed = processed(logits, settings, n_ids=3)
    torch.testing.assert_close(allowed.softmax(-1), torch.tensor([[0.5, 0, 0.5, 0]]), atol=1e-5, rtol=0)


def test_equals_of_the_last_place_of_top_k_stay():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    left = processed(logits, settings_of(Sampling(top_k=2)), n_ids=5) > -math.inf
    assert left.tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [1e-2, 1e-3])
def test_a_small_temperature_is_greedy(dtype, temperature):
    logits = some_logits(50, dtype=dtype)
    draws = torch.rand(50, dtype=torch.float64)
    picked = pick(logits, settings_of(*[Sampling(temperature=temperature)] * 50), draws, n_ids=40)
    clear = logits.topk(2).values.diff().abs()[:, 0] > 100 * temperature
    assert clear.sum() > 10
    assert torch.equal(picked.id[clear], logits.argmax(-1)[clear])


@pytest.mark.parametrize("sampling", [Sampling(top_p=1e-300), Sampling(top_k=1), Sampling(min_p=1)], ids=repr)
def test_the_strictest_cut_leaves_the_likeliest(sampling):
    logits = some_logits(20)
    left = processed(logits, settings_of(*[sampling] * 20), n_ids=40) > -math.inf
    assert left.sum(1).tolist() == [1] * 20
    assert torch.equal(left.int().argmax(1), logits.argmax(1))


@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_logits_of_minus_infinity(sampling):
    """A mixture can give a token no probability at all; such tokens are never drawn and disturb nothing."""
    logits = some_logits(200, 10)
    logits[:, ::3] = -math.inf
    logits[0, :9], logits[0, 9] = -math.inf, -50.0  # only one is left
    seen = some_seen(200, 10)
    draws = torch.rand(200, dtype=torch.float64)
    draws[:2] = torch.tensor([math.nextafter(1, 0), 0.0])
    ours = processed(logits, settings_of(*[sampling] * 200), n_ids=10, seen=seen)
    picked = pick(logits, settings_of(*[sampling] * 200), draws, n_ids=10, seen=seen)
    assert not bool(ours.isnan().any())
    assert bool(logits.gather(1, picked.id[:, None]).isfinite().all())


def test_log_probabilities_are_the_models_own():
    """Before penalty, temperature and truncation, over the full vocabulary."""
    config = small_config(budget=1.5)
    model = lively_model(config)
    ids = random_ids(config, 4, 9)
    prediction, _ = prefill(model, ids)
    expected = model(ids, want=("log_probs",)).log_probs[:, -1]
    sampling = Sampling(temperature=3, top_k=4, repetition_penalty=2)
    seen = torch.zeros(4, 23, dtype=torch.bool).scatter(1, ids, True)
    draws = torch.tensor([0.1, 0.4, 0.7, 0.99], dtype=torch.float64)
    picked = pick(prediction.logits, settings_of(*[sampling] * 4), draws, n_ids=20, seen=seen, n_top=6)
    torch.testing.assert_close(
        picked.log_prob, expected.gather(1, picked.id[:, None])[:, 0], atol=SAME_FUNCTION, rtol=0
    )
    best = expected[:, :20].sort(dim=-1, descending=True)
    torch.testing.assert_close(picked.top_log_prob, best.values[:, :6], atol=SAME_FUNCTION, rtol=0)
    assert torch.equal(picked.top_id, best.indices[:, :6])


def test_bfloat16_logits_are_converted_to_float32():
    logits = some_logits(8, dtype=torch.bfloat16)
    picked = pick(
        logits, settings_of(*[Sampling(top_p=0.7)] * 8), torch.full((8,), 0.5, dtype=torch.float64), n_ids=40, n_top=2
    )
    assert picked.log_prob.dtype == torch.float32
    expected = logits.double().log_softmax(-1).gather(1, picked.id[:, None])[:, 0]
    torch.testing.assert_close(picked.log_prob.double(), expected, atol=SAME_FUNCTION_FLOAT32, rtol=0)


# ---- input validation -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -0.1}, r"temperature = -0.1: give 0 \(greedy\) or 0.001"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"top_k": 0}, "top_k = 0: give a whole number of 1 or more"),
        ({"top_k": -3}, "top_k = -3"),
        ({"top_k": 2.5}, "top_k = 2.5"),
        ({"seed": 1.5}, "seed = 1.5"),
        ({"top_p": 0}, "top_p = 0: give a probability above 0"),
        ({"top_p": 1.01}, "top_p = 1.01"),
        ({"top_p": math.nan}, "top_p = nan"),
        ({"min_p": -0.1}, "min_p = -0.1: give a share from 0"),
        ({"min_p": 1.1}, "min_p = 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0: give a number from 0.01"),
        ({"repetition_penalty": math.inf}, "repetition_penalty = inf"),
        ({"temperature": "0.8"}, "temperature = '0.8': give 0"),
        ({"temperature": True}, "temperature = True: give 0"),
        ({"temperature": None}, "temperature = None"),
        ({"temperature": 1e39}, r"temperature = 1e\+39: give 0 \(greedy\) or 0.001 to a million"),
        ({"temperature": 10**400}, "temperature = 1000"),
        ({"top_k": True}, "top_k = True"),
        ({"top_k": "5"}, "top_k = '5'"),
        ({"top_p": "1"}, "top_p = '1'"),
        ({"top_p": True}, "top_p = True"),
        ({"top_p": [1]}, r"top_p = \[1\]"),
        ({"min_p": False}, "min_p = False"),
        ({"min_p": "0"}, "min_p = '0'"),
        ({"repetition_penalty": "1"}, "repetition_penalty = '1'"),
        ({"repetition_penalty": True}, "repetition_penalty = True"),
        ({"seed": True}, "seed = True: give a whole number"),
        ({"seed": "0"}, "seed = '0'"),
        ({"seed": 10**30}, "seed = 1000.*give a whole number from -2"),
        pytest.param({"seed": 10**5000}, "seed = a number of very many digits", id="digits"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**wrong)


@pytest.mark.parametrize("cut", [{"top_p": 0.3}, {"top_k": 1}, {"min_p": 1}], ids=str)
def test_a_greedy_row_does_not_know_its_neighbours(cut):
    """Among equals it takes the first, also where a neighbour's cuts are made."""
    logits = torch.tensor([[1.0, 5, 5, 5, 0], [0.0, 1, 2, 3, 4]])
    alone = pick(logits[:1], settings_of(Sampling(temperature=0, **cut)), torch.zeros(1), n_ids=5)
    both = settings_of(Sampling(temperature=0, **cut), Sampling(top_p=0.5, top_k=3, min_p=0.1))
    beside = pick(logits, both, torch.full((2,), 0.7), n_ids=5)
    assert beside.id[0] == alone.id[0] == 1
