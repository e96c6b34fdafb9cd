"""A run that is killed and resumed equals one that is not: same losses, same weights, same optimizer, bit for bit."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers import SAME_FUNCTION_FLOAT32
from thoughtbubbles.train.loop import train
from train.runs import assert_same_bits, command, environment, losses, metrics, run_command, small_run, small_train


class Whole(NamedTuple):
    """An uninterrupted run."""

    out: Path
    first: float  # seconds after its start, when its first line was written
    last: float  # and when it ended


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Whole:
    out = tmp_path_factory.mktemp("runs") / "whole"
    began, first = time.monotonic(), None
    process = start(out)
    while process.poll() is None:
        if first is None and (out / "metrics.jsonl").exists():
            first = time.monotonic() - began
        time.sleep(0.01)
    assert process.returncode == 0
    return Whole(out, first or 1.0, time.monotonic() - began)


def start(out: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command(*small_train(out, "--resume")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )


def kill_and_resume(out: Path, whole: Whole, *, kills: int, seed: int) -> None:
    """Kills at random moments while steps are taken and checkpoints written."""
    draw = random.Random(seed)
    for _ in range(kills):
        process = start(out)
        time.sleep(draw.uniform(whole.first * 0.8, whole.last))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = run_command(*small_train(out, "--resume"))
    assert done.returncode == 0, done.stderr


def compare(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert_same_bits(a / "step-00000008", b / "step-00000008")


@pytest.mark.slow
def test_killed_and_resumed(whole, tmp_path):
    kill_and_resume(tmp_path / "killed", whole, kills=12, seed=20)
    compare(whole.out, tmp_path / "killed")


@pytest.mark.slow
def test_sigterm_saves_and_the_run_resumes(tmp_path):
    out, longer = tmp_path / "stopped", ("--tokens", str(256 * 40))  # so that it is still running when the signal comes
    whole = tmp_path / "whole"  # also in a separate process: bfloat16 in this one may have changed its products
    assert run_command(*small_train(whole, *longer)).returncode == 0
    arguments = command(*small_train(out, *longer))
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        for line in process.stderr:  # the first step has been logged
            if line.startswith("step 1/"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, rest  # a scheduler, or &&, must see that it is not finished
    assert "SIGTERM" in rest
    assert f"resume with: thoughtbubbles train --resume {out}" in rest
    stopped_at = max(line["step"] for line in metrics(out))
    assert (out / f"step-{stopped_at:08d}" / "manifest.json").exists()
    done = run_command("train", "--resume", str(out))
    assert done.returncode == 0, done.stderr
    assert [line for line in metrics(out) if "saving" not in line] == [
        line for line in metrics(whole) if "saving" not in line
    ]
    assert_same_bits(whole / "step-00000040", out / "step-00000040")


@pytest.mark.slow
def test_resumed_twice_in_one_process(tmp_path):
    """3 steps, 3 more, then the rest."""
    whole = train(small_run(tmp_path / "whole", steps=9))
    for stop_after in (3, 6):
        # As left by a kill: checkpoints up to one step, and a log that is longer.
        out = tmp_path / "parts"
        train(small_run(out, steps=9, save_keep=9), resume=True)
        for folder in out.glob("step-*"):
            if int(folder.name[5:]) > stop_after:
                shutil.rmtree(folder)
    resumed = train(small_run(tmp_path / "parts", steps=9), resume=True)
    assert resumed.finished
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert_same_bits(whole.checkpoint, resumed.checkpoint)


def test_a_finished_run_stays_as_it_is(tmp_path):
    first = train(small_run(tmp_path / "run"))
    before = metrics(tmp_path / "run")
    again = train(small_run(tmp_path / "run"), resume=True)
    assert again.validation_loss == first.validation_loss
    assert metrics(tmp_path / "run") == before


def test_another_run_is_not_resumed(tmp_path):
    train(small_run(tmp_path / "run", steps=2))
    with pytest.raises(ValueError, match="has checkpoints of a run: pass --resume"):
        train(small_run(tmp_path / "run", steps=2))
    with pytest.raises(ValueError, match=r"another run: .*optim.lr was 0.002, is 0.001"):
        train(small_run(tmp_path / "run", steps=2, optim_lr=1e-3), resume=True)
    with pytest.raises(ValueError, match="tokens was 512, is 768"):
        train(small_run(tmp_path / "run", steps=3), resume=True)


def test_what_may_change_between_start_and_resume(tmp_path):
    whole = train(small_run(tmp_path / "run", steps=4))
    before = losses(tmp_path / "run")
    shutil.rmtree(whole.checkpoint)
    changed = small_run(tmp_path / "run", steps=4, log_every=1, save_keep=1, compute_micro_batch_size=2)
    assert train(changed, resume=True).finished
    assert losses(tmp_path / "run") == pytest.approx(before, abs=SAME_FUNCTION_FLOAT32)
