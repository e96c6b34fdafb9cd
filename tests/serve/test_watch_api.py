"""The server behind the page: its answers equal the library's own results, and bad requests end in one sentence."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from helpers import lively_model, small_config
from thoughtbubbles.analysis import trace
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling

if find_spec("fastapi") is None:
    pytest.skip("fastapi is not installed", allow_module_level=True)

from starlette.testclient import TestClient

from thoughtbubbles.serve.app import create_app
from thoughtbubbles.serve.command import address_of, listen
from thoughtbubbles.serve.guard import MOST_BYTES
from thoughtbubbles.serve.served import TRACES, Kept, Served, View, open_models

BYTES = tokenizer("bytes")
HOST = "http://127.0.0.1"


def small(name: str = "small", *, seed: int = 0, **changes) -> Served:
    config = small_config(vocab_size=257, block_size=32, **changes)
    return Served(name, lively_model(config, seed=seed, dtype=torch.float32).eval(), BYTES)


@pytest.fixture(scope="module")
def served() -> list[Served]:
    plain = small("plain", fork_layers=(), merge="original")
    return [small(), small("other", seed=1), plain]


@pytest.fixture
def client(served) -> TestClient:
    return TestClient(create_app(served), base_url=HOST)


def test_models(client, served):
    found = client.get("/api/models").json()["models"]
    assert [model["name"] for model in found] == ["small", "other", "plain"]
    first, plain = found[0], found[2]
    assert first["fork_layers"] == [1, 2, 3]
    assert (first["max_budget"], first["block_size"], first["selections"]) == (8, 32, ["causal", "block"])
    assert first["parameters"] == sum(weight.numel() for weight in served[0].model.parameters())
    assert (plain["budget"], plain["max_budget"], plain["selection"], plain["selections"]) == (None, None, None, [])


def test_a_model_that_keeps_all_forks_has_nothing_to_choose():
    forms = {"fork_layers": (1,), "fork_reach": 2, "feedback": True, "scores": False}
    client = TestClient(create_app([small("all", **forms)]), base_url=HOST)
    found = client.get("/api/models").json()["models"][0]
    assert (found["fork_layers"], found["budget"], found["max_budget"], found["selections"]) == ([1], None, None, [])
    traced = client.post("/api/trace", json={"text": "some text"}).json()
    assert [len(token["streams"]) for token in traced["tokens"]] == [2] * 9
    refused = client.post("/api/trace", json={"text": "some text", "budget": 1})
    assert refused.status_code == 422
    assert "without scores this model keeps all forks" in refused.text


@pytest.mark.parametrize("settings", [{}, {"budget": 1.5}, {"budget": 8, "selection": "block"}, {"model": "plain"}])
def test_a_trace_is_that_of_the_library(client, served, settings):
    text = "naïve\t€ <b>\n"
    reply = client.post("/api/trace", json={"text": text, **settings})
    assert reply.status_code == 200
    found = reply.json()
    own = next(each for each in served if each.name == settings.get("model", "small"))
    options = {key: settings.get(key) for key in ("budget", "selection")}
    expected = trace(own.model, text, tokenizer=BYTES, top=8, **options).as_dict()
    if options["budget"] is not None:
        expected["settings"]["budget"] = f"{options['budget']:g}"
    assert found == {**json.loads(json.dumps(expected)), "truncated": 0}


def test_a_long_text_loses_its_end(client, served):
    text = "abcdefghij" * 10
    found = client.post("/api/trace", json={"text": text}).json()
    assert found["truncated"] == 100 - 32
    assert found["text"] == text[:32]
    assert len(found["tokens"]) == 32


def test_large_texts(client):
    for text in ("a" * 100_000, "é €😀" * 10_000, "\u202e\u0000\ufeff" * 5_000):
        assert client.post("/api/trace", json={"text": text}).status_code == 200


def test_traces_are_kept():
    own = small()
    first = own.trace(View("abc"))
    assert own.trace(View("abc")) is first
    for n in range(TRACES):
        own.trace(View(f"other {n}"))
    assert own.trace(View("abc")) == first
    assert own.trace(View("abc", "1")) != first


def test_attention_is_that_of_the_library(client, served):
    full = trace(served[0].model, "abcdef", tokenizer=BYTES, attention=True)
    for stage, layer in enumerate((0, 1, 2, 3)):
        for stream in (0, len(full.stages[stage].streams) - 1):
            found = client.post("/api/attention", json={"text": "abcdef", "stage": stage, "stream": stream}).json()
            (block,) = found["blocks"]
            assert block["block"] == layer
            expected = full.attention[layer].mean(0)[stream, : stream + 1]
            assert block["weights"] == pytest.approx(expected.tolist(), abs=1e-6)
            assert sum(block["weights"]) == pytest.approx(1, abs=1e-4)


def test_attention_of_one_head(client, served):
    full = trace(served[0].model, "abcdef", tokenizer=BYTES, attention=True)
    asked = {"text": "abcdef", "stage": 2, "stream": 5}
    rows = [client.post("/api/attention", json={**asked, "head": head}).json() for head in (0, 1)]
    assert [row["head"] for row in rows] == [0, 1]
    for head, row in enumerate(rows):
        assert row["blocks"][0]["weights"] == pytest.approx(full.attention[2][head, 5, :6].tolist(), abs=1e-6)
    assert rows[0]["blocks"] != rows[1]["blocks"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"stage": 4, "stream": 0}, "stage = 4: this trace has stages from 0 to 3"),
        ({"stage": 0, "stream": 6}, "stream = 6: this stage has streams from 0 to 5"),
        ({"stage": -1, "stream": 0}, "stage: "),
        ({"stage": 0, "stream": 0, "head": 9}, "head = 9: this model has heads from 0 to 2"),
        ({"stage": 0, "stream": 0, "head": -1}, "head: "),
    ],
)
def test_attention_of_a_stream_that_is_not_there(client, where, message):
    reply = client.post("/api/attention", json={"text": "abcdef", **where})
    assert reply.status_code == 422
    assert reply.json()["error"].startswith(message)


def test_attention_of_the_newest_view_is_kept():
    """Of one view over all models, without the padding of the model's forward."""
    kept = Kept()
    config = small_config(vocab_size=257, block_size=32)
    one, other = (Served(name, lively_model(config, dtype=torch.float32).eval(), BYTES, kept=kept) for name in "ab")
    for own, view in ((one, View("abcdef")), (other, View("abcdef")), (other, View("abc")), (one, View("abc"))):
        own.attention(view, stage=0, stream=0)
        first = kept.newest
        assert (first.served, first.view) == (own, view)
        own.attention(view, stage=1, stream=2, head=1)
        assert kept.newest is first
        assert all(block.untyped_storage().nbytes() == 4 * block.numel() for block in first.blocks)


def test_attention_that_does_not_fit(client, monkeypatch):
    monkeypatch.setattr("thoughtbubbles.serve.served.MOST_ATTENTION", 1000)
    reply = client.post("/api/attention", json={"text": "too long", "stage": 0, "stream": 0})
    assert reply.status_code == 422
    assert "shorten the text or lower the budget" in reply.json()["error"]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_generation_is_that_of_the_library(client, served, temperature):
    asked = {"text": "abc", "max_new": 9, "temperature": temperature, "seed": 7, "budget": 4}
    reply = client.post("/api/generate", json=asked)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    request = Request(prompt="abc", max_new=9, budget=4, sampling=Sampling(temperature=temperature, seed=7))
    (expected,) = generate(served[0].model, [request], tokenizer=BYTES)
    assert [line["id"] for line in lines] == expected.ids
    assert "".join(line["text"] for line in lines) == expected.text
    assert [line["streams"] for line in lines] == expected.streams
    assert [line["log_prob"] for line in lines] == expected.log_probs
    assert lines[-1]["finish"] == expected.finish


def test_generations_of_several_models(client, served):
    for own in (*served, *served):
        asked = {"text": "abc", "model": own.name, "max_new": 4, "temperature": 0, "budget": 100}
        lines = [json.loads(line) for line in client.post("/api/generate", json=asked).text.splitlines()]
        request = Request(prompt="abc", max_new=4, budget=100, sampling=Sampling(temperature=0))
        assert [line["id"] for line in lines] == generate(own.model, [request], tokenizer=BYTES)[0].ids


def test_a_generation_with_block_selection():
    own = small(selection="block")
    asked = {"text": "abc", "max_new": 4, "temperature": 0}
    reply = TestClient(create_app([own]), base_url=HOST).post("/api/generate", json=asked)
    request = Request(prompt="abc", max_new=4, sampling=Sampling(temperature=0))
    expected = generate(own.model, [request], tokenizer=BYTES)[0].ids
    assert [json.loads(line)["id"] for line in reply.text.splitlines()] == expected


def test_a_generation_stays_in_the_context_length(client):
    reply = client.post("/api/generate", json={"text": "a" * 30, "max_new": 500, "seed": 1})
    assert 1 <= len(reply.text.splitlines()) <= 2
    full = client.post("/api/generate", json={"text": "a" * 32, "max_new": 5})
    assert full.status_code == 422
    assert "fills the model's context length of 32" in full.json()["error"]


def test_an_empty_text_can_be_continued(client):
    assert client.post("/api/generate", json={"text": "", "max_new": 2}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"text": ""}, 422, "text is empty"),
        ({}, 422, "text: "),
        ({"text": 3}, 422, "text: "),
        ({"text": "a", "model": "huge"}, 404, "model = 'huge': choose from small, other, plain"),
        ({"text": "a", "budget": 0.5}, 422, "budget: "),
        ({"text": "a", "budget": "many"}, 422, "budget: "),
        ({"text": "a", "selection": "both"}, 422, "selection: "),
        ({"text": "a", "colour": "red"}, 422, "colour: "),
        ([1], 422, "the body: "),
    ],
)
def test_bad_requests(client, body, status, message):
    reply = client.post("/api/trace", json=body)
    assert reply.status_code == status
    assert reply.json()["error"].startswith(message)
    assert "\n" not in reply.json()["error"]


def test_what_is_not_json(client):
    for content in (b"{", b"\xff\xfe", b'{"text": "\xff"}', b"[" * 5000, b"NaN"):
        reply = client.post("/api/trace", content=content, headers={"content-type": "application/json"})
        assert reply.status_code in (400, 422), content
        assert reply.json()["error"]


@pytest.mark.parametrize("path", ["/nothing", "/static/nothing.js", "/static/..%2fapp.py", "/static/../app.py"])
def test_no_such_page(client, path):
    reply = client.get(path)
    assert reply.status_code == 404
    assert reply.json()["error"]


def test_a_body_that_is_too_large(client):
    reply = client.post("/api/trace", json={"text": "a" * (MOST_BYTES + 1)})
    assert reply.status_code == 413

    def pieces():
        for _ in range(20):
            yield b" " * 100_000

    assert client.post("/api/trace", content=pieces()).status_code == 413


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8321", "localhost:1", "[::1]:8321"])
def test_own_hosts(client, host):
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "[", "localhost@evil.example"]
)
def test_other_hosts_are_rejected(client, host):
    assert client.get("/api/models", headers={"host": host}).status_code == 403


@pytest.mark.parametrize(("origin", "status"), [(HOST, 200), ("http://evil.example", 403), ("null", 403)])
def test_other_sites_are_rejected(client, origin, status):
    assert client.post("/api/trace", json={"text": "a"}, headers={"origin": origin}).status_code == status


def test_a_server_for_everybody_takes_addresses_but_no_names(served):
    client = TestClient(create_app(served, host="0.0.0.0"), base_url=HOST)
    assert client.get("/", headers={"host": "10.0.0.1:8321"}).status_code == 200
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403


def test_headers(client):
    for reply in (client.get("/"), client.get("/static/main.js"), client.get("/nothing"), client.get("/api/models")):
        policy = reply.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in reply.headers
    assert client.get("/static/main.js").headers["content-type"].startswith("text/javascript")


def test_the_page_needs_nothing_from_outside():
    """No address but our own, no inline script or style."""
    folder = Path(sys.modules["thoughtbubbles.serve.page"].STATIC)
    files = [path for path in folder.iterdir() if path.suffix in (".html", ".js", ".css")]
    assert len(files) > 10
    for path in files:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, path
        assert "https:" not in text, path
        assert "innerHTML" not in text, path
        assert len(text.splitlines()) <= 300, path
    page = (folder / "index.html").read_text()
    assert " style=" not in page
    assert "<script>" not in page


def test_models_are_opened_by_folder(tmp_path):
    own = small()
    for name in ("a", "b"):
        save_model(tmp_path / name / "model", own.model, tokenizer=BYTES)
    found = open_models([tmp_path / "a" / "model", tmp_path / "b" / "model"], device="cpu")
    assert [each.name for each in found] == ["model", "model #2"]
    for own in found:
        own.attention(View("ab"), stage=0, stream=0)
        assert {each._kept.newest.served for each in found} == {own}
    save_model(tmp_path / "c", own.model)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        open_models([tmp_path / "c"], device="cpu")


def test_a_port_in_use():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert address_of(first, "127.0.0.1") == f"http://127.0.0.1:{port}/"
        with pytest.raises(SystemExit, match=f"--port {port} is in use"):
            main(["watch", "--port", str(port), "--no-open"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port 70000: give a number from 0 to 65535"),
        (["--host", "no such host"], "--host no such host"),
        (["--checkpoint", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(SystemExit, match=message) as stopped:
        main(["watch", "--no-open", *([] if "--port" in arguments else ["--port", "0"]), *arguments])
    assert "\n" not in str(stopped.value)


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr("thoughtbubbles.serve.command.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'thoughtbubbles\[serve\]'"):
        main(["watch"])
