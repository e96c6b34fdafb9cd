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
from thoughtbubbles.model.layout import Layout, Originals, find_layout
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
    n_tokens, budget, path = config.block_size, Budget.of(config.budget), PATHS["fused"]
    with SkipInit(), device:
        block = Block(config)

    def streams(n: int) -> Streams:
        x = torch.zeros(1, n, config.width, device=device, dtype=residual, requires_grad=True)
        log_score = torch.zeros(1, n, device=device, requires_grad=True)
        # Past the tokens: unused slots.
        return Streams(x, log_score, torch.arange(n, device=device).clamp(max=n_tokens)[None])

    def run(n: int, *, has_forked: bool) -> None:
        given = streams(n)
        layout = find_layout(given, config, n_tokens=n_tokens, has_forked=has_forked)
        with torch.autocast(device.type, torch.bfloat16):
            y = block(block(Residual(given.x), layout, path), layout, path)
        torch.autograd.grad(y.total(layout.gate).sum(), (given.x, *block.parameters()))

    def run_forks_after_originals(n_forks: int) -> None:
        originals, forks = streams(n_tokens), streams(n_forks)
        alone, of_forks = (find_layout(each, config, n_tokens=n_tokens) for each in (originals, forks))
        alone = Layout(*alone[:5])
        with torch.autocast(device.type, torch.bfloat16):
            first = block(block(Residual(originals.x), alone, path, keep=True), alone, path, keep=True)
            assert first.kept is not None
            seen = Originals(first.kept, alone.key_bias)
            y = block(block(Residual(forks.x), of_forks, path, seen), of_forks, path, seen)
        total = first.total(alone.gate).sum() + y.total(of_forks.gate).sum()
        torch.autograd.grad(total, (originals.x, forks.x, *block.parameters()))

    run(config.copies * n_tokens, has_forked=False)
    most = min(budget.largest_floor(n_tokens), config.max_bubble * n_tokens)
    if config.feedback:
        run_forks_after_originals(max(1, most - n_tokens))
    elif config.fork_layers:
        run(most, has_forked=True)
