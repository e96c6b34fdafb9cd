"""How figures look, and how they are saved: PNG and SVG next to a JSON of the numbers drawn. Needs matplotlib."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thoughtbubbles.files import write_atomically

DPI, WIDTH = 150, 8.0
INK, FAINT, GRID = "#23272f", "#6b7280", "#e3e6eb"
PAPER, EMPTY, BRIGHT = "#ffffff", "#f0f1f4", "#fefefe"  # BRIGHT stays white on a dark page
# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"


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


def check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ValueError("matplotlib is not installed, which draws the figures: pip install 'thoughtbubbles[analysis]'")


def write(figure: Figure, folder: Path) -> str:
    """Writes NAME.json, NAME.png and NAME.svg; returns the SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    write_atomically(folder / f"{figure.name}.json", [figure.as_json().encode()])
    svg = folder / f"{figure.name}.svg"
    with plt.rc_context(style(figure.name)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # another script: PNG shows boxes
        drawing = figure.draw(figure.numbers)
        drawing.savefig(folder / f"{figure.name}.png", dpi=DPI, metadata={"Description": figure.sentence})
        drawing.savefig(svg, transparent=True, metadata={"Date": None, "Description": figure.sentence})
        plt.close(drawing)
    return svg.read_text(encoding="utf-8")


def style(name: str) -> dict[Any, Any]:
    return {
        "font.size": 10.5,
        "font.family": "sans-serif",
        "text.color": INK,
        "text.parse_math": False,  # texts may have dollar signs
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": INK,
        "ytick.color": INK,
        "svg.fonttype": "none",  # real text, which can be searched and read aloud
        "svg.hashsalt": name,
    }


def panels(rows: int = 1, columns: int = 1, *, height: float = 3.6, width: float = WIDTH, **more: Any) -> Any:
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **more)
    return drawing, axes


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


def signed(value: float) -> str:
    """With four decimals, and never a negative zero."""
    return f"{round(value, 4) + 0.0:+.4f}" if round(value, 4) else "0.0000"
