"""The page in a real browser: accessible, on any screen, and unharmed by any text, link or silent server."""

from importlib.util import find_spec

import pytest

if MISSING := [name for name in ("fastapi", "uvicorn", "playwright", "axe_core_python") if find_spec(name) is None]:
    pytest.skip(f"{', '.join(MISSING)} not installed", allow_module_level=True)

from playwright.sync_api import expect
from watching import BYTES, TEXT, check_accessible, opened, seen, settled, until, write

pytestmark = pytest.mark.slow

HOSTILE = [
    "<img src=x onerror=\"window.harm='img'\">",
    "<script>window.harm='script'</script></textarea><svg onload=window.harm=1>",
    "javascript:window.harm=1 {{window.harm}} ${window.harm} <!-- ]]> &lt;b&gt;",
    "\u202eright to left\u202c שלום עולם \u2067مرحبا\u2069",
    "\x00\x01\x1b[31m\x7f\x85\u2028\u2029",
    "zero\u200bwidth\ufeff\u00ad\u200d joined 👩\u200d👩\u200d👧",
    "\n\n\t\t   \n",
    "\ud800 lone",
    "a" * 300,
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 390])
def test_accessibility(browser, server, scheme, width):
    with opened(browser, server.address, color_scheme=scheme, viewport={"width": width, "height": 840}) as page:
        write(page, TEXT)
        page.locator("[data-pane=A] .token").nth(2).click()
        page.wait_for_selector(".attention .bars li")
        for mode in ("streams", "loss", "entropy"):
            page.locator("#modes").get_by_text(mode).click()
            check_accessible(page)
        page.evaluate("document.querySelector('#compare').click()")
        until(page, f"document.querySelector('#comparison b') && {settled(1)}")
        check_accessible(page)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.evaluate("toggleTheme()")
        check_accessible(page)
        page.evaluate("document.querySelector('#keys').showModal()")
        check_accessible(page)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_run_nothing(page, server, text):
    page.evaluate("text => { document.querySelector('#text').value = text }", text)
    page.dispatch_event("#text", "input")
    until(page, f"app.state.text && {settled()}", seconds=10)
    assert page.evaluate("window.harm") is None
    assert page.locator(".tokens img, .tokens script, #inspector script").count() == 0
    page.evaluate("app.panes[0].tokens.focus(0)")
    until(page, "document.querySelector('#inspector .row')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    kept = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if "\x00" not in text:
        assert len(seen(page)["streams"]) == min(64, len(BYTES.encode(kept)))


def test_no_text_and_very_long_texts(page):
    write(page, "")
    assert "Type or paste" in page.inner_text("[data-pane=A] .facts")
    assert page.locator(".dots circle").count() == 0
    write(page, "word " * 20_000, n_tokens=64)
    expect(page.locator("[data-pane=A] .note")).to_contain_text("99,936 tokens at the end of your text are left out")
    page.click("#link")
    until(page, "document.querySelector('#toast.on')")
    assert page.evaluate("location.hash.startsWith('#z.') && location.hash.length") < 3000
    # Barely more than a request may have: the browser takes seconds to lay them out, for twice as many half a minute.
    page.evaluate("() => { const box = document.querySelector('#text'); box.value = 'a'.repeat(1.1e6); }")
    page.dispatch_event("#text", "input")
    expect(page.locator("[data-pane=A] .error")).to_contain_text("too large", timeout=30_000)


def test_the_server_is_gone_and_comes_back(page, server):
    write(page, "first")
    page.route("**/api/**", lambda route: route.abort())
    page.fill("#text", "second")
    expect(page.locator("[data-pane=A] .error")).to_contain_text("The server does not answer")
    assert page.input_value("#text") == "second"
    assert seen(page)["inks"] == [*"first"]
    page.unroute("**/api/**")
    page.click("[data-pane=A] .error button")
    until(page, f"document.querySelectorAll('.token').length === 6 && {settled()}")
    expect(page.locator("[data-pane=A] .error")).to_be_hidden()


WATCH_SHIFTS = """
    window.shifts = [];
    const note = list => shifts.push(...list.getEntries().map(entry => entry.value));
    new PerformanceObserver(note).observe({type: 'layout-shift', buffered: true});
"""


@pytest.mark.parametrize("width", [1300, 390])
def test_nothing_jumps(browser, server, width):
    """While the page loads, on other stages, and while the pointer moves over tokens; 0.1 is called good on the web."""
    with opened(browser, server.address, script=WATCH_SHIFTS, viewport={"width": width, "height": 900}) as page:
        for stage in ("Block 1", "Embedding", "Block 3"):
            page.click(f"#stages >> text={stage}")
        for token in (3, 9, 14):
            page.locator("[data-pane=A] .token").nth(token).hover()
            page.wait_for_timeout(400)
        assert page.evaluate("shifts.reduce((sum, value) => sum + value, 0)") < 0.01


@pytest.mark.parametrize("width", [320, 390, 768])
def test_small_screens(browser, server, width):
    with opened(
        browser, server.address, viewport={"width": width, "height": 800}, has_touch=True, is_mobile=True
    ) as page:
        write(page, "A phone. " * 5)
        page.evaluate("document.querySelector('#compare').click()")
        until(page, f"{settled(1)} && app.panes[1].lineage")
        page.locator("[data-pane=A] .token").nth(4).tap()
        until(page, "document.querySelector('#inspector .row')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
