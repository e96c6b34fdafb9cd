"""Faults that a run would show only much later: the effects of a signal, and what a resume could lose."""

import math
import os
import signal

import pytest
import torch

from thoughtbubbles.distributed import World
from thoughtbubbles.train.loop import Trainer, train
from train.runs import metrics, run_command, small_run, small_train

CPU = World(torch.device("cpu"))
NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def handlers():
    """Signal handlers of the caller, which a run must restore."""
    mine = {number: lambda *_: None for number in NUMBERS}
    before = {number: signal.signal(number, handler) for number, handler in mine.items()}
    yield mine
    for number, handler in before.items():
        signal.signal(number, handler)


def at_step(trainer: Trainer, step: int, do) -> None:
    """Calls `do` in the backward pass of a step, counted from 1."""
    trainer.model.final_norm.bias.register_hook(lambda grad: do(grad) if trainer.done + 1 == step else grad)


def signalled(number: int):
    def do(grad: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), number)
        return grad

    return do


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_the_run_after_its_step_and_gives_the_handlers_back(tmp_path, handlers, number):
    trainer = Trainer(small_run(tmp_path / "run", steps=5, save_every=0, eval_every=0), CPU)
    at_step(trainer, 2, signalled(number))
    result = trainer.run()
    assert (result.finished, result.step, result.exit_code) == (False, 2, 128 + number)
    assert result.checkpoint.name == "step-00000002"
    assert (result.checkpoint / "manifest.json").exists()
    assert {n: signal.getsignal(n) for n in NUMBERS} == handlers


def test_a_signal_in_the_last_step_is_not_a_failure(tmp_path, handlers):
    trainer = Trainer(small_run(tmp_path / "run", steps=2, save_every=0, eval_every=0), CPU)
    at_step(trainer, 2, signalled(signal.SIGTERM))
    result = trainer.run()
    assert (result.finished, result.exit_code) == (True, 0)
    assert result.validation_loss.keys() == {"corpus"}


def test_handlers_come_back_when_a_run_fails(tmp_path, handlers):
    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("as if out of memory")

    trainer = Trainer(small_run(tmp_path / "run", steps=3), CPU)
    at_step(trainer, 2, fail)
    with pytest.raises(RuntimeError, match="as if out of memory"):
        trainer.run()
    assert {n: signal.getsignal(n) for n in NUMBERS} == handlers


def test_a_second_ctrl_c_ends_immediately(tmp_path, handlers):
    trainer = Trainer(small_run(tmp_path / "run", steps=3), CPU)

    def twice(grad: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return grad

    at_step(trainer, 2, twice)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert not list((tmp_path / "run").glob("step-*"))
    assert {n: signal.getsignal(n) for n in NUMBERS} == handlers


@pytest.mark.usefixtures("handlers")
def test_steps_skipped_before_a_stop_count_after_it(tmp_path):
    """Two skipped, a stop, and a third one skipped: three in a row, although no process has seen all of them."""

    def overflow(grad: torch.Tensor) -> torch.Tensor:
        return grad * math.nan

    config = small_run(tmp_path / "run", steps=9, optim_max_skipped=2, save_every=0, eval_every=0)
    trainer = Trainer(config, CPU)
    at_step(trainer, 3, overflow)
    at_step(trainer, 4, lambda grad: overflow(signalled(signal.SIGTERM)(grad)))
    assert trainer.run().step == 4

    resumed = Trainer(config, CPU, resume=True)
    assert (resumed.done, resumed.skipped_in_a_row) == (4, 2)
    at_step(resumed, 5, overflow)
    with pytest.raises(ValueError, match="3 steps in a row were not finite, so the run stops after step 5"):
        resumed.run()
    assert [line["step"] for line in metrics(tmp_path / "run") if line.get("skipped")] == [3, 4, 5]


def test_a_milestone_outlives_another_length_of_its_run(tmp_path):
    """The milestone at half of 2 steps is never deleted, although half of 4 and half of 8 are other steps."""
    options = {"optim_schedule": "constant", "save_keep": 1, "save_milestones": (0.5,), "eval_sample_tokens": 0}
    for steps in (2, 4, 8):
        train(small_run(tmp_path / "run", steps=steps, save_every=0, eval_every=0, **options), resume=True)
    kept = sorted(folder.name for folder in (tmp_path / "run").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (1, 2, 4, 8)]


@pytest.mark.slow
def test_a_dry_run_on_several_ranks(tmp_path):
    """It used to hang: it left a process group and joined it again."""
    done = run_command(*small_train(tmp_path / "run", "--dry-run"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("one step at reduced size went well") == 1
    assert not (tmp_path / "run").exists()
