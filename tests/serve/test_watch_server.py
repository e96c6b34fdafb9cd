"""The running server: ends on an interrupt, stops generating for clients that have left, answers many at a time."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec

import pytest
import torch

from helpers import lively_model, small_config
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.model.transformer import Thoughtbubbles

if find_spec("fastapi") is None or find_spec("uvicorn") is None:
    pytest.skip("fastapi or uvicorn is not installed", allow_module_level=True)

import uvicorn

from thoughtbubbles.serve.app import create_app
from thoughtbubbles.serve.command import listen
from thoughtbubbles.serve.served import Served, View

BYTES = tokenizer("bytes")


def small(block_size: int = 32) -> Thoughtbubbles:
    return lively_model(small_config(vocab_size=257, block_size=block_size), dtype=torch.float32).eval()


class Counting(Served):
    lines = 0

    def as_line(self, token):
        self.lines += 1
        return super().as_line(token)


@pytest.fixture
def running() -> Iterator[tuple[Counting, int]]:
    served = Counting("small", small(4096), BYTES)
    server = uvicorn.Server(uvicorn.Config(create_app([served]), log_level="error", timeout_graceful_shutdown=1))
    with listen("127.0.0.1", 0) as place:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        yield served, place.getsockname()[1]
        server.should_exit = True
        thread.join()


def post(port: int, path: str, body: dict[str, object]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


def test_a_generation_ends_when_its_reader_leaves(running):
    served, port = running
    connection = post(port, "/api/generate", {"text": "ab", "max_new": 4000, "seed": 3})
    reply = connection.getresponse()
    lines = [json.loads(reply.readline()) for _ in range(3)]
    assert all(line["finish"] is None for line in lines)
    reply.close()
    connection.close()
    end, before = time.monotonic() + 30, -1
    while served.lines != before and time.monotonic() < end:
        before = served.lines
        time.sleep(0.5)
    assert served.lines == before < 4000


def test_a_trace_does_not_wait_for_a_generation(running):
    served, port = running
    asked = {"text": "ab", "max_new": 4000, "seed": 3}
    with closing(post(port, "/api/generate", asked)) as generation, closing(generation.getresponse()) as lines:
        lines.readline()
        with closing(post(port, "/api/trace", {"text": "abc"})) as other, closing(other.getresponse()) as reply:
            assert len(json.load(reply)["tokens"]) == 3
        assert served.lines < 4000


def test_many_at_a_time(running):
    served, port = running
    texts = [f"text {n}" for n in range(12)] * 2

    def ask(text: str) -> bytes:
        with (
            closing(post(port, "/api/trace", {"text": text})) as connection,
            closing(connection.getresponse()) as reply,
        ):
            return reply.read()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, texts)) == [served.trace(View(text)) for text in texts]


@pytest.mark.slow
def test_an_interrupt_ends_a_generation(tmp_path):
    save_model(tmp_path, small(4096), tokenizer=BYTES)
    command = [sys.executable, "-m", "thoughtbubbles", "watch", "--port", "0", "--checkpoint", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().split()[2].strip("/").rsplit(":", 1)[1])
        asked = {"text": "ab", "max_new": 4000, "seed": 3}
        with closing(post(port, "/api/generate", asked)) as connection, closing(connection.getresponse()) as reply:
            reply.readline()
            process.send_signal(signal.SIGINT)
            last = reply.read().splitlines()[-1]
        rest, errors = process.communicate(timeout=30)
    assert json.loads(last) == {"error": "the server is stopping"}
    assert (process.returncode, rest.strip(), errors) == (0, "stopped", "")


@pytest.mark.slow
def test_the_command_serves_and_ends_on_an_interrupt(tmp_path):
    save_model(tmp_path, small(), tokenizer=BYTES)
    command = [sys.executable, "-m", "thoughtbubbles", "watch", "--port", "0", "--checkpoint", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        address = line.split()[2]
        with urllib.request.urlopen(f"{address}api/models") as reply:
            assert json.load(reply)["models"][0]["block_size"] == 32
        with socket.create_connection(("127.0.0.1", int(address.strip("/").rsplit(":", 1)[1]))):
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=30)
    assert (process.returncode, rest.strip(), errors) == (0, "stopped", "")
