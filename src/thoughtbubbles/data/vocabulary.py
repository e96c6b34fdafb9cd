"""Trains a byte-pair encoding on a corpus: the vocabulary of a model that is too small for GPT-2's 50,257 ids.

The `tokenizers` library counts the words and finds the merges. The tokenizer is then ours (tokenizer.py): the ids of
the 256 bytes, one id per merge, and end-of-text. Validation documents do not take part.
"""

import json
from collections.abc import Callable, Iterator, Sequence

from thoughtbubbles.data.compressed import extra
from thoughtbubbles.data.encode import key_of, read_documents
from thoughtbubbles.data.records import Document
from thoughtbubbles.data.sources import Chunk, Input, read_chunks
from thoughtbubbles.data.tokenizer import MOST_MERGES, Tokenizer, trained, whole_characters

LEAST, MOST = 257, MOST_MERGES + 257  # ids: only the bytes and end-of-text; all that fit on disk


def train_vocabulary(texts: Iterator[str], *, size: int) -> Tokenizer:
    """A byte-pair encoding of `size` ids; of fewer, if the texts have fewer pairs to merge."""
    library = extra("tokenizers", "to train a vocabulary")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = library.trainers.BpeTrainer(
        vocab_size=size - 1,  # without end-of-text
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator((whole_characters(text) for text in texts), trainer)
    merges = json.loads(model.to_str())["model"]["merges"]
    # Two merges can make the same token; the second one would leave its id unused.
    return trained(list({"".join(pair): " ".join(pair) for pair in reversed(merges)}.values())[::-1])


def training_texts(
    inputs: Sequence[Input], *, val_fraction: float, limit: int | None, report: Callable[[Chunk], None]
) -> Iterator[str]:
    """The text of every training document, of the first `limit` documents; `report` is told each chunk."""
    left = limit
    for chunk in read_chunks(inputs):
        report(chunk)
        for found in read_documents(chunk):
            if left == 0:
                return
            if found is None:
                continue
            left = None if left is None else left - 1
            if key_of(found) >= val_fraction * 2**64:
                yield found.text if isinstance(found, Document) else "".join(part.text for part in found.parts)
