"""Where the time of a step goes: a trace, and a table of the time per kind of kernel.

Kernels are sorted into kinds by name, with the patterns below. Without a GPU, operators take the place of kernels. All
numbers are read from the trace itself, so the table and the trace always agree.
"""

import gzip
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, schedule

# The first pattern that matches a name decides. The names are of CUDA kernels, Triton kernels (Inductor's are named
# triton_ and the operators they fuse) and, without a GPU, operators (aten::).
KINDS = {
    "communication": r"nccl|c10d|gloo|all_?reduce|all_?gather|reduce_?scatter",
    "optimizer": r"multi_tensor(?!.*copyfunctor)|adam|_foreach_|muon|aten::lerp",
    "attention": r"flash|fmha|sdpa_|scaled_dot_product|attention|attend|attn|^turn$|^_(query|key)_gradient$",
    "loss and head": r"nll|loss|cross_entropy|log_?sum_?exp|softmax|embedding|^_mixture$",
    "matrix products": r"gemm|gemv|nvjet|cublas|cutlass|xmma|splitk|aten::(mm|addmm|bmm|baddbmm|matmul|linear)$",
    "fork layers": r"fork|select|bubble|sort|radix|topk|scan|cumsum|gather|scatter|index_|indexing|^_(ranks|pack)$|"
    r"aten::(index|where)",
    "copies and casts": r"^mem(cpy|set)|copyfunctor|direct_copy|copy_kernel|catarray|fillfunctor|"
    r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|fill_|zero_)$",
    "norms and elementwise": r"triton_|norm|elementwise|reduce_kernel|^_gelu|^_column_sums$|"
    r"aten::(add|sub|mul|div|neg|exp|log|gelu|relu|sum|mean|sigmoid|tanh|pow|sqrt|rsqrt|clamp|masked_fill)",
}
OTHER, IDLE = "other", "idle"
TOP = 15  # kernels that are listed individually

_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in KINDS.items()}


class ProfileRow(NamedTuple):
    name: str
    ms: float  # per step
    share: float  # of the step
    launches: float  # per step


class Profile(NamedTuple):
    ms: float  # per step, while profiled: slightly more than usual
    kinds: tuple[ProfileRow, ...]  # longest first, idle last; they add up to `ms`
    top: tuple[ProfileRow, ...]  # the longest kernels


class Timing(NamedTuple):
    """A kernel (or an operator) in the trace; `own` is its time in microseconds that is not counted for another one."""

    name: str
    own: float


def profile_steps(
    step: Callable[[], object], *, steps: int, device: torch.device, trace: Path | None = None
) -> Profile:
    """Profiles `steps` calls of `step`, after one uncounted call to warm up the profiler.

    The trace is written as JSON for Chrome and Perfetto, compressed if its name ends in .gz. Idle time is the time in
    which no kernel runs on a GPU, and the time outside operators (Python) on a CPU.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    plan = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=activities, schedule=plan, acc_events=True) as watched:
        step()
        _wait(device)
        watched.step()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(device)
        seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json" if trace is None else trace
        path.parent.mkdir(parents=True, exist_ok=True)
        watched.export_chrome_trace(str(path))
        events = read_trace(path)
    return summarize(events, on_gpu=on_gpu, steps=steps, milliseconds=seconds * 1e3)


def read_trace(path: Path) -> list[dict[str, Any]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(content)["traceEvents"]


def summarize(events: list[dict[str, Any]], *, on_gpu: bool, steps: int, milliseconds: float) -> Profile:
    """The table of a trace whose steps took `milliseconds` in total."""
    spans = list(_kernels(events) if on_gpu else _operators(events))
    busy = sum(span.own for span in spans) / 1e3
    milliseconds = max(milliseconds, busy)  # the two come from different clocks
    kinds = _rows(((kind_of(span.name), span.own) for span in spans), steps, milliseconds)
    idle = milliseconds - busy
    return Profile(
        ms=milliseconds / steps,
        kinds=(*kinds, ProfileRow(IDLE, idle / steps, idle / milliseconds, 0)),
        top=_rows(spans, steps, milliseconds)[:TOP],
    )


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), OTHER)


def _kernels(events: Iterable[dict[str, Any]]) -> Iterator[Timing]:
    """Where kernels overlap, as communication does with computation, the time counts for the one that started first."""
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    until = 0.0
    for event in sorted(on_device, key=lambda e: float(e["ts"])):
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        yield Timing(event["name"], max(0.0, end - max(begin, until)))
        until = max(until, end)


def _operators(events: Iterable[dict[str, Any]]) -> Iterator[Timing]:
    """Operators call others: the time of each excludes the operators that it calls."""
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event["tid"]].append(event)
    for thread in by_thread.values():
        thread.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        own = [float(event["dur"]) for event in thread]
        inside: list[tuple[int, float]] = []  # the operators that have not ended, and their ends
        for index, event in enumerate(thread):
            begin, duration = float(event["ts"]), float(event["dur"])
            while inside and inside[-1][1] <= begin:
                inside.pop()
            if inside:
                own[inside[-1][0]] -= duration
            inside.append((index, begin + duration))
        yield from (Timing(event["name"], max(0.0, time)) for event, time in zip(thread, own, strict=True))


def _rows(spans: Iterable[tuple[str, float]], steps: int, milliseconds: float) -> tuple[ProfileRow, ...]:
    times: dict[str, list[float]] = defaultdict(list)
    for name, own in spans:
        times[name].append(own)
    rows = []
    for name, owns in times.items():
        ms = sum(owns) / 1e3
        rows.append(ProfileRow(name, ms / steps, ms / milliseconds, len(owns) / steps))
    return tuple(sorted(rows, key=lambda row: -row.ms))


def tables(found: Profile, rates: dict[str, str]) -> list[Table]:
    """For a terminal: throughput, time per kind of kernel, and the longest kernels."""
    return [_rates(rates), *(_show(title, rows) for title, rows in _parts(found))]


def markdown(found: Profile, rates: dict[str, str]) -> str:
    """The same tables as Markdown."""
    lines = ["# Profile of a training step", "", *_markdown(list(rates), [list(rates.values())])]
    for title, rows in _parts(found):
        cells = [[row.name.replace("|", "\\|"), *_cells(row)] for row in rows]
        lines += ["", *_markdown([title, *HEADINGS], cells)]
    return "\n".join(lines) + "\n"


HEADINGS = ("ms per step", "share", "launches")


def _parts(found: Profile) -> list[tuple[str, tuple[ProfileRow, ...]]]:
    whole = ProfileRow("whole step, while profiled", found.ms, 1.0, sum(row.launches for row in found.kinds))
    return [("kind", (*found.kinds, whole)), ("longest", tuple(row._replace(name=row.name[:100]) for row in found.top))]


def _cells(row: ProfileRow) -> list[str]:
    return [f"{row.ms:.3f}", f"{row.share:.1%}", f"{row.launches:,.0f}" if row.launches else ""]


def _markdown(headings: list[str], rows: list[list[str]]) -> list[str]:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _rates(rates: dict[str, str]) -> Table:
    table = Table(*rates)
    table.add_row(*rates.values())
    return table


def _show(title: str, rows: Iterable[ProfileRow]) -> Table:
    table = Table(title, *HEADINGS)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.name, *_cells(row))
    return table


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
