"""The training step on a GPU: milliseconds, TFLOP/s, memory, and whether two runs are bit-identical.

python benchmarks/train_step.py                                        all cases: minutes
python benchmarks/train_step.py --cases 150m-plain 150m-r2-causal-residual
python benchmarks/train_step.py --protocol long --cases plain r2
    rows of `thoughtbubbles reproduce long` (default: all): docs/results/long/steps.json, which its report reads. Rows
    that are measured already stay. Nothing else may run on the GPU

Measures as `thoughtbubbles bench` (see its help): every case is checked against the reference path before it is timed.
Writes the results, with ratios that show the cost of forking (`bars`).
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import known_rows, source, write_results, write_rows

from thoughtbubbles.bench.cases import Case, default_cases, find_cases
from thoughtbubbles.bench.measure import Failed, Measured, product_tflops, run_cases
from thoughtbubbles.bench.table import line, show
from thoughtbubbles.provenance import device_name
from thoughtbubbles.recipes.reproduce.protocols import PROTOCOLS, protocol
from thoughtbubbles.recipes.reproduce.records import STEPS_FILE
from thoughtbubbles.train.config import ComputeConfig

FOR_REPORT = Path(__file__).parents[1] / "docs" / "results"
VOCABULARY = {"short": 50257}  # of the text behind docs/results; else 8,192

# Description, case in the numerator, case in the denominator, and the number that is compared.
BARS = [
    ("time, mixture / residual merge", "150m-r2-causal-mixture", "150m-r2-causal-residual", "milliseconds"),
    ("time, causal / block selection", "150m-r2-causal-residual", "150m-r2-block-residual", "milliseconds"),
    ("time, private forks / forks seen by all", "150m-r2-private-residual", "150m-r2-causal-residual", "milliseconds"),
    ("time, private forks / forks seen by all", "1.9b-r2-private-residual", "1.9b-r2-causal-residual", "milliseconds"),
    *(
        ("TFLOP/s, bubbles / plain", f"{size}-{form}", f"{size}-plain", "tflops")
        for size, form in (
            ("150m", "r2-causal-residual"),
            ("150m", "r2-causal-mixture"),
            ("1.9b", "r2-causal-residual"),
            ("150m", "r4-causal-residual"),
            ("150m", "r4-causal-mixture"),
        )
    ),
    *(
        ("TFLOP/s, bubbles / plain on as many streams", f"{size}-r2-causal-residual", f"{size}-plain-double", "tflops")
        for size in ("150m", "1.9b")
    ),
]
WATCHED = ["150m-plain", "150m-r2-causal-residual", "150m-r4-causal-residual", "1.9b-plain", "1.9b-r2-causal-residual"]
STEPS = ["1.9b-r2-causal-residual", "1.9b-plain", "150m-r2-causal-residual", "150m-plain"]


def bars(found: list[Measured | Failed]) -> list[dict[str, Any]]:
    """Ratios of forward + backward between two cases, then of the full step to forward + backward in one, for the cases
    that were measured."""
    cases = {case.name: case for case in found if isinstance(case, Measured)}
    ratios = [
        {
            "what": what,
            "case": above,
            "over": below,
            "ratio": getattr(cases[above].forward_backward, number) / getattr(cases[below].forward_backward, number),
        }
        for what, above, below, number in BARS
        if above in cases and below in cases
    ]
    return ratios + [
        {
            "what": "time, full step / forward + backward",
            "case": name,
            "over": name,
            "ratio": cases[name].step.milliseconds / cases[name].forward_backward.milliseconds,
        }
        for name in STEPS
        if name in cases
    ]


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def cases_of(name: str, rows: list[str] | None) -> list[Case]:
    """The models of a protocol with one speed, trained with AdamW: not those whose forks begin later or whose budgets
    are drawn."""
    found = protocol(name)
    vocab_size = VOCABULARY.get(name, 8192)
    settings: dict[str, Any] = {"protocol": name, "seed": 0, "data": "", "n_tokens": 1, "vocab_size": vocab_size}
    configs = {row: found.config(row, **settings) for row in rows or found.rows}
    return [
        Case(row, config.model, found.rows_per_step)
        for row, config in configs.items()
        if not config.budgets
        and not config.forks_from
        and found.rows[row].ensemble == 1
        and config.optim.kind == "adamw"
    ]


def write_step(case: Measured, path: Path, kind: dict[str, Any]) -> None:
    times = {"milliseconds": case.step.milliseconds, "low": case.step.low, "high": case.step.high}
    write_rows(path, kind, {case.name: times | source()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument(
        "--cases", nargs="+", help="see `thoughtbubbles bench --list` (default: its defaults); rows of a protocol"
    )
    parser.add_argument("--protocol", choices=list(PROTOCOLS), help="measure the rows of this protocol")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--data", type=Path, help="a prepared folder (default: random tokens)")
    parser.add_argument("--residual", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--out", type=Path, help="folder (default: benchmarks/results, or docs/results of a protocol)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark times a GPU, but none is available; use --device cpu to run without")
    if arguments.protocol:
        if wrong := sorted(set(arguments.cases or ()) - set(protocol(arguments.protocol).rows)):
            parser.error(f"--cases: {arguments.protocol} has no rows {', '.join(wrong)}")
        cases = cases_of(arguments.protocol, arguments.cases)
        if not cases:
            parser.error("--cases: none of these rows has one speed, and AdamW")
        steps = (arguments.out or FOR_REPORT) / arguments.protocol / STEPS_FILE
        size = {"tokens": cases[0].rows * cases[0].config.block_size, "vocab_size": cases[0].config.vocab_size}
        kind = {"device": device_name(arguments.device), "torch": torch.__version__, **size}
        if arguments.residual != "float32":
            parser.error(f"--residual {arguments.residual}: rows of a protocol are trained with float32")
        known_rows(steps, kind)  # before anything is measured
    else:
        cases = find_cases(arguments.cases or default_cases(arguments.device))
    device = torch.device(arguments.device)
    product = product_tflops(device)
    found: list[Measured | Failed] = []

    def keep(case: Measured | Failed) -> None:
        """Writes the results after every case, so that an interrupted run loses nothing."""
        found.append(case)
        print(line(case), flush=True)
        if arguments.protocol:
            if isinstance(case, Measured):
                write_step(case, steps, kind)
            return
        numbers = {
            "triton": triton_version(),
            "repeats": arguments.repeats,
            "residual": arguments.residual,
            "product_tflops": product,
            "bars": bars(found),
            "cases": [asdict(case) for case in found],
        }
        name = "train_step" if arguments.residual == "float32" else "train_step-bf16-residual"
        write_results(name, arguments.device, numbers, to=arguments.out)

    run_cases(
        cases,
        device,
        product=product,
        repeats=arguments.repeats,
        data=arguments.data,
        compute=ComputeConfig(residual=arguments.residual),
        watched=WATCHED,
        report=keep,
    )
    show(found, product)


if __name__ == "__main__":
    main()
