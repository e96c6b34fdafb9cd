"""The commands `bench` and `inspect` with their options. They import torch when they run, so that --help is fast."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from thoughtbubbles.files import SHIPPED, or_shipped


def bench(
    cases: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[CASE …]")] = (),
    /,
    *,
    list: bool = False,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    rows: int | None = None,
    tokens: int | None = None,
    repeats: int | None = None,
    quick: bool = False,
    data: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure how fast a model trains on this machine: forward and backward, and the full step, side by side.

    Before a case is timed, its loss and gradients are checked against the slow reference path. A case that fails, for
    example out of memory, is reported, and the others continue.

    Args:
        cases: What to measure, each as SIZE-FORM, such as 150m-plain 150m-r2-causal-residual. By default, with a GPU,
            all forms of 150m and some of 1.9b (some minutes); without one, forms of tiny.
        list: Only show all sizes and forms.
        device: auto: cuda if there is one, else mps, else cpu.
        rows: Rows per batch instead of the size's own. Fewer need less memory.
        tokens: Tokens per row instead of the size's own (512 from 150m on). A plain-double row has twice as many.
        repeats: Number of runs of which the median is taken; 20 on a GPU, 10 elsewhere.
        quick: A first impression: 3 repeats and, unless cases are named, only plain and r2-causal-residual.
        data: Measure on a folder that `thoughtbubbles prepare` wrote; by default on random tokens with the frequencies
            of words.
        out: Also write all numbers to this file, as JSON.
    """
    from thoughtbubbles.bench.table import bench as run
    from thoughtbubbles.bench.table import list_cases

    if list:
        list_cases()
        return
    run(cases, device=device, rows=rows, tokens=tokens, repeats=repeats, data=data, out=out, quick=quick)


def inspect(
    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None,
    /,
    *,
    tokens: int | None = None,
    rows: int = 1,
    copies: tuple[int, ...] | None = None,
    budgets: tuple[float, ...] | None = None,
    reach: int | None = None,
) -> None:
    """Show what a model costs: parameters, FLOPs, streams at each layer and memory, against plain GPT and copy-N.

    Args:
        model: A size by name (nano, tiny, 150m, 319m, 772m, 1.9b; 150m-paper has the paper's block selection), or a
            model folder, a checkpoint of a run, or a run (its newest checkpoint). Default: the model in the package.
        tokens: Tokens per row; by default the model's context length.
        rows: Rows per batch, for the memory that the backward needs.
        copies: The copy-N baselines to show; by default 3 and 5 for a size.
        budgets: The budgets (streams per token) to show; by default 2 and 4 for a size, the model's own for a folder.
        reach: Also show each budget with forks that only so many later tokens can see (`fork_reach`); 0: private ones.
    """
    from thoughtbubbles.bench.costs import inspect_model

    if model is None:
        or_shipped(None, option="MODEL")
    inspect_model(model or SHIPPED, tokens=tokens, rows=rows, copies=copies, budgets=budgets, reach=reach)
