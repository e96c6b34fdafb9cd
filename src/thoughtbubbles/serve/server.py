"""How the server ends. A signal (Ctrl-C, SIGTERM) begins it, a second one ends the process at once.

signal → no new requests (503), /readyz 503 → `drain` seconds → no new connections → what was accepted is finished,
for `grace` seconds at most → what is left is cancelled
"""

import asyncio
import logging
import math
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

LAST_WORDS = 10  # seconds that replies get at the end to be sent
KEEP_ALIVE = 75  # seconds: longer than the proxies' own, so that it is they who close an idle connection


class Server(uvicorn.Server):
    """drain  seconds in which connections are still accepted, for balancers to notice
    grace  seconds in which requests that were accepted can finish; 0: the page's texts end with the signal
    """

    def __init__(self, app: FastAPI, *, drain: int | float = 0, grace: int | float = 0):
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(grace) + LAST_WORDS,
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
