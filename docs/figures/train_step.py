"""Draw train_step-MACHINE.png from each benchmarks/results/train_step-MACHINE.json: TFLOP/s and milliseconds of a case.

    python docs/figures/train_step.py          write the figures beside this file; none where nothing was measured
    python docs/figures/train_step.py --check  exit 1 if a figure was drawn from other numbers, or is missing

A drawing differs a little between versions of matplotlib, so what is compared is a checksum of its numbers and the
number of its style, which it carries.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from thoughtbubbles.plotting import BLUE, FAINT, INK, PINK, RED, checksum, panels, save

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
STYLE = 1  # counts changes to the drawing


def measured(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in record["cases"] if "error" not in case]


def description(record: dict[str, Any]) -> str:
    """With a checksum of all that is drawn."""
    return checksum(json.dumps([record["machine"], record["product_tflops"], measured(record)]), style=STYLE)


def colour(name: str) -> str:
    return BLUE if "plain" in name else FAINT if "copy" in name else RED


def draw(record: dict[str, Any]) -> Any:
    cases = measured(record)
    names, places = [case["name"] for case in cases], range(len(cases))
    figure, ((rate, time),) = panels(1, 2, width=10, height=1.4 + 0.42 * len(cases), sharey=True)

    speeds = [case["forward_backward"]["tflops"] for case in cases]
    bars = rate.barh(places, speeds, color=[colour(name) for name in names])
    shares = [f" {case['forward_backward']['share_of_product']:.0%}" for case in cases]
    rate.bar_label(bars, labels=shares, fontsize=8, color=INK)
    product = record["product_tflops"]
    rate.axvline(product, color=INK, linestyle="--", linewidth=1)
    rate.text(product, -0.75, f"one large matrix product: {product:.3g} ", ha="right", va="center", fontsize=8)
    rate.set_yticks(places, names, fontsize=9)
    rate.set_ylim(len(cases) - 0.4, -1.1)  # the first on top
    rate.set_xlim(0, 1.06 * max(product, *speeds))
    rate.set_xlabel("TFLOP/s, forward + backward")

    passes = [case["forward_backward"]["milliseconds"] for case in cases]
    steps = [case["step"]["milliseconds"] for case in cases]
    # A step can come out a hair faster than its parts on a noisy machine; then nothing is left to draw for the rest.
    rest = [max(0.0, step - part) for step, part in zip(steps, passes, strict=True)]
    time.barh(places, passes, color=[colour(name) for name in names])
    ends = time.barh(places, rest, left=passes, color=PINK, label="clipping and AdamW")
    time.bar_label(ends, labels=[f" {step:.4g}" for step in steps], fontsize=8, color=INK)
    time.set_xlim(0, 1.12 * max(steps))
    time.set_xlabel("milliseconds per step")
    time.legend(fontsize=8, loc="upper right")
    for panel in (rate, time):
        panel.grid(axis="y", visible=False)
    figure.suptitle(f"One training step, {record['machine']}", fontsize=11)
    return figure


def main() -> int:
    good = True
    for source in sorted(RESULTS.glob("train_step-*.json")):
        record, path = json.loads(source.read_text()), HERE / f"{source.stem}.png"
        if record["benchmark"] != "train_step":
            continue
        if sys.argv[1:] != ["--check"]:
            save(partial(draw, record), path, description=description(record))
        elif not path.is_file() or description(record).encode() not in path.read_bytes():
            good = False
            print(f"{path.name} is not drawn from {source.name}: run python docs/figures/train_step.py")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
