"""Two replicas behind nginx, with the files of docs/examples/serving: no request is lost when a replica is killed or
restarted, but streams that the killed one had begun.
"""

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai")):
    pytest.skip("fastapi, uvicorn, prometheus-client or openai is not installed", allow_module_level=True)

from serving import until

from thoughtbubbles.serve.command import accept, bind

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "serving"
NAME = "llm.example.org"  # in the examples
CLIENTS = 12
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MAIN = """
worker_processes 2;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{}}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


@pytest.fixture
def serve(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import serve

    return serve


def free_port() -> int:
    with closing(socket.socket()) as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


class Replica:
    """A process that can be ended and started again on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--dtype", "float64", "--rows", "16", "--no-page", "--allow-host", NAME]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thoughtbubbles", "serve", *options],
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Until it accepts connections."""
        assert self.process.stdout is not None
        assert "thoughtbubbles serve: http" in self.process.stdout.readline()

    def end(self, sent: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(sent)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out.strip()

    def ask(self, path: str) -> str:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def metric(self, name: str) -> float:
        (value,) = re.findall(rf"^thoughtbubbles_{re.escape(name)} (\S+)$", self.ask("/metrics"), re.MULTILINE)
        return float(value)

    def is_generating(self) -> bool:
        return self.metric('rows{state="generating"}') >= 3


@contextmanager
def two_replicas() -> Iterator[tuple[Replica, Replica]]:
    first, second = Replica(), Replica()
    try:
        first.wait()
        second.wait()
        yield first, second
    finally:
        for replica in (first, second):
            replica.process.kill()
            replica.process.communicate()


@contextmanager
def balancer(folder: Path, ports: tuple[int, int]) -> Iterator[int]:
    """nginx with the example's file, at other ports. Gives its own."""
    own = free_port()
    site = (EXAMPLES / "nginx.conf").read_text()
    changes = {
        "127.0.0.1:8001": f"127.0.0.1:{ports[0]}",
        "127.0.0.1:8002": f"127.0.0.1:{ports[1]}",
        "listen 8080;": f"listen 127.0.0.1:{own};",
        "/var/log/nginx/thoughtbubbles.log": str(folder / "access.log"),
    }
    for old, new in changes.items():
        assert site.count(old) == 1, old
        site = site.replace(old, new)
    (folder / "site.conf").write_text(site)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    command = [NGINX, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", str(folder / "error.log")]
    process = subprocess.Popen([*command, "-g", "daemon off;"])
    try:
        until(lambda: (folder / "nginx.pid").exists())
        until(lambda: can_connect(own))
        yield own
    finally:
        process.terminate()
        process.wait(30)


def can_connect(port: int) -> bool:
    with closing(socket.socket()) as place:
        return place.connect_ex(("127.0.0.1", port)) == 0


def stream_and_compare(client: Any, answers: dict[Any, str], tally: Any, draw: random.Random) -> None:
    question = draw.choice(list(answers))
    try:
        reply = client.ask(question, stream=True)
    except http.client.IncompleteRead:
        tally.add("cut")
        return
    if reply.status != 200:
        tally.problem(f"a stream: {reply.status} {reply.body}")
        return
    *events, last = [line.removeprefix("data: ") for line in reply.body.decode().split("\n\n") if line]
    text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
    if last == "[DONE]" and text == answers[question]:
        tally.add("streamed")
    else:
        tally.problem(f"{question}: {text!r}, {last}")


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_no_request_is_lost(serve, tmp_path):
    with two_replicas() as (first, second), balancer(tmp_path, (first.port, second.port)) as port:
        server = serve.Server(address=f"http://127.0.0.1:{port}/")
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        draw = random.Random(0)
        asked = [
            serve.Question(prompt, draw.choice([1, 1.5, 2, 4]), draw.randint(8, 32)) for prompt in serve.BEGINNINGS
        ]
        with closing(serve.Client(server, model)) as client:
            answers, _ = serve.serially(client, asked)
        load = {"model": model, "clients": CLIENTS, "behaviours": (serve.ask_and_compare, stream_and_compare)}

        with serve.crowd(server, answers, **load) as killed:
            until(lambda: first.is_generating() and second.is_generating())
            assert first.end(signal.SIGKILL)[0] == -signal.SIGKILL
            time.sleep(3)
        errors, log = (tmp_path / "error.log").read_text(), (tmp_path / "access.log").read_text()
        assert killed.problems == []
        # Requests that had no answer yet were sent to the other replica; streams that had begun were cut.
        assert f"replica=127.0.0.1:{first.port}, 127.0.0.1:{second.port} replied=502, 200" in log
        cut = [line for line in errors.splitlines() if "while reading upstream," in line]
        assert killed.counts["cut"] == len(cut) <= CLIENTS
        assert all(f"http://127.0.0.1:{first.port}/" in line for line in cut)
        assert min(killed.counts["equal"], killed.counts["streamed"]) > 2

        first.start()
        first.wait()
        time.sleep(3)  # longer than fail_timeout
        with serve.crowd(server, answers, **load) as rolling:
            for replica in (first, second):
                until(replica.is_generating)
                assert replica.end(signal.SIGTERM) == (0, "stopped")
                replica.start()
                replica.wait()
                time.sleep(3)
            until(lambda: first.is_generating() and second.is_generating())
        assert rolling.problems == []
        assert rolling.counts["cut"] == 0
        assert min(rolling.counts["equal"], rolling.counts["streamed"]) > CLIENTS

        check_the_rest(server)
        for replica in (first, second):
            assert replica.end(signal.SIGTERM) == (0, "stopped")
        with closing(serve.Client(server, model)) as client:
            reply = client.ask(asked[0])
        assert (reply.status, reply.retry_after, reply.body["error"]["code"]) == (502, 2, "no_replica")


def check_the_rest(server: Any) -> None:
    """The public name is known, metrics are not public, errors of replicas are sent on as they are."""
    with closing(server.connect()) as connection:
        connection.request("GET", "/readyz", headers={"Host": NAME})
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())) == (200, {"status": "ready"})
        connection.request("GET", "/readyz", headers={"Host": "other.example.org"})
        reply = connection.getresponse()
        assert (reply.status, list(json.loads(reply.read()))) == (403, ["error"])
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        assert (reply.status, b"thoughtbubbles_" in reply.read()) == (404, False)
        body = json.dumps({"prompt": "A" * (1 << 20)})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["error"]["type"]) == (413, "invalid_request_error")


@pytest.mark.skipif(sys.platform != "linux", reason="others let no two sockets be bound to one port")
def test_no_connections_while_a_model_is_loaded():
    """A balancer goes elsewhere. Of two servers that start at the same time, the second to accept is told."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert not can_connect(port)
        with bind("127.0.0.1", port) as second:
            accept(first, "127.0.0.1", port)
            assert can_connect(port)
            with pytest.raises(ValueError, match=f"--port {port} is in use"):
                accept(second, "127.0.0.1", port)
        with pytest.raises(ValueError, match=f"--port {port} is in use"):
            bind("127.0.0.1", port)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_valid(tmp_path):
    """As far as systemd can say without running it; the program is named by its path here."""
    unit = EXAMPLES / "thoughtbubbles@.service"
    text = unit.read_text()
    program = "/opt/thoughtbubbles/bin/thoughtbubbles"
    assert text.count(program) == 1
    (tmp_path / unit.name).write_text(text.replace(program, sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_waits_longer_than_the_server():
    text = (EXAMPLES / "thoughtbubbles@.service").read_text()
    grace, limit = (int(re.findall(pattern, text)[0]) for pattern in (r"--grace (\d+)", r"TimeoutStopSec=(\d+)"))
    assert limit > grace + 10
