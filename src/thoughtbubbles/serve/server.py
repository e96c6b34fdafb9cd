"""How connections end, and how the server does: after a signal (Ctrl-C, SIGTERM). A second one ends it at once.

signal → no new requests (503), /readyz 503 → `drain` seconds → no new connections → what was accepted is finished,
for `grace` seconds at most → what is left is cancelled
"""

import asyncio
import logging
import math
import socket
import time
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

SEND_SECONDS = 10  # seconds that replies get at the end to be sent
KEEP_ALIVE = 75  # seconds: longer than the proxies' own, so that it is they who close an idle connection

HEAD_SECONDS = 30  # for the head of a request to arrive
MOST_HEAD = 1 << 16  # bytes of it


class Protocol(H11Protocol):
    """Closes connections that send half a request and then nothing, or too slowly, which uvicorn leaves open.

    A new connection has HEAD_SECONDS for its first head; one that is kept alive has them from the first byte of the
    next. So has the rest of a body whose request was answered already. Until that answer, bodies have their own limit
    (guard.py).
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        """The timer runs while the client owes a part of a request, and no reply is being made."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if not is_answered or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """drain  seconds in which connections are still accepted, for balancers to notice
    grace  seconds in which requests that were accepted can finish; 0: the page's texts end with the signal
    """

    def __init__(self, app: FastAPI, *, drain: int | float = 0, grace: int | float = 0):
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            h11_max_incomplete_event_size=MOST_HEAD,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(grace) + SEND_SECONDS,
        )
        super().__init__(config)
        self.app, self.drain, self.grace = app, drain, grace
        self._closing_time = math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.app.state.stopping:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # nothing about what is interrupted
            self.should_exit = self.force_exit = True
            return
        self.app.state.stopping = True
        self.app.state.aborting = self.grace == 0
        self._closing_time = time.monotonic() + self.drain

    async def on_tick(self, counter: int) -> bool:
        if time.monotonic() >= self._closing_time:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self.grace, self.abort)
        await super().shutdown(sockets)

    def abort(self) -> None:
        for worker in self.app.state.workers:
            worker.abort()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        for worker in self.app.state.workers:  # after a second signal they are still running
            worker.close(seconds=2)
