"""The API without a client's help: routes, the errors of every field, the key, metrics, and lm-evaluation-harness."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai")):
    pytest.skip("fastapi, uvicorn, prometheus-client or openai is not installed", allow_module_level=True)

import torch
from serving import BYTES, NAME, Running, tiny
from starlette.testclient import TestClient

from helpers import SAME_ROW, lively_model, small_config
from thoughtbubbles.checkpoint import has_chat_form, save_model
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.interop.export import export
from thoughtbubbles.serve.app import Capacity, create_app
from thoughtbubbles.serve.served import Served, open_models

HOST = "http://127.0.0.1"
MESSAGES = [{"role": "user", "content": "Hi"}]
LIMITS = Capacity(rows=2, waiting=4, max_budget=4, timeout=60)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running(chat=True) as server:
        yield server


def ask(running: Running, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
    basic = {"prompt": "abc"} if path == "/v1/completions" else {"messages": MESSAGES}
    status, found, _ = running.ask("POST", path, {"model": NAME, **basic, **body})
    return status, found


def test_routes(running):
    assert running.ask("GET", "/healthz")[:2] == (200, {"status": "ok"})
    assert running.ask("GET", "/readyz")[:2] == (200, {"status": "ready"})
    status, found, _ = running.ask("GET", "/v1/models")
    assert (status, found["object"], [model["id"] for model in found["data"]]) == (200, "list", [NAME])
    assert running.ask("GET", "/")[0] == 200
    assert running.ask("GET", "/api/models")[1]["models"][0]["name"] == NAME


def test_the_page_learns_the_largest_budget_of_generation():
    for given, limit in ((2, 2), ("5/3", 1.666666), (100, 4)):
        app = create_app([Served(NAME, tiny(), BYTES)], api=True, capacity=replace(LIMITS, max_budget=given))
        with TestClient(app, base_url=HOST) as client:
            (found,) = client.get("/api/models").json()["models"]
            assert (found["max_budget"], found["max_generate_budget"]) == (4, limit)
            asked = {"text": "abc", "max_new": 2, "budget": limit}
            assert client.post("/api/generate", json=asked).status_code == 200


def test_a_model_that_keeps_all_forks_has_no_budgets():
    config = small_config(fork_layers=(1,), scores=False, vocab_size=257, block_size=32)
    served = Served(NAME, lively_model(config, dtype=torch.float32).eval(), BYTES)
    with TestClient(create_app([served], api=True, capacity=LIMITS), base_url=HOST) as client:
        (found,) = client.get("/v1/models").json()["data"]
        assert (found["budget"], found["max_budget"]) == (None, None)
        asked = {"model": NAME, "prompt": "abc", "max_tokens": 2}
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["streams"] == 2
        refused = client.post("/v1/completions", json={**asked, "budget": 1.5})
        assert refused.status_code == 400
        assert "without scores this model keeps all forks" in refused.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)])
def test_other_routes_have_errors_in_form(running, method, path, status):
    found = running.ask(method, path)
    assert found[0] == status
    assert set(found[1]["error"]) == {"message", "type", "param", "code"}


FIELDS: list[tuple[str, list[Any]]] = [
    ("model", ["other", 3, "x" * 1000, "\ud800"]),
    ("prompt", [3, {}, [1.5], [True], ["a", 1], [["a"]], [257], [-1], ["a"] * 65, [[[1]]]]),
    ("max_tokens", [-1, 1.5, "3", True, [], 0]),
    ("n", [0, 17, 1.0, "1", True]),
    ("seed", [1.5, "1", 2**63, -(2**63) - 1, True]),
    ("temperature", [-0.1, 2.1, "1", True, 10**400]),
    ("top_p", [0, 1.1, -1, "x", True]),
    ("top_k", [0, -2, 1.5, True]),
    ("min_p", [-1, 2, "x"]),
    ("repetition_penalty", [0, -1, 1000, "x"]),
    ("budget", [0.5, -1, 0, "x", "", "1/0", "1e99", True, [2], {}, 10**400, "9" * 300]),
    ("stop", [3, [""], "", ["a", 1], ["a"] * 5, {}]),
    ("logprobs", [-1, 6, True, 1.5, "1"]),
    ("echo", [1, "true"]),
    ("stream", [1, "true"]),
    ("stream_options", [{"include_usage": True}, {}, 3]),
    ("best_of", [2, "1", 10**4000]),
    ("frequency_penalty", [0.5, -1, "x"]),
    ("presence_penalty", [0.5]),
    ("logit_bias", [{"50256": -100}]),
    ("suffix", ["end"]),
    ("unknown", [1, []]),
]
CHAT_FIELDS: list[tuple[str, list[Any]]] = [
    ("messages", [3, [], [3], {}, [{}], [{"role": "user"}], [{"role": "user", "content": 3}]]),
    ("messages", [[{"role": "king", "content": "a"}], [{"role": ["user"], "content": "a"}], "x"]),
    ("messages", [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]]),
    ("messages", [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]),
    ("messages", [[{"role": "user", "content": "a" * 100}]]),
    ("max_completion_tokens", [0, -1, 1.5]),
    ("max_tokens", [0]),
    ("logprobs", [1, "true"]),
    ("top_logprobs", [3, 21, -1]),
    ("tools", [[{"type": "function"}]]),
    ("response_format", [{"type": "json_object"}]),
    ("modalities", [["audio"]]),
    ("prompt", ["abc"]),
]


@pytest.mark.parametrize(("field", "values"), FIELDS, ids=[name for name, _ in FIELDS])
def test_fields_of_completions(running, field, values):
    for value in values:
        status, found = ask(running, **{field: value})
        assert found["error"]["param"] == field, value
        assert status == (404 if value == "other" else 400), value
        assert found["error"]["type"] == "invalid_request_error"
        assert len(found["error"]["message"]) < 300
        assert "\n" not in found["error"]["message"]


@pytest.mark.parametrize(
    ("field", "values"), CHAT_FIELDS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CHAT_FIELDS)]
)
def test_fields_of_chats(running, field, values):
    for value in values:
        status, found = ask(running, "/v1/chat/completions", **{field: value})
        assert (status, found["error"]["param"]) == (400, field), value


def test_the_context_length(running):
    status, found = ask(running, prompt="a" * 60, max_tokens=5)
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    assert "64 tokens, but prompt has 60 and 5 more" in found["error"]["message"]
    status, found = ask(running, max_tokens=10**4000)
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    assert len(found["error"]["message"]) < 300
    assert ask(running, prompt="a" * 64)[1]["error"]["code"] == "context_length_exceeded"
    assert ask(running, prompt="a" * 64, max_tokens=0, echo=True, logprobs=0)[0] == 200
    assert ask(running, prompt="a" * 60, max_tokens=4, temperature=0)[0] == 200


def test_null_is_the_default(running):
    names = [name for name, _ in FIELDS if name not in ("model", "prompt", "unknown")]
    assert ask(running, **dict.fromkeys(names))[0] == 200


def test_what_is_missing(running):
    for body, param in (({"prompt": "a"}, "model"), ({}, "model")):
        status, found, _ = running.ask("POST", "/v1/completions", body)
        assert (status, found["error"]["param"]) == (400, param)
    assert running.ask("POST", "/v1/completions", {"model": NAME})[0] == 200  # like an empty prompt
    assert running.ask("POST", "/v1/chat/completions", {"model": NAME})[1]["error"]["param"] == "messages"


def test_headers_of_a_stream(running):
    body = {"model": NAME, "prompt": "abc", "max_tokens": 2, "stream": True}
    status, text, headers = running.ask("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-accel-buffering"] == "no"
    assert all(line.startswith("data: ") for line in text.split("\n\n") if line)
    assert text.endswith("\n\ndata: [DONE]\n\n")


def test_the_page_and_the_api_share_the_engine(running):
    before = running.worker.engine.stats().tokens_generated
    asked = {"text": "abc", "max_new": 5, "temperature": 0, "budget": 2}
    status, lines, _ = running.ask("POST", "/api/generate", asked)
    assert (status, len(lines.splitlines())) == (200, 5)
    assert running.worker.engine.stats().tokens_generated == before + 5
    assert running.ask("POST", "/api/generate", {**asked, "budget": 5})[0] == 200  # bubbles of 4: it is no limit
    assert running.ask("POST", "/api/generate", {**asked, "text": "a" * 64})[0] == 422


def metrics(running: Running) -> dict[str, float]:
    status, text, headers = running.ask("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("thoughtbubbles_"): float(value) for name, value in lines}


def test_metrics():
    with Running(rows=3) as server:
        asked = {"max_tokens": 5, "temperature": 0, "n": 2}
        assert ask(server, **asked)[0] == 200
        assert ask(server, **asked, budget=0.5)[0] == 400
        server.ask("GET", "/static/nothing.js")
        server.ask("GET", f"/{'x' * 50}")
        server.ask("GET", "/healthz", host="evil.example")
        found = metrics(server)
        assert found['requests_total{route="/v1/completions",status="200"}'] == 1
        assert found['requests_total{route="/v1/completions",status="400"}'] == 1
        assert found['requests_total{route="other",status="404"}'] >= 1
        assert found['requests_total{route="other",status="403"}'] == 1
        assert not any("xxxx" in name for name in found)
        assert found['finished_total{finish="length"}'] == 2
        assert found["waiting"] == 0
        assert [found[f'rows{{state="{state}"}}'] for state in ("reading", "generating", "free")] == [0, 0, 3]
        assert found['tokens_total{kind="generated"}'] == 10
        assert found['tokens_total{kind="read"}'] == 6
        assert 10 <= found["streams_total"] <= 40
        assert found["time_to_first_token_seconds_count"] == found["time_per_token_seconds_count"] == 2
        assert found["time_to_first_token_seconds_sum"] > 0


@pytest.fixture(scope="module")
def locked() -> TestClient:
    served = Served(NAME, tiny(), BYTES)
    return TestClient(create_app([served], api=True, key="sesame", capacity=LIMITS), base_url=HOST)


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer open", "sesame", "Basic sesame", "Bearer é"])
def test_a_wrong_key(locked, given):
    headers = {} if given is None else {"authorization": given.encode()}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
        reply = locked.request(method, path, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/metrics", "/api/models", "/nothing", "/static"):
        reply = locked.get(path, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"].startswith("the API key is missing or wrong")


def test_the_right_key(locked):
    for given in ("Bearer sesame", "bearer sesame"):
        assert locked.get("/v1/models", headers={"authorization": given}).status_code == 200
    for path in ("/healthz", "/readyz", "/", "/static/main.js"):
        assert locked.get(path).status_code == 200


def test_other_names_and_no_page():
    app = create_app([Served(NAME, tiny(), BYTES)], api=True, page=False, hosts=["llm.example"], capacity=LIMITS)
    client = TestClient(app, base_url=HOST)
    for host in ("llm.example", "LLM.example:443", "127.0.0.1"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200
    assert client.get("/healthz", headers={"host": "evil.example"}).status_code == 403
    reply = client.post("/v1/completions", headers={"origin": "http://evil.example"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (403, "invalid_request_error")
    for path in ("/", "/api/models", "/static/main.js"):
        assert client.get(path).status_code == 404


def test_watch_has_no_api():
    client = TestClient(create_app([Served(NAME, tiny(), BYTES)]), base_url=HOST)
    for path in ("/v1/models", "/metrics", "/healthz"):
        assert client.get(path).status_code == 404


def test_stopping(running):
    running.app.state.stopping = True
    try:
        status, found, headers = running.ask("POST", "/v1/completions", {"model": NAME, "prompt": "a"})
        assert (status, found["error"]["message"]) == (503, "the server is stopping")
        assert int(headers["retry-after"]) >= 1
        assert running.ask("GET", "/readyz")[:2] == (503, {"error": "the server is stopping"})
        assert running.ask("GET", "/healthz")[0] == 200
        assert running.ask("POST", "/api/generate", {"text": "a"})[0] == 503
    finally:
        running.app.state.stopping = False


def test_a_chat_form_is_declared(tmp_path):
    for name, chat in (("plain", False), ("chat", True)):
        save_model(tmp_path / name, tiny(), tokenizer=BYTES, chat=chat)
        assert has_chat_form(tmp_path / name) is chat
    found = open_models([tmp_path / "plain", tmp_path / "chat"], device="cpu", dtype=torch.float64)
    assert [served.chat for served in found] == [False, True]
    assert found[0].model.embedding.weight.dtype == torch.float64
    config = tmp_path / "chat" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("Assistant:", "Bot:"))
    assert not has_chat_form(tmp_path / "chat")


@pytest.mark.slow
def test_an_export_declares_a_chat_form(tmp_path):
    save_model(tmp_path / "plain", tiny(), tokenizer=BYTES)
    save_model(tmp_path / "bare", tiny())
    for source, out, chat in (("plain", "declared", True), ("declared", "kept", False), ("plain", "none", False)):
        export(tmp_path / source, out=tmp_path / out, chat=chat)
    assert [has_chat_form(tmp_path / name) for name in ("declared", "kept", "none")] == [True, True, False]
    with pytest.raises(ValueError, match="--chat: the model has no tokenizer"):
        export(tmp_path / "bare", out=tmp_path / "never", chat=True)


@pytest.fixture(scope="module")
def harness() -> Any:
    """lm-evaluation-harness' client, without its HTTP code, which needs more packages."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    made = object.__new__(completions.LocalCompletionsAPI)
    made.model, made._max_gen_toks = NAME, 8
    return made


def test_the_harness_scores(running, harness):
    """As its local-completions does: prompts as ids, of which the first are the context."""
    rows = [BYTES.encode("context: yes"), BYTES.encode("another one")]
    request = Request(prompt=BYTES.encode("ab"), max_new=6, sampling=Sampling(temperature=0))
    (likely,) = generate(running.served.model, [request])
    rows.append([*request.prompt, *likely.ids])
    contexts = [8, 3, 2]
    status, found, _ = running.ask("POST", "/v1/completions", harness._create_payload(rows))
    assert status == 200
    scores = harness.parse_logprobs(found, tokens=rows, ctxlens=contexts)
    for row, context, (score, is_greedy) in zip(rows, contexts, scores, strict=True):
        ids = torch.tensor([row])
        with torch.no_grad():
            log_probs = running.served.model(ids, want=["log_probs"]).log_probs[0, :-1]
        own = log_probs.gather(1, ids[0, 1:, None])[context - 1 :]
        assert score == pytest.approx(own.sum().item(), abs=SAME_ROW)
        assert is_greedy == (log_probs.argmax(-1) == ids[0, 1:])[context - 1 :].all().item()
    assert scores[2][1] is True


def test_the_harness_generates(running, harness):
    rows = [BYTES.encode("context: yes"), BYTES.encode("x")]
    payload = harness._create_payload(rows, generate=True, gen_kwargs={"until": ["\n\n"]}, eos="<|endoftext|>")
    status, found, _ = running.ask("POST", "/v1/completions", payload)
    assert status == 200
    requests = [
        Request(prompt=row, max_new=8, sampling=Sampling(temperature=0), stop=("\n\n", "<|endoftext|>")) for row in rows
    ]
    expected = generate(running.served.model, requests, tokenizer=BYTES)
    assert harness.parse_generations(found) == [completion.text for completion in expected]
