"""The `openai` client, unchanged, against our server: what it gets equals what the library generates."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai")):
    pytest.skip("fastapi, uvicorn, prometheus-client or openai is not installed", allow_module_level=True)

import openai
import torch
from serving import BYTES, NAME, Running, until

from helpers import SAME_ROW
from thoughtbubbles.generate.requests import Completion, Request, generate
from thoughtbubbles.generate.sample import Sampling

GREEDY = Sampling(temperature=0)
LENGTH = 96


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running(block_size=LENGTH, chat=True) as server:
        yield server


@pytest.fixture
def client(running) -> openai.OpenAI:
    return running.client()


def alone(running: Running, prompt: Any = "abc", **options: Any) -> Completion:
    options = {"max_new": 9, "sampling": GREEDY} | options
    return generate(running.served.model, [Request(prompt=prompt, **options)], tokenizer=BYTES)[0]


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.context_length, model.max_budget) == (NAME, "model", LENGTH, 4)
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("other")


@pytest.mark.parametrize("budget", [None, 1, 1.5, "4/3", 4])
def test_a_greedy_completion_is_that_of_the_library(client, running, budget):
    extra = {} if budget is None else {"budget": budget}
    found = client.completions.create(model=NAME, prompt="abc", max_tokens=9, temperature=0, extra_body=extra)
    expected = alone(running, budget=budget)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.text, "length", 0)
    assert choice.streams == pytest.approx(sum(expected.streams) / 9)
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 9, 12)


def test_settings_of_a_sampled_completion(client, running):
    settings = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    extra = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.3, "budget": 2}
    found = client.completions.create(model=NAME, prompt="abc", max_tokens=9, **settings, extra_body=extra)
    budget = extra.pop("budget")
    expected = alone(running, budget=budget, sampling=Sampling(**settings, **extra))
    assert found.choices[0].text == expected.text
    assert found.seed == 5


def test_the_seed_of_a_reply_repeats_it(client):
    first, second = (client.completions.create(model=NAME, prompt="abc", max_tokens=20) for _ in range(2))
    assert first.seed != second.seed
    again = client.completions.create(model=NAME, prompt="abc", max_tokens=20, seed=first.seed)
    assert again.choices[0].text == first.choices[0].text


def test_several_prompts_and_samples(client, running):
    prompts = ["abc", "xyz!"]
    found = client.completions.create(model=NAME, prompt=prompts, n=3, max_tokens=7, seed=11)
    assert [choice.index for choice in found.choices] == list(range(6))
    expected = [alone(running, prompts[i // 3], max_new=7, sampling=Sampling(seed=11 + i)).text for i in range(6)]
    assert [choice.text for choice in found.choices] == expected
    assert found.usage.prompt_tokens == 3 + 4


def test_equal_prompts_get_different_samples(client):
    found = client.completions.create(model=NAME, prompt=["abc"] * 4, n=2, max_tokens=9, seed=3)
    assert len({choice.text for choice in found.choices}) == 8


def test_the_largest_seed(client, running):
    found = client.completions.create(model=NAME, prompt="abc", n=2, max_tokens=9, seed=2**63 - 1)
    assert found.seed == 2**63 - 1
    expected = [alone(running, sampling=Sampling(seed=seed)).text for seed in (2**63 - 1, -(2**63))]
    assert [choice.text for choice in found.choices] == expected


def test_prompts_as_ids(client, running):
    expected = alone(running).text
    ids = BYTES.encode("abc")
    one = client.completions.create(model=NAME, prompt=ids, max_tokens=9, temperature=0)
    two = client.completions.create(model=NAME, prompt=[ids, ids], max_tokens=9, temperature=0)
    assert [choice.text for choice in (*one.choices, *two.choices)] == [expected] * 3


@pytest.mark.parametrize("prompt", ["", [], [""], [[]]])
def test_an_empty_prompt_is_end_of_text(client, running, prompt):
    found = client.completions.create(model=NAME, prompt=prompt, max_tokens=5, temperature=0)
    assert found.choices[0].text == alone(running, [BYTES.end_of_text], max_new=5).text


def test_the_usual_number_of_tokens(client):
    assert client.completions.create(model=NAME, prompt="abc").usage.completion_tokens <= 16
    found = client.completions.create(model=NAME, prompt="a" * (LENGTH - 4), temperature=0)
    assert found.usage.completion_tokens == 4


def test_stop(client, running):
    text = alone(running).text
    stop = text[4:6]
    found = client.completions.create(model=NAME, prompt="abc", max_tokens=9, temperature=0, stop=[stop, "never"])
    assert (found.choices[0].text, found.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    one = client.completions.create(model=NAME, prompt="abc", max_tokens=9, temperature=0, stop=stop)
    assert one.choices[0].text == found.choices[0].text


def test_streaming(client, running):
    asked = {"model": NAME, "prompt": ["abc", "xyz"], "n": 2, "max_tokens": 7, "seed": 3}
    whole = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *pieces, last = pieces
    assert last.choices == []
    assert last.usage == whole.usage
    assert {piece.usage for piece in pieces} == {None}
    assert len({piece.id for piece in pieces}) == 1
    assert {piece.seed for piece in pieces} == {3}
    for choice in whole.choices:
        own = [each for piece in pieces for each in piece.choices if each.index == choice.index]
        assert "".join(each.text for each in own) == choice.text
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert own[-1].streams == choice.streams


def test_a_stream_without_usage(client):
    pieces = list(client.completions.create(model=NAME, prompt="abc", max_tokens=3, temperature=0, stream=True))
    assert all(piece.choices for piece in pieces)
    assert all("usage" not in piece.model_fields_set for piece in pieces)


def test_logprobs(client, running):
    expected = alone(running, top=3)
    found = client.completions.create(model=NAME, prompt="abc", max_tokens=9, temperature=0, logprobs=3).choices[0]
    logprobs = found.logprobs
    assert logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=SAME_ROW)
    assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs
    assert [len(top) for top in logprobs.top_logprobs] == [3] * 9
    raw = b"".join(as_bytes(token) for token in logprobs.tokens)
    assert raw == b"".join(BYTES.token_bytes(token) for token in expected.ids)
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def as_bytes(name: str) -> bytes:
    if name.startswith("bytes:"):
        return bytes(int(part, 16) for part in name.removeprefix("bytes:").split("\\x")[1:])
    return name.encode()


def test_logprobs_of_a_sampled_token_that_is_not_likely(client):
    found = client.completions.create(model=NAME, prompt="abc", max_tokens=9, temperature=2, seed=1, logprobs=1)
    logprobs = found.choices[0].logprobs
    for token, own, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == own <= max(top.values())
        assert len(top) in (1, 2)
    none = client.completions.create(model=NAME, prompt="abc", max_tokens=2, temperature=0, logprobs=0)
    assert none.choices[0].logprobs.top_logprobs is None
    assert len(none.choices[0].logprobs.token_logprobs) == 2


def test_echo(client, running):
    expected = alone(running)
    plain = client.completions.create(model=NAME, prompt="abc", max_tokens=9, temperature=0, echo=True).choices[0]
    assert plain.text == "abc" + expected.text
    assert plain.logprobs is None
    asked = {"model": NAME, "prompt": "abc", "max_tokens": 9, "temperature": 0, "echo": True, "logprobs": 2}
    found = client.completions.create(**asked).choices[0]
    assert found.text == plain.text
    assert found.logprobs.tokens[:3] == ["a", "b", "c"]
    assert found.logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert found.logprobs.token_logprobs[3:] == pytest.approx(expected.log_probs, abs=SAME_ROW)
    pieces = list(client.completions.create(**asked, stream=True))
    joined = [piece.choices[0].logprobs for piece in pieces if piece.choices[0].logprobs is not None]
    assert "".join(piece.choices[0].text for piece in pieces) == found.text
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in joined for each in getattr(part, field)] == getattr(found.logprobs, field)


@pytest.mark.parametrize("prompt", ["", []])
def test_echo_of_an_empty_prompt(client, running, prompt):
    expected = alone(running, [BYTES.end_of_text])
    asked = {"model": NAME, "prompt": [prompt, "a"], "max_tokens": 9, "temperature": 0, "echo": True, "logprobs": 1}
    found, other = client.completions.create(**asked).choices
    assert found.text == expected.text
    assert found.logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=SAME_ROW)
    assert len(found.logprobs.tokens) == len(found.logprobs.top_logprobs) == len(found.logprobs.text_offset) == 9
    assert found.logprobs.text_offset[0] == 0
    assert other.text.startswith("a")
    assert len(other.logprobs.tokens) == 10
    pieces = [piece.choices[0] for piece in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces if piece.index == 0) == expected.text
    none = client.completions.create(**{**asked, "prompt": prompt, "max_tokens": 0}).choices[0]
    assert (none.text, none.logprobs.tokens, none.logprobs.token_logprobs) == ("", [], [])
    own = client.completions.create(**{**asked, "prompt": [BYTES.end_of_text], "max_tokens": 1}).choices[0]
    assert own.logprobs.tokens[0] == "<|endoftext|>"


def test_a_prompt_is_scored(client, running):
    prompt = "a longer prompt, é"
    ids = torch.tensor([BYTES.encode(prompt)])
    with torch.no_grad():
        log_probs = running.served.model(ids, want=["log_probs"]).log_probs[0, :-1]
    expected = log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    found = client.completions.create(model=NAME, prompt=prompt, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert found.text == prompt
    assert found.finish_reason == "length"
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=SAME_ROW)
    assert found.logprobs.tokens[-2:] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert found.logprobs.text_offset[-2:] == [17, 17]
    streamed = client.completions.create(model=NAME, prompt=prompt, max_tokens=0, echo=True, logprobs=1, stream=True)
    assert "".join(piece.choices[0].text for piece in streamed) == prompt


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": " Why? "},
]


@pytest.fixture(scope="module")
def chat_prompt() -> list[int]:
    text = "System: Be brief.\nUser: Hi\nAssistant: Hello", "User: Why?\nAssistant:"
    return [*BYTES.encode(text[0]), BYTES.end_of_text, *BYTES.encode(text[1])]


def test_chat(client, running, chat_prompt):
    found = client.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=5, temperature=0)
    expected = alone(running, chat_prompt, max_new=5)
    (choice,) = found.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text.removeprefix(" ")
    assert choice.finish_reason == "length"
    assert (found.object, found.usage.prompt_tokens) == ("chat.completion", len(chat_prompt))
    older = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=5, temperature=0)
    assert older.choices[0].message.content == choice.message.content


def test_a_chat_has_as_many_tokens_as_fit(client, chat_prompt):
    found = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0)
    assert found.usage.completion_tokens == LENGTH - len(chat_prompt)


def test_a_streamed_chat(client):
    asked = {"model": NAME, "messages": CHAT, "n": 2, "seed": 4, "max_completion_tokens": 6}
    whole = client.chat.completions.create(**asked)
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**asked, stream=True)]
    for choice in whole.choices:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason


def test_logprobs_of_a_chat(client, running, chat_prompt):
    asked = {"model": NAME, "messages": CHAT, "max_completion_tokens": 5, "temperature": 0, "logprobs": True}
    found = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs.content
    expected = alone(running, chat_prompt, max_new=5, top=2)
    assert [each.logprob for each in found] == pytest.approx(expected.log_probs, abs=SAME_ROW)
    assert [bytes(each.bytes) for each in found] == [BYTES.token_bytes(token) for token in expected.ids]
    assert [[top.logprob for top in each.top_logprobs] for each in found] == [
        pytest.approx([p for _, p in top], abs=SAME_ROW) for top in expected.top
    ]
    pieces = client.chat.completions.create(**asked, stream=True)
    streamed = [each for piece in pieces for each in (piece.choices[0].logprobs or EMPTY).content]
    assert [each.logprob for each in streamed] == [each.logprob for each in found]
    assert client.chat.completions.create(**asked).choices[0].logprobs.content[0].top_logprobs == []


class EMPTY:
    content: tuple[()] = ()


@pytest.mark.parametrize(
    ("kind", "settings", "param"),
    [
        (openai.NotFoundError, {"model": "other"}, "model"),
        (openai.BadRequestError, {"max_tokens": LENGTH}, "prompt"),
        (openai.BadRequestError, {"temperature": 3}, "temperature"),
        (openai.BadRequestError, {"extra_body": {"budget": 0.5}}, "budget"),
        (openai.BadRequestError, {"extra_body": {"budgets": 2}}, "budgets"),
        (openai.BadRequestError, {"presence_penalty": 1}, "presence_penalty"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_exceptions(client, kind, settings, param, stream):
    asked = {"model": NAME, "prompt": "abc", "max_tokens": 3, "stream": stream} | settings
    with pytest.raises(kind) as error:
        client.completions.create(**asked)
    assert error.value.param == param
    message = error.value.body["message"]
    assert message
    assert "\n" not in message
    assert (message == "budgets: there is no such field: leave it out") == (param == "budgets")


def test_neutral_values_are_accepted(client):
    client.completions.create(
        model=NAME,
        prompt="abc",
        max_tokens=1,
        best_of=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        suffix=None,
        stop=None,
        logprobs=None,
        user="somebody",
    )
    client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        max_completion_tokens=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
    )


def test_other_servers_values_are_understood(client, running, chat_prompt):
    developer = [{**CHAT[0], "role": "developer"}, *CHAT[1:]]
    found = client.chat.completions.create(
        model=NAME,
        messages=developer,
        max_completion_tokens=5,
        temperature=1e-6,
        top_logprobs=0,
        stream=True,
        stream_options={"include_usage": None},
        extra_body={"top_k": -1},
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in found)
    assert text == alone(running, chat_prompt, max_new=5).text.removeprefix(" ")
    silent = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": []}, CHAT[3]]
    empty = [CHAT[1], {"role": "assistant", "content": ""}, CHAT[3]]
    first, second = (
        client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=5, temperature=0)
        for messages in (silent, empty)
    )
    assert first.choices == second.choices
    settings = {"model": NAME, "prompt": "abc", "max_tokens": 9, "seed": 2}
    found = client.completions.create(**settings, extra_body={"top_k": -1})
    assert found.choices[0].text == client.completions.create(**settings).choices[0].text


def test_a_model_without_a_chat_form():
    with (
        Running() as server,
        pytest.raises(openai.NotFoundError, match="this model has no chat form") as error,
    ):
        server.client().chat.completions.create(model=NAME, messages=CHAT)
    assert error.value.code == "no_chat_form"


def test_a_full_queue_and_a_retry():
    with Running(block_size=4096, rows=1, waiting=0) as server:
        long = server.client().completions.create(model=NAME, prompt="abc", max_tokens=4000, temperature=0, stream=True)
        next(iter(long))
        with pytest.raises(openai.RateLimitError) as error:
            server.client().completions.create(model=NAME, prompt="abc", max_tokens=2)
        assert error.value.code == "queue_full"
        assert int(error.value.response.headers["retry-after"]) >= 1
        long.close()
        until(lambda: server.rows_in_use == 0)
        with pytest.raises(openai.BadRequestError, match="asks for 2 completions: this server has room for 1"):
            server.client().completions.create(model=NAME, prompt="abc", max_tokens=2, n=2)


@pytest.mark.slow
def test_the_client_retries():
    """It waits for as long as Retry-After says."""
    with Running(block_size=512, rows=1, waiting=0) as server:
        long = server.client().completions.create(model=NAME, prompt="abc", max_tokens=60, temperature=0, stream=True)
        next(iter(long))
        found = server.client(max_retries=10).completions.create(model=NAME, prompt="abc", max_tokens=2)
        assert found.usage.completion_tokens == 2


def test_a_timeout_is_not_retried():
    with Running(block_size=4096, timeout=0.2) as server:
        client = server.client(max_retries=2)
        with pytest.raises(openai.InternalServerError, match="took longer") as error:
            client.completions.create(model=NAME, prompt="abc", max_tokens=4000, temperature=0)
        assert (error.value.status_code, error.value.code) == (504, "timeout")
        assert server.worker.metrics.finished.labels("timeout")._value.get() == 1
        with pytest.raises(openai.APIError, match="took longer"):  # before or after the first token
            list(client.completions.create(model=NAME, prompt="abc", max_tokens=4000, temperature=0, stream=True))


def test_a_common_prompt_is_read_once():
    with Running(block_size=256) as server:
        asked = {"model": NAME, "prompt": "common beginning " * 8, "max_tokens": 2, "temperature": 0}
        first, second = (server.client().completions.create(**asked) for _ in range(2))
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert second.usage.prompt_tokens_details.cached_tokens == 128
        assert second.choices[0].text == first.choices[0].text
