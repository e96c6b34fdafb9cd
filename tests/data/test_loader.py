"""Batches: pure functions of (seed, n), no repetition within an epoch, exact shares, every validation target once."""

from collections import Counter
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thoughtbubbles.data import loader as loader_module
from thoughtbubbles.data.loader import (
    IGNORED,
    Batch,
    Loader,
    Source,
    ValidationSet,
    micro_steps,
    quotas,
    rows_of_rank,
)
from thoughtbubbles.data.shards import Index, ShardWriter, write_index
from thoughtbubbles.data.shuffle import key_of, mix64, permute
from thoughtbubbles.data.tokenizer import tokenizer

END = 50_256  # end-of-text of gpt2; ordinary tokens below it are their own positions in the text


def text_folder(folder: Path, n_tokens: int, *, shard_tokens: int = 1 << 20, name: str = "gpt2") -> Path:
    """Token i is i, in both splits: a window shows its position."""
    finished = {}
    for split in ("train", "val"):
        writer = ShardWriter(folder, split, kind="text", shard_tokens=shard_tokens)
        writer.add(np.arange(n_tokens, dtype=np.uint16))
        writer.close()
        finished[split] = writer.finished
    tok = tokenizer(name)
    write_index(folder, Index("text", name, tok.end_of_text, tok.size, finished))
    return folder


def example_folder(folder: Path, examples: list[tuple[list[int], list[int]]], *, shard_tokens: int = 1 << 20) -> Path:
    finished = {}
    for split in ("train", "val"):
        writer = ShardWriter(folder, split, kind="examples", shard_tokens=shard_tokens)
        for tokens, mask in examples:
            writer.add_example(np.array(tokens, dtype=np.uint16), np.array(mask, dtype=np.bool_))
        writer.close()
        finished[split] = writer.finished
    write_index(folder, Index("examples", "gpt2", END, END + 1, finished))
    return folder


def numbered_examples(n: int) -> list[tuple[list[int], list[int]]]:
    """Example i begins with token i and is two to five tokens long."""
    return [([i, *range(100, 101 + i % 4)], [0] + [1] * (1 + i % 4)) for i in range(n)]


def assert_same(a: Batch, b: Batch) -> None:
    for ours, theirs in zip(a, b, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def joined(parts: list[Batch]) -> Batch:
    return Batch(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def first_ids(loader: Loader, n_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and first token of the rows of the run."""
    batches = joined([loader.batch(n) for n in range(n_batches)])
    return batches.source, batches.ids[:, 0]


@pytest.fixture
def mixture(tmp_path: Path) -> list[Source]:
    return [
        Source(text_folder(tmp_path / "a", 331, shard_tokens=50), 0.5),
        Source(text_folder(tmp_path / "b", 97), 0.3),
        Source(example_folder(tmp_path / "c", numbered_examples(7)), 0.2),
    ]


# --- the permutation -------------------------------------------------------------------------------


def test_mixing_is_splitmix64():
    """The published outputs for seed 1234567."""
    steps = np.arange(5, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix64(np.uint64(1234567) + steps).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(n=st.one_of(st.integers(1, 30), st.integers(1, 3000)), seed=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(n, seed):
    assert sorted(permute(np.arange(n), n, key_of(seed)).tolist()) == list(range(n))


@given(n=st.integers(2**33, 2**62), seed=st.integers(0, 2**64 - 1))
def test_permute_stays_in_range_and_apart_for_huge_n(n, seed):
    places = np.concatenate([np.arange(200), np.arange(n - 200, n)])
    found = permute(places, n, key_of(seed))
    assert len(set(found.tolist())) == 400
    assert found.min() >= 0
    assert found.max() < n
    assert found.max() > n // 4


def test_permute_with_a_key_for_each_place():
    keys = key_of(3, np.arange(6))
    each = [int(permute(np.array([i]), 11, keys[i : i + 1])[0]) for i in range(6)]
    assert permute(np.arange(6), 11, keys).tolist() == each


def test_numbers_never_change(mixture):
    """Runs are resumed by asking for the next batch: another order after an update would repeat and skip data."""
    assert permute(np.arange(12), 12, key_of(1, 2)).tolist() == [8, 2, 10, 6, 5, 4, 1, 3, 11, 9, 0, 7]
    batch = Loader(mixture, rows=10, n_tokens=5, seed=1).batch(1000)
    assert batch.source.tolist() == [2, 2, 0, 0, 1, 1, 0, 0, 1, 0]
    assert batch.ids[:, 0].tolist() == [2, 3, 310, 105, 50, 90, 130, 85, 55, 260]


@pytest.mark.parametrize("n", [2, 3, 5, 6, 12])
def test_every_item_is_as_likely_in_every_place(n):
    runs = 6000
    keys = np.repeat(key_of(np.arange(runs)), n)
    found = permute(np.tile(np.arange(n), runs), n, keys).reshape(runs, n)
    table = np.stack([np.bincount(found[:, place], minlength=n) for place in range(n)])
    chi_square = float(((table - runs / n) ** 2 / (runs / n)).sum())
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


# --- text ------------------------------------------------------------------------------------------


@settings(max_examples=40)  # each waits for the disk
@given(
    windows=st.integers(1, 40),
    tail=st.integers(0, 6),
    n_tokens=st.integers(1, 7),
    rows=st.integers(1, 9),
    shard_tokens=st.integers(20, 200),
    seed=st.integers(0, 2**32),
)
def test_every_window_exactly_once_per_epoch(tmp_path_factory, windows, tail, n_tokens, rows, shard_tokens, seed):
    size = windows * n_tokens + 1 + min(tail, n_tokens - 1)
    folder = text_folder(tmp_path_factory.mktemp("text"), size, shard_tokens=shard_tokens)
    loader = Loader([Source(folder)], rows=rows, n_tokens=n_tokens, seed=seed)
    batches = joined([loader.batch(n) for n in range(ceil(3 * windows / rows))])
    np.testing.assert_array_equal(batches.targets, batches.ids + 1)
    np.testing.assert_array_equal(batches.ids - batches.ids[:, :1], np.tile(np.arange(n_tokens), (len(batches.ids), 1)))
    assert (batches.lengths == n_tokens).all()
    for epoch in range(3):
        begins = batches.ids[epoch * windows : (epoch + 1) * windows, 0]
        assert sorted(begins.tolist()) == [w * n_tokens for w in range(windows)]
    assert loader.describe()[0].rows_per_epoch == windows


def test_epochs_and_seeds_have_their_own_order(tmp_path):
    folder = text_folder(tmp_path, 401)

    def order(seed: int, epoch: int) -> list[int]:
        loader = Loader([Source(folder)], rows=100, n_tokens=4, seed=seed)
        return loader.batch(epoch).ids[:, 0].tolist()

    orders = [order(seed, epoch) for seed in (0, 1, -1) for epoch in range(3)]
    for i, a in enumerate(orders):
        assert a != sorted(a)
        for b in orders[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 10


def test_sources_of_one_size_have_their_own_order(tmp_path):
    sources = [Source(text_folder(tmp_path / name, 401)) for name in "ab"]
    source, first = first_ids(Loader(sources, rows=200, n_tokens=4, seed=0), 1)
    assert (first[source == 0] != first[source == 1]).sum() > 90


def test_batches_are_pure(mixture):
    loader = Loader(mixture, rows=6, n_tokens=5, seed=3)
    far = 10**9
    asked = [0, 1, 2, 17, 2000, far, far + 1]
    batches = {n: loader.batch(n) for n in asked}
    for n in reversed(asked):
        assert_same(loader.batch(n), batches[n])
        assert_same(Loader(mixture, rows=6, n_tokens=5, seed=3).batch(n), batches[n])
    wider = Loader(mixture, rows=18, n_tokens=5, seed=3)
    assert_same(wider.batch(300), joined([loader.batch(n) for n in (900, 901, 902)]))
    assert not np.array_equal(Loader(mixture, rows=6, n_tokens=5, seed=4).batch(0).ids, batches[0].ids)
    assert batches[0].ids.dtype == batches[0].targets.dtype == batches[0].lengths.dtype == np.int64


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 6])
def test_ranks_share_out_one_global_batch(mixture, world, micro_batch_size):
    rows = 24
    loader = Loader(mixture, rows=rows, n_tokens=5, seed=3)
    steps = micro_steps(rows, micro_batch_size=micro_batch_size, world=world)
    assert steps * micro_batch_size * world == rows
    for n in (0, 5, 700):
        parts = [
            loader.batch(n, *rows_of_rank(rows, micro_batch_size=micro_batch_size, micro_step=a, rank=r, world=world))
            for a in range(steps)
            for r in range(world)
        ]
        assert_same(joined(parts), loader.batch(n))


def test_rows_must_be_shared_out_evenly():
    with pytest.raises(ValueError, match=r"rows = 24 is not a multiple of micro_batch_size · ranks = 5 · 2"):
        rows_of_rank(24, micro_batch_size=5, micro_step=0, rank=0, world=2)


# --- mixtures --------------------------------------------------------------------------------------


def test_shares_are_exact_in_every_period(mixture):
    loader = Loader(mixture, rows=10, n_tokens=5, seed=3)
    assert (loader.period, loader.quotas) == (10, [5, 3, 2])
    orders = set()
    for n in [*range(20), 409, 410, 411]:
        source = loader.batch(n).source
        assert np.bincount(source).tolist() == [5, 3, 2]
        orders.add(tuple(source.tolist()))
    assert len(orders) > 15


def test_each_source_of_a_mixture_goes_through_its_own_epochs(mixture):
    loader = Loader(mixture, rows=7, n_tokens=5, seed=3)
    n_batches = 300
    source, first = first_ids(loader, n_batches)
    whole = {0: [w * 5 for w in range(66)], 1: [w * 5 for w in range(19)], 2: list(range(7))}
    for s, items in whole.items():
        seen = first[source == s]
        for epoch in range(len(seen) // len(items)):
            assert sorted(seen[epoch * len(items) : (epoch + 1) * len(items)].tolist()) == items
        assert loader.describe()[s].rows_per_epoch == len(items)
    for n in (0, 1, 50, n_batches):
        count = np.bincount(source[: n * 7], minlength=3)
        assert loader.epochs_at(n) == [c / len(items) for c, items in zip(count.tolist(), whole.values(), strict=True)]
    assert loader.epochs_at(100_000) == [350_000 / 66, 210_000 / 19, 140_000 / 7]


def test_quotas_by_hand():
    assert quotas([3.0]) == [1]
    assert quotas([0.7, 0.3]) == [7, 3]  # not 0.7000000000000000066 …
    assert quotas([1.0, 1.0, 1.0]) == [1, 1, 1]
    assert quotas([2.0, 1.0]) == [2, 1]
    assert quotas([1.0, 0.0001]) == [9999, 1]  # of 10,001 parts: 9999.0001 and 0.9999
    assert quotas([0.33333, 0.66667]) == [3333, 6667]
    with pytest.raises(ValueError, match=r"weight = 1e-05 gives a source no row in 10000"):
        quotas([1.0, 0.00001])


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_quotas_are_nearest_to_the_shares(weights):
    rows = quotas(weights)
    period = sum(rows)
    assert period <= 10_000
    for row, weight in zip(rows, weights, strict=True):
        assert abs(row - weight / sum(weights) * period) < 1 + 1e-6


# --- examples --------------------------------------------------------------------------------------


def test_examples_by_hand(tmp_path):
    examples = [
        ([1, 2, 3], [0, 0, 1]),
        ([4, 5, 6, 7, 8], [1, 0, 1, 0, 1]),  # exactly T + 1; a first token is never a target
        ([11, 12, 13, 14, 15, 16, 17], [0, 1, 1, 0, 0, 1, 1]),  # truncated to T + 1
        ([21, 22], [0, 1]),
        ([31, 32, 33], [1, 0, 0]),  # only the first counts: excluded
        ([41], [1]),  # no target: excluded
        ([51, 52, 53, 54, 55, 56], [0, 0, 0, 0, 0, 1]),  # truncated before the targets: excluded
        ([61, 62], [0, 0]),  # excluded
    ]
    x, e = IGNORED, END
    expected = {
        1: ([1, 2, e, e], [x, 3, x, x], 2),
        4: ([4, 5, 6, 7], [x, 6, x, 8], 4),
        11: ([11, 12, 13, 14], [12, 13, x, x], 4),
        21: ([21, e, e, e], [22, x, x, x], 1),
    }
    for shard_tokens in (1, 8, 1000):
        folder = example_folder(tmp_path / str(shard_tokens), examples, shard_tokens=shard_tokens)
        loader = Loader([Source(folder)], rows=4, n_tokens=4, seed=0)
        assert loader.n_excluded == loader.describe()[0].n_excluded == 4
        batch = loader.batch(3)
        rows = zip(batch.ids.tolist(), batch.targets.tolist(), batch.lengths.tolist(), strict=True)
        assert {row[0][0]: row for row in rows} == expected


@pytest.mark.parametrize("n", [3, 4, 5, 8, 9, 11])
def test_examples_are_counted_over_the_edges_of_parts(n, tmp_path, monkeypatch):
    """Examples are scanned in parts: at their boundaries none is lost or counted twice."""
    monkeypatch.setattr(loader_module, "PART_EXAMPLES", 4)
    examples = numbered_examples(n)
    examples[-2] = ([n - 2, 100], [1, 0])  # without a target; the boundary is before or after it
    validation = ValidationSet([Source(example_folder(tmp_path, examples))], n_tokens=5, rows=n)
    (batch,) = validation
    expected = [i for i in range(n) if i != n - 2]
    assert batch.ids[: n - 1, 0].tolist() == expected
    assert batch.lengths[: n - 1].tolist() == [1 + i % 4 for i in expected]
    assert (batch.targets != IGNORED).sum(axis=1).tolist() == [*(1 + i % 4 for i in expected), 0]
    assert validation.n_excluded == 1


def test_a_folder_without_targets_is_refused(tmp_path):
    folder = example_folder(tmp_path, [([1, 2, 3], [1, 0, 0])])
    with pytest.raises(ValueError, match=r"no row for n_tokens = 4 in split 'train': no example has .* raise n_tokens"):
        Loader([Source(folder)], rows=1, n_tokens=4, seed=0)
    one = ShardWriter(tmp_path / "empty", "train", kind="examples", shard_tokens=10)
    one._finish_shard()  # another tool could write this: a shard without an example
    write_index(tmp_path / "empty", Index("examples", "gpt2", END, END + 1, {"train": one.finished}))
    with pytest.raises(ValueError, match=r"empty has no row for n_tokens = 4"):
        Loader([Source(tmp_path / "empty")], rows=1, n_tokens=4, seed=0)


# --- validation --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    size=st.integers(2, 120),
    n_tokens=st.integers(1, 11),
    rows=st.integers(1, 6),
    shard_tokens=st.integers(20, 90),
    max_tokens=st.none() | st.integers(1, 130),
)
def test_validation_text_has_every_target_once_in_order(
    tmp_path_factory, size, n_tokens, rows, shard_tokens, max_tokens
):
    folder = text_folder(tmp_path_factory.mktemp("text"), size, shard_tokens=shard_tokens)
    validation = ValidationSet([Source(folder)], n_tokens=n_tokens, rows=rows, max_tokens=max_tokens)
    targets = []
    for batch in validation:
        assert batch.ids.shape == batch.targets.shape == (rows, n_tokens)
        for ids, target, length in zip(*batch[:3], strict=True):
            counted = target[target != IGNORED]
            assert len(counted) == (length if len(counted) else 0)
            assert len(counted) or length == 1
            np.testing.assert_array_equal(ids[: len(counted)], counted - 1)
            assert (ids[length:] == END).all()
            targets += counted.tolist()
    assert targets == list(range(1, min(size - 1, max_tokens or size) + 1))
    assert len(validation) == ceil(ceil(len(targets) / n_tokens) / rows)


def test_validation_batches_are_of_one_source_and_of_constant_shape(mixture):
    validation = ValidationSet(mixture, n_tokens=5, rows=4)
    batches = list(validation)
    assert len(batches) == len(validation) == ceil(66 / 4) + ceil(20 / 4) + ceil(7 / 4)
    assert_same(validation[3], batches[3])
    assert_same(validation[-1], batches[-1])
    for batch in batches:
        assert len(set(batch.source.tolist())) == 1
        assert batch.ids.shape == (4, 5)
    per_source = Counter()
    for batch in batches:
        per_source[int(batch.source[0])] += int((batch.targets != IGNORED).sum())
    assert per_source == {0: 330, 1: 96, 2: sum(1 + i % 4 for i in range(7))}
    last = batches[-1]  # 7 examples in rows of 4: one row of padding
    assert last.lengths[-1] == 1
    assert (last.targets[-1] == IGNORED).all()
    assert (last.ids[-1] == END).all()
    with pytest.raises(IndexError):
        validation[len(validation)]


def test_max_tokens_keeps_whole_examples(tmp_path):
    folder = example_folder(tmp_path, numbered_examples(6))  # 1, 2, 3, 4, 1, 2 targets

    def kept(max_tokens: int) -> list[int]:
        batch = ValidationSet([Source(folder)], n_tokens=5, rows=8, max_tokens=max_tokens)[0]
        return batch.ids[(batch.targets != IGNORED).any(axis=1), 0].tolist()

    assert kept(1) == [0]
    assert kept(5) == [0, 1]
    assert kept(6) == [0, 1, 2]
    assert kept(100) == [0, 1, 2, 3, 4, 5]


# --- input validation --------------------------------------------------------------------------


def test_sources_are_parsed():
    assert Source.parse("a/b") == Source(Path("a/b"), 1.0)
    assert Source.parse("a/b=0.7") == Source(Path("a/b"), 0.7)
    assert Source.parse("a=b=2") == Source(Path("a=b"), 2.0)
    for text in ("a=", "a=b", "a=0", "a=-1", "a=nan", "a=inf", "=1"):
        with pytest.raises(ValueError, match=f"source = '{text}': give PATH or PATH=WEIGHT"):
            Source.parse(text)


def test_settings_are_checked(tmp_path):
    folder = text_folder(tmp_path / "a", 20)
    source = Source(folder)
    good = {"rows": 2, "n_tokens": 4, "seed": 0}
    for changes, words in [
        ({"rows": 0}, "rows = 0"),
        ({"n_tokens": 0}, "n_tokens = 0"),
        ({"n_tokens": 20}, "no row for n_tokens = 20 in split 'train'.*lower n_tokens"),
        ({"split": "test"}, "no split 'test' .it has: train, val."),
    ]:
        with pytest.raises(ValueError, match=words):
            Loader([source], **{**good, **changes})
    with pytest.raises(ValueError, match="sources is empty"):
        Loader([], **good)
    with pytest.raises(ValueError, match="a folder twice"):
        Loader([source, Source(folder, 0.5)], **good)
    with pytest.raises(ValueError, match="max_tokens = 0"):
        ValidationSet([source], n_tokens=4, rows=2, max_tokens=0)
    loader = Loader([source], **good)
    for arguments in [(-1,), (0, 2), (0, 1, 2), (0, -1), (0, 0, 0)]:
        with pytest.raises(ValueError, match=r"give n >= 0 and rows out of 2"):
            loader.batch(*arguments)
    with pytest.raises(ValueError, match=r"weight = -1"):
        Source(folder, -1.0)


def test_sources_share_a_tokenizer(tmp_path):
    sources = [Source(text_folder(tmp_path / name, 20, name=name)) for name in ("gpt2", "bytes")]
    with pytest.raises(ValueError, match=r"different tokenizers .*'gpt2'.*'bytes'.*prepare both with the same"):
        Loader(sources, rows=2, n_tokens=4, seed=0)


def test_ids_are_checked_against_the_vocabulary(tmp_path):
    loader = Loader([Source(text_folder(tmp_path, 20))], rows=2, n_tokens=4, seed=0)
    loader.check_vocab(END + 1)
    with pytest.raises(ValueError, match=rf"vocab_size = {END} is too small.*give the model {END + 1} or more"):
        loader.check_vocab(END)


def test_an_id_out_of_range_never_leaves_the_loader(tmp_path):
    """Even unverified data cannot reach an embedding that has no such row."""
    path = text_folder(tmp_path, 21) / "train-00000.bin"
    data = bytearray(path.read_bytes())
    data[-1] = 0xFF
    path.write_bytes(data)
    loader = Loader([Source(tmp_path)], rows=5, n_tokens=4, seed=0, verify=False)
    with pytest.raises(ValueError, match=r"altered bytes; open it with verify=True"):
        loader.batch(0)
    with pytest.raises(ValueError, match=r"train-00000.bin has altered bytes"):
        Loader([Source(tmp_path)], rows=5, n_tokens=4, seed=0)
