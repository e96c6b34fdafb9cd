"""The figures of docs/results as numbers, each with the sentence under it; plots.py draws them."""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from thoughtbubbles.recipes.reproduce.answers import closest
from thoughtbubbles.recipes.reproduce.compare_rows import curve_differences, difference
from thoughtbubbles.recipes.reproduce.equal_cost import NOT_SLOWER, ROWS, hardest, plain_rows
from thoughtbubbles.recipes.reproduce.parts import GROUP, PLAIN
from thoughtbubbles.recipes.reproduce.records import Evidence, Results, flops, gpu_seconds, nats, parameters
from thoughtbubbles.recipes.reproduce.sentences import needs, sentence
from thoughtbubbles.written import plus_minus, signed

CURVES = ("long", "short", "scarce", "laptop")  # protocols
SMOOTH = 60  # points of a training curve, about
NO_ROWS = "Not measured yet."
LOSS = "validation loss (nats per token)"


@dataclass(frozen=True, kw_only=True)
class Series:
    x: list[float]
    y: list[float]
    error: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    """Of its files."""
    kind: Literal["lines", "points"]
    title: str
    x: str
    y: str
    series: Mapping[str, Series]
    """By row."""
    sentence: str
    """What it shows; the reason, if there is nothing to draw."""
    log_x: bool = False

    def as_json(self) -> str:
        """All that is drawn, one line per series."""
        fields: dict[str, Any] = {
            name: value for name, value in vars(self).items() if name not in ("series", "sentence")
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
        series = [f"    {json.dumps(row)}: {json.dumps(asdict(each))}" for row, each in self.series.items()]
        body = ",\n".join(series)
        lines.append('  "series": {\n' + body + "\n  }")
        return "{\n" + ",\n".join(lines) + "\n}\n"


def figures(evidence: Evidence) -> dict[str, list[Figure]]:
    """By the part of the page they are in; one without series cannot be drawn yet."""
    shown = [name for name in CURVES if name != "laptop" or evidence.results[name].rows]
    return {
        "sweep": list(sweep_figures(evidence.results["long-sweep"])),
        "curves": [draw(evidence.results[name]) for name in shown for draw in (growth_figure, training_figure)],
        "pays": list(cost_figures(evidence)),
    }


def rounded(value: float) -> float:
    """To six digits: the same text on every machine."""
    return float(f"{value:.6g}")


def growth_figure(results: Results) -> Figure:
    """The difference to plain during training, a line per row; not for rows of another size or length."""
    series, parts, left_out = {}, [], {PLAIN, *of_other_size(results)}
    for row in results.rows:
        if row in left_out or not (points := curve_differences(results, row, PLAIN)):
            continue
        errors = [gap.error for _, gap in points if gap.error is not None]
        series[row] = Series(
            x=[rounded(tokens / 1e6) for tokens, _ in points],
            y=[rounded(gap.mean) for _, gap in points],
            error=[rounded(error) for error in errors] if len(errors) == len(points) else None,
        )
        (_, half), (n_tokens, end) = closest(points, 0.5), points[-1]
        begins_late = points[0][0] > n_tokens / 2
        earlier = "at the end " if begins_late else f"{signed(half.mean)}, then "
        n = f"{len(end.seeds)} seed{'s' * (len(end.seeds) > 1)}"
        parts.append(f"`{row}` {earlier}{signed(end.mean)}{plus_minus(end.error)} ({n})")
    return Figure(
        name=f"{results.name}-difference",
        kind="lines",
        title=f"{results.name}: validation loss minus that of plain, during training",
        x="training tokens (millions)",
        y="difference to plain (nats per token)",
        series=series,
        sentence=(
            f"Difference to `plain` at half of the training and at its end: {'; '.join(parts)}."
            if parts
            else needs(results, (PLAIN, "r1", "r2"))
        ),
    )


def of_other_size(results: Results) -> list[str]:
    """Rows that differ from plain in width or depth, in the number of models or of tokens."""
    rows = results.protocol.rows.items()
    return [row for row, own in rows if own.length != 1 or own.ensemble > 1 or {"width", "n_layer"} & set(own.model)]


def training_figure(results: Results) -> Figure:
    """Training loss of the first seed of each row. If several rows have more than a seed, only they have a line, and
    plain GPTs of another size or length: the others lie on top of them."""
    of_plain = set(plain_rows(results)) & set(of_other_size(results))
    series, ends = {}, []
    main = [row for row in results.rows if len(results.planned(row)) > 1]
    shown = [*main, *of_plain] if len(main) > 1 else list(results.rows)
    for row, seeds in results.rows.items():
        known = results.protocol.rows.get(row)
        record = next(iter(seeds.values()))
        if not record["training_loss"] or (known and known.ensemble > 1):
            continue
        losses, joined = record["training_loss"], max(1, len(record["training_loss"]) // SMOOTH)
        per_point = joined * GROUP * record["config"]["tokens_per_step"]
        means = [statistics.fmean(losses[i : i + joined]) for i in range(0, len(losses) - joined + 1, joined)]
        x = [rounded((i + 1) * per_point / 1e6) for i in range(len(means))]
        if row in shown:
            series[row] = Series(x=x, y=[rounded(mean) for mean in means])
        steps = record["steps"] - GROUP * (len(losses) - 1)
        whole = losses if steps >= GROUP or len(losses) < 2 else losses[:-1]  # the last group may have fewer steps
        ends.append(f"`{row}` {whole[-1]:.3f}")
    return Figure(
        name=f"{results.name}-training",
        kind="lines",
        title=f"{results.name}: training loss",
        x="training tokens (millions)",
        y="training loss (nats per token)",
        series=series,
        sentence=(
            f"Mean training loss of the last full {GROUP} steps, first seed of each row: {', '.join(ends)}."
            if ends
            else NO_ROWS
        ),
    )


def sweep_figures(results: Results) -> Iterator[Figure]:
    """The validation loss by learning rate and by weight decay, the other one held at its middle value."""
    planned = [(row.optim["lr"], row.optim["weight_decay"]) for row in results.protocol.rows.values()]
    middle = [statistics.mode(values) for values in zip(*planned, strict=True)]
    for axis, (name, what) in enumerate((("lr", "learning rate"), ("weight_decay", "weight decay"))):
        other = 1 - axis
        found: dict[str, dict[float, float]] = {}
        for row, seeds in results.rows.items():
            optim = next(iter(seeds.values()))["config"]["optim"]
            point = (optim["lr"], optim["weight_decay"])
            if point[other] == middle[other]:
                found.setdefault(row.partition("-lr")[0], {})[point[axis]] = rounded(results.mean(row, nats))
        series = {
            model: Series(x=sorted(at), y=[at[x] for x in sorted(at)]) for model, at in found.items() if len(at) > 1
        }
        wanted = {point[axis] for point in planned if point[other] == middle[other]}
        best = "; ".join(
            f"`{model}` {min(at, key=at.__getitem__):g}" if at.keys() >= wanted else f"`{model}`: not all rows are run"
            for model, at in found.items()
        )
        yield Figure(
            name=f"long-sweep-{name.replace('_', '-')}",
            kind="lines",
            title=f"long-sweep: validation loss by {what}",
            x=f"{what} ({('weight decay', 'learning rate')[axis]} {middle[other]:g})",
            y=LOSS,
            series=series,
            sentence=f"Best {what}: {best}." if series else NO_ROWS,
            log_x=True,
        )


def cost_figures(evidence: Evidence) -> Iterator[Figure]:
    """Loss against each cost, a point per row of `long`."""
    results = evidence.results["long"]
    of_records = {
        "parameters": ("parameters (millions)", parameters, 1e6, "parameters"),
        "gpu-seconds": ("GPU seconds of training", gpu_seconds, 1, "GPU time of training"),
        "flops": ("training FLOPs (10¹⁸)", flops, 1e18, "training FLOPs"),
    }
    for name, (label, value, scale, what) in of_records.items():
        costs = {row: results.cost(row, value) / scale for row in results.rows}
        if name == "gpu-seconds" and not results.same_device:
            apart = f"Rows ran on different devices ({', '.join(results.devices)}): their times cannot be compared."
            yield cost_figure(results, name, label, {}, what, apart)
        else:
            yield cost_figure(results, name, label, costs, what, needs(results, (PLAIN, "r2")))
    of_decoding = {
        "decode-1": ("milliseconds per token, batch size 1", "1", "milliseconds", 1, "time of a decoded token"),
        "decode-32": ("milliseconds per token, batch size 32", "32", "milliseconds", 1, "time of a decoded token"),
        "cache": ("KV cache of one sequence (MiB)", "1", "cache_bytes", 2**20, "KV cache"),
    }
    for name, (label, batch, field, scale, what) in of_decoding.items():
        rows = evidence.decode["rows"] if evidence.decode else {}
        costs = {row: at[batch][field] / scale for row, at in rows.items() if batch in at and row in results}
        why = "Not measured yet: needs the decoding times of the rows of `long`."
        yield cost_figure(results, name, label, costs, what, why)


def cost_figure(
    results: Results, name: str, label: str, costs: Mapping[str, float], what: str, otherwise: str
) -> Figure:
    """y: the mean loss of plain plus the paired difference, so that rows with fewer seeds can be compared."""
    gaps = {row: difference(results, row, PLAIN) for row in costs if row != PLAIN}
    series = {}
    if PLAIN in costs and "r2" in costs and gaps["r2"] is not None:
        level = results.mean(PLAIN, nats)
        series[PLAIN] = Series(x=[rounded(costs[PLAIN])], y=[rounded(level)])
        for row, gap in gaps.items():
            if gap is not None:
                error = None if gap.error is None else [rounded(gap.error)]
                series[row] = Series(x=[rounded(costs[row])], y=[rounded(level + gap.mean)], error=error)
    return Figure(
        name=f"long-{name}",
        kind="points",
        title=f"long: validation loss against {label}",
        x=label,
        y=LOSS,
        series=series,
        sentence=cost_sentence(results, {row: costs[row] for row in series}, what) if series else otherwise,
    )


def cost_sentence(results: Results, costs: Mapping[str, float], what: str) -> str:
    """What each row with forks costs and brings, and the best row that needs no more."""
    parts = []
    for row in (row for row in ROWS if row in costs):
        gap = difference(results, row, PLAIN)
        assert gap is not None, "the figure leaves out rows without one"
        parts.append(
            f"`{row}` needs {costs[row] / costs[PLAIN]:.2f} × the {what} of `plain`: {sentence(gap, row, PLAIN)}."
        )
        others = [other for other in costs if other not in (row, PLAIN) and costs[other] <= NOT_SLOWER * costs[row]]
        if best := hardest(results, row, others):
            parts.append(
                f"Of the other rows that need no more, `{best[0]}` is the best: {sentence(best[1], row, best[0])}."
            )
    return " ".join(parts)
