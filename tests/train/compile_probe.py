"""Run in a separate process: which compiled graphs of a step, of training or of decoding, choose their sums by rule.

Prints a pair for each graph: whether it is one of the backward, and whether it is deterministic.
"""

import json
import os
import sys
from typing import Any

# A graph from the cache is not generated again. Compiled C++ may come from there.
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

import torch
from torch._inductor import config, graph

from helpers import lively_model, random_ids, small_config
from thoughtbubbles.distributed import World
from thoughtbubbles.generate.decode import prefill
from thoughtbubbles.generate.graph import compiled, widths_within
from thoughtbubbles.generate.step import Parts, advance
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.train.config import ComputeConfig
from thoughtbubbles.train.parallel import parallelize


def training(model: Thoughtbubbles) -> None:
    parallelize(model, World(torch.device("cpu")), ComputeConfig(compile=True, precision="float32"))
    ids = random_ids(model.config, 2, 16)
    model(ids, targets=ids.roll(-1, 1)).loss.backward()


@torch.no_grad()
def decoding(model: Thoughtbubbles) -> None:
    ids, parts = random_ids(model.config, 2, 5), compiled()
    _, cache = prefill(model, ids[:, :4])
    widths = widths_within(model.config, 8)
    fast = Parts(enter=parts.enter, finish=parts.finish)
    prediction, after = advance(model, cache, ids[:, 4], torch.tensor([True, True]), widths=widths, parts=fast)
    parts.likeliest(prediction.logits, model.config.vocab_size)
    parts.keep_counts(cache, after, torch.tensor(True), None)


if __name__ == "__main__":
    found: list[tuple[bool, bool]] = []
    codegen = graph.GraphLowering.codegen

    def noting(self: graph.GraphLowering) -> Any:
        found.append((bool(self.is_backward), config.deterministic))
        return codegen(self)

    graph.GraphLowering.codegen = noting  # type: ignore[method-assign]
    form = {"n_layer": 1, "fork_layers": (0,), "feedback": True, "fork_reach": 3, "merge": "forks"}
    model = lively_model(small_config(**form), dtype=torch.float32)
    {"training": training, "decoding": decoding}[sys.argv[1]](model)
    print(json.dumps(found))
