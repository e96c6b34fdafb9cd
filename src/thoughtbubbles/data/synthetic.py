"""Synthetic text from a seed, for tests and first runs: no files, no network, the same bytes on every machine.

Document i of a seed is a few lines of sums, copies, reversals and small sentences, a pure function of (seed, i):

    37+48=85
    copy tqkzu: tqkzu
    reverse abc: cba
    the old cat likes every small river.

Spelling, grammar and copying are learned within minutes; sums and reversals are harder. Tokens are bytes: ids 0–255,
and 256 for end-of-text.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np

from thoughtbubbles.data.builtin import encode, write_once
from thoughtbubbles.data.shuffle import GAMMA, key_of, mix64

DRAWS_PER_LINE = 8

NOUNS = ("cat", "river", "house", "teacher", "tree", "bird", "king", "stone")
ADJECTIVES = ("old", "small", "red", "quiet", "happy", "dark")
VERBS = ("likes", "sees", "finds", "follows", "remembers")
ARTICLES = ("the", "a", "every")
SENTENCE = (ARTICLES, ADJECTIVES, NOUNS, VERBS, ARTICLES, ADJECTIVES, NOUNS)


def documents(seed: int, *, first: int = 0, step: int = 1) -> Iterator[str]:
    """Infinitely many documents of a seed: first, first + step, …"""
    return (document(seed, i) for i in count(first, step))


def document(seed: int, i: int) -> str:
    n_lines = 4 + int(mix64(key_of(seed, i))[0]) % 9
    steps = np.arange(1, n_lines * DRAWS_PER_LINE + 1, dtype=np.uint64)
    draws = mix64(key_of(seed, i) + steps * GAMMA).reshape(n_lines, DRAWS_PER_LINE).tolist()
    return "\n".join(_line(*line) for line in draws) + "\n"


def _line(form: int, *draws: int) -> str:
    a, b = draws[0] % 100, draws[1] % 100
    word = _word(draws[0])
    match form % 4:
        case 0:
            return f"{a}+{b}={a + b}"
        case 1:
            return f"copy {word}: {word}"
        case 2:
            return f"reverse {word}: {word[::-1]}"
        case _:
            chosen = (part[draw % len(part)] for part, draw in zip(SENTENCE, draws, strict=True))
            return " ".join(chosen) + "."


def _word(draw: int) -> str:
    """Three to six letters."""
    size, draw = 3 + draw % 4, draw // 4
    return "".join(chr(ord("a") + draw // 26**k % 26) for k in range(size))


def write_synthetic(folder: Path, *, n_tokens: int, seed: int) -> None:
    """Writes a prepared folder: n_tokens tokens for training; a tenth as many, at least 1,000, for validation.

    Does nothing if the folder already contains them; several processes may call it at the same time.
    """
    if n_tokens < 1:
        raise ValueError(f"n_tokens = {n_tokens}: give 1 or more")
    sizes = {"train": n_tokens, "val": max(n_tokens // 10, 1000)}
    texts = (
        (split, tokens)
        for first, split in enumerate(sizes)
        for tokens in _first_tokens(sizes[split], documents(seed, first=first, step=2))
    )
    notes = {"made_by": "synthetic", "version": 1, "n_tokens": n_tokens, "seed": seed}
    write_once(folder, texts, kind="text", notes=notes)


def _first_tokens(n_tokens: int, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Exactly n_tokens; the last document is truncated, but still ends in end-of-text."""
    for text in texts:
        tokens = encode(text)
        if len(tokens) >= n_tokens:
            yield np.append(tokens[: n_tokens - 1], tokens[-1])
            return
        n_tokens -= len(tokens)
        yield tokens
