"""bfloat16 copies of the weights: made once for many forwards, never stale, never visible outside, same loss."""

import pytest
import torch

from helpers import BFLOAT16, BFLOAT16_GRADIENT, named, random_ids
from thoughtbubbles.model.linear import Linear
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.config import OptimConfig
from thoughtbubbles.train.optim import Optimizer
from thoughtbubbles.train.precision import MixedPrecision


def make(precision: str = "bf16", **options) -> tuple[Thoughtbubbles, MixedPrecision, list[Linear]]:
    model = Thoughtbubbles(named("nano-causal", head_gate=True))
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    assert len(linears) == 5 * model.config.n_layer, "qkv, out, gate, up, down"
    return model, MixedPrecision(model, precision, device="cpu", **options), linears


def ids_for(model: Thoughtbubbles) -> torch.Tensor:
    return random_ids(model.config, 2, 32)


def loss_of(model: Thoughtbubbles, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, targets=ids.roll(-1, 1)).loss


def inside(products: MixedPrecision, linears: list[Linear]) -> list[torch.Tensor | None]:
    """The copies as a forward finds them."""
    with products():
        return [linear.bf16_copy for linear in linears]


def times_written(products: MixedPrecision, linears: list[Linear]) -> list[int]:
    return [copy._version for copy in inside(products, linears)]


def assert_fresh(products: MixedPrecision, linears: list[Linear]) -> None:
    for copy, linear in zip(inside(products, linears), linears, strict=True):
        assert copy.dtype == torch.bfloat16
        assert torch.equal(copy, linear.weight.bfloat16())


def test_copies_are_made_once_for_several_forwards():
    model, products, linears = make()
    assert_fresh(products, linears)
    before = inside(products, linears)
    written = times_written(products, linears)
    for _ in range(3):
        with products():
            loss = loss_of(model, ids_for(model))
        loss.backward()
    assert times_written(products, linears) == written
    assert all(a is b for a, b in zip(inside(products, linears), before, strict=True)), (
        "compiled code keeps reading them"
    )


def step(model: Thoughtbubbles, kind: str) -> None:
    optimizer = Optimizer(model, OptimConfig(kind=kind))
    loss_of(model, ids_for(model)).backward()
    optimizer.step(0.1, clip=1.0)


def adamw_step(model: Thoughtbubbles) -> None:
    """Its fused kernel does not increment the version of the weights that it changes."""
    step(model, "adamw")


def muon_step(model: Thoughtbubbles) -> None:
    step(model, "muon")


def write_over_all(model: Thoughtbubbles) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))


def write_over_one(model: Thoughtbubbles) -> None:
    with torch.no_grad():
        model.blocks[-1].mlp.down.weight[0, 0] = 3.0


def load(model: Thoughtbubbles) -> None:
    model.load_state_dict(Thoughtbubbles(model.config).state_dict())


def load_and_assign(model: Thoughtbubbles) -> None:
    """Other tensors replace the weights, and may have the same version."""
    other = Thoughtbubbles(model.config)
    assert [p._version for p in other.parameters()] == [p._version for p in model.parameters()]
    model.load_state_dict(other.state_dict(), assign=True)


CHANGES = [adamw_step, muon_step, write_over_all, write_over_one, load, load_and_assign]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_renews_them(change):
    model, products, linears = make()
    assert_fresh(products, linears)
    old = [copy.clone() for copy in inside(products, linears)]
    change(model)
    assert_fresh(products, linears)
    assert any(not torch.equal(a, b) for a, b in zip(inside(products, linears), old, strict=True)), "nothing changed"


@pytest.mark.parametrize("change", CHANGES)
def test_no_stale_copy_is_visible_outside(change):
    """Generation or a checkpoint between two steps uses the weights as they are."""
    model, products, linears = make()
    ids = ids_for(model)
    with products():
        loss_of(model, ids)
    change(model)
    assert [linear.bf16_copy for linear in linears] == [None] * len(linears)
    twin = Thoughtbubbles(model.config)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(loss_of(model, ids), loss_of(twin, ids))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss_of(model, ids), loss_of(twin, ids))


def test_what_is_left_behind_by_an_exception():
    model, products, linears = make()
    with pytest.raises(ZeroDivisionError), products():  # noqa: PT012
        assert all(linear.bf16_copy is not None for linear in linears)
        raise ZeroDivisionError
    assert [linear.bf16_copy for linear in linears] == [None] * len(linears)
    assert not torch.is_autocast_enabled("cpu")
    write_over_all(model)
    assert_fresh(products, linears)


def test_a_backward_after_the_context():
    """As in training: the copies are removed from the model, but the autograd graph still has them."""
    model, products, _ = make()
    with products():
        loss = loss_of(model, ids_for(model))
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_a_graph_notices_copies_that_were_renewed_under_it():
    """A gradient never silently uses other weights than the forward."""
    model, products, _ = make()
    with products():
        loss = loss_of(model, ids_for(model))
    write_over_all(model)
    with products():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loss_and_gradients_are_those_of_autocast():
    model, products, _ = make()
    ids, found = ids_for(model), []
    for context in (products, lambda: torch.autocast("cpu", torch.bfloat16)):
        model.zero_grad()
        with context():
            assert torch.is_autocast_enabled("cpu")
            loss = loss_of(model, ids)
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (ours, our_gradient), (theirs, their_gradient) = found
    assert ours == pytest.approx(theirs, rel=BFLOAT16)
    assert (our_gradient - their_gradient).norm() < BFLOAT16_GRADIENT * their_gradient.norm()
    exact = loss_of(model, ids).item()
    assert ours != exact, "no product was rounded"
    assert ours == pytest.approx(exact, rel=BFLOAT16)


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("float64", torch.float64)])
def test_other_precisions_round_nothing(precision, dtype):
    model, products, linears = make(precision)
    model.to(dtype)
    with products():
        assert [linear.bf16_copy for linear in linears] == [None] * len(linears)
        assert not torch.is_autocast_enabled("cpu")
        within = loss_of(model, ids_for(model))
    assert torch.equal(within, loss_of(model, ids_for(model)))
    assert not products.copies


def test_forget_renews():
    """For changes that do not increment a tensor's version: the steps of a CUDA graph, or `.data`."""
    _, products, linears = make()
    before = times_written(products, linears)
    for linear in linears:
        linear.weight.data.mul_(2)
    products.forget()
    assert_fresh(products, linears)
    assert all(now > then for now, then in zip(times_written(products, linears), before, strict=True))


def test_a_sharded_model_is_left_alone():
    """FSDP rounds what it gathers; here only the products follow autocast."""
    model, products, linears = make(is_sharded=True)
    with products():
        assert [linear.bf16_copy for linear in linears] == [None] * len(linears)
        assert torch.is_autocast_enabled("cpu")
        ours = loss_of(model, ids_for(model))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours, loss_of(model, ids_for(model)))


def test_an_evaluation_may_come_first():
    model, products, _ = make()
    with torch.no_grad(), products():
        loss_of(model, ids_for(model))
    with products():
        loss = loss_of(model, ids_for(model))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_copies_are_not_saved():
    model, products, _ = make()
    names = set(model.state_dict())
    with products():
        assert set(model.state_dict()) == names
