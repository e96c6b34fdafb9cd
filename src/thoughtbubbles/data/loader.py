"""Batches for training and validation. Batch n is a pure function of (seed, n): the loader has no state.

    row i of the run      i = n · rows + j; in every period of rows each source has exactly its share, in shuffled order
    k-th row of a source  item k mod N of epoch k // N, out of N items reshuffled for every epoch
    item                  text: T + 1 tokens at stride T, so every target occurs once per epoch; or one example, padded

All shuffling is one keyed permutation, computed on demand: no arrays of the size of the data, no state to save, the
same numbers on every platform. To resume, ask for the next n; a rank asks only for its rows. Neither the number of
ranks nor the batch size changes the order of the rows.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import isfinite, lcm
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thoughtbubbles.data.shards import Dataset, open_dataset
from thoughtbubbles.data.shuffle import key_of, permute

IGNORED = -100  # a target that does not count in the loss
LONGEST_PERIOD = 10_000  # rows within which the shares of the sources are exact
PART_EXAMPLES = 1 << 16  # examples scanned at a time, since counting their targets takes 8 bytes per token
BLOCK_ROWS = 4096  # the schedule is computed for this many rows at a time, or for one period


@dataclass(frozen=True)
class Source:
    """A prepared folder and its share of the rows, relative to the other sources."""

    path: Path
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight = {self.weight} of {self.path}: give a number above 0, or leave the source out")

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Reads PATH or PATH=WEIGHT."""
        path, equals, weight = text.rpartition("=")
        if not equals:
            return cls(Path(text))
        try:
            if not path:
                raise ValueError("the path is missing")
            return cls(Path(path), float(weight))
        except ValueError as error:
            raise ValueError(
                f"source = {text!r}: give PATH or PATH=WEIGHT, e.g. {path or 'PATH'}=0.7 ({error})"
            ) from None


class Batch(NamedTuple):
    """Rows of one length, as NumPy arrays."""

    ids: np.ndarray  # (R, T) int64; end-of-text after `lengths`
    targets: np.ndarray  # (R, T) int64; -100 where nothing is to be predicted
    lengths: np.ndarray  # (R,) int64, at least 1
    source: np.ndarray  # (R,) int64, index into the sources

    def trimmed(self) -> "Batch":
        """Without the columns that are padding in every row."""
        longest = int(self.lengths.max())
        return self._replace(ids=self.ids[:, :longest], targets=self.targets[:, :longest])


class SourceFacts(NamedTuple):
    path: Path
    kind: str
    share: float  # of the rows
    n_tokens: int
    rows_per_epoch: int
    n_excluded: int  # examples without any target that counts


def micro_steps(rows: int, *, micro_batch_size: int, world: int) -> int:
    """Number of micro-batches per rank and global batch."""
    if min(rows, micro_batch_size, world) < 1 or rows % (micro_batch_size * world):
        raise ValueError(
            f"rows = {rows} is not a multiple of micro_batch_size · ranks = {micro_batch_size} · {world}: "
            "change the rows of the global batch or micro_batch_size"
        )
    return rows // (micro_batch_size * world)


def rows_of_rank(rows: int, *, micro_batch_size: int, micro_step: int, rank: int, world: int) -> tuple[int, int]:
    """`first` and `count` for `Loader.batch`. Over all ranks and micro-steps they cover the global batch."""
    assert 0 <= rank < world, f"rank {rank} of {world}"
    assert 0 <= micro_step < micro_steps(rows, micro_batch_size=micro_batch_size, world=world), (
        f"micro-step {micro_step}"
    )
    return (micro_step * world + rank) * micro_batch_size, micro_batch_size


class _Items:
    """The items of one split of a source: their positions in the concatenated shards, and their tokens."""

    def __init__(self, dataset: Dataset, *, n_tokens: int, keep_tail: bool, max_tokens: int | None = None):
        self.dataset, self.n_tokens, self.n_excluded = dataset, n_tokens, 0
        self._starts = [0, *accumulate(shard.header.n_tokens for shard in dataset.shards)]
        self._spans: tuple[np.ndarray, np.ndarray] | None = None
        if dataset.index.kind == "examples":
            self._spans = self._example_spans(max_tokens)
            self.n_items = len(self._spans[0])
        else:
            self._targets = min(dataset.n_tokens - 1, max_tokens or dataset.n_tokens)
            self.n_items = -(-self._targets // n_tokens) if keep_tail else self._targets // n_tokens
        if self.n_items < 1:
            why = f"its {dataset.n_tokens} tokens do not fill a window; lower n_tokens or prepare more data"
            if dataset.index.kind == "examples":
                why = "no example has a target that counts among so many tokens; raise n_tokens or prepare other data"
            raise ValueError(f"{dataset.folder} has no row for n_tokens = {n_tokens} in split {dataset.split!r}: {why}")

    def spans(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token and number of tokens of each item; its last token is only a target."""
        if self._spans is not None:
            return self._spans[0][items], self._spans[1][items]
        begin = items * self.n_tokens
        return begin, np.minimum(self._targets - begin, self.n_tokens) + 1

    def read(self, begin: int, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Fills both arrays from token `begin` of the concatenated shards on, across shard boundaries."""
        shard = bisect_right(self._starts, begin) - 1
        done = 0
        while done < len(tokens):
            source, at = self.dataset.shards[shard], begin + done - self._starts[shard]
            part = source.tokens[at : at + len(tokens) - done]
            tokens[done : done + len(part)] = part
            counts[done : done + len(part)] = True if self._spans is None else source.mask[at : at + len(part)]
            done, shard = done + len(part), shard + 1

    def _example_spans(self, max_tokens: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Examples longer than a row are truncated; those left without a target are excluded."""
        begins, sizes = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]  # a shard may be empty
        for start, shard in zip(self._starts, self.dataset.shards, strict=False):
            for first in range(0, shard.header.n_examples, PART_EXAMPLES):
                offsets = shard.offsets[first : first + PART_EXAMPLES + 1].astype(np.int64)
                size = np.minimum(np.diff(offsets), self.n_tokens + 1)
                counted = np.cumsum(np.concatenate([[0], shard.mask[offsets[0] : offsets[-1]]]), dtype=np.int64)
                at = offsets[:-1] - offsets[0]
                good = (size > 1) & (counted[at + size] > counted[np.minimum(at + 1, at + size)])
                self.n_excluded += int((~good).sum())
                begins.append((start + offsets[:-1])[good])
                sizes.append(size[good])
        begin, size = np.concatenate(begins), np.concatenate(sizes)
        if max_tokens is not None:
            keep = max(1, int(np.searchsorted(np.cumsum(size - 1), max_tokens, side="right")))
            return begin[:keep], size[:keep]
        return begin, size


class _Reader:
    """Opens sources with the same tokenizer, and makes rows from their items."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        rows: int,
        n_tokens: int,
        split: str,
        verify: bool,
        keep_tail: bool,
        max_tokens: int | None = None,
    ):
        if not sources:
            raise ValueError("sources is empty: give at least one prepared folder")
        if len({source.path for source in sources}) < len(sources):
            raise ValueError("sources names a folder twice: give it once, with the sum of the weights")
        for name, value in (("rows", rows), ("n_tokens", n_tokens), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: give 1 or more")
        self.sources, self.rows, self.n_tokens = tuple(sources), rows, n_tokens
        datasets = [open_dataset(source.path, split=split, verify=verify) for source in sources]
        self.tokenizer = _common_tokenizer(datasets)
        self._end_of_text = datasets[0].index.end_of_text
        self._largest = max(self._end_of_text, *(dataset.max_token for dataset in datasets))
        self._items = [
            _Items(dataset, n_tokens=n_tokens, keep_tail=keep_tail, max_tokens=max_tokens) for dataset in datasets
        ]

    @property
    def n_excluded(self) -> int:
        """Examples with nothing to learn: without a target that counts, or truncated before it."""
        return sum(items.n_excluded for items in self._items)

    @property
    def largest_id(self) -> int:
        """The largest token id, including end-of-text."""
        return self._largest

    @property
    def n_tokens_in_split(self) -> int:
        """Tokens over all sources, used or not."""
        return sum(items.dataset.n_tokens for items in self._items)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises ValueError if the vocabulary is too small for the ids, instead of a fault on the GPU."""
        if self._largest >= vocab_size:
            raise ValueError(
                f"vocab_size = {vocab_size} is too small: the data, made with tokenizer {self.tokenizer!r}, has ids "
                f"up to {self._largest}; give the model {self._largest + 1} or more, or prepare the data again"
            )

    def _make(self, source: np.ndarray, item: np.ndarray, *, rows: int) -> Batch:
        """If there are fewer items than rows, the last rows are padding: length 1, no target that counts."""
        tokens = np.full((rows, self.n_tokens + 1), self._end_of_text, dtype=np.uint16)
        counts = np.zeros((rows, self.n_tokens + 1), dtype=np.bool_)
        lengths = np.ones(rows, dtype=np.int64)
        for s in np.unique(source):
            items, places = self._items[s], np.flatnonzero(source == s)
            begins, sizes = items.spans(item[places])
            lengths[places] = sizes - 1
            for row, begin, size in zip(places.tolist(), begins.tolist(), sizes.tolist(), strict=True):
                items.read(begin, tokens[row, :size], counts[row, :size])
        if (largest := int(tokens.max())) > self._largest:
            folders = ", ".join(str(self.sources[s].path) for s in np.unique(source))
            raise ValueError(
                f"{folders}: token {largest} is larger than any that was written: the data has altered bytes; "
                "open it with verify=True to find the file"
            )
        ids = tokens[:, :-1].astype(np.int64)
        if lengths.min() < self.n_tokens:  # the last token of a short row is only a target
            ids[np.arange(self.n_tokens) >= lengths[:, None]] = self._end_of_text
        targets = np.where(counts[:, 1:], tokens[:, 1:].astype(np.int64), IGNORED)
        whose = np.full(rows, source[-1], dtype=np.int64)
        whose[: len(source)] = source
        return Batch(ids, targets, lengths, whose)


def _common_tokenizer(datasets: Sequence[Dataset]) -> str:
    def facts(dataset: Dataset) -> tuple[str, int, int]:
        return dataset.index.tokenizer, dataset.index.vocab_size, dataset.index.end_of_text

    for dataset in datasets[1:]:
        if facts(dataset) != facts(datasets[0]):
            raise ValueError(
                f"{datasets[0].folder} and {dataset.folder} were made with different tokenizers (name, vocab_size, "
                f"end_of_text: {facts(datasets[0])} and {facts(dataset)}): prepare both with the same one"
            )
    return datasets[0].index.tokenizer


class Loader(_Reader):
    """Training batches: `rows` rows of `n_tokens` tokens per step, over all ranks.

    Windows of text cross the ends of documents and shards. The tail of a split that does not fill a window (fewer than
    n_tokens targets) is dropped. Weights are shares of rows. Another order of the sources gives other batches.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        rows: int,
        n_tokens: int,
        seed: int,
        split: str = "train",
        verify: bool = True,
    ):
        super().__init__(sources, rows=rows, n_tokens=n_tokens, split=split, verify=verify, keep_tail=False)
        self.seed = seed
        self.quotas = quotas([source.weight for source in sources])
        self.period = sum(self.quotas)
        self._periods = -(-BLOCK_ROWS // self.period)  # in a block
        self._block = lru_cache(maxsize=4)(self._schedule)

    def batch(self, n: int, first: int = 0, count: int | None = None) -> Batch:
        """Rows first … first + count − 1 of global batch n; all of them by default. Reads only their data."""
        count = self.rows - first if count is None else count
        if n < 0 or first < 0 or count < 1 or first + count > self.rows:
            raise ValueError(f"batch(n={n}, first={first}, count={count}): give n >= 0 and rows out of {self.rows}")
        begin, size = n * self.rows + first, self._periods * self.period
        blocks = [self._block(b) for b in range(begin // size, (begin + count - 1) // size + 1)]
        source, item = (np.concatenate(column)[begin % size :][:count] for column in zip(*blocks, strict=True))
        return self._make(source, item, rows=count)

    def epochs_at(self, n: int) -> list[float]:
        """Number of epochs of each source before batch n."""
        block, before = divmod(n * self.rows, self._periods * self.period)
        here = np.bincount(self._block(block)[0][:before], minlength=len(self.sources)).tolist()
        done = [block * self._periods * quota + rows for quota, rows in zip(self.quotas, here, strict=True)]
        return [rows / items.n_items for rows, items in zip(done, self._items, strict=True)]

    def describe(self) -> list[SourceFacts]:
        return [
            SourceFacts(
                source.path,
                items.dataset.index.kind,
                quota / self.period,
                items.dataset.n_tokens,
                items.n_items,
                items.n_excluded,
            )
            for source, items, quota in zip(self.sources, self._items, self.quotas, strict=True)
        ]

    def _schedule(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and item of every row in a block of whole periods; cached, since batches are read in order."""
        periods = np.arange(block * self._periods, (block + 1) * self._periods)
        keys = np.repeat(key_of(self.seed, 0, periods), self.period)
        place = permute(np.tile(np.arange(self.period), self._periods), self.period, keys)
        source = np.searchsorted(np.cumsum(self.quotas), place, side="right")
        item = np.empty_like(source)
        for s, (quota, items) in enumerate(zip(self.quotas, self._items, strict=True)):
            here = np.flatnonzero(source == s)
            epoch, place = np.divmod(block * self._periods * quota + np.arange(len(here)), items.n_items)
            item[here] = permute(place, items.n_items, key_of(self.seed, 1, s, epoch))
        return source, item


def quotas(weights: Sequence[float]) -> list[int]:
    """Rows per source in a period: exact if a period of up to 10,000 rows allows it, else by largest remainder."""
    exact = [Fraction(str(weight)) for weight in weights]  # the decimal as written, not its binary approximation
    shares = [weight / sum(exact) for weight in exact]
    period = min(lcm(*(share.denominator for share in shares)), LONGEST_PERIOD)
    rows = [int(share * period) for share in shares]
    by_remainder = sorted(range(len(rows)), key=lambda s: rows[s] - shares[s] * period)
    for s in by_remainder[: period - sum(rows)]:
        rows[s] += 1
    if 0 in rows:
        raise ValueError(
            f"weight = {weights[rows.index(0)]} gives a source no row in {period}: raise it, or leave the source out"
        )
    return rows


class ValidationSet(_Reader):
    """The validation split in fixed order: a sequence of batches, each of one source only.

    Every target occurs once: windows do not overlap, and the last, shorter one is a padded row. Every batch has `rows`
    rows; if items run out, the rest is padding (length 1, every target -100). `max_tokens` keeps the first `max_tokens`
    targets of each source, the same text for every n_tokens (of examples: as many complete ones as fit, at least one).
    A source without the split raises ValueError, since its loss would silently be missing.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        n_tokens: int,
        rows: int,
        max_tokens: int | None = None,
        split: str = "val",
        verify: bool = True,
    ):
        super().__init__(
            sources, rows=rows, n_tokens=n_tokens, split=split, verify=verify, keep_tail=True, max_tokens=max_tokens
        )
        self._batches = [(s, first) for s, items in enumerate(self._items) for first in range(0, items.n_items, rows)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        s, first = self._batches[index]
        item = np.arange(first, min(first + self.rows, self._items[s].n_items))
        return self._make(np.full(len(item), s), item, rows=self.rows)

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))
