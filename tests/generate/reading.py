"""Ways to read rows that the tests of generation compare: token by token through the cache, and in parallel."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers import SAME_ROW, random_ids
from thoughtbubbles.generate.cache import Cache
from thoughtbubbles.generate.decode import decode_step, prefill
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.fork import ForkRecord
from thoughtbubbles.model.transformer import Output, Thoughtbubbles


class Read(NamedTuple):
    """What was predicted on the way: for each row, after the last token of its prompt and after every later one."""

    log_probs: list[Tensor]
    streams: list[list[int]]
    cache: Cache


def some_rows(config: ModelConfig, lengths, *, seed: int = 1):
    return [random_ids(config, 1, n, seed=seed + i)[0] for i, n in enumerate(lengths)]


def padded(rows: Sequence[Tensor], *, filler: int = 0) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), filler)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, lengths


def read_in_steps(
    model: Thoughtbubbles,
    rows: Sequence[Tensor],
    *,
    prompts: Sequence[int],
    budget: Any = None,
    capacity: int | None = None,
) -> Read:
    """The first tokens of each row in parallel, as many as `prompts` says, the others one by one; rows end by turns."""
    ids, lengths = padded([row[:n] for row, n in zip(rows, prompts, strict=True)])
    prediction, cache = prefill(model, ids, lengths=lengths, budget=budget, capacity=capacity)
    log_probs, streams = [[] for _ in rows], [[] for _ in rows]

    def note(prediction: Prediction, which: Sequence[int]) -> None:
        for i in which:
            log_probs[i].append(prediction.logits[i].log_softmax(-1))
            streams[i].append(int(prediction.streams[i]))

    note(prediction, range(len(rows)))
    for step in range(max(len(row) - n for row, n in zip(rows, prompts, strict=True))):
        places = [n + step for n in prompts]
        going = [i for i, (row, place) in enumerate(zip(rows, places, strict=True)) if place < len(row)]
        new = torch.tensor([int(row[p]) if p < len(row) else -7 for row, p in zip(rows, places, strict=True)])
        active = torch.tensor([i in going for i in range(len(rows))])
        prediction, cache = decode_step(model, cache, new, active=active)
        note(prediction, going)
    return Read([torch.stack(row) for row in log_probs], streams, cache)


@torch.no_grad()
def read_at_once(model: Thoughtbubbles, row: Tensor, *, budget: Any = None) -> Output:
    """The parallel forward of one row by itself."""
    rule = {"selection": "causal", "budget_mode": "proportional"}
    return model(row[None], budget=budget, want=("log_probs",), trace=True, **rule)


def bubble_sizes(model: Thoughtbubbles, whole: Output, tokens: int) -> list[int]:
    return whole.forks[-1].bubble_size[0].tolist() if whole.forks else [model.config.copies] * tokens


def assert_reads_alike(
    model: Thoughtbubbles, rows: Sequence[Tensor], prompts: Sequence[int], budgets: Sequence[Any], read: Read
) -> None:
    """Predictions of the steps against the parallel forward of each row alone."""
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        whole = read_at_once(model, row, budget=budgets[i])
        expected = whole.log_probs[0, prompt - 1 :]
        torch.testing.assert_close(read.log_probs[i], expected, atol=SAME_ROW, rtol=0)
        sizes = bubble_sizes(model, whole, len(row))
        assert read.streams[i] == sizes[prompt - 1 :]
        assert read.cache.streams(len(row) + 2)[i].tolist() == [*sizes, 0, 0]


class SpanState(NamedTuple):
    """What one row has in one span, without slots that are never read."""

    used: int
    key: Tensor
    value: Tensor
    log_score: Tensor
    token: Tensor
    level: Tensor


def state(cache: Cache, row: int, *, reach: int | None = None) -> list[SpanState]:
    """`reach`: the model's `fork_reach`, whose cache may still have forks that nobody can see any more."""
    n_tokens = before = int(cache.n_tokens[row])
    spans = []
    for span in cache.spans:
        used = int(span.used[row])
        read = torch.arange(used)
        if span.kept is not None:
            ring = span.ring
            near = (span.token[row, :ring] >= n_tokens - reach).nonzero()[:, 0]
            read = torch.cat([near, ring + torch.arange(n_tokens)])
        spans.append(
            SpanState(
                used,
                span.key[:, row, :, read],
                span.value[:, row, :, read],
                span.log_score[row, read],
                span.token[row, read],
                torch.empty(0, dtype=torch.int32) if span.level is None else span.level[row, : 2 * before],
            )
        )
        before = used
    return spans


def assert_same_state(ours: Cache, our_row: int, theirs: Cache, their_row: int, *, reach: int | None = None) -> None:
    assert int(ours.n_tokens[our_row]) == int(theirs.n_tokens[their_row])
    assert int(ours.next_cap()[our_row]) == int(theirs.next_cap()[their_row])
    n_tokens = int(ours.n_tokens[our_row])
    if ours.last is not None:
        last, other = ours.last[our_row, :n_tokens], theirs.last[their_row, :n_tokens]
        torch.testing.assert_close(last, other, atol=SAME_ROW, rtol=0)
    for a, b in zip(state(ours, our_row, reach=reach), state(theirs, their_row, reach=reach), strict=True):
        assert a.used == b.used
        assert torch.equal(a.token, b.token)
        assert torch.equal(a.level, b.level)
        for name in ("key", "value", "log_score"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=SAME_ROW, rtol=0)


@contextmanager
def recording(model: Thoughtbubbles) -> Iterator[dict[int, list[ForkRecord]]]:
    """All that the fork layers decide meanwhile, by layer, call after call."""
    records: dict[int, list[ForkRecord]] = {layer: [] for layer in model.config.fork_layers}
    hooks = [
        model.forks[str(layer)].register_forward_hook(lambda _m, _i, out, layer=layer: records[layer].append(out[1]))
        for layer in model.config.fork_layers
    ]
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def joined(records: Sequence[ForkRecord], row: int = 0) -> ForkRecord:
    """The records of a row that was read piece by piece, as one; unused candidates are left out."""
    parts = []
    for record in records:
        used = record.level[row] > -(2**30)
        parts.append((record.log_score[row, used], record.level[row, used], record.selected[row, used]))
    log_score, level, selected = (torch.cat(column)[None] for column in zip(*parts, strict=True))
    return records[0]._replace(log_score=log_score, level=level, selected=selected)
