"""What every request passes: a check of the Host and Origin headers, a limit on the body, and headers on the reply.

A page on another site can send requests to a local server. The check of Host stops those that reach it under a name of
their own (DNS rebinding), the check of Origin those that name their site. Replies allow nothing from outside this page.
"""

import ipaddress
import json
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 1 << 20  # of a request's body
LOCAL = ("localhost", "127.0.0.1", "::1")
EVERYWHERE = ("0.0.0.0", "::", "")
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware. `host` is the address that the server is bound to."""

    def __init__(self, app: ASGIApp, *, host: str = LOCAL[1]):
        self.app = app
        self.everywhere = host in EVERYWHERE
        self.hosts = {*LOCAL, host.lower(), *([socket.gethostname().lower()] if self.everywhere else [])}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._knows(f"//{headers.get('host', '')}"):
            await refuse(send, 403, "this server answers only under its own address, such as http://127.0.0.1")
        elif "origin" in headers and not self._knows(headers["origin"]):
            await refuse(send, 403, "this server answers only its own page")
        elif (body := await _body(receive, headers.get("content-length", "0"))) is None:
            await refuse(send, 413, f"the request is too large: send at most {MOST_BYTES:,} bytes")
        else:
            await self.app(scope, _again(body, receive), _with_headers(send))

    def _knows(self, address: str) -> bool:
        try:
            name = urlsplit(address).hostname or ""
        except ValueError:
            return False
        return name in self.hosts or (self.everywhere and _is_address(name))


def _is_address(name: str) -> bool:
    """An address of numbers cannot be rebound: only names can."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


async def _body(receive: Receive, stated: str) -> list[Message] | None:
    """All of the body, so that no handler sees half of one; None if it is too large."""
    if stated.isdecimal() and int(stated) > MOST_BYTES:
        return None
    messages, size = [], 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if size > MOST_BYTES:
            return None
        if message["type"] != "http.request" or not message.get("more_body", False):
            return messages


def _again(messages: Iterable[Message], receive: Receive) -> Receive:
    """The messages that were read, then those to come: a handler waits for them to learn of a disconnection."""
    read = iter(messages)

    async def next_message() -> Message:
        return next(read, None) or await receive()

    return next_message


def _with_headers(send: Send) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            mine = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *mine]}
        await send(message)

    return send_more


async def refuse(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    send = _with_headers(send)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
