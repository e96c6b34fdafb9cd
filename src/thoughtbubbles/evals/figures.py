"""Figures of an evaluation, drawn only from its results.json."""

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from thoughtbubbles.evals.budgets import PERCENT, shown_series
from thoughtbubbles.files import read_object
from thoughtbubbles.plotting import BLUE, FAINT, GREEN, INK, ORANGE, RED, has_matplotlib, panels, save

COLOURS = (RED, ORANGE, GREEN)
PARALLEL = BLUE


def draw_perplexity(results: Path) -> Path | None:
    """Histograms of window perplexities, each way over the parallel forward; None without matplotlib."""
    if not has_matplotlib():
        return None
    found = read_object(results)["tasks"]["perplexity"]
    return save(lambda: _histograms(found), results.with_name("perplexity.png"))[0]


def _histograms(found: Mapping[str, Any]) -> Any:
    blockwise, *others = found["ways"].values()
    bins = _bins([window["perplexity"] for way in found["ways"].values() for window in way["windows"]])
    drawing, axes = panels(1, len(others), width=4.2 * max(len(others), 1.4), sharex=True, sharey=True)
    for panel, way, colour in zip(axes[0], others, COLOURS, strict=False):
        _histogram(panel, way, bins, color=colour, histtype="stepfilled", alpha=0.5)
        _histogram(panel, blockwise, bins, color=PARALLEL, histtype="step", linewidth=1.8)
        panel.set_title(way["title"], fontsize=10)
        panel.set_xlabel("perplexity of a window")
        panel.legend(fontsize=8)
    axes[0][0].set_ylabel("windows")
    axes[0][0].yaxis.get_major_locator().set_params(integer=True)
    return drawing


def _histogram(panel: Any, way: dict[str, Any], bins: np.ndarray, **style: Any) -> None:
    """With the perplexity over all tokens as a dashed line."""
    name = way["title"].split(",")[0].split(":")[0]
    values = [window["perplexity"] for window in way["windows"]]
    panel.hist(values, bins=bins, label=f"{name}: {way['perplexity']:.3f}", **style)
    panel.axvline(way["perplexity"], color=style["color"], linestyle="--", linewidth=1.2)


def _bins(values: list[float]) -> np.ndarray:
    """The same bins for all ways: twice the square root of the number of windows, from 5 to 40."""
    low, high = min(values), max(values)
    margin = 0.02 * (high - low) or 0.01 * high
    count = int(np.clip(round(2 * np.sqrt(len(values))), 5, 40))
    return np.linspace(low - margin, high + margin, count + 1)


def draw_benchmarks(results: Path) -> list[Path]:
    """One figure of all benchmarks, and one per benchmark with several groups; none without matplotlib."""
    if not has_matplotlib():
        return []
    found = read_object(results)["tasks"]
    benchmarks = {name: benchmark for name, benchmark in found.items() if "accuracy" in benchmark}
    rows = {benchmark["title"]: benchmark for benchmark in benchmarks.values()}
    drawn = save(partial(_bars, rows, ""), results.with_name("benchmarks.png"))
    for name, benchmark in benchmarks.items():
        for group, parts in benchmark.get("by", {}).items():
            if len(parts) > 1:
                bars = partial(_bars, {**parts, "all": benchmark}, f"{benchmark['title']} by {group}")
                drawn += save(bars, results.with_name(f"{name}-by-{group}.png"))
    return drawn


def _bars(rows: dict[str, Any], title: str) -> Any:
    """Accuracies as bars, their standard errors as whiskers, chance as a line across each."""
    drawing, ((panel,),) = panels(width=7.0, height=1.2 + 0.24 * len(rows))
    names, places = list(rows), np.arange(len(rows))
    accuracy = [100 * row["accuracy"]["mean"] for row in rows.values()]
    errors = [100 * (row["accuracy"]["standard_error"] or 0) for row in rows.values()]
    colours = [FAINT if name == "all" else PARALLEL for name in names]
    panel.barh(places, accuracy, xerr=errors, color=colours, alpha=0.75, ecolor=INK, error_kw={"linewidth": 0.8})
    guessed = [(place, 100 * row["chance"]) for place, row in zip(places, rows.values(), strict=True) if row["chance"]]
    for number, (place, level) in enumerate(guessed):
        panel.plot([level, level], [place - 0.42, place + 0.42], color=RED, label=None if number else "chance")
    panel.set_yticks(places, names, fontsize=8)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_xlim(0, 100)
    panel.set_xlabel("accuracy (%); whiskers: standard error", fontsize=8)
    panel.grid(axis="y", visible=False)
    if guessed:
        panel.legend(fontsize=8, loc="lower right")
    if title:
        panel.set_title(title, fontsize=10)
    return drawing


def draw_budgets(results: Path) -> Path | None:
    """The thinking dial: loss and accuracy over the budget, one panel per task; None without matplotlib."""
    if not has_matplotlib():
        return None
    found = read_object(results)
    return save(lambda: _dials(found), results.with_name("budgets.png"))[0]


def _dials(found: Mapping[str, Any]) -> Any:
    is_causal, paired = found["selection"] != "block", found["budgets"]
    shown = [
        (name, task["title"], shown_series(task, is_causal=is_causal))
        for name, task in paired["tasks"].items()
        if name == "perplexity"
    ]
    shown += [
        (name, task["title"], {"accuracy": task["series"]["accuracy"]})
        for name, task in paired["tasks"].items()
        if name != "perplexity"
    ]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    drawing, axes = panels(lines, columns, width=max(4.8, 3.9 * columns), height=3.3 * lines + 0.3)
    for panel in axes.flat[len(shown) :]:
        panel.set_axis_off()
    for panel, (name, title, series) in zip(axes.flat, shown, strict=False):
        for place, (each, colour) in enumerate(zip(series.values(), (PARALLEL, *COLOURS), strict=False)):
            _dial(panel, each, colour, label=each["title"] if name == "perplexity" else None, with_own=place == 0)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("budget: streams per token", fontsize=9)
        panel.set_ylabel("accuracy (%)" if name != "perplexity" else "nats per token", fontsize=9)
        if name != "perplexity" and (chance := found["tasks"][name]["chance"]) is not None:
            panel.axhline(100 * chance, color=RED, linewidth=0.9, linestyle=":", label="chance")
        if name != "perplexity":  # at least 5 points high, so that a tiny change does not look large
            low, high = panel.get_ylim()
            panel.set_ylim(min(low, (low + high) / 2 - 2.5), max(high, (low + high) / 2 + 2.5))
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    drawing.supxlabel(
        f"bars with caps: standard error of the change from r = {paired['reference']}, paired\n"
        "wide pale bars: standard error of the mean",
        fontsize=8,
    )
    return drawing


def _dial(panel: Any, series: Mapping[str, Any], colour: str, *, label: str | None, with_own: bool) -> None:
    """Each mean with two error bars: pale for its own (mostly shared by all budgets), dark for that of its change."""
    factor = 100 if series["unit"] == PERCENT else 1
    rows = sorted(series["rows"], key=lambda row: Fraction(row["budget"]))
    places = [float(Fraction(row["budget"])) for row in rows]
    means = [factor * row["mean"] for row in rows]
    own = [factor * (row["standard_error"] or 0) for row in rows]
    change = [factor * ((row["difference"] or {}).get("standard_error") or 0) for row in rows]
    if with_own:
        panel.errorbar(places, means, yerr=own, fmt="none", ecolor=colour, elinewidth=5, alpha=0.2)
    panel.errorbar(places, means, yerr=change, color=colour, marker="o", markersize=4, capsize=4, label=label)
    panel.set_xticks(places, [row["budget"] for row in rows])
