"""The fused path against the reference: outputs, gradients, precision, and that it really is the flash kernel.

Our own kernels for a block (attention, GELU) run here in Triton's interpreter; test_gpu.py runs them on a GPU.
"""

import importlib.util
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import (
    BFLOAT16,
    SAME_FUNCTION,
    SAME_FUNCTION_FLOAT32,
    lively_model,
    random_ids,
    run_probe,
    scores_only,
    small_config,
)
from thoughtbubbles.model.attention import Attention, attention_weights, fused_attention, reference_attention
from thoughtbubbles.model.layout import Layout, attenuation
from thoughtbubbles.model.rope import rotary

PATHS = (reference_attention, fused_attention)
GELU_ABSOLUTE = 1e-6  # its normal distribution is a formula with an error of 8e-8, and z may be 12


def inputs(streams: int = 13, head: int = 6, dtype: torch.dtype = torch.float64, low: float = -25.0):
    q, k, v = (torch.randn(2, 3, streams, head, dtype=dtype, requires_grad=True) for _ in range(3))
    score_dtype = torch.promote_types(dtype, torch.float32)
    log_score = (low * torch.rand(2, streams, dtype=score_dtype)).requires_grad_()
    return q, k, v, log_score


def gated(log_score, *, scale=1.0, qk=True, value=True):
    return scores_only(log_score * scale if qk else None, log_score.exp() if value else None)


@pytest.mark.parametrize("head", [2, 6, 8, 10])
@pytest.mark.parametrize(("qk", "value"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("scale", ["head", "one"])
def test_both_paths_compute_the_same(scale, qk, value, head):
    q, k, v, log_score = inputs(head=head)
    factor = 1 / math.sqrt(head) if scale == "head" else 1.0
    outs, grads = [], []
    for path in PATHS:
        out = path(q, k, v, gated(log_score, scale=factor, qk=qk, value=value))
        outs.append(out)
        weighted = (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()).sum()
        grads.append(torch.autograd.grad(weighted, (q, k, v, log_score), allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(outs[0], outs[1], atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


def test_weights_are_a_causal_distribution_attenuated_by_the_score():
    q, k, _, log_score = inputs(streams=5)
    weights = attention_weights(q, k, gated(log_score))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    assert (weights.triu(1) == 0).all()
    plain = attention_weights(q, k, scores_only())
    ratio = (weights / plain)[..., 4, :]  # in the last row: proportional to the score
    expected = log_score.exp()[:, None] * (ratio / log_score.exp()[:, None]).mean(-1, keepdim=True)
    torch.testing.assert_close(ratio, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_fused_path_runs_on_the_flash_kernel(dtype):
    """With every other kernel forbidden it still runs, forward and backward: no mask, no odd shapes."""
    q, k, v, log_score = inputs(dtype=dtype, head=8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused_attention(q, k, v, gated(log_score)).sum().backward()
    assert log_score.grad.abs().sum() > 0


def test_nothing_of_size_s_by_s_is_kept():
    streams = 512
    q, k, v, log_score = inputs(streams=streams, dtype=torch.float32)
    largest = 0

    def count(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        fused_attention(q, k, v, gated(log_score))
    assert largest < streams * streams


def test_low_scores_survive_bfloat16():
    """A log score of −57.3 has a spacing of 1/4 in bfloat16; carried as two parts it keeps its fraction."""
    head, streams = 64, 40
    q, k = (torch.zeros(1, 1, streams, head, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, 1, streams, head, dtype=torch.bfloat16)
    log_score = -55 - 5 * torch.rand(1, streams)
    by = gated(log_score, scale=1.0, value=False)  # undivided, so that an error would show
    exact = reference_attention(q.double(), k.double(), v.double(), by._replace(key_bias=by.key_bias.double()))
    fused = fused_attention(q, k, v, by)
    rounded = by._replace(key_bias=by.key_bias.bfloat16().float())
    careless = reference_attention(
        q.double(), k.double(), v.double(), rounded._replace(key_bias=rounded.key_bias.double())
    )
    error = (fused - exact).norm() / exact.norm()
    assert error < BFLOAT16
    assert (careless - exact).norm() / exact.norm() > 3 * error, "one bfloat16 channel alone would not do"


@pytest.mark.parametrize("scale", ["head", "one"])
def test_the_bias_is_scaled_as_the_config_says(scale):
    config = small_config(score_scale=scale)
    log_score = torch.full((1, 4), -2.0)
    key_bias, value_gate, gate, _ = attenuation(log_score, config)
    expected = -2.0 / math.sqrt(config.head_size) if scale == "head" else -2.0
    torch.testing.assert_close(key_bias, torch.full((1, 4), expected))
    torch.testing.assert_close(value_gate, log_score.exp())
    torch.testing.assert_close(gate, log_score.exp())


def test_gates_that_are_off_are_absent():
    config = small_config(gate_qk=False, gate_v=False, gate_residual=False)
    assert attenuation(torch.zeros(1, 4), config)[:3] == (None, None, None)


@pytest.mark.parametrize("path", [fused_attention, reference_attention])
def test_a_head_gate_of_zeros_halves_the_attention(path):
    """σ(0) = 1/2 for every head; a bias of −∞ closes one head, and a large one opens another."""
    torch.manual_seed(0)
    gated_heads, plain = (Attention(small_config(head_gate=on)).double() for on in (True, False))
    plain.load_state_dict({n: w for n, w in gated_heads.state_dict().items() if not n.startswith("gate.")})
    x, layout = torch.randn(2, 5, 12).double(), Layout(rotary(torch.arange(5.0).double().expand(2, 5), 4))

    def update(attention):
        return attention(x, layout, path)[0].with_bias()

    with torch.no_grad():
        gated_heads.gate.weight.zero_()
        gated_heads.gate.bias.zero_()
        bias = plain.out.bias
        torch.testing.assert_close(update(gated_heads) - bias, (update(plain) - bias) / 2)
        gated_heads.gate.bias.copy_(torch.tensor([-math.inf, 100.0, 100.0]))
        plain.out.weight[:, :4] = 0  # the first of three heads
        torch.testing.assert_close(update(gated_heads), update(plain))


@pytest.mark.parametrize("head_gate", [False, True])
@pytest.mark.parametrize("selection", ["block", "causal"])
def test_full_models_agree_in_float32(selection, head_gate):
    config = small_config(selection=selection, head_gate=head_gate)
    ids = random_ids(config, 2, 16)
    outputs = [
        lively_model(config, attention=path, dtype=torch.float32)(ids, want=("log_probs",)).log_probs
        for path in ("fused", "reference")
    ]
    torch.testing.assert_close(*outputs, atol=SAME_FUNCTION_FLOAT32, rtol=SAME_FUNCTION_FLOAT32)


@pytest.mark.slow  # the interpreter takes minutes
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("part", range(4))
def test_the_kernels_of_a_block(part):
    cases = run_probe("kernels.block_probe", part, 4, interpreted=True)
    assert len(cases) > 20
    wrong = {}
    for case, found in cases.items():
        for name, value in found.items():
            bound = GELU_ABSOLUTE if name.endswith("absolute") else SAME_FUNCTION_FLOAT32
            if not (value if isinstance(value, bool) else value < bound):
                wrong[f"{case}: {name}"] = value
    assert not wrong
