"""Under bfloat16 scores, selection, positions, merge and loss stay in float32, and results stay close."""

import pytest
import torch

from helpers import lively_model, named, random_ids, small_config
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.fork import ForkLayer
from thoughtbubbles.model.transformer import Thoughtbubbles


def test_scores_do_not_round_under_autocast():
    """Fails if norm or score head ran in bfloat16: its 8 bits give few distinct scores and ties by the dozen."""
    torch.manual_seed(0)
    layer = ForkLayer(64, score_bias=None)
    torch.nn.init.normal_(layer.score.weight, std=0.02)
    x = torch.randn(1, 2000, 64)
    plain = layer.log_scores(x)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = layer.log_scores(x)
        careless = torch.nn.functional.logsigmoid(torch.nn.functional.linear(layer.norm(x), layer.score.weight))
    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, plain)
    assert len(careless.unique()) < 500 < 3900 < len(plain.unique())


def test_state_is_float32_under_autocast_and_in_a_bfloat16_model():
    config = ModelConfig.named("nano-causal")
    ids = random_ids(config, 2, 32)
    model = Thoughtbubbles(config)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, targets=ids, want=("log_probs", "token_nll"), trace=True)
    low = Thoughtbubbles(config).bfloat16()(ids, targets=ids, want=("log_probs", "token_nll"), trace=True)
    for result, residual in ((out, torch.float32), (low, torch.bfloat16)):
        assert result.streams.x.dtype == residual
        for tensor in (result.streams.log_score, result.log_probs, result.token_nll, result.loss):
            assert tensor.dtype == torch.float32
        assert all(record.own_log_score.dtype == torch.float32 for record in result.forks)


def test_modern_blocks_in_bfloat16():
    config = named("nano-causal", block="modern", fork_layers=())
    torch.manual_seed(0)
    model, ids = Thoughtbubbles(config), random_ids(config, 2, 32)
    exact = model(ids, targets=ids.roll(-1, 1)).loss
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids, targets=ids.roll(-1, 1)).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=1e-2)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    model.zero_grad()
    low = model.bfloat16()(ids, targets=ids.roll(-1, 1)).loss
    low.backward()
    assert low.item() == pytest.approx(exact.item(), rel=1e-2)


@pytest.mark.parametrize("merge", ["mixture", "residual", "original"])
def test_bfloat16_is_close_and_learns(merge):
    config = named("nano-causal", merge=merge)
    torch.manual_seed(0)
    model = Thoughtbubbles(config)
    ids = random_ids(config, 4, 32)
    exact = model(ids, targets=ids.roll(-1, 1)).loss
    exact.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids, targets=ids.roll(-1, 1)).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), abs=2e-3)
    # Selection may differ for a few streams; the gradient as a whole must not.
    ours, theirs = (torch.cat([g.flatten() for g in group]) for group in ([p.grad for p in model.parameters()], grads))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_first_decisions_agree_between_float32_and_autocast():
    """The first fork layer sees an x that only rounding separates; almost all of its decisions then agree."""
    config = small_config(fork_layers=(1,), budget=1.5, block_size=64)
    model = lively_model(config, dtype=torch.float32)
    ids = random_ids(config, 8, 64)
    exact = model(ids, trace=True).forks[0].selected
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(ids, trace=True).forks[0].selected
    assert (exact != rounded).float().mean() < 0.05


def test_float64_works_end_to_end():
    config = small_config()
    out = lively_model(config)(random_ids(config, 2, 9), targets=random_ids(config, 2, 9), want=("log_probs",))
    assert {out.loss.dtype, out.log_probs.dtype, out.streams.x.dtype, out.streams.log_score.dtype} == {torch.float64}
