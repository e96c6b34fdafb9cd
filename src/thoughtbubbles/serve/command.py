"""`thoughtbubbles watch`: serves the page on this computer and opens it in the browser. Imports torch when it runs."""

import contextlib
import errno
import socket
import sys
import threading
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import tyro

from thoughtbubbles.files import or_shipped

NEEDED = ("fastapi", "uvicorn")
LAST_WORDS = 10  # seconds that open requests get at the end


def watch(
    *,
    checkpoint: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR [DIR …]")] = (),
    host: str = "127.0.0.1",
    port: int = 8321,
    open: bool = True,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Open a page in the browser on which to watch a model fork: type text, and see each token with its bubble.

    Everything stays on this computer, and nothing is downloaded. Ctrl-C ends it.

    Args:
        checkpoint: One or more models to choose from and to compare: their folders, checkpoints of runs, or runs
            (their newest checkpoints). Default: the one in the package.
        host: The address to listen on. With another one than 127.0.0.1, others can use the page too: there is no
            password.
        port: The port to listen on; 0 takes a free one.
        open: Whether to open the browser, if started from a terminal.
        device: auto: cuda if there is one, else cpu.
    """
    if not checkpoint:
        or_shipped(None)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ValueError(f"{' and '.join(missing)} not installed: pip install 'thoughtbubbles[serve]'")
    import uvicorn

    from thoughtbubbles.distributed import find_device
    from thoughtbubbles.generate.command import DEVICES
    from thoughtbubbles.serve.app import create_app
    from thoughtbubbles.serve.served import open_models

    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port}: give a number from 0 to 65535; 0 takes a free one")
    with listen(host, port) as listener:  # before loading a model, which takes longer to fail
        app = create_app(open_models(checkpoint, device=find_device(device, among=DEVICES)), host=host)
        address = address_of(listener, host)
        print(f"thoughtbubbles watch: {address} (Ctrl-C to stop)", flush=True)
        if open and sys.stdout.isatty():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=LAST_WORDS, server_header=False)
        server = uvicorn.Server(config)
        leave = server.handle_exit

        def handle_exit(sig: int, frame: FrameType | None) -> None:
            app.state.stopping = True  # a text that is being generated ends here
            leave(sig, frame)

        server.handle_exit = handle_exit  # type: ignore[method-assign]
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn passes the signal on when it has shut down
            server.run(sockets=[listener])
        print("stopped", flush=True)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is known before anything else happens."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"--host {host}: no such address; leave it out for 127.0.0.1") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"--port {port} is in use: give another one, or --port 0 for a free one") from None
        raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}/"
