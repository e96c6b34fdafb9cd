"""Counts: FLOPs as published, streams that equal the real ones, memory that equals what autograd saves."""

import pytest
import torch

from helpers import named, random_ids, small_config
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import activation_bytes, cost, streams_by_layer, training_state_bytes, visible_pairs
from thoughtbubbles.model.layout import Reach
from thoughtbubbles.model.transformer import Thoughtbubbles


@pytest.mark.parametrize(
    ("name", "changes", "rows", "teraflops"),
    [
        ("150m-plain", {}, 64, 31.1),
        ("150m-causal", {"merge": "residual"}, 64, 52.2),
        ("150m-causal", {"merge": "residual", "budget": 4}, 64, 85.6),
        ("1.9b-plain", {}, 8, 48.0),
        ("1.9b-causal", {}, 8, 91.4),
    ],
)
def test_flops(name, changes, rows, teraflops):
    assert rows * cost(named(name, **changes)).flops / 1e12 == pytest.approx(teraflops, abs=0.05)


def test_a_mixture_decodes_every_stream():
    mixture, residual = (cost(named("150m-causal", merge=merge)) for merge in ("mixture", "residual"))
    assert (mixture.decoded, residual.decoded) == (1024, 512)
    assert mixture.flops - residual.flops == 6 * 768 * 50304 * 512
    assert mixture.forward_per_token + mixture.backward_per_token == pytest.approx(mixture.flops / 512)


@pytest.mark.parametrize("reach", [0, 1, 5, 11, 40])
def test_pairs_with_a_reach_are_those_that_are_visible(reach):
    """Every token forks once, so that forks are spread evenly: counted on the matrix, up to half of its diagonal."""
    tokens = 12
    token = torch.arange(tokens).repeat_interleave(2)[None]
    visible = Reach(token, 2 * torch.arange(1, tokens + 1)[None], reach).visible().sum()
    config = small_config(fork_layers=(0,), fork_reach=reach)
    # A stream sees itself, not half of itself; a fork does not see its own original, but the formula halves pairs.
    assert abs(int(visible) - visible_pairs(config, 2 * tokens, tokens)) <= 2 * tokens


def test_a_reach_costs_less():
    plain, private, near, all_see = (
        cost(named("150m-causal", merge="residual", **form)).flops
        for form in ({"fork_layers": ()}, {"fork_reach": 0}, {"fork_reach": 64}, {})
    )
    assert plain < private < near < all_see
    assert cost(named("150m-causal", merge="residual", fork_reach=511)).flops == all_see
    assert all_see - private == pytest.approx(13 * 6 * 768 * 1024 * 512 * 511 / 513)


def test_feedback_costs_a_projection():
    """Of each token's last state, with a norm before it. Originals see no forks: not even their own."""
    without, feedback = (
        cost(named("150m-causal", merge="forks", fork_layers=(3,), fork_reach=0, feedback=on)) for on in (False, True)
    )
    unseen = 12 * 768 * 13 * 512 * 512 / 513  # pairs are counted as if forks were spread evenly
    assert feedback.flops - without.flops == pytest.approx(6 * 768**2 * 512 - unseen, rel=1e-9)
    assert feedback.parameters - without.parameters == 768**2 + 3 * 768


def test_modern_blocks_cost_as_much():
    usual, modern = (cost(named("150m-plain", block=block)) for block in ("gpt2", "modern"))
    assert modern.flops == usual.flops  # 8/3 of a width of 768 is a multiple of 8
    few = 16 * (2 * 64 - 2 * 768)  # norms of queries and keys, and none of the biases of LayerNorm
    wider = 16 * (2 * 2048 - 4 * 768)  # biases of the MLPs
    assert modern.parameters - usual.parameters == few + wider


@pytest.mark.parametrize("form", [{"fork_layers": (), "merge": "original"}, {"budget": 1.5}])
def test_gates_of_heads_cost_a_product_per_stream(form):
    plain, gated = (cost(named("150m-causal", head_gate=on, **form)) for on in (False, True))
    assert gated.flops - plain.flops == 6 * 768 * 12 * sum(plain.streams)
    assert gated.parameters - plain.parameters == 16 * 12 * (768 + 1)


@pytest.mark.parametrize(
    "changes",
    [{"budget": r, "selection": s} for r in (1, 1.15, 2, 4, 16) for s in ("block", "causal")]
    + [
        {"selection": "block", "budget_mode": "fixed", "budget": 1.5},
        {"copies": 3, "fork_layers": (), "merge": "original"},
    ],
)
def test_streams_are_those_of_the_model(changes):
    config = small_config(**changes)
    attention = Thoughtbubbles(config)(random_ids(config, 1, 11), trace="attention").attention
    assert streams_by_layer(config, 11) == tuple(w.shape[-1] for w in attention)


@pytest.mark.parametrize(
    "config",
    [
        *map(ModelConfig.named, ("nano", "nano-plain", "nano-paper")),
        named("nano-causal", head_gate=True),
        named("nano-causal", fork_layers=(1,), fork_reach=0, feedback=True),
    ],
    ids=["nano", "nano-plain", "nano-paper", "head gate", "feedback"],
)
def test_memory_is_what_a_real_forward_saves(config):
    model, ids = Thoughtbubbles(config), random_ids(config, 3, 20)
    saved = {}

    def count(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        model(ids, targets=ids)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    real = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in weights)
    assert activation_bytes(config, 20, rows=3) == pytest.approx(real, rel=0.01)


def test_training_state():
    assert training_state_bytes(ModelConfig.named("150m-plain")) == 16 * 152_040_960
