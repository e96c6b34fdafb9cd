"""Load on `thoughtbubbles serve`: many clients at the same time, each answer compared with its serial one.

    python benchmarks/serve.py                        64 clients for 30 seconds, shipped model, float64
    python benchmarks/serve.py --soak 600             and clients that leave, stall and send garbage, for ten minutes
    python benchmarks/serve.py --address http://…/    a server (or a balancer) that is running already

First every question is asked by one client, one after the other, which gives the answers and the serial speed. Then
all clients ask questions in random order. Budgets are drawn from 1 to 4. Answers are greedy: in float64 they do not
depend on what else is running, and every one is compared. A 429 is no error: the client waits and asks again. Clients
and server share the machine, as the times of both runs do.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from common import write_results

NEW = (16, 48)  # tokens per answer
GENERATED = 'tokens_total{kind="generated"}'
BEGINNINGS = (
    "The cell", "In the year 1848", "Once upon a time", "The theorem states that", "Music is", "A protein that binds",
    "The river", "When the king heard of it", "Language models", "The experiment was", "Water boils", "She said that",
)  # fmt: skip
LONG = "The history of science is the study of how people came to understand the world around them. " * 5


class Question(NamedTuple):
    prompt: str
    budget: float
    new: int  # tokens


class Server:
    """A server process, and what it uses. With an address, one that is running already: nothing of it is known."""

    def __init__(self, *options: str, address: str | None = None):
        self.process = None
        if address is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thoughtbubbles", "serve", "--port", "0", "--no-page", *options],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self.process.stdout is not None
            lines = iter(self.process.stdout.readline, "")
            found = (re.search(r"http://\S+", line) for line in lines)
            address = next((match[0] for match in found if match), None)
            if address is None:
                raise RuntimeError("the server did not start")
        self.place = urlsplit(address)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.communicate(timeout=60)

    def connect(self, timeout: float = 120) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.place.hostname or "127.0.0.1", self.place.port, timeout=timeout)

    def get(self, path: str) -> str:
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def metric(self, name: str) -> float:
        values = re.findall(rf"^thoughtbubbles_{re.escape(name)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return float(values[0])

    def resident(self) -> int | None:
        """Bytes of memory, where the system tells (Linux)."""
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024
        return None

    def open_files(self) -> int | None:
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self._pid}/fd"))
        return None

    @property
    def _pid(self) -> int:
        return -1 if self.process is None else self.process.pid


class Reply(NamedTuple):
    status: int
    body: Any
    retry_after: float


class Client:
    """One connection, kept open."""

    def __init__(self, server: Server, model: str):
        self.server, self.model = server, model
        self.connection = server.connect()

    def close(self) -> None:
        self.connection.close()

    def ask(self, question: Question, **more: Any) -> Reply:
        body = {"model": self.model, "prompt": question.prompt, "budget": question.budget}
        return self.send(json.dumps({**body, "max_tokens": question.new, "temperature": 0, **more}))

    def send(self, body: str | bytes, path: str = "/v1/completions") -> Reply:
        try:
            self.connection.request("POST", path, body, {"content-type": "application/json"})
            reply = self.connection.getresponse()
            text = reply.read()
        except (OSError, http.client.HTTPException):
            self.close()  # the next request opens another one
            raise
        is_json = reply.headers.get_content_type() == "application/json"
        return Reply(reply.status, json.loads(text) if is_json else text, float(reply.headers.get("retry-after", 0)))


def questions(seed: int = 0) -> list[Question]:
    """Short prompts, and long ones that share a beginning of more than a chunk."""
    draw = random.Random(seed)
    prompts = [*BEGINNINGS, *(LONG + beginning for beginning in BEGINNINGS[:4])]
    return [Question(prompt, round(draw.uniform(1, 4), 2), draw.randint(*NEW)) for prompt in prompts]


class Tally:
    """What all clients saw."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def add(self, kind: str) -> None:
        with self.lock:
            self.counts[kind] += 1

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)


def serially(client: Client, asked: list[Question]) -> tuple[dict[Question, str], float]:
    """The answer to each question, and tokens per second."""
    client.ask(asked[0])  # warms up
    answers, tokens, begin = {}, 0, time.monotonic()
    for question in asked:
        reply = client.ask(question)
        if reply.status != 200:
            raise RuntimeError(f"{question}: {reply.body}")
        answers[question] = reply.body["choices"][0]["text"]
        tokens += reply.body["usage"]["completion_tokens"]
    return answers, tokens / (time.monotonic() - begin)


def ask_and_compare(client: Client, answers: dict[Question, str], tally: Tally, draw: random.Random) -> None:
    question = draw.choice(list(answers))
    try:
        reply = client.ask(question)
    except (OSError, http.client.HTTPException) as error:
        tally.problem(f"{type(error).__name__}: {error}")
        return
    if reply.status == 429:
        tally.add("429")
        time.sleep(min(reply.retry_after, 2))
    elif reply.status != 200:
        tally.problem(f"{reply.status}: {reply.body}")
    elif (text := reply.body["choices"][0]["text"]) != answers[question]:
        tally.problem(f"{question}: {text!r} is not {answers[question]!r}")
    else:
        tally.add("equal")


def leave(client: Client, answers: dict[Question, str], tally: Tally, draw: random.Random) -> None:
    """Asks for a stream and leaves, before, while or after it comes."""
    body = {"model": client.model, "prompt": draw.choice(list(answers)).prompt, "stream": True}
    connection = client.server.connect()
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        if draw.random() < 0.7:
            connection.getresponse().read(draw.choice([1, 200, 2000]))
    tally.add("left")


def stall(client: Client, answers: dict[Question, str], tally: Tally, draw: random.Random) -> None:
    """Sends half of a request, or never reads its answer."""
    place = client.server.place
    with contextlib.suppress(OSError), socket.create_connection((place.hostname, place.port), timeout=5) as raw:
        body = json.dumps({"model": client.model, "prompt": "A", "stream": True}).encode()
        length = len(body) + (50 if draw.random() < 0.5 else 0)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.hostname}\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
        time.sleep(draw.uniform(0, 2))
    tally.add("stalled")


GARBAGE = (
    b"{", b"\xff\xfe\x00", b"[1, 2, 3]", b'"text"', b'{"prompt": {}}', b'{"model": "no", "prompt": "A"}',
    b'{"model": "MODEL", "prompt": "A", "budget": 0.5}', b'{"model": "MODEL", "prompt": "A", "budget": 1e9}',
    b'{"model": "MODEL", "prompt": "A", "max_tokens": "many"}', b'{"model": "MODEL", "prompt": [1, -5]}',
    b'{"model": "MODEL", "prompt": "A", "unknown": 1}', b'{"model": "MODEL", "prompt": "' + b"A" * (1 << 21) + b'"}',
)  # fmt: skip


def send_garbage(client: Client, answers: dict[Question, str], tally: Tally, draw: random.Random) -> None:
    body = draw.choice(GARBAGE).replace(b"MODEL", client.model.encode())
    try:
        reply = client.send(body)
    except (OSError, http.client.HTTPException) as error:
        if len(body) < 1 << 20:  # a large body may be refused before all of it is sent
            tally.problem(f"{body[:80]!r}: {type(error).__name__}")
        return
    if 400 <= reply.status < 500 and "message" in reply.body["error"]:
        tally.add("refused")
    else:
        tally.problem(f"{body[:80]!r}: {reply.status} {reply.body}")


def ask_for_several(client: Client, answers: dict[Question, str], tally: Tally, draw: random.Random) -> None:
    question = draw.choice(list(answers))
    try:
        reply = client.ask(question, n=4, temperature=1, seed=draw.randrange(100), logprobs=2, echo=True)
    except (OSError, http.client.HTTPException) as error:
        tally.problem(f"{type(error).__name__}: {error}")
        return
    if reply.status not in (200, 429) or (reply.status == 200 and len(reply.body["choices"]) != 4):
        tally.problem(f"n = 4: {reply.status} {reply.body}")
    tally.add("several")


Behaviour = Callable[[Client, dict[Question, str], Tally, random.Random], None]
GOOD: tuple[Behaviour, ...] = (ask_and_compare,)
MIXED: tuple[Behaviour, ...] = (ask_and_compare, ask_and_compare, leave, stall, send_garbage, ask_for_several)


@contextlib.contextmanager
def crowd(
    server: Server, answers: dict[Question, str], *, model: str, clients: int, behaviours: tuple[Behaviour, ...]
) -> Iterator[Tally]:
    """Clients that go on until the block ends, and until their last answer has come."""
    tally, ended = Tally(), threading.Event()

    def work(seed: int) -> None:
        client, draw = Client(server, model), random.Random(seed)
        while not ended.is_set():
            draw.choice(behaviours)(client, answers, tally, draw)
        client.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield tally
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def load(server: Server, *, clients: int, seconds: float) -> dict[str, Any]:
    """Serial, then all at the same time."""
    model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    with contextlib.closing(Client(server, model)) as client:
        answers, before_it = serially(client, questions())
    with crowd(server, answers, model=model, clients=clients, behaviours=GOOD) as tally:
        time.sleep(seconds / 3)
        middle, begin, before = server.resident(), time.monotonic(), server.metric(GENERATED)
        time.sleep(seconds * 2 / 3)
        together = (server.metric(GENERATED) - before) / (time.monotonic() - begin)
        last = server.resident()
    with contextlib.closing(Client(server, model)) as client:  # again: the machine may be busier at one time
        again, after_it = serially(client, questions())
    assert again == answers
    alone = max(before_it, after_it)
    return {
        "clients": clients,
        "seconds": seconds,
        "questions": len(answers),
        "answers": dict(tally.counts),
        "problems": tally.problems[:20],
        "serial_tokens_per_second": alone,
        "tokens_per_second": together,
        "over_serial": together / alone,
        "resident_bytes": [middle, last],
    }


def soak(server: Server, *, clients: int, seconds: float) -> dict[str, Any]:
    """All kinds of behaviour. What the server uses is counted when it is idle, before and after."""
    model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    with contextlib.closing(Client(server, model)) as client:
        answers, _ = serially(client, questions()[:6])
    with crowd(server, answers, model=model, clients=clients, behaviours=MIXED) as warm_up:
        time.sleep(seconds / 4)  # all rows are touched, all buffers are allocated
    before = in_use(server)
    with crowd(server, answers, model=model, clients=clients, behaviours=MIXED) as tally:
        time.sleep(seconds * 3 / 4)
    return {
        "clients": clients,
        "seconds": seconds,
        "counts": dict(tally.counts),
        "problems": [*warm_up.problems, *tally.problems][:20],
        "before": before,
        "after": in_use(server),
    }


def in_use(server: Server, *, patience: float = 60) -> dict[str, float | int | None]:
    """When nothing is left to do: requests in the engine, memory, open files."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        busy = {name: server.metric(name) for name in ("waiting", 'rows{state="reading"}', 'rows{state="generating"}')}
        if not any(busy.values()):
            break
        time.sleep(0.2)
    time.sleep(1)  # for connections that are being closed
    return {"requests": sum(busy.values()), "resident_bytes": server.resident(), "open_files": server.open_files()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--soak", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--address", help="a server that is running already")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = ("--dtype", options.dtype, "--rows", str(options.rows))
    with Server(*flags, address=options.address) as server:
        found = {"dtype": options.dtype, "rows": options.rows}
        found["load"] = load(server, clients=options.clients, seconds=options.seconds)
        print(json.dumps(found["load"], indent=2))
        if options.soak:
            found["soak"] = soak(server, clients=options.clients // 4, seconds=options.soak)
            print(json.dumps(found["soak"], indent=2))
    print(f"written: {write_results('serve', 'cpu', found, to=options.out)}")


if __name__ == "__main__":
    main()
