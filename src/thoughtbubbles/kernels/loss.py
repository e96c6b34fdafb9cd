"""The loss of a window of rows and its gradients for logits and scores, from logits that are read twice.

    read     each row of a bubble: the largest logit and the sum of exponentials, which give its log-likelihood l_j
    merge    weights w and responsibilities ρ of the bubble; its loss, and w_j − ρ_j for the scores
    write    ρ_j · (softmax(logits_j) − onehot(target)) for each row, in reverse order, so that the logits read last,
             which are still in the GPU's cache, come first

One program handles a full bubble: no sums across programs, so no atomics and bitwise deterministic results. The
reference implementation is `_reference_chunks` in model/chunked_loss.py.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

COLUMNS, TOGETHER, WARPS = 8192, 8, 32  # the part of a row that a program reads at a time; adjacent columns per thread
LOWEST = tl.constexpr(-1.0e30)  # below every logit, and unlike −∞ it can be subtracted from itself


@triton.jit
def _log_normaliser(row, V: tl.constexpr, LANES: tl.constexpr, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    """logsumexp of a row. Each lane keeps its own maximum and sum until the end, so no thread waits for another."""
    column = tl.arange(0, LANES)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    most = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for at in range(0, V, LANES * TOGETHER):
        logits = tl.load(row + at + column, mask=at + column < V, other=float("-inf"))
        highest = tl.maximum(most, tl.max(logits, 1))
        total = total * tl.exp(most - highest) + tl.sum(tl.exp(logits - highest[:, None]), 1)
        most = highest
    highest = tl.max(most, 0)
    return highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))


@triton.jit
def _write_gradient(  # type: ignore[no-untyped-def]
    row, grad, share, normaliser, target, V: tl.constexpr, LANES: tl.constexpr, TOGETHER: tl.constexpr
):
    column = tl.arange(0, LANES)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    blocks: tl.constexpr = (V + LANES * TOGETHER - 1) // (LANES * TOGETHER)
    for turn in range(blocks):
        here = (blocks - 1 - turn) * (LANES * TOGETHER) + column
        logits = tl.load(row + here, mask=here < V, other=0.0)
        probability = tl.exp(logits - normaliser)
        value = share * tl.where(here == target, probability - 1.0, probability)
        tl.store(grad + here, value.to(grad.dtype.element_ty), mask=here < V)


@triton.jit
def _write_zeros(grad, V: tl.constexpr, LANES: tl.constexpr, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, LANES)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    for at in range(0, V, LANES * TOGETHER):
        tl.store(grad + at + column, tl.zeros((LANES, TOGETHER), grad.dtype.element_ty), mask=at + column < V)


@triton.jit
def _log_likelihood(row, normaliser, target, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """NaN for a target outside the vocabulary, never silently another token."""
    return tl.load(row + target, mask=(target >= 0) & (target < V), other=float("nan")) - normaliser


@triton.jit(do_not_specialize=["begin", "n_owned"])
def _mixture(  # type: ignore[no-untyped-def]
    logits, logits_grad, log_score, target, start, end, nll, score_grad, begin, n_owned, stride, grad_stride,
    IGNORED: tl.constexpr, V: tl.constexpr, BUBBLE: tl.constexpr, GRADIENTS: tl.constexpr,
    LANES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0).to(tl.int64)  # in the window
    row = begin + here
    mine = logits + here * stride
    mine_grad = logits_grad + here * grad_stride
    wanted = tl.load(target + row)
    first = row
    if BUBBLE > 1:
        first = tl.load(start + row)
    owned = (first >= begin) & (first < begin + n_owned)
    if owned & (wanted != IGNORED):
        if BUBBLE == 1:
            normaliser = _log_normaliser(mine, V, LANES, TOGETHER)
            tl.store(nll + row, -_log_likelihood(mine, normaliser, wanted, V))
            if GRADIENTS:
                tl.store(score_grad + row, 0.0)
                tl.debug_barrier()  # gradients may replace the logits: only after every thread has read the target's
                _write_gradient(mine, mine_grad, 1.0, normaliser, wanted, V, LANES, TOGETHER)
        elif first == row:  # the program of the bubble's first row does it all
            size = tl.load(end + row) - row + 1
            slot = tl.arange(0, BUBBLE)
            inside = slot < size
            prior = tl.load(log_score + row + slot, mask=inside, other=float("-inf"))
            joint = prior
            normalisers = tl.zeros((BUBBLE,), tl.float32)
            j = size - size
            while j < size:
                normaliser = _log_normaliser(mine + j * stride, V, LANES, TOGETHER)
                log_likelihood = _log_likelihood(mine + j * stride, normaliser, wanted, V)
                normalisers = tl.where(slot == j, normaliser, normalisers)
                joint = tl.where(slot == j, prior + log_likelihood, joint)
                j += 1
            prior_most, joint_most = tl.max(prior, 0), tl.max(joint, 0)
            weight, share = tl.exp(prior - prior_most), tl.exp(joint - joint_most)
            weights, shares = tl.sum(weight, 0), tl.sum(share, 0)
            value = (prior_most - joint_most) + (tl.log(weights) - tl.log(shares))
            tl.store(nll + row + slot, tl.where(slot == 0, value, 0.0), mask=inside)
            if GRADIENTS:
                share = share / shares
                tl.store(score_grad + row + slot, weight / weights - share, mask=inside)
                tl.debug_barrier()
                while j > 0:
                    j -= 1
                    own_share = tl.sum(tl.where(slot == j, share, 0.0), 0)
                    normaliser = tl.sum(tl.where(slot == j, normalisers, 0.0), 0)
                    _write_gradient(
                        mine + j * stride,
                        mine_grad + j * grad_stride,
                        own_share,
                        normaliser,
                        wanted,
                        V,
                        LANES,
                        TOGETHER,
                    )
    else:
        tl.store(nll + row, 0.0, mask=owned)
        if GRADIENTS:
            tl.store(score_grad + row, 0.0, mask=owned)
            _write_zeros(mine_grad, V, LANES, TOGETHER)


def mixture(
    logits: Float[Tensor, "window V"],
    logits_grad: Float[Tensor, "window V"] | None,
    log_score: Float[Tensor, "R"],
    target: Int[Tensor, "R"],
    start: Int[Tensor, "R"],
    end: Int[Tensor, "R"],
    nll: Float[Tensor, "R"],
    score_grad: Float[Tensor, "R"],
    *,
    begin: int,
    n_owned: int,
    max_bubble: int,
    ignored: int,
) -> None:
    """For the rows `begin` … of the window: fills `logits_grad`, and `nll` and `score_grad` for what the window owns.

    It owns the bubbles that begin in its first `n_owned` rows; the rows of others get no gradient here. The loss of a
    bubble is written to its first row, 0 to the rest. `logits_grad` may be `logits` itself; if None, no gradients.
    """
    vocabulary = logits.shape[1]
    columns = min(COLUMNS, triton.next_power_of_2(max(vocabulary, TOGETHER)))
    grad = logits if logits_grad is None else logits_grad
    with torch.cuda.device_of(logits):
        _mixture[(logits.shape[0],)](
            logits, grad, log_score, target, start, end, nll, score_grad, begin, n_owned, logits.stride(0),
            grad.stride(0),
            IGNORED=ignored, V=vocabulary, BUBBLE=triton.next_power_of_2(max_bubble),
            GRADIENTS=logits_grad is not None, LANES=columns // TOGETHER, TOGETHER=TOGETHER, num_warps=WARPS,
        )  # fmt: skip
