"""`thoughtbubbles serve` and `thoughtbubbles watch`. They import torch when they run."""

import errno
import ipaddress
import math
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from thoughtbubbles.files import named, or_shipped, read_bytes

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
KEY_VARIABLE = "THOUGHTBUBBLES_API_KEY"
MOST_SECONDS = 1e6
ON_THIS_COMPUTER = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # of hosts that are all of its addresses


def serve(
    *,
    checkpoint: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    compile: bool = False,
    rows: int = 32,
    waiting: int = 128,
    max_budget: Annotated[str | None, tyro.conf.arg(metavar="R")] = None,
    timeout: float = 600.0,
    api_key_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    allow_host: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME …]")] = (),
    page: bool = True,
    grace: float = 600.0,
    drain: float = 0.0,
) -> None:
    """Serve a model over HTTP, with OpenAI's API: completions, streaming, and a thinking budget for each request.

    Routes: /v1/completions, /v1/chat/completions (for a model with a chat form), /v1/models, /healthz, /readyz,
    /metrics (Prometheus), and the page of `thoughtbubbles watch`. Requests that come at the same time are batched.

    Ctrl-C or SIGTERM ends it: new requests get a 503, those that were accepted are finished. A second one ends it at
    once.

    Args:
        checkpoint: The model: its folder, a checkpoint of a run, or a run (its newest checkpoint). Default: the one
            in the package. Its API name is the folder's.
        host: The address to listen on. With another one than 127.0.0.1, other computers can send requests: set an
            API key.
        port: The port to listen on; 0 takes a free one.
        device: auto: cuda if there is one, else cpu.
        dtype: The model's dtype. In float64, texts do not depend on what else is running, to the last token; in
            float32 and bfloat16, rounding can change one.
        compile: On cuda, in bfloat16: decode with CUDA graphs of compiled kernels. The server starts up to a minute
            later, then answers many times faster.
        rows: How many completions are generated at the same time. Each has a row in the KV cache.
        waiting: How many completions may wait for a row. Beyond that, requests get a 429 with Retry-After.
        max_budget: The largest budget that a request can ask for, such as 2 or 8; it sets the size of a row. Default:
            4, or the model's own budget if that is larger.
        timeout: Seconds that a request may take, with its time in the queue; then it gets a 504. Connections whose
            client reads nothing for so long are closed (on Linux).
        api_key_file: A file with the key that requests must have: Authorization: Bearer KEY. Or set the environment
            variable THOUGHTBUBBLES_API_KEY. There is no option for the key itself: every user could see it in the
            list of processes. /healthz, /readyz and the files of the page need no key.
        allow_host: Names under which the server is reached, next to its address: the Host header that a proxy sends.
        page: Whether to serve the page too. It cannot send a key.
        grace: Seconds that accepted requests have to finish at the end.
        drain: Seconds at the end in which connections are still accepted (and new requests get a 503), so that a
            load balancer can see /readyz fail before it meets a closed port.
    """
    or_shipped(checkpoint)
    _check_extra()
    key = _api_key(api_key_file)
    _check_port(port)
    _check_at_least(1, **{"--rows": rows})
    _check_at_least(0, **{"--waiting": waiting})
    _check_seconds(**{"--timeout": timeout, "--grace": grace, "--drain": drain})
    _check_names(allow_host)
    import torch

    from thoughtbubbles.distributed import find_device
    from thoughtbubbles.generate.command import DEVICES
    from thoughtbubbles.model.budget import Budget
    from thoughtbubbles.serve.app import Capacity, create_app
    from thoughtbubbles.serve.served import open_models
    from thoughtbubbles.serve.server import Server

    if max_budget is not None:
        Budget.of(max_budget, name="--max-budget")
    with bind(host, port, patience=timeout) as listener:  # before loading a model, which takes longer to fail
        if key is None and not _is_local(host):
            print(
                f"--host {host} without an API key: everybody who can reach this port can use the model; "
                "--api-key-file sets a key",
                file=sys.stderr,
            )
        (served,) = open_models(
            [checkpoint] if checkpoint else [],
            device=find_device(device, among=DEVICES),
            dtype=getattr(torch, dtype),
        )
        app = create_app(
            [served],
            host=host,
            hosts=allow_host,
            key=key,
            page=page,
            api=True,
            capacity=Capacity(rows=rows, waiting=waiting, max_budget=max_budget, timeout=timeout, compiled=compile),
        )
        facts = f"model {served.name}, {rows} rows, {app.state.workers[0].memory}"
        accept(listener, host, port)
        print(f"thoughtbubbles serve: {address_of(listener, host)} {facts} ({_also(host)}Ctrl-C to stop)", flush=True)
        Server(app, drain=drain, grace=grace).run(sockets=[listener])
        print("stopped", flush=True)


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
    _check_extra()
    from thoughtbubbles.distributed import find_device
    from thoughtbubbles.generate.command import DEVICES
    from thoughtbubbles.serve.app import create_app
    from thoughtbubbles.serve.served import open_models
    from thoughtbubbles.serve.server import Server

    _check_port(port)
    with listen(host, port) as listener:  # before loading a model, which takes longer to fail
        app = create_app(open_models(checkpoint, device=find_device(device, among=DEVICES)), host=host)
        address = address_of(listener, host)
        print(f"thoughtbubbles watch: {address} ({_also(host)}Ctrl-C to stop)", flush=True)
        if open and sys.stdout.isatty():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        Server(app).run(sockets=[listener])
        print("stopped", flush=True)


def _check_extra() -> None:
    if missing := [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]:
        raise ValueError(f"{' and '.join(missing)} not installed: pip install 'thoughtbubbles[serve]'")


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port}: give a number from 0 to 65535; 0 takes a free one")


def _check_at_least(least: int, **options: int) -> None:
    for option, value in options.items():
        if value < least:
            raise ValueError(f"{option} {value}: give a whole number of {least} or more")


def _check_seconds(**options: float) -> None:
    for option, seconds in options.items():
        if not 0 <= seconds <= MOST_SECONDS or (option == "--timeout" and seconds == 0):
            above = " above 0" if option == "--timeout" else ""
            raise ValueError(f"{option} {seconds:g}: give a number of seconds{above}")


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not name or set(name) & set("/: \t\n"):
            raise ValueError(f"--allow-host {name!r}: give a name without scheme, port and path, such as example.org")


def _api_key(path: Path | None) -> str | None:
    """From the file, or else from the environment."""
    if path is None:
        found, where = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if found is None:
            return None
    else:
        where, remedy = f"--api-key-file {path}", "give a file with the key in one line"
        with named(path, remedy):
            found = read_bytes(path, remedy=remedy).decode("latin-1")
    key = found.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{where} is not a key: give one line of printable ASCII characters without spaces")
    return key


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, patience: int | float = math.inf) -> socket.socket:
    """A socket that accepts connections: `bind`, then `accept`."""
    listener = bind(host, port, patience=patience)
    accept(listener, host, port)
    return listener


def bind(host: str, port: int, *, patience: int | float = math.inf) -> socket.socket:
    """A bound socket, so that a port in use is known before anything else happens. It refuses connections until
    `accept`: a balancer sends nothing to a server that is still loading its model.

    patience  seconds after which a connection whose client reads nothing is closed, where the system can (Linux)
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"--host {host}: no such address; leave it out for 127.0.0.1") from None
    listener = socket.socket(family, kind, protocol)
    with _errors_of(listener, host, port):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if patience < math.inf and hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * patience))
        listener.bind(place)
    return listener


def accept(listener: socket.socket, host: str, port: int) -> None:
    """Begins to accept connections. The port can be in use only now, by a server that was bound at the same time."""
    with _errors_of(listener, host, port):
        listener.listen()


@contextmanager
def _errors_of(listener: socket.socket, host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"--port {port} is in use: give another one, or --port 0 for a free one") from None
        raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None


def _also(host: str) -> str:
    """`address_of` gives one that works in a browser on this computer."""
    return "also under the computer's other addresses; " if host in ON_THIS_COMPUTER else ""


def address_of(listener: socket.socket, host: str) -> str:
    name = ON_THIS_COMPUTER.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}/"
