"""The thread of an engine: what it does when steps fail, at the end, and how long it asks clients to wait."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai")):
    pytest.skip("fastapi, uvicorn, prometheus-client or openai is not installed", allow_module_level=True)

from serving import NAME, Running, until

from thoughtbubbles.generate.handle import Event
from thoughtbubbles.generate.jobs import Request
from thoughtbubbles.serve.worker import MOST_FAILED, WorkerClosed

BODY = {"model": NAME, "prompt": "abc", "max_tokens": 2, "temperature": 0}


@contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Also what uvicorn's logger gets, which keeps it to itself. After the server is made: that removes handlers."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def ask(server: Running, **body: Any) -> tuple[int, Any]:
    return server.ask("POST", "/v1/completions", {**BODY, **body})[:2]


def test_a_broken_step(monkeypatch, caplog):
    with Running() as server, logged(caplog):
        body = {"model": NAME, "prompt": "abc", "max_tokens": 2}

        def broken() -> None:
            raise ZeroDivisionError("planted\nfault")

        monkeypatch.setattr(server.worker.engine, "step", broken)
        status, found, _ = server.ask("POST", "/v1/completions", body)
        assert (status, found["error"]["code"]) == (500, "engine_error")
        assert found["error"]["message"] == "the engine failed: ZeroDivisionError: planted fault"
        for path in ("/readyz", "/healthz"):
            assert server.ask("GET", path)[:2] == (503, {"error": found["error"]["message"]})
        status, found, _ = server.ask("POST", "/v1/completions", body)
        assert (status, found["error"]["code"]) == (503, "broken")
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_failed_batch_does_not_break_the_engine(monkeypatch, caplog):
    """Such as too little memory: its requests fail, later ones do not."""
    with Running() as server, logged(caplog):
        engine = server.worker.engine
        body = {"model": NAME, "prompt": "abc", "max_tokens": 2}
        with monkeypatch.context() as patch:

            def out_of_memory(*args: object, **options: object) -> None:
                raise RuntimeError("out of memory")

            patch.setattr(engine._reader, "read", out_of_memory)
            status, found, _ = server.ask("POST", "/v1/completions", body)
            assert (status, found["error"]["message"]) == (500, "out of memory")
        assert server.ask("POST", "/v1/completions", body)[0] == 200
        assert server.ask("GET", "/readyz")[0] == 200
    (record,) = caplog.records
    assert record.getMessage() == "1 completion(s) failed: out of memory"
    assert record.exc_info is not None


def test_failures_in_a_row_break_the_engine(monkeypatch, caplog):
    with Running() as server, logged(caplog):

        def failing(*args: object, **options: object) -> None:
            raise RuntimeError("no kernel")

        for module in server.served.model.modules():
            monkeypatch.setattr(module, "forward", failing)
        for _ in range(MOST_FAILED):
            assert server.ask("GET", "/healthz")[0] == 200
            status, found = ask(server)
            assert (status, found["error"]["message"]) == (500, "no kernel")
        until(lambda: server.worker.error is not None)
        assert server.worker.error == "the engine failed: RuntimeError: no kernel"
        for path in ("/healthz", "/readyz"):
            assert server.ask("GET", path)[0] == 503
        assert ask(server)[0] == 503
    assert len(caplog.records) == MOST_FAILED + 1


def test_failures_between_successes_do_not_break_the_engine(monkeypatch):
    with Running() as server:
        read = server.worker.engine._reader.read
        fails = False

        def sometimes(*args: Any, **options: Any) -> Any:
            if fails:
                raise RuntimeError("out of memory")
            return read(*args, **options)

        monkeypatch.setattr(server.worker.engine._reader, "read", sometimes)
        for _ in range(MOST_FAILED):
            for fails in (True,) * (MOST_FAILED - 1) + (False,):
                assert ask(server)[0] == (500 if fails else 200)
        assert server.worker.error is None


def test_requests_that_are_cancelled_are_not_failures():
    with Running(block_size=4096) as server:
        for _ in range(MOST_FAILED + 1):
            with closing(server.begin({**BODY, "max_tokens": 4000})):
                until(lambda: server.rows_in_use == 1)
            server.wait_until_idle()
        assert ask(server)[0] == 200


def test_nothing_is_submitted_after_the_end():
    with Running() as server:
        assert ask(server)[0] == 200
        server.worker.close()

        async def submit() -> None:
            server.worker.submit([Request(prompt="abc", max_new=2)])

        with pytest.raises(WorkerClosed):
            asyncio.run(submit())
        status, found = ask(server)
        assert (status, found["error"]["code"]) == (503, "stopping")


def test_retry_after_is_an_estimate():
    with Running(block_size=4096, rows=1, waiting=1) as server:
        connections = [server.begin({"model": NAME, "prompt": "a", "max_tokens": 4000, "temperature": 0}) for _ in "ab"]
        until(lambda: server.worker.engine.stats().tokens_generated > 20)
        status, found, headers = server.ask("POST", "/v1/completions", {"model": NAME, "prompt": "a"})
        assert (status, found["error"]["type"]) == (429, "rate_limit_error")
        assert re.fullmatch(r"\d+", headers["retry-after"])
        assert 1 < int(headers["retry-after"]) <= 60
        for connection in connections:
            connection.close()
        server.wait_until_idle()


@pytest.mark.slow
def test_retry_after_does_not_count_idle_time(monkeypatch):
    with Running(block_size=128, rows=1, waiting=1) as server:
        assert ask(server, max_tokens=10)[0] == 200
        time.sleep(2)  # idle: at 10 tokens in 2 seconds, 100 tokens would take 20
        engine, go = server.worker.engine, threading.Event()
        step = engine.step

        def waiting() -> list[Event]:
            assert go.wait(30)
            return step()

        monkeypatch.setattr(engine, "step", waiting)
        connections = [server.begin({**BODY, "max_tokens": 50}) for _ in "ab"]
        until(lambda: server.rows_in_use == 2)
        status, _, headers = server.ask("POST", "/v1/completions", BODY)
        for connection in connections:
            connection.close()
        go.set()
        assert status == 429
        assert int(headers["retry-after"]) < 10


def test_an_error_of_the_server_is_logged_and_not_sent(monkeypatch, caplog):
    with Running() as server, logged(caplog):

        def failing(*args: object) -> None:
            raise KeyError("a secret")

        monkeypatch.setattr("thoughtbubbles.serve.completions.prepare", failing)
        status, found = ask(server)
        assert (status, found["error"]["type"]) == (500, "server_error")
        assert found["error"]["message"] == "the server failed while answering: see its log"
        until(lambda: any(record.exc_info for record in caplog.records))  # it is logged after the reply
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
