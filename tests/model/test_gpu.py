"""What only a GPU can show: the CPU's decisions, the flash kernel in bfloat16, no waiting, the same bits twice."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import BFLOAT16, ORACLE_OUTPUT, lively_model, random_ids, small_config
from thoughtbubbles.model.attention import Attenuation, fused_attention, reference_attention
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("selection", ["block", "causal"])
@pytest.mark.parametrize("merge", ["mixture", "residual", "original"])
def test_gpu_equals_cpu_in_float64(merge, selection):
    config = small_config(merge=merge, selection=selection, block_size=64)
    ids, lengths, budgets = random_ids(config, 3, 64), [64, 33, 1], [1.15, 2, 4]
    found = []
    for device in ("cpu", "cuda"):
        model = lively_model(config).to(device)
        here = ids.to(device)
        call = {"lengths": lengths, "budget": budgets, "want": ("log_probs",), "trace": True}
        out = model(here, targets=here.roll(-1, 1), **call)
        out.loss.backward()
        model(here, targets=here, lengths=lengths, want=("token_nll",)).token_nll.square().sum().backward()
        decisions = [record.selected.cpu() for record in out.forks]
        found.append((decisions, [out.loss.cpu(), out.log_probs.cpu(), *(p.grad.cpu() for p in model.parameters())]))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, atol=ORACLE_OUTPUT, rtol=ORACLE_OUTPUT)


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("streams", [1024, 333])
def test_fused_attention_in_bfloat16_on_the_flash_kernel(head, streams):
    q, k, v = (
        torch.randn(2, 4, streams, head, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    log_score = (-20 * torch.rand(2, streams, device="cuda")).requires_grad_()
    leaves = (q, k, v, log_score)

    def by(score: torch.Tensor) -> Attenuation:
        return Attenuation(score / head**0.5, score.exp(), None)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out, _ = fused_attention(q, k, v, by(log_score))
        upstream = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, upstream)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, _ = reference_attention(*exact[:3], by(exact[3]))
    expected_grads = torch.autograd.grad(expected, exact, upstream.double())
    for ours, theirs in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < BFLOAT16


def training_model(**changes) -> tuple[Thoughtbubbles, torch.Tensor]:
    torch.manual_seed(0)
    config = ModelConfig(n_layer=4, n_head=4, width=256, vocab_size=1024, fork_layers=(1, 2, 3), **changes)
    return Thoughtbubbles(config).cuda(), torch.randint(1024, (4, 512), device="cuda")


def step(model: Thoughtbubbles, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, targets=ids.roll(-1, 1)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("merge", ["mixture", "residual", "original"])
def test_a_training_step_never_waits_for_the_device(merge):
    model, ids = training_model(merge=merge)
    step(model, ids)
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(model, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("merge", ["mixture", "residual"])
def test_the_same_bits_twice(merge, monkeypatch):
    """With torch's own switch for it: our sums have no atomics whose order matters."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, ids = training_model(merge=merge)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = step(model, ids), step(model, ids)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("merge", ["mixture", "residual"])
def test_bfloat16_against_float32(merge):
    model, ids = training_model(merge=merge)
    rounded = step(model, ids)
    model.zero_grad()
    exact = model(ids, targets=ids.roll(-1, 1)).loss
    exact.backward()
    assert rounded[0].item() == pytest.approx(exact.item(), abs=5e-3)
    ours = torch.cat([g.flatten() for g in rounded[1:]])
    theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99
