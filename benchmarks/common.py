"""Shared code of the benchmarks: interleaved timing, peak memory, and result files."""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from thoughtbubbles.files import read_object, write_json
from thoughtbubbles.provenance import commit, device_name

RESULTS = Path(__file__).parent / "results"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(
    variants: dict[str, Callable[[], object]], *, device: str, repeats: int, warmup: int = 2
) -> dict[str, float]:
    """Median time of each variant. Their runs are interleaved, so that a slow phase of the machine affects all."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(warmup + repeats):
        for name, run in variants.items():
            synchronize(device)
            begin = time.perf_counter()
            run()
            synchronize(device)
            if repeat >= warmup:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def extra_peak_bytes(run: Callable[[], object], *, device: str) -> int:
    """Peak memory during `run`, above what was allocated before it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of this process
    except OSError as error:
        raise RuntimeError(
            "peak memory on the CPU is measured through Linux's /proc, which is not available here"
        ) from error
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _without_places(arguments: list[str]) -> list[str]:
    """Without the folder for results, and with names for the others: they do not affect the results."""
    kept = [word for before, word in pairwise(["", *arguments]) if "--out" not in (before, word)]
    names = {"--data": "DIR", "--data-dir": "DIR", "--runs": "RUNS"}
    return [names.get(before, word) for before, word in pairwise(["", *kept])]


def command() -> str:
    """The command line of this run."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_without_places(sys.argv[1:])])


def slug(name: str) -> str:
    """A machine's name as part of a file name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def write_results(benchmark: str, device: str, numbers: dict[str, Any], *, to: Path | None) -> Path:
    name = device_name(device)
    path = (to or RESULTS) / f"{benchmark}-{slug(name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": benchmark,
        **source(),
        "machine": name,
        "torch": torch.__version__,
        **numbers,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def known_rows(path: Path, kind: dict[str, Any]) -> dict[str, Any]:
    """Rows of a protocol that are measured already, all in one way: `kind` has the device, versions and sizes."""
    if not path.is_file():
        return {}
    known = read_object(path)
    if other := {name: known.get(name) for name in kind if known.get(name) != kind[name]}:
        raise SystemExit(f"{path} was measured with {other}, not {kind}: give another --out, or remove it")
    return dict(known["rows"])


def write_rows(path: Path, kind: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """Adds these rows to those that are there, or replaces them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**kind, "rows": known_rows(path, kind) | rows})


def source() -> dict[str, str]:
    """Of a number that this run measures."""
    return {"command": command(), "commit": commit() or "unknown"}
