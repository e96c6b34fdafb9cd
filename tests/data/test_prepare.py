"""Preparation: what is written, the same bytes for any number of processes, the validation split."""

import pytest

from data.prepared import CORPUS_OPTIONS, contents, documents, random_texts, run, write_lines
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.tokenizer import tokenizer


def test_text(tmp_path, capsys):
    texts = random_texts(400)
    texts += texts[:200]  # duplicates
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in [*texts, ""]])
    out = tmp_path / "out"
    index = prepare((str(source),), out=out, tokenizer="bytes", processes=1, val_fraction=0.1, shard_tokens=50_000)
    assert (index.kind, index.tokenizer, index.end_of_text, index.vocab_size) == ("text", "bytes", 256, 257)
    assert [shard.n_tokens for shard in index.splits["train"][:-1]] == [50_000] * (len(index.splits["train"]) - 1)

    train, val = documents(out, "train"), documents(out, "val")
    assert not set(train) & set(val)  # duplicates are in the same split
    held = set(val)
    assert train == [text for text in texts if text not in held]
    assert val == [text for text in texts if text in held]
    assert 0.05 < len(val) / len(texts) < 0.15
    assert index.notes["documents"] == {"train": len(train), "val": len(val)}
    assert index.notes["bytes"] == {"train": sum(map(len, train)), "val": sum(map(len, val))}

    shown = capsys.readouterr().out
    assert f"train{len(train):>21,}{sum(map(len, train)) + len(train):>18,}" in shown
    assert "1 records were skipped: they contain nothing to learn" in shown
    assert f"next: thoughtbubbles train tiny --data.mixture {out}" in shown


def test_examples(tmp_path):
    records = [{"question": f"{i} + {i}?", "answer": f"<<{i}+{i}={2 * i}>>#### {2 * i}"} for i in range(300)]
    source, out = write_lines(tmp_path / "a.jsonl", records), tmp_path / "out"
    index = prepare((str(source),), out=out, processes=1, val_fraction=0.1, shard_tokens=1000)
    assert index.kind == "examples"
    assert len(index.splits["train"]) > 2
    tok, said = tokenizer("gpt2"), []
    for split in ("train", "val"):
        for shard in open_dataset(out, split=split).shards:
            for a, b in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
                tokens, mask = shard.tokens[a:b], shard.mask[a:b] == 1
                number = int(tok.decode(tokens[~mask].tolist()).split()[0])
                assert tok.decode(tokens.tolist()) == f"{number} + {number}?\n#### {2 * number}<|endoftext|>"
                assert tok.decode(tokens[mask].tolist()) == f"#### {2 * number}<|endoftext|>"
                said.append(number)
    assert sorted(said) == list(range(300))


@pytest.mark.parametrize("val_fraction", [1e-9, 0.999999])
def test_both_splits_have_a_document(val_fraction, tmp_path):
    for name, texts, expected in [
        ("two", ["a", "a", "b", "a", "b"], {"train": 3, "val": 2}),
        ("one", ["a", "a"], {"train": 2, "val": 0}),
    ]:
        source = write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
        index = prepare((str(source),), out=tmp_path / name, tokenizer="bytes", processes=1, val_fraction=val_fraction)
        assert index.notes["documents"] == expected


def test_no_validation_on_demand(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in random_texts(50)])
    index = prepare((str(source),), out=tmp_path / "out", tokenizer="bytes", processes=1, val_fraction=0.0)
    assert index.notes["documents"] == {"train": 50, "val": 0}
    shown = capsys.readouterr().out
    assert "there is no split val, so training will have no validation loss; to get one, give --val" in shown
    assert f"next: thoughtbubbles train tiny --data.mixture {tmp_path / 'out'}\n" in shown


@pytest.mark.slow
def test_the_same_bytes_for_any_number_of_processes(corpus, uninterrupted, tmp_path):
    done = run(corpus, tmp_path / "out", processes=2, chunk_bytes=100_000, **CORPUS_OPTIONS)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == uninterrupted
    assert {name.split("-")[0] for name in uninterrupted} == {"index.json", "train", "val"}


def test_limit(tmp_path):
    texts = random_texts(100)
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    with source.open("a") as file:
        file.write("broken\n")
    out = tmp_path / "out"
    index = prepare((str(source),), out=out, tokenizer="bytes", processes=1, limit=100)
    assert sum(index.notes["documents"].values()) == 100
    index = prepare((str(source),), out=tmp_path / "less", tokenizer="bytes", processes=1, limit=7)
    assert documents(tmp_path / "less", "train") + documents(tmp_path / "less", "val") == [
        texts[0],
        *texts[2:7],
        texts[1],
    ]
    with pytest.raises(ValueError, match=r"a.jsonl, line 101: not JSON"):
        prepare((str(source),), out=tmp_path / "more", tokenizer="bytes", processes=1, limit=101)


def test_a_validation_set_as_it_is(tmp_path, capsys):
    """All its documents, including duplicates and in order, and nothing of the other sources."""
    texts, own = random_texts(60), random_texts(9, seed=1)
    own += own[:2]
    train = write_lines(tmp_path / "train.jsonl", [{"text": text} for text in [*texts, *texts[:5]]])
    (tmp_path / "val").mkdir()
    write_lines(tmp_path / "val" / "a.jsonl", [{"text": text} for text in own[:4]])
    write_lines(tmp_path / "val" / "b.jsonl", [{"text": text} for text in own[4:]])
    last = tmp_path / "last.txt"
    last.write_text("the last")
    val, options = (str(tmp_path / "val"), str(last)), {"tokenizer": "bytes", "processes": 1, "shard_tokens": 4000}
    out = tmp_path / "out"
    index = prepare((str(train),), out=out, val=val, **options)
    assert documents(out, "train") == [*texts, *texts[:5]]
    assert documents(out, "val") == [*own, "the last"]
    assert index.notes["documents"] == {"train": 65, "val": 12}
    assert index.notes["settings"]["val"] == list(val)
    assert index.notes["settings"]["val_fraction"] == 0
    assert "val is very small (fewer than 10,000 tokens)" in capsys.readouterr().out

    assert prepare((str(train),), out=out, val=val, **options) == index
    with pytest.raises(ValueError, match=r"a prepared dataset with other settings \(val = \['.*last.txt'\]\)"):
        prepare((str(train),), out=out, val=val[:1], **options)
    with pytest.raises(ValueError, match=r"other settings \(val = \['.*last.txt'\], val_fraction = 0.0\)"):
        prepare((str(train),), out=out, **options)
    last.write_text("other words")
    with pytest.raises(ValueError, match="of the same sources, but their files have changed since"):
        prepare((str(train),), out=out, val=val, **options)


def test_a_validation_set_has_the_same_bytes_for_any_number_of_processes(tmp_path):
    train = write_lines(tmp_path / "train.jsonl", [{"text": text} for text in random_texts(60)])
    val = write_lines(tmp_path / "val.jsonl", [{"text": text} for text in random_texts(30, seed=1)])
    options = {"val": (str(val),), "tokenizer": "bytes", "shard_tokens": 10_000, "limit": 50}
    done = run(train, tmp_path / "two", chunk_bytes=2000, processes=2, **options)
    assert done.returncode == 0, done.stderr
    prepare((str(train),), out=tmp_path / "one", processes=1, **options)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert len(contents(tmp_path / "one")) > 4


def test_a_limit_does_not_count_the_validation_set(tmp_path):
    train = write_lines(tmp_path / "train.jsonl", [{"text": text} for text in random_texts(20)])
    val = write_lines(tmp_path / "val.jsonl", [{"text": text} for text in random_texts(9, seed=1)])
    index = prepare((str(train),), out=tmp_path / "out", val=(str(val),), tokenizer="bytes", processes=1, limit=7)
    assert index.notes["documents"] == {"train": 7, "val": 9}
    assert documents(tmp_path / "out", "train") == random_texts(20)[:7]


def test_a_validation_set_of_examples(tmp_path):
    records = [{"question": f"{i}?", "answer": "same"} for i in range(30)]
    train, val = write_lines(tmp_path / "train.jsonl", records), write_lines(tmp_path / "val.jsonl", records[:3])
    index = prepare((str(train),), out=tmp_path / "out", val=(str(val),), tokenizer="bytes", processes=1)
    assert (index.kind, index.notes["documents"]) == ("examples", {"train": 30, "val": 3})
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ValueError, match=r"train.jsonl: found questions or chats with answers after"):
        prepare((str(train),), out=tmp_path / "no", val=(str(tmp_path / "text.txt"),), tokenizer="bytes", processes=1)


def test_a_validation_set_that_would_not_be_one(tmp_path):
    (tmp_path / "data").mkdir()
    train = write_lines(tmp_path / "data" / "train.jsonl", [{"text": "a"}])
    val = write_lines(tmp_path / "data" / "val.jsonl", [{"text": "b"}])
    empty = write_lines(tmp_path / "empty.jsonl", [{"text": ""}])
    link = tmp_path / "link.jsonl"
    link.symlink_to(val)
    for sources, given, words in [
        (tmp_path / "data", val, r"val = .*val.jsonl: is also a source of training data"),
        (tmp_path / "data", link, r"val = .*link.jsonl: is also a source"),
        ("gsm8k", "gsm8k", r"val = gsm8k: is also a source"),
        (train, tmp_path / "gone.jsonl", r"gone.jsonl is not an existing file or folder"),
        (train, empty, r"val = .*empty.jsonl: contains no documents; give other sources"),
        (empty, val, r"sources = .*empty.jsonl: contains no documents; give other sources"),
    ]:
        with pytest.raises(ValueError, match=words):
            prepare(
                (str(sources),),
                out=tmp_path / "out",
                val=(str(given),),
                tokenizer="bytes",
                processes=1,
                shard_tokens=1,
            )
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"val_fraction = 0.1 and val = .*val.jsonl: .*leave one of the two out"):
        prepare((str(train),), out=tmp_path / "out", val=(str(val),), val_fraction=0.1)


def test_an_empty_validation_set_is_reported_before_the_long_work(tmp_path, monkeypatch):
    monkeypatch.setattr("thoughtbubbles.data.sources.CHUNK_BYTES", 100)
    lines = [{"text": text} for text in random_texts(20)]
    train, val = write_lines(tmp_path / "train.jsonl", [*lines, {"broken": 1}]), tmp_path / "val.jsonl"
    val.write_text("")
    with pytest.raises(ValueError, match=r"val = .*val.jsonl: contains no documents"):
        prepare((str(train),), out=tmp_path / "out", val=(str(val),), tokenizer="bytes", processes=1)


@pytest.mark.parametrize(("tokens", "is_small"), [(9_999, True), (10_000, False)])
def test_a_small_validation_split_is_pointed_out(tokens, is_small, tmp_path, capsys):
    (tmp_path / "train.txt").write_text("a" * 500)
    (tmp_path / "val.txt").write_text("b" * (tokens - 1))
    options = {"val": (str(tmp_path / "val.txt"),), "tokenizer": "bytes", "processes": 1}
    prepare((str(tmp_path / "train.txt"),), out=tmp_path / "out", **options)
    assert ("val is very small (fewer than 10,000 tokens)" in capsys.readouterr().out) == is_small
