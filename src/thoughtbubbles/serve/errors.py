"""Errors of the server, in two forms: OpenAI's under /v1, which their client turns into exceptions, and one sentence
elsewhere, which the page shows.

    /v1/…      {"error": {"message", "type", "param", "code"}}
    elsewhere  {"error": message}
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from thoughtbubbles.data.tokenizer import whole_characters
from thoughtbubbles.files import short_name

GONE = 499  # the client closed the connection: nobody reads the reply
STOPPING = "the server is stopping"
FAILED = "the server failed while answering: see its log"


class ApiError(HTTPException):
    """What went wrong, with OpenAI's fields: `param` is the field of the request, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers=headers)
        self.param, self.code = param, code


def stopping() -> ApiError:
    return ApiError(503, STOPPING, code="stopping", headers={"retry-after": "1", "connection": "close"})


def is_openai(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


def error_body(
    path: str, status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    message = whole_characters(message)  # it may quote half a surrogate pair, which JSON can have and UTF-8 cannot
    if not is_openai(path):
        return {"error": message}
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def add_errors(app: FastAPI) -> None:
    """Handlers: every error of a route ends in one of the two forms."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        where, message = _first(error.errors())
        param = where if where != "the body" else None
        status = 400 if is_openai(request.url.path) else 422
        body = error_body(request.url.path, status, f"{where}: {message}", param=param)
        return JSONResponse(body, status)

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> JSONResponse:
        extra = {"param": error.param, "code": error.code} if isinstance(error, ApiError) else {}
        body = error_body(request.url.path, error.status_code, error.detail, **extra)
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        """Starlette raises the error again after this reply, and uvicorn writes its traceback to the log."""
        return JSONResponse(error_body(request.url.path, 500, FAILED), 500)


def _first(errors: Sequence[Any]) -> tuple[str, str]:
    """The first problem that pydantic found: the field, and what is wrong with it."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"][1:] if not isinstance(part, int)) or "the body"
    if first["type"] == "extra_forbidden":
        return short_name(where), "there is no such field: leave it out"
    return short_name(where), str(first["msg"]).removeprefix("Value error, ")
