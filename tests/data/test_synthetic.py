"""Text without downloads: synthetic text, and the documentation in Python's standard library."""

import re
import subprocess
import sys
import zlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from thoughtbubbles.data.builtin import encode, write_once
from thoughtbubbles.data.loader import Loader, Source, ValidationSet
from thoughtbubbles.data.shards import open_dataset, read_index
from thoughtbubbles.data.stdlib import is_validation, write_stdlib
from thoughtbubbles.data.synthetic import document, documents, write_synthetic

END = 256


def texts(folder: Path, split: str) -> list[str]:
    tokens = np.concatenate([shard.tokens for shard in open_dataset(folder, split=split).shards])
    assert tokens[-1] == END
    parts = np.split(tokens, np.flatnonzero(tokens == END) + 1)[:-1]
    return [part[:-1].astype(np.uint8).tobytes().decode() for part in parts]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_text_of_a_seed_never_changes():
    assert document(0, 0) == (
        "88+66=154\n82+55=137\n34+95=129\nreverse kjqe: eqjk\ncopy kax: kax\ncopy aij: aij\ncopy ttesn: ttesn\n"
    )
    assert zlib.crc32("".join(islice(documents(7), 300)).encode()) == 3432602998


def test_what_the_lines_say_is_true():
    lines = "".join(islice(documents(3), 300)).splitlines()
    forms = [r"(\d+)\+(\d+)=(\d+)", r"copy ([a-z]{3,6}): ([a-z]+)", r"reverse ([a-z]{3,6}): ([a-z]+)", r"([a-z ]+)\."]
    seen = [0] * 4
    for line in lines:
        (form,) = (i for i, pattern in enumerate(forms) if re.fullmatch(pattern, line))
        seen[form] += 1
        found = re.fullmatch(forms[form], line).groups()
        match form:
            case 0:
                assert int(found[0]) + int(found[1]) == int(found[2])
            case 1:
                assert found[0] == found[1]
            case 2:
                assert found[0] == found[1][::-1]
            case 3:
                assert len(found[0].split()) == 7
    assert min(seen) > len(lines) / 5


def test_seeds_and_documents_differ():
    assert len({document(seed, i) for seed in range(5) for i in range(50)}) == 250
    assert list(islice(documents(1, first=3, step=2), 2)) == [document(1, 3), document(1, 5)]


@pytest.mark.parametrize("n_tokens", [1, 2, 500, 20_000])
def test_a_synthetic_folder_has_the_size_asked_for(tmp_path, n_tokens):
    write_synthetic(tmp_path / "data", n_tokens=n_tokens, seed=5)
    assert open_dataset(tmp_path / "data", split="train").n_tokens == n_tokens
    assert open_dataset(tmp_path / "data", split="val").n_tokens == max(n_tokens // 10, 1000)
    train, val = texts(tmp_path / "data", "train"), texts(tmp_path / "data", "val")
    assert train[:-1] == list(islice(documents(5, step=2), len(train) - 1))
    assert val[:-1] == list(islice(documents(5, first=1, step=2), len(val) - 1))
    assert not set(train[:-1]) & set(val[:-1])


def test_a_synthetic_folder_can_be_trained_on(tmp_path):
    write_synthetic(tmp_path / "data", n_tokens=5000, seed=0)
    loader = Loader([Source(tmp_path / "data")], rows=4, n_tokens=64, seed=0)
    loader.check_vocab(257)
    assert loader.tokenizer == "bytes"
    assert loader.batch(0).ids.max() <= END
    assert sum(int((batch.targets >= 0).sum()) for batch in ValidationSet(loader.sources, n_tokens=64, rows=4)) == 999


def test_writing_again_does_nothing_and_other_data_is_refused(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()  # an empty folder may exist
    write_synthetic(folder, n_tokens=3000, seed=0)
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    write_synthetic(folder, n_tokens=3000, seed=0)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    for settings in ({"n_tokens": 3000, "seed": 1}, {"n_tokens": 3001, "seed": 0}):
        with pytest.raises(ValueError, match=r"contains .*'seed': 0.*Remove this folder, or give another"):
            write_synthetic(folder, **settings)
    path = folder / "val-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"val-00000.bin has .* bytes instead of .*Remove this folder"):
        write_synthetic(folder, n_tokens=3000, seed=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"cannot write to .*mine"):
        write_synthetic(tmp_path / "mine", n_tokens=3000, seed=0)
    assert contents(tmp_path / "mine") == {"notes.txt": b"keep me"}
    with pytest.raises(ValueError, match="n_tokens = 0"):
        write_synthetic(tmp_path / "none", n_tokens=0, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "mine"]


def test_places_where_no_folder_can_be_written(tmp_path):
    (tmp_path / "file").write_text("a")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "file/data", "loop", "loop/data", "x" * 5000):
        with pytest.raises(ValueError, match=rf"{name[:5]}.* cannot be used \(.*\): give another folder") as error:
            write_synthetic(tmp_path / name, n_tokens=1, seed=0)
        assert len(str(error.value)) < 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_one_that_comes_second_keeps_the_folder_of_the_first(tmp_path):
    """The other process finishes while this one is still writing."""
    folder, notes = tmp_path / "data", {"made_by": "a test"}

    def pairs(*, meanwhile: bool):
        yield "train", encode("one")
        yield "val", encode("two")
        if meanwhile:
            write_once(folder, pairs(meanwhile=False), kind="text", notes=notes)
            inodes.append((folder / "index.json").stat().st_ino)

    inodes: list[int] = []
    write_once(folder, pairs(meanwhile=True), kind="text", notes=notes)
    assert inodes == [(folder / "index.json").stat().st_ino]
    assert texts(folder, "train") == ["one"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failure_leaves_nothing_behind(tmp_path):
    def pairs():
        yield "train", encode("one")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_once(tmp_path / "data", pairs(), kind="text", notes={})
    assert not list(tmp_path.iterdir())


def test_processes_that_write_at_the_same_time_agree(tmp_path):
    code = (
        "import sys; from pathlib import Path; from thoughtbubbles.data.synthetic import write_synthetic;"
        "write_synthetic(Path(sys.argv[1]), n_tokens=60_000, seed=2)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "data")]
    ranks = [subprocess.Popen(command) for _ in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    write_synthetic(tmp_path / "alone", n_tokens=60_000, seed=2)
    assert contents(tmp_path / "data") == contents(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "data"]


@pytest.mark.slow
def test_the_standard_library_as_data(tmp_path):
    folder = tmp_path / "data"
    write_stdlib(folder)
    train, val = texts(folder, "train"), texts(folder, "val")
    assert read_index(folder).notes["python"] == ".".join(map(str, sys.version_info[:3]))
    assert 1_000_000 < sum(len(text.encode()) for text in train + val) < 5_000_000
    assert len(set(train + val)) == len(train) + len(val) > 300
    assert all(map(is_validation, val))
    assert not any(map(is_validation, train))
    assert 5 < len(val) < len(train) / 8
    everything = "\n".join(train + val)
    assert "The “for” statement" in everything or 'The "for" statement' in everything  # a help topic
    assert "Text wrapping and filling." in everything  # a module: textwrap
    assert "Wrap a single paragraph of text, returning a list of wrapped lines." in everything  # a function
    assert everything.index("Text wrapping and filling.") < everything.index("Wrap a single paragraph of text")
    before = contents(folder)
    write_stdlib(folder)
    assert contents(folder) == before
