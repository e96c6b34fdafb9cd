"""Decoding with and without a KV cache on a CPU, and with CUDA graphs on a GPU, with bubbles and without.

python benchmarks/decode.py                   150m, float32: 256 new tokens after a prompt of 256, one row
python benchmarks/decode.py --device cuda     1.9b, bfloat16: 1, 32 and 128 rows, compiled steps, static shapes;
                                              then the engine under constant load
python benchmarks/decode.py --device cuda --protocol long
    the rows of `thoughtbubbles reproduce long` (--cases r2 wider: these): docs/results/decode.json, which its report
    reads. What the file has of other rows and batch sizes stays in it

Random weights and random ids. Before anything is timed, cached log-probabilities are checked against the parallel
forward. Decoding without a cache is timed at 8 evenly spaced prefix lengths and summed. On the GPU the time of a step
is that of the replayed graph, the median over all positions; tokens per second are those of the whole loop, including
sampling and returning tokens.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import known_rows, seconds, source, synchronize, write_results, write_rows
from decode_steps import DTYPES, NEW, PROMPT, build, difference, graph_times, graphs, refill, some_ids, streams_of
from torch import Tensor

from thoughtbubbles.generate.cache import Cache, cache_memory
from thoughtbubbles.generate.decode import decode_step, predict_uncached, prefill
from thoughtbubbles.generate.engine import Engine
from thoughtbubbles.generate.fast_blocks import has_kernels
from thoughtbubbles.generate.graph import GraphStep
from thoughtbubbles.generate.graphed import Graphed
from thoughtbubbles.generate.requests import Request, stream
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.provenance import device_name
from thoughtbubbles.recipes.reproduce.protocols import protocol

VOCABULARY = 8192  # of the text behind docs/results
FOR_REPORT = Path(__file__).parents[1] / "docs" / "results" / "decode.json"
PROMPTS, ANSWERS = (16, 128), (128, 384)  # tokens of requests to the engine, from and to
CONCURRENT, ENGINE_TOKENS = 128, 2**16
SIZES = 8  # prefix lengths at which decoding without a cache is timed


@torch.no_grad()
def on_cpu() -> dict[str, Any]:
    names = {"bubbles, r = 2": "150m-causal", "plain": "150m-plain"}
    models = {name: build(ModelConfig.named(size), "cpu") for name, size in names.items()}
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


def engine_times(model: Thoughtbubbles, rows: int) -> dict[str, Any]:
    """Clients that send a request as soon as they have the answer to the last one: the engine's tokens per second, and
    those of bare steps over the same rows in the middle of their work."""
    random = Random(0)

    def request() -> Request:
        n, new = random.randint(*PROMPTS), random.randint(*ANSWERS)
        prompt = [random.randrange(min(50257, model.config.vocab_size)) for _ in range(n)]
        return Request(prompt=prompt, sampling=Sampling(temperature=0), max_new=new)

    engine = Engine(model, rows=rows, max_budget=model.config.budget, capacity=512, compiled=True)
    engine.warm_up()
    for _ in range(rows):
        engine.submit(request())
    generated, steps, begin, before = 0, 0, 0.0, (0, 0)
    while generated < ENGINE_TOKENS:
        ended = [event for event in engine.step() if event.handle.is_finished]
        for _ in ended:
            engine.submit(request())
        stats = engine.stats()
        if not steps and stats.tokens_generated > ENGINE_TOKENS // 4:  # compiled, and at lengths of all kinds
            begin, before = time.perf_counter(), (stats.tokens_generated, stats.tokens_read)
        steps += bool(begin)
        generated = stats.tokens_generated - before[0] if begin else 0
    took, after = time.perf_counter() - begin, engine.stats()
    reader = engine._reader
    assert isinstance(reader, Graphed)
    active = int(reader.step.active.sum())
    bare = bare_time(reader.step, streams_of(model, active))
    numbers = {
        "tokens_per_second": generated / took,
        "tokens_of_prompts_per_second": (after.tokens_read - before[1]) / took,
        "tokens_per_step": generated / steps,
        "milliseconds_per_step": 1000 * took / steps,
        "milliseconds_of_a_bare_step": 1000 * bare,
        "share_of_bare_steps": generated / took / (rows / bare),
    }
    return {"rows": rows, "prompts": PROMPTS, "answers": ANSWERS, **numbers}


def bare_time(step: GraphStep, streams: float, *, repeats: int = 20) -> float:
    """Seconds of a step, again and again from the same state."""
    kept = [*(span.used for span in step.cache.spans), step.cache.n_tokens]
    before, times = [each.clone() for each in kept], []
    for _ in range(repeats):
        for each, then in zip(kept, before, strict=True):
            each.copy_(then)
        synchronize("cuda")
        begin = time.perf_counter()
        step(streams)
        synchronize("cuda")
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def profile(step: GraphStep, streams: float, *, repeats: int = 5) -> list[dict[str, Any]]:
    """Where the time of a step goes: microseconds and launches per kernel, including waiting of overlapping ones."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(repeats):
            step(streams)
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
    bubbles = ModelConfig.named("1.9b-causal")
    configs = {
        "plain": ModelConfig.named("1.9b-plain"),
        "bubbles, r = 2": bubbles,
        "private forks, r = 2": replace(bubbles, fork_reach=0),
    }
    models = {name: build(config, "cuda") for name, config in configs.items()}
    for rows in rows_tried:
        steps, cases = graphs(models, rows)
        times = graph_times(models, steps, rows)
        for name, model in models.items():
            milliseconds = statistics.median(times[name])
            refill(steps[name], model, some_ids(model, rows))
            bytes_read = 2 * parameter_count(model.config)
            cases[name] |= {
                "milliseconds_per_step": milliseconds,
                "tokens_per_second_of_steps": 1000 * rows / milliseconds,
                "weight_bytes_per_second": bytes_read / milliseconds * 1000,
                "share_of_copy_bandwidth": bytes_read / milliseconds * 1000 / found["copy_bytes_per_second"],
                "profile": profile(steps[name], streams_of(model, rows)),
            }
        steps.clear()
        for name, model in models.items():
            loop, streams = whole_loop(model, some_ids(model, rows))
            cases[name] |= {
                "tokens_per_second": loop,
                "share_of_copy_bandwidth_of_the_whole_loop": 2
                * parameter_count(model.config)
                * loop
                / rows
                / found["copy_bytes_per_second"],
                "streams_per_token": streams,
            }
        plain, forked, private = (cases[name]["milliseconds_per_step"] for name in models)
        ratios = {"bubbles_over_plain": forked / plain, "private_over_plain": private / plain}
        found["rows"][str(rows)] = {**cases, **ratios}
        synchronize("cuda")
        shown = {name: {key: value for key, value in cases[name].items() if key != "profile"} for name in models}
        print(f"{rows} rows: {json.dumps(ratios)}, {json.dumps(shown)}", file=sys.stderr)
    found["engine"] = {}
    for name, model in models.items():
        found["engine"][name] = engine_times(model, CONCURRENT)
        print(f"engine, {name}: {json.dumps(found['engine'][name])}", file=sys.stderr)
    return found


def protocol_configs(name: str) -> dict[str, ModelConfig]:
    """The models of a protocol by row, without block selection, which has no exact cache."""
    found = protocol(name)
    settings: dict[str, Any] = {"protocol": name, "seed": 0, "data": "", "n_tokens": 1, "vocab_size": VOCABULARY}
    configs = {row: found.config(row, **settings).model for row in found.rows}
    return {row: config for row, config in configs.items() if config.selection == "causal"}


def measure_protocol(
    configs: dict[str, ModelConfig],
    device: str,
    path: Path,
    *,
    chosen: Sequence[str],
    rows_tried: list[int],
    new: int,
) -> None:
    """Rows with the same model, such as `plain` and `longer`, are measured once; all in turns, since a step's time
    varies by some percent from one measurement to the next."""
    precision = {"dtype": str(DTYPES[device]).removeprefix("torch."), "prompt": PROMPT, "new": new}
    kind = {"device": device_name(device), "torch": torch.__version__, **precision}
    known_rows(path, kind)  # before anything is measured
    measured_as = {row: next(other for other in configs if configs[other] == configs[row]) for row in configs}
    first = dict.fromkeys(measured_as[row] for row in chosen)
    for rows in rows_tried:
        found = measure_rows({row: configs[row] for row in first}, device, rows_tried=[rows], new=new)
        for row, at in found.items():
            at = known_rows(path, kind).get(row, {}) | at
            as_others = {other: {"measured_as": row, **at} for other in configs if measured_as[other] == row != other}
            write_rows(path, kind, {row: at, **as_others})
            print(f"{row}: {json.dumps(at)}", file=sys.stderr)


def measure_rows(
    configs: dict[str, ModelConfig], device: str, *, rows_tried: list[int], new: int
) -> dict[str, dict[str, Any]]:
    models = {row: build(config, device) for row, config in configs.items()}
    found: dict[str, dict[str, Any]] = {row: {} for row in models}
    for rows in rows_tried:
        cases = graph_cases(models, rows) if device == "cuda" else eager_cases(models, rows, new=new)
        for row, case in cases.items():
            config, dtype = configs[row], DTYPES[device]
            budget = Budget.of(config.budget)
            memory = cache_memory(config, rows=rows, capacity=config.block_size, budget=budget, dtype=dtype)
            times = {"milliseconds": case.pop("milliseconds"), "cache_bytes": memory.total}
            found[row][str(rows)] = {**times, **case, **source()}
    return found


def graph_cases(models: Mapping[str, Thoughtbubbles], rows: int) -> dict[str, dict[str, Any]]:
    steps, cases = graphs(models, rows)
    times = graph_times(models, steps, rows)
    for name, case in cases.items():
        cache = case.pop("cache")
        assert cache["predicted_bytes"] == cache["counted_bytes"], f"{name}, {rows} rows: {cache}"
        case |= {
            "milliseconds": statistics.median(times[name]),
            "streams_per_token": mean_streams(steps[name].cache, PROMPT + NEW),
            "has_kernels": has_kernels(models[name]),
        }
    return cases


@torch.no_grad()
def eager_cases(models: Mapping[str, Thoughtbubbles], rows: int, *, new: int) -> dict[str, dict[str, Any]]:
    """On the CPU; steps of all models are interleaved, and the first one only warms up."""
    ids, caches, cases = {}, {}, {}
    times: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():
        ids[name] = some_ids(model, rows)
        gap = difference(model, ids[name][:1], steps=4)
        assert gap["largest_log_probability"] < 1e-4, f"{name}: {gap}"
        cases[name] = {"difference_from_the_parallel_forward": gap}
        _, caches[name] = prefill(model, ids[name][:, :PROMPT], capacity=PROMPT + new)
    for t in range(PROMPT, PROMPT + new):
        for name, model in models.items():
            begin = time.perf_counter()
            _, caches[name] = decode_step(model, caches[name], ids[name][:, t])
            times[name].append(1000 * (time.perf_counter() - begin))
    return {
        name: {
            "milliseconds": statistics.median(times[name][1:]),
            "streams_per_token": mean_streams(caches[name], PROMPT + new),
            **case,
        }
        for name, case in cases.items()
    }


def mean_streams(cache: Cache, n_tokens: int) -> float:
    """Per token, after the last fork layer."""
    return float(cache.streams(n_tokens).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--protocol", choices=["long"], help="measure the rows of this protocol")
    parser.add_argument("--cases", nargs="+", help="with --protocol: measure these rows only")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="batch sizes on a GPU (default: 1 32 128) or of a protocol (1 32)"
    )
    parser.add_argument(
        "--new", type=int, help="tokens decoded per row of a protocol on a CPU, from 2 on (default: 16)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder (default: benchmarks/results), or FILE.json of a protocol (docs/results/decode.json)",
    )
    given = parser.parse_args()
    is_cpu = given.device == "cpu"
    if given.new is not None and not (given.protocol and is_cpu and 2 <= given.new <= NEW):
        parser.error(f"--new {given.new}: give 2 to {NEW}, and only with --protocol on a CPU")
    if given.cases and not given.protocol:
        parser.error("--cases: goes with --protocol")
    if given.protocol and is_cpu and given.out is None:
        parser.error("--protocol on a CPU needs --out: docs/results/decode.json has the times of a GPU")
    if given.protocol:
        configs = protocol_configs(given.protocol)
        if wrong := sorted(set(given.cases or ()) - set(configs)):
            parser.error(f"--cases: {given.protocol} has no rows {', '.join(wrong)} with an exact KV cache")
        path = given.out or FOR_REPORT
        path = path if path.suffix == ".json" else path / FOR_REPORT.name
        measure_protocol(
            configs,
            given.device,
            path,
            chosen=given.cases or list(configs),
            rows_tried=given.rows or [1, 32],
            new=given.new or 16 if is_cpu else NEW,
        )
    else:
        numbers = on_cpu() if is_cpu else on_gpu(given.rows or [1, 32, 128])
        path = write_results("decode", given.device, numbers, to=given.out)
    print(path.read_text())


if __name__ == "__main__":
    main()
