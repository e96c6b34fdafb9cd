"""A server with small models, and a browser, for the tests of the page; skipped where there is none."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from helpers import lively_model, small_config
from thoughtbubbles.checkpoint import load_tokenizer
from thoughtbubbles.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from watching import Server

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def server() -> Iterator["Server"]:
    from watching import BYTES, Server

    from thoughtbubbles.serve.served import Served

    def small(name: str, tokenizer: Tokenizer = BYTES, *, seed: int = 0, **changes: Any) -> Served:
        config = small_config(vocab_size=tokenizer.size, block_size=64, **changes)
        return Served(name, lively_model(config, seed=seed, dtype=torch.float32).eval(), tokenizer)

    others = [small("plain", fork_layers=(), merge="original"), small("bpe", load_tokenizer())]
    with Server([small("a"), small("b", seed=1), *others, small("eight heads", n_head=8, width=32)]) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    if BROWSER is None:
        pytest.skip("no browser (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: "Browser", server: "Server") -> Iterator["Page"]:
    from watching import opened

    with opened(browser, server.address) as page:
        yield page
