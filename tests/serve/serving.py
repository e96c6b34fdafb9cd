"""A server with the API in a thread, for tests: a tiny float64 model that never ends by itself when it is greedy."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import openai
import torch

from helpers import lively_model, small_config
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.serve.app import Capacity, create_app
from thoughtbubbles.serve.command import address_of, listen
from thoughtbubbles.serve.served import Served
from thoughtbubbles.serve.server import Server
from thoughtbubbles.serve.worker import Worker

BYTES = tokenizer("bytes")
NAME = "tiny"


def tiny(block_size: int = 64, **changes: Any) -> Thoughtbubbles:
    config = small_config(n_layer=2, n_head=2, width=8, fork_layers=(0, 1), vocab_size=257, block_size=block_size)
    model = lively_model(config, **changes).eval()
    with torch.no_grad():
        model.embedding.weight[BYTES.end_of_text] = 0  # its logit is 0, and others are larger
    return model


class Running:
    def __init__(
        self,
        *,
        block_size: int = 64,
        chat: bool = False,
        rows: int = 4,
        waiting: int = 64,
        max_budget: int | float = 4,
        timeout: int | float = 60,
        grace: int | float = 1,
        patience: int | float = 60,
        **options: Any,
    ):
        self.served = Served(NAME, tiny(block_size), BYTES, chat=chat)
        capacity = Capacity(rows=rows, waiting=waiting, max_budget=max_budget, timeout=timeout)
        self.app = create_app([self.served], api=True, capacity=capacity, **options)
        self.socket = listen("127.0.0.1", 0, patience=patience)
        self.address = address_of(self.socket, "127.0.0.1")
        self.port = self.socket.getsockname()[1]
        self.server = Server(self.app, grace=grace)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self._clients = ExitStack()

    @property
    def worker(self) -> Worker:
        return self.app.state.workers[0]

    def __enter__(self) -> "Running":
        self._thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self._thread.join()
        self.socket.close()
        self._clients.close()

    def client(self, **options: Any) -> openai.OpenAI:
        """It is closed with the server: a client that is only forgotten may leave an open socket behind."""
        options = {"api_key": "any", "max_retries": 0, "timeout": 60} | options
        return self._clients.enter_context(openai.OpenAI(base_url=f"{self.address}v1", **options))

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers; `body` is sent as it is if it is bytes, else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, sent, {"content-type": "application/json", **headers})
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        is_json = reply.headers.get("content-type") == "application/json"
        found = json.loads(content) if is_json else content.decode()
        return reply.status, found, {name.lower(): value for name, value in reply.headers.items()}

    def begin(self, body: dict[str, Any]) -> socket.socket:
        """Sends a request and reads nothing of the reply."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        self.send(connection, body)
        return connection

    def send(self, connection: socket.socket, body: dict[str, Any]) -> None:
        sent = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)

    @property
    def rows_in_use(self) -> int:
        now = self.worker.engine.stats()
        return now.reading + now.generating + now.waiting

    def wait_until_idle(self) -> None:
        until(lambda: self.rows_in_use == 0)


def until(condition: Callable[[], object], *, seconds: int | float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)
