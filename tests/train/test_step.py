"""Forward and backward of micro-batches: gradients of a step, launched and replayed, and activation checkpointing."""

from dataclasses import replace

import pytest
import torch
from runs import small_run

from helpers import BFLOAT16, SAME_FUNCTION_FLOAT32, lively_model, random_ids, small_config
from thoughtbubbles.distributed import World
from thoughtbubbles.train.loop import Trainer, train
from thoughtbubbles.train.precision import MixedPrecision
from thoughtbubbles.train.step import AsyncScalars, ForwardBackward, MicroBatch, MicroResult, _Key, _Replay


class Tape:
    """A CUDA graph without a GPU: repeats the captured work on the same inputs, into the same memory."""

    def __init__(self, work):
        self.replay = work


class Taped(ForwardBackward):
    def _capture(self, micro, key):
        is_first = key.is_first
        inputs = MicroBatch(*(tensor.clone() for tensor in micro))
        parameters = list(self.model.parameters())
        places = [torch.full_like(p, torch.nan) if is_first else p.grad for p in parameters]
        result = MicroResult(torch.zeros(()), None)

        def work():
            made = self._run(inputs, key._replace(is_first=True), trace=False)
            for parameter, place in zip(parameters, places, strict=True):
                place.copy_(parameter.grad) if is_first else place.add_(parameter.grad)
                parameter.grad = place
            result.loss.copy_(made.loss)

        if not is_first:
            written = self._replays[_Key(True, key.budget)].gradients
            assert all(a is b for a, b in zip(places, written, strict=True))
        return _Replay(Tape(work), inputs, result, places)


def gradients(kind, model, *, graph, n_micro, budgets=(None,), steps=4, device="cpu", precision="float32"):
    """Gradients of every step, while the weights change, and the losses. Steps take the budgets in turn."""
    passes = kind(model, MixedPrecision(model, precision, device=device), graph=graph)
    found = []
    for step in range(steps):
        loss = 0.0
        for index in range(n_micro):
            ids = random_ids(model.config, 2, 12, seed=7 * step + index).to(device)
            lengths = torch.tensor([12, 9], device=device)
            micro = MicroBatch(ids, ids.roll(-1, 1), lengths, torch.tensor(1 / n_micro, device=device))
            loss += passes(micro, is_first=index == 0, budget=budgets[step % len(budgets)]).loss.item()
        found.append((loss, [p.grad.clone() for p in model.parameters()]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
        passes.release()
    return found


def models(device="cpu"):
    config = small_config(merge="residual")
    one, other = (lively_model(config, dtype=torch.float32).to(device) for _ in range(2))
    other.load_state_dict(one.state_dict())
    return one, other


@pytest.mark.parametrize("n_micro", [1, 2, 3, 5])
def test_replayed_steps_have_the_gradients_of_launched_ones(n_micro):
    one, other = models()
    launched = gradients(ForwardBackward, one, graph=False, n_micro=n_micro)
    replayed = gradients(Taped, other, graph=True, n_micro=n_micro)
    for (loss, expected), (again, found) in zip(launched, replayed, strict=True):
        assert abs(loss - again) < SAME_FUNCTION_FLOAT32
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, atol=SAME_FUNCTION_FLOAT32, rtol=SAME_FUNCTION_FLOAT32)


@pytest.mark.parametrize("n_micro", [1, 3])
@pytest.mark.slow
def test_steps_of_several_budgets_are_replayed_each_from_its_own_graph(n_micro):
    one, other = models()
    forms = {"n_micro": n_micro, "budgets": (1.0, 2.0, 1.5), "steps": 9}
    launched = gradients(ForwardBackward, one, graph=False, **forms)
    replayed = gradients(Taped, other, graph=True, **forms)
    for (loss, expected), (again, found) in zip(launched, replayed, strict=True):
        assert abs(loss - again) < SAME_FUNCTION_FLOAT32
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, atol=SAME_FUNCTION_FLOAT32, rtol=SAME_FUNCTION_FLOAT32)


def test_the_budget_of_a_step_counts_and_its_record_keeps_no_graph():
    model, _ = models()
    ids = random_ids(model.config, 2, 12)
    micro = MicroBatch(ids, ids.roll(-1, 1), torch.tensor([12, 12]), torch.tensor(1.0))
    passes = ForwardBackward(model, MixedPrecision(model, "float32", device="cpu"), graph=False)
    results = {budget: passes(micro, is_first=True, budget=budget, trace=True) for budget in (None, 1.0, 2.0)}
    own = model(ids, targets=micro.targets, budget=1.0, trace=True)
    assert torch.equal(results[1.0].loss, own.loss)
    assert torch.equal(results[1.0].forks[-1].bubble_size, torch.ones(2, 12, dtype=torch.int64))
    assert torch.equal(results[None].loss, results[2.0].loss)  # the model's own
    assert results[1.0].loss != results[2.0].loss
    tensors = [part for record in results[2.0].forks for part in record if isinstance(part, torch.Tensor)]
    assert len(tensors) > 10
    assert not any(part.requires_grad for part in tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("budgets", [(None,), (1.0, 2.0, 1.5)], ids=["one", "several"])
@pytest.mark.parametrize("n_micro", [1, 2, 3, 5])
def test_a_graph_is_bit_identical_to_launched_kernels(n_micro, budgets):
    one, other = models("cuda")
    forms = {"n_micro": n_micro, "device": "cuda", "precision": "bf16", "budgets": budgets, "steps": 4 * len(budgets)}
    launched = gradients(ForwardBackward, one, graph=False, **forms)
    replayed = gradients(ForwardBackward, other, graph=True, **forms)
    for (loss, expected), (again, found) in zip(launched, replayed, strict=True):
        assert loss == again
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.slow
def test_activation_checkpointing_with_bfloat16_products(tmp_path):
    """The backward recomputes blocks with the same rounded weights."""
    plain = small_run(tmp_path / "plain", steps=3, compute_precision="bf16")
    again = replace(plain, out=tmp_path / "again", compute=replace(plain.compute, activation_checkpointing=True))
    a, b = (train(config).validation_loss["corpus"] for config in (plain, again))
    assert abs(a - b) < BFLOAT16


@pytest.mark.parametrize(
    "merge", ["mixture", *(pytest.param(m, marks=pytest.mark.slow) for m in ("residual", "original"))]
)
def test_a_residual_in_bfloat16(merge, tmp_path):
    """Streams are rounded, scores and loss are not, and a run ends close to one in float32."""
    wide = small_run(tmp_path / "wide", steps=3, model_merge=merge, compute_precision="bf16")
    narrow = replace(wide, out=tmp_path / "narrow", compute=replace(wide.compute, residual="bf16"))
    trainer = Trainer(narrow, World(torch.device("cpu")))
    ids = random_ids(narrow.model, 2, 16)
    with trainer.products():
        streams = trainer.model(ids).streams
    assert (streams.x.dtype, streams.log_score.dtype) == (torch.bfloat16, torch.float32)
    a, b = (train(config).validation_loss["corpus"] for config in (wide, narrow))
    assert a != b
    assert abs(a - b) < BFLOAT16


def test_a_residual_in_bfloat16_needs_products_in_it(tmp_path):
    with pytest.raises(ValueError, match=r"--compute.residual bf16: needs --compute.precision bf16"):
        train(small_run(tmp_path / "run", compute_precision="float32", compute_residual="bf16"))


def test_numbers_can_be_read_later():
    numbers = AsyncScalars(torch.tensor([1.5, 2.0]))
    assert numbers.read() == [1.5, 2.0] == numbers.read()
