"""Draw feedback.svg: the form of our presets, in which forks come after all originals, with feedback.

python docs/figures/feedback.py          write feedback.svg beside this file
python docs/figures/feedback.py --check  exit 1 if feedback.svg is not what would be written
"""

import sys
from html import escape
from pathlib import Path

from method import BOLD, CARD, COLOURS, FAINT, INK, MIDDLE, SOFT, TOKENS, box, tag, text

TITLE = "Forks with feedback: the form of our presets"
WIDTH, HEIGHT = 900, 560
LEFT, COLUMN, APART = 364, 140, 48  # x of the first original, from token to token, from an original to its fork
ROW, TOP = 46, 118  # height of a block, y of the last block's upper edge
BLOCKS, FORK_LAYER, SEEN = 6, 2, 3  # blocks, the one that forks begin at, the one whose attention is drawn
BAND, END, BAR = LEFT - APART - 22, 872, 14  # from where to where the blocks go; width of a stream
PURPLE = "#43397F"
NOTES = (
    (1, "Originals first", ("All tokens at once, as in a plain", "GPT: they never see a fork.")),
    (
        2,
        "Feedback",
        ("A fork starts from its token’s state,", "plus W · LayerNorm(y): the last state", "of the token before."),
    ),
    (
        3,
        "Forks then",
        (
            "go through the remaining blocks, and",
            "see originals of earlier tokens, the",
            "forks of near ones, themselves.",
        ),
    ),
    (4, "Forks predict", ("Originals carry state for later tokens.",)),
)
CAPTION = (
    "Two passes in training, each parallel over the tokens. In generation y is known from the step before, so original",
    "and fork of a token go through the blocks side by side. No scores: every token forks once, nothing is dropped.",
)


def y_of(block: float) -> float:
    """The lower edge of a block."""
    return TOP + ROW * (BLOCKS - block)


def arrow(path: str, colour: str, **more: object) -> str:
    return tag("path", d=path, fill="none", stroke=colour, marker_end="url(#head)", **more)


def stream(x: float, first: int, colour: str, *, is_fork: bool) -> str:
    top, height = y_of(BLOCKS), y_of(first) - y_of(BLOCKS)
    look = {"fill": CARD, "stroke": colour, "stroke_width": 2} if is_fork else {"fill": colour}
    return box(x - BAR / 2, top, BAR, height, 5, **look)


def band() -> list[str]:
    """The blocks, and the fork layer between two of them."""
    out = []
    for block in range(BLOCKS):
        out.append(box(BAND, y_of(block + 1) + 3, END - BAND, ROW - 6, 8, fill="#F3F1EC"))
        out.append(text(END - 8, y_of(block) - ROW / 2 + 4, f"block {block}", 11, FAINT, text_anchor="end"))
    y = y_of(FORK_LAYER)
    out.append(tag("path", d=f"M{BAND} {y}H{END}", stroke=PURPLE, stroke_dasharray="5 4"))
    return [*out, text(END - 8, y - 5, "fork layer", 11, PURPLE, **BOLD, text_anchor="end")]


def token(k: int, word: str) -> list[str]:
    x, colour = LEFT + k * COLUMN, COLOURS[k]
    out = [stream(x, 0, colour, is_fork=False), stream(x - APART, FORK_LAYER, colour, is_fork=True)]
    start = y_of(FORK_LAYER)
    out.append(
        arrow(
            f"M{x - BAR / 2} {start + 8}C{x - 26} {start + 8} {x - APART} {start + 26} {x - APART} {start + 3}", colour
        )
    )
    out.append(text(x, y_of(0) + 26, word, 15, colour, **BOLD, **MIDDLE))
    out.append(tag("circle", cx=x, cy=y_of(BLOCKS) - 12, r=5, fill=colour))
    out.append(text(x, y_of(BLOCKS) - 23, "y", 13, colour, font_style="italic", **MIDDLE))
    out.append(arrow(f"M{x - APART} {y_of(BLOCKS) - 2}V{y_of(BLOCKS) - 26}", colour, stroke_width=2))
    out.append(text(x - APART, y_of(BLOCKS) - 34, "next word", 11, INK, **MIDDLE))
    if k + 1 < len(TOKENS):
        after = x + COLUMN - APART
        path = (
            f"M{x + 5} {y_of(BLOCKS) - 12}C{x + 48} {y_of(BLOCKS) - 12} {x + 34} {start + 34} {after - 9} {start + 10}"
        )
        out.append(arrow(path, colour, stroke_width=1.8, stroke_dasharray="5 3"))
    return out


def attention() -> list[str]:
    """What the last fork and the last original see in one block."""
    out, last = [], LEFT + (len(TOKENS) - 1) * COLUMN
    y = y_of(SEEN) - ROW / 2
    for k in range(len(TOKENS) - 1):
        x = LEFT + k * COLUMN
        out.append(
            arrow(f"M{x + 7} {y}Q{(x + last - APART) / 2} {y - 26} {last - APART - 9} {y - 3}", INK, opacity=0.55)
        )
    out.append(text(last - 96, y - 30, "attention", 11, INK, **MIDDLE))
    near = last - COLUMN - APART
    out.append(
        arrow(f"M{near + 7} {y + 6}Q{(near + last - APART) / 2} {y + 30} {last - APART - 9} {y + 4}", INK, opacity=0.55)
    )
    return out


def build() -> str:
    spoken = " ".join(f"{n}. {title}: {' '.join(lines)}" for n, title, lines in NOTES)
    head = tag(
        "marker",
        tag("path", d="M0 0L6 3L0 6z", fill="context-stroke"),
        id="head",
        markerWidth=7,
        markerHeight=7,
        refX=4,
        refY=3,
        orient="auto",
    )
    out = [tag("title", TITLE), tag("desc", escape(f"{spoken} {' '.join(CAPTION)}")), tag("defs", head)]
    out.append(box(4, 4, WIDTH - 8, HEIGHT - 8, 18, fill=CARD, stroke="#D9D6CE"))
    out.append(text(35, 42, TITLE, 17, INK, **BOLD))
    out += band() + attention()
    for k, word in enumerate(TOKENS):
        out += token(k, word)
    for n, title, lines in NOTES:
        y = (408, 312, 206, 100)[n - 1]
        out.append(tag("circle", cx=46, cy=y - 5, r=10.5, fill=INK))
        out.append(text(46, y - 0.7, str(n), 12, CARD, **BOLD, **MIDDLE))
        out.append(text(64, y, title, 14.5, INK, **BOLD))
        out += [text(36, y + 22 + 17 * i, line, 12.5) for i, line in enumerate(lines)]
    out += [
        tag("rect", x=36, y=HEIGHT - 92, width=9, height=16, rx=4, fill=FAINT),
        text(54, HEIGHT - 80, "original", 12),
        box(126, HEIGHT - 92, 9, 16, 4, fill=CARD, stroke=FAINT, stroke_width=2),
        text(144, HEIGHT - 80, "fork", 12),
    ]
    out += [text(36, HEIGHT - 48 + 17 * i, line, 12, SOFT) for i, line in enumerate(CAPTION)]
    frame = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "width": WIDTH, "height": HEIGHT, "role": "img"}
    frame["font_family"] = "Inter, Helvetica, Arial, sans-serif"
    return tag("svg", "\n".join(["", *out, ""]), xmlns="http://www.w3.org/2000/svg", **frame) + "\n"


def main() -> int:
    path, svg = Path(__file__).with_suffix(".svg"), build()
    if sys.argv[1:] == ["--check"]:
        return int(not path.is_file() or path.read_text(encoding="utf-8") != svg)
    path.write_text(svg, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
