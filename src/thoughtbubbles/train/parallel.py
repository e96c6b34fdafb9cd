"""Parallelism around the model, never inside it: activation checkpointing, compilation, then FSDP2.

Each block is one FSDP group. With bf16 its weights travel and work in bfloat16, while the masters, the gradients'
reduction, and everything else (embedding, score heads, fork embeddings, final norm) stay float32. FSDP's own casting of
inputs is off: it would round the log scores, and with them the decisions.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from thoughtbubbles import kernels
from thoughtbubbles.model.config import OURS
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.config import ComputeConfig

Found = TypeVar("Found")
PATIENCE = timedelta(hours=4)  # for what one rank does while the others wait: checksums of large data, a slow disk


class World(NamedTuple):
    """Who takes part. Under torchrun there is a process group, even for one rank; otherwise there is none."""

    device: torch.device
    rank: int = 0
    size: int = 1
    is_distributed: bool = False
    saving: Any = None  # a CPU process group of its own: checkpoints are written while training goes on

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def agree(self, trouble: str | None) -> str | None:
        """The first trouble that any rank has, so that all of them give up together; None if there is none."""
        troubles = [trouble]
        if self.is_distributed:
            troubles = [None] * self.size
            dist.all_gather_object(troubles, trouble, group=self.saving)
        return next(filter(None, troubles), None)

    def first(self, work: Callable[[], Found]) -> Found:
        """What `work` returns on the first rank, on all of them; a ValueError there is one everywhere."""
        found: list[Any] = [None, None]
        if self.is_first:
            try:
                found[0] = work()
            except ValueError as error:
                found[1] = str(error)
        if self.is_distributed:
            dist.broadcast_object_list(found, src=0, group=self.saving)
        if found[1] is not None:
            raise ValueError(found[1])
        return found[0]

    def total(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.is_distributed:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        if self.is_distributed:
            dist.barrier(group=self.saving)


def find_device(wanted: str) -> str:
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, is_here in found.items() if is_here)
    if not found[wanted]:
        here = ", ".join(name for name, is_here in found.items() if is_here)
        raise ValueError(f"--device {wanted}: this machine has none that torch can use; it has: {here}")
    return wanted


def find_precision(compute: ComputeConfig, device: str) -> str:
    if compute.precision == "float64" and device == "mps":
        raise ValueError("--compute.precision float64: mps has none; take cpu")
    found = ("bf16" if device == "cuda" else "float32") if compute.precision == "auto" else compute.precision
    if compute.residual == "bf16" and found != "bf16":
        raise ValueError("--compute.residual bf16: goes with --compute.precision bf16 only")
    return found


@contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """Joins the other ranks if torchrun started us, and leaves them at the end."""
    kind = find_device(device)
    if "RANK" not in os.environ:
        yield World(torch.device(kind))
        return
    if kind == "mps":
        raise ValueError("--device mps: many ranks need cuda or cpu")
    own = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", device_id=own if kind == "cuda" else None
    )
    try:
        saving = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield World(own, dist.get_rank(), dist.get_world_size(), True, saving)
    finally:
        dist.destroy_process_group()


def parallelize(model: Thoughtbubbles, world: World, compute: ComputeConfig) -> None:
    """In place; parameter names stay what they are."""
    device = world.device.type
    if compute.residual == "bf16":
        model.stream_dtype = torch.bfloat16
    if compute.activation_checkpointing:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    if device == "cuda" if compute.compile is None else compute.compile:
        _compile(model, blocks=not (uses_graph(compute, world) and _is_all_kernels(model, compute, device)))
    if world.is_distributed:
        _shard(model, world, find_precision(compute, device))


def has_kernels(compute: ComputeConfig, device: str) -> bool:
    """Whether blocks run on kernels of ours."""
    return kernels.for_blocks(device, _product_dtype(compute, device))


def _is_all_kernels(model: Thoughtbubbles, compute: ComputeConfig, device: str) -> bool:
    """With nothing but matrix products besides: in a CUDA graph a compiler could only delay the start.

    Not the authors' form, for whose attention and GELU there is no kernel.
    """
    dtype, head_size = _product_dtype(compute, device), model.config.head_size
    is_available = kernels.for_attention(device, dtype, head_size=head_size)
    return is_available and model.attention == "fused" and model.config.form == OURS


def _product_dtype(compute: ComputeConfig, device: str) -> torch.dtype:
    return torch.bfloat16 if find_precision(compute, device) == "bf16" else torch.float32


def uses_graph(compute: ComputeConfig, world: World) -> bool:
    """Whether a step is replayed as a CUDA graph: on one GPU. FSDP's streams and buffers are not made for that."""
    if compute.graph and (world.device.type != "cuda" or world.is_distributed):
        raise ValueError("--compute.graph True: a CUDA graph needs one GPU, and no torchrun")
    return world.device.type == "cuda" and not world.is_distributed if compute.graph is None else compute.graph


def _compile(model: Thoughtbubbles, *, blocks: bool) -> None:
    """Region by region: blocks (if wanted) and fork layers of one shape share their code, so many take as long as one.

    Shapes are fixed, since a graph for any length would give up much of the speed.
    """
    # Every fork layer may have a shape of its own, in training and in evaluation; none may fall back unnoticed.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for part in [*(model.blocks if blocks else ()), *model.forks.values()]:
        part.compile(dynamic=False)
    model.apply_update = torch.compile(model.apply_update, dynamic=False)  # type: ignore[method-assign]
    model.layout = torch.compile(model.layout, dynamic=False)  # type: ignore[method-assign]
    model.mean_nll = torch.compile(model.mean_nll, dynamic=False)  # type: ignore[method-assign]


def _shard(model: Thoughtbubbles, world: World, precision: str) -> None:
    mesh = init_device_mesh(world.device.type, (world.size,))
    narrow = torch.bfloat16 if precision == "bf16" else None
    wide = torch.float32 if precision == "bf16" else None
    in_blocks = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=in_blocks)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for group in fsdp_groups(model):
        # Losses are shares of one global mean, so gradients are summed; with the plain sum that every backend has.
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
    # Our outputs are views that nobody writes into.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def fsdp_groups(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sync_gradients(model: torch.nn.Module, on: bool) -> None:
    """Gradients of all but the last micro-step add up locally before they are reduced."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor behind a shard. A collective: every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
