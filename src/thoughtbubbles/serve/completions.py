"""The API: OpenAI's routes for one model, and what operators ask for.

POST /v1/completions          continues prompts
POST /v1/chat/completions     answers chats, if the model has a chat form
GET  /v1/models               the model
GET  /healthz                 200 while the process works; 503 after its engine broke: it must be restarted
GET  /readyz                  200 while it takes requests, else 503
GET  /metrics                 see metrics.py
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from thoughtbubbles.serve.clients import Streamed, bad_request, failure, submit, unless_gone
from thoughtbubbles.serve.errors import STOPPING, ApiError, error_body
from thoughtbubbles.serve.metrics import CONTENT_TYPE
from thoughtbubbles.serve.replies import ChatReply, Reply, TextReply
from thoughtbubbles.serve.schema import ChatRequest, CompletionRequest, Prepared, prepare
from thoughtbubbles.serve.served import Served
from thoughtbubbles.serve.worker import Failed, Ticket, Worker

LARGE = 4096  # bytes of a request that is prepared in a thread, since tokenizing it takes long
NO_CHAT = (
    "this model has no chat form, so there are no chat completions: use /v1/completions. A model that was trained on "
    "chats declares it in tokenizer_config.json (thoughtbubbles export --chat)"
)


def add_api(app: FastAPI, served: Served, worker: Worker) -> None:
    _add_routes_for_operators(app, worker)
    created = int(time.time())

    def check_model(name: str) -> None:
        if name != served.name:
            message = f"model = {name!r}: this server has {served.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def described() -> dict[str, Any]:
        config, engine = served.model.config, worker.engine
        return {
            "id": served.name,
            "object": "model",
            "created": created,
            "owned_by": "thoughtbubbles",
            "context_length": engine.capacity,
            "budget": float(config.budget) if config.chooses_forks else None,
            "max_budget": float(engine.max_budget.largest) if config.chooses_forks else None,
        }

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        check_model(name)
        return described()

    async def prepared(asked: CompletionRequest | ChatRequest, request: Request) -> Prepared:
        check_model(asked.model)
        try:
            if len(await request.body()) <= LARGE:
                return prepare(asked, served)
            return await run_sync(prepare, asked, served)
        except ValueError as error:
            raise bad_request(request.url.path, error) from None

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        requests, seed, prompts = await prepared(asked, request)
        ticket = submit(request, worker, requests)
        options = {"seed": seed, "n": asked.n, "top": asked.top, "has_usage": asked.has_usage}
        echo = prompts if asked.echo else None
        reply = TextReply(served.name, served.tokenizer, ticket.handles, echo=echo, **options)
        return await _answer(request, ticket, reply, stream=asked.stream)

    if not served.chat:

        @app.post("/v1/chat/completions")
        async def no_chat() -> Response:
            raise ApiError(404, NO_CHAT, code="no_chat_form")

        return

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        requests, seed, _ = await prepared(asked, request)
        ticket = submit(request, worker, requests)
        options = {"seed": seed, "n": asked.n, "top": asked.top, "has_usage": asked.has_usage}
        reply = ChatReply(served.name, served.tokenizer, ticket.handles, **options)
        return await _answer(request, ticket, reply, stream=asked.stream)


def _add_routes_for_operators(app: FastAPI, worker: Worker) -> None:
    def status(name: str, reason: str | None) -> JSONResponse:
        return JSONResponse({"status": name} if reason is None else {"error": reason}, 503 if reason else 200)

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        return status("ok", worker.error)

    @app.api_route("/readyz", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        return status("ready", STOPPING if app.state.stopping else worker.error)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(worker.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def _answer(request: Request, ticket: Ticket, reply: Reply, *, stream: bool) -> Response:
    if not stream:
        await unless_gone(request, ticket, _finished(ticket))
        return JSONResponse(reply.whole())
    await unless_gone(request, ticket, ticket.first())
    return Streamed(_events(request, ticket, reply), ticket, media_type="text/event-stream")


async def _finished(ticket: Ticket) -> None:
    async for _ in ticket.news():
        pass


async def _events(request: Request, ticket: Ticket, reply: Reply) -> AsyncIterator[str]:
    """Server-sent events. An error after the first of them is an event too, since the status is sent already."""
    try:
        async for new in ticket.news():
            for piece in reply.pieces(new):
                yield _event(piece)
    except Failed as failed:
        error = failure(failed)
        yield _event(error_body(request.url.path, error.status_code, error.detail, code=error.code))
        return
    if reply.has_usage:
        yield _event(reply.last_piece())
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"
