"""Trains a byte-pair encoding on a corpus: the vocabulary of a model that is too small for GPT-2's 50,257 ids.

The `tokenizers` library counts the words and finds the merges. The tokenizer is then ours (tokenizer.py): the ids of
the 256 bytes, one id per merge, and end-of-text. Validation documents do not take part.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from thoughtbubbles.data.encode import key_of, read_documents
from thoughtbubbles.data.output import held_out
from thoughtbubbles.data.records import Document
from thoughtbubbles.data.sources import Chunk, Input, read_chunks
from thoughtbubbles.data.tokenizer import MOST_MERGES, Tokenizer, trained, whole_characters

LEAST, MOST = 257, MOST_MERGES + 257  # ids: only the bytes and end-of-text; all that fit on disk
LONG = 1 << 12  # characters; finding merges takes time quadratic in the length of a word
LONG_RUN = re.compile(rf"(?<!\S)\S{{{LONG},}}|(?<!\s)\s{{{LONG},}}")


def train_vocabulary(texts: Iterator[str], *, size: int) -> Tokenizer:
    """A byte-pair encoding of `size` ids; of fewer, if the texts have fewer pairs to merge."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "the package tokenizers is needed to train a vocabulary: install it with pip install "
            "'thoughtbubbles[data]', or give another --tokenizer"
        ) from None
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = byte_level
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - 1,  # without end-of-text
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator((_cut_long_runs(whole_characters(text)) for text in texts), trainer)
    return trained([" ".join(pair) for pair in json.loads(model.to_str())["model"]["merges"]])


def training_texts(
    inputs: Sequence[Input], *, val_fraction: float, limit: int | None, report: Callable[[Chunk], None]
) -> Iterator[str]:
    """The texts of every training document, of the first `limit` documents; `report` is told each chunk."""
    first: list[int] = []
    left = limit
    for chunk in read_chunks(inputs):
        report(chunk)
        for found in read_documents(chunk):
            if found is None:
                continue
            key = np.array([key_of(found)], dtype=np.uint64)
            if not held_out(key, first, share=val_fraction)[0]:
                yield from [found.text] if isinstance(found, Document) else [part.text for part in found.parts]
            left = None if left is None else left - 1
            if left == 0:
                return


def _cut_long_runs(text: str) -> list[str]:
    """Cuts very long runs with or without white space, such as encoded images, which teach nothing about words."""
    runs = LONG_RUN.finditer(text)
    cuts = [0, *(place for run in runs for place in range(run.start() + LONG, run.end(), LONG)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]
