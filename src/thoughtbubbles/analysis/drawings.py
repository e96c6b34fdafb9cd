"""One function per figure: from the numbers in its JSON to a drawing."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from thoughtbubbles.analysis.draw import blocks_axis, label_end
from thoughtbubbles.analysis.places import visible
from thoughtbubbles.plotting import (
    BLUE,
    BRIGHT,
    EMPTY,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    PINK,
    RED,
    SKY,
    panels,
)
from thoughtbubbles.written import signed

Numbers = Mapping[str, Any]
FEW = 10  # tokens: rarer kinds are only in the numbers
LINE, MOST = 28, 168  # tokens per line of the map, and in all


def places(numbers: Numbers, *, most_tokens: int = MOST) -> Any:
    """A map: tokens from left to right in lines, a row of cells per fork layer, darker for more streams."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap

    tokens, streams = numbers["tokens"][:most_tokens], np.array(numbers["streams"])[:, :most_tokens]
    n_layers, lines = len(streams), -(-len(tokens) // LINE)
    most = max(2, int(streams.max()))
    shades = ListedColormap([EMPTY, *colormaps["Blues"](np.linspace(0.25, 0.95, most - 1))])
    drawing, axes = panels(lines, height=0.5 + lines * (0.75 + 0.24 * n_layers))
    for line in range(lines):
        panel, part = axes[line][0], slice(line * LINE, (line + 1) * LINE)
        cells = np.full((n_layers, LINE), np.nan)
        width = len(tokens[part])
        cells[:, :width] = streams[:, part]
        panel.pcolormesh(
            cells, cmap=shades, norm=BoundaryNorm(np.arange(0.5, most + 1), most), edgecolors=PAPER, linewidth=1.5
        )
        for (row, column), value in np.ndenumerate(cells):
            if value > 1:
                dark = value > 1 + 0.5 * (most - 1)
                panel.text(column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=7,
                           color=BRIGHT if dark else "black")  # fmt: skip
        panel.set_xlim(0, LINE)
        panel.set_xticks(np.arange(width) + 0.5, [short(token) for token in tokens[part]], rotation=60, ha="right",
                         rotation_mode="anchor", fontsize=8)  # fmt: skip
        panel.set_yticks(np.arange(n_layers) + 0.5, [f"block {layer}" for layer in numbers["layers"]], fontsize=8)
        panel.tick_params(length=0)
        panel.grid(False)
        panel.spines[:].set_visible(False)
    axes[0][0].set_title("streams of each token from this block on (blank: 1)")
    return drawing


def short(token: str) -> str:
    text = visible(token)
    return text if len(text) <= 10 else f"{text[:9]}…"


def attention(numbers: Numbers) -> Any:
    """Stacked bars: where the attention of originals and of forks goes; below, what one key of each kind gets."""
    drawing, axes = panels(2, 2, height=6.2, sharey="row")
    blocks = numbers["blocks"]
    looks = ((FAINT, "o"), (ORANGE, "D"), (BLUE, "s"), (SKY, "^"))
    for column, name in enumerate(("original", "fork")):
        having = [(block, each[name]) for block, each in enumerate(blocks) if each[name] is not None]
        x, below = [block for block, _ in having], np.zeros(len(having))
        top, bottom = axes[0][column], axes[1][column]
        for place, (to, (colour, marker)) in enumerate(zip(numbers["to"], looks, strict=True)):
            heights = np.array([each["mass"][place] for _, each in having])
            top.bar(x, heights, bottom=below, color=colour, width=0.86, label=f"to {to}")
            below = below + heights
            weights = [each["per_key"][place] or np.nan for _, each in having]
            bottom.plot(x, weights, color=colour, marker=marker, markersize=4.5, linewidth=1.4)
        top.set_title(f"attention of {'an' if name == 'original' else 'a'} {name}")
        for panel in (top, bottom):
            panel.set_xlim(-0.6, len(blocks) - 0.4)
            panel.grid(axis="x", visible=False)
            blocks_axis(panel, len(blocks))
        if not having:
            top.text(0.5, 0.5, "there are none", transform=top.transAxes, ha="center", color=FAINT)
    axes[0][0].set_ylabel("share of the attention")
    axes[0][0].set_ylim(0, 1)
    axes[1][0].set_ylabel("mean weight of one key (log scale)")
    _log_axis(axes[1][0])
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return drawing


def uncertainty(numbers: Numbers) -> Any:
    sources = numbers["sources"]
    drawing, axes = panels(1, len(sources), height=3.9, width=4.2 * max(len(sources), 1.5), sharey=True)
    y = np.array(numbers["streams"])
    for panel, (name, each), colour in zip(axes[0], sources.items(), (BLUE, GREEN), strict=False):
        x = np.array(each["entropy"])
        few = len(x) < 2000
        panel.scatter(x, y, s=14 if few else 5, color=colour, alpha=0.35 if few else 0.12, linewidth=0)
        if (fit := each["parabola"]) is not None:
            line = np.linspace(x.min(), x.max(), 200)
            panel.plot(line, fit["a"] + fit["b"] * line + fit["c"] * line**2, color=INK, linewidth=1.8)
        for each_bin in each["bins"]:
            panel.errorbar(each_bin["entropy"], each_bin["streams"], yerr=each_bin["standard_error"] or 0, color=RED,
                           marker="o", markersize=6, capsize=3, zorder=4)  # fmt: skip
        r = each["correlation"]
        title = f"entropy of {name}"
        if r is not None:
            title += f"\nr = {signed(r['r'], '.2f')} ({signed(r['low'], '.2f')} to {signed(r['high'], '.2f')})"
        panel.set_title(title)
        panel.set_xlabel(f"mean entropy of {numbers['group']} tokens (nats)")
    axes[0][0].set_ylabel("streams per token")
    return drawing


def future(numbers: Numbers) -> Any:
    """Each document's change from the parallel forward to the other ways of scoring."""
    drawing, axes = panels(height=3.6)
    panel, x = axes[0][0], np.array(numbers["ways"]["blockwise"]["documents"])
    largest = 0.005
    for (name, way), colour in zip(
        ((name, way) for name, way in numbers["ways"].items() if name != "blockwise"), (BLUE, RED, FAINT), strict=False
    ):
        gap = np.array(way["documents"]) - x
        largest = max(largest, float(np.abs(gap).max()))
        mean = numbers["differences"][f"{name} - blockwise"]["mean"]
        label = f"{way['title']}: mean {signed(mean)}"
        panel.scatter(x, gap, s=26, color=colour, alpha=0.75, linewidth=0, label=label)
    panel.axhline(0, color=INK, linewidth=1)
    panel.set_ylim(-1.25 * largest, 1.25 * largest)
    panel.set_xlabel("loss of the document in one parallel forward (nats per token)")
    panel.set_ylabel("change token by token\n(nats per token)")
    panel.legend(frameon=False, fontsize=9, loc="upper left")
    return drawing


def leaks(numbers: Numbers) -> Any:
    """By distance to the change: how often predictions move, and how much; 0 has its place on the log axis."""
    drawing, axes = panels(1, 2, height=3.9, width=9.0)
    left, right = axes[0]
    for (rule, found), colour, marker in zip(numbers["rules"].items(), (BLUE, RED), ("o", "s"), strict=False):
        parts, total = found["by_distance"], found["total"]
        moved = f"{total['moved']:,}" if total["moved"] else "none"
        name = f"{rule} selection: moved in {moved} of {total['comparisons']:,} comparisons"
        look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6, "clip_on": False, "zorder": 3}
        left.plot([100 * part["moved"] / part["comparisons"] for part in parts], label=name, **look)
        right.plot([part["largest"] for part in parts], **look)
        right.plot([part["mean"] for part in parts], linestyle=(0, (3, 2)), **look | {"markerfacecolor": PAPER})
    left.set_ylim(0, 100)
    left.set_title("comparisons in which the prediction moved (%)")
    right.set_title("|Δ log p| in nats (solid: largest; dashed: mean)")
    _log_axis_from_0(right, [part[key] for each in numbers["rules"].values() for part in each["by_distance"]
                             for key in ("largest", "mean")])  # fmt: skip
    labels = [part["label"] for part in next(iter(numbers["rules"].values()))["by_distance"]]
    for panel in (left, right):
        panel.set_xticks(range(len(labels)), labels, fontsize=9)
        panel.set_xlabel("tokens from the prediction to the first changed token")
    drawing.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9.5)
    return drawing


def _log_axis_from_0(panel: Any, values: list[float]) -> None:
    """Logarithmic over the positive values, with 0 one step below the smallest power of 10."""
    positive = [value for value in values if value > 0]
    if not positive:
        panel.set_ylim(0, 1)
        return
    low, high = (math.floor(math.log10(each)) for each in (min(positive), max(positive)))
    powers = range(low, high + 2, max(1, (high - low) // 6))
    panel.set_yscale("symlog", linthresh=10.0**low, linscale=1)
    panel.set_yticks([0, *(10.0**power for power in powers)], ["0", *(f"{10.0**power:g}" for power in powers)])
    panel.minorticks_off()
    panel.set_ylim(0, 10.0 ** (high + 1))


def dial(numbers: Numbers) -> Any:
    times = numbers.get("timings") or []
    drawing, axes = panels(1, 2 if times else 1, height=3.9, width=9.5 if times else 7.0)
    panel = axes[0][0]
    looks = ((1, BLUE, "o", "-"), (0.985, ORANGE, "s", "--"), (1.015, GREEN, "D", "-"))  # apart, to see all errors
    for (name, each), (apart, colour, marker, dash) in zip(numbers["series"].items(), looks, strict=True):
        rows = each["rows"]
        x = [apart * float(Fraction(row["budget"])) for row in rows]
        y = [row["difference"] for row in rows]
        errors = [row["standard_error"] or 0 for row in rows]
        panel.errorbar(x, y, yerr=errors, color=colour, marker=marker, markersize=4.5, linestyle=dash, capsize=3,
                       linewidth=1.6, elinewidth=1, label=name)  # fmt: skip
    panel.axhline(0, color=INK, linewidth=1)
    panel.set_title("loss minus that at budget 1 (nats per token)")
    drawing.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=9.5)
    if times:
        x = [float(Fraction(row["budget"])) for row in times]
        axes[0][1].plot(x, [row["milliseconds"] for row in times], color=PINK, marker="o", markersize=4.5)
        axes[0][1].set_ylim(0, 1.15 * max(row["milliseconds"] for row in times) or 1)
        axes[0][1].set_title(f"milliseconds per generated token\n({numbers['device']})")
    for each in axes[0]:
        _budget_axis(each, [row["budget"] for row in numbers["series"]["all tokens"]["rows"]])
    return drawing


def _budget_axis(panel: Any, budgets: list[str]) -> None:
    places = [float(Fraction(budget)) for budget in budgets]
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, budgets, fontsize=9)
    panel.minorticks_off()
    panel.set_xlabel("budget: streams per token")


def _log_axis(panel: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def scores(numbers: Numbers) -> Any:
    """Median as a dot, the middle half as a thick bar, 5% to 95% as a thin one."""
    drawing, axes = panels(height=3.6)
    panel = axes[0][0]
    for shift, name, colour in ((-0.12, "originals", BLUE), (0.12, "forks", ORANGE)):
        first = True
        for place, stage in enumerate(numbers["stages"]):
            if stage[name] is None:
                continue
            low, q1, middle, q3, high = (max(value, 1e-6) for value in stage[name]["quantiles"])
            x = place + shift
            panel.plot([x, x], [low, high], color=colour, linewidth=1.2)
            panel.plot([x, x], [q1, q3], color=colour, linewidth=7, solid_capstyle="butt", alpha=0.55)
            panel.plot([x], [middle], color=colour, marker="o", markersize=7, markeredgecolor="white", linestyle="",
                       label=name if first else None)  # fmt: skip
            panel.annotate(f"{middle:.2g}", (x, middle), xytext=(9 if shift > 0 else -9, 0),
                           textcoords="offset points", va="center", ha="left" if shift > 0 else "right",
                           fontsize=9, color=colour)  # fmt: skip
            first = False
    _log_axis(panel)
    panel.set_ylabel("cumulative score (log scale)")
    layers = [f"from block {stage['layer']}" for stage in numbers["stages"]]
    panel.set_xticks(range(len(layers)), layers)
    panel.set_xlim(-0.6, len(layers) - 0.4)
    panel.grid(axis="x", visible=False)
    panel.legend(frameon=False)
    panel.set_title("dot: median; thick: middle half; thin: 5% to 95%")
    return drawing


def survival(numbers: Numbers) -> Any:
    drawing, axes = panels(1, 2, height=3.6, width=9.0)
    left, right = axes[0]
    layers = [each["layer"] for each in numbers["streams"]]
    for each, colour in zip(numbers["born"], (BLUE, ORANGE, GREEN, PINK, RED, SKY) * 4, strict=False):
        if not each["forks"] or len(each["layers"]) < 2:
            continue
        x = [layers.index(layer) for layer in each["layers"]]
        left.plot(x, each["descendant"], color=colour, linestyle=":", linewidth=1.6)
        left.plot(x, each["itself"], color=colour, marker="o", markersize=5, linewidth=1.8)
        label_end(left, x[-1], each["itself"][-1], f"made at {each['layer']}: {each['itself'][-1]:.0%}", colour)
    left.set_ylim(0, 1.05)
    left.set_ylabel("share of the forks still there")
    left.set_title("survival (dotted: or a descendant)")
    places = np.arange(len(layers))
    right.bar(places - 0.2, [each["all"] for each in numbers["streams"]], width=0.38, color=SKY, label="all")
    right.bar(places + 0.2, [each["effective"] for each in numbers["streams"]], width=0.38, color=BLUE,
              label=f"score above {numbers['threshold']:.0%} of the best")  # fmt: skip
    right.set_title("streams per token")
    right.set_ylim(0, 1.3 * max(each["all"] for each in numbers["streams"]))
    right.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    right.grid(axis="x", visible=False)
    for panel in (left, right):
        panel.set_xticks(range(len(layers)), [f"block {layer}" for layer in layers])
    left.set_xlim(-0.2, 1.45 * len(layers) - 1)  # names need room
    return drawing


def writes(numbers: Numbers) -> Any:
    drawing, axes = panels(1, 2, height=3.6, width=9.0, sharey=True)
    blocks = numbers["blocks"]
    for panel, name in zip(axes[0], ("attention", "mlp"), strict=True):
        before, after = ([block[name][when] for block in blocks] for when in ("before", "after"))
        panel.plot(before, color=FAINT, marker="o", markersize=4.5)
        panel.plot(after, color=BLUE, marker="D", markersize=4.5)
        label_end(panel, len(blocks) - 1, before[-1], "before", FAINT)
        label_end(panel, len(blocks) - 1, after[-1], "after", BLUE, dy=-3)
        panel.set_title("attention" if name == "attention" else "MLP")
        panel.set_xlim(-0.5, len(blocks) + max(1.2, 0.14 * len(blocks)))
        blocks_axis(panel, len(blocks), numbers["fork_layers"])
    highest = max(block[name]["before"] for block in blocks for name in ("attention", "mlp"))
    axes[0][0].set_ylim(0, 1.05 * highest)
    axes[0][0].set_ylabel("mean norm of the update")
    return drawing


def _frequent(numbers: Numbers) -> dict[str, Any]:
    """The kinds of which there are enough tokens, the last one first."""
    every = numbers["kinds"]["all tokens"]["tokens"]
    return {kind: each for kind, each in reversed(numbers["kinds"].items()) if each["tokens"] >= min(FEW, every)}


def kinds(numbers: Numbers) -> Any:
    rows = _frequent(numbers)
    drawing, axes = panels(height=0.9 + 0.36 * len(rows))
    panel = axes[0][0]
    every = numbers["kinds"]["all tokens"]["streams"]
    for place, (kind, each) in enumerate(rows.items()):
        colour = INK if kind == "all tokens" else BLUE
        panel.errorbar(each["streams"], place, xerr=each["standard_error"] or 0, color=colour, marker="o",
                       markersize=6, capsize=3, linestyle="")  # fmt: skip
        panel.plot([every, each["streams"]], [place, place], color=colour, linewidth=1.5, alpha=0.5)
    panel.axvline(every, color=INK, linewidth=1)
    panel.set_yticks(range(len(rows)), [f"{kind} ({each['tokens']:,})" for kind, each in rows.items()])
    panel.set_xlabel("streams per token after the last fork layer (± standard error)")
    panel.grid(axis="y", visible=False)
    return drawing


def gain(numbers: Numbers) -> Any:
    rows = _frequent(numbers)
    drawing, axes = panels(height=0.9 + 0.36 * len(rows))
    panel = axes[0][0]
    for place, (kind, each) in enumerate(rows.items()):
        better = each["difference"] < 0
        colour = INK if kind == "all tokens" else BLUE if better else RED
        panel.errorbar(each["difference"], place, xerr=each["standard_error"] or 0, color=colour, marker="o",
                       markersize=6, capsize=3, linestyle="")  # fmt: skip
    panel.axvline(0, color=INK, linewidth=1)
    panel.set_yticks(range(len(rows)), [f"{kind} ({each['tokens']:,})" for kind, each in rows.items()])
    panel.set_xlabel(f"loss with budget {numbers['budget']} minus loss with budget 1 (nats per token)")
    panel.set_title("left of 0: forks help (± standard error)")
    panel.grid(axis="y", visible=False)
    return drawing
