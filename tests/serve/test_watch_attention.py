"""Where a stream attends, on the page in a real browser: by block and head, always of the trace that is drawn."""

import base64
import json
from collections.abc import Callable
from importlib.util import find_spec

import pytest

if MISSING := [name for name in ("fastapi", "uvicorn", "playwright", "axe_core_python") if find_spec(name) is None]:
    pytest.skip(f"{', '.join(MISSING)} not installed", allow_module_level=True)

from playwright.sync_api import Page, Route, expect
from watching import TEXT, Server, opened, until, write

from thoughtbubbles.analysis import Trace, trace

pytestmark = pytest.mark.slow

TOKEN = 5  # has several streams


def traced(server: Server, model: int = 0) -> Trace:
    own = server.models[model]
    return trace(own.model, TEXT, tokenizer=own.tokenizer, attention=True)


def inspect(page: Page) -> None:
    """Chooses a token, and waits until the weights of its original are shown."""
    write(page, TEXT)
    page.locator("[data-pane=A] .token").nth(TOKEN).click()
    page.wait_for_selector(".attention .bars li")


def choose(page: Page, head: str) -> None:
    page.locator(".attention .segments[aria-label=Head]").get_by_text(head, exact=True).click()


def chosen(page: Page, head: str) -> None:
    """Waits until this head, "" for the mean, is chosen in the buttons or in the list."""
    own = ".attention input[name=attention-head]:checked, .attention select[name=attention-head]"
    until(page, f"document.querySelector({json.dumps(own)})?.value === {json.dumps(head)}")


def check_weights(page: Page, full: Trace, head: int | None, place: int = 0) -> None:
    """Waits until the list shows these weights in the last block, of the chosen token's stream at this place."""
    streams = full.stages[-1].streams
    stream = next(i for i, each in enumerate(streams) if (each.token, each.place) == (TOKEN, place))
    weights = full.attention[-1].mean(0) if head is None else full.attention[-1][head]
    expected = [percent(weight) for weight in sorted(weights[stream, : stream + 1].tolist(), reverse=True)[:6]]
    expect(page.locator(".attention .bars .more")).to_have_text(expected)


def percent(share: float) -> str:
    """As words.js writes it."""
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def failing(status: int) -> Callable[[Route], None]:
    return lambda route: route.fulfill(status=status, json={"error": "no luck"})


def test_attention_by_head(page, server):
    """The list shows the weights of the chosen head; another stream and another token keep the choice."""
    full = traced(server)
    inspect(page)
    check_weights(page, full, None)
    choose(page, "1")
    check_weights(page, full, 1)
    page.locator("#inspector .row").nth(1).click()
    check_weights(page, full, 1, place=1)
    chosen(page, "1")
    page.locator("[data-pane=A] .token").nth(TOKEN + 1).click()
    chosen(page, "1")
    choose(page, "mean")
    page.locator("[data-pane=A] .token").nth(TOKEN).click()
    check_weights(page, full, None)


def test_many_heads_are_a_list(browser, server):
    """A link brings the head back; a model without this head shows the mean."""
    state = {"text": TEXT, "token": TOKEN, "head": 7, "panes": [{"model": "eight heads"}]}
    link = "#j." + base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip("=")
    with opened(browser, server.address + link) as page:
        chosen(page, "7")
        check_weights(page, traced(server, 4), 7)
        page.select_option(".attention select", "5")
        check_weights(page, traced(server, 4), 5)
        page.select_option("[data-pane=A] select", "a")
        chosen(page, "")
        check_weights(page, traced(server), None)


def test_two_heads_in_a_row(page, server):
    """The first one's request is dropped, whether it waits or is under way."""
    full = traced(server)
    inspect(page)
    page.evaluate("for (const n of [1, 2]) document.querySelector(`[name=attention-head][value='${n}']`).click()")
    check_weights(page, full, 2)
    waiting = []
    page.route("**/api/attention", lambda route: waiting.append(route))
    with page.expect_request("**/api/attention"):
        choose(page, "0")
    page.unroute("**/api/attention")
    choose(page, "1")
    check_weights(page, full, 1)
    for route in waiting:
        route.abort()
    page.wait_for_timeout(100)
    check_weights(page, full, 1)
    chosen(page, "1")


SLOW_ERROR = """() => {
    const plain = window.fetch;
    window.fetch = (path, options) => {
        window.fetch = plain;
        const body = new ReadableStream({
            start: (own) => options.signal.addEventListener("abort", () => own.error(options.signal.reason)),
        });
        window.reached = true;
        return Promise.resolve(new Response(body, {status: 500}));
    };
}"""


def test_an_error_that_comes_too_late(page, server):
    """A request that ends while its error is being read must not replace what is shown."""
    inspect(page)
    page.evaluate(SLOW_ERROR)
    choose(page, "1")
    until(page, "window.reached")
    choose(page, "mean")
    page.wait_for_timeout(100)
    check_weights(page, traced(server), None)


def test_an_error_keeps_the_choosers(page, server):
    inspect(page)
    page.route("**/api/attention", failing(500))
    choose(page, "1")
    expect(page.locator(".attention p")).to_have_text("No luck.")
    assert page.evaluate("document.activeElement.name") == "attention-head"
    page.unroute("**/api/attention")
    choose(page, "2")
    check_weights(page, traced(server), 2)
    assert page.locator(".attention p").count() == 0


@pytest.mark.parametrize("change", ["text", "model"])
def test_attention_is_that_of_the_trace_on_the_page(page, server, change, tmp_path):
    """After a trace that fails, the old one is still there: its text and model count, not those that were asked for."""
    write(page, TEXT)
    page.route("**/api/trace", failing(500))
    if change == "text":
        page.fill("#text", "other")
    else:
        page.select_option("[data-pane=A] select", "eight heads")
    expect(page.locator("[data-pane=A] .error")).to_contain_text("No luck.")
    with page.expect_request("**/api/attention") as found:
        page.locator("[data-pane=A] .token").nth(TOKEN).click()
    asked = found.value.post_data_json
    assert (asked["text"], asked["model"]) == (TEXT, "a")
    check_weights(page, traced(server), None)
    expect(page.locator(".attention [name=attention-head]")).to_have_count(4)
    page.click("#download summary")
    with page.expect_download() as saved:
        page.click("#download [value=json]")
    saved.value.save_as(tmp_path / "view.json")
    view = json.loads((tmp_path / "view.json").read_text())
    assert (view["text"], view["model"]) == (TEXT, "a")
