"""How figures look and how they are saved; matplotlib is imported only here and in the functions that draw.

A figure is a function that returns a drawing made by `panels`. `save` calls it in our style and writes PNG or SVG, the
same bytes for the same numbers and version of matplotlib. No display and no global state: pyplot is not used.
"""

import warnings
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DPI, WIDTH = 150, 8.0
INK, FAINT, GRID = "#23272f", "#6b7280", "#e3e6eb"
PAPER, EMPTY, BRIGHT = "#ffffff", "#f0f1f4", "#fefefe"  # BRIGHT stays white on a dark page
# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
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
}


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def check_matplotlib() -> None:
    if not has_matplotlib():
        raise ValueError("matplotlib is not installed, which draws the figures: pip install 'thoughtbubbles[analysis]'")


def checksum(numbers: str, *, style: int | None = None) -> str:
    """For the description of a drawing: the numbers it was made from, and a count of changes to how they are drawn."""
    return f"numbers {zlib.crc32(numbers.encode()):08x}{'' if style is None else f', style {style}'}"


def save(draw: Callable[[], Any], *paths: Path, description: str = "") -> list[Path]:
    """Draws once, and saves the drawing as .png or .svg with a description in its metadata."""
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": paths[0].stem}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # another script: PNG shows boxes
        drawing = draw()
        for path in paths:
            undated = {"Date": None} if path.suffix == ".svg" else {}
            drawing.savefig(path, dpi=DPI, metadata={"Description": description, **undated})
    return list(paths)


def panels(rows: int = 1, columns: int = 1, *, height: float = 3.6, width: float = WIDTH, **more: Any) -> Any:
    """A drawing of so many inches, and an array of its axes."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width, height), layout="constrained")
    return drawing, drawing.subplots(rows, columns, squeeze=False, **more)
