"""The chunked losses against the dense form: every chunk size, any upstream gradient, and the memory they need."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from helpers import BFLOAT16, SAME_FUNCTION, SAME_FUNCTION_FLOAT32, run_probe
from thoughtbubbles.model import chunked_loss, head
from thoughtbubbles.model.loss import IGNORED, mean_loss, row_log_prob

WIDTH, VOCABULARY = 5, 11


@pytest.fixture(params=[1, 2, 3, 7, 256])
def chunk_rows(request, monkeypatch):
    monkeypatch.setitem(chunked_loss.CHUNK_ROWS, "cpu", request.param)
    return request.param


def bubbles(sizes: list[int]):
    """Rows of tokens with these bubble sizes: (start, end, token)."""
    token = torch.tensor([t for t, size in enumerate(sizes) for _ in range(size)])
    return torch.searchsorted(token, token), torch.searchsorted(token, token, right=True) - 1, token


def leaves(rows: int):
    torch.manual_seed(rows)
    hidden, weight = torch.randn(rows, WIDTH, dtype=torch.float64), torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    log_score = -3 * torch.rand(rows, dtype=torch.float64)
    return [leaf.requires_grad_() for leaf in (hidden, weight, log_score)]


def dense_nll(hidden, weight, log_score, target, token, n_tokens: int):
    """The mixture written out with full distributions, token by token."""
    probabilities = (hidden @ weight.T).softmax(-1)
    nll = []
    for t in range(n_tokens):
        mine = token == t
        share = log_score[mine].softmax(0)
        nll.append(-(share @ probabilities[mine])[target[t]].log())
    return torch.stack(nll)


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [3, 1, 8, 2, 1, 1, 4], [8, 8], [5]])
def test_mean_loss(sizes, chunk_rows):
    start, end, token = bubbles(sizes)
    hidden, weight, log_score = leaves(len(token))
    target = torch.randint(VOCABULARY, (len(sizes),))
    target[0] = IGNORED if len(sizes) > 1 else target[0]
    ours = mean_loss(hidden, weight, target[token], log_score=log_score, start=start, end=end, max_bubble=8)
    real = target != IGNORED
    dense = dense_nll(hidden, weight, log_score, target.clamp(min=0), token, len(sizes))[real].mean()
    torch.testing.assert_close(ours, dense, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    grads = [torch.autograd.grad(3 * value, (hidden, weight, log_score)) for value in (ours, dense)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(1, 9), st.data())
def test_mean_loss_wherever_chunks_are_cut(sizes, rows_a_chunk, data):
    start, end, token = bubbles(sizes)
    hidden, weight, log_score = leaves(len(token))
    choice = st.one_of(st.just(IGNORED), st.integers(0, VOCABULARY - 1))
    target = torch.tensor(data.draw(st.lists(choice, min_size=len(sizes), max_size=len(sizes))))
    found = []
    for size in (rows_a_chunk, 256):
        with mock.patch.dict(chunked_loss.CHUNK_ROWS, cpu=size):
            value = mean_loss(hidden, weight, target[token], log_score=log_score, start=start, end=end, max_bubble=8)
            found.append((value, *torch.autograd.grad(value, (hidden, weight, log_score))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


def test_one_row_per_token_is_cross_entropy(chunk_rows):
    hidden, weight, _ = leaves(10)
    target = torch.randint(VOCABULARY, (10,))
    target[3] = IGNORED
    ours, dense = mean_loss(hidden, weight, target), F.cross_entropy(hidden @ weight.T, target, ignore_index=IGNORED)
    torch.testing.assert_close(ours, dense, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    grads = [torch.autograd.grad(value, (hidden, weight)) for value in (ours, dense)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


def test_row_log_prob_with_unequal_upstream_gradients(chunk_rows):
    """Gradients precomputed for a mean would be wrong here: each row has its own share of the loss, some negative."""
    hidden, weight, _ = leaves(10)
    target = torch.randint(VOCABULARY, (10,))
    share = torch.linspace(-2, 5, 10, dtype=torch.float64)
    ours = row_log_prob(hidden, weight, target)
    dense = (hidden @ weight.T).log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(ours, dense, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    grads = [torch.autograd.grad((share * value**2).sum(), (hidden, weight)) for value in (ours, dense)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


def test_token_nll_with_unequal_upstream_gradients(chunk_rows):
    sizes = [3, 1, 8, 2]
    _, _, token = bubbles(sizes)
    hidden, weight, log_score = leaves(len(token))
    target = torch.randint(VOCABULARY, (1, len(sizes)))
    share = torch.tensor([1.0, -4.0, 0.0, 2.5], dtype=torch.float64)
    rows = head.OutputRows(hidden[None], log_score[None], token[None], len(sizes), 8, True)
    ours = head.token_nll(rows, weight, target)[0]
    dense = dense_nll(hidden, weight, log_score, target[0], token, len(sizes))
    torch.testing.assert_close(ours, dense, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    grads = [torch.autograd.grad((share * value).sum(), (hidden, weight, log_score)) for value in (ours, dense)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)


def test_very_unlikely_targets_stay_finite():
    """Logits of ±2000 underflow every probability but the largest; the loss is their difference all the same."""
    hidden = torch.tensor([[2000.0], [-2000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    value = mean_loss(hidden, weight, torch.tensor([1, 0]))
    value.backward()
    assert value == 4000
    assert hidden.grad.isfinite().all()


def test_a_target_that_is_neither_real_nor_ignored_fails():
    """Never silently another token: direct calls of the loss have no input validation."""
    hidden, weight, _ = leaves(4)
    with pytest.raises((RuntimeError, IndexError)):
        mean_loss(hidden, weight, torch.full((4,), -1))


@pytest.mark.parametrize("function", [mean_loss, row_log_prob])
def test_no_second_derivative_is_better_than_a_wrong_one(function):
    hidden, weight, _ = leaves(4)
    value = function(hidden, weight, torch.randint(VOCABULARY, (4,))).sum()

    def second_derivative():
        (grad,) = torch.autograd.grad(value, hidden, create_graph=True)
        torch.autograd.grad(grad.square().sum(), hidden)

    with pytest.raises(RuntimeError):
        second_derivative()


def test_no_rows():
    hidden, weight, _ = leaves(0)
    assert mean_loss(hidden, weight, torch.zeros(0).long()) == 0
    assert row_log_prob(hidden, weight, torch.zeros(0).long()).shape == (0,)


def test_float64_is_left_alone_by_autocast():
    hidden, weight, _ = leaves(5)
    target = torch.randint(VOCABULARY, (5,))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mean_loss(hidden, weight, target), mean_loss(hidden, weight, target))
        assert mean_loss(hidden, weight, target).dtype == torch.float64


def test_gradients_do_not_vanish_in_float16():
    """A share of 1/R of the loss is applied after the products, where it cannot underflow."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16, requires_grad=True) for n in (2048, 2000))
    target = torch.randint(2000, (2048,))
    exact = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, target), (hidden, weight))
    with torch.autocast("cpu", torch.float16):
        value = mean_loss(hidden, weight, target)
    for ours, theirs in zip(torch.autograd.grad(value, (hidden, weight)), exact, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2e-3


def test_bubbles_may_be_allowed_to_be_far_larger_than_the_rows():
    hidden, weight, log_score = leaves(6)
    start, end, token = bubbles([2, 4])
    target = torch.randint(VOCABULARY, (2,))[token]
    values = [
        mean_loss(hidden, weight, target, log_score=log_score, start=start, end=end, max_bubble=most)
        for most in (4, 2**24)
    ]
    assert torch.equal(*values)


def test_nothing_but_ignored_targets():
    hidden, weight, _ = leaves(4)
    value = mean_loss(hidden, weight, torch.full((4,), IGNORED))
    assert value == 0
    assert not any(grad.any() for grad in torch.autograd.grad(value, (hidden, weight)))


def test_no_gradients_are_made_where_none_are_wanted():
    hidden, weight, _ = leaves(6)
    target = torch.randint(VOCABULARY, (6,))
    with torch.no_grad():
        value = mean_loss(hidden, weight, target)
    assert not value.requires_grad
    torch.testing.assert_close(value, mean_loss(hidden, weight, target).detach(), atol=0, rtol=0)


@pytest.mark.slow
def test_the_operators_keep_pytorchs_rules():
    """Schema, fake tensors, autograd registration and tracing, checked by torch's own test."""
    start, end, token = bubbles([2, 1, 3])
    hidden, weight, log_score = leaves(6)
    target = torch.randint(VOCABULARY, (3,))[token]
    arguments = (hidden, weight, log_score, target, start, end, 8, torch.float64, True)
    torch.library.opcheck(torch.ops.thoughtbubbles.mean_loss.default, arguments)
    torch.library.opcheck(torch.ops.thoughtbubbles.row_log_prob.default, (hidden, weight, target, torch.float64))


def test_gradients_numerically():
    start, end, token = bubbles([2, 1, 3])
    target = torch.randint(VOCABULARY, (3,))[token]

    def value(hidden, weight, log_score):
        return mean_loss(hidden, weight, target, log_score=log_score, start=start, end=end, max_bubble=4)

    assert torch.autograd.gradcheck(value, leaves(6))
    hidden, weight, _ = leaves(6)
    assert torch.autograd.gradcheck(lambda h, w: row_log_prob(h, w, target), (hidden, weight))


MEMORY = """
from loss import Case
from common import extra_peak_bytes
case = Case(4096, 256, 50304, bubbles={bubbles}, device="cpu")
case.step("{form}")  # warm up: what libraries keep is not the loss's
for leaf in case.leaves:
    leaf.grad = None
print(extra_peak_bytes(lambda: case.step("{form}"), device="cpu"))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("form", "bubbles", "low", "high"),
    [
        pytest.param("ours", True, 0, 200e6, marks=pytest.mark.slow),
        pytest.param("ours", False, 0, 200e6, marks=pytest.mark.slow),
        # At least the logits; how many copies of them torch makes differs between processors.
        pytest.param("dense", False, 4096 * 50304 * 4, 9e9, marks=pytest.mark.slow),
    ],
)
def test_memory(form, bubbles, low, high):
    """4096 rows, width 256, vocabulary 50304, forward and backward, in a separate process."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    code = MEMORY.format(form=form, bubbles=bubbles)
    run = subprocess.run([sys.executable, "-c", code], cwd=benchmarks, capture_output=True, text=True, check=True)
    assert low < int(run.stdout) < high


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.slow  # the interpreter takes about ten seconds
def test_the_kernel_against_float64():
    for case, found in run_probe("kernels.loss_probe", "kernel", interpreted=True).items():
        assert found["finite"], case
        assert found["nll"] < SAME_FUNCTION_FLOAT32, case
        assert found["score"] < SAME_FUNCTION_FLOAT32, case
        rounding = BFLOAT16 if found["is_rounded"] else SAME_FUNCTION_FLOAT32
        assert found["logits"] < rounding, case
        assert found["worst"] < rounding, case


@needs_triton
@pytest.mark.slow
def test_chunks_by_kernel_are_the_reference_chunks():
    for case, found in run_probe("kernels.loss_probe", "mean", interpreted=True).items():
        assert found["difference"] < (BFLOAT16 if found["is_rounded"] else SAME_FUNCTION_FLOAT32), case
        assert found["same_bits"], case
        assert found["same_without_gradients"], case


@needs_triton
def test_the_kernel_never_takes_a_wrong_target_for_another():
    assert all(run_probe("kernels.loss_probe", "no such target", interpreted=True).values())


@pytest.mark.parametrize(
    ("device", "rows", "vocabulary", "overlap"),
    [
        ("cpu", 1000, 50304, 7),
        ("meta", 1, 50304, 0),
        ("meta", 65536, 50304, 7),
        ("meta", 65536, 1000, 7),
        ("meta", 8193, 50257, 0),
        ("meta", 40000, 131072, 511),
        ("meta", 300, 10**9, 7),
    ],
)
def test_chunks_hold_all_rows_and_not_too_much(device, rows, vocabulary, overlap):
    """A device that is not a CPU is treated as a GPU: full tiles of rows, and a bound on the bytes of their logits."""
    hidden, weight = torch.empty(rows, 1, device=device), torch.empty(vocabulary, 1, device=device)
    own = chunked_loss._chunk_rows(hidden, weight, overlap=overlap)
    assert own >= 1
    if device == "cpu":
        assert own <= chunked_loss.CHUNK_ROWS["cpu"]
    else:
        assert (own + overlap) % chunked_loss.TILE == 0
        most = chunked_loss.CHUNK_ROWS["cuda"] * chunked_loss.USUAL_VOCABULARY // vocabulary
        assert own + overlap < most + overlap + chunked_loss.TILE


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class GpuCase:
    """Rows that are alone or in bubbles of up to 8, with about one target in eight ignored."""

    def __init__(self, rows: int, width: int, vocabulary: int, *, mixture: bool, dtype: torch.dtype):
        size = torch.randint(1, 9, (rows,)) if mixture else torch.ones(rows, dtype=torch.long)
        token = torch.repeat_interleave(torch.arange(rows), size)[:rows].contiguous()
        target = torch.randint(vocabulary, (rows,))
        target[torch.rand(rows) < (rows > 1) / 8] = IGNORED
        self.token, self.target, self.mixture, self.dtype = token.cuda(), target[token].cuda(), mixture, dtype
        # The operands are numbers that bfloat16 has: what is left is the rounding of the logits' gradient.
        hidden, weight = torch.randn(rows, width), torch.randn(vocabulary, width) / width**0.5
        leaves = (hidden.bfloat16().float(), weight.bfloat16().float(), -6 * torch.rand(rows))
        self.leaves = [leaf.cuda().requires_grad_() for leaf in leaves]

    def value(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        hidden, weight, log_score = leaves
        if not self.mixture:
            return mean_loss(hidden, weight, self.target)
        start = torch.searchsorted(self.token, self.token)
        end = torch.searchsorted(self.token, self.token, right=True) - 1
        return mean_loss(hidden, weight, self.target, log_score=log_score, start=start, end=end, max_bubble=8)

    def ours(self) -> list[torch.Tensor]:
        with torch.autocast("cuda", self.dtype, enabled=self.dtype != torch.float32):
            value = self.value(self.leaves)
        return [value.detach(), *torch.autograd.grad(3 * value, self.leaves[: 2 + self.mixture])]

    def exact(self) -> list[torch.Tensor]:
        """By the reference chunks in float64, which the tests above compare with the dense form."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        value = self.value(leaves)
        return [value.detach(), *torch.autograd.grad(3 * value, leaves[: 2 + self.mixture])]


@pytest.mark.parametrize("mixture", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "dtype"),
    [
        (1, 64, 1000, torch.bfloat16),
        (7, 768, 50304, torch.bfloat16),
        (4097, 64, 1000, torch.bfloat16),
        (4097, 768, 50304, torch.bfloat16),
        (1025, 64, 50257, torch.bfloat16),
        (1025, 64, 257, torch.float16),
        (300, 33, 1001, torch.float32),
    ],
)
class TestOnTheGpu:
    pytestmark = gpu

    def test_loss_and_gradients(self, rows, width, vocabulary, dtype, mixture, monkeypatch):
        monkeypatch.setitem(
            chunked_loss.CHUNK_ROWS, "cuda", 1024 * vocabulary // chunked_loss.USUAL_VOCABULARY + 1
        )  # several chunks
        case = GpuCase(rows, width, vocabulary, mixture=mixture, dtype=dtype)
        for ours, exact in zip(case.ours(), case.exact(), strict=True):
            bound = SAME_FUNCTION_FLOAT32 if dtype == torch.float32 or not exact.ndim else BFLOAT16
            assert (ours.double() - exact).norm() <= bound * exact.norm() + SAME_FUNCTION_FLOAT32

    def test_the_same_bits_twice(self, rows, width, vocabulary, dtype, mixture, monkeypatch):
        monkeypatch.setitem(chunked_loss.CHUNK_ROWS, "cuda", 1024 * vocabulary // chunked_loss.USUAL_VOCABULARY + 1)
        case = GpuCase(rows, width, vocabulary, mixture=mixture, dtype=dtype)
        first, second = case.ours(), case.ours()
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
