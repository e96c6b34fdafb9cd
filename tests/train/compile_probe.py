"""Run in a separate process: which compiled graphs of a training step choose their sums by rule, not by timing.

Prints a pair for each graph: whether it is one of the backward, and whether it is deterministic.
"""

import json
import os
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a graph from the cache is not generated again

import torch
from torch._inductor import config, graph

from helpers import lively_model, random_ids, small_config
from thoughtbubbles.distributed import World
from thoughtbubbles.train.config import ComputeConfig
from thoughtbubbles.train.parallel import parallelize

if __name__ == "__main__":
    found: list[tuple[bool, bool]] = []
    codegen = graph.GraphLowering.codegen

    def noting(self: graph.GraphLowering) -> Any:
        found.append((bool(self.is_backward), config.deterministic))
        return codegen(self)

    graph.GraphLowering.codegen = noting  # type: ignore[method-assign]
    form = {"n_layer": 1, "fork_layers": (0,), "feedback": True, "fork_reach": 3, "merge": "forks"}
    model = lively_model(small_config(**form), dtype=torch.float32)
    parallelize(model, World(torch.device("cpu")), ComputeConfig(compile=True, precision="float32"))
    ids = random_ids(model.config, 2, 16)
    model(ids, targets=ids.roll(-1, 1)).loss.backward()
    print(json.dumps(found))
