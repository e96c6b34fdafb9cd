"""Compiles the kernels of a model's blocks in the background, while the rest of a run starts.

Triton compiles a kernel on its first launch, half of that time in a separate process; torch.compile keeps the main
thread busy meanwhile. Here two blocks run forward and backward on a single row, once without scores and once with them,
only to compile their kernels. If the run needs a kernel at the same moment, both compile it, which is harmless.
"""

from collections.abc import Callable
from importlib import import_module
from threading import Thread

import torch

from thoughtbubbles.distributed import World
from thoughtbubbles.model.attention import PATHS
from thoughtbubbles.model.block import Block, Residual
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.initial import SkipInit
from thoughtbubbles.model.layout import find_layout
from thoughtbubbles.model.streams import Streams
from thoughtbubbles.train.config import ComputeConfig
from thoughtbubbles.train.parallel import has_kernels


def warm_up_kernels(config: ModelConfig, compute: ComputeConfig, world: World) -> Callable[[], None]:
    """Starts the compilation if the run uses our kernels on one GPU; the returned function waits for its end."""
    device = world.device
    # FSDP's weights have another dtype.
    if world.is_distributed or config.block != "gpt2" or not has_kernels(compute, device.type):
        return lambda: None
    residual = torch.bfloat16 if compute.residual == "bf16" else torch.float32

    def work() -> None:
        try:
            with torch.cuda.device(device):
                run_two_blocks(config, device, residual)
        except Exception:  # the run itself compiles what is missing, and raises the error if there is one
            pass

    # Import now: two threads that import parts of torch at the same time can interfere.
    for name in (
        "torch._dynamo",
        *(f"thoughtbubbles.kernels.{name}" for name in ("attention", "gelu", "norm", "reach")),
    ):
        import_module(name)
    thread = Thread(target=work)  # not a daemon: killing it inside CUDA or the compiler may crash Python
    thread.start()
    return thread.join


def run_two_blocks(config: ModelConfig, device: torch.device, residual: torch.dtype) -> None:
    """Uses rows with as many streams as in the run: some kernels are specialized on whether their tiles fit."""
    lengths = {False: config.copies * config.block_size}
    if config.fork_layers:
        lengths[True] = Budget.of(config.budget).largest_floor(config.block_size)
    with SkipInit(), device:
        block = Block(config)
    for has_scores, n_streams in lengths.items():
        x = torch.zeros(1, n_streams, config.width, device=device, dtype=residual, requires_grad=True)
        log_score = torch.zeros(1, n_streams, device=device, requires_grad=True)
        token = torch.arange(n_streams, device=device).clamp(max=config.block_size)[None]  # the rest is unused slots
        layout = find_layout(Streams(x, log_score, token), config, n_tokens=config.block_size, has_forked=has_scores)
        with torch.autocast(device.type, torch.bfloat16):
            y = block(block(Residual(x), layout, PATHS["fused"]), layout, PATHS["fused"])
        torch.autograd.grad(y.total(layout.gate).sum(), (x, *block.parameters()))
