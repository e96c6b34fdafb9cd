"""A linear layer with and without a rounded copy of its weights: what is computed, and in which precision."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from helpers import BFLOAT16, SAME_FUNCTION_FLOAT32
from thoughtbubbles.model.linear import Linear, product_dtype


def narrowed(inputs: int = 24, outputs: int = 10, *, bias: bool = True) -> Linear:
    linear = Linear(inputs, outputs, bias=bias)
    linear.bf16_copy = linear.weight.detach().bfloat16()
    return linear


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((ours.double() - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("bias", [True, False])
def test_without_a_copy_it_is_torchs_own(bias):
    linear, torchs = Linear(6, 4, bias=bias).double(), torch.nn.Linear(6, 4, bias=bias).double()
    torchs.load_state_dict(linear.state_dict())
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    results = []
    for module in (linear, torchs):
        given = x.clone().requires_grad_()
        out = module(given)
        results.append([out, *torch.autograd.grad(out.square().sum(), (given, *module.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(24,), (1, 24), (7, 24), (2, 5, 24)])
def test_with_a_copy_rounded_factors_are_multiplied(shape):
    linear, x = narrowed(), torch.randn(shape)
    with torch.no_grad():
        out = linear(x)
        product = linear.product(x)
    weight, bias = linear.weight.bfloat16(), linear.bias.bfloat16()
    assert torch.equal(out, F.linear(x.bfloat16(), weight, bias))
    assert torch.equal(product, F.linear(x.bfloat16(), weight))
    assert relative(out, F.linear(x.double(), linear.weight.double(), linear.bias.double())) < BFLOAT16


def test_the_copy_is_what_is_multiplied():
    """So whoever keeps copies has to update them."""
    linear, x = narrowed(), torch.randn(3, 24)
    before = linear(x)
    torch.nn.init.normal_(linear.weight)
    assert torch.equal(linear(x), before)
    linear.bf16_copy = None
    assert not torch.equal(linear(x), before.float())


def test_the_product_has_no_bias():
    with_bias, x = Linear(24, 10).double(), torch.randn(3, 24, dtype=torch.float64)
    assert torch.equal(with_bias.product(x), x @ with_bias.weight.T)
    assert torch.equal(with_bias.product(x) + with_bias.bias, with_bias(x))
    linear = narrowed()
    torch.nn.init.constant_(linear.bias, 1e6)
    assert linear.product(x.float()).abs().max() < 1e3 < linear(x.float()).abs().min()
    linear.product(x.float()).sum().backward()
    assert linear.weight.grad is not None
    assert linear.bias.grad is None


@pytest.mark.parametrize("shape", [(24,), (7, 24), (2, 500, 24)])
def test_gradients_with_a_copy(shape):
    """In the weights' own dtype. On a CPU the product for the weight still rounds once; the bias has a float32 sum."""
    linear, x = narrowed(), rows(*shape)
    out = linear(x)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, linear.weight, linear.bias), upstream)
    assert [g.dtype for g in grads] == [torch.float32] * 3
    assert [g.shape for g in grads] == [x.shape, linear.weight.shape, linear.bias.shape]
    above, flat = upstream.double().view(-1, 10), x.detach().bfloat16().double().view(-1, 24)
    assert relative(grads[0].view(-1, 24), above @ linear.bf16_copy.double()) < BFLOAT16
    assert relative(grads[1], above.T @ flat) < BFLOAT16
    assert relative(grads[2], above.sum(0)) < SAME_FUNCTION_FLOAT32
    once = (above.T @ flat).bfloat16()
    assert relative(grads[1], above.T @ flat) <= 1.5 * relative(once, above.T @ flat), "rounded more than once"


def test_a_product_alone_has_the_same_gradients():
    linear, x = narrowed(), rows(2, 9, 24)
    upstream = torch.randn(2, 9, 10).bfloat16()
    whole = torch.autograd.grad(linear(x), (x, linear.weight), upstream)
    alone = torch.autograd.grad(linear.product(x), (x, linear.weight), upstream)
    assert all(torch.equal(a, b) for a, b in zip(whole, alone, strict=True))


def test_no_bias_at_all():
    linear, x = narrowed(bias=False), rows(4, 24)
    assert torch.equal(linear(x), linear.product(x))
    linear(x).sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_used_twice_gradients_add_up():
    linear = narrowed(10, 10)
    x, upstream = torch.randn(5, 10), torch.randn(5, 10).bfloat16()
    first = linear(x)
    middle = first.detach().requires_grad_()
    (second,) = torch.autograd.grad(linear(middle), linear.weight, upstream)
    (to_middle,) = torch.autograd.grad(linear(middle), middle, upstream)
    (before,) = torch.autograd.grad(first, linear.weight, to_middle)
    (both,) = torch.autograd.grad(linear(linear(x)), linear.weight, upstream)
    torch.testing.assert_close(both, before + second)


def test_a_frozen_input_and_frozen_weights():
    linear, x = narrowed(), torch.randn(3, 24)
    linear(x).sum().backward()
    assert linear.weight.grad is not None
    linear.requires_grad_(False)
    x.requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not linear(x).requires_grad


def test_the_copy_is_never_saved():
    linear, plain = narrowed(), Linear(24, 10)
    assert linear.state_dict().keys() == plain.state_dict().keys() == {"weight", "bias"}
    assert not dict(linear.named_buffers())
    assert Linear(24, 10).bf16_copy is None, "it belongs to one module, not to the class"


def test_under_autocast():
    """The copy replaces the cast that autocast makes: the same numbers."""
    linear, x = narrowed(), rows(6, 24)
    plain = Linear(24, 10)
    plain.load_state_dict(linear.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = linear(x), plain(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    upstream = torch.randn_like(ours)
    ours, theirs = (
        torch.autograd.grad(out, (x, *module.parameters()), upstream)
        for out, module in ((ours, linear), (theirs, plain))
    )
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b.double()) < BFLOAT16


def test_product_dtype_follows_autocast():
    single, half, double = (torch.zeros(1, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float64))
    assert [product_dtype(x) for x in (single, half, double)] == [torch.float32, torch.bfloat16, torch.float64]
    with torch.autocast("cpu", torch.bfloat16):
        seen = [product_dtype(x) for x in (single, half, double)]
        assert seen == [torch.bfloat16, torch.bfloat16, torch.float64]
        assert seen == [(x[None] @ x[:, None]).dtype for x in (single, half, double)]
        with torch.autocast("cpu", enabled=False):
            assert product_dtype(single) == torch.float32


COMPILED = """
import torch
from thoughtbubbles.model.linear import Linear

torch.manual_seed(0)
model = torch.nn.Sequential(Linear(24, 10), Linear(10, 6))
x = torch.randn(3, 7, 24)
graphs = []

def backend(graph, inputs):
    from torch._dynamo.backends.registry import lookup_backend
    graphs.append(graph)
    return lookup_backend("aot_eager")(graph, inputs)

compiled = torch.compile(model, fullgraph=True, backend=backend)
for has_copy in (False, True):
    for linear in model:
        linear.bf16_copy = linear.weight.detach().bfloat16() if has_copy else None
    for _ in range(3):
        results = []
        for run in (model, compiled):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = run(x)
            out.sum().backward()
            results.append([out, *(p.grad for p in model.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():  # updated in place: the compiled code reads them again
            for linear in model:
                linear.weight.normal_()
                if has_copy:
                    linear.bf16_copy.copy_(linear.weight)
assert len(graphs) == 2, len(graphs)
"""


@pytest.mark.slow
def test_compiled_in_one_graph():
    """In a separate process: torch.compile cannot trace the shape checks of the test run. New copies, old code."""
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n_rows", [1, 7, 4096])
def test_on_a_gpu_the_gradient_of_the_weight_is_not_rounded(n_rows):
    linear = Linear(64, 48).cuda()
    linear.bf16_copy = linear.weight.detach().bfloat16()
    x = torch.randn(n_rows, 64, device="cuda").bfloat16().requires_grad_()
    out = linear(x)
    upstream = torch.randn_like(out)
    weight, bias = torch.autograd.grad(out, (linear.weight, linear.bias), upstream)
    exact = upstream.double().T @ x.detach().double()
    assert weight.dtype == bias.dtype == torch.float32
    assert relative(weight, exact) < SAME_FUNCTION_FLOAT32
    assert relative(exact.bfloat16(), exact) > 10 * relative(weight, exact)
    assert relative(bias, upstream.double().sum(0)) < SAME_FUNCTION_FLOAT32
