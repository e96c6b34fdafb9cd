"""Does it need the future: the loss of each document in one parallel forward, and token by token as in generation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thoughtbubbles.evals.autoregressive import Scores, Windows
from thoughtbubbles.evals.perplexity import describe, differences
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.written import plus_minus, signed

LEAST = 8  # targets of a document that is shown


def documents(windows: Windows, end_of_text: int) -> Tensor:
    """The number of the document that each target belongs to; the pieces of one in two windows count as two."""
    within = (windows.ids == end_of_text).cumsum(1)
    per_window = within.max(1).values + 1
    return within + torch.nn.functional.pad(per_window.cumsum(0), (1, 0))[:-1, None]


def numbers(
    config: ModelConfig, scores: Mapping[str, Scores], windows: Windows, *, vocab_size: int, end_of_text: int
) -> dict[str, Any]:
    described = describe(config, dict(scores), vocab_size=vocab_size, n_bytes=0)
    document = documents(windows, end_of_text)[windows.counted]
    sizes = torch.bincount(document)
    shown = sizes >= min(LEAST, int(sizes.max()))
    ways = {}
    for name, each in scores.items():
        means = torch.bincount(document, weights=each.nll[windows.counted]) / sizes
        way = described["ways"][name]
        ways[name] = {key: way[key] for key in ("title", "nats", "standard_error", "perplexity")}
        ways[name]["documents"] = means[shown].tolist()
    return {
        "ways": ways,
        "differences": {name: gap._asdict() for name, gap in differences(dict(scores)).items()},
        "document_tokens": sizes[shown].tolist(),
        "tokens": int(sizes.sum()),
        "missing": described["missing"],
    }


def sentence(found: Mapping[str, Any]) -> str:
    parts = []
    for name, way in found["ways"].items():
        if name == "blockwise":
            continue
        gap = found["differences"][f"{name} - blockwise"]
        if gap["largest"] < 1e-3:
            parts.append(
                f"{way['title'].capitalize()}, the loss is the same as in one parallel forward "
                f"({way['nats']:.4f} nats per token; no token differs by more than {gap['largest']:.1g}), "
                "as it must be if no prediction uses later tokens."
            )
        else:
            parts.append(
                f"{way['title'].capitalize()}: {way['nats']:.4f} nats per token, {signed(gap['mean'])}"
                f"{plus_minus(gap['standard_error'])} against one parallel forward."
            )
    parts += [f"A {name} budget {why}." for name, why in found["missing"].items()]
    return " ".join(parts)
