"""The cases of the speed benchmark, by name, and a batch for each.

A case is a size and a form: `150m-plain`, `150m-copy-3`, `150m-r4-causal-mixture`, `150m-r2-private-residual` (only its
own bubble sees a fork), `150m-feedback` (the form that we recommend) and `150m-gate` (its control), or
`1.9b-plain-double`, whose rows are twice as long: plain GPT on as many streams as r = 2, which isolates the cost of
forking itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from thoughtbubbles.data.loader import Batch, Loader, Source
from thoughtbubbles.files import did_you_mean
from thoughtbubbles.model.config import ModelConfig, Selection

ROWS = {"nano": 4, "tiny": 4, "150m": 64, "319m": 32, "772m": 16, "1.9b": 8}  # per batch
SEED = 0
PRIVATE = "r2-private-residual"


class Case(NamedTuple):
    name: str
    config: ModelConfig  # a row has block_size tokens
    rows: int


def forms(size: str, *, tokens: int | None = None) -> dict[str, ModelConfig]:
    """The models of one size, by form (the second part of a case's name)."""
    n_tokens = tokens or ModelConfig.named(size).block_size
    plain, copies, bubbles, feedback, gate = (
        replace(ModelConfig.named(size + form), block_size=n_tokens)
        for form in ("-plain", "-copy-3", "-causal", "", "-gate")
    )
    found = {"plain": plain, "plain-double": replace(plain, block_size=2 * n_tokens), "copy-3": copies}
    for budget in (2, 4):
        for selection in get_args(Selection)[::-1]:
            for merge in ("residual", "mixture"):
                name = f"r{budget}-{selection}-{merge}"
                found[name] = replace(bubbles, budget=budget, selection=selection, merge=merge)
    found[PRIVATE] = replace(bubbles, budget=2, merge="residual", fork_reach=0)
    return {**found, "feedback": replace(feedback, fork_reach=n_tokens // 8), "gate": gate}


def default_cases(device: str, *, quick: bool = False) -> list[str]:
    forked = "r2-causal-residual"
    few, some = ["plain", forked], ["plain", "plain-double", forked]
    if device == "cuda":
        chosen = (
            {"150m": few, "1.9b": few} if quick else {"150m": list(forms("150m")), "1.9b": [*some, PRIVATE, "feedback"]}
        )
    else:
        chosen = {"tiny": few if quick else [*some, "copy-3", "r2-causal-mixture"]}
    return [f"{size}-{form}" for size, names in chosen.items() for form in names]


def find_cases(names: Sequence[str], *, rows: int | None = None, tokens: int | None = None) -> list[Case]:
    """Cases by name; `rows` and `tokens` (per row; twice as many for plain-double) override the defaults."""
    for name, value in (("rows", rows), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: give 1 or more")
    known = [f"{size}-{form}" for size in ROWS for form in forms(size)]
    for name in names:
        if name not in known:
            raise ValueError(
                f"no case is named {name!r}: {did_you_mean(name, known)} A case is a size ({', '.join(ROWS)}) and a "
                f"form ({', '.join(forms('nano'))}), such as 150m-plain"
            )
    found = []
    for name in dict.fromkeys(names):  # each once
        size, _, form = name.partition("-")
        found.append(Case(name, forms(size, tokens=tokens)[form], rows or ROWS[size]))
    return found


def draw(case: Case, data: Path | None = None) -> Batch:
    """A batch of text from a prepared folder, or of random tokens with the frequencies of words (Zipf)."""
    n_tokens, vocabulary = case.config.block_size, case.config.vocab_size
    if data is not None:
        loader = Loader([Source(data)], rows=case.rows, n_tokens=n_tokens, seed=SEED, verify=False)
        loader.check_vocab(vocabulary)
        batch = loader.batch(0)
        if batch.lengths.min() < n_tokens:
            raise ValueError(f"--data {data}: its rows are padded examples; give plain text, or leave it out")
        return batch
    frequency = 1 / (np.arange(vocabulary) + 2.7)
    generator = np.random.default_rng(SEED)
    tokens = generator.choice(vocabulary, (case.rows, n_tokens + 1), p=frequency / frequency.sum())
    lengths = np.full(case.rows, n_tokens, dtype=np.int64)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), lengths, np.zeros_like(lengths))
