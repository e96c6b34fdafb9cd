"""A trace: what a model does with one text, as one plain structure. Figures, pages and notebooks read nothing else.

A stage is a set of streams between two fork layers: stage 0 comes from the embedding, each later stage from a fork
layer. Every stream names its parent, a stream of the stage before, so lines of descent can be followed in both
directions. Example: "ab", where only b forks, at the one fork layer before block 3:

    stage 0, from block 0    a        b            score 1, one stream per token
    stage 1, from block 3    a   b'   b            b' is the fork of b: parent 1, place 1, position 1 − 1/2
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from thoughtbubbles.checkpoint import load, load_tokenizer
from thoughtbubbles.data.tokenizer import Tokenizer, whole_characters
from thoughtbubbles.model.budget import BudgetLike
from thoughtbubbles.model.fork import ForkRecord
from thoughtbubbles.model.streams import find_bubbles, positions
from thoughtbubbles.model.transformer import Output, Thoughtbubbles

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One stream in one stage; its bubble is all streams of the stage with the same token."""

    token: int
    place: int
    """In its bubble, counted from the right; 0 is the original."""
    position: float
    """The position that attention sees: token − place / bubble size (plus 1 in the authors' models)."""
    score: float
    """Cumulative, from 0 to 1."""
    weight: float
    """Share of the bubble's scores: the weight in a merge by score. With merge `forks` only forks have one, unless the
    original is alone."""
    parent: int | None
    """Index of a stream in the stage before; None in stage 0."""
    is_fork: bool
    """Whether it was forked from its parent at the beginning of this stage, and does not continue it."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A stream or fork that a fork layer dropped."""

    token: int
    parent: int
    is_fork: bool
    score: float


@dataclass(frozen=True, kw_only=True)
class Stage:
    layer: int
    """The first block that these streams pass through."""
    streams: tuple[Stream, ...]
    """Ordered by token; within a bubble from the left, the original last."""
    dropped: tuple[Candidate, ...]

    def bubble(self, token: int) -> list[Stream]:
        return [stream for stream in self.streams if stream.token == token]


@dataclass(frozen=True, kw_only=True)
class Guess:
    id: int
    text: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Token:
    id: int
    text: str
    """Part of a character is shown as a replacement character."""
    begin: int
    """First byte in the UTF-8 form of the text; of ids that cut a character, in their joined bytes."""
    end: int
    streams: tuple[int, ...]
    """Size of its bubble in each stage."""
    loss: float | None
    """Nats, predicted from the tokens before it; None for the first one."""
    entropy: float
    """Nats, of the prediction of the next token."""
    top: tuple[Guess, ...]
    """The most likely next tokens."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    text: str
    settings: dict[str, Any]
    """The model's shape, and the budget and selection of this trace."""
    tokens: tuple[Token, ...]
    stages: tuple[Stage, ...]
    attention: tuple[Float[Tensor, "N _ _"], ...] | None = field(default=None, repr=False, compare=False)
    """With attention=True, the weights of each block, from stream (row) to stream. Not in the JSON."""

    @property
    def loss(self) -> float | None:
        """Mean nats per token; None for a single token."""
        losses = [token.loss for token in self.tokens if token.loss is not None]
        return math.fsum(losses) / len(losses) if losses else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        fields = ("text", "settings", "tokens", "stages")
        return {"version": VERSION, "loss": self.loss} | {name: _plain(getattr(self, name)) for name in fields}

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), ensure_ascii=False)


def trace(
    model: Thoughtbubbles | str | Path | None,
    text: str | Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    budget: BudgetLike | None = None,
    selection: str | None = None,
    attention: bool = False,
    top: int = 5,
) -> Trace:
    """Runs a text through a model in one forward, and returns everything about its tokens and streams.

    model      a loaded model, its folder or run, or None for the model in the package
    text       a text, or the ids of its tokens
    tokenizer  of a loaded model: `load_tokenizer(DIR)`; a folder has its own
    budget     streams per token, instead of the model's own
    selection  "causal" or "block", instead of the model's own
    attention  also keep the attention weights of every block; slow, and large: streams² per head and block
    top        how many most likely next tokens to keep for each token
    """
    if not isinstance(model, Thoughtbubbles):
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        model = load(model, dtype=torch.float32)
    if tokenizer is None:
        raise ValueError("tokenizer is missing: pass tokenizer=load_tokenizer(DIR), or the model's folder as model")
    ids = tokenizer.encode(text) if isinstance(text, str) else [int(token) for token in text]
    config = model.config
    if not ids:
        raise ValueError("text is empty: give at least one token")
    if len(ids) > config.block_size:
        raise ValueError(f"text has {len(ids):,} tokens, more than the model's context length, {config.block_size:,}")
    if not 0 <= top <= tokenizer.size:
        raise ValueError(f"top = {top}: give a number from 0 to {tokenizer.size:,}")
    row = torch.tensor([ids], device=model.embedding.weight.device)
    options: dict[str, Any] = {"budget": budget, "selection": selection, "trace": "attention" if attention else True}
    with torch.no_grad():
        out = model(row, want=("log_probs",), **options)
    stages = _stages(model, out, len(ids))
    return Trace(
        text=whole_characters(text) if isinstance(text, str) else _decode(tokenizer, ids),
        settings={
            **{name: getattr(config, name) for name in ("n_layer", "n_head", "width", "fork_layers", "copies")},
            **{name: getattr(config, name) for name in ("vocab_size", "block_size", "merge", "fork_reach", "feedback")},
            "budget": (config.budget if budget is None else budget) if config.chooses_forks else None,
            "selection": (selection or config.selection) if config.chooses_forks else None,
            "tokenizer": tokenizer.name,
        },
        tokens=_tokens(ids, out, stages, tokenizer, top=top),
        stages=stages,
        attention=_attention(out, stages, config.n_layer) if attention else None,
    )


def _stages(model: Thoughtbubbles, out: Output, n_tokens: int) -> tuple[Stage, ...]:
    """Stage 0, and one per fork layer; a fork layer before block 0 leaves stage 0 without blocks."""
    first = model.config.form.first_position
    token = torch.arange(n_tokens).repeat_interleave(model.config.copies)[None]
    log_score = torch.zeros_like(token, dtype=torch.float64)
    none, by = torch.full_like(token, -1), {"only_forks": model.config.merge == "forks"}
    found = [Stage(layer=0, streams=_streams(token, log_score, none, none == 0, n_tokens, first, **by), dropped=())]
    assert out.forks is not None
    for record in out.forks:
        on_cpu = ForkRecord._make(part.cpu() if isinstance(part, Tensor) else part for part in record)
        n_used = int((on_cpu.token[0] < n_tokens).sum())
        token, parent, is_fork = (part[:, :n_used] for part in (on_cpu.token, on_cpu.parent, on_cpu.is_fork))
        log_score = on_cpu.log_score.gather(1, 2 * parent + ~is_fork).double()
        streams = _streams(token, log_score, parent, is_fork, n_tokens, first, **by)
        found.append(Stage(layer=record.layer, streams=streams, dropped=_dropped(on_cpu, found[-1])))
    return tuple(found)


def _streams(
    token: Tensor, log_score: Tensor, parent: Tensor, is_fork: Tensor, n_tokens: int, first: int, *, only_forks: bool
) -> tuple[Stream, ...]:
    bubbles = find_bubbles(token, n_tokens)
    place = bubbles.end - torch.arange(token.shape[1])
    position = positions(token, bubbles, torch.float64) + first
    score = log_score.exp()
    if only_forks:
        log_score = log_score.masked_fill((place == 0) & (bubbles.size > 1), -math.inf)
    highest = torch.full((1, n_tokens), -math.inf, dtype=torch.float64).scatter_reduce(1, token, log_score, "amax")
    relative = (log_score - highest.gather(1, token)).exp()  # scores may underflow, so they are never divided
    weight = relative / torch.zeros_like(highest).scatter_add(1, token, relative).gather(1, token)
    columns = (part[0].tolist() for part in (token, place, position, score, weight, parent, is_fork))
    return tuple(
        Stream(token=t, place=p, position=x, score=s, weight=w, parent=None if up < 0 else up, is_fork=fork)
        for t, p, x, s, w, up, fork in zip(*columns, strict=True)
    )


def _dropped(record: ForkRecord, before: Stage) -> tuple[Candidate, ...]:
    """The candidates of real streams that were not selected."""
    selected, score = record.selected[0].tolist(), record.log_score[0].double().exp().tolist()
    return tuple(
        Candidate(token=stream.token, parent=parent, is_fork=is_fork, score=score[2 * parent + (not is_fork)])
        for parent, stream in enumerate(before.streams)
        for is_fork in (True, False)
        if not selected[2 * parent + (not is_fork)]
    )


def _tokens(
    ids: list[int], out: Output, stages: Sequence[Stage], tokenizer: Tokenizer, *, top: int
) -> tuple[Token, ...]:
    assert out.log_probs is not None
    log_probs = out.log_probs[0].double().cpu()
    if bool(log_probs.isnan().any()):
        raise ValueError("the model predicts NaN: its weights are damaged, or too large for their dtype")
    entropy = -(log_probs.exp() * log_probs).nan_to_num().sum(-1)  # 0 · −inf is 0
    after = torch.tensor(ids[1:])
    losses = [None, *(-log_probs[:-1].gather(1, after[:, None])[:, 0]).tolist()]
    best = log_probs[:, : tokenizer.size].topk(top)
    sizes = [[0] * len(stages) for _ in ids]
    for index, stage in enumerate(stages):
        for stream in stage.streams:
            sizes[stream.token][index] += 1
    ends, found = 0, []
    for t, (token, loss) in enumerate(zip(ids, losses, strict=True)):
        begin, ends = ends, ends + (0 if token == tokenizer.end_of_text else len(tokenizer.token_bytes(token)))
        guesses = zip(best.indices[t].tolist(), best.values[t].exp().tolist(), strict=True)
        found.append(
            Token(
                id=token,
                text=_decode(tokenizer, [token]),
                begin=begin,
                end=ends,
                streams=tuple(sizes[t]),
                loss=loss,
                entropy=float(entropy[t]),
                top=tuple(Guess(id=i, text=_decode(tokenizer, [i]), probability=p) for i, p in guesses),
            )
        )
    return tuple(found)


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """End-of-text has no text."""
    return tokenizer.decode([token for token in ids if token != tokenizer.end_of_text])


def _attention(out: Output, stages: Sequence[Stage], n_layer: int) -> tuple[Tensor, ...]:
    """Without the unused slots, which are at the right end."""
    assert out.attention is not None
    found = []
    for block in range(n_layer):
        n = len(stage_of(stages, block).streams)
        found.append(out.attention[block][0, :, :n, :n].cpu())
    return tuple(found)


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, dict) or is_dataclass(value):
        return {name: _plain(each) for name, each in (value if isinstance(value, dict) else vars(value)).items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)  # a Fraction as budget


def stage_of(stages: Sequence[Stage], block: int) -> Stage:
    """The stage whose streams pass through a block."""
    return next(stage for stage in reversed(stages) if stage.layer <= block)
