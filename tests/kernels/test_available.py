"""What kernels are available for: one home for the answer, and one switch for all of them."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from helpers import small_config
from thoughtbubbles import kernels
from thoughtbubbles.generate import fast_blocks
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train import parallel
from thoughtbubbles.train.config import ComputeConfig

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
BF16, FLOAT32 = torch.bfloat16, torch.float32


class OnGPU:
    """As much of a tensor on a GPU as the question needs."""

    device, dtype = torch.device("cuda"), FLOAT32

    def is_contiguous(self) -> bool:
        return True


QUESTIONS = {
    "any": lambda: kernels.available("cuda"),
    "blocks": lambda: kernels.for_blocks("cuda", BF16),
    "attention": lambda: kernels.for_attention("cuda", BF16, head_size=64),
    "loss": lambda: kernels.for_loss("cuda", FLOAT32, max_bubble=8),
    "adamw": lambda: kernels.for_adamw([OnGPU()]),  # type: ignore[list-item]
    "decoding": lambda: kernels.for_decoding("cuda", BF16, width=768, head_size=64),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.usefixtures("no_shape_checks")
def test_one_switch_for_all(question, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert QUESTIONS[question]()
    with kernels.disabled():
        assert not QUESTIONS[question]()
        with kernels.disabled():
            pass
        assert not QUESTIONS[question]()
    assert QUESTIONS[question]()


def test_what_they_are_not_for():
    assert not kernels.available("cpu")
    assert not kernels.for_blocks("cuda", FLOAT32)
    assert not kernels.for_attention("cuda", BF16, head_size=24)
    assert not kernels.for_loss("cuda", torch.float64, max_bubble=8)
    assert not kernels.for_loss("cuda", FLOAT32, max_bubble=4096)
    assert not kernels.for_adamw([torch.zeros(3)])


def authors(**changes: object) -> ModelConfig:
    return small_config(authors_compat=True, merge="residual", n_head=2, width=32, **changes)


@pytest.mark.parametrize("config", [authors(), authors(fork_layers=())], ids=["forks", "plain"])
def test_the_authors_form_is_compiled_since_it_has_no_kernels(config):
    """Neither its attention, nor its GELU: not even without fork layers, where its attention is ours."""
    compute = ComputeConfig(precision="bf16")
    assert not parallel._is_all_kernels(Thoughtbubbles(config), compute, "cuda")
    assert parallel._is_all_kernels(Thoughtbubbles(replace(config, authors_compat=False)), compute, "cuda")


def test_blocks_with_gates_of_heads_are_compiled():
    """The gates are not a kernel: uncompiled, they would be several launches per block."""
    config, compute = small_config(n_head=2, width=32), ComputeConfig(precision="bf16")
    assert parallel._is_all_kernels(Thoughtbubbles(config), compute, "cuda")
    assert not parallel._is_all_kernels(Thoughtbubbles(replace(config, head_gate=True)), compute, "cuda")


def test_the_authors_form_is_not_decoded_on_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "for_decoding", lambda *_, **__: True)
    assert not fast_blocks.has_kernels(Thoughtbubbles(authors()))
    assert fast_blocks.has_kernels(Thoughtbubbles(replace(authors(), authors_compat=False)))
