"""Weight initialisation: billions of random numbers in a few seconds, and the same ones everywhere.

A tensor's values depend on torch's seed (`torch.manual_seed`), its name, its size and whether it is float64, but not on
the device, the number of cores or the rest of the model (float32 values differ in last bits between CPU types). So for
one seed, a plain model and one with fork layers start with the same weights wherever names and sizes match.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

PIECE = 2**22  # values that one generator draws: small enough to keep every core busy to the end


class SkipInit(TorchFunctionMode):
    """Modules created in this context skip torch's own initialisation, which is slow and would be overwritten."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has data: it is neither on the meta device nor a fake tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@torch.no_grad()
def draw_normal(tensors: Mapping[str, tuple[Tensor, float]], *, threads: int | None = None) -> None:
    """Fills each named tensor from N(0, its deviation), on `threads` threads (default: all cores).

    Each piece of a tensor has its own CPU generator, seeded with one number from torch's global generator, the tensor's
    name and the index of the piece.
    """
    base = int(torch.randint(2**63 - 1, (), device="cpu"))
    pieces = [
        (piece, deviation, _seed(base, name, place))
        for name, (tensor, deviation) in tensors.items()
        for place, piece in enumerate(tensor.detach().view(-1).split(PIECE))
    ]
    if sum(len(piece) for piece, _, _ in pieces) <= PIECE:
        for piece in pieces:
            _draw_piece(*piece)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda piece: _draw_piece(*piece), pieces):
            pass  # re-raises an exception of a thread


def _draw_piece(piece: Tensor, deviation: float, seed: int) -> None:
    # Float32 values differ in their last bits between CPU types; float64 values do not, but take six times as long.
    dtype = torch.float64 if piece.dtype == torch.float64 else torch.float32
    in_place = piece.device.type == "cpu" and piece.dtype == dtype
    drawn = piece if in_place else torch.empty(piece.shape, device="cpu", dtype=dtype)
    drawn.normal_(std=deviation, generator=torch.Generator("cpu").manual_seed(seed))
    if not in_place:
        piece.copy_(drawn)


def _seed(base: int, name: str, place: int) -> int:
    """A seed of 32 bits: torch's CPU generator uses no more."""
    return int.from_bytes(hashlib.sha256(f"{base} {name} {place}".encode()).digest()[:4], "big")
