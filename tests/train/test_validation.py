"""Validation: another folder, none at all, a very small one; and samples that start with the data."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from thoughtbubbles.data.shards import Index, ShardWriter, write_index
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.train.loop import train
from train.runs import metrics, small_corpus, small_run


def write_text(folder: Path, *, tokenizer_name: str = "bytes", **splits: int) -> Path:
    """A folder with the given number of tokens of "ab ab …" in each split."""
    tok = tokenizer(tokenizer_name)
    finished = {}
    for split, n_tokens in splits.items():
        writer = ShardWriter(folder, split, kind="text", shard_tokens=100_000)
        if n_tokens:
            words = np.resize(np.frombuffer(b"ab ab cd ", dtype=np.uint8), n_tokens).astype(np.uint16)
            words[-1] = tok.end_of_text
            writer.add(words)
        writer.close()
        finished[split] = writer.finished
    write_index(folder, Index("text", tok.name, tok.end_of_text, tok.size, finished, {}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("folders")
    return {
        "both": write_text(home / "both", train=9_000, val=12_000),
        "train_only": write_text(home / "train_only", train=9_000, val=0),
        "gpt2": write_text(home / "gpt2", tokenizer_name="gpt2", train=9_000, val=9_000),
    }


def test_a_folder_without_validation_trains_and_resumes(folders, tmp_path, capfd):
    options = {"steps": 4, "save_every": 2, "save_keep": 9, "data_mixture": (str(folders["train_only"]),)}
    result = train(small_run(tmp_path / "run", **options))
    assert result.finished
    assert result.validation_loss == {}
    assert f"no validation loss: {folders['train_only']} has no val split" in capfd.readouterr().err
    before = metrics(tmp_path / "run")
    assert not any("validation_loss" in line for line in before)
    prompts = {line["prompt"] for line in before if "prompt" in line}
    assert prompts == {"ab ab cd ab ab c"}  # of the training text, where there is no other
    shutil.rmtree(result.checkpoint)
    assert train(small_run(tmp_path / "run", **options), resume=True).validation_loss == {}
    assert metrics(tmp_path / "run") == before


def test_another_folder_for_validation(folders, tmp_path, capfd):
    """Instead of the sources' own: its val split, or all of it if it has none."""
    corpus = small_corpus(tmp_path / "run")
    options = {"steps": 1, "data_mixture": (str(corpus),), "eval_sample_tokens": 0}
    own = train(small_run(tmp_path / "own", **options)).validation_loss
    assert own.keys() == {"corpus"}
    assert "very small (2,000 tokens)" in capfd.readouterr().err
    val = (str(folders["both"]), str(folders["train_only"]), str(corpus))
    result = train(small_run(tmp_path / "run", **options, data_val=val))
    assert result.validation_loss.keys() == {"both", "train_only", "corpus"}  # no mixture: these have no shares
    assert result.validation_loss["corpus"] == own["corpus"]
    assert result.validation_loss["both"] == pytest.approx(
        result.validation_loss["train_only"], abs=1e-3
    )  # of the same words
    assert abs(result.validation_loss["both"] - own["corpus"]) > 1e-2
    said = capfd.readouterr().err
    assert "validation split of both" not in said  # it has 12,000 tokens
    assert "validation split of train_only is very small (9,000 tokens)" in said
    assert "no validation loss" not in said


def test_some_sources_without_validation(folders, tmp_path, capfd):
    mixture = (str(folders["both"]), str(folders["train_only"]))
    result = train(small_run(tmp_path / "run", steps=1, data_mixture=mixture))
    assert result.validation_loss.keys() == {"both"}  # and no mixture: part of it is unknown
    assert f"no validation loss for {folders['train_only']}, which has no val split" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("mixture", "val", "message"),
    [
        ("both", ("gpt2",), "--data.val .*gpt2 was made with tokenizer 'gpt2', the training data with 'bytes'"),
        ("both", ("both", "both"), "names a folder twice"),
        ("train_only", ("train_only",), "is training data and has no val split"),
        ("both", ("nowhere",), "nowhere"),
        ("gpt2", (), r"--model.vocab-size 384 is too small: .* ids up to 50256; give 50257 or more, .*small-gpt2"),
    ],
)
def test_wrong_validation_folders_are_refused(folders, tmp_path, mixture, val, message):
    chosen = tuple(str(folders.get(name, name)) for name in val)
    config = small_run(tmp_path / "run", steps=1, data_mixture=(str(folders[mixture]),), data_val=chosen)
    with pytest.raises(ValueError, match=message):
        train(config)


def test_samples_start_with_the_data_by_default(folders, tmp_path):
    mixture = (str(folders["both"]), str(small_corpus(tmp_path / "run")))
    train(small_run(tmp_path / "run", steps=1, data_mixture=mixture))
    found = [line for line in metrics(tmp_path / "run") if "prompt" in line]
    assert [line["prompt"] for line in found] == ["ab ab cd ab ab c", "copy zzb: zzb\n77"]
    assert all(line["sample"].startswith(line["prompt"]) for line in found)
    train(small_run(tmp_path / "told", steps=1, eval_prompts=("12+",)))
    assert [line["prompt"] for line in metrics(tmp_path / "told") if "prompt" in line] == ["12+"]
