"""Run by kernels/interpreted.py: the kernel of the loss, on the CPU, against float64 formulas.

`kernel`: prints the largest errors of one pass over random rows, all outputs being NaN before, as one JSON object.
`mean`: the largest relative difference of loss and gradients between the full path by kernel and the reference.
"""

import json
import sys

import torch
from torch import Tensor

from thoughtbubbles.kernels import loss as kernels
from thoughtbubbles.model import chunked_loss
from thoughtbubbles.model.loss import IGNORED

NAN = float("nan")


def random_bubbles(n_tokens: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(start, end, token) of rows in bubbles of 1 … most, the smallest and the largest among them."""
    size = torch.randint(1, most + 1, (n_tokens,))
    size[0], size[-1] = most, 1
    token = torch.repeat_interleave(torch.arange(n_tokens), size)
    return torch.searchsorted(token, token), torch.searchsorted(token, token, right=True) - 1, token


def exact(logits: Tensor, log_score: Tensor, target: Tensor, start: Tensor) -> list[Tensor]:
    """Summed loss and its gradients for logits and scores, bubble by bubble."""
    leaves = [x.double().requires_grad_() for x in (logits, log_score)]
    total = leaves[0].sum() * 0 + leaves[1].sum() * 0
    for first in start.unique():
        mine, wanted = start == first, target[first]
        if wanted != IGNORED:
            log_prob = leaves[0][mine].log_softmax(1)[:, wanted]
            total = total + leaves[1][mine].logsumexp(0) - (leaves[1][mine] + log_prob).logsumexp(0)
    return [total.detach(), *torch.autograd.grad(total, leaves)]


def kernel(vocabulary: int, most: int, dtype: torch.dtype, *, step: int, lowest: float = -3) -> dict[str, float | bool]:
    start, end, token = random_bubbles(12, most)
    n_rows = len(token)
    logits = 4 * torch.randn(n_rows, vocabulary)
    logits[0] *= 100
    log_score = lowest * (1 - 0.05 * torch.rand(n_rows)) if lowest < -50 else lowest * torch.rand(n_rows)
    target = torch.randint(vocabulary, (12,))
    target[torch.tensor([1, 4, 9])] = IGNORED
    target[0] = vocabulary - 1
    target = target[token]
    expected, expected_grad, expected_score = exact(logits, log_score, target, start)
    nll, score = torch.full((n_rows,), NAN), torch.full((n_rows,), NAN)
    grad = torch.zeros(n_rows, vocabulary, dtype=torch.float64)
    finite = True
    for begin in range(0, n_rows, step):
        window = logits[begin : begin + step + most - 1].clone()
        into = window if dtype == torch.float32 else torch.full_like(window, NAN, dtype=dtype)
        arguments = {"begin": begin, "n_owned": min(step, n_rows - begin), "max_bubble": most, "ignored": IGNORED}
        kernels.mixture(window, into, log_score, target, start, end, nll, score, **arguments)
        finite &= bool(into.isfinite().all())
        grad[begin : begin + len(into)] += into
    return {
        "finite": finite and bool(nll.isfinite().all() and score.isfinite().all()),
        "nll": float((nll.double().sum() - expected).abs() / expected),
        "score": float((score - expected_score).abs().max()),
        "logits": float((grad - expected_grad).norm() / expected_grad.norm()),
        "worst": float((grad - expected_grad).abs().max()),
        "is_rounded": dtype != torch.float32,
    }


def mean(dtype: torch.dtype, most: int, *, chunk_rows: int) -> dict[str, float | bool]:
    start, end, token = random_bubbles(9, most)
    hidden, weight = torch.randn(len(token), 6), torch.randn(50, 6)
    target = torch.randint(50, (9,))
    target[3] = IGNORED
    target, log_score = target[token].repeat_interleave(2)[::2], -3 * torch.rand(len(token), 2)[:, 1]  # not contiguous
    rows = chunked_loss._Rows(hidden.to(dtype), weight.to(dtype), log_score, target, start, end, max_bubble=most)
    chunked_loss.CHUNK_ROWS["cpu"] = chunk_rows
    torch.use_deterministic_algorithms(True)  # which fills every new buffer with NaN
    ours, again, plain = (chunked_loss._made_ahead(rows, with_gradients=True, by_kernel=k) for k in (True, True, False))
    alone, *nothing = chunked_loss._made_ahead(rows, with_gradients=False, by_kernel=True)
    pairs = zip(ours, plain, strict=True)
    return {
        "difference": float(torch.stack([(a - b).norm() / b.norm().clamp(min=1e-3) for a, b in pairs]).max()),
        "is_rounded": dtype != torch.float32,
        "same_bits": all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)),
        "same_without_gradients": torch.equal(alone, ours[0]) and not any(x.numel() for x in nothing[1:]),
    }


def no_such_target() -> dict[str, bool]:
    start, end, _ = random_bubbles(3, 2)
    rows = chunked_loss._Rows(
        torch.randn(len(start), 4), torch.randn(9, 4), torch.zeros(len(start)), start * 0, start, end, 2
    )
    found = {}
    for wrong in (-1, 9, 10**9):
        value, *_ = chunked_loss._made_ahead(
            rows._replace(target=start * 0 + wrong), with_gradients=True, by_kernel=True
        )
        found[str(wrong)] = bool(value.isnan())
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    kernels.COLUMNS = 64  # several turns for a short row
    float32, bfloat16 = torch.float32, torch.bfloat16
    cases = {
        "kernel": lambda: {
            "bubbles": kernel(257, 8, float32, step=7),
            "bubbles, bfloat16": kernel(50, 8, bfloat16, step=100),
            "chunks of one row": kernel(64, 3, bfloat16, step=1),
            "low scores": kernel(130, 8, float32, step=5, lowest=-60),
            "single": kernel(1000, 1, bfloat16, step=5),
            "single, few columns": kernel(3, 1, float32, step=100),
        },
        "mean": lambda: {
            f"{dtype}, up to {most} in chunks of {size}": mean(dtype, most, chunk_rows=size)
            for dtype, most, size in [(float32, 8, 7), (float32, 1, 2), (bfloat16, 8, 256), (bfloat16, 4, 1)]
        },
        "no such target": no_such_target,
    }
    json.dump(cases[sys.argv[1]](), sys.stdout)
