"""Forward and backward of a micro-batch; on a single GPU as a CUDA graph.

The two passes of a 36-layer model are about two thousand kernels. Launched one by one, the GPU idles for microseconds
between them, which adds up to several percent of the time; a CUDA graph launches all of them at once. It replays fixed
addresses: inputs are copied to where the graph reads them, and gradients, loss and fork records stay where it writes
them until the next replay.

The first micro-batch of a step writes the gradients and the others add to them, so there are two graphs, and two for
each budget if a run draws them at random. Each is captured after the passes have run once without it, so that all
kernels are compiled by then.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from thoughtbubbles.model.fork import ForkRecord
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.budget import at_budget
from thoughtbubbles.train.precision import MixedPrecision


class MicroBatch(NamedTuple):
    """A micro-batch on its device, and the weight (`share`) of its mean loss in the loss of the step."""

    ids: Tensor
    targets: Tensor
    lengths: Tensor
    share: Tensor


class MicroResult(NamedTuple):
    loss: Tensor  # its share of the step's loss
    forks: tuple[ForkRecord, ...] | None


class AsyncScalars:
    """Numbers copied from the device asynchronously, to be read later.

    The copy is queued right after the work that produces them; `read` waits for that, not for work queued since.
    """

    def __init__(self, numbers: Tensor):
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


class _Key(NamedTuple):
    """What a graph is captured for."""

    is_first: bool
    budget: float | None


class _Replay(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: MicroBatch
    result: MicroResult
    gradients: list[Tensor | None]


def _detached(record: ForkRecord) -> ForkRecord:
    """Without its autograd graph, which must not outlive the step: the next one may run on another CUDA stream."""
    return record._replace(own_log_score=record.own_log_score.detach(), log_score=record.log_score.detach())


class ForwardBackward:
    def __init__(
        self, model: Thoughtbubbles, products: MixedPrecision, *, graph: bool, join: Callable[[], None] = lambda: None
    ):
        """`join` waits for other threads that use the GPU: none may during a capture."""
        self.model, self.products, self.graph, self._join = model, products, graph, join
        self._replays: dict[_Key, _Replay] = {}
        self._has_run: set[_Key] = set()

    def __call__(
        self, micro: MicroBatch, *, is_first: bool, budget: float | None = None, trace: bool = False
    ) -> MicroResult:
        """Writes the gradients of `share` · loss to the parameters; adds to them unless `is_first`.

        All micro-batches of a step have the same budget; None is the model's own.
        """
        key = _Key(is_first, budget)
        if self.graph and self._can_replay(key):
            return self._replayed(micro, key)
        passed = self._run(micro, key, trace=trace)
        if not self._has_run:
            self._join()
        self._has_run.add(key)
        return passed

    def _can_replay(self, key: _Key) -> bool:
        """The second graph must add to the gradients that the first one writes, so the first is captured before it."""
        return key in self._has_run and (key.is_first or key._replace(is_first=True) in self._replays)

    def release(self) -> None:
        """Frees the gradients after the optimizer's step. Those of a graph stay at their addresses."""
        if not self._replays:
            self.model.zero_grad(set_to_none=True)

    def _run(self, micro: MicroBatch, key: _Key, *, trace: bool) -> MicroResult:
        if key.is_first:
            self.model.zero_grad(set_to_none=True)
        with self.products.bf16_copies():
            with self.products.autocast(), at_budget(self.model, key.budget) as budget:
                out = self.model(micro.ids, targets=micro.targets, lengths=micro.lengths, budget=budget, trace=trace)
            assert out.loss is not None
            share = out.loss * micro.share.to(out.loss.dtype)
            share.backward()
        return MicroResult(share.detach(), out.forks and tuple(map(_detached, out.forks)))

    def _replayed(self, micro: MicroBatch, key: _Key) -> MicroResult:
        self.products.renew()
        replay = self._replays.get(key)
        if replay is None:
            replay = self._replays[key] = self._capture(micro, key)
        for place, tensor in zip(replay.inputs, micro, strict=True):
            place.copy_(tensor, non_blocking=True)
        for parameter, gradient in zip(self.model.parameters(), replay.gradients, strict=True):
            parameter.grad = gradient
        replay.graph.replay()
        return replay.result

    def _capture(self, micro: MicroBatch, key: _Key) -> _Replay:
        self._join()
        inputs = MicroBatch(*(tensor.clone() for tensor in micro))
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self._replays.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            result = self._run(inputs, key, trace=True)
        gradients = [parameter.grad for parameter in self.model.parameters()]
        if not key.is_first:
            written = self._replays[key._replace(is_first=True)].gradients
            assert all(a is b for a, b in zip(gradients, written, strict=True))
        return _Replay(graph, inputs, result, gradients)
