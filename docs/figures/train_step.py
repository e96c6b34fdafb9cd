"""Draw train_step-MACHINE.png from each benchmarks/results/train_step-MACHINE.json: TFLOP/s and milliseconds of a case.

    python docs/figures/train_step.py          write the figures beside this file; none where nothing was measured
    python docs/figures/train_step.py --check  exit 1 if a figure was drawn from other numbers, or is missing

A drawing differs a little between versions of matplotlib, so what is compared is a checksum of its numbers, which it
carries.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
PLAIN, BUBBLES, COPIES, STEP, INK = "#2F6DB5", "#C2502E", "#A9AEB8", "#7A50B3", "#23272F"


def measured(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in record["cases"] if "error" not in case]


def checksum(record: dict[str, Any]) -> str:
    """Of all that is drawn."""
    drawn = [record["machine"], record["product_tflops"], measured(record)]
    return f"numbers {zlib.crc32(json.dumps(drawn).encode()):08x}"


def colour(name: str) -> str:
    return PLAIN if "plain" in name else COPIES if "copy" in name else BUBBLES


def draw(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = measured(record)
    names, places = [case["name"] for case in cases], range(len(cases))
    size = (10, 1.4 + 0.42 * len(cases))
    figure, (rate, time) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")

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
    ends = time.barh(places, rest, left=passes, color=STEP, label="clipping and AdamW")
    time.bar_label(ends, labels=[f" {step:.4g}" for step in steps], fontsize=8, color=INK)
    time.set_xlim(0, 1.12 * max(steps))
    time.set_xlabel("milliseconds per step")
    time.legend(fontsize=8, loc="upper right")
    for panel in (rate, time):
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    figure.suptitle(f"One training step, {record['machine']}", fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Description": checksum(record), "Software": None})
    plt.close(figure)


def main() -> int:
    good = True
    for source in sorted(RESULTS.glob("train_step-*.json")):
        record, path = json.loads(source.read_text()), HERE / f"{source.stem}.png"
        if record["benchmark"] != "train_step":
            continue
        if sys.argv[1:] != ["--check"]:
            draw(record, path)
        elif not path.is_file() or checksum(record).encode() not in path.read_bytes():
            good = False
            print(f"{path.name} is not drawn from {source.name}: run python docs/figures/train_step.py")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
