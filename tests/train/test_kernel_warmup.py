"""Kernels compiled in the background. tests/kernels/block_probe.py tests that they are those of a step."""

import threading

import pytest
import torch

from helpers import small_config
from thoughtbubbles.distributed import World
from thoughtbubbles.train.config import ComputeConfig
from thoughtbubbles.train.kernel_warmup import run_two_blocks, warm_up_kernels


def test_nothing_starts_if_no_kernel_will_run():
    before = threading.active_count()
    for world, precision in (
        (World(torch.device("cpu")), "bf16"),
        (World(torch.device("cuda")), "float32"),
        (World(torch.device("cuda"), is_distributed=True), "bf16"),
    ):
        warm_up_kernels(small_config(), ComputeConfig(precision=precision), world)()
        assert threading.active_count() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_what_goes_wrong_in_the_background_stays_there(recwarn):
    warm_up_kernels(small_config(), ComputeConfig(precision="bf16"), World(torch.device("cuda")))()
    assert not recwarn.list


@pytest.mark.parametrize("changes", [{}, {"fork_layers": ()}, {"fork_layers": (), "copies": 3, "merge": "original"}])
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_two_blocks_run_whatever_the_model(changes, residual):
    """Without drawing random numbers, so that the next ones of the seed do not change."""
    state = torch.get_rng_state()
    run_two_blocks(small_config(**changes), torch.device("cpu"), residual)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_in_the_background_on_a_gpu():
    from thoughtbubbles.kernels.norm import _add_norm

    join = warm_up_kernels(small_config(n_head=2, width=32), ComputeConfig(), World(torch.device("cuda")))
    join()
    assert _add_norm.device_caches
