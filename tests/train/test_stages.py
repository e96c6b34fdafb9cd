"""From raw files to a mid-trained model, with the commands of a user; and a few steps on real text."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import thoughtbubbles
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.recipes import recipe
from thoughtbubbles.train.loop import train
from train.runs import losses, metrics, run_command, small_run, small_train


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """One small folder per kind of data in the paper's second stage."""
    kinds = {
        "text": [{"text": f"The river number {i} flows to town {i % 7}."} for i in range(200)],
        "chat": [
            {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"It is {i}."}]}
            for i in range(60)
        ],
        "math": [{"question": f"{i}+1?", "steps": [f"<<{i}+1={i + 1}>>"], "answer": str(i + 1)} for i in range(60)],
        "choice": [{"question": f"Is {i} odd?", "choices": ["yes", "no"], "answer": 1 - i % 2} for i in range(60)],
    }
    found = {}
    for name, records in kinds.items():
        source = write_jsonl(tmp_path / f"{name}.jsonl", records)
        done = run_command("prepare", str(source), "--out", str(tmp_path / name), *OPTIONS)
        assert done.returncode == 0, done.stderr
        assert "next: thoughtbubbles train tiny" in done.stdout
        found[name] = tmp_path / name
    return found


OPTIONS = ("--tokenizer", "bytes", "--val-fraction", "0.2", "--processes", "1")


@pytest.mark.slow
def test_pretraining_then_midtraining(folders, tmp_path):
    first = tmp_path / "first"
    done = run_command(*small_train(first, "--data.mixture", str(folders["text"])))
    assert done.returncode == 0, done.stderr

    shares = {"choice": 0.05, "chat": 0.30, "text": 0.25, "math": 0.40}
    mixture = tuple(f"{folders[name]}={share}" for name, share in shares.items())
    second = train(
        small_run(tmp_path / "second", steps=8, data_mixture=mixture, init_from=first, optim_warmup=0.0, optim_lr=1e-3)
    )
    assert second.finished
    assert second.validation_loss.keys() == {*shares, "mixture"}
    assert second.validation_loss["mixture"] == pytest.approx(
        sum(shares[name] * second.validation_loss[name] for name in shares)
    )
    begun = thoughtbubbles.load(first).state_dict()["embedding.weight"]
    ended = thoughtbubbles.load(second.folder).state_dict()["embedding.weight"]
    assert 0 < (begun - ended).abs().max() < 0.05  # it started from there: new weights would differ by more
    again = train(replace(small_run(tmp_path / "fresh", steps=8, data_mixture=mixture), init_from=None))
    assert losses(second.folder)[0] < losses(again.folder)[0]


@pytest.mark.data
@pytest.mark.slow
def test_real_text(tmp_path):
    folder = os.environ.get("THOUGHTBUBBLES_DATA")
    if not folder:
        pytest.skip("THOUGHTBUBBLES_DATA names no folder: this test prepares its pretrain/val.jsonl.xz")
    prepare((f"{folder}/pretrain/val.jsonl.xz",), out=tmp_path / "val", val_fraction=0.05)
    base = recipe("150m-causal")
    config = replace(
        base,
        model=replace(base.model, n_layer=4, n_head=2, width=32, block_size=64, fork_layers=(1, 3)),
        out=tmp_path / "run",
        data=replace(base.data, mixture=(str(tmp_path / "val"),)),
        tokens=6 * 8 * 64,
        tokens_per_step=8 * 64,
        compute=replace(base.compute, micro_batch_size=4),
        optim=replace(base.optim, lr=1e-2, warmup=0.2),
        eval=replace(base.eval, tokens=1024, sample_tokens=4),
    )
    result = train(config)
    assert result.validation_loss["val"] < 10.8  # a model that knows nothing has log 50304 = 10.83
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    assert any("sample" in line for line in metrics(tmp_path / "run"))
