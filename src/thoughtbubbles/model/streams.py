"""Streams: the state between layers, and everything derived from it.

Example: a row of two tokens, the second of which has forked once (letters are tokens, `'` marks the fork):

    slot      0    1    2    3
    stream    a    b'   b    ·        · is an unused slot: token = T, at the right end
    token     0    1    1    2        non-decreasing
    start     0    1    1    3        first slot of the stream's bubble
    end       0    2    2    3        last slot of the bubble: its original
    position  0   1/2   1    2        k − p/q, p = 0, 1, … from the right in token k's bubble of q streams
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Streams(NamedTuple):
    """The residual streams between two layers. Immutable: layers return new ones."""

    x: Float[Tensor, "B S D"]
    log_score: Float[Tensor, "B S"]  # sum over the stream and its ancestors, ≤ 0; at least float32
    token: Int[Tensor, "B S"]  # the token that a stream belongs to; T in unused slots


class Bubbles(NamedTuple):
    """First and last slot (inclusive) of each stream's bubble. Every unused slot is its own bubble."""

    start: Int[Tensor, "B S"]
    end: Int[Tensor, "B S"]

    @property
    def size(self) -> Int[Tensor, "B S"]:
        return self.end - self.start + 1


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores, selection, positions, merge weights and loss are always computed in at least float32."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return tensor.to(accumulation_dtype(tensor.dtype))


def slots(token: Int[Tensor, "B S"]) -> Int[Tensor, "1 S"]:
    return torch.arange(token.shape[1], device=token.device)[None]


def is_original(token: Int[Tensor, "B S"], n_tokens: int) -> Bool[Tensor, "B S"]:
    """A token's original is the last stream of its bubble."""
    return token != F.pad(token[:, 1:], (0, 1), value=n_tokens)


def streams_up_to(token: Int[Tensor, "B S"], n_tokens: int) -> Int[Tensor, "B T"]:
    """For each t, the number of streams (or candidates) of tokens 0 … t: all slots up to the original of t."""
    n_used = (token < n_tokens).sum(1, keepdim=True)
    if n_tokens == 1:  # a decoding step: no scatter, which would be a separate kernel
        return n_used
    # Each token is written once, by its original (other streams go to column T); never past a padded row's end.
    column = torch.where(is_original(token, n_tokens), token, n_tokens)
    count = (slots(token) + 1).int().expand_as(token)  # an int64 scatter would not fuse when compiled for a GPU
    return n_used.int().expand(-1, n_tokens + 1).scatter(1, column, count)[:, :n_tokens].long()


def bubble_sizes(token: Int[Tensor, "B S"], n_tokens: int) -> Int[Tensor, "B T"]:
    """Streams (or candidates) of each token; 0 past a padded row's end."""
    up_to = streams_up_to(token, n_tokens)
    return up_to - F.pad(up_to[:, :-1], (1, 0))


def find_bubbles(token: Int[Tensor, "B S"], n_tokens: int) -> Bubbles:
    up_to = streams_up_to(token, n_tokens)
    own = token.clamp(max=n_tokens - 1)
    start, end = take(F.pad(up_to[:, :-1], (1, 0)), own), take(up_to, own) - 1
    used = token < n_tokens
    return Bubbles(torch.where(used, start, slots(token)), torch.where(used, end, slots(token)))


def originals(token: Int[Tensor, "B S"], n_tokens: int) -> Int[Tensor, "B T"]:
    """The slot of each token's original. Past a padded row's end: the row's last original (harmless placeholder)."""
    return streams_up_to(token, n_tokens) - 1


def positions(token: Int[Tensor, "B S"], bubbles: Bubbles, dtype: torch.dtype) -> Float[Tensor, "B S"]:
    """k − p/q: the more streams in a bubble, the closer their positions. Not a running sum, which would drift."""
    from_the_right = (bubbles.end - slots(token)).to(dtype)
    return token.to(dtype) - from_the_right / bubbles.size.to(dtype)


def take(values: Tensor, slot: Int[Tensor, "B n"]) -> Tensor:
    """values[b, slot[b, i]] for values of shape (B, S) or (B, S, …)."""
    trailing = values.shape[2:]
    index = slot.reshape(*slot.shape, *(1 for _ in trailing)).expand(*slot.shape, *trailing)
    return values.gather(1, index)


def take_or_zero(values: Tensor, slot: Int[Tensor, "B n"]) -> Tensor:
    """Like `take`, but slots past the end give 0."""
    taken = take(values, slot.clamp(max=values.shape[1] - 1))
    there = (slot < values.shape[1]).reshape(*slot.shape, *(1 for _ in values.shape[2:]))
    return torch.where(there, taken, 0)


def bubble_scan(
    values: Tensor, start: Int[Tensor, "*rows"], combine: Callable[[Tensor, Tensor], Tensor], *, max_bubble: int
) -> Tensor:
    """Segmented scan: combines each stream with all streams left of it in its bubble; the original gets the total.

    Streams are along the last dimension of `start`, whose shape is a prefix of that of `values`. Doubling steps reach
    2, 4, 8 … streams back, without scatter or atomics: results and gradients are bitwise deterministic.
    """
    dim = start.ndim - 1
    slot = torch.arange(start.shape[-1], device=start.device)
    trailing = (1,) * (values.ndim - start.ndim)
    step = 1
    while step < max_bubble:
        same_bubble = (slot - step >= start).reshape(*start.shape, *trailing)
        values = torch.where(same_bubble, combine(values, values.roll(step, dim)), values)
        step *= 2
    return values
