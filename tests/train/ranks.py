"""Checks that the tests of several ranks run under torchrun: `python -m train.ranks CHECK FOLDER`.

Several checks, separated by spaces, run one after the other, each in a folder of its name.
"""

import atexit
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from helpers import BFLOAT16_GRADIENT, lively_model, random_ids, small_config
from thoughtbubbles.distributed import World, joined
from thoughtbubbles.train import parallel
from thoughtbubbles.train.config import ComputeConfig
from thoughtbubbles.train.loop import train
from train.runs import small_run

FLOAT64 = {
    "steps": 20, "compute_precision": "float64", "compute_micro_batch_size": 2, "save_every": 5, "save_keep": 9,
}  # fmt: skip


def run(folder: Path, **changes: object) -> None:
    train(small_run(folder / os.environ["RUN"], **changes), resume="RESUME" in os.environ)


def float64(folder: Path) -> None:
    run(folder, **FLOAT64)


def float32(folder: Path) -> None:
    run(folder, steps=4)


def bf16(folder: Path) -> None:
    run(folder, steps=4, compute_precision="bf16", compute_micro_batch_size=2)


def muon(folder: Path) -> None:
    precise = {"compute_precision": "float64", "compute_micro_batch_size": 2}
    run(folder, steps=6, **precise, optim_kind="muon", model_head_gate=True, model_block="modern")


FEEDBACK = {
    "model_fork_layers": (1,),
    "model_fork_reach": 3,
    "model_merge": "forks",
    "model_feedback": True,
    "model_scores": False,
    "model_head_gate": True,
}


def masked(folder: Path) -> None:
    """Rows with very different numbers of targets: a mean of the ranks' means would be wrong."""
    run(folder, steps=4, compute_precision="float64", data_mixture=(str(folder / "examples"),), eval_sample_tokens=0)


def checkpointed(folder: Path) -> None:
    """Also with blocks that forks go through twice."""
    run(folder, steps=4, compute_precision="float64", compute_activation_checkpointing=True, **FEEDBACK)


def feedback(folder: Path, **more: Any) -> None:
    """The first step is that of the plain model."""
    options = {"compute_precision": "float64", "eval_sample_tokens": 0, **more}
    run(folder, steps=3, forks_from=0.34, **options, **FEEDBACK)


def compiled_feedback(folder: Path) -> None:
    """One rank compiles the shapes of two, since it takes the batch in two parts: they are cached for them."""
    feedback(folder, compute_compile=True, compute_micro_batch_size=4)


def decisions(folder: Path) -> None:
    """bf16 under FSDP2 decides exactly as the unsharded model under autocast, and would not if FSDP cast our inputs."""
    compute = ComputeConfig(precision="bf16")
    config = small_config(width=48, block_size=64)
    with joined("cpu") as world:
        for seed in range(4):
            whole = lively_model(config, seed=seed, dtype=torch.float32)
            with torch.no_grad():  # so that the norms' weights are the same in bfloat16
                for parameter in whole.blocks.parameters():
                    parameter.copy_(parameter.bfloat16())
            ids = random_ids(config, 3, 64, seed=world.rank)
            with torch.autocast("cpu", torch.bfloat16):
                expected = whole(ids, trace=True)
            sharded = lively_model(config, seed=seed, dtype=torch.float32)
            sharded.load_state_dict(whole.state_dict())
            parallel.parallelize(sharded, world, compute)
            with torch.autocast("cpu", torch.bfloat16):
                found = sharded(ids, trace=True)
            assert found.streams.x.dtype == found.streams.log_score.dtype == torch.float32
            for ours, theirs in zip(found.forks, expected.forks, strict=True):
                assert torch.equal(ours.log_score, theirs.log_score)
                assert torch.equal(ours.selected, theirs.selected)
            fork = sharded.forks["1"]
            assert fork.score.weight.dtype == torch.float32
        assert _differs_when_cast(config, world), "the comparison cannot tell rounded scores from exact ones"


def _differs_when_cast(config: object, world: World) -> bool:
    """FSDP's default casting, on fork layers as well: what `parallelize` avoids."""
    mesh = world.mesh()
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, whole = (lively_model(config, dtype=torch.float32) for _ in range(2))
    for part in [*model.blocks, *model.forks.values(), model]:
        fully_shard(part, mesh=mesh, mp_policy=cast)
    ids = random_ids(config, 3, 64, seed=world.rank)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(ids, trace=True), whole(ids, trace=True)
    return any(not torch.equal(a.selected, b.selected) for a, b in zip(ours.forks, theirs.forks, strict=True))


def kernels(folder: Path) -> None:
    """With TRITON_INTERPRET=1: a sharded model on our kernels has the gradients of an unsharded one."""
    from kernels.block_probe import set_tiles
    from kernels.interpreted import prepare_interpreter
    from kernels.norm_probe import error
    from thoughtbubbles import kernels

    prepare_interpreter()
    set_tiles(0)
    kernels.for_blocks = lambda device, dtype: dtype == torch.bfloat16  # as if the CPU were a GPU
    shape = {"n_head": 2, "width": 32, "n_layer": 2, "fork_layers": (1,)}  # heads of 16, which the kernels take
    config = small_config(**shape, head_gate=True)
    assert lively_model(config).blocks[0].attention.has_kernel(torch.zeros(1, dtype=torch.bfloat16))

    def gradients(world: World, *, activation_checkpointing: bool) -> dict[str, torch.Tensor]:
        model = lively_model(config, dtype=torch.float32)
        with torch.no_grad():  # the same weights in bfloat16, in which sharded ones travel
            for parameter in model.blocks.parameters():
                parameter.copy_(parameter.bfloat16())
        parallel.parallelize(
            model, world, ComputeConfig(precision="bf16", activation_checkpointing=activation_checkpointing)
        )
        ids = random_ids(config, 2, 8)[world.rank :: world.size]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, targets=ids.roll(-1, 1)).loss / world.size
        loss.backward()
        return {name: parallel.whole(parameter.grad).float() for name, parameter in model.named_parameters()}

    with joined("cpu") as world:
        for activation_checkpointing in (False, True):
            found = gradients(world, activation_checkpointing=activation_checkpointing)
            expected = gradients(World(torch.device("cpu")), activation_checkpointing=activation_checkpointing)
            errors = {name: error(found[name], expected[name]) for name in expected}
            assert max(errors.values()) < BFLOAT16_GRADIENT, errors


def gloo_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").glob("*"):  # Linux only
        with suppress(OSError):  # ended meanwhile
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def no_threads_are_left() -> None:
    """A thread of gloo that outlives Python can abort the process, rarely."""
    give_up = time.monotonic() + 5  # a thread that has ended is listed for a moment more
    while left := gloo_threads():
        if time.monotonic() > give_up:
            print(f"threads that outlive Python: {left}", file=sys.stderr, flush=True)
            os._exit(3)
        time.sleep(0.01)


if __name__ == "__main__":
    atexit.register(no_threads_are_left)  # before the first group is joined: so it runs after what ends the threads
    torch.set_num_threads(1)
    checks, folder = sys.argv[1].split(), Path(sys.argv[2])
    for check in checks:
        globals()[check](folder / check if len(checks) > 1 else folder)
