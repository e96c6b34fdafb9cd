"""What a model costs: parameters, streams per layer, FLOPs and memory, as counted everywhere in this project.

Per layer, forward + backward takes 6 · 12 D² per stream (with `block="modern"` about as much) and 6 · S² · D per row of
S streams (the causal half of attention, and of it only the visible pairs with `fork_reach`); `head_gate` adds 6 · D · N
per stream, `feedback` 6 · D² per token, and decoding 6 · D · V per decoded row. A third of this is the forward. Padding
and what activation checkpointing computes again do not count as work.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.inputs import Inputs
from thoughtbubbles.model.selection import Rule
from thoughtbubbles.model.transformer import Thoughtbubbles


class Cost(NamedTuple):
    """The cost of one row of `n_tokens` tokens."""

    parameters: int
    n_tokens: int
    streams: tuple[int, ...]  # in each block
    decoded: int  # rows that reach the output projection
    flops: int  # forward + backward

    @property
    def forward_per_token(self) -> float:
        return self.flops / 3 / self.n_tokens

    @property
    def backward_per_token(self) -> float:
        return 2 * self.forward_per_token


def cost(config: ModelConfig, n_tokens: int | None = None) -> Cost:
    n_tokens = config.block_size if n_tokens is None else n_tokens
    streams = streams_by_layer(config, n_tokens)
    decoded = streams[-1] if config.merge == "mixture" else n_tokens
    return Cost(parameter_count(config), n_tokens, streams, decoded, flops(config, n_tokens))


def flops(config: ModelConfig, n_tokens: int) -> int:
    """Forward + backward of one row."""
    streams = streams_by_layer(config, n_tokens)
    decoded = streams[-1] if config.merge == "mixture" else n_tokens
    width = config.width
    weights = 4 * width**2 + (2 if config.block == "gpt2" else 3) * width * config.hidden  # of a block's matrices
    weights += width * config.n_head if config.head_gate else 0
    blocks: int | Fraction = sum(6 * weights * s + 12 * width * visible_pairs(config, s, n_tokens) for s in streams)
    if config.feedback:  # the projection of each token's last state
        blocks += 6 * width**2 * n_tokens
    return round(blocks) + 6 * width * config.vocab_size * decoded  # output projection


def visible_pairs(config: ModelConfig, n_streams: int, n_tokens: int) -> Fraction:
    """Pairs of a query and a key that it sees, in a block of one row: S²/2, or fewer if forks have a short reach.

    Forks are taken to be spread evenly over the tokens: of the pairs with a fork as key, those count whose tokens are
    within the reach, a share of the pairs of tokens.
    """
    n_forks = n_streams - n_tokens
    originals, forks = Fraction(n_streams * n_tokens, 2), Fraction(n_streams * n_forks, 2)
    if config.fork_reach is None:
        return originals + forks
    if config.feedback:  # only forks see forks
        forks = Fraction(n_forks**2, 2)
    near = min(config.fork_reach, n_tokens - 1)
    pairs = (near + 1) * n_tokens - near * (near + 1) // 2  # of tokens s ≤ t with t − s ≤ near
    return originals + forks * Fraction(2 * pairs, n_tokens * (n_tokens + 1))


def parameter_count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Thoughtbubbles(config).parameters())


def streams_by_layer(config: ModelConfig, n_tokens: int) -> tuple[int, ...]:
    """Slots in each block: the budget's cap, once there are enough candidates to reach it."""
    rule, streams, found = Rule.of(config), config.copies * n_tokens, []
    for layer in range(config.n_layer):
        if layer in config.fork_layers:
            streams = rule.n_slots(streams, n_tokens)
        found.append(streams)
    return tuple(found)


def training_state_bytes(config: ModelConfig) -> int:
    """Float32 weights, gradients and AdamW's two moments."""
    return 16 * parameter_count(config)


def activation_bytes(config: ModelConfig, n_tokens: int | None = None, *, rows: int = 1) -> int:
    """Bytes that autograd saves for the backward, without compilation, with bfloat16 products and a float32 residual.

    Not a formula: the forward itself runs on fake tensors, and every saved storage is counted once, except weights.
    """
    n_tokens = config.block_size if n_tokens is None else n_tokens
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        kept.append(tensor)  # so that no storage is freed and its address reused
        return tensor

    kept: list[Tensor] = []
    with FakeTensorMode():
        model = Thoughtbubbles(config)
        given = Inputs(
            ids=torch.zeros(rows, n_tokens, dtype=torch.int64),
            targets=torch.zeros(rows, n_tokens, dtype=torch.int64),
            lengths=torch.full((rows,), n_tokens),
            rule=Rule.of(config),
        )
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            model.run(given)
    return sum(size for storage, size in saved.items() if storage not in weights)
