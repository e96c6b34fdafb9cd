"""A model behind the page: traces, attention and generation, with small caches in memory.

Nothing here is asynchronous: the app calls these methods in worker threads, one at a time for each model.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thoughtbubbles.analysis.trace import Trace, trace
from thoughtbubbles.checkpoint import find_model, load, load_tokenizer
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.files import SHIPPED, short_name
from thoughtbubbles.generate.requests import Request, Token, stream
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.generate.show import shown
from thoughtbubbles.model.transformer import Thoughtbubbles

TRACES = 24  # kept per model, about a megabyte each
MOST_ATTENTION = 1 << 30  # bytes of weights of all blocks and heads, in float32; kept until another view is asked for
GUESSES = 8  # most likely next tokens per token
ROUNDED = 6  # decimal places of attention weights


class View(NamedTuple):
    """What a trace depends on, within one model."""

    text: str
    budget: str | None = None
    selection: str | None = None


class Weights(NamedTuple):
    """Attention weights of one view of one model."""

    served: "Served"
    view: View
    blocks: list[Tensor]  # of each block: heads, streams, streams
    layers: list[int]  # the first block of each stage


class Kept:
    """The newest attention weights. All served models share one: a set for each model would be too large."""

    newest: Weights | None = None


class Served:
    """A loaded model with its tokenizer, under the name that the page shows."""

    def __init__(self, name: str, model: Thoughtbubbles, tokenizer: Tokenizer, *, kept: Kept | None = None):
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self._traces: OrderedDict[View, bytes] = OrderedDict()
        self._kept = kept or Kept()

    def described(self) -> dict[str, Any]:
        """For the page: what can be chosen, and the model's shape."""
        config = self.model.config
        forks = bool(config.fork_layers)
        both = ["causal", "block"] if config.budget_mode == "proportional" else ["block"]
        return {
            "name": self.name,
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            **{key: getattr(config, key) for key in ("n_layer", "n_head", "width", "vocab_size", "block_size")},
            "fork_layers": list(config.fork_layers),
            "copies": config.copies,
            "budget": float(config.budget) if forks else None,
            "max_budget": config.max_bubble if forks else None,
            "selection": config.selection if forks else None,
            "selections": both if forks else [],
            "tokenizer": self.tokenizer.name,
        }

    def trace(self, view: View) -> bytes:
        """The trace as JSON, and `truncated`: how many tokens at the end did not fit in the context length."""
        if view in self._traces:
            self._traces.move_to_end(view)
            return self._traces[view]
        found, cut = self._traced(view)
        body = json.dumps({**found.as_dict(), "truncated": cut}, ensure_ascii=False, allow_nan=False).encode()
        self._traces[view] = body
        if len(self._traces) > TRACES:
            self._traces.popitem(last=False)
        return body

    def _traced(self, view: View, *, attention: bool = False) -> tuple[Trace, int]:
        ids = self.tokenizer.encode(view.text)
        most = self.model.config.block_size
        return trace(
            self.model,
            view.text if len(ids) <= most else ids[:most],
            tokenizer=self.tokenizer,
            budget=view.budget,
            selection=view.selection,
            attention=attention,
            top=min(GUESSES, self.tokenizer.size),
        ), max(0, len(ids) - most)

    def attention(self, view: View, *, stage: int, stream: int, head: int | None = None) -> dict[str, Any]:
        """Where one stream attends in each block of its stage: weights of the streams up to it.

        head  one head's weights; None: the mean over all heads
        """
        _, _, weights, layers = self._weights(view)
        if stage >= len(layers):
            raise ValueError(f"stage = {stage}: this trace has stages from 0 to {len(layers) - 1}")
        if head is not None and head >= self.model.config.n_head:
            raise ValueError(f"head = {head}: this model has heads from 0 to {self.model.config.n_head - 1}")
        ends = [*layers[1:], len(weights)]
        blocks = range(layers[stage], ends[stage])
        if blocks and stream >= (n := weights[blocks[0]].shape[1]):
            raise ValueError(f"stream = {stream}: this stage has streams from 0 to {n - 1}")
        of_heads = [weights[block][:, stream, : stream + 1] for block in blocks]
        chosen = [each.mean(0) if head is None else each[head] for each in of_heads]
        rows = [[round(weight, ROUNDED) for weight in row.tolist()] for row in chosen]
        return {
            "head": head,
            "stage": stage,
            "stream": stream,
            "blocks": [{"block": block, "weights": row} for block, row in zip(blocks, rows, strict=True)],
        }

    def _weights(self, view: View) -> Weights:
        kept = self._kept.newest  # read once: another model's thread may replace it
        if kept is not None and kept.served is self and kept.view == view:
            return kept
        kept = self._kept.newest = None  # frees the old weights before the new ones are computed
        plain = json.loads(self.trace(view))
        layers = [stage["layer"] for stage in plain["stages"]]
        self._check_size([len(stage["streams"]) for stage in plain["stages"]], layers)
        found, _ = self._traced(view, attention=True)
        assert found.attention is not None
        # On the CPU these are views of padded tensors; a copy lets go of the padding.
        blocks = [weights.float().contiguous() for weights in found.attention]
        self._kept.newest = new = Weights(self, view, blocks, layers)
        return new

    def _check_size(self, streams: Sequence[int], layers: Sequence[int]) -> None:
        config = self.model.config
        ends = [*layers[1:], config.n_layer]
        blocks = [end - begin for begin, end in zip(layers, ends, strict=True)]
        size = 4 * config.n_head * sum(n * n * times for n, times in zip(streams, blocks, strict=True))
        if size > MOST_ATTENTION:
            raise ValueError(
                f"the attention weights of {streams[-1]:,} streams would need {size / 2**30:.1f} GiB: shorten the text "
                "or lower the budget"
            )

    def generate(self, prompt: str, *, max_new: int, budget: str | None, sampling: Sampling) -> Iterator[Token]:
        """Tokens as they are generated, by the model's own selection rule; as many as fit, at most `max_new`."""
        ids = self.tokenizer.encode(prompt) or [self.tokenizer.end_of_text]
        most = self.model.config.block_size
        if len(ids) >= most:
            raise ValueError(
                f"the text has {len(ids):,} tokens and fills the model's context length of {most:,}: shorten it first"
            )
        request = Request(prompt=ids, max_new=min(max_new, most - len(ids)), budget=budget, sampling=sampling)
        return stream(self.model, [request], tokenizer=self.tokenizer)

    def as_line(self, token: Token) -> dict[str, Any]:
        """One line of a generation. `streams` is the size of the bubble before the token, which predicted it."""
        return {
            "id": token.id,
            "token": shown(self.tokenizer, token.id),
            "text": token.text,
            "streams": token.streams,
            "log_prob": token.log_prob,
            "finish": token.finish,
        }


def open_models(checkpoints: Sequence[Path], *, device: str) -> list[Served]:
    """The models in these folders, or the model in the package; each gets a name of its own."""
    found: list[Served] = []
    kept = Kept()
    for checkpoint in checkpoints or (None,):
        folder = find_model(checkpoint)
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise ValueError(
                f"--checkpoint {short_name(folder)} has no tokenizer.json, which reading text needs: save the model "
                "with save_model(…, tokenizer=…)"
            )
        name = short_name(checkpoint.resolve().name if checkpoint else SHIPPED)
        same = sum(each.name.split(" #")[0] == name for each in found)
        model = load(folder, device=device, dtype=torch.float32).eval()
        found.append(Served(f"{name} #{same + 1}" if same else name, model, tokenizer, kept=kept))
    return found
