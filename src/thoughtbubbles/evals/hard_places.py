"""Accuracy on a made-up task (data/tasks) by the work that an answer needs, and streams at hard and easy positions.

Streams are those at the hard positions by work, at all others (`easy`), and at those of the others that have the same
character as a hard position of their example (`alike`): a model that forks at every space has many streams at a hard
space too, but no more than at the others.

An answer is right if its first character is the model's most likely one, given the true text before it; the rest of a
word follows from it. Where nothing is hard (`copy`), every answered character counts, as work 0. With block selection
later tokens influence earlier streams, so each answer is also predicted from its own prefix (`alone`), as in
generation; with causal selection the two are equal.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from thoughtbubbles.data.builtin import BYTES
from thoughtbubbles.data.tasks.task import Example, Task
from thoughtbubbles.model.budget import BudgetLike
from thoughtbubbles.model.transformer import Thoughtbubbles

BATCH_TOKENS = 1 << 14
EASY, ALIKE = "easy", "alike"


class Rows(NamedTuple):
    """Examples side by side: the ids of everything but end-of-text, padded on the right."""

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, "B"]


def measure_task(
    model: Thoughtbubbles,
    task: Task,
    split: str,
    *,
    n_examples: int = 2048,
    budget: BudgetLike | None = None,
    seed: int = 1,
) -> dict[str, Any]:
    """`accuracy` and `count` by work; mean `streams` by work and at easy positions, after each fork layer.

    With block selection also `alone`: the accuracy by work from prefixes.
    """
    examples = list(islice(task.examples(split, seed=seed), n_examples))
    right: dict[int, list[bool]] = defaultdict(list)
    alone: dict[int, list[bool]] = defaultdict(list)
    streams: dict[int | str, list[Tensor]] = defaultdict(list)
    for part in batches(model, examples, task.block_size):
        predictions, sizes = predict(model, rows_of(part, model), budget)
        for row, example in enumerate(part):
            hard = example.hard
            for position, work in asked(example).items():
                right[work].append(predictions[row][position] == ord(example.text[position + 1]))
            characters = {example.text[position] for position in hard}
            for position in range(len(example.text)):
                streams[hard.get(position, EASY)].append(sizes[row, position])
                if position not in hard and example.text[position] in characters:
                    streams[ALIKE].append(sizes[row, position])
        if is_block(model):
            for work, found in alone_right(model, part, budget):
                alone[work].append(found)
    return {
        "examples": len(examples),
        "count": {str(work): len(right[work]) for work in sorted(right)},
        "accuracy": _means(right),
        **({"alone": _means(alone)} if alone else {}),
        "streams": {
            str(work): torch.stack(found).double().mean(0).tolist()
            for work, found in sorted(streams.items(), key=lambda item: str(item[0]))
        },
    }


def asked(example: Example) -> dict[int, int]:
    """The work at each position whose prediction is an answer; where nothing is hard, at all that predict a target."""
    return example.hard or {place - 1: 0 for place, counts in enumerate(example.counts) if counts}


def batches(model: Thoughtbubbles, examples: Sequence[Example], n_tokens: int) -> Iterator[Sequence[Example]]:
    size = max(1, BATCH_TOKENS // n_tokens)
    return (examples[first : first + size] for first in range(0, len(examples), size))


def rows_of(examples: Sequence[Example], model: Thoughtbubbles) -> Rows:
    return padded([example.tokens[:-1].tolist() for example in examples], model.embedding.weight.device)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Rows:
    lengths = [len(row) for row in rows]
    ids = [[*row, *[BYTES.end_of_text] * (max(lengths) - len(row))] for row in rows]
    return Rows(torch.tensor(ids, device=device), torch.tensor(lengths, device=device))


@torch.no_grad()
def predict(
    model: Thoughtbubbles, rows: Rows, budget: BudgetLike | None
) -> tuple[list[list[int]], Int[Tensor, "B T layers"]]:
    """The most likely next token at every position, and the streams of every token after each fork layer."""
    out = model(rows.ids, lengths=rows.lengths, budget=budget, want=("logits",), trace=True)
    assert out.logits is not None
    likeliest = out.logits[..., : BYTES.size].argmax(-1).tolist()
    if not out.forks:
        return likeliest, torch.full((*rows.ids.shape, 1), model.config.copies)
    return likeliest, torch.stack([record.bubble_size for record in out.forks], dim=-1).cpu()


def is_block(model: Thoughtbubbles) -> bool:
    return bool(model.config.fork_layers) and model.config.selection == "block"


@torch.no_grad()
def alone_right(
    model: Thoughtbubbles, examples: Sequence[Example], budget: BudgetLike | None
) -> Iterator[tuple[int, bool]]:
    """Work, and whether the answer is right, of every answer, each predicted from the text before it alone."""
    asked_at = [(example, position, work) for example in examples for position, work in asked(example).items()]
    for first in range(0, len(asked_at), size := max(1, BATCH_TOKENS // max(len(each.text) for each in examples))):
        part = asked_at[first : first + size]
        prefixes = [example.tokens[: position + 1].tolist() for example, position, _ in part]
        rows = padded(prefixes, model.embedding.weight.device)
        out = model(rows.ids, lengths=rows.lengths, budget=budget, want=("next_logits",))
        assert out.next_logits is not None
        for (example, position, work), found in zip(part, out.next_logits[:, : BYTES.size].argmax(-1), strict=True):
            yield work, int(found) == ord(example.text[position + 1])


def _means(found: dict[int, list[bool]]) -> dict[str, float]:
    return {str(work): sum(values) / len(values) for work, values in sorted(found.items())}
