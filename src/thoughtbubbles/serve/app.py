"""The page and what it asks for.

    GET  /                 the page; its scripts and styles are in /static
    GET  /api/models       what can be chosen
    POST /api/trace        {model, text, budget, selection}                    → a trace as JSON, and `truncated`
    POST /api/attention    the same, and {stage, stream, head}                 → weights of one stream, by block
    POST /api/generate     {model, text, budget, max_new, temperature, seed}   → one line of JSON per new token

Errors are {"error": one sentence}. A model does one thing at a time, in a worker thread; requests of a client that has
left meanwhile are dropped before they start.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from anyio.to_thread import run_sync
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from thoughtbubbles import __version__
from thoughtbubbles.generate.requests import Token
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.serve.guard import LOCAL, Guard
from thoughtbubbles.serve.served import Served, View

STATIC = Path(__file__).parent / "static"
GONE = 499  # the client closed the connection: nobody reads the reply
LONGEST_NAME = 400
T = TypeVar("T")


class TraceRequest(BaseModel, extra="forbid"):
    text: str
    model: Annotated[str | None, Field(max_length=LONGEST_NAME)] = None
    budget: Annotated[float | None, Field(ge=1, le=1e6, allow_inf_nan=False)] = None
    selection: Literal["causal", "block"] | None = None

    @property
    def view(self) -> View:
        return View(self.text, _budget(self.budget), self.selection)


class AttentionRequest(TraceRequest):
    stage: Annotated[int, Field(ge=0)]
    stream: Annotated[int, Field(ge=0)]
    head: Annotated[int | None, Field(ge=0)] = None


class GenerateRequest(BaseModel, extra="forbid"):
    text: str
    model: Annotated[str | None, Field(max_length=LONGEST_NAME)] = None
    budget: Annotated[float | None, Field(ge=1, le=1e6, allow_inf_nan=False)] = None
    max_new: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.8
    seed: Annotated[int, Field(ge=0, lt=1 << 53)] = 0


def _budget(budget: float | None) -> str | None:
    """A float is read as the decimal that it prints as; 2 and 2.0 are one view."""
    return None if budget is None else str(int(budget) if budget.is_integer() else budget)


class Worker:
    """Runs the calls of one model in a thread, one at a time."""

    def __init__(self, served: Served):
        self.served = served
        self._lock = asyncio.Lock()

    async def run(self, request: Request, call: Callable[[], T]) -> T:
        async with self._lock:
            if await request.is_disconnected():
                raise HTTPException(GONE, "the client has left")
            if request.app.state.stopping:
                raise HTTPException(503, "the server is stopping")
            try:
                return await run_sync(call)
            except ValueError as error:
                raise HTTPException(422, str(error)) from None


def create_app(models: Sequence[Served], *, host: str = LOCAL[1]) -> FastAPI:
    """`host`: the address that the server is bound to. Generations end when `app.state.stopping` is set."""
    app = FastAPI(title="Thoughtbubbles", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, host=host)
    app.state.stopping = False
    workers = {served.name: Worker(served) for served in models}

    def worker(name: str | None) -> Worker:
        if name is not None and name not in workers:
            raise HTTPException(404, f"model = {name!r}: choose from {', '.join(workers)}")
        return workers[name] if name is not None else next(iter(workers.values()))

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/api/models")
    async def list_models() -> dict[str, Any]:
        return {"version": __version__, "models": [each.served.described() for each in workers.values()]}

    @app.post("/api/trace")
    async def trace(asked: TraceRequest, request: Request) -> Response:
        own = worker(asked.model)
        body = await own.run(request, lambda: own.served.trace(asked.view))
        return Response(body, media_type="application/json")

    @app.post("/api/attention")
    async def attention(asked: AttentionRequest, request: Request) -> dict[str, Any]:
        own = worker(asked.model)
        return await own.run(
            request,
            lambda: own.served.attention(asked.view, stage=asked.stage, stream=asked.stream, head=asked.head),
        )

    @app.post("/api/generate")
    async def generate(asked: GenerateRequest, request: Request) -> StreamingResponse:
        own = worker(asked.model)
        budget, sampling = _budget(asked.budget), Sampling(temperature=asked.temperature, seed=asked.seed)
        tokens = await own.run(
            request,
            lambda: own.served.generate(asked.text, max_new=asked.max_new, budget=budget, sampling=sampling),
        )
        return StreamingResponse(_lines(own, request, tokens), media_type="application/x-ndjson")

    _add_errors(app)
    app.mount("/static", StaticFiles(directory=STATIC))
    return app


async def _lines(own: Worker, request: Request, tokens: Iterator[Token]) -> AsyncIterator[str]:
    """The lock is held for one token at a time, so that a trace can be drawn while a text is generated."""
    try:
        while (token := await own.run(request, lambda: next(tokens, None))) is not None:
            yield json.dumps(own.served.as_line(token), ensure_ascii=False) + "\n"
    except HTTPException as error:  # the status is sent already: the last line says what went wrong
        yield json.dumps({"error": error.detail}) + "\n"


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] if not isinstance(part, int)) or "the body"
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 422)

    @app.exception_handler(StarletteHTTPException)
    async def failed(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        reason = " ".join(str(error).split())[:300]
        return JSONResponse({"error": f"the server failed: {type(error).__name__}: {reason}"}, 500)
