"""A text with its bubbles as an SVG: above each token a dot for its original and one for each of its forks."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT, TOP = 900, 30, 62
SIZE, LETTER = 15, 9.0  # of the font, and from one letter to the next
DOT, PITCH, LINE = 3.1, 7.6, 34  # radius, from one dot to the next, and a line's height without dots
GAP = 34  # above a panel's caption
ORIGINAL, FORK, INK, SOFT, CARD = "#2F6DB5", "#C2502E", "#23272F", "#565D69", "#FCFBF8"
SHADES = ("none", "#F6E3DA", "#F0C9B8", "#E8AD94", "#DF8F70")  # behind tokens with 1, 2, 3, 4, and more streams


class Panel(NamedTuple):
    caption: str
    tokens: Sequence[str]
    streams: Sequence[int]  # of each token


def draw(panels: Sequence[Panel], *, title: str = "Streams of each token after the last fork layer") -> str:
    parts, y = [], float(TOP) - GAP - 10
    for panel in panels:
        y += GAP
        parts.append(f'<text x="{LEFT}" y="{y:.1f}" font-size="13" style="fill:{SOFT}">{escape(panel.caption)}</text>')
        y += 10
        for line in lines(panel.tokens):
            y += LINE + PITCH * max(panel.streams[at] for at in line)
            parts += _line(panel, line, y)
    height = y + 24
    size = f'width="{WIDTH}" height="{height:.0f}"'
    font = f"{SIZE}px ui-monospace,Menlo,Consolas,monospace"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
        f"<title>{title}</title>",
        f"<style>text{{font-family:system-ui,sans-serif;fill:{INK}}} .t{{font:{font}}}</style>",
        f'<rect {size} rx="8" fill="{CARD}"/>',
        f'<text x="{LEFT}" y="32" font-size="17" font-weight="700">{escape(title)}</text>',
        *(
            f'<circle cx="{x}" cy="27" r="4" fill="{fill}"/><text x="{x + 10}" y="32" font-size="13">{name}</text>'
            for x, fill, name in ((700, ORIGINAL, "original"), (790, FORK, "its forks"))
        ),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _line(panel: Panel, line: Sequence[int], y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for at in line:
        token = panel.tokens[at] if at > line[0] else panel.tokens[at].lstrip()
        word, indent = token.strip(), len(token) - len(token.lstrip())
        start, width = x + indent * LETTER, len(word) * LETTER
        middle, count = start + width / 2, panel.streams[at]
        if count > 1:
            shade = SHADES[min(count, len(SHADES)) - 1]
            box = f'x="{start - 1:.1f}" y="{y - 15:.1f}" width="{width + 2:.1f}" height="20" rx="3"'
            parts.append(f'<rect {box} fill="{shade}"/>')
        if word:
            parts.append(f'<text x="{start:.1f}" y="{y:.1f}" textLength="{width:.1f}" class="t">{escape(word)}</text>')
        for place in range(count):  # the original below, its forks above
            fill = FORK if place else ORIGINAL
            parts.append(f'<circle cx="{middle:.1f}" cy="{y - 22 - PITCH * place:.1f}" r="{DOT}" fill="{fill}"/>')
        x += len(token) * LETTER
    return parts


def lines(tokens: Sequence[str]) -> list[list[int]]:
    """The tokens of each line of the picture; a line breaks before a space, and after a newline."""
    wrapped: list[list[int]] = [[]]
    used = 0
    for at, token in enumerate(tokens):
        word = len(token)
        for more in tokens[at + 1 :]:  # pieces of one word stay together
            if more.startswith(" "):
                break
            word += len(more)
        is_full = token.startswith(" ") and (used + word) * LETTER > WIDTH - 2 * LEFT
        if wrapped[-1] and (is_full or tokens[at - 1].endswith("\n")):
            wrapped.append([])
            used = 0
        wrapped[-1].append(at)
        used += len(token)
    return wrapped
