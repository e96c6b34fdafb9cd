"""ThoughtbubblesForCausalLM: the model with Hugging Face's interface. It computes nothing itself.

Its child modules are those of the core, with the same names, so both read the same file of weights. This wrapper turns
padding on either side into rows with lengths, labels into targets, and `past_key_values` into our cache.
"""

import copy
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from thoughtbubbles.interop.hf_cache import ThoughtbubblesCache
from thoughtbubbles.interop.hf_config import ThoughtbubblesConfig
from thoughtbubbles.interop.hf_padding import Padding
from thoughtbubbles.interop.hf_unsupported import (
    check_arguments,
    check_caching,
    check_checkpointing,
    check_device_map,
    check_guesses,
    check_labels,
    check_length,
    check_unsupported,
    of_columns,
)
from thoughtbubbles.model.budget import Budget, BudgetLike
from thoughtbubbles.model.initial import has_numbers
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.transformer import Thoughtbubbles

IN_PACKAGE = __name__.startswith("thoughtbubbles.")  # not in the code next to the weights, which has no manifests
OUTPUTS = ("output_attentions", "output_hidden_states")  # outputs that a config may request in every call


class ThoughtbubblesForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ThoughtbubblesConfig
    config: ThoughtbubblesConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # `num_items_in_batch`
    _input_embed_layer = "embedding"
    _no_split_modules = ("Block", "ForkLayer")

    def __init__(self, config: ThoughtbubblesConfig):
        super().__init__(config)
        core = Thoughtbubbles(config.core())
        self._modules.update(core._modules)
        core._modules = self._modules  # one shared dictionary: a child replaced here is replaced there too
        self.__dict__["_core"] = core  # not a child of this module: its weights are here already
        self._is_drawn = has_numbers(self.embedding.weight)
        self.post_init()

    @property
    def core(self) -> Thoughtbubbles:
        """The model itself, over this module's children."""
        core: Thoughtbubbles = self.__dict__["_core"]
        if core._modules is not self._modules:  # a replica of this module on another device
            original, core = core, Thoughtbubbles.__new__(Thoughtbubbles)
            core.__dict__.update({**original.__dict__, "_modules": self._modules})
        core.training = self.training
        return core

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a folder with a manifest is checked against it first."""
        folder = os.path.join(pretrained_model_name_or_path or "", kwargs.get("subfolder") or "")
        if IN_PACKAGE and os.path.isdir(folder):  # never an OSError
            from thoughtbubbles.checkpoint import check_manifest

            check_manifest(Path(folder))
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers; overwriting an export removes its manifest, which describes other weights."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if IN_PACKAGE:
            from thoughtbubbles.checkpoint import drop_manifest

            drop_manifest(Path(save_directory))

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """The core has drawn its weights, unless a file is loaded: what that lacks, such as forks, is drawn here."""
        missing = {name: p for name, p in self.named_parameters() if not getattr(p, "_is_hf_initialized", False)}
        if missing and not self._is_drawn:
            drawn = dict(Thoughtbubbles(self.core.config).named_parameters())
            for name, parameter in missing.items():
                parameter.copy_(drawn[name])

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        resized = super().resize_token_embeddings(*args, **kwargs)
        self.core.config = self.config.core()
        if self.config.n_ids is not None:
            wanted = args[0] if args else kwargs.get("new_num_tokens")  # rows beyond it, if any, are padding
            self.config.n_ids = min(wanted or self.config.n_ids, self.config.vocab_size)
        return resized

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **others: Any
    ) -> None:
        """Activation checkpointing: blocks are recomputed in the backward, for less memory."""
        if wrong := {name: value for name, value in others.items() if value not in (1, False, None)}:
            raise ValueError(f"{wrong}: every block is recomputed, on its own device; leave this out")
        check_checkpointing(gradient_checkpointing_kwargs or {})
        options = {"preserve_rng_state": False, **(gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        self.gradient_checkpointing_disable()
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, **options)

    def gradient_checkpointing_disable(self) -> None:
        for block in self.blocks:
            block.__dict__.pop("forward", None)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any("forward" in block.__dict__ for block in self.blocks)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ThoughtbubblesCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        budget: BudgetLike | Budget | None = None,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Predicts the next token at every position.

        attention_mask      1 for tokens, 0 for padding on either side; without it everything is a token
        past_key_values     what has been read before, as returned by an earlier call
        labels              the ids again, −100 to ignore one; the output then has `loss`. In training it then has no
                            logits: the loss does not need them, and they would take most of the memory
        use_cache           also return `past_key_values`. By default if they were given; else as the config says, if
                            a cache is exact, outside training and without labels
        logits_to_keep      logits only of this many last columns, or of these columns; 0: of all
        num_items_in_batch  divisor of the summed loss, in place of the number of labels in this batch
        budget              streams per token, overrides the config: one number, or one per row
        """
        check_unsupported({name: getattr(self.config, name, None) for name in OUTPUTS} | unused)
        check_device_map(getattr(self, "hf_device_map", {}))
        check_arguments(
            input_ids,
            attention_mask=attention_mask,
            labels=labels,
            past_key_values=past_key_values,
            switches={"use_cache": use_cache, "return_dict": return_dict},
            logits_to_keep=logits_to_keep,
            num_items=num_items_in_batch,
        )
        assert input_ids is not None
        if use_cache or (use_cache is None and past_key_values is not None):
            out = self._cached(input_ids, attention_mask, past_key_values, labels, logits_to_keep, budget)
        else:
            if past_key_values is not None and past_key_values.get_seq_length() > 0:
                raise ValueError("use_cache=False with past_key_values that have been read: leave one of them out")
            padding = padding_of(attention_mask, input_ids)
            out = self._parallel(input_ids, padding, labels, logits_to_keep, num_items_in_batch, budget=budget)
            if use_cache is None and labels is None and self._caches_unasked():
                out.past_key_values = ThoughtbubblesCache()
                out.past_key_values.hold(self.core, input_ids, padding, budget)
        wanted = self.config.return_dict if return_dict is None else return_dict
        return out if wanted else out.to_tuple()

    def _caches_unasked(self) -> bool:
        """Whether to return a cache by default: outside training, if it is exact and an object can be returned."""
        returns_tensors_only = torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        is_replica = getattr(self, "_is_replica", False)  # of DataParallel, which gathers the outputs of its replicas
        wanted = self.config.use_cache is not False and self.core.config.is_causal
        return wanted and not (self.training or returns_tensors_only or is_replica)

    def _parallel(
        self,
        ids: Tensor,
        padding: Padding | None,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        num_items: int | Tensor | None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        targets = None if labels is None else F.pad(of_columns("labels", labels, ids), (0, 1), value=IGNORED)[:, 1:]
        if labels is not None and padding is not None and num_items is not None and self.training:
            check_labels(labels, padding.is_real)
        last_only = isinstance(logits_to_keep, int) and logits_to_keep == 1 and ends_in_tokens(padding)
        want = () if self.training and labels is not None else ("next_logits" if last_only else "logits",)
        out = self.core(
            ids if padding is None else padding.to_rows(ids),
            targets=targets if padding is None or targets is None else padding.to_rows(targets),
            lengths=None if padding is None else padding.lengths,
            want=want,
            **options,
        )
        loss, logits = out.loss, out.logits
        if loss is not None and num_items is not None:
            assert targets is not None
            counts = targets != IGNORED if padding is None else (targets != IGNORED) & padding.is_real
            loss = loss * counts.sum() / torch.as_tensor(num_items, device=loss.device)
        if last_only:
            return CausalLMOutputWithPast(loss=loss, logits=None if not want else out.next_logits[:, None])
        if logits is not None:
            logits = kept(logits if padding is None else padding.to_columns(logits), logits_to_keep)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _cached(
        self,
        ids: Tensor,
        attention_mask: Tensor | None,
        cache: ThoughtbubblesCache | None,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        budget: BudgetLike | Budget | None,
    ) -> CausalLMOutputWithPast:
        cache = ThoughtbubblesCache() if cache is None else cache
        check_caching(self.core.config, labels)
        past = cache.get_seq_length()
        if attention_mask is not None and past > 0 and attention_mask.shape[1] == past + ids.shape[1]:
            Padding.of(attention_mask)  # checks for holes, also in the past
            attention_mask = attention_mask[:, -ids.shape[1] :]
        padding = padding_of(attention_mask, ids)
        last_enough = isinstance(logits_to_keep, int) and logits_to_keep == 1 and ends_in_tokens(padding)
        if cache.is_initialized or has_empty_row(padding) or (last_enough and not torch.is_grad_enabled()):
            logits = cache.read(self.core, ids, padding, budget)
            logits = kept(logits, logits_to_keep) if logits.ndim == 3 else logits[:, None]
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        # Reading into the cache gives only the last token's logits, without gradients.
        rule = {"selection": "causal", "budget_mode": "proportional", "budget": budget}
        out = self._parallel(ids, padding, None, logits_to_keep, None, **rule)
        cache.hold(self.core, ids, padding, budget)
        out.past_key_values = cache
        return out

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: list[LogitsProcessor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, with `budget=` for the streams per token. Uses the cache where that is exact.

        With block selection, `use_cache=True` uses the causal rule instead: an approximation.
        """
        check_guesses(self.core.config, generation_config or self.generation_config, kwargs)
        n_ids = self.config.n_ids
        if n_ids is not None and n_ids < self.config.vocab_size:
            logits_processor = LogitsProcessorList([*(logits_processor or ()), KnownIds(n_ids)])
        said = (
            kwargs.get("use_cache"),
            getattr(generation_config, "use_cache", None),
            self.generation_config.use_cache,
        )
        if all(value is None for value in said):  # the library's default would be True
            if generation_config is None:
                kwargs["use_cache"] = self.core.config.is_causal
            else:
                generation_config = copy.copy(generation_config)
                generation_config.use_cache = self.core.config.is_causal
        return super().generate(inputs, generation_config, logits_processor, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        if kwargs.get("is_first_iteration") and attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ValueError(
                "a row ends with padding, so new tokens would not follow its text: pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        for name in ("tokenizer", "assistant_tokenizer"):  # stop strings need them, the model does not
            kwargs.pop(name, None)
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, *args, attention_mask=attention_mask, **kwargs
        )
        return inputs

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Several completions per prompt, each with its prompt's budget."""
        if expand_size > 1 and isinstance(budget := kwargs.get("budget"), (list, tuple)):
            rows = [f"{n}/{d}" for n, d in zip(*Budget.of(budget), strict=True)]
            kwargs["budget"] = rows if len(rows) == 1 else [row for row in rows for _ in range(expand_size)]
        expanded: tuple[Tensor, dict[str, Any]] = super()._expand_inputs_for_generation(expand_size, **kwargs)
        return expanded

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Called by `generate` to create the cache."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation = {kind!r}: streams need their own kind of cache; leave it out")
        check_length(self.config.block_size, generation_config, model_kwargs.get("attention_mask"))
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = ThoughtbubblesCache(max_cache_length)


class KnownIds(LogitsProcessor):
    """Only the tokenizer's ids are generated, not the padding of the vocabulary."""

    def __init__(self, n_ids: int):
        self.n_ids = n_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(self.n_ids, scores.shape[1], device=scores.device), -math.inf)


def padding_of(attention_mask: Tensor | None, ids: Tensor) -> Padding | None:
    return None if attention_mask is None else Padding.of(of_columns("attention_mask", attention_mask, ids))


def has_empty_row(padding: Padding | None) -> bool:
    return padding is not None and not torch.compiler.is_compiling() and not bool((padding.lengths > 0).all())


def ends_in_tokens(padding: Padding | None) -> bool:
    return padding is None or bool(padding.is_real[:, -1].all())


def kept(logits: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Logits of the last columns (0: all), or of columns by index."""
    if isinstance(logits_to_keep, int):
        return logits[:, -min(logits_to_keep, logits.shape[1]) :]
    return logits[:, logits_to_keep]
