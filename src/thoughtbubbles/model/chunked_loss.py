"""The loss of loss.py and its gradients, computed one chunk of rows at a time.

With weights w = softmax(a) and responsibilities ρ = softmax(a + l) within a bubble,

    ∂nll/∂logits_j = ρ_j · (softmax(W h_j) − onehot(target)),    ∂nll/∂a_j = w_j − ρ_j.

mean_loss       the mean over all targets that are not ignored. A chunk owns complete bubbles, so it has all it needs
                for their responsibilities, and all gradients are computed in the forward pass while the chunk's logits
                exist. The backward only scales them, which is correct for a scalar loss only.
row_log_prob    l_j for every row. The backward gets one upstream gradient per row and recomputes the logits.

Both are custom operators, opaque to torch.compile, so a graph does not grow with the number of chunks. On a GPU one
kernel (kernels/loss.py) turns the logits of a chunk of `mean_loss` into their gradient; `_reference_chunks` is its
reference implementation.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from thoughtbubbles import kernels
from thoughtbubbles.kernels import ops
from thoughtbubbles.model.streams import accumulation_dtype, bubble_scan

IGNORED = -100  # the target of a row that does not count
CHUNK_ROWS = {"cpu": 256, "cuda": 4096}  # at most: little memory, but matrix products large enough to be fast
USUAL_VOCABULARY = 50304  # on a GPU the bound is on bytes: a smaller vocabulary than this allows more rows
TILE = 128  # rows in a tile of a matrix product on a GPU: one row more would cost a full tile
_ADDS_FLOAT32_PRODUCTS = "dtype_out" in torch.ops.aten.addmm.overloads()  # float32 sum += bfloat16 @ bfloat16, fused


def _chunk_rows(hidden: Tensor, weight: Tensor, *, overlap: int = 0) -> int:
    """Rows per chunk, for the fewest equal chunks that are small enough. A chunk's products have `overlap` more."""
    n_rows, kind = hidden.shape[0], hidden.device.type
    if kind == "cpu":
        return max(1, _up(n_rows, _up(n_rows, CHUNK_ROWS["cpu"])))
    most = CHUNK_ROWS.get(kind, CHUNK_ROWS["cuda"]) * USUAL_VOCABULARY // weight.shape[0]
    n_chunks = _up(n_rows, max(most - overlap, most // 2, 1))
    return max(1, _up(_up(n_rows, n_chunks) + overlap, TILE) * TILE - overlap)


def _up(number: int, by: int) -> int:
    return -(-number // max(1, by))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in at least float32; only the CPU rounds the product of bfloat16 factors first."""
    if _gives_float32(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(accumulation_dtype(a.dtype))


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif _gives_float32(a):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(a, b))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, fused into the matrix product where the device supports it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif _gives_float32(a) and _ADDS_FLOAT32_PRODUCTS:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(_product(a, b))


def _gives_float32(a: Tensor) -> bool:
    """Whether the device can return products of this low-precision operand in float32, without rounding."""
    return a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)


class _Chunk:
    """The log-likelihoods of some rows, and their gradients. Holds one (rows, V) buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor):
        self.hidden, self.weight = hidden, weight
        self.target = torch.where(target == IGNORED, 0, target)[:, None]
        logits = _product(hidden, weight.T)
        at_target = logits.gather(1, self.target)
        largest = logits.amax(dim=1, keepdim=True)
        self.unnormalised = logits.sub_(largest).exp_()
        self.normaliser = self.unnormalised.sum(dim=1, keepdim=True)
        self.log_prob = (at_target - largest - self.normaliser.log())[:, 0]

    def pull_back(self, upstream: Tensor, hidden_grad: Tensor, weight_grad: Tensor) -> None:
        """Adds the gradients of Σ upstream · log_prob for the rows and for the weight. Overwrites the buffer."""
        upstream = upstream[:, None]
        logits_grad = self.unnormalised.mul_(-upstream / self.normaliser)
        logits_grad.scatter_add_(1, self.target, upstream)
        logits_grad = logits_grad.to(self.hidden.dtype)
        _add_product(hidden_grad, logits_grad, self.weight)
        _add_product(weight_grad, logits_grad.T, self.hidden)


class _Rows(NamedTuple):
    """The rows to decode: hidden and weight in the dtype of matrix products, scores in the dtype of sums."""

    hidden: Tensor
    weight: Tensor
    log_score: Tensor
    target: Tensor
    start: Tensor
    end: Tensor
    max_bubble: int


class _Gradients(NamedTuple):
    """Gradients of the summed loss, accumulated from zero."""

    hidden: Tensor
    weight: Tensor
    score: Tensor


class _Window(NamedTuple):
    """Rows `begin` … `stop`, whose logits exist together. Owns the bubbles that begin in its first `n_owned` rows.

    It extends past these rows far enough for the longest possible bubble. So all boundaries are known without reading
    the bubbles, which would synchronise with the device. A row in two windows gets its gradient in one of them only.
    """

    begin: int
    stop: int
    n_owned: int


def _windows(rows: _Rows) -> Iterator[_Window]:
    n_rows, overlap = rows.hidden.shape[0], rows.max_bubble - 1
    step = _chunk_rows(rows.hidden, rows.weight, overlap=overlap)
    for begin in range(0, n_rows, step):
        yield _Window(begin, min(begin + step + overlap, n_rows), min(step, n_rows - begin))


def _made_ahead(rows: _Rows, *, with_gradients: bool, by_kernel: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = rows.log_score.dtype
    originals = rows.end == torch.arange(len(rows.end), device=rows.end.device)
    one_share = 1 / ((rows.target != IGNORED) & originals).sum().clamp(min=1).to(dtype)
    nll = torch.zeros_like(rows.log_score)  # of each bubble, at one of its rows
    grads = None
    if with_gradients:
        grads = _Gradients(*(torch.zeros_like(x, dtype=dtype) for x in (rows.hidden, rows.weight, rows.log_score)))
    (_kernel_chunks if by_kernel else _reference_chunks)(rows, nll, grads)
    return nll.sum() * one_share, one_share, *(grads or (nll.new_empty(0) for _ in range(3)))


def _reference_chunks(rows: _Rows, nll: Tensor, grads: _Gradients | None) -> None:
    for begin, stop, n_owned in _windows(rows):
        here = slice(begin, stop)
        chunk = _Chunk(rows.hidden[here], rows.weight, rows.target[here])
        first, last = rows.start[here] - begin, rows.end[here] - begin
        is_original = last == torch.arange(stop - begin, device=last.device)
        last = last.clamp(max=stop - begin - 1)

        prior = rows.log_score[here]
        joint = prior + chunk.log_prob
        prior_total = bubble_scan(prior, first, torch.logaddexp, max_bubble=rows.max_bubble)[last]
        joint_total = bubble_scan(joint, first, torch.logaddexp, max_bubble=rows.max_bubble)[last]
        counts = (first >= 0) & (first < n_owned) & (rows.target[here] != IGNORED)
        nll[here] += torch.where(counts & is_original, prior_total - joint_total, 0)
        if grads is not None:
            responsibility = torch.where(counts, (joint - joint_total).exp(), 0)
            prior_weight = torch.where(counts, (prior - prior_total).exp(), 0)
            grads.score[here] += prior_weight - responsibility
            chunk.pull_back(-responsibility, grads.hidden[here], grads.weight)
        del chunk  # before the next one is created: only one buffer at a time


def _kernel_chunks(rows: _Rows, nll: Tensor, grads: _Gradients | None) -> None:
    from thoughtbubbles.kernels.loss import mixture

    log_score, target, start, end = (x.contiguous() for x in (rows.log_score, rows.target, rows.start, rows.end))
    windows = list(_windows(rows))
    most, dtype = max((w.stop - w.begin for w in windows), default=0), rows.hidden.dtype
    every_logits = _room_for_logits(rows, most, torch.float32)
    every_grad = every_logits if dtype == torch.float32 else _room_for_logits(rows, most if grads else 0, dtype)
    for begin, stop, n_owned in windows:
        hidden, logits, logits_grad = rows.hidden[begin:stop], every_logits[: stop - begin], every_grad[: stop - begin]
        _product_into(logits, hidden, rows.weight.T)
        mixture(
            logits,
            logits_grad if grads else None,
            log_score,
            target,
            start,
            end,
            nll,
            grads.score if grads else nll,
            begin=begin,
            n_owned=n_owned,
            max_bubble=rows.max_bubble,
            ignored=IGNORED,
        )
        if grads is not None:
            _add_product(grads.hidden[begin:stop], logits_grad, rows.weight)
            _add_product(grads.weight, logits_grad.T, hidden)


def _room_for_logits(rows: _Rows, n_rows: int, dtype: torch.dtype) -> Tensor:
    """Rows begin at multiples of 16 elements for any vocabulary: matrix products are far slower otherwise."""
    vocabulary = rows.weight.shape[0]
    room = torch.empty(n_rows, _up(vocabulary, 16) * 16, dtype=dtype, device=rows.weight.device)
    if room.shape[1] > vocabulary:
        room[:, vocabulary:] = 0  # some products read past the end of a row, times zero: NaN would stay NaN
    return room[:, :vocabulary]


def _mean_loss(
    hidden: Tensor,
    weight: Tensor,
    log_score: Tensor,
    target: Tensor,
    start: Tensor,
    end: Tensor,
    max_bubble: int,
    dtype: torch.dtype,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, 1 / number of targets, and the gradients of the *sum* for rows, weight and scores (if requested).

    Of the sum, not of the mean: a factor of 1 / n would underflow in a float16 product.
    """
    if hidden.device.type == "cpu":  # where reading a value does not synchronise
        max_bubble = int((end - start).max()) + 1 if len(end) else 1
    rows = _Rows(hidden.to(dtype), weight.to(dtype), log_score, target, start, end, min(max_bubble, max(1, len(end))))
    return _made_ahead(
        rows,
        with_gradients=with_gradients,
        by_kernel=kernels.for_loss(hidden.device, log_score.dtype, max_bubble=rows.max_bubble),
    )


def _mean_loss_shapes(hidden, weight, log_score, target, start, end, max_bubble, dtype, with_gradients):  # type: ignore[no-untyped-def]
    return (
        log_score.new_empty(()),
        log_score.new_empty(()),
        *(
            torch.empty_like(x, dtype=log_score.dtype) if with_gradients else log_score.new_empty(0)
            for x in (hidden, weight, log_score)
        ),
    )


def _keep_gradients(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # the gradients themselves are not differentiable
    ctx.dtypes = [x.dtype for x in inputs[:3]]
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, upstream, *_):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("mean_loss has no second derivative: the forward computes its gradients, as constants")
    if upstream is None:
        return (None,) * 9
    one_share, *grads = ctx.saved_tensors
    factor = upstream * one_share
    return *((grad * factor).to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), *(None,) * 6


mean_loss = ops.register(
    "mean_loss", _mean_loss, shapes=_mean_loss_shapes, backward=_scale_gradients, save=_keep_gradients
)


def _row_log_prob(hidden: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    cast = weight.to(dtype)
    size = _chunk_rows(hidden, weight)
    pairs = zip(hidden.split(size), target.split(size), strict=True)
    return torch.cat([_Chunk(rows.to(dtype), cast, targets).log_prob for rows, targets in pairs])


def _row_log_prob_shapes(hidden, weight, target, dtype):  # type: ignore[no-untyped-def]
    return hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))


def _row_log_prob_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cast = weight.to(dtype)
    hidden_grad, weight_grad = (torch.zeros_like(x, dtype=upstream.dtype) for x in (hidden, weight))
    size = _chunk_rows(hidden, weight)
    pieces = (x.split(size) for x in (hidden, target, upstream, hidden_grad))
    for rows, targets, share, rows_grad in zip(*pieces, strict=True):
        _Chunk(rows.to(dtype), cast, targets).pull_back(share, rows_grad, weight_grad)
    return hidden_grad.to(hidden.dtype), weight_grad.to(weight.dtype)


def _row_gradients_shapes(upstream, hidden, weight, target, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(hidden), torch.empty_like(weight)


def _keep_inputs(ctx, inputs, output):  # type: ignore[no-untyped-def]
    hidden, weight, target, ctx.dtype = inputs
    ctx.save_for_backward(hidden, weight, target)


def _row_log_prob_pull_back(ctx, upstream):  # type: ignore[no-untyped-def]
    return *row_gradients(upstream, *ctx.saved_tensors, ctx.dtype), None, None


row_gradients = ops.register("row_log_prob_backward", _row_log_prob_backward, shapes=_row_gradients_shapes)
row_log_prob = ops.register(
    "row_log_prob", _row_log_prob, shapes=_row_log_prob_shapes, backward=_row_log_prob_pull_back, save=_keep_inputs
)
