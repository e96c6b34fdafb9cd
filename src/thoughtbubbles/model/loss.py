"""Linear + log-softmax + negative log-likelihood without storing the logits, for mixtures of several rows per token.

Rows are residual streams after the final norm; the rows of one token (its bubble) are contiguous. With log scores a_j
and log-likelihoods l_j = log softmax(W h_j)[target] of the rows of a token, its loss is that of the mixture,

    nll = logsumexp_j(a_j) − logsumexp_j(a_j + l_j).

With one row per token this is the ordinary cross-entropy. chunked_loss.py computes it and its gradients one chunk of
rows at a time: the logits of all rows, (R, V), are never materialised.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from thoughtbubbles.model import chunked_loss
from thoughtbubbles.model.chunked_loss import IGNORED as IGNORED
from thoughtbubbles.model.linear import product_dtype
from thoughtbubbles.model.streams import accumulation_dtype


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
    without them every row is its own token.
    """
    alone = torch.arange(hidden.shape[0], device=hidden.device)
    score_dtype = accumulation_dtype(hidden.dtype)
    loss, *_ = chunked_loss.mean_loss(
        hidden,
        weight,
        hidden.new_zeros(hidden.shape[0], dtype=score_dtype) if log_score is None else log_score.to(score_dtype),
        target,
        alone if start is None else start,
        alone if end is None else end,
        max_bubble,
        product_dtype(hidden),
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, log_score)),
    )
    return loss


def row_log_prob(
    hidden: Float[Tensor, "R D"], weight: Float[Tensor, "V D"], target: Int[Tensor, "R"]
) -> Float[Tensor, "R"]:
    """log softmax(W h)[target] of each row; meaningless (but finite) where the target is `IGNORED`."""
    return chunked_loss.row_log_prob(hidden, weight, target, product_dtype(hidden))
