"""The page in a real browser: what it draws equals the trace, and everything works by mouse and by keyboard."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

if MISSING := [name for name in ("fastapi", "uvicorn", "playwright", "axe_core_python") if find_spec(name) is None]:
    pytest.skip(f"{', '.join(MISSING)} not installed", allow_module_level=True)

from playwright.sync_api import expect
from watching import TEXT, Server, check_drawing, opened, seen, settled, until, write

from thoughtbubbles.analysis import trace
from thoughtbubbles.serve.app import Capacity
from thoughtbubbles.serve.served import open_models

pytestmark = pytest.mark.slow


def test_tokens_and_bubbles_are_those_of_the_trace(page, server):
    write(page, TEXT)
    expected = server.trace(TEXT)
    check_drawing(page, expected)
    assert seen(page)["inks"] == [*"A", "·", *"cell.", "↵", "⇥", "Œ", "◦", "!"]
    assert max(token["streams"][-1] for token in expected["tokens"]) > 1
    assert f"{expected['loss']:.2f}" in page.inner_text("[data-pane=A] .facts")


def test_the_budget_slider(page, server):
    write(page, TEXT)
    page.focus("#budget-A")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    until(page, f"app.panes[0].lineage.asked.budget === 3 && {settled()}")
    check_drawing(page, server.trace(TEXT, budget=3))
    page.keyboard.press("Home")
    until(page, f"app.panes[0].lineage.asked.budget === 1 && {settled()}")
    check_drawing(page, server.trace(TEXT, budget=1))
    page.keyboard.press("End")
    page.locator("[data-pane=A] .segments").get_by_text("block").click()
    until(
        page,
        f"app.panes[0].lineage.asked.budget === 8 && app.panes[0].lineage.asked.selection === 'block' && {settled()}",
    )
    check_drawing(page, server.trace(TEXT, budget=8, selection="block"))


def test_stages(page, server):
    write(page, TEXT)
    expected = server.trace(TEXT)
    for stage, name in enumerate(("Embedding", "Block 1", "Block 2", "Block 3")):
        page.click(f"#stages >> text={name}")
        check_drawing(page, expected, stage)
    page.click("h1")
    page.keyboard.press("[")
    check_drawing(page, expected, 2)
    page.keyboard.press("]")
    check_drawing(page, expected, 3)


def test_stages_with_motion(browser, server):
    """Streams are born and dropped, and what is left at the end is the stage."""
    with opened(browser, server.address, reduced_motion="no-preference") as page:
        write(page, TEXT)
        page.click(".play")
        until(page, "app.stages.timer === 0 && app.panes[0].stage === 3")
        time.sleep(1.2)
        check_drawing(page, server.trace(TEXT), 3)


def test_the_inspector(page, server):
    write(page, TEXT)
    expected = server.trace(TEXT)
    token = max(range(len(expected["tokens"])), key=lambda t: expected["tokens"][t]["streams"][-1])
    page.locator("[data-pane=A] .token").nth(token).click()
    bubble = [stream for stream in reversed(expected["stages"][-1]["streams"]) if stream["token"] == token]
    expect(page.locator("#inspector .row")).to_have_count(len(bubble))
    shares = [float(text.split()[1]) for text in page.locator(".row .meter small").all_inner_texts()]
    assert shares == pytest.approx([stream["score"] for stream in bubble], abs=6e-4)
    gone = [each for each in expected["stages"][-1]["dropped"] if each["token"] == token]
    expect(page.locator(".gone li")).to_have_count(len(gone))
    best = expected["tokens"][token]["top"]
    expect(page.locator(".guesses li")).to_have_count(len(best))
    page.wait_for_selector(".attention .bars li")
    assert page.locator(".lines path").count() > 0
    page.locator("#inspector .row").last.hover()
    expect(page.locator(".dots .marked")).to_have_count(1)
    assert page.locator(".descent li").count() == 4


def test_colours(page):
    write(page, TEXT)
    for mode in ("loss", "entropy", "streams"):
        page.locator("#modes").get_by_text(mode).click()
        assert page.get_attribute("[data-pane=A] .tokens", "data-mode") == mode


def test_generation(page, server):
    write(page, "Hello")
    page.fill("#length", "12")
    page.click("#generate")
    page.wait_for_selector("#generate:not(.stop)")
    text = until(page, f"{settled()} && !app.panes[0].counts && app.state.text")
    assert text.startswith("Hello")
    assert page.input_value("#text") == text
    assert len(text) > len("Hello")
    check_drawing(page, server.trace(text))


def test_a_generation_keeps_to_the_budget_of_its_engine(browser, server):
    """Traces take any budget; the engine of `serve` has a limit."""
    capacity = Capacity(max_budget=2)
    with Server(server.models[:1], capacity=capacity) as limited, opened(browser, limited.address) as page:
        write(page, "Hello")
        page.focus("#budget-A")
        page.keyboard.press("End")
        until(page, f"app.panes[0].lineage.asked.budget === 8 && {settled()}")
        page.fill("#length", "4")
        with page.expect_request("**/api/generate") as asked:
            page.click("#generate")
        assert asked.value.post_data_json["budget"] == 2
        assert asked.value.response().status == 200
        page.wait_for_selector("#generate:not(.stop)")


def test_a_generation_is_stopped(page):
    write(page, "Hi")
    page.fill("#length", "60")
    page.click("#generate")
    until(page, "document.querySelectorAll('.token.new').length > 2")
    assert page.inner_text("#generate") == "Stop"
    page.click("#generate")
    page.wait_for_selector("#generate:not(.stop)")
    assert page.input_value("#text").startswith("Hi")


def test_typing_ends_a_generation_and_keeps_what_was_typed(page, server):
    write(page, "Hi")
    page.fill("#length", "60")
    page.click("#generate")
    until(page, "document.querySelectorAll('.token.new').length > 1")
    page.click("#stages >> text=Block 1")
    # In one step: between the two of page.fill, select and insert, a new token would write to the box.
    page.evaluate(
        "const box = document.querySelector('#text'); box.value = 'mine'; box.dispatchEvent(new Event('input'))"
    )
    until(page, f"document.querySelectorAll('[data-pane=A] .token').length === 4 && {settled()}")
    page.wait_for_selector("#generate:not(.stop)")
    time.sleep(0.5)
    assert page.input_value("#text") == "mine"
    check_drawing(page, server.trace("mine"), 1)


def test_comparison(page, server):
    write(page, TEXT)
    page.click("#compare")
    until(page, f"document.querySelector('#comparison b') && {settled(1)}")
    a, b = server.trace(TEXT), server.trace(TEXT, model=1)
    check_drawing(page, a)
    check_drawing(page, b, pane="B")
    difference = b["loss"] - a["loss"]
    assert page.inner_text("#comparison b") == f"{'−' if difference < 0 else '+'}{abs(difference):.3f}"
    shades = [int(x) for x in page.eval_on_selector_all("[data-pane=B] .token", "all => all.map(n => n.dataset.shade)")]
    each = [0, *(y["loss"] - x["loss"] for x, y in zip(a["tokens"][1:], b["tokens"][1:], strict=True))]
    assert all(shade * value >= 0 for shade, value in zip(shades, each, strict=True))
    assert any(shades)


def test_other_models(page, server):
    write(page, TEXT)
    page.click("#compare")
    page.select_option("[data-pane=B] select", "bpe")
    expect(page.locator("#comparison")).to_contain_text("bits per byte")
    check_drawing(page, server.trace(TEXT, model=3), pane="B")
    page.focus("[data-pane=B] select")
    page.select_option("[data-pane=B] select", "plain")
    expect(page.locator("[data-pane=B] .controls")).to_contain_text("no fork layers")
    assert page.evaluate("document.activeElement.tagName") == "SELECT"
    until(page, f"app.panes[1].lineage.asked.model === 'plain' && {settled(1)}")
    check_drawing(page, server.trace(TEXT, model=2), pane="B")


def test_a_link_brings_the_view_back(browser, page, server):
    text = TEXT + "é" * 20
    write(page, text)
    page.click("#compare")
    until(page, f"document.querySelector('#comparison b') && {settled(1)}")
    page.focus("#budget-B")
    page.keyboard.press("ArrowRight")
    until(page, f"app.panes[1].lineage.asked.budget > 2 && {settled(1)}")
    page.click("#stages >> text=Block 2")
    page.locator("[data-pane=B] .token").nth(3).click()
    until(page, "document.querySelector('#inspector .row')")
    page.click("#link")
    until(page, "document.querySelector('#toast.on')")  # the address itself may be of an earlier view until then
    with opened(browser, page.url) as again:
        until(
            again, f"app.panes[1].lineage && document.querySelector('#inspector .row') && {settled()} && {settled(1)}"
        )
        assert again.evaluate("app.state") == page.evaluate("app.state")
        assert again.input_value("#text") == text
        for pane in "AB":
            assert sorted(seen(again, pane)["dots"]) == sorted(seen(page, pane)["dots"])
        assert "pane B" in again.inner_text("#inspector")


@pytest.mark.parametrize("link", ["#z.AAAA", "#j.e30", "#j.WzFd", "#z.", "#something", "#j." + "A" * 5000])
def test_a_damaged_link_shows_the_first_view(browser, server, link):
    with opened(browser, server.address + link) as page:
        until(page, "document.querySelectorAll('.token').length > 10")


def test_downloads(page, server, tmp_path):
    write(page, TEXT)
    for kind in ("json", "svg", "png"):
        page.click("#download summary")
        with page.expect_download() as found:
            page.click(f"#download [value={kind}]")
        found.value.save_as(tmp_path / f"view.{kind}")
    saved = json.loads((tmp_path / "view.json").read_text())
    assert saved["stages"] == server.trace(TEXT, budget="2")["stages"]
    drawing = (tmp_path / "view.svg").read_text()
    assert drawing.count("<circle") == len(saved["stages"][-1]["streams"])
    height = float(re.search(r'height="([\d.]+)"', drawing).group(1))
    shifts = [float(y) for y in re.findall(r"translate\(\S+ (\S+)\)", drawing)]
    lows = [sum(shifts) + float(y) for y in re.findall(r'cy="(\S+)"', drawing)]
    assert 0 < min(lows) <= max(lows) < height
    assert "Œ" in drawing
    assert (tmp_path / "view.png").read_bytes().startswith(b"\x89PNG")


def test_the_keyboard_alone(page, server):
    page.keyboard.press("/")
    page.keyboard.press("Control+A")
    page.keyboard.type("abcd")
    until(page, f"document.querySelectorAll('.token').length === 4 && {settled()}")
    page.keyboard.press("Tab")
    page.keyboard.press("t")
    assert page.evaluate("document.activeElement.textContent") == "a"
    for key, now in (("ArrowRight", "b"), ("End", "d"), ("ArrowLeft", "c"), ("Home", "a"), ("ArrowDown", "a")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.textContent") == now
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.classList.contains('row')")
    page.wait_for_selector(".attention .bars li")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "a"
    page.keyboard.press("[")
    assert page.evaluate("app.panes[0].stage") == 2
    page.keyboard.press("+")
    until(page, f"app.panes[0].lineage.asked.budget === 2.25 && {settled()}")
    page.keyboard.press("c")
    until(page, f"app.state.compare && {settled(1)}")
    page.keyboard.press("c")
    page.keyboard.press("?")
    assert page.evaluate("document.querySelector('#keys').open")
    page.keyboard.press("Escape")
    page.keyboard.press("d")
    page.keyboard.press("Escape")
    assert page.evaluate("app.state.token") is None
    page.keyboard.press("g")
    until(page, "app.state.text.length > 4 || !app.generation.running")


def test_every_control_is_reached_by_tab(page):
    write(page, TEXT)
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.name"
            )
        )
    assert {"text", "compare", "link", "theme", "help", "temperature", "length", "generate", "budget-A"} <= reached
    assert {"play", "token", "chip-button"} <= reached


@contextmanager
def command() -> Iterator[str]:
    """`thoughtbubbles watch` as users run it; its address."""
    words = [sys.executable, "-m", "thoughtbubbles", "watch", "--port", "0", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[2]
        process.send_signal(signal.SIGINT)


def test_the_model_in_the_package(browser):
    """A text of 512 tokens is drawn within two seconds of typing, on two cores that have nothing else to do."""
    base = "The cell is the basic unit of life, and every living thing is made of cells. " * 60
    with command() as address, opened(browser, address) as page:
        seconds = []
        for n in range(4):
            began = time.monotonic()
            page.evaluate("text => { document.querySelector('#text').value = text }", f"{n} {base}")
            page.dispatch_event("#text", "input")
            until(page, f"{settled()} && document.querySelectorAll('.token').length === 512")
            seconds.append(time.monotonic() - began)
        own = open_models([], device="cpu")[0]
        found = trace(own.model, own.tokenizer.encode(f"{n} {base}")[:512], tokenizer=own.tokenizer)
        check_drawing(page, json.loads(found.as_json()))
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(f"512 tokens in {min(seconds):.2f} s, at a load of {busy:.1f} per core")
    assert min(seconds) < 2 * max(1, 2 * busy)
