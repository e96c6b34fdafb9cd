"""Tokens on disk: what is written comes back, and nothing that was damaged does."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thoughtbubbles.data.shards import (
    HEADER_BYTES,
    Index,
    ShardInfo,
    ShardWriter,
    open_dataset,
    read_index,
    write_index,
)


def numbers(n: int, *, start: int = 0) -> np.ndarray:
    return (np.arange(start, start + n) % 250).astype(np.uint16)


def write_text(folder: Path, **splits: np.ndarray) -> Index:
    finished = {}
    for split, tokens in splits.items():
        writer = ShardWriter(folder, split, kind="text", shard_tokens=100)
        writer.add(tokens)
        writer.close()
        finished[split] = writer.finished
    index = Index("text", "bytes", 256, 257, finished, {"made": "here"})
    write_index(folder, index)
    return index


def write_examples(folder: Path) -> None:
    writer = ShardWriter(folder, "train", kind="examples", shard_tokens=20)
    for size in range(1, 10):
        writer.add_example(numbers(size, start=10 * size), np.arange(size) % 3 == 1)
    writer.close()
    write_index(folder, Index("examples", "bytes", 256, 257, {"train": writer.finished}))


def test_text_comes_back_in_shards_of_exact_size(tmp_path):
    documents = [numbers(size, start=size) for size in (1, 99, 100, 7, 230, 3)]
    writer = ShardWriter(tmp_path, "train", kind="text", shard_tokens=100)
    pending = []
    for document in documents:
        writer.add(document)
        pending.append(writer.pending)
    assert pending == [1, 0, 0, 7, 37, 40]
    writer.close()
    assert writer.pending == 0
    assert [info.n_tokens for info in writer.finished] == [100, 100, 100, 100, 40]
    assert [info.file for info in writer.finished] == [f"train-{i:05d}.bin" for i in range(5)]
    write_index(tmp_path, Index("text", "bytes", 256, 257, {"train": writer.finished}))
    dataset = open_dataset(tmp_path, split="train")
    assert dataset.n_tokens == 440
    assert dataset.max_token == 249
    np.testing.assert_array_equal(np.concatenate([s.tokens for s in dataset.shards]), np.concatenate(documents))


def test_examples_come_back_whole_with_their_masks(tmp_path):
    write_examples(tmp_path)
    dataset = open_dataset(tmp_path, split="train")
    assert [s.header.n_tokens for s in dataset.shards] == [21, 24]  # 1+…+6, 7+8+9
    assert dataset.n_examples == 9
    sizes = iter(range(1, 10))
    for shard in dataset.shards:
        for a, b in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True):
            size = next(sizes)
            np.testing.assert_array_equal(shard.tokens[a:b], numbers(size, start=10 * size))
            np.testing.assert_array_equal(shard.mask[a:b], np.arange(size) % 3 == 1)


def test_the_writer_keeps_no_reference_to_the_callers_array(tmp_path):
    writer = ShardWriter(tmp_path, "train", kind="text", shard_tokens=100)
    buffer = numbers(10)
    writer.add(buffer)
    buffer[:] = 0
    writer.close()
    write_index(tmp_path, Index("text", "bytes", 256, 257, {"train": writer.finished}))
    np.testing.assert_array_equal(open_dataset(tmp_path, split="train").shards[0].tokens, numbers(10))


def test_a_resumed_writer_makes_the_same_files(tmp_path):
    tokens = numbers(450)
    whole = write_text(tmp_path / "whole", train=tokens)
    first = ShardWriter(tmp_path / "parts", "train", kind="text", shard_tokens=100)
    first.add(tokens[:270])  # and no close: as if killed here
    done = sum(info.n_tokens for info in first.finished)
    assert done + first.pending == 270
    second = ShardWriter(tmp_path / "parts", "train", kind="text", shard_tokens=100, first_shard=len(first.finished))
    second.add(tokens[done:])
    second.close()
    assert first.finished + second.finished == whole.splits["train"]
    for info in whole.splits["train"]:
        assert (tmp_path / "parts" / info.file).read_bytes() == (tmp_path / "whole" / info.file).read_bytes()


def test_the_index_comes_back(tmp_path):
    index = write_text(tmp_path, train=numbers(250), val=numbers(30))
    assert read_index(tmp_path) == index
    assert open_dataset(tmp_path, split="val").n_tokens == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "index.json",
        *(f"train-{i:05d}.bin" for i in range(3)),
        "val-00000.bin",
    ]


@pytest.mark.parametrize("kind", ["text", "examples"])
def test_every_flipped_byte_is_found(tmp_path, kind):
    """In the magic, the version, the counts, the empty part of the header, the checksums, offsets, tokens and mask."""
    if kind == "text":
        write_text(tmp_path, train=numbers(130))
    else:
        write_examples(tmp_path)
    path = tmp_path / "train-00001.bin"
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises(ValueError, match=r"train-00001\.bin.*prepare the dataset again"):
            open_dataset(tmp_path, split="train")
        if at < HEADER_BYTES:
            with pytest.raises(ValueError, match=r"train-00001\.bin"):
                open_dataset(tmp_path, split="train", verify=False)
    path.write_bytes(good)
    open_dataset(tmp_path, split="train")


@pytest.mark.parametrize("verify", [True, False])
def test_damaged_files_are_refused_by_name(tmp_path, verify):
    write_text(tmp_path, train=numbers(250))
    first, second, last = (tmp_path / f"train-{i:05d}.bin" for i in range(3))
    good = second.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(ValueError, match=rf"train-0000\d\.bin.*{words}.*prepare the dataset again"):
            open_dataset(tmp_path, split="train", verify=verify)

    for size in (0, 10, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(good) - 1):
        second.write_bytes(good[:size])
        refused("bytes")
    second.write_bytes(good + b"\0\0")
    refused("bytes instead of")
    second.write_bytes(b"PK\x03\x04" + good[4:])
    refused("not a shard of tokens")
    second.unlink()
    refused("is missing")
    second.write_bytes(last.read_bytes())
    refused("disagrees with index.json")
    second.write_bytes(first.read_bytes())  # the same counts
    first.write_bytes(good)
    refused("disagrees with index.json .crc32")


def test_a_shard_of_the_other_kind_is_refused(tmp_path):
    index = write_text(tmp_path, train=numbers(50))
    write_index(tmp_path, replace(index, kind="examples"))
    with pytest.raises(ValueError, match=r"disagrees with index.json .kind"):
        open_dataset(tmp_path, split="train")


def edited(folder: Path, **changes: object) -> None:
    record = json.loads((folder / "index.json").read_text())
    for name, value in changes.items():
        if name in record:
            record[name] = value
        else:
            record["splits"]["train"][0][name] = value
    (folder / "index.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_tokens": 99}, "train-00000.bin disagrees"),
        ({"n_examples": 1}, "train-00000.bin disagrees"),
        ({"crc32": 0}, "train-00000.bin disagrees"),
        ({"n_tokens": -1}, "index.json is damaged"),
        ({"n_tokens": "100"}, "index.json is damaged"),
        ({"file": "../train-00000.bin"}, "index.json is damaged"),
        ({"file": "train-00001.bin"}, "listed twice"),
        ({"file": "gone.bin"}, "gone.bin is missing"),
        ({"kind": "words"}, "index.json is damaged"),
        ({"splits": None}, "index.json is damaged"),
        ({"vocab_size": 249}, "index.json is damaged"),  # end_of_text no longer fits
        ({"vocab_size": 249, "end_of_text": 0}, "has token 249"),
        ({"version": 2}, "version 2"),
        ({"format": "something"}, "not the index"),
        ({"splits": {"val": []}}, "no split 'train'"),
    ],
)
def test_an_edited_index_is_refused(tmp_path, change, words):
    write_text(tmp_path, train=numbers(250))
    edited(tmp_path, **change)
    with pytest.raises(ValueError, match=words):
        open_dataset(tmp_path, split="train", verify=False)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"index.json is missing.*prepare it"):
        open_dataset(tmp_path, split="train")
    (tmp_path / "index.json").write_text('{"format": "thoughtb')
    with pytest.raises(ValueError, match=r"index.json is not valid JSON"):
        open_dataset(tmp_path, split="train")
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index.json is not the index"):
        open_dataset(tmp_path, split="train")


@pytest.mark.parametrize(
    "changes", [{"split": "../train"}, {"split": ""}, {"shard_tokens": 0}, {"kind": "words"}], ids=str
)
def test_the_writers_settings_are_checked(tmp_path, no_shape_checks, changes):
    settings = {"split": "train", "kind": "text", "shard_tokens": 10, **changes}
    with pytest.raises(ValueError, match=f"{next(iter(changes))} = "):
        ShardWriter(tmp_path, settings.pop("split"), **settings)


KILLED = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from thoughtbubbles.data.shards import ShardWriter

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
writer = ShardWriter(Path(sys.argv[1]), "train", kind="text", shard_tokens=50_000)
tokens = (np.arange(150_000) % 250).astype(np.uint16)
writer.add(tokens[:99_000])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
writer.add(tokens[99_000:])
"""


@pytest.mark.parametrize("size", [0, 40, 70_000])
def test_a_writer_killed_within_a_shard_leaves_no_half_shard(tmp_path, size):
    """The kernel ends the process at the given byte of its second shard."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(size)], check=False)
    assert done.returncode == -signal.SIGXFSZ
    assert [path.name for path in tmp_path.glob("*.bin")] == ["train-00000.bin"]
    writer = ShardWriter(tmp_path, "train", kind="text", shard_tokens=50_000, first_shard=1)
    tokens = numbers(150_000)
    writer.add(tokens[50_000:])
    head = (tmp_path / "train-00000.bin").read_bytes()[:HEADER_BYTES]
    infos = [ShardInfo("train-00000.bin", 50_000, 0, int.from_bytes(head[32:36], "little")), *writer.finished]
    write_index(tmp_path, Index("text", "bytes", 256, 257, {"train": infos}))
    dataset = open_dataset(tmp_path, split="train")
    np.testing.assert_array_equal(np.concatenate([s.tokens for s in dataset.shards]), tokens)
    assert not list(tmp_path.glob("*.tmp"))  # the next attempt takes the same temporary name
