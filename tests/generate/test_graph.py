"""Steps of fixed width, their kernels, and their CUDA graph."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from generate.reading import assert_same_state
from helpers import (
    BFLOAT16,
    FLOAT16,
    SAME_FUNCTION_FLOAT32,
    SAME_ROW,
    lively_model,
    random_ids,
    run_probe,
    small_config,
)
from thoughtbubbles.generate.decode import decode_step, prefill
from thoughtbubbles.generate.graph import mean_streams, packed_sizes, widths_within
from thoughtbubbles.generate.step import advance
from thoughtbubbles.model.budget import Budget

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


@pytest.mark.parametrize(
    ("mean", "largest", "expected"),
    [
        (2, 8, [8]),
        (64, 256, [48, 80, 160, 256]),
        (256, 1024, [48, 80, 160, 320, 640, 1024]),
        (128, 128, [48, 80, 128]),
        (1, 32, [32]),
    ],
)
def test_graphs_have_room_for_all_rows_or_for_half_of_them_and_so_on(mean, largest, expected):
    assert packed_sizes(mean, largest) == expected


def test_a_model_without_fork_layers_has_as_many_streams_as_copies():
    assert mean_streams(small_config(fork_layers=(), copies=3, merge="original"), Budget.of(2)) == 3
    assert mean_streams(small_config(fork_layers=(1, 2)), Budget.of("3/2")) == 1.5
    assert mean_streams(small_config(fork_layers=(1, 2)), Budget.of(9)) == 4


@pytest.mark.parametrize(
    ("forks", "form"),
    [
        ((1, 2, 3), {}),
        ((0, 2), {}),
        ((), {}),
        ((1, 2, 3), {"relative_scores": True}),
        ((1, 2, 3), {"merge": "forks"}),
        ((1, 2, 3), {"merge": "forks", "fork_reach": 0}),
        ((0, 2), {"fork_reach": 0, "relative_scores": True}),
        ((1, 3), {"fork_reach": 0, "gate_qk": False, "block": "modern"}),
        ((1,), {"fork_reach": 0, "feedback": True, "merge": "forks"}),
        ((0,), {"fork_reach": 0, "feedback": True, "relative_scores": True}),
        ((1,), {"fork_reach": 2, "feedback": True, "merge": "forks"}),
        ((0,), {"fork_reach": 20, "feedback": True, "head_gate": True}),
        ((1,), {"fork_reach": 2, "feedback": True, "scores": False, "merge": "forks"}),
        ((1, 3), {"scores": False, "budget": 4}),
        ((1, 2, 3), {"fork_reach": 1, "merge": "forks"}),
        ((0, 2), {"fork_reach": 3, "gate_qk": False}),
    ],
)
def test_steps_of_fixed_width_are_the_same_steps(forks, form):
    config = small_config(fork_layers=forks, **form)
    model, ids = lively_model(config), random_ids(config, 3, 16)
    lengths, budget = [2, 6, 1], [1, 1.5, 4] if forks and config.scores else None
    free, fixed = (prefill(model, ids[:, :6], lengths=lengths, budget=budget)[1] for _ in range(2))
    for step in range(10):
        active = torch.tensor([step != 1, step % 4 < 3, True])
        new = ids.gather(1, free.n_tokens[:, None])[:, 0]
        expected, free = decode_step(model, free, new, active=active)
        found, fixed = advance(model, fixed, new, active, widths=widths_within(config, 8))
        torch.testing.assert_close(found.logits[active], expected.logits[active], atol=SAME_ROW, rtol=0)
        assert torch.equal(found.streams[active], expected.streams[active])
    assert torch.equal(fixed.streams(16), free.streams(16))
    for row in range(3):
        assert_same_state(fixed, row, free, row, reach=config.fork_reach)


def is_same(found: dict[str, Any]) -> bool:
    """All differences that were measured are small; one that is not a number is not."""
    gaps = [gap for name, gap in found.items() if name != "same_streams"]
    return found["same_streams"] and bool(gaps) and all(gap < SAME_FUNCTION_FLOAT32 for gap in gaps)


@pytest.mark.slow  # compiles for a minute
@pytest.mark.parametrize("case", ["parts", "private parts", "feedback parts", "near parts", "parts without scores"])
def test_the_compiled_parts_are_the_same_and_compile_once(case):
    found = run_probe("generate.graph_probe", case)
    assert found["logits"] < SAME_FUNCTION_FLOAT32
    assert found["same_streams"]
    assert found["graphs"][0] > 0
    assert len(set(found["graphs"])) == 1, "a later step has compiled again"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow  # the interpreter takes a minute for a few steps
def test_kernels_give_what_the_blocks_give():
    cases = run_probe("kernels.decode_probe", interpreted=True)
    assert len(cases) == 20
    assert not [case for case, found in cases.items() if not is_same(found)], cases


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
def test_the_kernel_of_chunks_gives_what_rows_one_by_one_give():
    cases = run_probe("kernels.chunk_probe", interpreted=True)
    assert len(cases) == 8
    assert not [case for case, found in cases.items() if not is_same(found)], cases


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("rows", ["few", "many", "private", "feedback", "near"])
def test_an_engine_on_kernels_gives_what_one_without_them_gives(rows):
    """Also where the streams of a step have no room, and it is repeated with more."""
    found = run_probe("kernels.engine_probe", rows, interpreted=True)
    assert all(found["same"])
    assert found["log_prob"] < SAME_FUNCTION_FLOAT32
    assert found["repeated"] > 0


@pytest.mark.gpu
@needs_gpu
def test_a_graph_on_the_gpu_follows_the_plain_steps():
    """In bfloat16 decisions can differ; where they do not, logits agree as bfloat16 does."""
    for case, found in run_probe("generate.graph_probe", "graph").items():
        assert found["error"] < 3 * BFLOAT16, case
        assert found["same_streams"] > 0.8, case
        assert found["same_tokens"], case


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("check", "rounding"),
    [("generate", BFLOAT16), ("generate in float16", FLOAT16), ("generate with private forks", FLOAT16)],
)
def test_compiled_generation_is_generation(check, rounding):
    """Many requests with their own budgets join and leave; then every text is read by steps without graphs.

    A decision now and then falls on the other side: in float16 less often, so errors of a kernel show more clearly.
    """
    found = run_probe("generate.graph_probe", check)
    assert found["again_the_same"]
    assert found["lengths"] == found["asked"]
    assert found["with_other_streams"] < 0.2
    assert found["other_prompts"] < 0.3  # their texts are not compared
    assert found["log_prob"] < 10 * rounding  # of tokens before the first such decision
    assert found["streamed"] == "length"
