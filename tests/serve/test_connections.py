"""Connections: heads that never become complete, probes of balancers, and what holds up the end of the server."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai")):
    pytest.skip("fastapi, uvicorn, prometheus-client or openai is not installed", allow_module_level=True)

from serving import NAME, Running, until

from thoughtbubbles.serve import server as server_module

HEAD = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"
BODY = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
SECONDS = 0.5


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running(block_size=4096) as server:
        yield server


@pytest.fixture
def short(monkeypatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", SECONDS)


def connect(running: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=20)


def reply_to(connection: socket.socket, sent: bytes) -> http.client.HTTPResponse:
    connection.sendall(sent)
    reply = http.client.HTTPResponse(connection, method=sent.split(b" ")[0].decode())
    reply.begin()
    reply.read()
    return reply


def is_closed(connection: socket.socket, *, after: int | float) -> bool:
    begin = time.monotonic()
    return connection.recv(1) == b"" and time.monotonic() - begin > after - 0.1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("sent", [b"", b"G", HEAD])
def test_half_a_head(running, sent):
    with closing(connect(running)) as connection:
        connection.sendall(sent)
        assert is_closed(connection, after=SECONDS)


@pytest.mark.usefixtures("short")
def test_a_head_that_comes_slowly(running):
    """The time is counted from the beginning, not from the last byte."""
    with closing(connect(running)) as connection:
        until(lambda: not takes(connection, b"x"), seconds=10)


def takes(connection: socket.socket, sent: bytes) -> bool:
    try:
        connection.sendall(sent)
    except OSError:
        return False
    return True


@pytest.mark.usefixtures("short")
def test_half_a_head_after_a_reply(running):
    with closing(connect(running)) as connection:
        assert reply_to(connection, HEAD + b"\r\n").status == 200
        time.sleep(3 * SECONDS)  # an idle connection is kept alive for longer
        assert reply_to(connection, HEAD + b"\r\n").status == 200
        connection.sendall(HEAD)
        assert is_closed(connection, after=SECONDS)
    with closing(connect(running)) as connection:  # half of the second one comes with the first
        assert reply_to(connection, HEAD + b"\r\n" + HEAD).status == 200
        assert is_closed(connection, after=SECONDS)


@pytest.mark.usefixtures("short")
def test_half_a_body_after_a_reply(running):
    """A request that is rejected before its body is read."""
    with closing(connect(running)) as connection:
        assert (
            reply_to(connection, BODY.replace(b"127.0.0.1", b"evil.example") + b"content-length: 9\r\n\r\n").status
            == 403
        )
        assert is_closed(connection, after=SECONDS)


@pytest.mark.usefixtures("short")
def test_a_long_reply_is_not_cut(running):
    body = {"model": NAME, "prompt": "abc", "max_tokens": 4000, "temperature": 0, "stream": True}
    with closing(running.begin(body)) as connection:
        before = running.worker.engine.stats().tokens_generated
        time.sleep(2 * SECONDS)
        until(lambda: running.worker.engine.stats().tokens_generated > before)
        connection.recv(1 << 20)
        assert running.rows_in_use == 1
    running.wait_until_idle()


def test_the_size_of_a_head(running):
    for size, statuses in ((50_000, (200,)), (1 << 20, (400, None))):
        with closing(connect(running)) as connection:
            assert status_of(connection, HEAD + b"x: " + b"a" * size + b"\r\n\r\n") in statuses


def status_of(connection: socket.socket, sent: bytes) -> int | None:
    try:
        return reply_to(connection, sent).status
    except OSError:  # closed while it was sent
        return None


def test_probes_without_a_host(running):
    for path in ("/healthz", "/readyz"):
        for method in ("GET", "HEAD"):
            with closing(connect(running)) as connection:
                assert reply_to(connection, f"{method} {path} HTTP/1.0\r\n\r\n".encode()).status == 200
        assert running.ask("GET", path, host="evil.example")[0] == 403
        assert running.ask("POST", path)[0] == 405
    for path in ("/v1/models", "/metrics", "/"):
        with closing(connect(running)) as connection:
            assert reply_to(connection, f"GET {path} HTTP/1.0\r\n\r\n".encode()).status == 403


def test_half_a_body_while_stopping():
    with Running() as server, closing(connect(server)) as connection:
        connection.sendall(BODY + b'content-length: 100\r\n\r\n{"model"')
        until(lambda: any(each.cycle is not None for each in server.server.server_state.connections))
        server.app.state.stopping = True
        begin = time.monotonic()
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert error(reply)["code"] == "stopping"
        assert connection.recv(1) == b""
        assert time.monotonic() - begin < 10
        assert server.ask("GET", "/healthz")[0] == 200  # complete requests get their own answers


def error(reply: http.client.HTTPResponse) -> Any:
    return json.loads(reply.read())["error"]


def test_an_upgrade_is_ignored(running):
    upgrade = (
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n"
    )
    with closing(connect(running)) as connection:
        assert reply_to(connection, HEAD + upgrade).status == 200
