"""Thoughtbubbles: embed → [fork] block … → merge → head. One class for plain GPT, copy-N and bubbles.

ids (B,T) → embedding → Streams: x (B,S=T,D), log score 0, token 0 … T−1          (copy-N starts with S = N·T)
  each layer:  [fork: scores (B,S,2) → candidates (B,2S) → select under the budget → gather]
               attention at real-valued positions, attenuated by the key's score; attention and MLP updates × score
  [feedback: originals through all layers first, then forks]
Streams → merge per bubble → (B,T) predictions
"""

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from thoughtbubbles.model import head, inputs
from thoughtbubbles.model.attention import PATHS, AttentionPath, recording_attention
from thoughtbubbles.model.block import Block, Residual
from thoughtbubbles.model.budget import Budget, BudgetLike
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.feedback import Steps, among_all_streams, originals_first
from thoughtbubbles.model.fork import ForkLayer, ForkRecord, ScoreHead
from thoughtbubbles.model.initial import SkipInit, draw_normal, has_numbers
from thoughtbubbles.model.layout import Layout, find_layout
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.streams import Streams, accumulation_dtype


class Output(NamedTuple):
    """Outputs of a forward pass; None if not requested. Values past the length of a padded row are meaningless."""

    streams: Streams  # after the last block, before the final norm
    loss: Float[Tensor, ""] | None = None  # mean over all targets of the batch that are not ignored
    log_probs: Float[Tensor, "B T V"] | None = None
    logits: Float[Tensor, "B T V"] | None = None  # with merge="mixture": its log-probabilities
    next_logits: Float[Tensor, "B V"] | None = None  # of each row's last token only
    token_nll: Float[Tensor, "B T"] | None = None  # 0 where the target is ignored
    forks: tuple[ForkRecord, ...] | None = None  # trace=True: one per fork layer
    attention: tuple[Float[Tensor, "B N S S"], ...] | None = None  # trace="attention": one per block


class Thoughtbubbles(nn.Module):
    feedback_steps = Steps()
    stream_dtype: torch.dtype | None = None  # of the residual between blocks; None: the dtype of the weights

    def __init__(self, config: ModelConfig, *, attention: Literal["fused", "reference"] = "fused"):
        """`attention` selects one of two implementations of the same function, so it is not part of the config."""
        super().__init__()
        if attention not in PATHS:
            raise ValueError(f"attention = {attention!r}: choose one of {tuple(PATHS)}")
        self.config = config
        self.attention = attention
        with SkipInit():
            self.embedding = nn.Embedding(config.vocab_size, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.forks = nn.ModuleDict(
                {
                    str(layer): ForkLayer(
                        config.width,
                        score_bias=config.score_bias,
                        score_noise=config.score_noise,
                        levels=config.form.levels,
                        scores=config.scores,
                        own_scores=config.own_scores,
                        feedback=config.feedback,
                    )
                    for layer in config.fork_layers
                }
            )
            self.final_norm = nn.LayerNorm(config.width)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """
        | tensor                                         | initial value                             |
        | ---------------------------------------------- | ----------------------------------------- |
        | embedding (tied to the output projection)      | N(0, 0.02)                                |
        | attention.qkv, attention.gate (if any), mlp.up | N(0, 0.02)                                |
        | attention.out, mlp.down, forks.*.feedback (if  | N(0, 0.02 / √(2 · n_layer))               |
        | any): into the residual                        |                                           |
        | biases                                         | 0                                         |
        | norms                                          | weight 1, bias (if any) 0                 |
        | forks.*.score                                  | N(0, 0.02), bias (if any) `score_bias`    |
        | forks.*.embedding                              | N(0, 1) / √D                              |
        """
        if not has_numbers(self.embedding.weight):
            return
        into_residual = 0.02 / math.sqrt(2 * self.config.n_layer)
        deviations = {"embedding.weight": 0.02}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                deviations[f"{name}.weight"] = into_residual if name.endswith((".out", ".down", ".feedback")) else 0.02
                nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.reset_parameters()
            elif isinstance(module, ScoreHead):
                deviations[f"{name}.weight"] = 0.02
                if module.bias is not None:
                    nn.init.constant_(module.bias, module.initial_bias or 0.0)
            elif isinstance(module, ForkLayer):
                deviations[f"{name}.embedding"] = 1 / math.sqrt(self.config.width)
        draw_normal({name: (self.get_parameter(name), deviation) for name, deviation in deviations.items()})

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        targets: Int[Tensor, "B T"] | None = None,
        lengths: Int[Tensor, "B"] | Sequence[int] | None = None,
        budget: BudgetLike | Budget | None = None,
        selection: str | None = None,
        budget_mode: str | None = None,
        want: Collection[str] = (),
        trace: bool | str = False,
    ) -> Output:
        """Predicts the next token at every position of `ids` (B, T).

        targets    the tokens to predict, −100 to ignore one; the output then has `loss`
        lengths    real tokens per row, if rows are padded on the right; padding does not change a row's results
        budget     streams per token, overrides the config: one number, or one per row
        selection  "causal" or "block", overrides the config
        budget_mode
                   "proportional" or "fixed", overrides the config; fixed requires block selection
        want       any of "log_probs", "logits", "next_logits", "token_nll"
        trace      True records every fork layer; "attention" also records attention weights (slow: reference path)

        The values of ids, targets and lengths are validated on the CPU, and on a GPU except in training; torch.compile
        skips these checks.
        """
        given = inputs.check(
            self.config,
            ids,
            targets=targets,
            lengths=lengths,
            budget=budget,
            selection=selection,
            budget_mode=budget_mode,
            want=want,
            trace=trace,
            training=self.training,
        )
        return self.run(given, want=want, trace=trace)

    def run(self, given: inputs.Inputs, *, want: Collection[str] = (), trace: bool | str = False) -> Output:
        """`forward` after input validation."""
        attention: list[Tensor] = []
        path = recording_attention(attention) if trace == "attention" else PATHS[self.attention]
        streams, forks = self.run_layers(given, path)
        n_tokens, targets, table = given.ids.shape[1], given.targets, self.embedding.weight
        logits = loss = nll = None
        if "logits" in want or "log_probs" in want:
            logits = head.logits(self.rows_to_decode(streams, n_tokens), table)
        if targets is not None and "token_nll" in want:
            nll = head.token_nll(self.rows_to_decode(streams, n_tokens), table, targets)
            loss = nll.sum() / (targets != IGNORED).sum().clamp(min=1)
        elif targets is not None:
            loss = self.mean_nll(streams, targets)
        return Output(
            streams,
            loss=loss,
            # The logits of a mixture are already normalised; normalising them again changes nothing.
            log_probs=logits.log_softmax(-1) if logits is not None and "log_probs" in want else None,
            logits=logits if "logits" in want else None,
            next_logits=self.next_logits(streams, given.lengths, n_tokens) if "next_logits" in want else None,
            token_nll=nll,
            forks=forks if trace else None,
            attention=self.of_all_streams(attention, streams) or None,
        )

    def run_layers(
        self, given: inputs.Inputs, path: AttentionPath, path_of_forks: AttentionPath | None = None
    ) -> tuple[Streams, tuple[ForkRecord, ...]]:
        """`path_of_forks`: only with `feedback`, where they go through the blocks after the originals."""
        n_tokens, of_forks = given.ids.shape[1], path_of_forks if path_of_forks and self.config.feedback else path
        streams = self.embed(given)
        layout = self.layout(streams, n_tokens, has_forked=False)
        residual, forks = Residual(streams.x), []
        for layer, block in enumerate(self.blocks):
            if layer in self.config.fork_layers:
                streams = self.apply_update(streams, residual, layout)
                streams, record = self.forks[str(layer)](streams, given.lengths, n_tokens=n_tokens, rule=given.rule)
                layout, residual = self.layout(streams, n_tokens), Residual(streams.x)
                forks.append(ForkRecord(*record[:-1], layer))  # type: ignore[call-arg]
                if self.config.feedback:
                    # A token has at most one; under a fixed budget a short row has as many streams as a full one.
                    n_slots = streams.token.shape[1]
                    n_forks = n_slots - n_tokens if given.rule.fixed_tokens is None else n_slots // 2
                    sizes = {"n_tokens": n_tokens, "n_forks": n_forks}
                    return originals_first(self, layer, streams, layout, path, of_forks, **sizes), tuple(forks)
                if layout.reach is not None and not cast(Block, block).attention.takes_kernel(streams.x, path):
                    layout = layout._replace(visible=layout.reach.visible())  # once for all blocks
            residual = block(residual, layout, path)
        return self.apply_update(streams, residual, layout), tuple(forks)

    def of_all_streams(self, attention: Sequence[Tensor], streams: Streams) -> tuple[Tensor, ...]:
        """Recorded weights, for each block: with `feedback`, those of originals come before those of forks."""
        n_layer, of_forks = self.config.n_layer, attention[self.config.n_layer :]
        n_before = n_layer - len(of_forks)
        parts = zip(attention[n_before:n_layer], of_forks, strict=True)
        return (*attention[:n_before], *(among_all_streams(*part, streams.token) for part in parts))

    def layout(self, streams: Streams, n_tokens: int, *, has_forked: bool = True) -> Layout:
        return find_layout(streams, self.config, n_tokens=n_tokens, has_forked=has_forked)

    def apply_update(self, streams: Streams, residual: Residual, layout: Layout) -> Streams:
        """The streams after the last block, with its pending update added."""
        return Streams(residual.total(layout.gate), streams.log_score, streams.token)

    def rows_to_decode(self, streams: Streams, n_tokens: int) -> head.OutputRows:
        return head.rows_to_decode(
            streams,
            self.config.merge,
            self.final_norm,
            n_tokens=n_tokens,
            max_bubble=self.config.max_bubble,
            residual_sum=self.config.form.residual_sum,
            scores=self.config.scores,
        )

    def mean_nll(self, streams: Streams, targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """The training loss."""
        return head.mean_nll(self.rows_to_decode(streams, targets.shape[1]), self.embedding.weight, targets)

    def next_logits(self, streams: Streams, lengths: Int[Tensor, "B"], n_tokens: int) -> Float[Tensor, "B V"]:
        bubbles = head.last_bubbles(streams, lengths, n_tokens=n_tokens, max_bubble=self.config.max_bubble)
        return head.logits(self.rows_to_decode(bubbles, 1), self.embedding.weight)[:, 0]

    def embed(self, given: inputs.Inputs) -> Streams:
        n_tokens, copies = given.ids.shape[1], self.config.copies
        token = torch.arange(n_tokens, device=given.ids.device)
        token = torch.where(token < given.lengths[:, None], token, n_tokens)
        x = self.embedding(given.ids)
        x = x if self.stream_dtype is None else x.to(self.stream_dtype)
        if copies > 1:
            x, token = x.repeat_interleave(copies, dim=1), token.repeat_interleave(copies, dim=1)
        return Streams(x, torch.zeros_like(token, dtype=accumulation_dtype(x.dtype)), token)
