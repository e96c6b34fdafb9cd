"""The report: one HTML file with all figures inline. It loads nothing and runs no scripts, and everything that comes
from a text, a path or a model is escaped."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from thoughtbubbles.analysis.draw import Figure
from thoughtbubbles.plotting import BLUE, EMPTY, FAINT, GRID, INK, PAPER

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #23272f; --faint: #6b7280; --grid: #e3e6eb;
  --link: #0063a0; --empty: #f0f1f4; --blue: #0072b2; --fork: 0,114,178 }
@media (prefers-color-scheme: dark) { :root { --paper: #15181d; --ink: #e6e8ec; --faint: #9aa3b0; --grid: #2c323b;
  --link: #7cc0f2; --empty: #232830; --blue: #2f95d3; --fork: 86,180,233 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1.1rem 4rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 }
h2 { font-size: 1.2rem; margin: 0 0 .4rem }
section { margin: 2.6rem 0; padding-top: 1.2rem; border-top: 1px solid var(--grid) }
a { color: var(--link) }
.soft, figcaption small, footer { color: var(--faint) }
figure { margin: .6rem 0 }
.drawing { overflow-x: auto }
.drawing svg { display: block; width: 100%; min-width: 36rem; height: auto; color: var(--ink) }
.drawing svg text { font-family: system-ui, sans-serif !important }
figcaption small { display: block; margin-top: .3rem }
.tokens { font: .95rem/1.9 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 24rem; overflow-y: auto; padding: .6rem .8rem; border: 1px solid var(--grid); border-radius: .4rem }
.tokens span { border-radius: .2rem; padding: .12rem 0 }
table { border-collapse: collapse; font-size: .92rem; width: 100% }
th, td { text-align: left; padding: .22rem .8rem .22rem 0; vertical-align: top; overflow-wrap: anywhere }
th { font-weight: 500; color: var(--faint); white-space: nowrap }
nav ol { columns: 17rem; column-gap: 2.5rem; padding-left: 1.2rem; margin: .4rem 0 }
@media print { body { max-width: none; padding: 0 } section { break-inside: avoid } nav { display: none }
  .tokens { max-height: none } .drawing svg { min-width: 0 } }
"""
COLOURS = {  # of the drawings, which are for a light page
    INK: "currentColor",
    FAINT: "var(--faint)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
    EMPTY: "var(--empty)",
    BLUE: "var(--blue)",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def report(figures: Sequence[Figure], drawings: Mapping[str, str], *, title: str, about: Mapping[str, str]) -> str:
    """`drawings`: the SVG of each figure by its name; `about`: rows of the table at the end."""
    links = "".join(f'<li><a href="#{figure.name}">{escape(figure.title)}</a></li>' for figure in figures)
    sections = "\n".join(section(figure, drawings[figure.name]) for figure in figures)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in about.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="soft">A token can fork its residual stream into several, its bubble, before some of the blocks. These figures
show where the model does it, what becomes of the forks, and what they bring.</p>
<nav aria-label="Figures"><ol>{links}</ol></nav>
</header>
<main>
{sections}
</main>
<footer>
<section id="about"><h2>How this was made</h2><table>{rows}</table></section>
</footer>
</body>
</html>
"""


def section(figure: Figure, svg: str) -> str:
    note = f"<small>{escape(figure.note)}</small>" if figure.note else ""
    files = ", ".join(f'<a href="{figure.name}.{kind}">{kind.upper()}</a>' for kind in ("json", "png", "svg"))
    name = escape(figure.title, quote=True)
    return f"""<section id="{figure.name}">
<h2>{escape(figure.title)}</h2>
{figure.html}
<figure>
<div class="drawing" tabindex="0" role="group" aria-label="{name}">{inline(svg, figure)}</div>
<figcaption>{escape(figure.sentence)}{note}<small>Numbers and drawing: {files}</small></figcaption>
</figure>
</section>"""


def inline(svg: str, figure: Figure) -> str:
    """The drawing as part of a page: ids of its own, the page's colours, and no addresses."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{figure.name}-', svg)
    svg = re.sub(r'href="#', f'href="#{figure.name}-', svg).replace("url(#", f"url(#{figure.name}-")
    size = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    width = f"max-width:{1.5 * float(size[1]):.0f}px" if size else ""
    label = escape(figure.sentence, quote=True)
    svg = re.sub(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg role="img" style="{width}" \1>', svg, count=1)
    svg = svg.replace('role="img"', f'role="img" aria-label="{label}"', 1)
    return re.sub("|".join(COLOURS), lambda found: COLOURS[found[0]], svg)


def token_text(numbers: Mapping[str, Any]) -> str:
    """The text of a places figure with a shade behind each token, stronger for more streams."""
    most = max(2, *numbers["streams"][-1])
    parts = []
    for text, counts in whole_characters(numbers):
        count = max(counts)
        shade = (
            f' style="background:rgba(var(--fork),{0.12 + 0.5 * (count - 1) / (most - 1):.2f})"' if count > 1 else ""
        )
        title = f"{', '.join(map(str, counts))} stream{'s' * (counts != [1])}"
        words = escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)) or "¶"
        parts.append(f'<span title="{title}"{shade}>{words}</span>')
    return f'<div class="tokens" tabindex="0" role="group" aria-label="the text">{"".join(parts)}</div>'


def whole_characters(numbers: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Pieces of the text with the streams of their tokens: one token, or several that share a character."""
    content, counts = numbers["text"].encode(), numbers["streams"][-1]
    if numbers["ends"][-1] != len(content):  # special tokens, or a character that is cut off
        return [(token, [count]) for token, count in zip(numbers["tokens"], counts, strict=True)]
    pieces: list[tuple[str, list[int]]] = []
    begin, pending = 0, []
    for end, count in zip(numbers["ends"], counts, strict=True):
        pending.append(count)
        try:
            pieces.append((content[begin:end].decode(), pending))
        except UnicodeDecodeError:
            continue
        begin, pending = end, []
    return pieces
