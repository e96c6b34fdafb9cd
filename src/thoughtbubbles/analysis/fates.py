"""What becomes of forks: their scores, how many survive the later fork layers, and how many count."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thoughtbubbles.analysis.trace import Stage, Trace

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EFFECTIVE = 0.05  # of the best score of the bubble


def score_numbers(traces: Sequence[Trace]) -> dict[str, Any]:
    """Quantiles of the scores after each fork layer, of originals and of forks."""
    stages = []
    for index in range(1, len(traces[0].stages)):
        streams = [stream for trace in traces for stream in trace.stages[index].streams]
        by_name = {
            "originals": [stream.score for stream in streams if stream.place == 0],
            "forks": [stream.score for stream in streams if stream.place > 0],
        }
        stages.append(
            {
                "layer": traces[0].stages[index].layer,
                **{
                    name: {"streams": len(scores), "quantiles": np.quantile(scores, QUANTILES).tolist()}
                    if scores
                    else None
                    for name, scores in by_name.items()
                },
            }
        )
    return {"levels": list(QUANTILES), "stages": stages}


def score_sentence(found: Mapping[str, Any]) -> str:
    middle = found["levels"].index(0.5)
    parts = []
    for name in ("originals", "forks"):
        medians = [(each["layer"], each[name]["quantiles"][middle]) for each in found["stages"] if each[name]]
        if medians:
            path = ", ".join(f"{value:.2g} from block {layer}" for layer, value in medians)
            parts.append(f"{name} {path}")
    return f"Median score after each fork layer: {'; '.join(parts)}. A block's updates are multiplied by these."


def survival_numbers(traces: Sequence[Trace]) -> dict[str, Any]:
    """Of the forks made by each fork layer, the share that later ones keep; and streams per token that count.

    itself      the fork continues
    descendant  it continues, or a fork of it does
    """
    layers = [stage.layer for stage in traces[0].stages[1:]]
    born = []
    for index in range(1, len(layers) + 1):
        alive = [_alive(trace.stages[index:]) for trace in traces]
        sums = [[sum(row[place][kind] for row in alive) for kind in (0, 1)] for place in range(len(alive[0]))]
        n = sums[0][0]
        born.append(
            {
                "layer": layers[index - 1],
                "forks": n,
                "layers": layers[index - 1 :],
                "itself": [each[0] / n for each in sums] if n else None,
                "descendant": [each[1] / n for each in sums] if n else None,
            }
        )
    return {"threshold": EFFECTIVE, "born": born, "streams": [_counting(traces, index) for index in range(len(layers))]}


def _alive(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """How many forks of the first stage are there in each stage: themselves, and themselves or a descendant."""
    itself = {place: place for place, stream in enumerate(stages[0].streams) if stream.is_fork}  # now: then
    line = dict(itself)
    found = [(len(itself), len(itself))]
    for stage in stages[1:]:
        parents = [(place, stream.parent, stream.is_fork) for place, stream in enumerate(stage.streams)]
        itself = {place: itself[up] for place, up, is_fork in parents if up in itself and not is_fork}
        line = {place: line[up] for place, up, _ in parents if up in line}
        found.append((len(itself), len(set(line.values()))))
    return found


def _counting(traces: Sequence[Trace], index: int) -> dict[str, Any]:
    """Streams per token after a fork layer, and those with a score above 5% of the bubble's best."""
    n_tokens = n_streams = n_effective = 0
    for trace in traces:
        streams = trace.stages[index + 1].streams
        best: dict[int, float] = {}
        for stream in streams:  # weights are scores relative to the bubble, and do not underflow together
            best[stream.token] = max(best.get(stream.token, 0.0), stream.weight)
        n_tokens += len(trace.tokens)
        n_streams += len(streams)
        n_effective += sum(stream.weight > EFFECTIVE * best[stream.token] for stream in streams)
    layer = traces[0].stages[index + 1].layer
    return {"layer": layer, "all": n_streams / n_tokens, "effective": n_effective / n_tokens}


def survival_sentence(found: Mapping[str, Any]) -> str:
    parts = [
        f"Of the forks made before block {each['layer']}, {each['itself'][-1]:.0%} are still there at the end, and "
        f"{each['descendant'][-1]:.0%} with their descendants."
        for each in found["born"]
        if each["forks"] and len(each["layers"]) > 1
    ]
    last = found["streams"][-1]
    return " ".join(
        [
            *parts,
            f"Of {last['all']:.2f} streams per token at the end, {last['effective']:.2f} have a score above "
            f"{found['threshold']:.0%} of the best in their bubble.",
        ]
    )
