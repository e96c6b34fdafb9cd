"""A figure of the report: its numbers, a sentence about them, and its files. Parts that several drawings share."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thoughtbubbles.files import write_atomically
from thoughtbubbles.plotting import FAINT, checksum, save

STYLE = 1  # counts changes to the drawings: raise it, and draw docs/figures/inside again


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Numbers, one sentence about them, and a function that draws them and nothing else."""

    name: str
    title: str
    numbers: Mapping[str, Any]
    sentence: str
    draw: Callable[[Mapping[str, Any]], Any]
    note: str = ""
    """How to read it, and what it does not show."""
    html: str = field(default="", repr=False)
    """Shown above the drawing in the report; already escaped."""

    def as_json(self) -> str:
        found = {"name": self.name, "title": self.title, "sentence": self.sentence, "note": self.note}
        return json.dumps(found | dict(self.numbers), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write(figure: Figure, folder: Path) -> str:
    """Writes NAME.json, NAME.png and NAME.svg; returns the SVG."""
    numbers, png, svg = (folder / f"{figure.name}.{kind}" for kind in ("json", "png", "svg"))
    write_atomically(numbers, [figure.as_json().encode()])
    about = description(figure.sentence, figure.as_json())
    save(lambda: figure.draw(figure.numbers), png, svg, description=about)
    return svg.read_text(encoding="utf-8")


def description(sentence: str, numbers: str) -> str:
    """Of a drawing, for its metadata."""
    return f"{sentence} ({checksum(numbers, style=STYLE)})"


def label_end(axes: Any, x: int, y: float, text: str, colour: str, *, dy: int = 0) -> None:
    """A name right of the end of a line, in its colour."""
    note = axes.annotate(
        text, (x, y), xytext=(6, dy), textcoords="offset points", color=colour, va="center", fontweight="bold",
        annotation_clip=False, fontsize=9.5,
    )  # fmt: skip
    note.set_in_layout(False)


def blocks_axis(axes: Any, n_blocks: int, fork_layers: list[int] | None = None) -> None:
    axes.set_xlabel("block")
    axes.set_xticks(range(0, n_blocks, max(1, -(-n_blocks // 16))))
    for layer in fork_layers or []:
        axes.axvline(layer - 0.5, color=FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
