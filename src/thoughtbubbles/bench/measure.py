"""Times a training step: forward and backward, and the full step with clipping and AdamW.

The timings include everything in a real step: float32 master weights and gradients, the cast of the weights to
bfloat16, a float32 residual unless configured otherwise. Results are checked before anything is timed
(`bench/check.py`).

FLOPs are those of `model/cost.py`: model FLOPs, which do not include recomputation and padding. They are compared with
the rate of one large matrix product, measured in the same process.
"""

import gc
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thoughtbubbles.bench.cases import SEED, Case, draw
from thoughtbubbles.bench.check import Agreement, BenchBatch, WrongResult, compare, reference_of, require
from thoughtbubbles.data.loader import Batch
from thoughtbubbles.distributed import World
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import cost
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.config import ComputeConfig, OptimConfig
from thoughtbubbles.train.data import to_device
from thoughtbubbles.train.kernel_warmup import warm_up_kernels
from thoughtbubbles.train.optim import Optimizer
from thoughtbubbles.train.parallel import find_precision, parallelize, uses_graph
from thoughtbubbles.train.precision import MixedPrecision
from thoughtbubbles.train.profile import profile_steps
from thoughtbubbles.train.step import AsyncScalars, ForwardBackward, MicroBatch, MicroResult

WARM_UP = 3


class Ready(NamedTuple):
    """A model set up as in training."""

    model: Thoughtbubbles
    products: MixedPrecision
    passes: ForwardBackward
    device: torch.device


def make_ready(config: ModelConfig, device: torch.device, compute: ComputeConfig) -> Ready:
    precision = find_precision(compute, device.type)
    world = World(device)
    join = warm_up_kernels(config, compute, world)
    torch.manual_seed(SEED)
    with device:
        model = Thoughtbubbles(config).to(torch.float64 if precision == "float64" else torch.float32)
    parallelize(model, world, compute)
    products = MixedPrecision(model, precision, device=device.type)
    passes = ForwardBackward(model, products, graph=uses_graph(compute, world), join=join)
    return Ready(model, products, passes, device)


def forward_backward(ready: Ready, batch: BenchBatch, *, trace: bool = False) -> MicroResult:
    """As in the training loop. Gradients are written from scratch and weights are rounded again, as after an update."""
    ready.products.forget()
    micro = MicroBatch(*batch, share=torch.ones((), device=ready.device))
    return ready.passes(micro, is_first=True, trace=trace)


class FullStep:
    """As in the training loop: with gradient norm, clipping and AdamW, and reading the results of the step before."""

    def __init__(self, ready: Ready, optimizer: Optimizer, batch: BenchBatch):
        self.ready, self.optimizer, self.batch = ready, optimizer, batch
        self._unread: AsyncScalars | None = None

    def __call__(self) -> None:
        loss = forward_backward(self.ready, self.batch).loss
        norm = self.optimizer.step(self.optimizer.config.lr, clip=self.optimizer.config.clip, loss=loss)
        self.ready.passes.release()
        before, self._unread = self._unread, AsyncScalars(torch.stack([loss, norm]))
        if before is not None and not all(map(math.isfinite, before.read())):
            raise WrongResult("loss or gradient is not finite")


@dataclass(frozen=True)
class Throughput:
    """Speed of forward and backward, or of the full step: the median of many, and rates derived from it."""

    milliseconds: float
    low: float  # 10 % of them are faster
    high: float  # 10 % are slower
    tokens_per_second: float
    tflops: float
    share_of_product: float
    peak_memory_GiB: float | None  # including the weights; None where torch does not count it


@dataclass(frozen=True)
class Measured:
    name: str
    rows: int
    tokens: int  # per row
    parameters: int
    flops: int  # forward and backward of the batch
    precision: str
    forward_backward: Throughput
    step: Throughput
    compile_seconds: float  # extra time of the first forward, backward and step over later ones
    profile: dict[str, Any] | None  # where the time of a full step goes, if asked for
    same_bits_twice: bool  # whether gradients of several runs are bit-identical, without a CUDA graph and with it
    check: Agreement


@dataclass(frozen=True)
class Failed:
    name: str
    error: str


def measure(
    case: Case,
    batch: Batch,
    device: torch.device,
    *,
    product: float,
    repeats: int,
    compute: ComputeConfig,
    watched: bool = False,
) -> Measured:
    """Checks, then times a case. `product`: TFLOP/s of a matrix product in the same precision."""
    ready, rows = make_ready(case.config, device, compute), BenchBatch(*to_device(batch, device))
    reference = reference_of(ready.model)
    took = []

    def first(given: BenchBatch) -> MicroResult:
        begin = time.perf_counter()
        out = forward_backward(ready, given, trace=True)
        wait(device)
        took.append(time.perf_counter() - begin)
        return out

    # A row from the middle, whose kernel tiles also contain other rows.
    check = compare(ready.model, reference, rows, row=case.rows // 2, forward_backward=first)
    require(check, ready.products.precision)
    del reference
    wanted, ready.passes.graph = ready.passes.graph, False  # the peak memory of a captured graph is not visible
    passes_peak = peak_memory(lambda: forward_backward(ready, rows), device)
    optimizer = Optimizer(ready.model, OptimConfig())  # only now: its moments must not count for the passes
    full_step = FullStep(ready, optimizer, rows)
    begin = time.perf_counter()
    step_peak = peak_memory(full_step, device)
    took.append(time.perf_counter() - begin)
    plain = gradients(ready, rows)
    ready.passes.graph = wanted
    same = all(torch.equal(a, b) for _ in range(2) for a, b in zip(plain, gradients(ready, rows), strict=True))
    del plain

    work, n_tokens = cost(case.config), case.rows * case.config.block_size
    flops = case.rows * work.flops

    def speed(run: Callable[[], object], peak: float | None) -> Throughput:
        for _ in range(min(WARM_UP, repeats)):
            run()
        low, middle, high = np.percentile(milliseconds(run, device, repeats), (10, 50, 90)).tolist()
        tflops = flops / middle / 1e9
        return Throughput(middle, low, high, 1000 * n_tokens / middle, tflops, tflops / product, peak)

    passes = speed(lambda: forward_backward(ready, rows), passes_peak)
    step = speed(full_step, step_peak)
    seen = profile_steps(full_step, steps=3, device=device) if watched else None
    return Measured(
        name=case.name,
        rows=case.rows,
        tokens=case.config.block_size,
        parameters=work.parameters,
        flops=flops,
        precision=ready.products.precision,
        forward_backward=passes,
        step=step,
        compile_seconds=max(0.0, sum(took) - (passes.milliseconds + step.milliseconds) / 1000),
        profile=seen and {"ms": seen.ms, **{k: [r._asdict() for r in getattr(seen, k)] for k in ("kinds", "top")}},
        same_bits_twice=same,
        check=check,
    )


def gradients(ready: Ready, batch: BenchBatch) -> list[Tensor]:
    """Copies, since a graph writes the next ones to the same memory."""
    forward_backward(ready, batch)
    return [torch.empty(0) if p.grad is None else p.grad.clone() for p in ready.model.parameters()]


def peak_memory(run: Callable[[], object], device: torch.device) -> float | None:
    """In GiB, including memory allocated before; None where torch does not count it."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    wait(device)
    return torch.cuda.max_memory_allocated() / 2**30


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Of each run: with events on a GPU, without waiting between runs; elsewhere with the clock."""
    found = []
    if device.type == "cuda":
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        wait(device)
        return [begin.elapsed_time(end) for begin, end in events]
    for _ in range(repeats):
        before = time.perf_counter()
        run()
        wait(device)
        found.append(1000 * (time.perf_counter() - before))
    return found


def product_tflops(device: torch.device, compute: ComputeConfig | None = None) -> float:
    """TFLOP/s of one matrix product of random numbers: 8192³ in bfloat16 on a GPU, smaller elsewhere to save time."""
    size = 8192 if device.type == "cuda" else 512
    precision = find_precision(compute or ComputeConfig(), device.type)
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[precision]
    torch.manual_seed(SEED)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    milliseconds(lambda: torch.mm(a, b), device, 10)
    return 2 * size**3 / float(np.median(milliseconds(lambda: torch.mm(a, b), device, 30))) / 1e9


def run_cases(
    cases: Sequence[Case],
    device: torch.device,
    *,
    product: float,
    repeats: int = 20,
    data: Path | None = None,
    compute: ComputeConfig | None = None,
    watched: Collection[str] = (),
    report: Callable[[Measured | Failed], None] = lambda _: None,
) -> list[Measured | Failed]:
    """Measures all cases and reports each when it is done. A case that fails does not affect the others."""
    if repeats < 1:
        raise ValueError(f"--repeats {repeats}: give 1 or more")
    compute = compute or ComputeConfig()
    batches = [draw(case, data) for case in cases]  # errors in the data show before the first measurement
    found: list[Measured | Failed] = []
    for case, batch in zip(cases, batches, strict=True):
        try:
            found.append(
                measure(
                    case,
                    batch,
                    device,
                    product=product,
                    repeats=repeats,
                    compute=compute,
                    watched=case.name in watched,
                )
            )
        except Exception as error:  # mostly out of memory
            found.append(Failed(case.name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
        report(found[-1])
        torch._dynamo.reset()  # the next case compiles for its own shapes only
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found
