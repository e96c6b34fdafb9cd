"""Which operators of a training step do not repeat to the bit? A recorder for benchmarks/repeat.py --operators.

Every operator that PyTorch dispatches, forward and backward, ours included, runs several times on the same inputs. Of
each result it keeps a sum of the elements' bits as integers, each times a number of its own. It wraps around, and does
not depend on the order of its terms. Operators that work in place run once.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")  # their results are any bits
SPREAD = 0x1E3779B97F4A7C16  # a large even number, so that its multiples plus 1 are odd and far apart


class Recorder(TorchDispatchMode):
    """Records operators with a result on `device`, each run `times` times."""

    def __init__(self, device: str, times: int):
        super().__init__()
        self.device, self.times = device, times
        self.names: list[str] = []
        self._sums: list[Tensor] = []  # (times,) each, on the device until the end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = self._recorded(result)
        if results and func._schema.name.partition("::")[2] not in EMPTY and not _aliases(func):
            changes = func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags
            sums = [torch.stack([bits(each) for each in results])]
            for _ in range(0 if changes else self.times - 1):
                sums.append(torch.stack([bits(each) for each in self._recorded(func(*args, **kwargs))]))
            for i, each in enumerate(torch.stack(sums).unbind(1)):
                self.names.append(f"{func} [{i}]" if len(results) > 1 else str(func))
                self._sums.append(each)
        return result

    def _recorded(self, result: Any) -> list[Tensor]:
        return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.device.type == self.device and x.numel()]

    def sums(self) -> list[list[int]]:
        """Of each recorded result, in their order: one number per time."""
        return [each.tolist() for each in self._sums]


def bits(x: Tensor) -> Tensor:
    """A sum that a difference in one bit changes, and two elements that change places or differ by opposite amounts."""
    x = x.detach()
    whole = x.to(torch.uint8) if x.dtype == torch.bool else x.contiguous().view(INTEGERS[x.element_size()])
    place = torch.arange(whole.numel(), device=whole.device)
    return (whole.flatten().to(torch.int64) * (place * SPREAD + 1)).sum()


def _aliases(func: Any) -> bool:
    """Whether it only returns its input in another shape."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def compare_operators(found: Sequence[tuple[list[str], list[list[int]]]]) -> dict[str, Any]:
    """Of each process the names and the sums."""
    names = found[0][0]
    if any(other != names for other, _ in found):
        raise SystemExit("the processes ran different operators, so their results cannot be compared")
    several = Counter(name for _, sums in found for name, each in zip(names, sums, strict=True) if len(set(each)) > 1)
    differing = [i for i in range(len(names)) if len({sums[i][0] for _, sums in found}) > 1]
    return {
        "results": len(names),
        "differ_within_a_process": dict(several.most_common()),
        "first_between_processes": f"{names[differing[0]]}, result {differing[0]}" if differing else None,
        "differ_between_processes": len(differing),
    }
