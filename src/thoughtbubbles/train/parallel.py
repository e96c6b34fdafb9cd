"""Activation checkpointing, compilation and FSDP2, applied in this order to the model from outside.

Each block is one FSDP group. With bf16 its weights are communicated and used in bfloat16, while the master weights, the
gradient reduction and everything else (embedding, fork layers, final norm) stay float32. FSDP's input
casting is off: it would round the log scores, and so change the selection.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from thoughtbubbles import kernels
from thoughtbubbles.distributed import World
from thoughtbubbles.model.config import OURS
from thoughtbubbles.model.feedback import Steps
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.config import ComputeConfig

# Static shapes: a graph with dynamic ones would lose much of the speed.
COMPILATION: dict[str, Any] = {"dynamic": False, "options": kernels.CHOSEN_BY_RULE}


def find_precision(compute: ComputeConfig, device: str) -> str:
    if compute.precision == "float64" and device == "mps":
        raise ValueError("--compute.precision float64: not available on mps; use --device cpu")
    found = ("bf16" if device == "cuda" else "float32") if compute.precision == "auto" else compute.precision
    if compute.residual == "bf16" and found != "bf16":
        raise ValueError("--compute.residual bf16: needs --compute.precision bf16")
    return found


def parallelize(model: Thoughtbubbles, world: World, compute: ComputeConfig) -> None:
    """In place; parameter names do not change."""
    device = world.device.type
    if compute.residual == "bf16":
        model.stream_dtype = torch.bfloat16
    if compute.activation_checkpointing:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    if compute.compiles(device):
        is_graph_of_kernels = uses_graph(compute, world) and _is_all_kernels(model, compute, device)
        _compile(model, blocks=not is_graph_of_kernels)
    if world.is_distributed:
        _shard(model, world, find_precision(compute, device))


def has_kernels(compute: ComputeConfig, device: str) -> bool:
    """Whether blocks run on our kernels."""
    return kernels.for_blocks(device, _product_dtype(compute, device))


def _is_all_kernels(model: Thoughtbubbles, compute: ComputeConfig, device: str) -> bool:
    """Whether blocks are only our kernels and matrix products: then compiling them for a CUDA graph gains nothing.

    Not the authors' form or a modern block, since there are no kernels for their attention and MLP, and not with gates
    of heads, which the compiler fuses.
    """
    dtype, config = _product_dtype(compute, device), model.config
    is_available = kernels.for_attention(device, dtype, head_size=config.head_size)
    is_ours = model.attention == "fused" and config.form == OURS and config.block == "gpt2"
    return is_available and is_ours and not config.head_gate


def _product_dtype(compute: ComputeConfig, device: str) -> torch.dtype:
    return torch.bfloat16 if find_precision(compute, device) == "bf16" else torch.float32


def uses_graph(compute: ComputeConfig, world: World) -> bool:
    """Whether a step is replayed as a CUDA graph: on one GPU only, since FSDP's streams and buffers do not allow it."""
    if compute.graph and (world.device.type != "cuda" or world.is_distributed):
        raise ValueError("--compute.graph True: a CUDA graph needs a single GPU, without torchrun")
    return world.device.type == "cuda" and not world.is_distributed if compute.graph is None else compute.graph


def _compile(model: Thoughtbubbles, *, blocks: bool) -> None:
    """Regional compilation: blocks (if asked for) and fork layers of the same shape share one compilation."""
    # Every fork layer may have its own shape, for each budget, in training and in evaluation; none may silently fall
    # back to eager.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    for part in [*(model.blocks if blocks else ()), *model.forks.values()]:
        part.compile(**COMPILATION)
    model.feedback_steps = Steps(*(torch.compile(step, **COMPILATION) for step in model.feedback_steps))  # type: ignore[arg-type]
    model.apply_update = torch.compile(model.apply_update, **COMPILATION)  # type: ignore[method-assign]
    model.layout = torch.compile(model.layout, **COMPILATION)  # type: ignore[method-assign]
    model.mean_nll = torch.compile(model.mean_nll, **COMPILATION)  # type: ignore[method-assign]


def _shard(model: Thoughtbubbles, world: World, precision: str) -> None:
    mesh = world.mesh()
    param_dtype = torch.bfloat16 if precision == "bf16" else None
    reduce_dtype = torch.float32 if precision == "bf16" else None
    in_blocks = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=in_blocks)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for group in fsdp_groups(model):
        # Losses are shares of one global mean, so gradients are summed, with the plain sum that every backend has.
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
    # Our outputs are views that are never modified in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def fsdp_groups(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sync_gradients(model: torch.nn.Module, on: bool) -> None:
    """Gradients are accumulated locally, and reduced over ranks in the last micro-step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard. A collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_shard(tensor: Tensor, *, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has whole, cut as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    return local(distribute_tensor(tensor.contiguous(), like.device_mesh, like.placements, src_data_rank=None))
