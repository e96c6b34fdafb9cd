"""`thoughtbubbles serve` as a command: it starts, finishes what it has at the end, and rejects bad options."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai")):
    pytest.skip("fastapi, uvicorn, prometheus-client or openai is not installed", allow_module_level=True)

from serving import BYTES, tiny, until

from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.cli import main

ASKED = {"model": "model", "prompt": "abc", "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("serve") / "model", tiny(4096), tokenizer=BYTES)


class Process:
    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.line = process.stdout.readline()
        self.port = int(self.line.split()[2].strip("/").rsplit(":", 1)[1])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any]:
        with closing(self.connect()) as connection:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"content-type": "application/json", **headers})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())

    def end(self) -> tuple[int, str, str]:
        out, errors = self.process.communicate(timeout=60)
        return self.process.returncode, out.strip(), errors


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "thoughtbubbles", "serve", "--port", "0", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


class Asking(threading.Thread):
    """A request that is on its way."""

    def __init__(self, server: Process, **body: Any):
        super().__init__()
        self.server, self.body, self.reply = server, {**ASKED, **body}, (0, None)
        self.start()

    def run(self) -> None:
        self.reply = self.server.ask("POST", "/v1/completions", self.body)


def wait_for_rows(server: Process, n: int) -> None:
    def rows() -> int:
        with closing(server.connect()) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        found = {name: float(value) for name, value in lines}
        return int(found['thoughtbubbles_rows{state="generating"}'] + found["thoughtbubbles_waiting"])

    until(lambda: rows() == n)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_it_finishes_what_it_has(folder, sent):
    with serving("--checkpoint", str(folder), "--rows", "1", "--dtype", "float64") as server:
        assert "model model, 1 rows, KV cache of" in server.line
        alone = server.ask("POST", "/v1/completions", {**ASKED, "max_tokens": 150})
        live, queued = Asking(server, max_tokens=150), Asking(server, max_tokens=150)
        wait_for_rows(server, 2)
        server.process.send_signal(sent)
        live.join()
        queued.join()
        ended = server.end()
    for status, body in (live.reply, queued.reply):
        assert status == 200
        assert body["choices"][0]["text"] == alone[1]["choices"][0]["text"]
        assert body["usage"]["completion_tokens"] == 150
    assert ended == (0, "stopped", "")
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port)):
        pass


@pytest.mark.slow
def test_draining(folder):
    """The port stays open for a while, and /readyz and new requests say that it ends."""
    with serving("--checkpoint", str(folder), "--drain", "2") as server:
        assert server.ask("GET", "/readyz") == (200, {"status": "ready"})
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        until(lambda: server.ask("GET", "/readyz")[0] == 503)
        assert server.ask("GET", "/healthz")[0] == 200
        assert server.ask("POST", "/v1/completions", ASKED)[0] == 503
        assert server.end() == (0, "stopped", "")
        assert time.monotonic() - begin > 1.8


@pytest.mark.slow
def test_grace_ends(folder):
    with serving("--checkpoint", str(folder), "--grace", "0.5") as server:
        asking = Asking(server, max_tokens=4000)
        wait_for_rows(server, 1)
        server.process.send_signal(signal.SIGTERM)
        asking.join()
        assert asking.reply[0] == 503
        assert asking.reply[1]["error"]["message"] == "the server is stopping"
        assert server.end() == (0, "stopped", "")


@pytest.mark.slow
def test_a_second_signal(folder):
    with serving("--checkpoint", str(folder)) as server, closing(server.connect()) as connection:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**ASKED, "max_tokens": 4000, "stream": True}),
            {"content-type": "application/json"},
        )
        connection.getresponse().readline()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == (0, "stopped", "")
        assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_a_key(folder, tmp_path):
    (tmp_path / "key").write_text("sesame\n")
    for arguments, environment in (
        (["--api-key-file", str(tmp_path / "key")], {}),
        ([], {"THOUGHTBUBBLES_API_KEY": "sesame"}),
    ):
        with serving("--checkpoint", str(folder), "--host", "0.0.0.0", *arguments, **environment) as server:
            assert server.ask("GET", "/v1/models")[0] == 401
            assert server.ask("GET", "/v1/models", authorization="Bearer sesame")[0] == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.end() == (0, "stopped", "")


@pytest.mark.slow
def test_a_server_for_everybody_without_a_key(folder):
    with serving("--checkpoint", str(folder), "--host", "0.0.0.0", "--no-page") as server:
        assert server.line.endswith("(also under the computer's other addresses; Ctrl-C to stop)\n")
        assert server.ask("GET", "/")[0] == 404
        server.process.send_signal(signal.SIGTERM)
        code, _, errors = server.end()
    assert code == 0
    assert errors.startswith("--host 0.0.0.0 without an API key")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port 70000: give a number from 0 to 65535"),
        (["--host", "no such host"], "--host no such host"),
        (["--checkpoint", "nowhere"], "nowhere does not exist"),
        (["--rows", "0"], "--rows 0: give a whole number of 1 or more"),
        (["--waiting", "-1"], "--waiting -1: give a whole number of 0 or more"),
        (["--max-budget", "0.5"], "--max-budget = 0.5 is below 1"),
        (["--max-budget", "x"], "--max-budget = 'x' is not a number"),
        (["--timeout", "0"], "--timeout 0: give a number of seconds above 0"),
        (["--timeout", "nan"], "--timeout nan: give a number of seconds above 0"),
        (["--grace", "-1"], "--grace -1: give a number of seconds"),
        (["--drain", "inf"], "--drain inf: give a number of seconds"),
        (["--allow-host", "http://a.example"], "--allow-host 'http://a.example': give a name without scheme"),
        (["--api-key-file", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, monkeypatch):
    monkeypatch.delenv("THOUGHTBUBBLES_API_KEY", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *([] if "--port" in arguments else ["--port", "0"]), *arguments])
    assert message in str(stopped.value)
    assert "\n" not in str(stopped.value)


def test_keys_that_are_none(tmp_path, monkeypatch):
    for content in (b"", b"\n", b"two words", b"\xff\xfe", b"one\ntwo"):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(SystemExit, match="is not a key: give one line"):
            main(["serve", "--port", "0", "--api-key-file", str(tmp_path / "key")])
    monkeypatch.setenv("THOUGHTBUBBLES_API_KEY", "")
    with pytest.raises(SystemExit, match="THOUGHTBUBBLES_API_KEY is not a key"):
        main(["serve", "--port", "0"])


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr("thoughtbubbles.serve.command.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"prometheus-client not installed: pip install 'thoughtbubbles\[serve\]'"):
        main(["serve"])
