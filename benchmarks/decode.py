"""Decoding with and without a KV cache on a CPU, and with CUDA graphs on a GPU, with bubbles and without.

python benchmarks/decode.py                   150m, float32: 256 new tokens after a prompt of 256, one row
python benchmarks/decode.py --device cuda     1.9b, bfloat16: 1 row and 32 rows, compiled steps, static shapes

Random weights and random ids. Before anything is timed, cached log-probabilities are checked against the parallel
forward. Decoding without a cache is timed at 8 evenly spaced prefix lengths and summed. On the GPU the time of a step
is that of the replayed graph, the median over all positions; tokens per second are those of the whole loop, including
sampling and returning tokens.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import seconds, synchronize, write_results
from torch import Tensor

from thoughtbubbles.generate.cache import cache_memory, new_cache
from thoughtbubbles.generate.decode import decode_step, predict_uncached, prefill
from thoughtbubbles.generate.graph import GraphStep
from thoughtbubbles.generate.requests import Request, stream
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.model.transformer import Thoughtbubbles

PROMPT, NEW = 256, 256
SIZES = 8  # prefix lengths at which decoding without a cache is timed


def build(name: str, device: str, dtype: torch.dtype) -> Thoughtbubbles:
    torch.manual_seed(0)
    with torch.device(device):
        return Thoughtbubbles(ModelConfig.named(name)).to(dtype).eval()


def some_ids(model: Thoughtbubbles, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50257, (rows, PROMPT + NEW), generator=generator)
    return ids.to(model.embedding.weight.device)


@torch.no_grad()
def difference(model: Thoughtbubbles, ids: Tensor, *, steps: int) -> dict[str, float]:
    """Cached against the parallel forward: the largest difference of a log-probability, the mean loss difference, and
    the share of tokens with another number of streams."""
    stop = PROMPT + steps
    whole = model(ids[:, :stop], want=("log_probs",), trace=True)
    prediction, cache = prefill(model, ids[:, :PROMPT])
    largest, losses, other = 0.0, [], 0
    for t in range(PROMPT, stop):
        step, exact = prediction.logits.log_softmax(-1), whole.log_probs[:, t - 1]
        largest = max(largest, float((step - exact).abs().max()))
        losses.append(float((step - exact).gather(1, ids[:, t, None]).mean()))
        prediction, cache = decode_step(model, cache, ids[:, t])
        if whole.forks:
            other += int((prediction.streams != whole.forks[-1].bubble_size[:, t]).sum())
    return {
        "largest_log_probability": largest,
        "mean_loss": statistics.fmean(losses),
        "share_of_tokens_with_other_streams": other / (steps * ids.shape[0]),
    }


@torch.no_grad()
def on_cpu() -> dict[str, Any]:
    models = {"bubbles, r = 2": build("150m", "cpu", torch.float32), "plain": build("150m-plain", "cpu", torch.float32)}
    found: dict[str, Any] = {"prompt": PROMPT, "new": NEW, "models": {}}
    cached: dict[str, float] = {}
    for name, model in models.items():
        ids = some_ids(model, 1)
        gap = difference(model, ids, steps=4)
        assert gap["largest_log_probability"] < 1e-4, gap
        sizes = [PROMPT + i * (NEW - 1) // (SIZES - 1) for i in range(SIZES)]
        variants: dict[str, Callable[[], object]] = {
            str(n): partial(predict_uncached, model, ids[:, :n]) for n in sizes
        }
        variants["cached"] = partial(_decode, model, ids)
        times = seconds(variants, device="cpu", repeats=3, warmup=1)
        cached[name] = times.pop("cached")
        recomputed = statistics.fmean(times.values()) * NEW
        found["models"][name] = {
            "difference_from_the_parallel_forward": gap,
            "cached_seconds": cached[name],
            "recomputed_seconds": recomputed,
            "recomputed_over_cached": recomputed / cached[name],
            "cached_tokens_per_second": NEW / cached[name],
            "seconds_at_each_size": {size: round(value, 4) for size, value in times.items()},
        }
    found["bubbles_over_plain_cached"] = cached["bubbles, r = 2"] / cached["plain"]
    return found


def _decode(model: Thoughtbubbles, ids: Tensor) -> None:
    """A prompt and all new tokens but the last, whose prediction is not needed."""
    _, cache = prefill(model, ids[:, :PROMPT])
    for t in range(PROMPT, PROMPT + NEW - 1):
        _, cache = decode_step(model, cache, ids[:, t])


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read plus written."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    time = seconds({"copy": lambda: target.copy_(source)}, device="cuda", repeats=20)["copy"]
    return 2 * source.nbytes / time


@torch.no_grad()
def step_times(step: GraphStep, ids: Tensor) -> list[float]:
    """Milliseconds of every step from the end of the prompt up to the full context length."""
    events = []
    for t in range(PROMPT, PROMPT + NEW):
        step.ids.copy_(ids[:, t])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def graph_check(step: GraphStep, model: Thoughtbubbles, ids: Tensor) -> float:
    """Relative error of the graph's logits against eager steps, where both have the same number of streams."""
    _, cache = prefill(model, ids[:, :PROMPT])
    errors = []
    for t in range(PROMPT, PROMPT + 8):
        step.ids.copy_(ids[:, t])
        found, (expected, cache) = step(), decode_step(model, cache, ids[:, t])
        same = found.streams == expected.streams
        if bool(same.any()):
            errors.append((found.logits - expected.logits)[same].norm() / expected.logits[same].norm())
    assert len(errors) >= 6, "the graph forked differently in most steps"
    return float(torch.stack(errors).median())


def started(model: Thoughtbubbles, ids: Tensor) -> tuple[GraphStep, dict[str, Any]]:
    """A graph with its cache, and the predicted and measured memory of the cache."""
    rows, budget = ids.shape[0], Budget.of(model.config.budget)
    gc.collect()
    before = torch.cuda.memory_allocated()
    options = {"rows": rows, "capacity": PROMPT + NEW, "budget": budget, "dtype": torch.bfloat16}
    cache = new_cache(model.config, device="cuda", **options)  # type: ignore[arg-type]
    found = torch.cuda.memory_allocated() - before
    memory: dict[str, Any] = {
        "predicted_bytes": cache_memory(model.config, **options).total,  # type: ignore[arg-type]
        "counted_bytes": cache.memory().total,
        "allocated_bytes": found,  # the allocator rounds each tensor up to 512 bytes
    }
    begin = time.perf_counter()
    step = GraphStep(model, cache, most=model.config.max_bubble)
    memory["seconds_to_compile_and_capture"] = time.perf_counter() - begin
    return step, memory


def refill(step: GraphStep, model: Thoughtbubbles, ids: Tensor) -> None:
    _, filled = prefill(model, ids[:, :PROMPT], into=step.cache)
    for span, new in zip(step.cache.spans, filled.spans, strict=True):
        span.used.copy_(new.used)
    step.cache.n_tokens.copy_(filled.n_tokens)
    step.active.fill_(True)


def whole_loop(model: Thoughtbubbles, ids: Tensor) -> tuple[float, float]:
    """Tokens per second of `stream`, greedy, after the first 16 tokens; mean streams per token."""
    prompts = ids[:, :PROMPT].tolist()
    requests = [Request(prompt=prompt, sampling=Sampling(temperature=0), max_new=NEW) for prompt in prompts]
    times, streams = [], []
    for token in stream(model, requests, compiled=True):
        streams.append(token.streams)
        if token.request == 0:
            times.append(time.perf_counter())
    return len(requests) * (len(times) - 17) / (times[-1] - times[16]), statistics.fmean(streams)


def profile(step: GraphStep, *, repeats: int = 5) -> list[dict[str, Any]]:
    """Where the time of a step goes: microseconds and launches per kernel, including waiting of overlapping ones."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {
            "kernel": event.key[:70],
            "microseconds": round(event.self_device_time_total / repeats, 1),
            "launches": event.count / repeats,
        }
        for event in kernels[:12]
    ]


def on_gpu(rows_tried: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt": PROMPT, "new": NEW, "copy_bytes_per_second": copy_bandwidth(), "rows": {}}
    names = {"plain": "1.9b-plain", "bubbles, r = 2": "1.9b"}
    models = {name: build(size, "cuda", torch.bfloat16) for name, size in names.items()}
    for rows in rows_tried:
        cases: dict[str, dict[str, Any]] = {name: {} for name in models}
        steps = {}
        for name, model in models.items():
            ids = some_ids(model, rows)
            steps[name], cases[name]["cache"] = started(model, ids)
            refill(steps[name], model, ids)
            error = graph_check(steps[name], model, ids)
            assert error < 3e-2, f"{name}, {rows} rows: the graph's logits are off by {error}"
            cases[name]["relative_error_against_plain_steps"] = error
            if rows == 1:
                cases[name]["difference_from_the_parallel_forward"] = difference(model, ids, steps=64)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(3):  # interleaved
            for name, model in models.items():
                ids = some_ids(model, rows)
                refill(steps[name], model, ids)
                times[name] += step_times(steps[name], ids)
        for name, model in models.items():
            milliseconds = statistics.median(times[name])
            bytes_read = 2 * parameter_count(model.config)
            cases[name] |= {
                "milliseconds_per_step": milliseconds,
                "tokens_per_second_of_steps": 1000 * rows / milliseconds,
                "weight_bytes_per_second": bytes_read / milliseconds * 1000,
                "share_of_copy_bandwidth": bytes_read / milliseconds * 1000 / found["copy_bytes_per_second"],
                "profile": profile(steps[name]),
            }
        steps.clear()
        for name, model in models.items():
            whole_loop(model, some_ids(model, rows))  # warms up
            loop, streams = whole_loop(model, some_ids(model, rows))
            cases[name] |= {"tokens_per_second": loop, "streams_per_token": streams}
        plain, forked = (cases[name]["milliseconds_per_step"] for name in names)
        found["rows"][str(rows)] = {
            **cases,
            "bubbles_over_plain": forked / plain,
            "compilations_after_warm_up": torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled,
        }
        synchronize("cuda")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="batch sizes on the GPU")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    numbers = on_gpu(arguments.rows) if arguments.device == "cuda" else on_cpu()
    path = write_results("decode", arguments.device, numbers, to=arguments.out)
    print(path.read_text())


if __name__ == "__main__":
    main()
