"""Draws the figures of docs/results: PNG and SVG, beside a JSON of the numbers drawn. Needs matplotlib.

Drawings differ a little between versions of matplotlib, so each carries the checksum of its numbers, and is drawn
again only if that changes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from thoughtbubbles.files import write_atomically
from thoughtbubbles.plotting import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, checksum, has_matplotlib, panels, save
from thoughtbubbles.recipes.reproduce.figures import Figure, Series

STYLE = 4  # counts changes to the drawings
LOOKS = {  # colour and marker
    "plain": ("#000000", "o"),
    "r1": (ORANGE, "s"),
    "r2": (BLUE, "D"),
    "r4": (SKY, "d"),
    "block": (RED, "^"),
    "head-gate": (GREEN, "v"),
    "all-forked": (PINK, "P"),
    "copy-3": ("#8A6D3B", "X"),
    "copy-2": ("#8A6D3B", "X"),
    "heads": ("#6E6E6E", "<"),
    "deep": (GREEN, "v"),
    "feedback": ("#D0491F", "p"),
    "feedback-private": ("#E58A5F", "p"),
    "feedback-residual": ("#8C2D04", "H"),
    "forked": ("#5B4B8A", "P"),
    "r1.25": ("#C98A2B", "s"),
    "r2-elastic": ("#2A8C8C", "h"),
    "block-r2": (RED, "^"),
    "block-r4": (PINK, "P"),
    "scratch-plain": ("#9A9A9A", "o"),
    "scratch-r2": (SKY, "d"),
    "shipped-plain": ("#000000", "s"),
    "shipped-r2": (BLUE, "D"),
    "r1-gate": ("#B59ADB", "*"),
    "r2-gate": ("#5B4B8A", "*"),
    "state-3-gate": ("#7A1F3D", "p"),
    "feedback-3-gate": ("#C98A2B", "p"),
    "feedback-3-reach64-gate": ("#D0491F", "p"),
    "feedback-3-reach64-half-gate": ("#E58A5F", "p"),
    "feedback-3-reach64-late-gate": ("#F2BFA3", "p"),
    "longer-gate": ("#7DBE9F", "v"),
    "longer-gate-1.4": ("#A5D3BC", "v"),
    "longer-gate-1.2": ("#C6E4D5", "v"),
    "r2-late": ("#2A8C8C", "h"),
    "r4-late": ("#86C5C5", "H"),
    "wider": ("#6E6E6E", "<"),
    "wider-gate": ("#3F3F3F", "<"),
    "wider-feedback-3-reach64-gate": ("#8C2D04", "p"),
    "longer": ("#9A9A9A", ">"),
    "ensemble": ("#9A9A9A", "h"),
}
OTHER = ("#5B4B8A", "*")
MOST_WHOLE = 30  # counts up to this many have whole numbers on the axis
NEAR = 0.13  # of the width: names of points closer than that are moved apart
ASIDE, LETTER, LINE = 0.04, 0.011, 0.05  # from a point to its name, and a name's size, of the width and height
LOWEST, HIGHEST = 0.02, 0.97  # where names may be, of the height


def description(figure: Figure) -> str:
    return f"{checksum(figure.as_json())}, style {STYLE}"


def is_current(figure: Figure, folder: Path) -> bool:
    """Whether the files of a figure are there and were made from these numbers."""
    numbers, *drawings = (folder / f"{figure.name}.{kind}" for kind in ("json", "png", "svg"))
    return (
        numbers.is_file()
        and numbers.read_text(encoding="utf-8") == figure.as_json()
        and all(path.is_file() and description(figure).encode() in path.read_bytes() for path in drawings)
    )


def write_figure(figure: Figure, folder: Path) -> list[Path]:
    """Returns what was written: nothing if it is current, only the numbers without matplotlib."""
    if is_current(figure, folder):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / f"{figure.name}.json"
    write_atomically(numbers, [figure.as_json().encode()])
    return [numbers, *draw(figure, folder)]


def draw(figure: Figure, folder: Path) -> list[Path]:
    def drawing() -> Any:
        found, axes = panels(height=4.5)
        axes[0][0].set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
        (draw_lines if figure.kind == "lines" else draw_points)(axes[0][0], figure)
        return found

    paths = [folder / f"{figure.name}.{kind}" for kind in ("png", "svg")]
    return save(drawing, *paths, description=description(figure)) if has_matplotlib() else []


def look(row: str) -> tuple[str, str]:
    return LOOKS.get(row, OTHER)


def draw_lines(axes: Any, figure: Figure) -> None:
    """Each line has its row's name at its end; bands are ± one standard error."""
    few = max(len(series.x) for series in figure.series.values()) <= 30
    for place, (row, series) in enumerate(figure.series.items()):
        colour, marker = look(row)
        over = 3 - place / 100  # the first rows, which are the main ones, on top
        axes.plot(series.x, series.y, color=colour, marker=marker * few, markersize=4, linewidth=1.6, zorder=over)
        if series.error is not None:
            low, high = ([y + sign * e for y, e in zip(series.y, series.error, strict=True)] for sign in (-1, 1))
            axes.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)
    if figure.log_x:
        ticks = sorted({x for series in figure.series.values() for x in series.x})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    else:
        is_difference = figure.y.startswith("difference")
        hidden = 0.1 if figure.x.startswith("training") else 0.0
        axes.set_ylim(*visible(figure.series, [0.0] * is_difference, hidden=hidden))
        if is_difference:
            axes.axhline(0, color=INK, linewidth=1)
        if all(x == int(x) and x <= MOST_WHOLE for series in figure.series.values() for x in series.x):
            axes.xaxis.get_major_locator().set_params(integer=True)
    label_ends(axes, figure.series)


def visible(series: Mapping[str, Series], levels: Sequence[float], *, hidden: float) -> tuple[float, float]:
    """Limits that include `levels`, without the first part (`hidden`) of a training, where losses are far higher."""
    first = hidden * max(x for each in series.values() for x in each.x)
    shown = list(levels) + [
        y + sign * e
        for each in series.values()
        for x, y, e in zip(each.x, each.y, each.error or [0.0] * len(each.y), strict=True)
        for sign in (-1, 1)
        if x >= first
    ]
    margin = max(0.08 * (max(shown) - min(shown)), 1e-3)
    return min(shown) - margin, max(shown) + margin


def label_ends(axes: Any, series: Mapping[str, Series]) -> None:
    """Names right of the axes, moved apart where lines end close together, joined to these ends by thin lines."""
    low, high = axes.get_ylim()
    rows = sorted(series, key=lambda row: series[row].y[-1])
    places = spread([(series[row].y[-1] - low) / (high - low) for row in rows], gap=LINE)
    for row, place in zip(rows, places, strict=True):
        write_name(axes, row, at=(series[row].x[-1], series[row].y[-1]), of="data", to=(1.03, place))


def write_name(axes: Any, row: str, *, at: tuple[float, float], of: str, to: tuple[float, float]) -> None:
    """Left of the middle of a name begins the line that leads to its point."""
    colour = look(row)[0]
    axes.annotate(
        row,
        at,
        xytext=to,
        xycoords=of,
        textcoords="axes fraction",
        va="center",
        color=colour,
        fontweight="bold",
        annotation_clip=False,
        arrowprops={
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.9,
            "linestyle": ":",
            "relpos": (0, 0.5),
            "shrinkA": 2,
        },
    )


def spread(values: Sequence[float], *, gap: float) -> list[float]:
    """Sorted values moved to be at least `gap` apart, with the least squared movement (pooled neighbours), and together
    so far that all are inside."""
    pools: list[list[float]] = []  # value minus its place in the stack: these only must not decrease
    for i, value in enumerate(values):
        pools.append([value - i * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = [fmean(pool) for pool in pools for _ in pool]
    apart = [value + i * gap for i, value in enumerate(flat)]
    n = len(apart)
    inside = [min(value, HIGHEST - (n - 1 - i) * gap) for i, value in enumerate(apart)]
    return [max(value, LOWEST + i * gap) for i, value in enumerate(inside)]


def draw_points(axes: Any, figure: Figure) -> None:
    for row, series in figure.series.items():
        colour, marker = look(row)
        axes.errorbar(series.x, series.y, yerr=series.error, color=colour, elinewidth=1, capsize=3)
        axes.plot(series.x, series.y, color=colour, marker=marker, markersize=8, markeredgecolor="white", zorder=3)
    axes.margins(0.1)
    axes.set_xlim(right=axes.get_xlim()[1] + 0.1 * (axes.get_xlim()[1] - axes.get_xlim()[0]))  # for names
    label_points(axes, figure.series)


def label_points(axes: Any, series: Mapping[str, Series]) -> None:
    """Names right of their points, moved apart among neighbours and clear of other points, joined by thin lines."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    place = {row: ((s.x[0] - left) / (right - left), (s.y[0] - low) / (high - low)) for row, s in series.items()}
    groups: list[list[str]] = []
    for row in sorted(place, key=lambda row: place[row][0]):
        if groups and place[row][0] - place[groups[-1][-1]][0] < NEAR:
            groups[-1].append(row)
        else:
            groups.append([row])
    for group in groups:
        group.sort(key=lambda row: place[row][1])
        for row, y in zip(group, spread([place[row][1] for row in group], gap=LINE), strict=True):
            x = clear_of(list(place.values()), place[row][0], y, width=LETTER * len(row))
            write_name(axes, row, at=place[row], of="axes fraction", to=(x, y))


def clear_of(points: Sequence[tuple[float, float]], x: float, y: float, *, width: float) -> float:
    """Where a name of this width may begin, right of x, so that it covers no point."""
    while covered := [px for px, py in points if abs(py - y) < LINE / 2 and x < px < x + ASIDE + width]:
        x = max(covered)
    return x + ASIDE
