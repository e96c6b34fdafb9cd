"""What every request passes: a check of the Host and Origin headers and of the API key, limits on the body, and headers
on the reply.

A page on another site can send requests to a local server. The check of Host stops those that reach it under a name of
their own (DNS rebinding), the check of Origin those that name their site. Replies allow nothing from outside this page.
"""

import asyncio
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thoughtbubbles.serve.errors import STOPPING, error_body

MOST_BYTES = 1 << 20  # of a request's body
MOST_DROPPED = 1 << 24  # bytes of a body that is too large: they are read before the reply
BODY_SECONDS = 30  # for a request's body to arrive
LOOK_SECONDS = 0.25  # how often a request that waits for its body looks whether the server is stopping
LOCAL = ("localhost", "127.0.0.1", "::1")
EVERYWHERE = ("0.0.0.0", "::", "")
PROBES = ("/healthz", "/readyz")  # of balancers, some of which send no Host header
NO_KEY = ("/", *PROBES)  # and /static: health checks and the page's files need no key
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
    """ASGI middleware.

    host   the address that the server is bound to
    hosts  other names under which it is reached, such as a proxy's
    key    the API key that requests must have
    """

    def __init__(self, app: ASGIApp, *, host: str = LOCAL[1], hosts: Sequence[str] = (), key: str | None = None):
        self.app = app
        self.everywhere = host in EVERYWHERE
        own = [socket.gethostname()] if self.everywhere else []
        self.hosts = {*LOCAL, *(name.lower() for name in (host, *hosts, *own))}
        self.key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        host = headers.get("host", "")
        if not self._knows(f"//{host}") and (host or path not in PROBES):
            await refuse(send, path, 403, "this server answers only under its own address, such as http://127.0.0.1")
        elif "origin" in headers and not self._knows(headers["origin"]):
            await refuse(send, path, 403, "this server answers only its own page")
        elif not self._may(path, headers.get("authorization", "")):
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
            await refuse(send, path, 401, message, code="invalid_api_key")
        else:
            await self._with_body(scope, receive, send, headers.get("content-length", "0"))

    async def _with_body(self, scope: Scope, receive: Receive, send: Send, length: str) -> None:
        reading = asyncio.ensure_future(_body(receive, length))
        state, end = scope["app"].state, time.monotonic() + BODY_SECONDS
        try:
            while not (await asyncio.wait([reading], timeout=min(LOOK_SECONDS, BODY_SECONDS)))[0]:
                if state.stopping:
                    await refuse(send, scope["path"], 503, STOPPING, code="stopping")
                    return
                if time.monotonic() >= end:
                    message = f"the request's body did not arrive within {BODY_SECONDS} seconds"
                    await refuse(send, scope["path"], 408, message)
                    return
            body = reading.result()
        finally:
            reading.cancel()
        if body is None:
            message = f"the request is too large: send at most {MOST_BYTES:,} bytes"
            await refuse(send, scope["path"], 413, message)
        else:
            await self.app(scope, _again(body, receive), _with_headers(send))

    def _knows(self, address: str) -> bool:
        try:
            name = urlsplit(address).hostname or ""
        except ValueError:
            return False
        return name in self.hosts or (self.everywhere and _is_address(name))

    def _may(self, path: str, authorization: str) -> bool:
        if self.key is None or path in NO_KEY or path.startswith("/static/"):
            return True
        scheme, _, given = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self.key)


def _is_address(name: str) -> bool:
    """An address of numbers cannot be rebound: only names can."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


async def _body(receive: Receive, stated: str) -> list[Message] | None:
    """All of the body, so that no handler sees half of one; None if it is too large.

    The rest of one that is somewhat too large is read too, and dropped: most clients read no reply while they send.
    """
    if stated.isdecimal() and (len(stated) > 18 or int(stated) > MOST_DROPPED):
        return None
    messages: list[Message] = []
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if size <= MOST_BYTES:
            messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False) or size > MOST_DROPPED:
            return messages if size <= MOST_BYTES else None


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


async def refuse(send: Send, path: str, status: int, reason: str, *, code: str | None = None) -> None:
    body = json.dumps(error_body(path, status, reason, code=code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in (408, 413, 503):  # there may be more of the body
        headers.append((b"connection", b"close"))
    if status == 503:
        headers.append((b"retry-after", b"1"))
    send = _with_headers(send)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
