"""Several ranks (gloo, on the CPU) give the same training as one rank; checkpoints move between them."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from helpers import LOW_PRECISION_TRAINING, SAME_TRAINING, run_probe
from thoughtbubbles.train.loop import train
from train.ranks import FLOAT64
from train.runs import environment, losses, metrics, small_run, tensors, uneven_examples

TESTS = Path(__file__).parents[1]


def on_ranks(n: int, check: str, folder: Path, run: str = "run", *, resume: bool = False) -> None:
    """n = 0: without torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n else []
    extra = {"RUN": run, **({"RESUME": "1"} if resume else {})}
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "train.ranks", check, str(folder)],
        capture_output=True,
        text=True,
        cwd=TESTS,
        env={**environment(), **extra},
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_close(a: Path, b: Path, *, steps: int, atol: float = SAME_TRAINING) -> None:
    assert len(losses(a)) == steps
    torch.testing.assert_close(torch.tensor(losses(a)), torch.tensor(losses(b)), atol=atol, rtol=0)
    # AdamW and Muon would hide gradients that are all scaled by one factor: their norms do not.
    norms = [torch.tensor([line["gradient_norm"] for line in metrics(x) if "gradient_norm" in line]) for x in (a, b)]
    torch.testing.assert_close(*norms, atol=atol, rtol=atol)
    validation = [
        [list(line["validation_loss"].values()) for line in metrics(x) if "validation_loss" in line] for x in (a, b)
    ]
    torch.testing.assert_close(torch.tensor(validation[0]), torch.tensor(validation[1]), atol=atol, rtol=0)
    ours, theirs = (tensors(x / f"step-{steps:08d}" / "model") for x in (a, b))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=atol, rtol=0, msg=name)


def forget_after(run: Path, step: int) -> None:
    """As if the run had been killed after the checkpoint of this step."""
    for folder in run.glob("step-*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "fewest"), [("training", 5), ("decoding", 4)])
def test_all_compiled_sums_are_chosen_by_rule(step, fewest):
    """Else two processes compute them in different ways and get other bits. Dynamo resets the global setting."""
    graphs = run_probe("train.compile_probe", step)
    assert {backward for backward, _ in graphs} == ({True, False} if step == "training" else {False})
    assert len(graphs) >= fewest
    assert all(deterministic for _, deterministic in graphs), graphs


@pytest.mark.slow
def test_one_rank_and_two_agree_and_exchange_checkpoints(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(small_run(one, **FLOAT64))
    on_ranks(2, "float64", tmp_path, "two")
    assert_close(one, two, steps=20)
    assert len(list((two / "step-00000020" / "optimizer").iterdir())) == 2
    # 2 → 1 → 2: one rank resumes from a checkpoint of two, and two resume from its checkpoint.
    forget_after(two, 10)
    on_ranks(0, "float64", tmp_path, "two", resume=True)
    assert_close(one, two, steps=20)
    forget_after(two, 15)
    assert len(list((two / "step-00000015" / "optimizer").iterdir())) == 1
    on_ranks(2, "float64", tmp_path, "two", resume=True)
    assert_close(one, two, steps=20)


@pytest.mark.slow
def test_bf16_decides_as_the_unsharded_model(tmp_path):
    on_ranks(2, "decisions", tmp_path)


@pytest.mark.slow  # half a minute: kernels through Triton's interpreter
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_sharded_blocks_on_kernels(tmp_path, monkeypatch):
    """What a block saves for the next one must outlive its own weights, which are gathered for its pass only."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on_ranks(2, "kernels", tmp_path)


# Steps, and how far one rank and two may be apart: sums are rounded in another order, and Muon's iterations are always
# in bfloat16. `masked`: the mean is over the targets of all ranks.
OPTIONS = {
    "masked": (4, SAME_TRAINING),
    "checkpointed": (4, SAME_TRAINING),
    "float32": (4, LOW_PRECISION_TRAINING),
    "bf16": (4, LOW_PRECISION_TRAINING),
    "muon": (6, LOW_PRECISION_TRAINING),
    "feedback": (3, SAME_TRAINING),
    "compiled_feedback": (3, SAME_TRAINING),
}


@pytest.mark.slow
def test_options_on_two_ranks(tmp_path):
    """One start of the ranks for all of them: it takes longer than their steps."""
    for check in OPTIONS:
        (tmp_path / check).mkdir()
    uneven_examples(tmp_path / "masked" / "examples")
    on_ranks(0, " ".join(OPTIONS), tmp_path, "one")
    on_ranks(2, " ".join(OPTIONS), tmp_path, "two")
    for check, (steps, atol) in OPTIONS.items():
        assert_close(tmp_path / check / "one", tmp_path / check / "two", steps=steps, atol=atol)
    eager, compiled = (tmp_path / check / "one" for check in ("feedback", "compiled_feedback"))
    assert_close(eager, compiled, steps=3, atol=SAME_TRAINING)


@pytest.mark.slow
def test_four_ranks(tmp_path):
    """More ranks than a score head has rows: some hold an empty shard of it."""
    on_ranks(0, "float64", tmp_path, "one")
    on_ranks(4, "float64", tmp_path, "four")
    assert_close(tmp_path / "one", tmp_path / "four", steps=20)
    forget_after(tmp_path / "four", 10)
    on_ranks(2, "float64", tmp_path, "four", resume=True)
    assert_close(tmp_path / "one", tmp_path / "four", steps=20)
