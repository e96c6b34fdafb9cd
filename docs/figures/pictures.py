"""Make the pictures of two guides: inside/, figures of `thoughtbubbles analyze`, and watch/, screenshots of the page.

python docs/figures/pictures.py                   make all of them (two minutes on two cores; needs Chromium)
python docs/figures/pictures.py --figures         only inside/: run analyze, keep the numbers, draw
python docs/figures/pictures.py --screenshots     only watch/
python docs/figures/pictures.py --draw            draw inside/ from the numbers kept there
python docs/figures/pictures.py --check           exit 1 if a figure was not drawn from its numbers, or one is missing

All show the model in the package. A drawing differs a little between versions of matplotlib, so what is compared is a
checksum of its numbers and the number of its style, which it carries.
"""

import argparse
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from thoughtbubbles.analysis import drawings
from thoughtbubbles.analysis.draw import STYLE, description
from thoughtbubbles.plotting import checksum, save

HERE = Path(__file__).parent
INSIDE, WATCH = HERE / "inside", HERE / "watch"
FIGURES: dict[str, Callable[[Any], Any]] = {  # as PNG where the SVG is large
    "where-it-forks.png": partial(drawings.places, most_tokens=84),
    "uncertainty.svg": drawings.uncertainty,
    "survival.svg": drawings.survival,
    "dial.svg": drawings.dial,
    "leak-audit.svg": drawings.leaks,
}
# “A story”, an example in serve/static/state.js.
STORY = "The old lighthouse keeper wrote the names of the passing ships into a book. One winter night, when the lamp "
STORY += "went out, he lit a fire on the rocks."
DESKTOP, PHONE = {"width": 1280, "height": 1000}, {"width": 390, "height": 844}
SCALE, FREQUENT = 1.25, 64
GUTTER, MARGIN = 15, 18  # pixels: room for a scroll bar, which is not drawn, and below the card with the bubbles
PANES = [{"budget": 4}, {"budget": 1}]
VIEWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the browser, and the view as in a link
    "light": ({"viewport": DESKTOP}, {"panes": PANES, "token": 11, "stream": 0}),
    "dark": (
        {"viewport": DESKTOP, "color_scheme": "dark"},
        {"panes": PANES, "text": STORY, "mode": "loss", "token": 17, "stream": 1},
    ),
    "compare": (
        {"viewport": DESKTOP},
        {"panes": PANES, "compare": True, "mode": "difference", "token": 11},
    ),
    "phone": ({"viewport": PHONE, "has_touch": True, "is_mobile": True}, {"panes": PANES}),
}


def measure() -> None:
    """Runs analyze, and keeps the numbers of the chosen figures."""
    environment = {name: value for name, value in os.environ.items() if name != "THOUGHTBUBBLES_DATA"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "thoughtbubbles", "analyze", "--device", "cpu", "--out", "inside"]
        subprocess.run(command, check=True, cwd=folder, env=environment)
        for name in FIGURES:
            shutil.copy(Path(folder, "inside", name).with_suffix(".json"), INSIDE)


def draw() -> None:
    for name, figure in FIGURES.items():
        path = INSIDE / name
        text = path.with_suffix(".json").read_text(encoding="utf-8")
        numbers = json.loads(text)
        save(partial(figure, numbers), path, description=description(numbers["sentence"], text))
        if path.suffix == ".png":
            reduce_colours(path)


def reduce_colours(path: Path) -> None:
    """To a palette: the most frequent colours, and others that are close to the rare ones. A third as large."""
    from PIL import Image  # matplotlib needs it too
    from PIL.PngImagePlugin import PngInfo

    picture, kept = Image.open(path), PngInfo()
    for key, value in getattr(picture, "text", {}).items():
        kept.add_itxt(key, value)
    picture = picture.convert("RGB")
    pixels = np.asarray(picture)
    colours, place, count = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    others = picture.quantize(256 - FREQUENT, Image.Quantize.MAXCOVERAGE, kmeans=1).getpalette()
    palette = np.concatenate([colours[np.argsort(-count, kind="stable")[:FREQUENT]], np.reshape(others, (-1, 3))])
    palette = palette[:256].astype(np.uint8)
    nearest = ((colours[:, None].astype(int) - palette) ** 2).sum(-1).argmin(1)
    reduced = Image.fromarray(nearest[place].reshape(pixels.shape[:2]).astype(np.uint8))
    reduced.putpalette(palette.tobytes())
    reduced.save(path, optimize=True, pnginfo=kept)


@contextmanager
def server() -> Iterator[str]:
    """The address of a page, served by `thoughtbubbles watch`."""
    command = [sys.executable, "-m", "thoughtbubbles", "watch", "--port", "0", "--no-open", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = re.search(r"http://\S+", process.stdout.readline())
            if address is None:
                sys.exit("thoughtbubbles watch did not start, so there are no screenshots")
            yield address[0]
        finally:
            process.send_signal(signal.SIGINT)


def take_screenshots() -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with server() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (options, view) in VIEWS.items():
            page = browser.new_page(reduced_motion="reduce", device_scale_factor=SCALE, **options)
            link = base64.urlsafe_b64encode(json.dumps(view).encode()).decode().rstrip("=")
            page.goto(f"{address}#j.{link}")
            page.wait_for_selector(
                ".bars li" if "token" in view else "#comparison b" if "compare" in view else ".token"
            )
            page.wait_for_timeout(1000)  # fonts and layout
            path = WATCH / f"{name}.png"
            if "is_mobile" in options:  # from the card with the bubbles on
                page.evaluate("scrollTo(0, document.querySelector('.view').getBoundingClientRect().top - 9)")
                page.screenshot(path=path)
            else:
                bottom = page.evaluate("document.querySelector('.view').getBoundingClientRect().bottom")
                clip = {"x": 0, "y": 0, "width": DESKTOP["width"] - GUTTER, "height": bottom + MARGIN}
                page.screenshot(path=path, clip=clip, full_page=True)
            reduce_colours(path)
            page.close()
        browser.close()


def check() -> str | None:
    """What is wrong, or None."""
    missing = [name for name in VIEWS if not (WATCH / f"{name}.png").is_file()]
    stale = []
    for path in (INSIDE / name for name in FIGURES):
        numbers = path.with_suffix(".json")
        found = path.read_bytes() if path.is_file() and numbers.is_file() else b""
        if not found or checksum(numbers.read_text(encoding="utf-8"), style=STYLE).encode() not in found:
            stale.append(path.name)
    wrong = ", ".join(missing + stale)
    return f"missing, or not drawn from their numbers in this style: {wrong}" if wrong else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--figures", "--screenshots", "--draw", "--check"):
        parser.add_argument(option, action="store_true")
    args = parser.parse_args()
    if args.check:
        sys.exit(check())
    everything = not (args.figures or args.screenshots or args.draw)
    if everything or args.figures:
        measure()
    if everything or args.figures or args.draw:
        draw()
    if everything or args.screenshots:
        take_screenshots()


if __name__ == "__main__":
    main()
