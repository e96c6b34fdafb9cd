"""Initial weights: the table of `init_weights`, and that they depend on the seed and the names alone."""

import math
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import named, small_config
from thoughtbubbles.model import initial
from thoughtbubbles.model.transformer import Thoughtbubbles


def build(config, seed=0):
    torch.manual_seed(seed)
    return Thoughtbubbles(config).state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_tensor_is_as_the_table_says():
    config = named("tiny-causal", width=256, score_bias=1.5, head_gate=True)
    into_residual = 0.02 / math.sqrt(2 * config.n_layer)
    for name, value in build(config).items():
        if name.endswith("score.bias"):
            assert (value == 1.5).all()
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        elif name.endswith("norm.weight"):
            assert (value == 1).all(), name
        else:
            deviation = into_residual if ".out." in name or ".down." in name else 0.02
            if name.startswith("forks.") and name.endswith(".embedding"):
                deviation = 1 / math.sqrt(config.width)
            z = value.double() / deviation
            n = value.numel()
            assert abs(z.mean()) < 5 / math.sqrt(n), name
            assert z.std().item() == pytest.approx(1, abs=5 / math.sqrt(2 * n)), name
            assert z.abs().max() < 7, name


def test_a_large_tensor_is_normal_in_every_piece():
    torch.manual_seed(0)
    value = torch.empty(3, initial.PIECE // 2 + 1)
    initial.draw_normal({"it": (value, 0.5)})
    z, n = value.view(-1).double() / 0.5, value.numel()
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert z.var().item() == pytest.approx(1, abs=5 * math.sqrt(2 / n))
    assert (z.abs() < 1).double().mean().item() == pytest.approx(math.erf(math.sqrt(0.5)), abs=1e-3)
    first, second = z[: n - initial.PIECE], z[initial.PIECE :]
    assert abs((first * second).mean()) < 5 / math.sqrt(len(first)), "two pieces have nothing to do with each other"


def test_init_weights_leaves_no_tensor_out():
    config = named("tiny-causal", score_bias=1.5, head_gate=True)
    with torch.device("meta"):
        model = Thoughtbubbles(config)
    model.to_empty(device="cpu")
    assert not list(model.buffers())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    torch.manual_seed(0)
    model.init_weights()
    assert same(model.state_dict(), build(config))


def test_the_seed_decides():
    config = small_config()
    assert same(build(config), build(config))
    ours, theirs = build(config), build(config, seed=1)
    torch.manual_seed(0)
    first, second = (Thoughtbubbles(config).state_dict() for _ in range(2))
    assert same(ours, first)
    for other in (theirs, second):
        assert all(not torch.equal(ours[n], other[n]) for n in ours if n.endswith(("score.weight", "up.weight")))


def test_tensors_differ_from_each_other():
    state = build(named("tiny-causal"))
    first = {tuple((value.view(-1)[:4] / value.std()).tolist()) for value in state.values() if value.std() > 0}
    assert len(first) == sum(bool(value.std() > 0) for value in state.values())


@pytest.mark.parametrize("n_blas_threads", [1, 2])
def test_not_the_number_of_threads(n_blas_threads):
    found = []
    torch.set_num_threads(n_blas_threads)
    for threads in (None, 1, 3):
        torch.manual_seed(0)
        tensors = {"big": torch.empty(2, initial.PIECE + 5), "small": torch.empty(7)}
        initial.draw_normal({name: (tensor, 0.02) for name, tensor in tensors.items()}, threads=threads)
        found.append(tensors)
    torch.manual_seed(0)
    alone = {"small": torch.empty(7)}  # drawn without threads
    initial.draw_normal({"small": (alone["small"], 0.02)})
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert torch.equal(alone["small"], found[0]["small"])


def test_models_begin_alike_where_their_tensors_have_the_same_names():
    bubbles = build(small_config())
    others = [
        build(small_config(fork_layers=(), merge="original")),
        build(small_config(fork_layers=(), merge="original", copies=3)),
        build(small_config(fork_layers=(2,), score_bias=1.0)),
        build(small_config(fork_layers=(), merge="original", head_gate=True)),
    ]
    for other in others:
        shared = bubbles.keys() & other.keys()
        assert {n for n in bubbles if not n.startswith("forks.")} <= shared
        assert all(torch.equal(bubbles[name], other[name]) for name in shared)


def test_bfloat16_weights_are_the_float32_ones_rounded():
    ours = build(small_config())
    torch.set_default_dtype(torch.bfloat16)
    assert same({name: value.bfloat16() for name, value in ours.items()}, build(small_config()))


def test_float64_weights_are_drawn_in_float64():
    model = Thoughtbubbles(small_config()).double()
    torch.manual_seed(0)
    model.init_weights()
    ours = model.state_dict()
    torch.set_default_dtype(torch.float64)
    assert same(ours, build(small_config()))
    table = ours["embedding.weight"]
    assert table.std().item() == pytest.approx(0.02, rel=0.2)
    assert (table.float().double() != table).any(), "not float32 numbers converted to float64"


def test_torchs_own_initial_values_are_not_drawn():
    """One number is all that a model takes from the global generator."""
    build(small_config())
    after = torch.rand(3)
    torch.manual_seed(0)
    torch.randint(2**63 - 1, ())
    assert torch.equal(after, torch.rand(3))


@pytest.mark.usefixtures("no_shape_checks")
def test_without_storage_there_is_no_work():
    before = torch.get_rng_state()
    began = time.process_time()
    with torch.device("meta"):
        meta = Thoughtbubbles(named("1.9b-causal"))
    with FakeTensorMode():
        fake = Thoughtbubbles(named("1.9b-causal"))
    assert time.process_time() - began < 3  # drawing them takes tens of seconds, and eight gigabytes
    assert all(parameter.is_meta for parameter in meta.parameters())
    for model in (meta, fake):
        assert sum(parameter.numel() for parameter in model.parameters()) == 1_915_955_200
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_same_numbers():
    config = named("tiny-causal", vocab_size=50_304)  # the embedding is of more than one piece
    torch.manual_seed(0)
    with torch.device("cuda"):
        theirs = Thoughtbubbles(config).state_dict()
    assert all(value.is_cuda for value in theirs.values())
    assert same(build(config), {name: value.cpu() for name, value in theirs.items()})
