"""The page in a real browser, for tests: a server in a thread, a page that reports every error, and what is drawn."""

import json
import threading
import time
from typing import Any

import uvicorn
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from thoughtbubbles.analysis import trace
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.serve.app import create_app
from thoughtbubbles.serve.command import address_of, listen
from thoughtbubbles.serve.served import Served

BYTES = tokenizer("bytes")
TEXT = "A cell.\n\tŒ!"


def until(page: Page, condition: str, *, seconds: float = 30) -> Any:
    """Playwright's own waiting evaluates strings, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not (found := page.evaluate(condition)):
        assert time.monotonic() < end, f"{condition}: {page.evaluate('document.body.innerText')[:2000]}"
        time.sleep(0.02)
    return found


class Server:
    def __init__(self, models: list[Served], **options: Any):
        self.models = models
        self.socket = listen("127.0.0.1", 0)
        self.address = address_of(self.socket, "127.0.0.1")
        self._server = uvicorn.Server(
            uvicorn.Config(create_app(models, **options), log_level="error", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.socket.close()

    def trace(self, text: str, *, model: int = 0, **options: Any) -> dict[str, Any]:
        own = self.models[model]
        found = trace(own.model, text, tokenizer=own.tokenizer, top=8, **options)
        return json.loads(found.as_json())


SEED = "crypto.getRandomValues = (numbers) => numbers.fill(0);"  # generations are the same in every run


class opened:
    """A page that fails the test on any error, and on any request that leaves our own server."""

    def __init__(self, browser: Browser, address: str, *, script: str = "", **options: Any):
        self.script = script
        self.context = browser.new_context(
            **{"reduced_motion": "reduce", "viewport": {"width": 1300, "height": 900}} | options
        )
        self.address, self.problems = address, []

    def __enter__(self) -> Page:
        page = self.context.new_page()
        origin = "/".join(self.address.split("/")[:3])
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        page.on("request", lambda request: self._check(request.url, origin))
        page.add_init_script(SEED + self.script)
        page.goto(self.address)
        page.wait_for_selector(".token, .facts:not(:empty)")
        return page

    def _check(self, url: str, origin: str) -> None:
        if not url.startswith((origin, f"blob:{origin}", "data:")):
            self.problems.append(f"a request to {url}")

    def __exit__(self, kind: object, *error: object) -> None:
        self.context.close()
        if kind is None:
            assert self.problems == []


def write(page: Page, text: str, *, n_tokens: int | None = None) -> None:
    page.fill("#text", text)
    n_tokens = len(BYTES.encode(text)) if n_tokens is None else n_tokens
    until(page, f"document.querySelectorAll('[data-pane=A] .token').length === {min(n_tokens, 64)} && {settled()}")


def settled(pane: int = 0) -> str:
    """A condition: this pane shows the text in the box."""
    own = f"app.panes[{pane}]"
    return f"!{own}.root.hasAttribute('aria-busy') && ({own}.lineage?.asked.text ?? '') === app.state.text"


def seen(page: Page, pane: str = "A") -> dict[str, Any]:
    """What is drawn: the text and the number of streams of each token, and its dots as [is a fork, token]."""
    return page.evaluate(
        """pane => {
            const tokens = [...document.querySelectorAll(`[data-pane=${pane}] .token`)];
            const middle = tokens.map(node => {
                const box = node.querySelector('.ink').getClientRects()[0];
                return [box.left + box.width / 2, box.top];
            });
            const dots = [...document.querySelectorAll(`[data-pane=${pane}] .dots circle`)].map(node => {
                const box = node.getBoundingClientRect();
                const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
                const near = middle.map(([mx, my]) => Math.abs(mx - x) < 1.5 && my > y && my - y < 70 ? my - y : 1e9);
                return [near.indexOf(Math.min(...near)), node.classList.contains('fork')];
            });
            return {
                inks: tokens.map(node => node.querySelector('.ink').textContent),
                streams: tokens.map(node => Number(node.dataset.streams)),
                dots,
            };
        }""",
        pane,
    )


def check_drawing(page: Page, expected: dict[str, Any], stage: int = -1, pane: str = "A") -> None:
    found = seen(page, pane)
    assert found["streams"] == [token["streams"][stage] for token in expected["tokens"]]
    streams = expected["stages"][stage]["streams"]
    assert sorted(found["dots"]) == sorted([stream["token"], stream["place"] > 0] for stream in streams)


def check_accessible(page: Page) -> None:
    time.sleep(0.1)
    found = Axe().run(page)["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
