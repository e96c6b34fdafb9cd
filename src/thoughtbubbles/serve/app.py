"""The server: the page of `thoughtbubbles watch`, and with `thoughtbubbles serve` an OpenAI-style API next to it.

page.py           the page, and what it asks for: /, /static, /api
completions.py    /v1 and /healthz, /readyz, /metrics
schema.py         requests of /v1: their fields, and what they ask of the engine
replies.py        their replies, whole and in pieces
worker.py         the thread of an engine
clients.py        clients that wait, and clients that leave
guard.py          what every request passes
errors.py         the two forms of errors
metrics.py        what is counted
served.py         a loaded model: traces and attention for the page
server.py         how it ends
command.py        the commands
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf

from fastapi import FastAPI

from thoughtbubbles import __version__
from thoughtbubbles.generate.engine import Engine
from thoughtbubbles.model.budget import Number
from thoughtbubbles.serve.completions import add_api
from thoughtbubbles.serve.errors import add_errors
from thoughtbubbles.serve.guard import LOCAL, Guard
from thoughtbubbles.serve.metrics import RequestCounter
from thoughtbubbles.serve.page import add_page
from thoughtbubbles.serve.served import Served
from thoughtbubbles.serve.worker import Worker

PAGE_ROWS = 2  # texts that are generated at the same time for the page alone


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Of an engine: see Engine. `timeout`: seconds per request."""

    rows: int = PAGE_ROWS
    waiting: int | None = None
    max_budget: Number | None = None
    timeout: int | float = inf
    compiled: bool = False


def create_app(
    models: Sequence[Served],
    *,
    host: str = LOCAL[1],
    hosts: Sequence[str] = (),
    key: str | None = None,
    page: bool = True,
    api: bool = False,
    capacity: Capacity | None = None,
) -> FastAPI:
    """The app for some models.

    host      the address that the server is bound to
    hosts     other names under which it is reached
    key       the API key, if requests need one
    page      whether to serve the page, for all models
    api       whether to serve the API, for the first model
    capacity  of each engine; by default enough for the page, with room for any budget

    `app.state.stopping` ends new requests, `app.state.aborting` also the page's texts that are being generated.
    """
    workers = {served.name: _worker(served, capacity) for served in models}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for worker in workers.values():
            worker.close()

    app = FastAPI(
        title="Thoughtbubbles",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
    )
    app.state.stopping = app.state.aborting = False
    app.state.workers = list(workers.values())
    app.add_middleware(Guard, host=host, hosts=hosts, key=key)
    if api:
        add_api(app, models[0], app.state.workers[0])
        app.add_middleware(RequestCounter, metrics=app.state.workers[0].metrics)
    if page:
        add_page(app, models, workers, limited=capacity is not None)
    add_errors(app)
    return app


def _worker(served: Served, capacity: Capacity | None) -> Worker:
    limits = capacity or Capacity(max_budget=served.model.config.max_bubble)

    def build() -> Engine:
        engine = Engine(
            served.model,
            tokenizer=served.tokenizer,
            rows=limits.rows,
            waiting=limits.waiting,
            max_budget=limits.max_budget,
            compiled=limits.compiled,
        )
        engine.warm_up()
        return engine

    return Worker(build, timeout=limits.timeout)
