"""Clients wait, read slowly, or leave: how a request waits for its tokens, and what its errors are called.

A client that leaves is noticed in two ways: while nothing is sent yet by `unless_gone`, and while tokens are sent by
Starlette. Either way its tickets are cancelled, which frees their rows before the engine's next step.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from thoughtbubbles.generate.jobs import Request
from thoughtbubbles.serve.errors import GONE, ApiError, is_openai, stopping
from thoughtbubbles.serve.worker import EngineBroken, Failed, Ticket, TooBusy, Worker, WorkerClosed

T = TypeVar("T")


def submit(request: HttpRequest, worker: Worker, asked: Sequence[Request]) -> Ticket:
    """Submits all of `asked` or none; errors get their HTTP status."""
    if request.app.state.stopping:
        raise stopping()
    try:
        return worker.submit(asked)
    except ValueError as error:
        raise bad_request(request.url.path, error) from None
    except TooBusy as error:
        raise ApiError(429, str(error), code="queue_full", headers={"retry-after": str(error.retry_after)}) from None
    except EngineBroken as error:
        raise ApiError(503, str(error), code="broken") from None
    except WorkerClosed:
        raise stopping() from None


def bad_request(path: str, error: ValueError) -> ApiError:
    """Our messages begin with the field: "top_p = 2: give …"."""
    field = re.match(r"(\w+) = ", str(error))
    return ApiError(400 if is_openai(path) else 422, str(error), param=field[1] if field else None)


def failure(error: Failed) -> ApiError:
    if error.finish == "timeout":
        message = "the request took longer than this server allows: ask for fewer tokens"
        return ApiError(504, message, code="timeout", headers={"x-should-retry": "false"})
    if error.finish == "cancelled":
        return stopping()
    return ApiError(500, str(error), code="engine_error")


async def unless_gone(request: HttpRequest, ticket: Ticket, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which waits for the ticket. Ends when the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(GONE, "the client has left")
        return working.result()
    except Failed as error:
        ticket.cancel()
        raise failure(error) from None
    except BaseException:
        ticket.cancel()
        raise
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnection(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Streamed(StreamingResponse):
    """Sends text as it comes; however it ends, the ticket is cancelled then."""

    def __init__(self, content: AsyncIterator[str], ticket: Ticket, *, media_type: str):
        # X-Accel-Buffering: nginx would collect tokens otherwise
        super().__init__(content, media_type=media_type, headers={"x-accel-buffering": "no"})
        self.ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ticket.cancel()
