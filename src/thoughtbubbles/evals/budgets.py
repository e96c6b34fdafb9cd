"""The thinking dial: the same model on the same tokens and documents, with several budgets.

Differences between budgets are far smaller than differences between texts. So they are paired, window by window and
document by document, each budget with the first one, and the standard errors are those of the differences.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from thoughtbubbles.evals.autoregressive import Scores, compare
from thoughtbubbles.evals.documents import Benchmark
from thoughtbubbles.evals.metrics import Answer, mean_and_error
from thoughtbubbles.evals.tasks.task import Choices

NATS, PERCENT = "nats per token", "%"


def pair_scores(
    numbers: Mapping[str, Any], scores: Sequence[dict[str, Scores]], budgets: Sequence[object]
) -> dict[str, Any]:
    """Pairs perplexities, for each way of scoring; `numbers` are those of the first budget."""
    series = {}
    for way, reference in scores[0].items():
        rows = []
        for budget, each in zip(budgets, scores, strict=True):
            gap = None if each is scores[0] else compare(each[way], reference)
            rows.append(
                {
                    "budget": str(budget),
                    "mean": each[way].mean,
                    "standard_error": each[way].standard_error,
                    "difference": None if gap is None else gap._asdict(),
                }
            )
        series[way] = {"title": numbers["ways"][way]["title"], "unit": NATS, "rows": rows}
    return {"title": "perplexity", "series": series}


def pair_answers(
    benchmark: Benchmark, answers: Sequence[Mapping[int, Answer]], budgets: Sequence[object]
) -> dict[str, Any]:
    """Pairs the answers of a benchmark: accuracy, and for choices also the loss of the right one."""
    right = [[answer.scores["accuracy"] for answer in each.values()] for each in answers]
    series = {"accuracy": {"title": "accuracy", "unit": PERCENT, "rows": _rows(right, budgets)}}
    if all(isinstance(document, Choices) for document in benchmark.documents.values()):
        losses = [[_loss(benchmark, number, answer) for number, answer in each.items()] for each in answers]
        series["loss"] = {"title": "loss of the right choice", "unit": NATS, "rows": _rows(losses, budgets)}
    return {"title": benchmark.task.title, "series": series}


def _loss(benchmark: Benchmark, number: int, answer: Answer) -> float:
    document = benchmark.documents[number]
    assert isinstance(document, Choices)
    return -answer.log_probs[document.gold] / answer.tokens[document.gold]


def _rows(values: Sequence[Sequence[float]], budgets: Sequence[object]) -> list[dict[str, Any]]:
    """Mean and standard error of each budget, and of its paired difference from the first."""
    rows = []
    for place, (budget, each) in enumerate(zip(budgets, values, strict=True)):
        gap = [a - b for a, b in zip(each, values[0], strict=True)]
        mean, error = mean_and_error(each)
        difference = dict(zip(("mean", "standard_error"), mean_and_error(gap), strict=True)) if place else None
        rows.append({"budget": str(budget), "mean": mean, "standard_error": error, "difference": difference})
    return rows


def shown_series(found: Mapping[str, Any], *, is_causal: bool) -> dict[str, Any]:
    """Without redundant ones: with an exact cache, blockwise and autoregressive are the same."""
    return {name: each for name, each in found["series"].items() if not (is_causal and name == "autoregressive")}


def budget_table(paired: Mapping[str, Any], *, title: str, is_causal: bool) -> Table:
    """From results.json; fits in 80 columns."""
    table = Table(title=title)
    table.add_column("", overflow="fold", max_width=26)
    table.add_column("r", justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    table.add_column(f"against r = {paired['reference']}", justify="right", no_wrap=True)
    for found in paired["tasks"].values():
        for each in shown_series(found, is_causal=is_causal).values():
            _add(table, f"{found['title']}: {each['title']} ({each['unit']})", each)
    return table


def _add(table: Table, title: str, series: Mapping[str, Any]) -> None:
    """The title may wrap over several lines, next to the rows."""
    factor, form = (100, ".2f") if series["unit"] == PERCENT else (1, ".4f")
    budgets, means, gaps = [], [], []
    for row in series["rows"]:
        budgets.append(row["budget"])
        means.append(_with_error(row, factor, form))
        gaps.append("" if row["difference"] is None else _with_error(row["difference"], factor, f"+{form}"))
    table.add_row(Text(title), *("\n".join(cells) for cells in (budgets, means, gaps)), end_section=True)


def _with_error(value: Mapping[str, Any], factor: int, form: str) -> str:
    error = value["standard_error"]
    plus_minus = "" if error is None else f" ± {factor * error:{form.removeprefix('+')}}"
    mean = factor * value["mean"]
    return f"{mean:{form}}{plus_minus}" if math.isfinite(mean) else f"{mean}"


def budget_remarks(paired: Mapping[str, Any]) -> list[str]:
    first = paired["reference"]
    return [
        "r: maximum streams per token. ± is the standard error over windows or documents. The last column is paired: "
        f"each window and document against itself with r = {first}, so its errors are those of the change only."
    ]
