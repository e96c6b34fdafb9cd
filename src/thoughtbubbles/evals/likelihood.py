"""log p(continuation | context), which every benchmark with choices is based on.

    row        context    continuation          the last token is not an input, since nothing after it is scored
    inputs     a b c      d e
    scored     · · d      e f                   every token of the continuation d e f, including the first one

Rows of similar lengths are batched, padded on the right and passed with their lengths, so each gives the same result as
alone. Only the bubbles that predict a token of a continuation are decoded. If a row is longer than the model's context
length (`block_size`), its context is truncated on the left.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.padding import padded
from thoughtbubbles.model import head
from thoughtbubbles.model.budget import BudgetLike
from thoughtbubbles.model.streams import Streams
from thoughtbubbles.model.transformer import Thoughtbubbles

BATCH_TOKENS = {"cpu": 4096, "mps": 8192, "cuda": 65536}  # per batch, including padding
DECODED_AT_ONCE = {"cpu": 256, "mps": 512, "cuda": 4096}  # rows of logits, each of vocabulary size


class Query(NamedTuple):
    context: tuple[int, ...]  # never empty: an empty context is one end-of-text token
    continuation: tuple[int, ...]  # at least one token; all of them are scored


class Likelihood(NamedTuple):
    log_prob: float  # nats, the sum over the continuation
    n_tokens: int  # of the continuation
    greedy: bool  # whether every token of it is the most likely one
    truncated: int  # tokens of the context that were truncated on the left


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Query:
    """Context and continuation as ids, split as lm-evaluation-harness splits them.

    White space at the end of the context moves to the continuation, since GPT-2's words begin with it. The two are
    encoded as one text; the continuation starts after as many tokens as the context has when encoded alone.
    """
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    if not context:
        return Query((tokenizer.end_of_text,), tuple(tokenizer.encode(continuation)))
    return Query(*_split(tokenizer, context, continuation, tuple(tokenizer.encode(context))))


def encode_choices(tokenizer: Tokenizer, context: str, continuations: Sequence[str]) -> list[Query]:
    """`encode_pair` for several continuations of one context, which is encoded once."""
    if not context or context[-1].isspace():
        return [encode_pair(tokenizer, context, continuation) for continuation in continuations]
    ids = tuple(tokenizer.encode(context))
    return [Query(*_split(tokenizer, context, continuation, ids)) for continuation in continuations]


def _split(
    tokenizer: Tokenizer, context: str, continuation: str, ids: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if len(continuation) > 1 and continuation[0] == " " and not continuation[1].isspace():
        return ids, tuple(tokenizer.encode(continuation))  # a new word starts here, whatever precedes it
    return ids, tuple(tokenizer.encode(context + continuation)[len(ids) :])


def log_likelihoods(
    model: Thoughtbubbles,
    queries: Sequence[Query],
    *,
    vocab_size: int,
    budget: BudgetLike | None = None,
    batch_tokens: int | None = None,
    report: Callable[[float], object] = lambda share: None,
) -> list[Likelihood]:
    """The likelihoods in the order of the queries. Ids from `vocab_size` on are never the most likely."""
    found: list[Likelihood | None] = [None] * len(queries)
    done = 0
    for index, likelihood in each_likelihood(
        model, queries, vocab_size=vocab_size, budget=budget, batch_tokens=batch_tokens
    ):
        found[index], done = likelihood, done + 1
        report(done / len(queries))
    return [likelihood for likelihood in found if likelihood is not None]


def each_likelihood(
    model: Thoughtbubbles,
    queries: Sequence[Query],
    *,
    vocab_size: int,
    budget: BudgetLike | None = None,
    batch_tokens: int | None = None,
) -> Iterator[tuple[int, Likelihood]]:
    """Index and likelihood of each query, as batches finish; the longest first, so that out-of-memory fails early."""
    for number, query in enumerate(queries):
        _check(query, number, model.config.block_size)
    limit = batch_tokens or BATCH_TOKENS[model.embedding.weight.device.type]
    if limit < 1:
        raise ValueError(f"batch_tokens = {batch_tokens}: give 1 or more")
    for batch in batches([_n_inputs(query, model.config.block_size) for query in queries], limit=limit):
        yield from zip(
            batch, _score(model, [queries[i] for i in batch], vocab_size=vocab_size, budget=budget), strict=True
        )


def batches(sizes: Sequence[int], *, limit: int) -> Iterator[list[int]]:
    """Indices of the rows of each batch, the longest first: as many as `limit` tokens allow, at least one."""
    batch: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if batch and (len(batch) + 1) * sizes[batch[0]] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _check(query: Query, number: int, block_size: int) -> None:
    if not query.context or not query.continuation:
        raise ValueError(
            f"query {number} has an empty {'context' if not query.context else 'continuation'}: "
            "give at least one token of each, for example end-of-text as context"
        )
    if len(query.continuation) > block_size:
        raise ValueError(
            f"query {number} has a continuation of {len(query.continuation)} tokens, more than "
            f"block_size = {block_size}: a context can be truncated, a continuation cannot; use a model with a "
            "larger block_size, or another benchmark"
        )


def _n_inputs(query: Query, block_size: int) -> int:
    return min(len(query.context) + len(query.continuation) - 1, block_size)


@torch.no_grad()
def _score(
    model: Thoughtbubbles, queries: Sequence[Query], *, vocab_size: int, budget: BudgetLike | None
) -> Iterable[Likelihood]:
    device, block_size = model.embedding.weight.device, model.config.block_size
    whole = [(*query.context, *query.continuation) for query in queries]
    ids, lengths = padded([row[-block_size - 1 : -1] for row in whole], device=device)
    streams = model(ids, lengths=lengths, budget=budget, budget_mode="proportional").streams
    sizes = [len(query.continuation) for query in queries]
    row = torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)], device=device)
    back = torch.tensor([back for size in sizes for back in range(size, 0, -1)], device=device)
    targets = torch.tensor([token for query in queries for token in query.continuation], device=device)
    log_prob, greedy = decode_at(
        model, streams, row, lengths[row] - back, targets, n_tokens=ids.shape[1], vocab_size=vocab_size
    )
    first = np.cumsum([0, *sizes[:-1]])
    sums = np.add.reduceat(log_prob.cpu().double().numpy(), first)
    if np.isnan(sums).any():  # comparisons would hide it: the first choice would be the best
        raise ValueError("the model's logits are NaN: check its weights")
    all_greedy = np.logical_and.reduceat(greedy.cpu().numpy(), first)
    return [
        Likelihood(float(total), size, bool(likeliest), max(0, len(tokens) - block_size - 1))
        for total, size, likeliest, tokens in zip(sums, sizes, all_greedy, whole, strict=True)
    ]


def decode_at(
    model: Thoughtbubbles,
    streams: Streams,
    row: Int[Tensor, "n"],
    token: Int[Tensor, "n"],
    targets: Int[Tensor, "n"],
    *,
    n_tokens: int,
    vocab_size: int,
) -> tuple[Float[Tensor, "n"], Bool[Tensor, "n"]]:
    """The log-probability of each target after the given token of the given row, and whether it is the most likely."""
    start, end = head.bubbles_at(streams, row, token, n_tokens=n_tokens)
    sizes = end - start + 1
    log_prob = torch.empty_like(streams.log_score[row, end])
    greedy = torch.empty_like(row, dtype=torch.bool)
    at_once = DECODED_AT_ONCE[row.device.type]
    for part in sizes.argsort().split(max(1, at_once // int(sizes.max()))):  # bubbles of similar sizes together
        bubbles = head.gather_bubbles(streams, row[part], start[part], end[part], width=int(sizes[part].max()))
        logits = head.logits(model.rows_to_decode(bubbles, 1), model.embedding.weight)[:, 0]
        target = targets[part, None]
        log_prob[part] = (logits.gather(1, target)[:, 0] - logits.logsumexp(-1)).to(log_prob.dtype)
        greedy[part] = logits[:, :vocab_size].argmax(-1) == target[:, 0]
    return log_prob, greedy
