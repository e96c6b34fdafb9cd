"""Decoding steps that are checked, then timed: what all measurements of decode.py share."""

import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thoughtbubbles import kernels
from thoughtbubbles.generate.cache import cache_memory, new_cache
from thoughtbubbles.generate.decode import decode_step, prefill
from thoughtbubbles.generate.graph import GraphStep, mean_streams
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

PROMPT, NEW = 256, 256
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def build(config: ModelConfig, device: str) -> Thoughtbubbles:
    """With random weights: float32 on a CPU, bfloat16 on a GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        return Thoughtbubbles(config).to(DTYPES[device]).eval()


def some_ids(model: Thoughtbubbles, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(min(50257, model.config.vocab_size), (rows, PROMPT + NEW), generator=generator)
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
        with kernels.disabled():
            prediction, cache = decode_step(model, cache, ids[:, t])
        if whole.forks:
            other += int((prediction.streams != whole.forks[-1].bubble_size[:, t]).sum())
    return {
        "largest_log_probability": largest,
        "mean_loss": statistics.fmean(losses),
        "share_of_tokens_with_other_streams": other / (steps * ids.shape[0]),
    }


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
    step = GraphStep(model, cache, budget=budget)
    memory["packed_streams"] = step.size_for(streams_of(model, rows))
    step.captured(memory["packed_streams"])
    memory["seconds_to_compile_and_capture"] = time.perf_counter() - begin
    return step, memory


def streams_of(model: Thoughtbubbles, rows: int) -> float:
    """Of one token of every row, in the mean."""
    return rows * mean_streams(model.config, Budget.of(model.config.budget))


def refill(step: GraphStep, model: Thoughtbubbles, ids: Tensor) -> None:
    _, filled = prefill(model, ids[:, :PROMPT], into=step.cache)
    for span, new in zip(step.cache.spans, filled.spans, strict=True):
        span.used.copy_(new.used)
    step.cache.n_tokens.copy_(filled.n_tokens)
    step.active.fill_(True)


def graph_check(step: GraphStep, model: Thoughtbubbles, ids: Tensor) -> float:
    """Relative error of the graph's logits against eager steps, where both have the same number of streams."""
    _, cache = prefill(model, ids[:, :PROMPT])
    errors = []
    for t in range(PROMPT, PROMPT + 8):
        step.ids.copy_(ids[:, t])
        with kernels.disabled():
            expected, cache = decode_step(model, cache, ids[:, t])
        found = step(streams_of(model, ids.shape[0]))
        same = found.streams == expected.streams
        if bool(same.any()):
            errors.append((found.logits - expected.logits)[same].norm() / expected.logits[same].norm())
    assert len(errors) >= 6, "the graph forked differently in most steps"
    return float(torch.stack(errors).median())


@torch.no_grad()
def step_times(step: GraphStep, ids: Tensor) -> list[float]:
    """Milliseconds of every step from the end of the prompt up to the full context length."""
    events = []
    for t in range(PROMPT, PROMPT + NEW):
        step.ids.copy_(ids[:, t])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(streams_of(step.model, ids.shape[0]))
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def graphs(models: Mapping[str, Thoughtbubbles], rows: int) -> tuple[dict[str, GraphStep], dict[str, dict[str, Any]]]:
    """The graph of each model, compiled and checked, and what the check has found."""
    steps, cases = {}, {}
    for name, model in models.items():
        ids = some_ids(model, rows)
        steps[name], memory = started(model, ids)
        refill(steps[name], model, ids)
        error = graph_check(steps[name], model, ids)
        assert error < 3e-2, f"{name}, {rows} rows: the graph's logits are off by {error}"
        cases[name] = {"cache": memory, "relative_error_against_plain_steps": error}
        if rows == 1:
            gap = difference(model, ids, steps=64)
            assert abs(gap["mean_loss"]) < 1e-2, f"{name}: {gap}"
            cases[name]["difference_from_the_parallel_forward"] = gap
    return steps, cases


def graph_times(
    models: Mapping[str, Thoughtbubbles], steps: Mapping[str, GraphStep], rows: int
) -> dict[str, list[float]]:
    """Milliseconds of the steps of each model, three times from the end of the prompt on, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(3):
        for name, model in models.items():
            ids = some_ids(model, rows)
            refill(steps[name], model, ids)
            times[name] += step_times(steps[name], ids)
    return times
