"""Half-finished and finished folders: what is resumed, what is damage, what is left alone."""

import json
import os
import zlib
from contextlib import suppress
from dataclasses import replace

import pytest

from data.prepared import random_texts, write_lines
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.shards import write_index


def test_a_finished_folder_is_left_alone(tmp_path, capsys):
    source, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "out"
    index = prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert prepare((str(source),), out=out, tokenizer="bytes", processes=1) == index
    assert capsys.readouterr().out.startswith(f"{out} is already prepared; nothing to do\n")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(ValueError, match=r"contains a prepared dataset with other settings \(val_fraction = 0.005\)"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1, val_fraction=0.1)
    write_lines(source, [{"text": "a"}, {"text": "bb"}])
    with pytest.raises(ValueError, match="of the same sources, but their files have changed since"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_a_half_finished_folder_takes_only_the_same_settings(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(source, [{"text": "a"}, {"txt": "b"}])
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the record has the fields txt"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    with pytest.raises(ValueError, match=r"a half-finished preparation with other settings \(tokenizer = 'bytes'\)"):
        prepare((str(source),), out=out, tokenizer="gpt2", processes=1)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the record has the fields txt"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_what_came_before_a_broken_record_is_kept(tmp_path, monkeypatch, capsys):
    """The journal contains every chunk before that of the record: only that chunk is read again."""
    monkeypatch.setattr("thoughtbubbles.data.sources.CHUNK_BYTES", 1)  # a line is a chunk
    texts, source, out = random_texts(20), tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(source, [*({"text": text} for text in texts[:12]), {"txt": "b"}])
    with pytest.raises(ValueError, match=r"a.jsonl, line 13: the record has the fields txt"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    state = json.loads((out / "prepare.json").read_text())["state"]
    assert state["place"] == [0, 12]
    assert sum(counts["documents"] for counts in state["counts"].values()) == 12
    assert sum(tail["tokens"] for tail in state["tails"].values()) == sum(len(text) + 1 for text in texts[:12])
    with pytest.raises(ValueError, match=r"a.jsonl, line 13"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    assert "resuming after 12 documents" in capsys.readouterr().err


JOURNAL_EDITS = [
    (["settings"], None),
    (["settings"], 7),
    (["state"], []),
    (["state", "kind"], ["text"]),
    (["state", "kind"], "words"),
    (["state", "kind"], None),
    (["state", "place"], [0]),
    (["state", "place"], 3),
    (["state", "place"], [0, "1"]),
    (["state", "place"], [0, -1]),
    (["state", "place"], [0, True]),
    (["state", "skipped"], "0"),
    (["state", "first_keys"], [1, 2, 3]),
    (["state", "first_keys"], [2**64]),
    (["state", "first_keys"], {"a": 1}),
    (["state", "counts"], []),
    (["state", "counts", "train"], {"pages": 1}),
    (["state", "counts", "train"], None),
    (["state", "counts", "val", "bytes"], 0.5),
    (["state", "shards"], {"train": []}),
    (["state", "shards", "train"], 5),
    (["state", "shards", "train"], [{"file": "../x", "n_tokens": 1, "n_examples": 0, "crc32": 0}]),
    (["state", "shards", "train"], ["train-00000.bin"]),
    (["state", "tails"], None),
    (["state", "tails", "train"], 5),
    (["state", "tails", "train"], {"bytes": 1}),
    (["state", "tails", "train", "tokens"], -1),
    (["state", "tails", "train", "tokens"], 10**30),
    (["state", "tails", "train", "crc32"], None),
]


def halfway(folder):
    """A source whose second record is broken, and a folder in which one document is kept."""
    source, out = folder / "a.jsonl", folder / "out"
    source.write_text('{"text": "%s"}\n{"txt": 0}\n' % ("a" * (1 << 20)))
    with pytest.raises(ValueError, match=r"a.jsonl, line 2"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    return source, out


@pytest.fixture(scope="module")
def half_prepared(tmp_path_factory):
    return halfway(tmp_path_factory.mktemp("half"))


@pytest.mark.parametrize(("path", "value"), JOURNAL_EDITS)
def test_a_journal_of_wrong_kinds_is_refused(half_prepared, path, value):
    """With a wrong checksum, and with a right one."""
    source, out = half_prepared
    journal = out / "prepare.json"
    good = journal.read_text()
    try:
        record = json.loads(good)
        inner = record
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        journal.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=r"prepare.json has been altered .*: delete the folder .*/out"):
            prepare((str(source),), out=out, tokenizer="bytes", processes=1)
        del record["crc32"]
        record["crc32"] = zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
        journal.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=r"prepare.json is damaged .*: delete the folder .*/out"):
            prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    finally:
        journal.write_text(good)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [lambda shard: shard.unlink(), lambda shard: shard.write_bytes(b"ab")])
def test_shards_that_were_written_before_must_still_be_there(harm, tmp_path, monkeypatch):
    """In a finished and in a half-finished folder."""
    monkeypatch.setattr("thoughtbubbles.data.sources.CHUNK_BYTES", 1)  # a line is a chunk
    good = [{"text": text} for text in random_texts(40)]
    for name, last in (("finished", {"text": "z"}), ("half", {"txt": 0})):
        source, out = write_lines(tmp_path / f"{name}.jsonl", [*good, last]), tmp_path / name
        given = {"out": out, "tokenizer": "bytes", "processes": 1, "shard_tokens": 100, "val_fraction": 0.0}
        with suppress(ValueError):
            prepare((str(source),), **given)
        harm(out / "train-00001.bin")
        with pytest.raises(ValueError, match=r"train-00001.bin (is missing, though|has only 2 bytes)"):
            prepare((str(source),), **given)


def test_a_small_validation_set_that_was_given(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in random_texts(20)])
    small = write_lines(tmp_path / "b.jsonl", [{"text": "a"}])
    prepare((str(source),), val=(str(small),), out=tmp_path / "out", tokenizer="bytes", processes=1)
    assert (
        "val is very small (fewer than 10,000 tokens): its loss will depend on the choice of documents; give more"
        in (capsys.readouterr().out)
    )


def test_a_changed_tail_is_damage(tmp_path):
    source, out = halfway(tmp_path)
    (tail,) = out.glob("train-*.tail")
    good = tail.read_bytes()
    for place in (0, len(good) // 2, len(good) - 1):
        tail.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"train-00000.tail is damaged \(its checksum differs\): delete .*out and"):
            prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    tail.write_bytes(good + b"more")  # bytes after the last save of the journal are truncated
    with pytest.raises(ValueError, match=r"a.jsonl, line 2"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    assert tail.read_bytes() == good


def test_a_tail_shorter_than_the_journal_says(tmp_path):
    source, out = halfway(tmp_path)
    (tail,) = (path for path in out.glob("train-*.tail"))
    tail.write_bytes(tail.read_bytes()[:-1])
    message = r"train-00000.tail is missing or truncated: delete .*out and prepare it again"
    for put in (lambda: tail.unlink(), lambda: tail.mkdir(), lambda: tail.rmdir() or os.mkfifo(tail)):
        with pytest.raises(ValueError, match=message):
            prepare((str(source),), out=out, tokenizer="bytes", processes=1)
        put()
    with pytest.raises(ValueError, match=message):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_a_pipe_in_the_place_of_an_empty_tail_is_replaced(tmp_path):
    source, out = halfway(tmp_path)
    (tail,) = out.glob("val-*.tail")
    tail.unlink()
    os.mkfifo(tail)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "not JSON"), (b"[]", "a JSON list"), (b"[" * 100_000, "nested too deeply"), (None, "is not a file")],
)
def test_a_journal_that_is_not_one(content, words, tmp_path):
    source, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}]), tmp_path / "out"
    out.mkdir()
    if content is None:
        os.mkfifo(out / "prepare.json")
    else:
        (out / "prepare.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"prepare.json.*{words}.*delete the folder"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


@pytest.mark.parametrize(
    "change", [{"settings": 7}, {"documents": None}, {"bytes": {"train": 1}}, {"skipped": "no"}, {}], ids=str
)
def test_notes_of_wrong_kinds_in_a_finished_folder(change, tmp_path):
    source, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "out"
    index = prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    splits = index.splits if change else {"train": index.splits["train"]}
    write_index(out, replace(index, splits=splits, notes={**index.notes, **change}))
    with pytest.raises(ValueError, match=r"index.json is damaged .its notes are not from|made in another way"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)
