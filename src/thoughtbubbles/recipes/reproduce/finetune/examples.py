"""The examples of a benchmark, tokenized once for all rows that train on them."""

import io
import zlib
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.shards import INDEX, open_dataset
from thoughtbubbles.files import crc32, locked


class Examples(NamedTuple):
    folder: Path
    n_examples: int  # to train on
    n_tokens: int  # of these, without padding
    tokenizer: str
    checksum: str  # of all tokens to train on


def prepared(source: Path, folder: Path, *, tokenizer: Path, val: Path | None = None, val_fraction: float) -> Examples:
    """Prepares them in `folder`, whose name is followed by the checksums of the files: changed files have another one.

    `tokenizer`: a folder that has one. `val`: a file of validation examples, instead of a fraction of the source.
    """
    checksums = [f"{crc32(path):08x}" for path in (source, val) if path is not None]
    folder = folder.with_name("-".join([folder.name, *checksums]))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent, doing="preparing examples in", wait=True):  # rows may be started at the same time
        if not (folder / INDEX).is_file():
            with redirect_stdout(io.StringIO()):  # it would suggest to train another model on this folder
                prepare(
                    (str(source),),
                    out=folder,
                    tokenizer=str(tokenizer),
                    processes=1,  # it is over before others have started
                    val=() if val is None else (str(val),),
                    val_fraction=None if val is not None else val_fraction,
                )
    return opened(folder)


def opened(folder: Path) -> Examples:
    train = open_dataset(folder, split="train")
    checksum = 0
    for shard in train.shards:
        checksum = zlib.crc32(shard.tokens.data, checksum)
    n_examples = sum(shard.header.n_examples for shard in train.shards)
    return Examples(folder, n_examples, train.n_tokens, train.index.tokenizer, f"{checksum:08x}")
