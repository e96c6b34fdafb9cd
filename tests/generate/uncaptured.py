"""Steps of a `GraphStep` without graphs, so that everything around them runs on a CPU."""

from typing import Any

import torch

from thoughtbubbles.generate import engine, graph, graphed
from thoughtbubbles.generate.graph import Captured, Compiled, GraphStep, find_likeliest, keep_counts
from thoughtbubbles.generate.prediction import Prediction
from thoughtbubbles.generate.step import enter, finish


class Uncaptured:
    """Computes the step again, and writes into the tensors that the first one returned, as a graph does."""

    def __init__(self, step: "EagerStep", size: int):
        self.step, self.size = step, size
        self.prediction = step.run(size)

    def replay(self) -> None:
        self.step.replayed.append(self.size)
        found = self.step.run(self.size)
        pairs = zip((*self.prediction[:2], *self.prediction[2]), (*found[:2], *found[2]), strict=True)
        for kept, new in pairs:
            kept.copy_(new)


class EagerStep(GraphStep):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.replayed: list[int] = []

    def run(self, size: int) -> Prediction:
        return self._step(self.parts(size), size)

    def _capture(self, size: int) -> Captured:
        found = Uncaptured(self, size)
        return Captured([found], found.prediction)  # type: ignore[list-item]


def on_a_cpu(patch: Any) -> None:
    """Lets `Engine(…, compiled=True)` run here; `patch` is pytest's monkeypatch."""
    patch.setattr(engine, "check_compiled", lambda *_, **__: None)
    patch.setattr(graphed, "GraphStep", EagerStep)
    patch.setattr(graph, "compiled", lambda: Compiled(enter, finish, find_likeliest, keep_counts))
    torch.manual_seed(0)
