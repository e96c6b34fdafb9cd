"""Bad requests and options are refused with a reason, and harm no other request."""

import re
from dataclasses import replace

import pytest
import torch

from generate.completions import GREEDY, assert_same_completion, model_of, varied
from helpers import small_config
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.requests import Completion, Request, budget_problem, budget_remark, check, generate, stream


@pytest.fixture(scope="module")
def model():
    return model_of()


BAD = {
    "empty": (Request(prompt=[]), "the prompt is empty"),
    "id": (Request(prompt=[3, 14]), "the prompt has the id 14: the vocabulary has ids from 0 to 13"),
    "negative id": (Request(prompt=[-1]), "the prompt has the id -1"),
    "max_new": (Request(prompt=[1], max_new=0), "max_new = 0: ask for 1 new token or more"),
    "too many": (Request(prompt=[1] * 5, max_new=16), "more than block_size = 20.*ask for at most 15"),
    "too long": (Request(prompt=[1] * 20), "more than block_size = 20.*shorten the prompt to 19"),
    "both": (
        Request(prompt=[1] * 20, max_new=20),
        "more than block_size = 20.*shorten .* and ask for fewer, 20 in all",
    ),
    "far too long": (Request(prompt=[1] * 50, max_new=1), "more than block_size = 20.*shorten the prompt to 19"),
    "low budget": (Request(prompt=[1], budget=0.5), "budget = 0.5 is below 1"),
    "long budget": (Request(prompt=[1], budget="1e99999999"), "budget = '1e99999999' is not a number"),
    "no number": (Request(prompt=[1], budget="many"), "is not a number"),
    "endless budget": (Request(prompt=[1], budget=float("inf")), "is not a number"),
    "top": (Request(prompt=[1], top=-1), "top = -1"),
    "tops": (Request(prompt=[1], top=15), "top = 15"),
    "text": (Request(prompt="a"), "text needs a tokenizer"),
    "stop": (Request(prompt=[1], stop=("a",)), "text needs a tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_before_any_work(model, name):
    request, words = BAD[name]
    good = Request(prompt=[1], max_new=2)
    with pytest.raises(ValueError, match=words) as alone:
        generate(model, [request])
    assert not str(alone.value).startswith("request")
    with pytest.raises(ValueError, match=f"^request 1: .*{words}"):
        generate(model, [good, request, good])
    with pytest.raises(ValueError, match=words):
        stream(model, [good, request])  # immediately, not at the first token


def test_bad_requests_do_not_disturb_the_others(model):
    good = [replace(request, stop=()) for request in varied()]
    mixed, order = [], []
    for i, (bad, _) in enumerate(BAD.values()):
        mixed.append(bad)
        if i < len(good):
            order.append(len(mixed))
            mixed.append(good[i])
    completions = generate(model, mixed, on_error="return", batch_size=4)
    for a, b in zip([completions[i] for i in order], generate(model, good), strict=True):
        assert_same_completion(a, b)
    bad = [completion for i, completion in enumerate(completions) if i not in order]
    for completion, (_, words) in zip(bad, BAD.values(), strict=True):
        with pytest.raises(ValueError, match=words):
            raise ValueError(completion.error)
        assert completion == Completion(finish="error", error=completion.error)


def test_only_bad_requests_and_none_at_all(model):
    assert generate(model, []) == []
    [completion] = generate(model, [Request(prompt=[])], on_error="return")
    assert completion.finish == "error"


def test_budgets_that_are_no_limit():
    """Allowed wherever a budget can be given; `budget_remark` reports them."""
    idle = "budget = {}: this model has no fork layers, so a budget changes nothing"
    assert budget_remark(small_config(fork_layers=(), merge="original", copies=3), 3) == idle.format(3)
    for forks, budget, said in (
        ((), 2, idle.format(2)),
        ((), 1, idle.format(1)),
        ((2,), 2, None),
        ((2,), "5/2", "budget = 5/2: 1 fork layer make at most 2 streams per token, so this is no limit"),
        ((1, 2), 3.9, None),
        ((1, 2), 10**9, "budget = 1000000000: 2 fork layers make at most 4 streams per token, so this is no limit"),
    ):
        model = model_of(fork_layers=forks)
        asked, most = (Request(prompt=[1, 2], max_new=4, budget=r) for r in (budget, model.config.max_bubble))
        assert budget_problem(model.config, budget) is None
        assert check(model.config, asked, None) == [1, 2]
        assert budget_remark(model.config, budget) == said
        if said:
            assert generate(model, [asked]) == generate(model, [most])


def test_the_wrong_tokenizer_is_refused(model):
    with pytest.raises(ValueError, match="the tokenizer 'bytes' has 257 ids, the model 14"):
        generate(model, [Request(prompt="a")], tokenizer=tokenizer("bytes"))


def test_budgets_up_to_what_the_forks_allow(model):
    requests = [Request(prompt=[1, 2], max_new=6, budget=budget, sampling=GREEDY) for budget in (1, 4, "4.0")]
    one, most, again = generate(model, requests)
    assert one.streams == [1] * 6
    assert most.streams == again.streams == [4] * 6


def test_budgets_of_a_model_without_scores():
    """It keeps all forks, so a budget that drops some is a mistake, in a request too."""
    model = model_of(fork_layers=(1,), scores=False)
    words = "budget = 1.5: without scores this model keeps all forks; give 2 or more"
    assert (budget_problem(model.config, 1.5) or "").startswith(words)
    assert budget_problem(model.config, 2) is budget_problem(model.config, 9) is None
    good, bad = (Request(prompt=[1, 2], max_new=3, budget=budget) for budget in (None, 1))
    completions = generate(model, [good, bad, good], on_error="return")
    assert [completion.finish for completion in completions] == ["length", "error", "length"]
    assert completions[0].streams == [2] * 3
    assert "without scores" in (completions[1].error or "")
    with pytest.raises(ValueError, match=r"budget = \[1\.5, 2\]: without scores"):
        model(torch.ones(2, 3, dtype=torch.long), budget=[1.5, 2])
    with pytest.raises(ValueError, match="selection = 'block': without scores"):
        model(torch.ones(2, 3, dtype=torch.long), selection="block")


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"budget_mode": "fixed"}, "a fixed budget applies to the full context"),
        ({}, {"budget_mode": "fixed", "method": "uncached"}, "a fixed budget applies to the full context"),
        ({"selection": "block"}, {"budget_mode": "fixed", "method": "cached"}, "use the method 'uncached'"),
        ({"selection": "block", "budget_mode": "fixed"}, {"method": "cached"}, "use the method 'uncached'"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, options, words):
    with pytest.raises(ValueError, match=words):
        generate(model_of(**changes), [Request(prompt=[1], max_new=2)], **options)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "fast"}, "method = 'fast': choose one of"),
        ({"budget_mode": "half"}, "budget_mode = 'half': choose one of"),
        ({"on_error": "ignore"}, "on_error = 'ignore'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": -1}, "batch_size = -1"),
        ({"batch_size": True}, "batch_size = True"),
        ({"batch_size": 2.5}, "batch_size = 2.5"),
        ({"batch_size": "a"}, "batch_size = 'a'"),
        ({"on_error": []}, r"on_error = \[\]"),
        ({"method": []}, r"method = \[\]: choose one of"),
        ({"budget_mode": 5}, "budget_mode = 5: choose one of"),
        ({"finished": 3}, "finished = 3: give a function"),
        ({"tokenizer": "gpt2"}, "tokenizer = 'gpt2': give a Tokenizer"),
        ({"compiled": "yes"}, "compiled = 'yes': give True or False"),
        ({"compiled": True}, "needs a CUDA GPU"),
        ({"compiled": True, "method": "uncached"}, "needs the cache"),
    ],
)
def test_options_out_of_range_are_refused(model, options, words):
    with pytest.raises(ValueError, match=words):
        generate(model, [Request(prompt=[1], max_new=2)], **options)


WRONG_KINDS = [
    ({"top": 258}, "top = 258: give a whole number from 0 to 257"),
    ({"top": 1.5}, "top = 1.5"),
    ({"max_new": 2.5}, "max_new = 2.5"),
    ({"budget": [2, 3]}, "give one number per request"),
    ({"prompt": [1.9]}, "neither text nor whole numbers"),
    ({"prompt": None}, "prompt = None is neither text nor whole numbers"),
    ({"prompt": 5}, "prompt = 5"),
    ({"prompt": b"ab"}, "prompt = b'ab'"),
    ({"prompt": [True]}, "prompt = [True]"),
    ({"prompt": [[1], [2]]}, "prompt = [[1], [2]]"),
    ({"prompt": ["a"]}, "prompt = ['a']"),
    ({"prompt": {1: 2}}, "prompt = {1: 2}"),
    ({"prompt": (i for i in (1, 2))}, "prompt = <generator"),
    ({"prompt": torch.tensor(1)}, "prompt = tensor(1)"),
    ({"prompt": [10**5000]}, "the prompt has the id a number of very many digits"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"max_new": True}, "max_new = True"),
    ({"max_new": "3"}, "max_new = '3'"),
    ({"max_new": 10**30}, "more than block_size = 20"),
    ({"max_new": 10**5000}, "more than block_size = 20"),
    ({"budget": True}, "budget = True is not a number"),
    ({"budget": {}}, "budget = {} is not a number"),
    ({"budget": 10**5000}, "is not a number"),
    ({"budget": "1e99999999"}, "is not a number"),
    ({"budget": torch.tensor(2)}, "budget is a tensor"),
    ({"top": "3"}, "top = '3'"),
    ({"top": 10**5000}, "top = a number of very many digits"),
    ({"end_ids": "ab"}, "end_ids = 'ab'"),
    ({"end_ids": (True,)}, "end_ids = (True,)"),
    ({"end_ids": (1.0,)}, "end_ids = (1.0,)"),
    ({"end_ids": [1]}, "end_ids = [1]"),
    ({"stop": torch.ones(2)}, "give a tuple of texts"),
    ({"stop": (b"a",)}, "give a tuple of texts"),
    ({"sampling": {"seed": 1}}, "sampling = {'seed': 1}: give a Sampling"),
    ({"stop": ("",)}, "none of them empty"),
    ({"stop": "\n"}, "give a tuple of texts"),
    ({"stop": None}, "give a tuple of texts"),
    ({"stop": (1,)}, "give a tuple of texts"),
    ({"end_ids": 5}, "end_ids = 5: give a tuple of ids"),
    ({"end_ids": ([1],)}, "give a tuple of ids"),
    ({"sampling": None}, "give a Sampling"),
    ({"top": True}, "top = True"),
]


@pytest.mark.usefixtures("no_shape_checks")
def test_requests_of_the_wrong_kind_harm_no_other():
    model, good = model_of(vocab_size=300), {"prompt": [1], "max_new": 3}
    [alone] = generate(model, [Request(**good)], tokenizer=tokenizer("bytes"))
    bad = [Request(**{**good, **wrong}) for wrong, _ in WRONG_KINDS]
    mixed = [Request(**good), *bad, Request(**good)]
    first, *refused, last = generate(model, mixed, tokenizer=tokenizer("bytes"), on_error="return")
    assert first.ids == last.ids == alone.ids
    for (_, words), completion in zip(WRONG_KINDS, refused, strict=True):
        assert words in completion.error
        assert len(completion.error) < 300
        assert completion == Completion(finish="error", error=completion.error)
    for request, (_, words) in zip(bad, WRONG_KINDS, strict=True):
        with pytest.raises(ValueError, match=re.escape(words)):
            stream(model, [request], tokenizer=tokenizer("bytes"))


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("wrong", [None, "abc", {"prompt": [1]}, Request, 3], ids=repr)
def test_what_is_not_a_request_harms_no_other(model, wrong):
    good = Request(prompt=[1], max_new=3)
    other, refused = generate(model, [good, wrong], on_error="return")
    assert [other] == generate(model, [good])
    assert "is not a Request: give Request(prompt=" in refused.error
    for requests in (good, wrong):
        if not isinstance(requests, list):
            with pytest.raises(ValueError, match=r"^requests is a .*: give a list of Request$"):
                generate(model, requests)


def test_no_requests_give_nothing(model):
    assert generate(model, []) == list(stream(model, [])) == []


def test_a_plain_model_needs_no_fixed_budget():
    """`budget_mode` means nothing where nothing forks."""
    model = model_of(fork_layers=(), selection="block", budget_mode="fixed", merge="original")
    [completion] = generate(model, [Request(prompt=[1], max_new=2)])
    assert len(completion.ids) == 2


def test_nan_weights_are_reported():
    model = model_of()
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(model, [Request(prompt=[1], max_new=2)])
