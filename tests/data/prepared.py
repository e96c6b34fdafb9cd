"""Prepared folders for tests: texts, a run in a process that can be killed, and what a folder contains."""

import json
import random
import subprocess
import sys

import numpy as np

from thoughtbubbles.data.shards import open_dataset

CORPUS_OPTIONS = {"shard_tokens": 150_000, "val_fraction": 0.01}
RUN = """
import sys
from pathlib import Path
from thoughtbubbles.data import prepare, sources
if __name__ == "__main__":
    sources.CHUNK_BYTES = {chunk_bytes}
    {before}
    try:
        prepare.prepare(({source!r},), out=Path({out!r}), {options})
    except ValueError as error:
        sys.exit(f"prepare: {{error}}")
"""


def command(source, out, *, chunk_bytes=1 << 20, before="", **options):
    """In a separate process, to be killed."""
    options = ", ".join(f"{name}={value!r}" for name, value in options.items())
    code = RUN.format(source=str(source), out=str(out), options=options, chunk_bytes=chunk_bytes, before=before)
    return [sys.executable, "-c", code]


def run(*arguments, **options):
    return subprocess.run(command(*arguments, **options), capture_output=True, text=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def random_texts(n, *, words=120, seed=0):
    generator = random.Random(seed)
    pool = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(1, 9))) for _ in range(2000)]
    return [" ".join(generator.choices(pool, k=generator.randint(1, 2 * words))) for _ in range(n)]


def documents(out, split):
    tokens = np.concatenate([shard.tokens for shard in open_dataset(out, split=split).shards])
    assert tokens[-1] == 256
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    return [part[:-1].astype(np.uint8).tobytes().decode() for part in parts]
