"""`thoughtbubbles audit`: a table for people or one line of JSON, and a verdict."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thoughtbubbles.analysis.audit import VERSION, Audit, Change, audit, extent
from thoughtbubbles.analysis.sample import read_text
from thoughtbubbles.analysis.subjects import open_model
from thoughtbubbles.distributed import find_device
from thoughtbubbles.files import short_name
from thoughtbubbles.generate.command import DEVICES
from thoughtbubbles.written import signed

ROUNDING = 1e-10
EXPLAINED = (
    "comparisons: of one prediction, with the true future and with a false one. distance: of a prediction from the "
    "first token that was changed. moved: any log-probability changed. log p: of the true next token. KL: from the "
    "prediction with the true future to that with a false one. loss: with the true future minus with a false one, "
    "below 0 if knowing the future helps. All in nats."
)


def run(
    checkpoint: Path | None,
    *,
    selection: str | None,
    budgets: Sequence[str],
    text: Path | None,
    tokens: int | None,
    rows: int,
    device: str,
    dtype: str,
    as_json: bool,
) -> str | None:
    """Prints the results; returns what leaks, in one line, or None."""
    written = None if text is None else read_text(text)
    precision = {"float64": torch.float64, "float32": torch.float32}[dtype]
    with Console(stderr=True).status("comparing predictions …"):  # shown on terminals only
        opened = open_model(checkpoint, device=find_device(device, among=DEVICES), dtype=precision)
        if written is not None and opened.tokenizer is None:
            raise ValueError(f"--text {short_name(str(text))}: {opened.name} has no tokenizer; leave --text out")
        found = [
            audit(
                opened.model,
                written,
                tokenizer=opened.tokenizer,
                selection=selection,
                budget=budget,
                rows=rows,
                tokens=tokens,
            )
            for budget in budgets or (None,)
        ]
    leaking = [each for each in found if each.leaks]
    if as_json:
        described = {"version": VERSION, "model": opened.name, "leaks": bool(leaking)}
        print(json.dumps({**described, "audits": [each.as_dict() for each in found]}))
    else:
        show(opened.name, found, uses_random_ids=opened.tokenizer is None)
    return "; ".join(verdict(each) for each in leaking) or None


def show(name: str, found: Sequence[Audit], *, uses_random_ids: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for each in found:
        console.print(table(each, title=f"{name}: {each.subject}"))
    first = found[0]
    tokens = "random ids" if uses_random_ids else "text"
    console.print(
        f"{first.rows} rows of {first.tokens} tokens of {tokens}, in {first.dtype}; at {first.cuts} positions of each, "
        f"all tokens from there on were replaced. {EXPLAINED}",
        soft_wrap=True,
    )
    if first.tolerance:
        console.print(
            f"Changes of a log-probability up to {first.tolerance:g}, the tolerance of {first.dtype}, are counted as "
            "rounding and not as moved. In float64 it is 0.",
            soft_wrap=True,
        )
    for each in found:
        if not each.leaks:
            console.print(verdict(each), soft_wrap=True)


def table(each: Audit, *, title: str) -> Table:
    """Fits in 80 columns."""
    found = Table(title=Text(title))  # as text: a name may have brackets
    for heading in ("distance", "compari-\nsons", "moved", "largest\n|Δ log p|", "mean KL", "largest\nKL", "Δ loss"):
        found.add_column(heading, justify="right", no_wrap=True)
    for part in each.by_distance:
        found.add_row(part.label, *_cells(part))
    found.add_section()
    found.add_row("all", *_cells(each.total))
    return found


def _cells(part: Change) -> list[str]:
    numbers = (part.largest, part.mean_kl, part.largest_kl)
    shown = [f"{number:.2g}" for number in numbers]
    return [f"{part.comparisons:,}", f"{part.share:.1%}", *shown, signed(part.loss_difference, ".2g")]


def verdict(each: Audit) -> str:
    total = each.total
    found = extent(moved=total.moved, comparisons=total.comparisons, reach=each.reach)
    if not each.leaks:
        return f"no leak found ({each.subject}): {found}"
    line = f"leak ({each.subject}): {found}; log p of the next token moves by up to {total.largest:.2g} nats"
    if each.dtype == "float64" and total.largest_any < ROUNDING:
        line += f" (all changes are below {ROUNDING:g}: perhaps rounding that depends on other tokens, as with experts)"
    return line
