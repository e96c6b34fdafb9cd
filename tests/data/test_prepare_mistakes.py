"""Preparation: one clear line for every mistake."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.prepared import contents, documents, run, write_lines
from thoughtbubbles.cli import main
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.tokenizer import tokenizer


def test_folders_that_cannot_be_written(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "loop").symlink_to("loop")
    for name in ("a.jsonl", "a.jsonl/out", "loop", "loop/out", "x" * 5000):
        with pytest.raises(ValueError, match=rf"{name[:7]}.*: give a folder that can be written") as error:
            prepare((str(source),), out=tmp_path / name, tokenizer="bytes", processes=1)
        assert str(error.value).startswith("--out ")
        assert len(str(error.value)) < 1000
    out = tmp_path / "out"
    prepare((str(source),), out=out, tokenizer="bytes", processes=1)
    (out / "a.tail").mkdir()  # leftovers are removed, and this one cannot be
    with pytest.raises(ValueError, match=r"writing to .*out failed"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_processes_that_cannot_be_started(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))"
    done = run(source, tmp_path / "out", before=few, tokenizer="bytes", processes=8)
    assert done.returncode == 1
    assert done.stderr.startswith("prepare: --processes 8 cannot be used (Too many open files): give fewer")


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"already contains other files \(a.jsonl …\): give a new or empty folder"):
        prepare((str(source),), out=tmp_path, tokenizer="bytes", processes=1)
    assert contents(tmp_path) == {"a.jsonl": source.read_bytes()}


def test_one_at_a_time(tmp_path):
    from thoughtbubbles.files import locked

    source, out = write_lines(tmp_path / "a.jsonl", [{"text": "a"}]), tmp_path / "out"
    out.mkdir()
    with locked(out, doing="preparing"), pytest.raises(ValueError, match="another process is preparing this folder"):
        prepare((str(source),), out=out, tokenizer="bytes", processes=1)


def test_text_and_examples_do_not_mix(tmp_path):
    text = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    examples = write_lines(tmp_path / "b.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match=r"b.jsonl: found questions or chats with answers after plain text"):
        prepare((str(text), str(examples)), out=tmp_path / "out", tokenizer="bytes", processes=1)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_empty_input(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"sources = .*a.jsonl: contains no documents"):
        prepare((str(tmp_path / "a.jsonl"),), out=tmp_path / "out", tokenizer="bytes", processes=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "gpt5"}, "tokenizer = 'gpt5': choose from gpt2, bytes"),
        ({"processes": 0}, "processes = 0: give 1 or more"),
        ({"val_fraction": 1.0}, "val_fraction = 1.0: give a fraction of the documents from 0 to below 1"),
        ({"val_fraction": float("nan")}, "val_fraction = nan"),
        ({"shard_tokens": 0}, "shard_tokens = 0: give 1 or more tokens"),
        ({"limit": 0}, "limit = 0: give 1 or more documents"),
        ({"limit": 2**63}, f"limit = {2**63}: give 1 or more documents, up to"),
        ({"processes": 10**6}, "processes = 1000000: give 1 or more, up to 1,024"),
        ({"processes": True}, "processes = True: give 1 or more"),
        ({"processes": "2"}, "processes = '2': give 1 or more"),
        ({"shard_tokens": 10**30}, r"shard_tokens = 10{30}: give 1 or more tokens, up to 4,294,967,296"),
        ({"shard_tokens": 1e6}, "shard_tokens = 1000000.0: give"),
        ({"val_fraction": 10**400}, "val_fraction = 10+…0+: give a fraction"),
        ({"val_fraction": -0.1}, "val_fraction = -0.1: give a fraction"),
        ({"val_fraction": True}, "val_fraction = True: give a fraction"),
        ({"val_fraction": "0.1"}, "val_fraction = '0.1': give a fraction"),
        ({"val": "a.jsonl"}, "val = 'a.jsonl': give a tuple of files"),
        ({"val": (Path("a"),)}, r"val = \(PosixPath\('a'\),\): give a tuple of files"),
        ({"tokenizer": ["gpt2"]}, r"tokenizer = \['gpt2'\]: choose from gpt2, bytes"),
    ],
)
def test_wrong_arguments(options, message, tmp_path, no_shape_checks):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=message):
        prepare((str(source),), out=tmp_path / "out", **options)
    with pytest.raises(ValueError, match="nowhere is not an existing file or folder, nor one of the names"):
        prepare(("nowhere",), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "1" + "0" * 30], "processes = 1000000000000000000000000000000: give 1 or more, up to 1,024"),
        (["--processes", "2.5"], "--processes"),
        (["--shard-tokens", "9" * 30], "shard_tokens = 9"),
        (["--shard-tokens", "9" * 5000], "--shard-tokens"),
        (["--val-fraction", "1e999"], "val_fraction = inf: give a fraction"),
        (["--val-fraction", "much"], "--val-fraction"),
        (["--limit", "-1"], "limit = -1: give 1 or more documents"),
        (["--val", "gone.jsonl"], "gone.jsonl is not an existing file or folder"),
        (["--val", "x" * 5000], "cannot be used (File name too long)"),
        (
            ["--val", "b.jsonl", "--val-fraction", "0"],
            "val_fraction = 0.0 and val = b.jsonl: with --val, all other sources are training data",
        ),
    ],
)
def test_mistakes_on_the_command_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "a.jsonl", "--out", "out", *options])
    assert stopped.value.code not in (0, None)
    assert message in f"{stopped.value} {capsys.readouterr().err}"
    assert not (tmp_path / "out").exists()


def test_several_validation_sources_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    main(
        [
            "prepare",
            "a.jsonl",
            "--val",
            "b.jsonl",
            "c.jsonl",
            "--out",
            "out",
            "--tokenizer",
            "bytes",
            "--processes",
            "1",
        ]
    )
    assert (documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")) == (["a"], ["b", "c"])


def test_preparation_needs_no_torch():
    code = """
import sys
import thoughtbubbles.data.prepare
assert not {"torch", "pyarrow", "datasets", "tokenizers", "zstandard", "rich"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.data
def test_real_text(tmp_path):
    folder = os.environ.get("THOUGHTBUBBLES_DATA")
    if not folder:
        pytest.skip("THOUGHTBUBBLES_DATA names no folder with pretrain/val.jsonl.xz")
    source = Path(folder, "pretrain", "val.jsonl.xz")
    index = prepare((str(source),), out=tmp_path / "out", processes=2)
    with lzma.open(source, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    n_tokens = sum(shard.n_tokens for shards in index.splits.values() for shard in shards)
    assert sum(index.notes["documents"].values()) == len(texts) == 772
    assert n_tokens == 945_497 + 772  # the documents' own tokens, and end-of-text after each
    assert sum(index.notes["bytes"].values()) == sum(len(text.encode()) for text in texts)

    tok, found = tokenizer("gpt2"), []
    for split in ("train", "val"):
        tokens = np.concatenate([shard.tokens for shard in open_dataset(tmp_path / "out", split=split).shards])
        found += b"".join(tok._table[token] for token in tokens.tolist()).decode().split("<|endoftext|>")[:-1]
    assert sorted(found) == sorted(texts)
