"""File utilities: content is on disk before it gets its name; what cannot be read is a one-line error."""

import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from thoughtbubbles import files
from thoughtbubbles.files import (
    crc32,
    damage,
    locked,
    named,
    parse_json,
    partial_folder,
    publish,
    read_json,
    read_object,
    short_name,
    write_atomically,
    write_json,
    write_manifest,
)

# --- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"not JSON \(Expecting value at column 1\)"),
        (b'{"a": 1,}', r"not JSON \(.* at column \d+\)"),
        (b'{\n"a": }', r"not JSON \(Expecting value at line 2, column 6\)"),
        (b'{"a": "\xff"}', r"not JSON \(it is not UTF-8\)"),
        (b"[" * 100_000, "the JSON is nested too deeply"),
        (b'{"a":' * 100_000, "the JSON is nested too deeply"),
        (b"[" + b"1" * 5000 + b"]", "a number has too many digits"),
    ],
    ids=[f"{i}" for i in range(7)],
)
def test_what_is_not_json(tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path}: {words}: copy it again$"):
        read_json(path, remedy="copy it again")
    with pytest.raises(ValueError, match=rf"^line 7: {words}: remove it$"):
        parse_json(content, where="line 7", remedy="remove it")


@pytest.mark.parametrize("content", ["[]", "7", '"a"', "null", "true"])
def test_what_is_not_an_object(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert read_json(tmp_path / "a.json") == json.loads(content)
    with pytest.raises(ValueError, match=r"a\.json contains a JSON \w+ instead of an object: copy it again"):
        read_object(tmp_path / "a.json", remedy="copy it again")


def odd_places(folder: Path) -> dict[str, Path]:
    """What can be in place of a file; without permissions, which do not apply to root."""
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "folder").mkdir()
    (folder / "file").write_text("{}")
    os.mkfifo(folder / "pipe")
    return {
        "Too many levels of symbolic links": folder / "loop",
        "No such file or directory": folder / "dangling",
        "is not a file": folder / "folder",
        "not a file": folder / "pipe",
        "Not a directory": folder / "file" / "a.json",
        "File name too long": folder / ("x" * 5000),
    }


def test_places_without_a_file_to_read(tmp_path):
    """In particular, a pipe does not block."""
    for words, path in odd_places(tmp_path).items():
        for read in (read_json, read_object):
            with pytest.raises(ValueError, match=rf"{words}.*: give another") as error:
                read(path, remedy="give another")
            assert str(error.value).startswith(short_name(path))
            assert len(str(error.value)) < 600


def test_names_in_messages_are_short_and_of_one_line():
    assert short_name(Path("a/b é.txt")) == "a/b é.txt"
    assert short_name("a\nb\0c") == "a\\nb\\x00c"
    long = short_name("a" * 200 + "b" * 4000 + "c" * 200)
    assert len(long) < 300
    assert long.startswith("a" * 150)
    assert long.endswith("c" * 100)


def test_named_leaves_other_errors_alone(tmp_path):
    with (
        pytest.raises(ValueError, match=r"^a cannot be used .No space left on device.: free disk space$"),
        named("a", "free disk space"),
    ):
        raise OSError(28, "No space left on device", "somewhere")
    with pytest.raises(KeyError), named("a", "free disk space"):
        raise KeyError("b")


# --- writing: a power failure at any moment leaves the complete old or new file --------------------


class Flush(NamedTuple):
    path: Path
    is_folder: bool
    names: frozenset[str]
    """The content of the test's folder at this moment."""


@pytest.fixture
def flushes(tmp_path, monkeypatch) -> list[Flush]:
    """Every file and folder that is flushed to disk, in order."""
    seen: list[Flush] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        seen.append(Flush(path, is_folder, frozenset(entry.name for entry in tmp_path.iterdir())))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return seen


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux's /proc for the names of files")


@needs_proc
def test_a_file_is_on_the_disk_before_its_name_and_the_name_after_it(tmp_path, flushes):
    write_atomically(tmp_path / "a.bin", [b"one ", memoryview(b"two")])
    assert (tmp_path / "a.bin").read_bytes() == b"one two"
    content, name = flushes
    assert (content.path.name, content.is_folder, content.names) == ("a.bin.tmp", False, {"a.bin.tmp"})
    assert (name.path, name.is_folder, name.names) == (tmp_path, True, {"a.bin"})


@needs_proc
@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_is_on_the_disk_before_its_name_and_the_name_after_it(tmp_path, flushes, replaced):
    folder = tmp_path / "model"
    if replaced:
        folder.mkdir()
        (folder / "old").write_text("old")
    partial = partial_folder(folder)
    (partial / "sub").mkdir()
    (partial / "a").write_text("new")
    (partial / "sub" / "b").write_text("new")
    publish(partial, folder)
    assert sorted(path.name for path in folder.rglob("*")) == ["a", "b", "sub"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    *contents, name = flushes
    assert {flush.path for flush in contents} == {partial, partial / "a", partial / "sub", partial / "sub" / "b"}
    assert all(partial.name in flush.names for flush in contents)
    assert (name.path, name.is_folder, name.names) == (tmp_path, True, {"model"})


def test_a_failed_write_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})

    def parts():
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a.json", parts())
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_a_lock_is_exclusive_and_reports_only_itself(tmp_path):
    with (
        locked(tmp_path, doing="filling"),
        pytest.raises(ValueError, match="another process is filling this folder"),
        locked(tmp_path, doing="filling"),
    ):
        pytest.fail("a second one got the lock")
    with pytest.raises(BlockingIOError), locked(tmp_path, doing="filling"):
        raise BlockingIOError(11, "Resource temporarily unavailable")  # from something else, inside
    with locked(tmp_path, doing="filling"):
        pass


# --- manifests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4, 5, 6, 10, 23])
def test_the_checksum_goes_over_all_parts_of_a_file(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "CHUNK_BYTES", 5)
    content = bytes(range(7, 7 + size))
    (tmp_path / "a").write_bytes(content)
    assert crc32(tmp_path / "a") == zlib.crc32(content)


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(b"0123456789")
    (folder / "sub" / "state").write_bytes(b"abc")
    write_manifest(folder)
    return folder


def test_a_manifest_lists_every_file(model):
    assert read_object(model / "manifest.json") == {
        "sub/state": {"bytes": 3, "crc32": zlib.crc32(b"abc")},
        "weights": {"bytes": 10, "crc32": zlib.crc32(b"0123456789")},
    }
    assert damage(model, required=["weights", "sub/state"]) is None


def test_damage_to_files(model):
    (model / "weights").write_bytes(b"0123456780")
    assert damage(model) == "weights has been altered (its checksum differs)"
    assert damage(model, only=["sub/state"]) is None
    (model / "weights").write_bytes(b"012345678")
    assert damage(model) == "weights has 9 bytes instead of 10"
    (model / "weights").unlink()
    assert damage(model) == "weights is missing"
    for place in (lambda path: path.mkdir(), lambda path: path.rmdir() or os.mkfifo(path)):
        place(model / "weights")
        assert damage(model) == "weights is missing"


def test_a_manifest_that_lacks_a_required_file(model):
    manifest = read_object(model / "manifest.json")
    del manifest["weights"]
    write_json(model / "manifest.json", manifest)
    assert damage(model) is None  # all that is listed is right
    assert damage(model, required=["sub/state", "weights"]) == "manifest.json does not list weights"
    write_json(model / "manifest.json", {})
    assert damage(model, required=["weights"]) == "manifest.json does not list weights"


@pytest.mark.parametrize("name", ["../weights", "sub/../../weights", "/etc/passwd", "", "..", "a\0b", "sub/../weights"])
def test_names_outside_the_folder(model, name):
    """Even if such a file exists and matches."""
    (model.parent / "weights").write_bytes(b"0123456789")
    manifest = read_object(model / "manifest.json")
    write_json(model / "manifest.json", {name: manifest["weights"], **manifest})
    assert damage(model) == f"manifest.json lists {short_name(name)!r}, which is not inside the folder"


@pytest.mark.parametrize(
    "entry",
    [
        *(None, 7, [], "x", {}, {"bytes": 10}, {"crc32": 1}, ["bytes", "crc32"]),
        *(
            {"bytes": [], "crc32": {}},
            {"bytes": "10", "crc32": 1},
            {"bytes": 10, "crc32": None},
            {"bytes": 1e400, "crc32": 0},
        ),
    ],
    ids=str,
)
def test_wrong_kinds_in_a_manifest(model, entry: Any):
    manifest = read_object(model / "manifest.json")
    write_json(model / "manifest.json", {**manifest, "weights": entry})
    found = damage(model)
    assert found is not None
    assert "weights" in found
    assert "\n" not in found


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"a": ' + b"9" * 5000 + b"}"], ids=len)
def test_a_manifest_that_is_not_one(model, content):
    (model / "manifest.json").write_bytes(content)
    assert str(model / "manifest.json") in damage(model)


def test_a_manifest_that_cannot_be_read(model):
    for place in (
        lambda path: path.unlink(),
        lambda path: path.symlink_to(path.name),
        lambda path: path.unlink() or os.mkfifo(path),
        lambda path: path.unlink() or path.mkdir(),
    ):
        place(model / "manifest.json")
        assert str(model / "manifest.json") in damage(model)
    assert "cannot be used (File name too long)" in damage(model.parent / ("x" * 5000))
    write_json(model.parent / "manifest.json", {"x" * 5000: {"bytes": 1, "crc32": 1}})
    assert "File name too long" in damage(model.parent)
