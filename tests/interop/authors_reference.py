"""What the authors' JAX code computes (Jemoka/fork-xla at 104ce8f), as slow float64 loops over one stream at a time.

Written from a reading of their code, in their names and their layout, with each step as they take it: the score in the
last channel of queries and keys, positions as a running sum of 1/q that begins at 1, the top k of plain numbers, the
sum over a bubble. It imports nothing of ours. Autograd runs through everything but the choice of survivors.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Tree = dict[str, Tensor]  # by slash-joined name


@dataclass
class Stream:
    x: Tensor
    log_score: Tensor
    token: int


@dataclass
class Result:
    log_probs: Tensor  # (T, V)
    kept: list[list[int]]  # for each forking block: the surviving candidates, of fork_0, keep_0, fork_1, …
    margin: float  # how far apart the last survivor and the first that was dropped are, at the least


def random_tree(plan: list[str], *, width: int, vocab_size: int, bias: bool = True, seed: int = 0) -> Tree:
    """A checkpoint's parameters, with weights large enough that nothing hides."""
    random = np.random.RandomState(seed)  # its numbers never change, so that results can be written down

    def normal(*shape: int, scale: float = 0.35) -> Tensor:
        return torch.tensor(random.standard_normal(shape) * scale)

    tree: Tree = {"wte": normal(vocab_size, width)}

    def norm(name: str) -> None:
        tree[f"{name}/weight"] = torch.tensor(random.uniform(0.5, 1.5, width))
        if bias:
            tree[f"{name}/bias"] = normal(width)

    def dense(name: str, n_in: int, n_out: int) -> None:
        tree[f"{name}/kernel"] = normal(n_in, n_out)
        if bias:
            tree[f"{name}/bias"] = normal(n_out)

    for i, kind in enumerate(plan):
        norm(f"blocks_{i}/ln_1")
        dense(f"blocks_{i}/attn/c_attn", width, 3 * width)
        dense(f"blocks_{i}/attn/c_proj", width, width)
        norm(f"blocks_{i}/ln_2")
        dense(f"blocks_{i}/mlp/c_fc", width, 4 * width)
        dense(f"blocks_{i}/mlp/c_proj", 4 * width, width)
        if kind == "fork":
            norm(f"blocks_{i}/forking_ln")
            tree[f"blocks_{i}/forking_score/kernel"] = normal(width, 2, scale=1.0)
            tree[f"blocks_{i}/fork_embedding"] = normal(width)
    norm("ln_f")
    return tree


def layer_norm(tree: Tree, name: str, x: Tensor) -> Tensor:
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    normed = (x - mean) / torch.sqrt(variance + 1e-5) * tree[f"{name}/weight"]
    return normed + tree[f"{name}/bias"] if f"{name}/bias" in tree else normed


def dense(tree: Tree, name: str, x: Tensor) -> Tensor:
    y = x @ tree[f"{name}/kernel"]
    return y + tree[f"{name}/bias"] if f"{name}/bias" in tree else y


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def turn(x: Tensor, position: float) -> Tensor:
    half = len(x) // 2
    angle = torch.tensor([position / 10000 ** (2 * i / len(x)) for i in range(half)], dtype=x.dtype)
    first, second = x[:half], x[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def fork(tree: Tree, name: str, streams: list[Stream], most: int) -> tuple[list[Stream], list[int], float]:
    candidates, numbers = [], []
    for i, stream in enumerate(streams):
        scores = dense(tree, f"{name}/forking_score", layer_norm(tree, f"{name}/forking_ln", stream.x))
        fork_score, keep_score = (-torch.nn.functional.softplus(-scores)).clamp(min=-20)
        rightmost = i == len(streams) - 1 or streams[i + 1].token != stream.token
        forked = stream.x + tree[f"{name}/fork_embedding"]
        candidates.append(Stream(forked, stream.log_score + fork_score, stream.token))
        candidates.append(Stream(stream.x, stream.log_score + keep_score, stream.token))
        numbers += [candidates[-2].log_score.item(), math.inf if rightmost else candidates[-1].log_score.item()]
    order = sorted(range(len(numbers)), key=lambda c: (-numbers[c], c))
    kept = sorted(order[:most])
    margin = math.inf if len(order) <= most else abs(numbers[order[most - 1]] - numbers[order[most]])
    return [candidates[c] for c in kept], kept, margin


def attention(tree: Tree, name: str, streams: list[Stream], heads: int, score_channel: bool) -> list[Tensor]:
    tokens = [stream.token for stream in streams]
    position, positions = 0.0, []
    for token in tokens:
        position += 1 / tokens.count(token)
        positions.append(position)
    width, size = len(streams[0].x), len(streams[0].x) // heads
    rows = [dense(tree, f"{name}/attn/c_attn", layer_norm(tree, f"{name}/ln_1", s.x)) for s in streams]
    outputs: list[list[Tensor]] = [[] for _ in streams]
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        queries = [turn(row[:width][part], p) for row, p in zip(rows, positions, strict=True)]
        keys = [turn(row[width : 2 * width][part], p) for row, p in zip(rows, positions, strict=True)]
        values = [row[2 * width :][part] * s.log_score.exp() for row, s in zip(rows, streams, strict=True)]
        if score_channel:
            queries = [torch.cat([q[:-1], torch.ones(1, dtype=q.dtype)]) for q in queries]
            keys = [torch.cat([k[:-1], s.log_score.reshape(1)]) for k, s in zip(keys, streams, strict=True)]
        for i, query in enumerate(queries):
            logits = torch.stack([query @ key / math.sqrt(size) for key in keys[: i + 1]])
            weights = torch.softmax(logits, dim=0)
            outputs[i].append(sum(w * v for w, v in zip(weights, values, strict=False)))
    return [dense(tree, f"{name}/attn/c_proj", torch.cat(parts)) for parts in outputs]


def run(tree: Tree, plan: list[str], ids: list[int], *, heads: int, most: int, method: str = "residual") -> Result:
    """One row. `most`: the streams that a fork may leave alive."""
    streams = [Stream(tree["wte"][word], torch.zeros((), dtype=torch.float64), t) for t, word in enumerate(ids)]
    decisions, margin = [], math.inf
    for i, kind in enumerate(plan):
        name = f"blocks_{i}"
        if kind == "fork":
            streams, kept, gap = fork(tree, name, streams, most)
            decisions.append(kept)
            margin = min(margin, gap)
        updates = attention(tree, name, streams, heads, "fork" in plan)
        after = []
        for stream, update in zip(streams, updates, strict=True):
            score = stream.log_score.exp()
            x = stream.x + score * update
            hidden = tanh_gelu(dense(tree, f"{name}/mlp/c_fc", layer_norm(tree, f"{name}/ln_2", x)))
            after.append(Stream(x + score * dense(tree, f"{name}/mlp/c_proj", hidden), stream.log_score, stream.token))
        streams = after
    rows = []
    for t in range(len(ids)):
        bubble = [stream for stream in streams if stream.token == t]
        merged = sum(s.log_score.exp() * s.x for s in bubble) if method == "residual" else bubble[-1].x
        rows.append(torch.log_softmax(tree["wte"] @ layer_norm(tree, "ln_f", merged), dim=0))
    return Result(torch.stack(rows), decisions, margin)
