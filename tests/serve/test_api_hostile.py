"""Clients that send garbage, stall or leave: a clear 4xx in form, every row comes back, and neighbours are unharmed."""

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai")):
    pytest.skip("fastapi, uvicorn, prometheus-client or openai is not installed", allow_module_level=True)

from serving import BYTES, NAME, Running, until

from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.serve import guard

ENDLESS = {"model": NAME, "prompt": "abc", "max_tokens": 4000, "temperature": 0}
SHORT = {"model": NAME, "prompt": "xyz", "max_tokens": 12, "temperature": 0}
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running(block_size=4096, rows=3, waiting=8, max_budget=2, chat=True) as server:
        yield server


@pytest.fixture(scope="module")
def expected(running) -> str:
    request = Request(prompt="xyz", max_new=12, sampling=Sampling(temperature=0))
    return generate(running.served.model, [request], tokenizer=BYTES)[0].text


@pytest.fixture(autouse=True)
def _nobody_is_harmed(running, expected) -> Iterator[None]:
    """After each test: all rows are free, and the next request gets what it gets alone."""
    yield
    running.wait_until_idle()
    status, found, _ = running.ask("POST", "/v1/completions", SHORT)
    assert (status, found["choices"][0]["text"]) == (200, expected)
    assert running.worker.error is None
    assert running.worker._destinations == {}


def in_form(found: Any) -> bool:
    return set(found["error"]) == {"message", "type", "param", "code"} and "\n" not in found["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_garbage(running, path):
    deep = b'{"model": "tiny", "prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}"
    many = b'{"model": "tiny", "max_tokens": ' + b"9" * 5000 + b"}"
    for body in (b"", b"{", b"\xff\xfe", b"null", b"[]", b'"text"', b"NaN", b"[" * 50_000, b"\0" * 100, deep, many):
        status, found, _ = running.ask("POST", path, body)
        assert status == 400, body[:40]
        assert in_form(found)


def test_strange_texts(running):
    for prompt in ("\ud800", "\0", "\u202e" * 10, "😀", "<|endoftext|>"):
        asked = {**SHORT, "prompt": prompt, "echo": True, "logprobs": 2, "stop": ["\udfff", "\0\0"]}
        status, found, _ = running.ask("POST", "/v1/completions", asked)
        assert status == 200
        assert found["choices"][0]["text"].startswith(prompt.replace("\ud800", "\ufffd"))
    for name in ("\ud800", "a\nb", "x" * 5000):
        status, found, _ = running.ask("POST", "/v1/completions", {**SHORT, name: 1})
        assert status == 400
        assert in_form(found)
        assert len(found["error"]["message"]) < 300


def test_other_content_types(running):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; boundary=x"):
        body = json.dumps(SHORT).encode()
        status, found, _ = running.ask("POST", "/v1/completions", body, **{"content-type": kind})
        assert status == 400
        assert in_form(found)


@pytest.mark.parametrize("path", PATHS)
def test_large_bodies(running, path):
    huge = b'{"model": "tiny", "prompt": "' + b"a" * guard.MOST_BYTES + b'"}'
    status, found, _ = running.ask("POST", path, huge)
    assert status == 413
    assert in_form(found)
    for stated in ("99999999", "9" * 18, "9" * 500):
        with closing(socket.create_connection(("127.0.0.1", running.port), timeout=30)) as connection:
            head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {stated}\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(12) in (b"HTTP/1.1 413", b"HTTP/1.1 400")


def test_long_prompts(running):
    status, found, _ = running.ask("POST", "/v1/completions", {**SHORT, "prompt": "a" * 900_000})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    status, found, _ = running.ask("POST", "/v1/completions", {**SHORT, "prompt": [1] * 300_000})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    status, found, _ = running.ask("POST", "/v1/completions", {**SHORT, "prompt": ["a"] * 64})
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")  # more than rows and queue together


@pytest.mark.parametrize("budget", ["0.5", "1e9", "NaN", "Infinity", '"x"', '"nan"', "2.5", "true", "[1]"])
def test_budgets_out_of_range(running, budget):
    body = json.dumps({**SHORT, "budget": "here"}).replace('"here"', budget).encode()
    status, found, _ = running.ask("POST", "/v1/completions", body)
    assert (status, found["error"]["param"]) == (400, "budget")
    assert in_form(found)


def test_half_a_body(running, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    with closing(socket.create_connection(("127.0.0.1", running.port), timeout=30)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b'content-length: 100\r\n\r\n{"model"'
        )
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 408
        assert in_form(json.loads(reply.read()))
        assert connection.recv(1) == b""  # and the connection is closed


def test_half_a_body_and_gone(running):
    for part in (b"", b'{"model"'):
        with closing(socket.create_connection(("127.0.0.1", running.port), timeout=30)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n" + part
            )


def test_what_is_not_http(running):
    for sent in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"):
        with closing(socket.create_connection(("127.0.0.1", running.port), timeout=30)) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1000)[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.parametrize("stream", [False, True])
def test_gone_while_generating(running, stream):
    before = running.worker.engine.stats().tokens_generated
    connection = running.begin({**ENDLESS, "stream": stream, "n": 2})
    until(lambda: running.worker.engine.stats().tokens_generated > before + 10)
    assert running.rows_in_use == 2
    connection.close()
    running.wait_until_idle()
    assert running.worker.engine.stats().tokens_generated < before + 4000


@pytest.mark.parametrize("stream", [False, True])
def test_gone_while_waiting(running, stream):
    with closing(running.begin({**ENDLESS, "n": 3, "stream": True})):
        until(lambda: running.worker.engine.stats().generating == 3)
        waiting = running.begin({**ENDLESS, "stream": stream})
        until(lambda: running.worker.engine.stats().waiting == 1)
        waiting.close()
        until(lambda: running.worker.engine.stats().waiting == 0)
        assert running.worker.engine.stats().generating == 3


def test_gone_at_once(running):
    for _ in range(5):
        connection = running.begin({**ENDLESS, "stream": True})
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        connection.close()


def test_gone_after_the_reply(running):
    with closing(running.begin(SHORT)):
        until(lambda: running.rows_in_use == 1)
        running.wait_until_idle()
    with closing(running.begin({**SHORT, "stream": True})):
        until(lambda: running.rows_in_use == 1)
        running.wait_until_idle()


def test_neighbours_of_those_who_leave(running, expected):
    """While some leave in the middle, others get their answers."""
    leaving = threading.Event()

    def leave() -> None:
        while not leaving.is_set():
            connection = running.begin({**ENDLESS, "stream": True})
            time.sleep(0.05)
            connection.close()

    other = threading.Thread(target=leave)
    other.start()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: running.ask("POST", "/v1/completions", SHORT), range(6)))
    leaving.set()
    other.join()
    assert [(status, body["choices"][0]["text"]) for status, body, _ in found] == [(200, expected)] * 6


def test_all_or_none(running):
    """A request whose completions do not all fit leaves none in the queue."""
    with closing(running.begin({**ENDLESS, "n": 3, "stream": True})):
        until(lambda: running.worker.engine.stats().generating == 3)
        status, found, _ = running.ask("POST", "/v1/completions", {**SHORT, "n": 9})
        assert (status, found["error"]["code"]) == (429, "queue_full")
        assert running.worker.engine.stats().waiting == 0
        wrong = {**SHORT, "prompt": [[1], [999]]}
        assert running.ask("POST", "/v1/completions", wrong)[0] == 400
        assert running.worker.engine.stats().waiting == 0


def stall(server: Running, n: int) -> socket.socket:
    """A client that reads nothing. The scores of its long prompt are more than the buffers of the two sockets hold."""
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(("127.0.0.1", server.port))
    scored = {"prompt": "a" * 2000, "echo": True, "logprobs": 5}
    server.send(connection, {**ENDLESS, **scored, "max_tokens": n, "stream": True})
    return connection


@pytest.mark.slow
def test_a_reader_that_stalls():
    with Running(block_size=4096, rows=1) as server, closing(stall(server, 40)):
        until(lambda: server.rows_in_use == 1)
        server.wait_until_idle()
        assert server.worker.engine.stats().tokens_generated == 40
        (connection,) = server.server.server_state.connections
        assert connection.flow.write_paused
        assert server.ask("POST", "/v1/completions", SHORT)[0] == 200


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such timeout")
def test_the_connection_of_a_reader_that_stalls_is_closed():
    with Running(block_size=4096, rows=1, patience=1) as server, closing(stall(server, 2000)):
        until(lambda: server.rows_in_use == 1)
        server.wait_until_idle()
        until(lambda: not server.server.server_state.connections)
        assert server.worker.engine.stats().tokens_generated < 2000
