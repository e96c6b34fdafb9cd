"""What only a GPU can show: the CPU's decisions, kernels in bfloat16, no waiting, the same bits twice."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import (
    BFLOAT16,
    BFLOAT16_GRADIENT,
    ORACLE_OUTPUT,
    SAME_FUNCTION_FLOAT32,
    lively_model,
    random_ids,
    scores_only,
    small_config,
)
from thoughtbubbles.model.attention import fused_attention, reference_attention
from thoughtbubbles.model.block import Block
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.precision import MixedPrecision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


FEEDBACK = {"fork_layers": (1,), "fork_reach": 0, "feedback": True, "merge": "forks"}
NEAR_FEEDBACK = {**FEEDBACK, "fork_reach": 7, "scores": False}


CHOOSING = [*({"merge": each} for each in ("mixture", "residual", "original")), FEEDBACK]


@pytest.mark.parametrize(
    "form",
    [*({**form, "selection": rule} for form in CHOOSING for rule in ("block", "causal")), NEAR_FEEDBACK],
    ids=str,
)
def test_gpu_equals_cpu_in_float64(form):
    config = small_config(**form, block_size=64)
    ids, lengths, budgets = random_ids(config, 3, 64), [64, 33, 1], [1.15, 2, 4] if config.scores else None
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

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = fused_attention(q, k, v, scores_only(log_score / head**0.5, log_score.exp()))
        upstream = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, upstream)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = reference_attention(*exact[:3], scores_only(exact[3] / head**0.5, exact[3].exp()))
    expected_grads = torch.autograd.grad(expected, exact, upstream.double())
    for ours, theirs in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < BFLOAT16


def random_heads(streams: int, head: int, **options):
    """Of the probe that runs the same kernels in Triton's interpreter; it needs Triton, which comes with CUDA."""
    from kernels.block_probe import Heads

    return Heads(streams, head, dtype=torch.bfloat16, device="cuda", **options)


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("streams", [1, 7, 333, 512, 1000, 1024])
def test_our_attention_in_bfloat16(streams, head):
    batch = 2 if streams > 100 else 64  # a score's gradient is one sum that may cancel: many of them
    for gates in ({}, {"qk": False}, {"value": False}, {"qk": False, "value": False}):
        errors = random_heads(streams, head, n_head=3, batch=batch, low=-20.0, **gates).errors()
        assert errors.pop("out") < BFLOAT16
        assert all(error < BFLOAT16_GRADIENT for error in errors.values()), errors


@pytest.mark.parametrize("head", [16, 32])
def test_our_attention_with_small_heads(head):
    errors = random_heads(333, head).errors()
    assert errors.pop("out") < BFLOAT16
    assert all(error < BFLOAT16_GRADIENT for error in errors.values()), errors


def test_our_attention_with_low_and_vanished_scores():
    heads = random_heads(333, 64, low=-60.0, high=-55.0)
    errors = heads.errors()
    assert all(error < BFLOAT16_GRADIENT for error in errors.values()), errors
    heads = random_heads(333, 64)
    heads.log_score[:, 100:200] = -200.0
    heads.log_score[:, 200:300] = -103.0  # above zero, and below what a float32 has all its bits for
    assert all(error < BFLOAT16_GRADIENT for error in heads.errors().values())
    assert all(x.isfinite().all() for x in heads.through_kernels().values())


def test_our_attention_with_logits_in_the_hundreds():
    assert all(x.isfinite().all() for x in random_heads(333, 64, size=12.0).through_kernels().values())


@pytest.mark.parametrize(("streams", "head"), [(1000, 64), (333, 128)])
def test_our_attention_has_the_same_bits_twice(streams, head):
    heads = random_heads(streams, head)
    first, second = heads.through_kernels(), heads.through_kernels()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_our_attention_never_has_a_matrix_of_all_pairs():
    """Neither kept for the backward nor for a moment."""
    streams, sizes = 8192, []
    heads = random_heads(streams, 64, n_head=1, batch=1)
    heads.through_kernels()  # compiles

    def count(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        heads.through_kernels()
    assert 0 < max(sizes) < streams * streams
    assert torch.cuda.max_memory_allocated() - before < streams * streams


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 7, 100), (2, 333, 1536), (3, 1000, 3072)])
def test_our_gelu_in_bfloat16(shape):
    from kernels.block_probe import gelu_results, on_a_grid, plain_gelu
    from thoughtbubbles.kernels.ops import gelu

    x, bias = on_a_grid(*shape, device="cuda").bfloat16(), on_a_grid(shape[-1], device="cuda")
    upstream = torch.randn(shape, device="cuda").bfloat16()
    ours, again = (gelu_results(x, bias, upstream, gelu) for _ in range(2))
    exact = gelu_results(x.double(), bias.double(), upstream.double(), plain_gelu)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    assert [a.dtype for a in ours] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for a, b in zip(ours[:2], exact[:2], strict=True):  # one rounding, of half a unit in the last of 8 bits
        assert ((a.double() - b).abs() <= b.abs() / 256 + 1e-6).all()
    assert (ours[2].double() - exact[2]).norm() < SAME_FUNCTION_FLOAT32 * exact[2].norm()


@pytest.mark.parametrize("shape", [(1, 1), (100, 7), (2048, 2304), (65536, 2304), (8191, 6144), (3_000_000, 3)])
def test_our_column_sums(shape):
    from thoughtbubbles.kernels.sums import column_sums

    x = torch.randn(shape, device="cuda").bfloat16()
    found, exact = column_sums(x), x.double().sum(0)
    assert torch.equal(found, column_sums(x))
    assert (found.double() - exact).norm() < SAME_FUNCTION_FLOAT32 * x.double().norm()


@pytest.mark.parametrize("form", [{}, {"gate": False}, {"save_sum": False}, {"update": False}, {"update_bias": False}])
@pytest.mark.parametrize(("rows", "channels"), [(1, 8), (7, 100), (333, 768), (3000, 2048), (1000, 5000)])
def test_our_add_and_norm_in_bfloat16(rows, channels, form):
    from kernels.norm_probe import Adds

    adds = Adds(rows, channels, dtype=torch.bfloat16, device="cuda", **form)
    first, second = adds.through_kernel(), adds.through_kernel()
    assert all(torch.equal(first[name], second[name]) for name in first)
    errors = adds.errors(first)
    for rounded in ("h", "gradient of update"):  # these are rounded once; all else is float32
        assert errors.pop(rounded, 0.0) < BFLOAT16
    assert all(error < SAME_FUNCTION_FLOAT32 for error in errors.values()), errors


@pytest.mark.parametrize("near", [0, 7, 64])
@pytest.mark.parametrize(("streams", "unused", "head"), [(333, 20, 64), (1024, 0, 64), (512, 5, 128)])
def test_attention_to_near_forks(streams, unused, head, near):
    heads = random_heads(streams, head, near=near, n_unused=unused)
    first, second = heads.through_kernels(), heads.through_kernels()
    used = heads.reach.token < heads.reach.up_to.shape[1]
    for name in first:
        rows = slice(None) if name == "bias" else used
        assert torch.equal(first[name][rows], second[name][rows]), name
    for name, error in heads.errors(first).items():
        assert error < (BFLOAT16 if name == "out" else BFLOAT16_GRADIENT), (name, error)


@pytest.mark.parametrize("head_gate", [False, True])
@pytest.mark.parametrize("with_copies", [True, False])
@pytest.mark.parametrize(("streams", "head"), [(333, 64), (512, 128)])
def test_a_block_on_our_kernels(streams, head, with_copies, head_gate):
    """In bfloat16, against the explicit matrix in float64: what it adds to its input, and every gradient."""
    from kernels.block_probe import module_results
    from kernels.norm_probe import error

    heads = random_heads(streams, head, n_head=4)
    block = Block(small_config(width=4 * head, n_head=4, head_gate=head_gate)).cuda()
    x = torch.randn(2, streams, 4 * head, device="cuda")
    exact = module_results(block.double(), x.double(), heads.layout(heads.log_score.double()), "reference")
    products = MixedPrecision(block.float(), "bf16", device="cuda", is_sharded=not with_copies)
    with products():
        assert block.attention.has_kernel(x)
        ours = module_results(block, x, heads.layout(heads.log_score), "fused")
    assert error(ours["added"], exact["added"]) < BFLOAT16
    errors = {name: error(ours[name], exact[name]) for name in exact}
    assert all(value < BFLOAT16_GRADIENT for value in errors.values()), errors
    assert all(grad.dtype == torch.float32 for grad in ours.values())


def training_model(**changes) -> tuple[Thoughtbubbles, torch.Tensor]:
    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_head": 4, "width": 256, "vocab_size": 1024, "fork_layers": (1, 2, 3)}
    config = ModelConfig(**{**shape, **changes})
    return Thoughtbubbles(config).cuda(), torch.randint(1024, (4, 512), device="cuda")


def products_of(model: Thoughtbubbles, with_copies: bool) -> MixedPrecision:
    return MixedPrecision(model, "bf16", device="cuda", is_sharded=not with_copies)


def step(model: Thoughtbubbles, ids: torch.Tensor, products: MixedPrecision) -> list[torch.Tensor]:
    model.zero_grad()
    with products():
        loss = model(ids, targets=ids.roll(-1, 1)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("with_copies", [True, False])
@pytest.mark.parametrize(
    "form", [*({"merge": each} for each in ("mixture", "residual", "original")), FEEDBACK, NEAR_FEEDBACK], ids=str
)
def test_a_training_step_never_waits_for_the_device(form, with_copies):
    model, ids = training_model(**form)
    products = products_of(model, with_copies)
    step(model, ids, products)
    try:
        torch.cuda.set_sync_debug_mode("error")
        products.forget()
        step(model, ids, products)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("with_copies", [True, False])
@pytest.mark.parametrize("form", [{"merge": "mixture"}, {"merge": "residual"}, FEEDBACK, NEAR_FEEDBACK], ids=str)
def test_the_same_bits_twice(form, with_copies, monkeypatch):
    """With torch's own switch for it: our sums have no atomics whose order matters."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, ids = training_model(**form)
    products = products_of(model, with_copies)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = step(model, ids, products), step(model, ids, products)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("with_copies", [True, False])
@pytest.mark.parametrize("form", [{"merge": "mixture"}, {"merge": "residual"}, FEEDBACK, NEAR_FEEDBACK], ids=str)
def test_bfloat16_against_float32(form, with_copies):
    model, ids = training_model(**form)
    rounded = step(model, ids, products_of(model, with_copies))
    model.zero_grad()
    exact = model(ids, targets=ids.roll(-1, 1)).loss
    exact.backward()
    assert rounded[0].item() == pytest.approx(exact.item(), abs=5e-3)
    ours = torch.cat([g.flatten() for g in rounded[1:]])
    theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99
