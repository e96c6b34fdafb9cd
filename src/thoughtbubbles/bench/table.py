"""Output of `thoughtbubbles bench`: a line when a case is done, tables at the end, and a JSON file."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from thoughtbubbles.bench.cases import ROWS, default_cases, find_cases, forms
from thoughtbubbles.bench.measure import Failed, Measured, product_tflops, run_cases
from thoughtbubbles.distributed import find_device
from thoughtbubbles.files import write_json
from thoughtbubbles.provenance import device_name, provenance

WIDTH = 130  # outside a terminal


def bench(
    names: Sequence[str],
    *,
    device: str,
    rows: int | None,
    tokens: int | None,
    repeats: int | None,
    data: Path | None,
    out: Path | None,
    quick: bool,
) -> None:
    """The command. Raises ValueError at the end if a case failed, after showing the others."""
    kind = find_device(device)
    names = list(names) or default_cases(kind, quick=quick)
    cases = find_cases(names, rows=rows, tokens=tokens)
    if repeats is None:
        repeats = 3 if quick else 20 if kind == "cuda" else 10
    if out is not None and not out.parent.is_dir():  # fail now, not after minutes
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist; create it, or give another")

    said = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    said.print(f"{device_name(kind)}, {len(cases)} case{'s' * (len(cases) > 1)}, {repeats} repeats")
    with said.status("measuring"):  # a spinner in a terminal
        product = product_tflops(torch.device(kind))
        found = run_cases(
            cases,
            torch.device(kind),
            product=product,
            repeats=repeats,
            data=data,
            report=lambda case: said.print(line(case), markup=False),
        )
    show(found, product)
    if out is not None:
        write_json(
            out,
            {
                **provenance(),
                "device": device_name(kind),
                "product_tflops": product,
                "cases": [asdict(case) for case in found],
            },
        )
        print(f"Written: {out}")
    if failed := [case.name for case in found if isinstance(case, Failed)]:
        raise ValueError(f"{len(failed)} of {len(found)} cases failed: {', '.join(failed)}")


def list_cases() -> None:
    print("A case is SIZE-FORM.\n")
    print("size   rows × tokens")
    for size, rows in ROWS.items():
        print(f"{size:<6} {rows} × {forms(size)['plain'].block_size}")
    print("\nform")
    for name, config in forms("150m").items():
        bubbles = f"{config.selection} selection, {config.merge} merge, {config.budget:g} streams per token"
        if config.fork_reach == 0:
            bubbles += ", forks seen by their own bubble alone"
        words = {
            "plain": "no forks",
            "plain-double": "no forks, rows twice as long",
            "copy-3": "three copies per token",
            "feedback": "every token forks once, forks get feedback, a gate per head: the form that we recommend",
            "gate": "no forks, a gate per head",
        }
        print(f"{name:<20} {words.get(name, bubbles)}")
    print(f"\nDefault: {' '.join(default_cases('cuda'))} with a GPU, {' '.join(default_cases('cpu'))} without.")


def line(case: Measured | Failed) -> str:
    if isinstance(case, Failed):
        return f"{case.name}: {case.error}"
    return (
        f"{case.name}: forward and backward {case.forward_backward.milliseconds:.1f} ms, "
        f"step {case.step.milliseconds:.1f} ms, {case.forward_backward.tflops:.3g} TFLOP/s"
    )


def show(found: Sequence[Measured | Failed], product: float) -> None:
    speed = _table(
        "Speed", "\ncase", "rows ×\ntokens", "forward +\nbackward ms", "\n10–90 %", "full\nstep ms", "\n10–90 %"
    )
    _columns(speed, "\ntokens/s", "\nTFLOP/s", "of product\nrate")
    rest = _table("Memory, compilation, check against the reference", "\ncase", "peak GiB\nfwd + bwd", "peak GiB\nstep")
    _columns(rest, "\ncompile s", "loss\nerror", "gradient\nerror", "other\ndecisions", "same bits\ntwice")
    for case in found:
        if isinstance(case, Failed):
            speed.add_row(case.name, "failed")
            continue
        passes, step, check = case.forward_backward, case.step, case.check
        speed.add_row(
            case.name,
            f"{case.rows} × {case.tokens}",
            f"{passes.milliseconds:.1f}",
            f"{passes.low:.1f}–{passes.high:.1f}",
            f"{step.milliseconds:.1f}",
            f"{step.low:.1f}–{step.high:.1f}",
            f"{step.tokens_per_second:,.0f}",
            f"{passes.tflops:.3g}",
            f"{passes.share_of_product:.1%}",
        )
        rest.add_row(
            case.name,
            *("–" if gib is None else f"{gib:.1f}" for gib in (passes.peak_memory_GiB, step.peak_memory_GiB)),
            f"{case.compile_seconds:.1f}",
            f"{check.loss:.1e}",
            f"{check.gradient:.1e}",
            f"{check.decisions:.2%}",
            "yes" if case.same_bits_twice else "no",
        )
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(speed, rest)
    for case in found:
        if isinstance(case, Failed):
            console.print(line(case), markup=False, soft_wrap=True)
    console.print(f"{EXPLAINED}\n\nA large matrix product reaches {product:.4g} TFLOP/s here.", soft_wrap=True)


EXPLAINED = """\
forward + backward  milliseconds for the loss and all gradients of the batch: median, and 10th to 90th percentile.
                    With bfloat16 products it includes the cast of the float32 weights.
full step           also gradient norm, clipping and AdamW; tokens/s are those of the full step
TFLOP/s             model FLOPs (as counted by `thoughtbubbles inspect`) per second of forward + backward; padding and
                    recomputation do not count
of product rate     the same, relative to one large matrix product in this process
peak GiB            peak memory, including weights
compile s           how much longer first calls took than later ones; less if the compiler finds kernels in its cache
loss, gradient      relative errors of the loss and gradient of one row against the reference path in float32
other decisions     share of fork candidates on which the reference decides differently, because of rounding
same bits twice     whether two runs on the same input give bit-identical gradients"""


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    _columns(table, *headings)
    return table


def _columns(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="left" if heading.endswith("case") else "right", no_wrap=True)
