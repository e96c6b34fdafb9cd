"""Run by kernels/interpreted.py: an engine on the kernels, on the CPU, against one without them.

The margin of its graphs is so small that steps have to be repeated. Prints one JSON object.
"""

import json
import sys

import pytest
import torch

from generate.uncaptured import EagerStep, on_a_cpu
from helpers import lively_model, small_config
from thoughtbubbles import kernels
from thoughtbubbles.generate import graph
from thoughtbubbles.generate.engine import Engine
from thoughtbubbles.generate.graphed import Graphed
from thoughtbubbles.generate.jobs import Completion, Request
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.kernels import chunk, decode, decode_attention
from thoughtbubbles.model.transformer import Thoughtbubbles

UNIT = 2  # packed streams: sizes are multiples of this


class SmallSteps(EagerStep):
    n_launched = 0

    def launch(self, streams: int | float | None = None) -> None:
        self.n_launched += 1
        super().launch(0.6 * (streams or 0))

    def size_for(self, streams: int | float) -> int:
        return min(self.largest, (int(streams) // UNIT + 1) * UNIT)


def completions(model: Thoughtbubbles, *, on_kernels: bool) -> tuple[list[Completion], int]:
    """And how many steps were repeated."""
    random = torch.Generator().manual_seed(3)
    requests = [
        Request(
            prompt=torch.randint(40, (n,), generator=random).tolist(),
            max_new=new,
            budget=budget if model.config.scores else 2,
            sampling=Sampling(temperature=0.8 * (new % 2), seed=n),
        )
        for n, new, budget in ((9, 4, 2), (3, 5, 4), (1, 3, 1.5), (12, 4, 3), (5, 3, 1))
    ]
    with pytest.MonkeyPatch.context() as patch:
        if on_kernels:
            on_a_cpu(patch)
            patch.setattr("thoughtbubbles.generate.graphed.GraphStep", SmallSteps)
            patch.setattr(kernels, "for_decoding", lambda *_, **__: True)
            patch.setattr(graph, "packing_functions", lambda: PACKING)
        engine = Engine(model, rows=3, chunk=8, max_budget=4, compiled=on_kernels)
        handles = engine.submit_all(requests)
        for _ in engine.run():
            pass
        step = engine._reader.step if isinstance(engine._reader, Graphed) else None
        repeated = len(step.replayed) - step.n_launched if isinstance(step, SmallSteps) else 0
        return [handle.completion for handle in handles], repeated


PACKING = graph.PackingFunctions(graph.find_packing, graph.pack_streams, graph.unpack_streams, graph.find_places)

if __name__ == "__main__":
    chunk.CHUNK, decode_attention.SLOTS = chunk.Tile(16, 16, 1, 4), 16
    decode_attention.PROGRAMS = {"few": 12, "many": 1, "private": 12, "feedback": 12, "near": 12}[
        sys.argv[1]
    ]  # whether rows are split into parts
    decode.FEW_ROWS = 1024  # the library's product in float32 is for GPUs only
    shape = {"width": 64, "n_head": 2, "n_layer": 2, "block_size": 20, "vocab_size": 40, "merge": "residual"}
    forks = {"fork_layers": (0, 1), "fork_reach": 0 if sys.argv[1] == "private" else None}
    if sys.argv[1] == "feedback":
        forks = {"fork_layers": (1,), "fork_reach": 0, "feedback": True}
    if sys.argv[1] == "near":
        forks = {"fork_layers": (1,), "fork_reach": 3, "feedback": True, "scores": False}
    model = lively_model(small_config(**shape, **forks), dtype=torch.float32)
    (found, repeated), (expected, _) = (completions(model, on_kernels=one) for one in (True, False))
    json.dump(
        {
            "same": [a.ids == b.ids and a.streams == b.streams for a, b in zip(found, expected, strict=True)],
            "log_prob": max(
                abs(a - b) for one, other in zip(found, expected, strict=True)
                for a, b in zip(one.log_probs, other.log_probs, strict=True)
            ),
            "repeated": repeated,
        },
        sys.stdout,
    )  # fmt: skip
