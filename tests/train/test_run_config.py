"""RunConfig rejects wrong settings; the learning rate schedules are right."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from helpers import lively_model, small_config
from thoughtbubbles.distributed import find_device
from thoughtbubbles.train.config import OptimConfig, RunConfig, differences
from thoughtbubbles.train.fields import from_record, read_count
from thoughtbubbles.train.optim import Optimizer, learning_rate, warmup_steps
from train.runs import small_run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_step": 100}, "--tokens-per-step 100: give a multiple of the context length .*, 32"),
        ({"tokens": 0}, "--tokens 0"),
        ({"tokens": True}, "--tokens True: give a whole number"),
        ({"tokens": 10**16}, "--tokens 10000000000000000"),
        ({"tokens_per_step": 32 * 2**30}, "--tokens-per-step"),
        ({"seed": 2**63}, "--seed"),
        ({"save_every": 10**16}, "--save.every"),
        ({"eval_every": -1}, "--eval.every"),
        ({"log_every": True}, "--log.every True"),
        ({"log_peak_tflops": float("inf")}, "--log.peak-tflops"),
        ({"optim_clip": float("inf")}, "--optim.clip"),
        ({"optim_weight_decay": float("nan")}, "--optim.weight-decay"),
        ({"compute_micro_batch_size": True}, "--compute.micro-batch-size True"),
        ({"optim_lr": -1.0}, "--optim.lr"),
        ({"optim_lr": float("nan")}, "--optim.lr"),
        ({"optim_warmup": 2.0}, "--optim.warmup"),
        ({"optim_betas": (0.9, 1.0)}, "--optim.betas"),
        ({"optim_clip": -1.0}, "--optim.clip"),
        ({"save_keep": 0}, "--save.keep"),
        ({"save_milestones": (1.5,)}, "--save.milestones"),
        ({"eval_tokens": 3}, "--eval.tokens"),
        ({"log_every": 0}, "--log.every"),
        ({"compute_micro_batch_size": 3}, "--compute.micro-batch-size 3: give a divisor of the 8 rows"),
        ({"data_mixture": ()}, "--data.mixture"),
        ({"data_mixture": ("a=b",)}, "PATH=WEIGHT"),
    ],
)
def test_mistakes_name_the_option(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path, **changes)


@pytest.mark.parametrize(
    ("text", "number"), [("1e5", 100_000), ("100_000", 100_000), ("2.5e9", 2_500_000_000), ("7", 7), ("1e15", 10**15)]
)
def test_numbers_as_people_write_them(text, number):
    assert read_count(text) == number


@pytest.mark.parametrize("text", ["1.5", "nan", "inf", "1e16", "1e999999999", "1e-9", "", "ten", "9" * 5000, "1e5x"])
def test_what_is_not_a_whole_number(text):
    with pytest.raises(ValueError, match="': give a whole number up to"):
        read_count(text)


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"--device cuda: .* available: cpu"):
        find_device("cuda")
    assert find_device("auto") in ("cpu", "mps")


def test_cosine():
    optim = OptimConfig(lr=1.0, warmup=0.1, floor=0.1)
    rates = [learning_rate(optim, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[10] < 1.0
    assert rates[54] == pytest.approx(0.55)  # half-way down
    assert rates[99] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[9:]))


def test_warmup_stable_decay():
    optim = OptimConfig(lr=2.0, schedule="wsd", warmup=0.1, decay=0.2, floor=0.25)
    rates = [learning_rate(optim, step, 100) for step in range(100)]
    assert rates[9:80] == [2.0] * 71
    assert rates[80] == pytest.approx(2.0 - 1.5 / 20)
    assert rates[99] == pytest.approx(0.5)


def test_the_warmup_is_the_nearest_number_of_steps():
    assert [warmup_steps(OptimConfig(warmup=share), 100) for share in (0.0, 0.29, 0.296, 1.0)] == [0, 29, 30, 100]


def test_constant_after_warmup():
    optim = OptimConfig(lr=2.0, schedule="constant", warmup=0.1)
    assert [learning_rate(optim, step, 20) for step in (0, 1, 2, 19)] == [1.0, 2.0, 2.0, 2.0]


def test_decay_is_for_matrices_only():
    """With a zero gradient only weight decay moves a weight."""
    model = lively_model(small_config(score_bias=0.5, head_gate=True))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = Optimizer(model, OptimConfig(lr=1e-2, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1e-2, clip=0.0)
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 5e-3) if parameter.ndim >= 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_muon_takes_the_matrices_of_the_blocks():
    model = lively_model(small_config(head_gate=True))
    optimizer = Optimizer(model, OptimConfig(kind="muon"))
    names = {optimizer.name_of[p] for p in optimizer.parameters["muon"]}
    assert names == {
        f"blocks.{i}.{part}.weight"
        for i in range(4)
        for part in ("attention.qkv", "attention.gate", "attention.out", "mlp.up", "mlp.down")
    }
    assert "embedding.weight" in {optimizer.name_of[p] for p in optimizer.parameters["adamw"]}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_state_survives(kind):
    """After two steps, the state moves to a new optimizer, and both take the same third step."""
    models = [lively_model(small_config()) for _ in range(2)]
    optimizers = [Optimizer(model, OptimConfig(kind=kind)) for model in models]
    generator = torch.Generator().manual_seed(3)
    gradients = [
        [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in models[0].parameters()] for _ in range(3)
    ]

    def step(index, grads):
        for parameter, gradient in zip(models[index].parameters(), grads, strict=True):
            parameter.grad = gradient.clone()
        optimizers[index].step(1e-2, clip=1.0)

    step(0, gradients[0])
    step(0, gradients[1])
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].restore({name: t.clone() for name, t in optimizers[0].tensors().items()}, optimizers[0].updates)
    for index in (0, 1):
        step(index, gradients[2])
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_differences_ignore_where_a_run_happens(tmp_path):
    base = small_run(tmp_path / "a")
    moved = replace(
        small_run(tmp_path / "b", log_every=7, device="cpu", profile=True, compute_micro_batch_size=1), name="other"
    )
    assert differences(base.as_dict(), moved.as_dict()) == []
    other = small_run(tmp_path / "a", optim_lr=1.0, seed=3)
    assert differences(base.as_dict(), other.as_dict()) == ["optim.lr was 0.002, is 1.0", "seed was 0, is 3"]


def test_old_run_folders_are_read(tmp_path):
    """Fields had other names, and one did not exist."""
    base = small_run(tmp_path / "a", compute_micro_batch_size=2, compute_activation_checkpointing=True)
    before = json.loads(json.dumps(base.as_dict()))
    before["compute"]["micro_rows"] = before["compute"].pop("micro_batch_size")
    before["compute"]["recompute"] = before["compute"].pop("activation_checkpointing")
    del before["compute"]["residual"]
    assert from_record(RunConfig, before, where="run.json") == base
