"""Steps of fixed width, their kernels, and their CUDA graph."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import BFLOAT16, SAME_FUNCTION_FLOAT32, SAME_ROW, lively_model, named, random_ids, small_config
from thoughtbubbles.generate.decode import Parts, advance, decode_step, enter, next_logits, prefill
from thoughtbubbles.generate.graph import GraphStep, widths_within
from thoughtbubbles.generate.requests import Request, generate, stream
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.transformer import Thoughtbubbles

TESTS = Path(__file__).parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("changes", "most", "expected"),
    [
        ({"fork_layers": (1, 2, 3)}, 100, (1, 2, 4, 8)),
        ({"fork_layers": (1, 2, 3)}, 5, (1, 2, 4, 8)),
        ({"fork_layers": (1, 2, 3)}, 3, (1, 2, 4, 4)),
        ({"fork_layers": (1, 2, 3)}, 1, (1, 1, 1, 1)),
        ({"fork_layers": (0, 2)}, 4, (2, 4)),
        ({"fork_layers": ()}, 1, (1,)),
        ({"fork_layers": (), "copies": 3, "merge": "original"}, 1, (3,)),
    ],
)
def test_widths_are_powers_of_two_within_the_budget(changes, most, expected):
    assert widths_within(small_config(**changes), most) == expected


@pytest.mark.parametrize("forks", [(1, 2, 3), (0, 2), ()])
def test_steps_of_fixed_width_are_the_same_steps(forks):
    config = small_config(fork_layers=forks)
    model, ids = lively_model(config), random_ids(config, 3, 16)
    lengths, budget = [2, 6, 1], [1, 1.5, 4] if forks else None
    free, fixed = (prefill(model, ids[:, :6], lengths=lengths, budget=budget)[1] for _ in range(2))
    for _ in range(8):
        new = ids.gather(1, free.n_tokens[:, None])[:, 0]
        expected, free = decode_step(model, free, new)
        found, fixed = advance(model, fixed, new, torch.ones(3, dtype=torch.bool), widths=widths_within(config, 8))
        torch.testing.assert_close(found.logits, expected.logits, atol=SAME_ROW, rtol=0)
        assert torch.equal(found.streams, expected.streams)


@pytest.mark.slow  # compiles for a minute
def test_the_compiled_parts_are_the_same_and_compile_once():
    torch._dynamo.reset()
    config = small_config()
    model, ids = lively_model(config, dtype=torch.float32), random_ids(config, 2, 16)
    parts = Parts(
        enter=torch.compile(enter, dynamic=False, fullgraph=True),
        logits=torch.compile(next_logits, dynamic=False, fullgraph=True),
    )
    plain, compiled = (prefill(model, ids[:, :4], budget=[2, 3])[1] for _ in range(2))
    counters = torch._dynamo.utils.counters["stats"]
    graphs = []
    for t in range(4, 12):
        expected, plain = decode_step(model, plain, ids[:, t])
        found, compiled = advance(
            model, compiled, ids[:, t], torch.ones(2, dtype=torch.bool), widths=(1, 2, 4, 8), parts=parts
        )
        torch.testing.assert_close(found.logits, expected.logits, atol=SAME_FUNCTION_FLOAT32, rtol=0)
        graphs.append(counters["unique_graphs"])
    assert graphs[0] > 0
    assert set(graphs) == {graphs[0]}, "a later step has compiled again"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "case", ["short", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bubbles", "plain", "no gates"))]
)
def test_kernels_give_what_the_blocks_give(case):
    """On the CPU, through Triton's interpreter, in a process of its own, since that is chosen at import."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "generate" / "kernel_probe.py"), case]
    probe = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert probe.returncode == 0, probe.stderr
    found = json.loads(probe.stdout)
    assert found["same_streams"]
    assert found["logits"] < SAME_FUNCTION_FLOAT32
    assert found["kept"] < SAME_FUNCTION_FLOAT32


def gpu_model(name: str = "150m", **changes) -> Thoughtbubbles:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Thoughtbubbles(named(name, n_layer=12, **changes)).to(torch.bfloat16).eval()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 3, 9], ids="{} rows".format)
@pytest.mark.parametrize("forks", [(3, 7, 11), ()], ids=["bubbles", "plain"])
def test_a_graph_on_the_gpu_follows_the_plain_steps(forks, rows):
    """In bfloat16 decisions can differ, so step by step from the same state, against float32."""
    model = gpu_model(fork_layers=forks, merge="residual" if forks else "original")
    ids = torch.randint(50000, (rows, 96), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    lengths = [80 - 7 * row for row in range(rows)]
    fast, plain = (prefill(model, ids[:, :80], lengths=lengths, capacity=128)[1] for _ in range(2))
    step = GraphStep(model, fast, most=8)
    step.active.fill_(True)
    for t in range(80, 90):
        step.ids.copy_(ids[:, t])
        found = step()
        expected, plain = decode_step(model, plain, ids[:, t])
        same = found.streams == expected.streams
        error = (found.logits - expected.logits)[same].norm() / expected.logits[same].norm()
        assert error < 3 * BFLOAT16
        assert same.double().mean() > 0.5
    assert torch.equal(fast.n_tokens, plain.n_tokens)


@pytest.mark.gpu
@needs_gpu
def test_compiled_generation_is_generation():
    """Stops, ends and rows that finish early, in batches that a graph serves again and again."""
    model = gpu_model(n_layer=4, fork_layers=(1, 3))
    requests = [
        Request(
            prompt=list(range(1, 3 + number)),
            max_new=4 + 5 * number,
            budget=(1, 1.5, 2, 4)[number % 4],
            sampling=Sampling(temperature=0.9, top_k=40, seed=number),
            top=2,
        )
        for number in range(7)
    ]
    found = generate(model, requests, batch_size=3, compiled=True)
    again = generate(model, requests, batch_size=3, compiled=True)
    plain = generate(model, requests, batch_size=3)
    assert [c.ids for c in found] == [c.ids for c in again]
    assert [len(c.ids) for c in found] == [r.max_new for r in requests]
    first = [abs(a.log_probs[0] - b.log_probs[0]) for a, b in zip(found, plain, strict=True)]
    assert max(first) < 1e-9  # both read the prompts alike
    alike = sum(a.ids[:4] == b.ids[:4] for a, b in zip(found, plain, strict=True))
    assert alike >= 4
    assert list(stream(model, requests[:1], compiled=True))[-1].finish == "length"
