"""Tokens on disk: what is written is read back, and damage is detected."""

import json
import os
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thoughtbubbles.data import shards as module
from thoughtbubbles.data.shards import (
    HEADER_BYTES,
    Index,
    ShardInfo,
    ShardWriter,
    has_split,
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


def test_every_part_of_a_large_shard_counts_in_its_checksum(tmp_path, monkeypatch):
    """The checksum is computed in parts, each continuing the one before; here they have 16 bytes."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 16)
    write_text(tmp_path, train=numbers(100))
    open_dataset(tmp_path, split="train")
    path = tmp_path / "train-00000.bin"
    good = path.read_bytes()
    for at in range(HEADER_BYTES, len(good), 16):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(ValueError, match=r"train-00000\.bin has altered bytes"):
            open_dataset(tmp_path, split="train")


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 1),  # the first example does not begin at the first token
        (3, 2),  # not in order: 0, 1, 3, 2 …
        (3, 2**63),  # far outside
        (5, 22),  # after the last token, although the last offset is right
        (6, 20),
    ],
)
def test_offsets_of_examples_are_checked_without_verification(tmp_path, at, value):
    write_examples(tmp_path)
    path = tmp_path / "train-00000.bin"
    assert open_dataset(tmp_path, split="train").shards[0].offsets.tolist() == [0, 1, 3, 6, 10, 15, 21]
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 8 * at : HEADER_BYTES + 8 * (at + 1)] = value.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00000\.bin has altered bytes .its offsets do not fit its tokens"):
        open_dataset(tmp_path, split="train", verify=False)


def edited(folder: Path, change: dict[str, object], *, sealed: bool) -> None:
    """Fields of the index, or of its first shard, changed and with a correct new checksum."""
    record = json.loads((folder / "index.json").read_text())
    for name, value in change.items():
        if name in record:
            record[name] = value
        else:
            record["splits"]["train"][0][name] = value
    if sealed:
        del record["crc32"]
        record["crc32"] = zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
    (folder / "index.json").write_text(json.dumps(record))


EDITED = [
    ({"n_tokens": 99}, "train-00000.bin disagrees"),
    ({"n_examples": 1}, "train-00000.bin disagrees"),
    ({"n_tokens": -1}, "index.json is damaged"),
    ({"n_tokens": "100"}, "index.json is damaged"),
    ({"n_tokens": True}, "index.json is damaged"),
    ({"n_tokens": 10**30}, "index.json is damaged"),
    ({"file": "train-00001.bin"}, "index.json is damaged .*instead of 'train-00000.bin'"),
    *(({"file": name}, "index.json is damaged") for name in ("../train-00000.bin", "..", ".", "a/b", "", 7, ["x"])),
    ({"file": "x" * 5000}, "index.json is damaged"),
    ({"kind": "words"}, "index.json is damaged"),
    ({"kind": ["text"]}, "index.json is damaged"),
    ({"splits": None}, "index.json is damaged"),
    ({"splits": {"../x": []}}, "index.json is damaged .*a split is named '../x'"),
    ({"splits": {"train": {}}}, "index.json is damaged"),
    ({"splits": {"train": [None]}}, "index.json is damaged"),
    ({"notes": []}, "index.json is damaged"),
    ({"tokenizer": ["bytes"]}, "index.json is damaged"),
    ({"tokenizer": None}, "index.json is damaged"),
    ({"tokenizer": "words"}, "index.json is damaged .*'words': choose from gpt2, bytes"),
    ({"tokenizer": "gpt2"}, "index.json is damaged .*end_of_text = 256, but the tokenizer 'gpt2' has 50256"),
    ({"end_of_text": 10}, "index.json is damaged .*end_of_text = 10, but the tokenizer 'bytes' has 256"),
    ({"vocab_size": 512}, "index.json is damaged .*vocab_size = 512, but the tokenizer 'bytes' has 257"),
    ({"splits": {"val": []}}, "no split 'train'"),
]


@pytest.mark.parametrize(("change", "words"), EDITED)
def test_an_edited_index_is_refused(tmp_path, change, words):
    """With a wrong checksum of the index, and with a right one."""
    write_text(tmp_path, train=numbers(250))
    edited(tmp_path, change, sealed=False)
    with pytest.raises(ValueError, match=r"index\.json has been altered .its checksum differs"):
        open_dataset(tmp_path, split="train", verify=False)
    edited(tmp_path, change, sealed=True)
    with pytest.raises(ValueError, match=words):
        open_dataset(tmp_path, split="train", verify=False)


@pytest.mark.parametrize(
    ("change", "words"), [({"version": 1}, "version 1, this program reads 2"), ({"format": "x"}, "not the index")]
)
def test_an_index_of_another_kind_is_not_reported_as_damaged(tmp_path, change, words):
    write_text(tmp_path, train=numbers(250))
    edited(tmp_path, change, sealed=False)
    with pytest.raises(ValueError, match=rf"index\.json .*{words}"):
        open_dataset(tmp_path, split="train")


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_dropped_shards_are_seen(tmp_path, dropped):
    index = write_text(tmp_path, train=numbers(250))
    kept = [info for number, info in enumerate(index.splits["train"]) if number != dropped]
    record = json.loads((tmp_path / "index.json").read_text())
    edited(
        tmp_path,
        {"splits": {"train": [record["splits"]["train"][int(info.file[6:11])] for info in kept]}},
        sealed=False,
    )
    with pytest.raises(ValueError, match=r"index\.json has been altered"):
        open_dataset(tmp_path, split="train")


def test_tokens_that_the_tokenizer_does_not_have(tmp_path):
    """As if the shards of another dataset were copied into the folder, with their entries."""
    writer = ShardWriter(tmp_path, "train", kind="text", shard_tokens=100)
    writer.add(np.array([5, 257], dtype=np.uint16))
    writer.close()
    write_index(tmp_path, Index("text", "bytes", 256, 257, {"train": writer.finished}))
    with pytest.raises(ValueError, match=r"train-00000\.bin has token 257, index.json says vocab_size = 257"):
        open_dataset(tmp_path, split="train", verify=False)


def test_the_checksum_of_the_index_is_of_its_content(tmp_path):
    """With other indentation and order it is the same index."""
    index = write_text(tmp_path, train=numbers(250))
    record = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(dict(reversed(record.items()))))
    assert read_index(tmp_path) == index


def test_has_split(tmp_path):
    write_text(tmp_path, train=numbers(10), val=numbers(0))
    assert has_split(tmp_path, "train")
    assert not has_split(tmp_path, "val")
    assert not has_split(tmp_path, "test")
    with pytest.raises(ValueError, match=r"index\.json is missing"):
        has_split(tmp_path / "gone", "val")


def test_a_folder_that_is_not_a_dataset_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"index.json is missing.*prepare it"):
        open_dataset(tmp_path, split="train")
    for content, words in [
        (b'{"format": "thoughtb', "not JSON"),
        (b"[]", "contains a JSON list instead of an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"a": "\xff"}', "it is not UTF-8"),
        (b"{}", "is not the index"),
    ]:
        (tmp_path / "index.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"index\.json.*{words}"):
            open_dataset(tmp_path, split="train")


def test_what_is_nested_too_deeply_to_be_written_was_not_written_by_us(tmp_path):
    """The maximum depth of Python's JSON reader and writer depends on its version, and the two may differ."""
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match=r"index\.json has been altered"):
        module.check_seal(tmp_path / "index.json", {"notes": value}, remedy="prepare it again")


def test_what_is_not_a_file(tmp_path):
    """Links to themselves, folders, pipes, files in place of folders, names too long: one line that names it."""
    write_text(tmp_path / "good", train=numbers(250))
    for name in ("index.json", "train-00001.bin"):
        for place, words in [
            (lambda path: path.symlink_to(path.name), "symbolic links|is not a file"),
            (lambda path: path.mkdir(), "is not a file"),
            (lambda path: os.mkfifo(path), "is not a file"),
            (lambda path: path.symlink_to("nowhere"), "No such file|is not a file"),
        ]:
            folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            for file in (tmp_path / "good").iterdir():
                if file.name != name:
                    (folder / file.name).write_bytes(file.read_bytes())
            place(folder / name)
            with pytest.raises(ValueError, match=rf"{name}.*({words})"):
                open_dataset(folder, split="train")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "loop", tmp_path / "file", tmp_path / ("x" * 5000)):
        with pytest.raises(ValueError, match=r"index\.json") as error:
            open_dataset(folder, split="train")
        assert len(str(error.value)) < 1000


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
