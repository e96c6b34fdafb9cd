"""Tokens per second of the loader, in one process, with 64 rows of 512 tokens: one source, and a mixture.

    python benchmarks/loader.py                  all cases, into benchmarks/results
    python benchmarks/loader.py --batches 1000   more batches per round

Before timing, batches are compared with the tokens that were written: rows of text must be windows of it, every target
the token after its id. The data is in a temporary folder and in memory: this measures the loader, not the disk.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from common import seconds, write_results

from thoughtbubbles.data.loader import IGNORED, Batch, Loader, Source, ValidationSet
from thoughtbubbles.data.shards import Index, ShardWriter, write_index
from thoughtbubbles.data.shuffle import GAMMA, mix64

ROWS, N_TOKENS = 64, 512
END_OF_TEXT = 50256
SHARD_TOKENS = 8_000_000


def random_tokens(n: int, *, seed: int) -> np.ndarray:
    steps = np.arange(n, dtype=np.uint64) * GAMMA
    return (mix64(np.uint64(seed) + steps) % np.uint64(END_OF_TEXT)).astype(np.uint16)


def write_text(folder: Path, n_tokens: int, *, seed: int) -> np.ndarray:
    tokens = random_tokens(n_tokens, seed=seed)
    splits = {}
    for split, part in (("train", tokens), ("val", tokens[: n_tokens // 20])):
        writer = ShardWriter(folder, split, kind="text", shard_tokens=SHARD_TOKENS)
        writer.add(part)
        writer.close()
        splits[split] = writer.finished
    write_index(folder, Index("text", "gpt2", END_OF_TEXT, END_OF_TEXT + 1, splits))
    return tokens


def write_examples(folder: Path, n_examples: int) -> None:
    """From 2 to 700 tokens each; the second half counts in the loss."""
    writer = ShardWriter(folder, "train", kind="examples", shard_tokens=SHARD_TOKENS)
    sizes = 2 + random_tokens(n_examples, seed=3) % 699
    tokens = random_tokens(int(sizes.sum(dtype=np.int64)), seed=4)
    for part, size in zip(np.split(tokens, np.cumsum(sizes, dtype=np.int64)[:-1]), sizes.tolist(), strict=True):
        writer.add_example(part, np.arange(size) >= size // 2)
    writer.close()
    write_index(folder, Index("examples", "gpt2", END_OF_TEXT, END_OF_TEXT + 1, {"train": writer.finished}))


def check(loader: Loader, tokens: np.ndarray) -> None:
    """`tokens` are those of source 0; its first four tokens identify a window."""
    rows_per_epoch = loader.describe()[0].rows_per_epoch
    windows = {tuple(tokens[w * N_TOKENS : w * N_TOKENS + 4].tolist()): w for w in range(rows_per_epoch)}
    seen: list[int] = []
    for n in range(20):
        batch = loader.batch(n)
        targets, following = batch.targets[:, :-1], batch.ids[:, 1:]
        inside = np.arange(1, N_TOKENS) < batch.lengths[:, None]
        if not ((targets == following) | (targets == IGNORED))[inside].all():
            raise SystemExit(f"batch {n}: a target is not the next token")
        for ids, target in zip(batch.ids[batch.source == 0], batch.targets[batch.source == 0], strict=True):
            w = windows[tuple(ids[:4].tolist())]
            window = tokens[w * N_TOKENS : (w + 1) * N_TOKENS + 1]
            if not (np.array_equal(ids, window[:-1]) and np.array_equal(target, window[1:])):
                raise SystemExit(f"batch {n}: a row is not window {w} of the text")
            seen.append(w)
    if len(set(seen)) < len(seen) <= rows_per_epoch:
        raise SystemExit("a window came twice within the first epoch")


def drain(batches: Iterable[Batch]) -> None:
    """Like a training loop, keeps only a batch or two."""
    for _ in batches:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200, help="per round")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = write_text(folder / "a", 30_000_000, seed=0)
        write_text(folder / "b", 10_000_000, seed=1)
        write_examples(folder / "c", 30_000)
        a, b, c = (Source(folder / x, weight) for x, weight in (("a", 0.5), ("b", 0.3), ("c", 0.2)))
        loaders = {
            "one source": Loader([a], rows=ROWS, n_tokens=N_TOKENS, seed=0),
            "mixture of 3": Loader([a, b, c], rows=ROWS, n_tokens=N_TOKENS, seed=0),
        }
        for loader in loaders.values():
            check(loader, tokens)
        validation = ValidationSet([a], rows=ROWS, n_tokens=N_TOKENS, verify=False)
        variants: dict[str, Callable[[], object]] = {
            name: lambda loader=loader: drain(loader.batch(n) for n in range(args.batches))  # type: ignore[misc]
            for name, loader in loaders.items()
        }
        variants["open and verify 40M tokens"] = lambda: Loader([a, b], rows=ROWS, n_tokens=N_TOKENS, seed=0)
        variants["validation"] = lambda: drain(validation)
        time = seconds(variants, device="cpu", repeats=args.repeats)
        lengths = np.concatenate([loaders["mixture of 3"].batch(n).lengths for n in range(args.batches)])
        in_use = float(lengths.mean()) / N_TOKENS
    slots = ROWS * N_TOKENS * args.batches
    found = [
        {"case": "one source", "million_tokens_per_second": round(slots / time["one source"] / 1e6, 1)},
        {
            "case": "mixture of 3: text 0.5, text 0.3, examples 0.2",
            "million_tokens_per_second": round(slots * in_use / time["mixture of 3"] / 1e6, 1),
            "with_padding": round(slots / time["mixture of 3"] / 1e6, 1),
        },
        {
            "case": "validation",
            "million_tokens_per_second": round(len(validation) * ROWS * N_TOKENS / time["validation"] / 1e6, 1),
        },
        {
            "case": "opening with verification",
            "million_tokens_per_second": round(40 / time["open and verify 40M tokens"], 1),
        },
    ]
    for row in found:
        print(f"{row['case']}: {row['million_tokens_per_second']} million tokens per second", flush=True)
    numbers = {"rows": ROWS, "n_tokens": N_TOKENS, "processes": 1, "cases": found}
    print("written to", write_results("loader", "cpu", numbers, to=args.out))


if __name__ == "__main__":
    main()
