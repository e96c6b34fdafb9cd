"""The optimizer's step equals torch's AdamW and Muon with clipping, up to rounding."""

import importlib.util
import math

import pytest
import torch

from helpers import (
    BFLOAT16,
    SAME_FUNCTION,
    SAME_FUNCTION_FLOAT32,
    lively_model,
    no_waiting_for_the_gpu,
    run_probe,
    small_config,
)
from kernels import adamw_probe
from thoughtbubbles.train import muon
from thoughtbubbles.train.config import OptimConfig
from thoughtbubbles.train.muon import COEFFICIENTS, ITERATIONS, orthogonalise
from thoughtbubbles.train.optim import Optimizer

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def reference(model, optim):
    """The same step, written with torch.optim."""
    named = dict(model.named_parameters())
    matrices = {n for n, p in named.items() if optim.kind == "muon" and p.ndim == 2 and n.startswith("blocks.")}
    rest = [p for n, p in named.items() if n not in matrices]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    parts = [torch.optim.AdamW(groups, betas=optim.betas, foreach=False, fused=False)]
    if matrices:
        muon = [named[n] for n in matrices]
        parts.append(torch.optim.Muon(muon, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return parts


def give_gradients(model, seed, *, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def moments(model, parts):
    """The state of torch's optimizers, under the names of ours."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}.{names[parameter]}": tensor
        for part in parts
        for parameter, state in part.state.items()
        for key, tensor in state.items()
        if key != "step"
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", SAME_FUNCTION), ("float32", SAME_FUNCTION_FLOAT32)])
def test_a_step_is_clipping_and_then_torchs_own(kind, clip, dtype, tolerance, device):
    """A limit of 0.5 clips every gradient but the second, 1e4 none. The moments are compared too, since AdamW's weights
    hardly depend on the scale of the gradient."""
    optim = OptimConfig(kind=kind, weight_decay=0.3)
    ours, theirs = (lively_model(small_config(), dtype=getattr(torch, dtype)).to(device) for _ in range(2))
    optimizer, parts = Optimizer(ours, optim), reference(theirs, optim)
    begin = [parameter.detach().clone() for parameter in ours.parameters()]
    rates = [1e-2 / (step + 1) for step in range(5)]
    for step, (lr, scale) in enumerate(zip(rates, (1.0, 1e-5, 30.0, 0.1, 1.0), strict=True)):
        give_gradients(ours, step, scale=scale)
        give_gradients(theirs, step, scale=scale)
        versions = [p._version for p in ours.parameters()]
        norm = optimizer.step(lr, clip=clip)
        assert all(p._version > v for p, v in zip(ours.parameters(), versions, strict=True))  # copies can tell
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        for part in parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        torch.testing.assert_close(norm, expected, rtol=tolerance, atol=tolerance)
        for name, moment in moments(theirs, parts).items():
            found = optimizer.tensors()[name]
            torch.testing.assert_close(found, moment, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: n + text)
    assert optimizer.updates == 5
    of_muon = {optimizer.name_of[parameter] for parameter in optimizer.parameters["muon"]}
    for (name, a), b, first in zip(ours.named_parameters(), theirs.parameters(), begin, strict=True):
        assert (a - b).norm() < BFLOAT16 * (b - first).norm() + tolerance, name
        near = tolerance
        if name in of_muon and not has_exact_stacks(device, ours):
            near = BFLOAT16 * sum(rates) * 0.2 * math.sqrt(max(a.shape))  # of the way that all steps go together
        torch.testing.assert_close(a, b, rtol=tolerance, atol=near, msg=lambda text, name=name: f"{name}: {text}")


def has_exact_stacks(device, model):
    """Whether bfloat16 products of stacked matrices have the bits of one product after another, in all of the model's
    shapes: on a GPU another kernel may compute them, by shape and alignment."""
    generator, same = torch.Generator().manual_seed(0), []
    for rows, columns in {tuple(sorted(p.shape)) for p in model.blocks.parameters() if p.ndim == 2}:
        x = torch.randn(len(model.blocks), rows, columns, generator=generator).bfloat16().to(device)
        square = x @ x.mT
        stacked = torch.baddbmm(x, square, x, beta=3.4, alpha=2.0)
        one_by_one = [torch.addmm(a, b, a, beta=3.4, alpha=2.0) for a, b in zip(x, square, strict=True)]
        same += [torch.equal(square, torch.stack([a @ a.T for a in x])), torch.equal(stacked, torch.stack(one_by_one))]
    return all(same)


def test_large_matrices_are_updated_a_few_at_a_time(monkeypatch):
    """With the same result, one at a time at least."""
    found = []
    for most in (muon.MOST_ELEMENTS, 2000, 1):
        monkeypatch.setattr(muon, "MOST_ELEMENTS", most)
        stacks, orthogonalise = [], muon.orthogonalise
        monkeypatch.setattr(muon, "orthogonalise", lambda x, f=orthogonalise, s=stacks: s.append(len(x)) or f(x))
        model = lively_model(small_config(n_layer=3, fork_layers=(1,)))
        optimizer = Optimizer(model, OptimConfig(kind="muon"))
        give_gradients(model, 0)
        optimizer.step(1e-2, clip=0.0)
        monkeypatch.setattr(muon, "orthogonalise", orthogonalise)
        found.append((max(stacks), sum(stacks), torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert [largest for largest, _, _ in found][::2] == [3, 1]
    assert {total for _, total, _ in found} == {12}
    for _, _, weights in found[1:]:
        torch.testing.assert_close(weights, found[0][2], rtol=0, atol=BFLOAT16 * 1e-2 * 0.2 * 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_orthogonalise_applies_a_polynomial_to_the_singular_values(shape, device):
    """In float64, against the polynomial of each singular value by itself."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    matrices[1] *= 1e-6
    matrices[2] = 0
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    assert ((values[:2] > 0.6) & (values[:2] < 1.3)).all()
    expected = left @ values.diag_embed() @ right
    torch.testing.assert_close(orthogonalise(matrices.to(device)).cpu(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cause", ["nan", "inf", "loss"])
def test_what_is_not_finite_changes_nothing(kind, dtype, cause, device):
    model = lively_model(small_config(), dtype=dtype).to(device)
    optimizer = Optimizer(model, OptimConfig(kind=kind))

    def everything():
        found = {**model.state_dict(), **optimizer.tensors()}
        return {name: tensor.clone() for name, tensor in found.items()}

    good, bad = torch.tensor(1.0, device=device), torch.tensor(math.inf, device=device)
    for step in range(4):
        give_gradients(model, step)
        before, skip = everything(), step in (0, 2)
        if skip and cause != "loss":
            model.final_norm.bias.grad[3] = float(cause)
        optimizer.step(1e-2, clip=1.0, loss=bad if skip and cause == "loss" else good)
        same = [torch.equal(tensor, before[name]) for name, tensor in everything().items()]
        assert all(same) if skip else not any(same)
    assert optimizer.updates == 2


def test_state_has_the_names_of_checkpoints():
    model = lively_model(small_config())
    names = set(Optimizer(model, OptimConfig(kind="muon")).tensors())
    assert {"momentum_buffer.blocks.0.mlp.up.weight", "exp_avg.embedding.weight", "exp_avg_sq.final_norm.bias"} <= names
    assert "exp_avg.blocks.0.mlp.up.weight" not in names


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=ON_GPU)],  # a quarter of a minute
)
def by_kernel(request):
    """Output of the kernel."""
    device = request.param
    if device == "cuda":
        return {"differences": adamw_probe.differences(device), "bits": adamw_probe.bits(device)}
    return run_probe("kernels.adamw_probe", interpreted=True)


@needs_triton
def test_the_kernel_is_torchs_adamw_in_float64(by_kernel):
    for case, difference in by_kernel["differences"].items():
        assert difference < SAME_FUNCTION_FLOAT32, case


@needs_triton
def test_the_kernel_gives_the_same_bits_and_skips_without_changing_one(by_kernel):
    for case, is_so in by_kernel["bits"].items():
        assert is_so, case


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_tables_are_rebuilt_when_something_has_moved(device):
    for case, is_so in adamw_probe.tables(device).items():
        assert is_so, case


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_on_a_gpu_goes_by_kernel(device, dtype):
    optimizer = Optimizer(lively_model(small_config(), dtype=dtype).to(device), OptimConfig())
    assert (optimizer._planner is not None) == (device == "cuda" and dtype == torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_does_not_wait_for_the_device(clip, kind):
    model = lively_model(small_config(), dtype=torch.float32).cuda()
    optimizer = Optimizer(model, OptimConfig(kind=kind))
    give_gradients(model, 0)
    elsewhere = [parameter.grad.clone() for parameter in model.parameters()]
    with no_waiting_for_the_gpu():
        optimizer.step(1e-2, clip=clip, loss=torch.ones((), device="cuda"))
        for parameter, gradient in zip(model.parameters(), elsewhere, strict=True):
            parameter.grad = gradient
        optimizer.step(1e-2, clip=clip)
        model.zero_grad()
    assert optimizer.updates == 2
