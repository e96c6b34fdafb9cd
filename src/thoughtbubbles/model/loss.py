"""Linear + log-softmax + negative log-likelihood without ever storing the logits, for mixtures of several rows a token.

Rows are residual streams after the final norm; the rows of one token (its bubble) are neighbours. With log scores a_j
and log-likelihoods l_j = log softmax(W h_j)[target] of the rows of a token, its loss is that of the mixture,

    nll = logsumexp_j(a_j) − logsumexp_j(a_j + l_j),
    ∂nll/∂logits_j = ρ_j · (softmax(W h_j) − onehot(target)),    ∂nll/∂a_j = w_j − ρ_j,

with weights w = softmax(a) and responsibilities ρ = softmax(a + l) within the bubble. One row a token is the ordinary
cross-entropy. Logits exist for one chunk of rows at a time:

mean_loss         the mean over all real targets. Chunks are cut between bubbles, so each has all it needs for its
                  responsibilities, and every gradient is made in the forward pass while the chunk's logits are at hand.
                  The backward only scales them: right for one scalar, and for nothing else.
row_log_prob      l_j for every row. The backward gets an upstream gradient for each row and computes the logits again.

Both are custom operators: opaque to torch.compile, so a graph does not grow with the number of chunks.
"""

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from thoughtbubbles.model.streams import bubble_scan, wide_dtype

IGNORED = -100  # the target of a row that counts for nothing
CHUNK_ROWS = {"cpu": 256, "cuda": 4096}  # at most: little memory, and matrix products large enough to be fast


def _chunk_rows(hidden: Tensor) -> int:
    """Rows in each of the fewest equal chunks that are small enough."""
    most = CHUNK_ROWS.get(hidden.device.type, CHUNK_ROWS["cuda"])
    n_chunks = max(1, -(-hidden.shape[0] // most))
    return max(1, -(-hidden.shape[0] // n_chunks))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or wider; only the CPU rounds a bfloat16 product on the way."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(wide_dtype(a.dtype))


class _Chunk:
    """The likelihoods of some rows, and the gradients through them. Holds one (rows, V) buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor):
        self.hidden, self.weight = hidden, weight
        self.target = torch.where(target == IGNORED, 0, target)[:, None]
        logits = _product(hidden, weight.T)
        at_target = logits.gather(1, self.target)
        largest = logits.amax(dim=1, keepdim=True)
        self.unnormalised = logits.sub_(largest).exp_()
        self.normaliser = self.unnormalised.sum(dim=1, keepdim=True)
        self.log_prob = (at_target - largest - self.normaliser.log())[:, 0]

    def pull_back(self, upstream: Tensor, weight_grad: Tensor) -> Tensor:
        """The gradient of Σ upstream · log_prob: returned for the rows, added for the weight. Consumes the buffer."""
        upstream = upstream[:, None]
        logits_grad = self.unnormalised.mul_(-upstream / self.normaliser)
        logits_grad.scatter_add_(1, self.target, upstream)
        logits_grad = logits_grad.to(self.hidden.dtype)
        if logits_grad.dtype == weight_grad.dtype:
            weight_grad.addmm_(logits_grad.T, self.hidden)
        else:
            weight_grad.add_(_product(logits_grad.T, self.hidden))
        return _product(logits_grad, self.weight)


def mean_loss(
    hidden: Float[Tensor, "R D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "R"],
    *,
    log_score: Float[Tensor, "R"] | None = None,
    start: Int[Tensor, "R"] | None = None,
    end: Int[Tensor, "R"] | None = None,
    max_bubble: int = 1,
) -> Float[Tensor, ""]:
    """The mean loss over all tokens whose target is not `IGNORED` (0 if there is none).

    `start` and `end` are the first and last row of each row's bubble, of at most `max_bubble` rows with one target;
    without them every row is a token of its own.
    """
    alone = torch.arange(hidden.shape[0], device=hidden.device)
    score_dtype = wide_dtype(hidden.dtype)
    loss, *_ = _mean_loss(
        hidden,
        weight,
        hidden.new_zeros(hidden.shape[0], dtype=score_dtype) if log_score is None else log_score.to(score_dtype),
        target,
        alone if start is None else start,
        alone if end is None else end,
        max_bubble,
        _product_dtype(hidden),
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, log_score)),
    )
    return loss


def row_log_prob(
    hidden: Float[Tensor, "R D"], weight: Float[Tensor, "V D"], target: Int[Tensor, "R"]
) -> Float[Tensor, "R"]:
    """log softmax(W h)[target] of each row; meaningless (but finite) where the target is `IGNORED`."""
    return _row_log_prob(hidden, weight, target, _product_dtype(hidden))


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Matrix products follow autocast; sums, exponentials and gradients of the weight stay in float32 or wider."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:  # which autocast leaves alone everywhere
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


@torch.library.custom_op("thoughtbubbles::mean_loss", mutates_args=())
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
    """Loss, 1 / number of real targets, and the gradients of the *sum* for rows, weight and scores (if wanted)."""
    n_rows, chunk_rows = hidden.shape[0], _chunk_rows(hidden)
    if hidden.device.type == "cpu":  # where looking costs no wait
        max_bubble = min(max_bubble, int((end - start).max()) + 1) if n_rows else 1
    hidden_grad, weight_grad, score_grad = (
        torch.zeros_like(x, dtype=log_score.dtype) if with_gradients else log_score.new_empty(0)
        for x in (hidden, weight, log_score)
    )
    hidden_narrow, weight_narrow = hidden.to(dtype), weight.to(dtype)
    real = target != IGNORED
    originals = end == torch.arange(n_rows, device=end.device)
    one_share = 1 / (real & originals).sum().clamp(min=1).to(log_score.dtype)
    total = log_score.new_zeros(())

    # A chunk begins where the bubble of its first row begins, and ends where the next chunk begins. These cuts stay on
    # the device, so a chunk has room for the longest bubble that it may have to finish, and masks what it does not own.
    cuts = torch.cat([start[::chunk_rows], start.new_full((1,), n_rows)])
    offsets = torch.arange(min(chunk_rows + max_bubble - 1, n_rows), device=start.device)
    for cut, next_cut in pairwise(cuts):
        rows = (cut + offsets).clamp(max=n_rows - 1)
        owned = cut + offsets < next_cut
        chunk = _Chunk(hidden_narrow[rows], weight_narrow, target[rows])
        last = (end[rows] - cut).clamp(max=len(offsets) - 1)
        first = start[rows] - cut

        prior = log_score[rows]
        joint = prior + chunk.log_prob
        prior_total = bubble_scan(prior, first, torch.logaddexp, max_bubble=max_bubble)[last]
        joint_total = bubble_scan(joint, first, torch.logaddexp, max_bubble=max_bubble)[last]
        counts = owned & real[rows]
        total += torch.where(counts & originals[rows], prior_total - joint_total, 0).sum()
        if with_gradients:
            responsibility = torch.where(counts, (joint - joint_total).exp(), 0)
            prior_weight = torch.where(counts, (prior - prior_total).exp(), 0)
            hidden_grad.index_add_(0, rows, chunk.pull_back(-responsibility, weight_grad))
            score_grad.index_add_(0, rows, prior_weight - responsibility)
        del chunk  # before the next one is made: only one buffer at a time
    return total * one_share, one_share, hidden_grad, weight_grad, score_grad


@_mean_loss.register_fake
def _(hidden, weight, log_score, target, start, end, max_bubble, dtype, with_gradients):  # type: ignore[no-untyped-def]
    return (
        log_score.new_empty(()),
        log_score.new_empty(()),
        *(
            torch.empty_like(x, dtype=log_score.dtype) if with_gradients else log_score.new_empty(0)
            for x in (hidden, weight, log_score)
        ),
    )


def _keep_gradients(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.dtypes = [x.dtype for x in inputs[:3]]
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, upstream, *_):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("mean_loss has no second derivative: its gradients are made ahead, as constants")
    one_share, *grads = ctx.saved_tensors
    factor = upstream * one_share
    return *((grad * factor).to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), *(None,) * 6


_mean_loss.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("thoughtbubbles::row_log_prob", mutates_args=())
def _row_log_prob(hidden: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = weight.to(dtype)
    size = _chunk_rows(hidden)
    pairs = zip(hidden.split(size), target.split(size), strict=True)
    return torch.cat([_Chunk(rows.to(dtype), narrow, targets).log_prob for rows, targets in pairs])


@_row_log_prob.register_fake
def _(hidden, weight, target, dtype):  # type: ignore[no-untyped-def]
    return hidden.new_empty(hidden.shape[0], dtype=wide_dtype(hidden.dtype))


@torch.library.custom_op("thoughtbubbles::row_log_prob_backward", mutates_args=())
def _row_log_prob_backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    narrow = weight.to(dtype)
    weight_grad = torch.zeros_like(weight, dtype=upstream.dtype)
    hidden_grads = []
    size = _chunk_rows(hidden)
    for rows, targets, share in zip(hidden.split(size), target.split(size), upstream.split(size), strict=True):
        hidden_grads.append(_Chunk(rows.to(dtype), narrow, targets).pull_back(share, weight_grad).to(hidden.dtype))
    return torch.cat(hidden_grads), weight_grad.to(weight.dtype)


@_row_log_prob_backward.register_fake
def _(upstream, hidden, weight, target, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(hidden), torch.empty_like(weight)


def _keep_inputs(ctx, inputs, output):  # type: ignore[no-untyped-def]
    hidden, weight, target, ctx.dtype = inputs
    ctx.save_for_backward(hidden, weight, target)


def _recompute(ctx, upstream):  # type: ignore[no-untyped-def]
    return *_row_log_prob_backward(upstream, *ctx.saved_tensors, ctx.dtype), None, None


_row_log_prob.register_autograd(_recompute, setup_context=_keep_inputs)
