"""Failures of real runs: each gives a clear message and loses nothing."""

import os
import resource
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from thoughtbubbles.data.shards import read_index, write_index
from thoughtbubbles.files import damage
from thoughtbubbles.train.config import DataConfig, RunConfig
from thoughtbubbles.train.loop import train
from train.runs import (
    assert_same_bits,
    command,
    environment,
    losses,
    metrics,
    run_command,
    small_corpus,
    small_run,
    small_train,
)


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train(small_run(folder / "run", steps=6, save_every=2, save_keep=3))
    return folder


@pytest.fixture
def finished(once, tmp_path) -> Path:
    """A run of 6 steps with checkpoints at 2, 4 and 6."""
    return shutil.copytree(once, tmp_path / "copy") / "run"


def resume(run: Path) -> list[float]:
    assert train(small_run(run, steps=6, save_every=2, save_keep=3), resume=True).finished
    return losses(run)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        ("model/model.safetensors", cut_short, "bytes instead of"),
        ("optimizer/*.safetensors", flip_a_bit, "has been altered"),
        ("state.json", Path.unlink, "is missing"),
        ("manifest.json", cut_short, "not JSON"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(finished, file, harm, message, capfd):
    before = losses(finished)
    harm(next((finished / "step-00000006").glob(file)))
    assert resume(finished) == before
    said = capfd.readouterr().err
    assert "step-00000006 is damaged and is skipped" in said
    assert message in said
    assert "resumed" in said
    assert "after step 4" in said
    assert damage(finished / "step-00000006") is None  # written again


def test_damaged_checkpoints_do_not_replace_good_ones(finished):
    for name in ("step-00000004", "step-00000006"):
        (finished / name / "state.json").unlink()
    config = small_run(finished, steps=6, save_every=1, save_keep=1)
    result = train(config, resume=True)
    assert damage(result.checkpoint) is None
    assert {folder.name for folder in finished.glob("*step*")} == {
        "damaged-step-00000004",
        "damaged-step-00000006",
        "step-00000006",
    }


def test_an_empty_manifest_is_damage(finished, capfd):
    """Without required files it would pass as undamaged: every file that it lists is intact."""
    (finished / "step-00000006" / "manifest.json").write_text("{}")
    before = losses(finished)
    assert resume(finished) == before
    said = capfd.readouterr().err
    assert "step-00000006 is damaged and is skipped: manifest.json does not list" in said
    assert "after step 4" in said


def test_a_truncated_log_does_not_prevent_a_resume(finished):
    before = losses(finished)
    with (finished / "metrics.jsonl").open("ab") as log:
        log.write(b'{"step": 7, "lo\xff\xfe\n{"no": "step"}\n[]')
    shutil.rmtree(finished / "step-00000006")
    assert resume(finished) == before


def test_every_checkpoint_is_damaged(finished):
    for folder in finished.glob("step-*"):
        (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        resume(finished)


def test_half_a_checkpoint_is_not_seen(finished):
    """As left by a kill in the middle of writing."""
    before = losses(finished)
    (finished / "step-00000006").rename(finished / ".step-00000006.partial")
    assert resume(finished) == before
    assert not list(finished.glob(".*"))


@pytest.mark.parametrize("harm", ["flipped", "missing"])
def test_a_bad_shard_is_refused_by_name(finished, harm):
    shard = small_corpus(finished) / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[12_345] ^= 1
    shard.unlink()
    if harm == "flipped":
        shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"train-00000\.bin"):
        train(small_run_as_it_is(finished, steps=6), resume=True)


def small_run_as_it_is(run: Path, **changes: object) -> RunConfig:
    """`small_run` checks its corpus; here the run itself must find what is wrong with it."""
    config = small_run(run.parents[1] / "elsewhere" / "run", **changes)
    return replace(config, out=run, data=DataConfig(mixture=(str(run.parent / "corpus"),)))


def test_changed_data_is_not_resumed(finished):
    folder = small_corpus(finished)
    index = read_index(folder)
    write_index(folder, replace(index, notes={**index.notes, "seed": 1}))
    with pytest.raises(ValueError, match=r"the data was 1 of corpus \(index .*, is 1 of corpus"):
        train(small_run_as_it_is(finished, steps=6), resume=True)


@contextmanager
def small_disk(folder: Path, size: str):
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here; the file-size limit below covers the rest")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_costs_checkpoints_only(tmp_path):
    """Space for one checkpoint, not for two: the run ends with an error, and resumes on a larger disk."""
    whole = tmp_path / "whole"
    assert run_command(*small_train(whole)).returncode == 0
    one = sum(path.stat().st_size for path in (whole / "step-00000008").rglob("*") if path.is_file())
    data = 300_000  # the corpus, and what disks round up
    with small_disk(tmp_path / "disk", str(data + one + one // 2)) as disk:
        done = run_command(*small_train(disk / "run"))
        assert done.returncode == 1
        assert "step-00000006 could not be written" in done.stderr
        assert "No space left on device" in done.stderr
        assert "The run continues" in done.stderr
        assert "free disk space and --resume" in done.stderr
        assert "Traceback" not in done.stderr
        assert [folder.name for folder in (disk / "run").iterdir() if "step" in folder.name] == ["step-00000003"]
        assert damage(disk / "run" / "step-00000003") is None
        shutil.copytree(disk / "run", tmp_path / "more room")
    done = run_command(*small_train(tmp_path / "more room", "--resume"))
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "more room") == metrics(whole)
    assert_same_bits(tmp_path / "more room" / "step-00000008", whole / "step-00000008")


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path):
    """Simulates a full disk by a limit on file sizes: the weights fit, the optimizer's file does not."""
    train(small_run(tmp_path / "sizes", steps=1))
    (optimizer,) = (tmp_path / "sizes" / "step-00000001" / "optimizer").iterdir()
    limit = optimizer.stat().st_size - 1000
    done = run_command(
        *small_train(tmp_path / "run"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert not list((tmp_path / "run").glob("*step*"))
    assert len(losses(tmp_path / "run")) == 8  # the run itself continued to its end


@pytest.mark.slow
def test_a_rank_that_dies_is_reported_and_the_run_resumes(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    more = (
        "--compute.precision",
        "float64",
        "--tokens",
        str(256 * 80),
        "--save.every",
        "10",
    )  # long enough to be killed
    assert run_command(*small_train(whole, *more), ranks=2).returncode == 0
    launcher = subprocess.Popen(
        command(*small_train(out, *more), ranks=2), stderr=subprocess.PIPE, text=True, env=environment()
    )
    with launcher:
        for line in launcher.stderr:
            if line.startswith("step 20/"):
                break
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        said = launcher.stderr.read()
    assert launcher.returncode != 0
    assert "SIGKILL" in said or "Signal 9" in said
    time.sleep(0.5)
    done = run_command(*small_train(out, *more, "--resume"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(whole)
    assert_same_bits(out / "step-00000080", whole / "step-00000080")


def test_wrong_data_is_refused_before_any_work(tmp_path):
    for mixture, message in (
        (("nowhere",), "nowhere"),
        (("synthetic=0",), "above 0"),
        (("synthetic", "synthetic"), "twice"),
    ):
        with pytest.raises(ValueError, match=message):
            train(small_run(tmp_path / "run", data_mixture=mixture))
    with pytest.raises(ValueError, match=r"--model\.vocab-size 100 is too small"):
        train(small_run(tmp_path / "run", model_vocab_size=100))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
