"""Prints the tables and draws the figures of an evaluation, from the content of results.json."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thoughtbubbles.evals.budgets import budget_remarks, budget_table
from thoughtbubbles.evals.figures import draw_benchmarks, draw_budgets, draw_perplexity
from thoughtbubbles.evals.perplexity import remarks, table_of

FEW = 12  # maximum number of groups that a table lists
WAYS = {"accuracy": "accuracy", "accuracy_sum": "sum", "accuracy_character": "char-\nacter", "accuracy_byte": "byte"}
METRICS_EXPLAINED = (
    "In percent ± standard error. accuracy: picks the choice with the lowest mean loss per token, as in the paper; "
    "sum: with the lowest total loss (lm-evaluation-harness's acc); character: with the lowest loss per character (its "
    "acc_norm); byte: with the lowest loss per byte (its acc_bytes)."
)


def show(results: dict[str, Any], path: Path) -> None:
    rule = "no forks"
    if results["selection"] is not None:
        rule = f"{results['selection']} selection, r = {results['budget']}"
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    benchmarks = {name: found for name, found in results["tasks"].items() if name != "perplexity"}
    told, drawn = benchmark_remarks(benchmarks), []
    if "budgets" in results:
        is_causal = results["selection"] != "block"
        title = f"{results['selection']} selection, proportional budget"
        console.print(budget_table(results["budgets"], title=title, is_causal=is_causal))
        for line in budget_remarks(results["budgets"]):
            console.print(line, soft_wrap=True)
        told = [f"With r = {results['budget']}, {line}" for line in told]
        drawn.append(draw_budgets(path))
    elif "perplexity" in results["tasks"]:
        console.print(table_of(results["tasks"]["perplexity"], title=rule))
        for line in remarks(results["tasks"]["perplexity"]):
            console.print(line, soft_wrap=True)
        drawn.append(draw_perplexity(path))
    if benchmarks and "budgets" not in results:
        console.print(
            benchmark_table(benchmarks, title=f"{rule}, proportional budget" if results["selection"] else rule)
        )
        told += [METRICS_EXPLAINED] if any("accuracy_sum" in found for found in benchmarks.values()) else []
    for line in told:
        console.print(line, soft_wrap=True, markup=False)
    drawn += draw_benchmarks(path) if benchmarks else []
    if results["failed"]:
        console.print(failed_table(results["failed"]))
    figures = [str(figure) for figure in drawn if figure]
    named = f" and {', '.join(figures)}" if figures else "; for figures, pip install 'thoughtbubbles[analysis]'"
    console.print(f"Written: {path}{named}", soft_wrap=True, markup=False)


def failed_table(failed: dict[str, str]) -> Table:
    table = Table(title="could not run")
    table.add_column("task")
    table.add_column("why", overflow="fold")
    for name, why in failed.items():
        table.add_row(name, Text(why))  # as text: a file's name may have brackets
    return table


def benchmark_table(benchmarks: dict[str, Any], *, title: str) -> Table:
    """Fits in 80 columns."""
    table = Table(title=title)
    table.add_column("", min_width=14, overflow="fold")
    for heading in ("docu-\nments", *WAYS.values(), "chance"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in benchmarks.values():
        _add(table, found["title"], found)
        for group, parts in found.get("by", {}).items():
            if len(parts) <= FEW:
                for name, part in parts.items():
                    _add(table, f"  {group}: {name}", part)
    return table


def _add(table: Table, title: str, found: dict[str, Any]) -> None:
    ways = [percent(found[way]) if way in found else "" for way in WAYS]
    chance = "" if found.get("chance") is None else f"{100 * found['chance']:.1f}"
    table.add_row(Text(title), f"{found['documents']:,}", *ways, chance)  # as text: a name may have brackets


def percent(value: dict[str, Any]) -> str:
    error = value["standard_error"]
    return f"{100 * value['mean']:.2f}" + ("" if error is None else f"\n± {100 * error:.2f}")


def benchmark_remarks(benchmarks: dict[str, Any]) -> list[str]:
    """Facts that are not in a table, as sentences."""
    lines = []
    for found in benchmarks.values():
        if "perplexity" in found:
            error = found["perplexity"]["standard_error"]
            plus_minus = "" if error is None else f" ± {error:,.2f}"
            lines.append(
                f"{found['title']}: perplexity of the last word {found['perplexity']['mean']:,.2f}{plus_minus}."
            )
        for group, parts in found.get("by", {}).items():
            if len(parts) > FEW:
                ranked = sorted(parts, key=lambda name: parts[name]["accuracy"]["mean"])
                low, high = (f"{name} {parts[name]['accuracy']['mean']:.1%}" for name in (ranked[0], ranked[-1]))
                lines.append(f"{found['title']} by {group}: from {low} to {high}; all {len(parts)} in results.json.")
        cut = found["truncated"]
        if cut["documents"]:
            lines.append(
                f"{found['title']}: {cut['documents']:,} of {found['documents']:,} documents were longer than the "
                f"model's context length; {cut['tokens']:,} tokens were truncated on the left."
            )
    return lines
