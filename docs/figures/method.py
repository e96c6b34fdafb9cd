"""Draw method.svg: how Thoughtbubbles forks, attenuates, deletes and merges residual streams.

The picture is computed. Only the fork and keep scores and the streams' guesses below are made up;
who survives, who stands where and what each bubble predicts follow from the model's own rules.

    python docs/figures/method.py          write method.svg beside this file
    python docs/figures/method.py --check  exit 1 if method.svg is not what would be written
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from pathlib import Path
from textwrap import wrap

TOKENS = ("Seven", "times", "eight", "is")
BUDGET = Fraction("1.5")  # streams per token
# One (fork, keep) pair per stream, in stream order, at each of the two fork layers.
SCORES_1 = ((0.25, 0.46), (0.54, 0.78), (0.49, 0.70), (0.84, 0.96))
SCORES_2 = ((0.65, 0.90), (0.18, 0.45), (0.22, 0.82), (0.30, 0.93), (0.35, 0.91), (0.56, 0.95))
# For each token: next words, and a distribution over them from each of its final streams.
GUESSES = (
    ("days years of", [(0.45, 0.35, 0.20)]),
    ("a eight ten", [(0.40, 0.32, 0.28)]),
    ("is equals and", [(0.60, 0.28, 0.12)]),
    ("56 54 63", [(0.80, 0.12, 0.08), (0.45, 0.25, 0.30), (0.74, 0.16, 0.10)]),
)
TITLE = "Thoughtbubbles: more residual streams for the tokens that need them"
WIDTH, HEIGHT, LEFT = 900, 864, 36
ORIGIN, COLUMN = 358, 156  # x of position 0, and from one position to the next
CHIP_W, CHIP_H, GAP = 31, 34, 12
COLOURS = ("#2F6DB5", "#14807A", "#7A50B3", "#C2502E")
INK, SOFT, FAINT, GREY = "#23272F", "#565D69", "#747B87", "#A9AEB8"
CARD, BAND = "#FCFBF8", "#EDEBF4"
MIDDLE, BOLD = {"text_anchor": "middle"}, {"font_weight": 700}


@dataclass(frozen=True)
class Stream:  # or a candidate for one
    token: int
    log_score: float = 0.0
    kind: str = "keep"  # or "fork"
    original: bool = True  # the one its token was born with, never dropped

    @property
    def score(self) -> float:
        return math.exp(self.log_score)


def candidates(streams: list[Stream], scores: tuple[tuple[float, float], ...]) -> list[Stream]:
    """[fork_0, keep_0, fork_1, keep_1, ...], each with its parent's score times its own."""
    row = []
    for s, (fork, keep) in zip(streams, scores, strict=True):
        row.append(Stream(s.token, s.log_score + math.log(fork), "fork", original=False))
        row.append(Stream(s.token, s.log_score + math.log(keep), "keep", s.original))
    return row


def ranked(row: list[Stream], last_token: int) -> list[int]:
    """Candidates up to a token, best first: originals, then log score, then the earlier one."""
    keys = [(c.original, round(c.log_score * 4096), -i) for i, c in enumerate(row)]
    seen = [i for i, c in enumerate(row) if c.token <= last_token]
    return sorted(seen, key=lambda i: keys[i], reverse=True)


def select(row: list[Stream]) -> list[int]:
    """Survivors by the causal rule: token t is ranked among the candidates of tokens <= t."""
    kept: list[int] = []
    for t in range(len(TOKENS)):
        cap = math.floor(BUDGET * (t + 1))
        passing = [i for i in ranked(row, t)[:cap] if row[i].token == t]
        kept += passing[: cap - len(kept)]
    block_rule = ranked(row, len(TOKENS))[: math.ceil(BUDGET * len(TOKENS))]
    if set(kept) != set(block_rule):
        raise ValueError("the caption says that the block rule keeps the same streams")
    return sorted(kept)


def places(row: list[Stream]) -> list[tuple[int, int, int]]:
    """(k, p, q) of every stream: token, rank from the right, size of the bubble."""
    tokens = [s.token for s in row]
    return [(k, tokens[i + 1 :].count(k), tokens.count(k)) for i, k in enumerate(tokens)]


def xs(row: list[Stream]) -> list[float]:
    """Where streams or candidates stand in the picture: to scale, at position k - p/q."""
    return [float(ORIGIN + COLUMN * (k - Fraction(p, q))) for k, p, q in places(row)]


def tag(name: str, body: str = "", /, **attributes: object) -> str:
    shown = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in attributes.items()}
    pairs = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in shown.items())
    return f"<{name}{pairs}>{body}</{name}>" if body else f"<{name}{pairs}/>"


def text(x: float, y: float, words: str, size: float, fill: str = SOFT, **more: object) -> str:
    return tag("text", escape(words), x=x, y=y, font_size=size, fill=fill, **more)


def box(x: float, y: float, w: float, h: float, radius: float, **more: object) -> str:
    return tag("rect", x=x, y=y, width=w, height=h, rx=radius, **more)


def wire(x0: float, y0: float, x1: float, y1: float, colour: str, **more: object) -> str:
    path = f"M{x0:.1f} {y0:.1f}C{x0:.1f} {(y0 + y1) / 2:.1f} {x1:.1f} {(y0 + y1) / 2:.1f}"
    return tag("path", d=f"{path} {x1:.1f} {y1:.1f}", fill="none", stroke=colour, **more)


def chip(x: float, y: float, w: float, h: float, colour: str, state: str) -> str:
    """A candidate: "original" is solid, "survivor" outlined, "dropped" hollow and struck out."""
    if state == "dropped":
        slash = tag("path", d=f"M{x + 3:.1f} {y + h - 3:.1f}l{w - 6} {6 - h}", stroke=GREY)
        return box(x, y, w, h, w / 4, fill=CARD, stroke=GREY, stroke_dasharray="3 2.5") + slash
    fill = colour if state == "original" else CARD
    return box(x, y, w, h, w / 4, fill=fill, stroke=colour, stroke_width=1.8)


def fork_layer(y: float, height: float, streams: list[Stream], row: list[Stream]) -> list[str]:
    """A band of candidates: lines come in from the streams below, survivors leave upwards."""
    out = [box(16, y, WIDTH - 32, height, 14, fill=BAND)]
    kept, spots, top = select(row), xs(row), y + (height - CHIP_H) / 2 - 4
    for i, (c, x) in enumerate(zip(row, spots, strict=True)):
        state = "dropped" if i not in kept else "original" if c.original else "survivor"
        colour = GREY if state == "dropped" and c.kind == "fork" else COLOURS[c.token]
        dash = "4 3" if c.kind == "fork" else "none"
        look = {"stroke_dasharray": dash, "stroke_width": 2.2, "opacity": streams[i // 2].score}
        out.append(wire(xs(streams)[i // 2], y + height + GAP, x, top + CHIP_H, colour, **look))
        out.append(chip(x - CHIP_W / 2, top, CHIP_W, CHIP_H, colour, state))
        ink = {"original": CARD, "survivor": colour, "dropped": FAINT}[state]
        out.append(text(x, top + 14, c.kind, 10, ink, **MIDDLE))
        out.append(text(x, top + 27, f"{c.score:.2f}", 11, ink, **BOLD, **MIDDLE))
        if state == "dropped" and c.kind == "keep":
            out.append(text(x, top - 7, "deleted", 11, INK, **BOLD, **MIDDLE))
    for i, x in zip(kept, xs([row[i] for i in kept]), strict=True):
        colour, opacity = COLOURS[row[i].token], row[i].score
        out.append(wire(spots[i], top, x, y - GAP, colour, stroke_width=2.2, opacity=opacity))
    return out


def blocks(y: float, height: float, streams: list[Stream]) -> list[str]:
    """Bubbles round the streams of each token; the opacity of a stream is its score."""
    out = []
    for x, s, (k, p, q) in zip(xs(streams), streams, places(streams), strict=True):
        if p == q - 1:  # the leftmost of its bubble
            left, right = x - (22 if p else 18), ORIGIN + COLUMN * k + 18
            look = {"fill": COLOURS[k], "fill_opacity": 0.09, "stroke": COLOURS[k]}
            out.append(box(left, y, right - left, height, 17, stroke_width=1.4, **look))
        out.append(box(x - 5, y + 10, 10, height - 34, 5, fill=COLOURS[k], opacity=s.score))
        out.append(text(x, y + height - 9, f"{k}−{p}/{q}" if p else str(k), 11, INK, **MIDDLE))
    return out


def attention(y: float, streams: list[Stream]) -> list[str]:
    """What the last stream reads from every stream before it: the lower the score, the less."""
    out, (*before, last) = [], xs(streams)
    for i, (x, s) in enumerate(zip(before, streams, strict=False)):
        end = y + 20 + 12 * i
        path = f"M{x + 5:g} {y + 98}C{x + 35:g} {end} {(x + last) / 2:g} {end} {last - 6:g} {end}"
        look = {"stroke": INK, "stroke_width": 2.8 * s.score, "opacity": s.score}
        out.append(tag("path", d=path, fill="none", **look))
    return [*out, text(ORIGIN + 1.52 * COLUMN, y + 90, "attention × P", 11.5, INK, **MIDDLE)]


def merge(y: float, streams: list[Stream]) -> list[str]:
    """Each bubble becomes one distribution: its streams' guesses, weighted by their scores."""
    out = []
    for k, (colour, (words, guesses)) in enumerate(zip(COLOURS, GUESSES, strict=True)):
        bubble = [(x, s.score) for x, s in zip(xs(streams), streams, strict=True) if s.token == k]
        weights = [score / sum(score for _, score in bubble) for _, score in bubble]
        centre = ORIGIN + COLUMN * k
        for (x, _), w in zip(bubble, weights, strict=True):
            out.append(wire(x, y + 114, centre, y + 62, colour, stroke_width=1 + 4 * w))
            if w < 1:
                out.append(text(x - 6, y + 109, f"{w:.2f}", 11, colour, text_anchor="end"))
        out.append(tag("circle", cx=centre, cy=y + 62, r=6, fill=colour))
        for i, word in enumerate(words.split()):
            p = sum(w * guess[i] for w, guess in zip(weights, guesses, strict=True))
            out.append(text(centre - 6, y + 10 + 17 * i, word, 12, INK, text_anchor="end"))
            out.append(box(centre, y + 1 + 17 * i, 56 * p, 10, 2.5, fill=colour))
    return out


def note(y: float, number: int, title: str, body: str) -> list[str]:
    out = [tag("circle", cx=LEFT + 10, cy=y - 5, r=10.5, fill=INK)]
    out.append(text(LEFT + 10, y - 0.7, str(number), 12, CARD, **BOLD, **MIDDLE))
    out.append(text(LEFT + 28, y, title, 14.5, INK, **BOLD))
    for i, line in enumerate(line for part in body.split("\n") for line in wrap(part, 33)):
        fill, weight = ("#43397F", 600) if line.startswith("=") else (SOFT, 400)
        top, words = y + 23 + 17 * i, line.removeprefix("=")
        out.append(text(LEFT, top, words, 12.5, fill, font_weight=weight))
    return out


def legend(y: float) -> list[str]:
    shapes = {
        (58, "original: always survives"): chip(LEFT, y, 15, 16, FAINT, "original"),
        (244, "other survivor"): chip(222, y, 15, 16, FAINT, "survivor"),
        (372, "dropped"): chip(350, y, 15, 16, FAINT, "dropped"),
        (478, "bubble: all streams of one token"): box(445, y, 26, 16, 8, fill=BAND, stroke=FAINT),
        (709, "stream: opacity is score P"): box(694, y, 8, 16, 4, fill=GREY),
    }
    return [shape + text(x, y + 12, words, 12) for (x, words), shape in shapes.items()]


def explain(row_1: list[Stream], row_2: list[Stream]) -> tuple[dict[str, str], str]:
    """The notes, top to bottom, "=" starting a formula, and the caption; all numbers counted."""
    before, after = (Counter(row[i].token for i in select(row)) for row in (row_1, row_2))
    shrunk, *_, grown = sorted(before, key=lambda k: after[k] - before[k])
    caps = ", ".join(str(math.floor(BUDGET * (t + 1))) for t in range(len(TOKENS)))
    return {
        "Merge": "One prediction per bubble: its streams’ guesses, weighted by their share of the"
        " score.\n=p(y) = Σ w · p(y | stream)\n=w = P / ΣP",
        "Fork again": f"{after.total()} of {len(row_2)} stay. “{TOKENS[grown]}” grows"
        f" to {after[grown]} streams; “{TOKENS[shrunk]}” loses its fork."
        "\nMore blocks follow, as in 3.",
        "Attenuated blocks": "Attention to a stream and updates to it fade with its score P:\n"
        "=softmax(c·(q·k + log P)) · (P·v)\n=x ← x + P · update\n"
        "Small numbers: position k − p/q\n(rank p from the right, of q).",
        "Fork layer": "Each stream gets a fork and a keep score, multiplied by its P.\n"
        f"Budget r = {float(BUDGET)} streams per token:\nthe top {before.total()} of {len(row_1)},"
        " originals always.\nA fork sits left of its parent.",
        "One stream per token": "Its original, with score P = 1: the first blocks are a plain GPT.",
    }, (
        "Causal selection: token t competes with tokens ≤ t only, under caps floor(r·(t+1))"
        f" = {caps}; the block rule (the best {after.total()} of the row) keeps the same"
        " streams here. Merge: mixture. c = 1/√(head size). Scores and words are invented."
    )


def build() -> str:
    born = [Stream(k) for k in range(len(TOKENS))]
    row_1 = candidates(born, SCORES_1)
    middle = [row_1[i] for i in select(row_1)]
    row_2 = candidates(middle, SCORES_2)
    final = [row_2[i] for i in select(row_2)]
    notes, caption = explain(row_1, row_2)
    steps = [f"{title}: {body}" for title, body in reversed(notes.items())]
    spoken = "\n".join([*steps, caption]).replace("\n=", "\n")
    out = [tag("title", TITLE), tag("desc", escape(spoken))]
    out.append(box(4, 4, WIDTH - 8, HEIGHT - 8, 18, fill=CARD, stroke="#D9D6CE"))
    out.append(text(LEFT - 1, 42, TITLE, 17, INK, **BOLD))
    out.append(text(WIDTH - LEFT, 42, "read upwards ↑", 12.5, text_anchor="end"))
    out += merge(72, final) + blocks(186, 84, final) + fork_layer(282, 100, middle, row_2)
    out += blocks(394, 136, middle) + attention(394, middle)
    out += fork_layer(542, 128, born, row_1) + blocks(682, 56, born)
    for k, word in enumerate(TOKENS):
        out.append(text(ORIGIN + COLUMN * k, 760, word, 15, COLOURS[k], **BOLD, **MIDDLE))
    for i, (y, title) in enumerate(zip((84, 306, 412, 566, 704), notes, strict=True)):
        out += note(y, len(notes) - i, title, notes[title])
    out += legend(787)
    out += [text(LEFT, 826 + 17 * i, line, 12) for i, line in enumerate(wrap(caption, 124))]
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
