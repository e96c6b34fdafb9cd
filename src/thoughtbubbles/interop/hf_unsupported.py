"""Validation of Hugging Face calls: unsupported arguments raise a ValueError that says what to do instead."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from thoughtbubbles.interop.hf_cache import ThoughtbubblesCache
from thoughtbubbles.model.budget import brief
from thoughtbubbles.model.config import FIXED_BUDGET, ModelConfig, is_number, is_whole
from thoughtbubbles.model.loss import IGNORED

UNUSED = {
    "position_ids": "positions follow from the attention mask, and forks have positions in between: leave it out",
    "inputs_embeds": "the model embeds ids itself: give input_ids",
    "output_attentions": "a model with forks attends over streams, not tokens: use trace= of model.core",
    "output_hidden_states": "a model with forks has streams, not tokens, in its layers: use trace= of model.core",
}

IDS = (torch.int64, torch.int32)
TENSORS = {
    "input_ids": "give a tensor of ids (batch, tokens), at least one of each",
    "attention_mask": "give a tensor (batch, tokens), 1 for tokens and 0 for padding; other masks are not supported",
    "labels": f"give a tensor of ids (batch, tokens), {IGNORED} where nothing is to be predicted",
}

CHECKPOINT_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "use_reentrant": lambda value: value is None or isinstance(value, bool),
    "preserve_rng_state": lambda value: isinstance(value, bool),
    "determinism_check": lambda value: value in ("default", "none"),
    "debug": lambda value: isinstance(value, bool),
    "early_stop": lambda value: isinstance(value, bool),
    "context_fn": callable,
}


def check_unsupported(unused: dict[str, Any]) -> None:
    for name, value in unused.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: {UNUSED.get(name, 'this model has no such input; leave it out')}")


def check_arguments(
    input_ids: Any,
    *,
    attention_mask: Any,
    labels: Any,
    past_key_values: Any,
    switches: Mapping[str, Any],
    logits_to_keep: Any,
    num_items: Any,
) -> None:
    """Checks types and shapes of arguments; the model itself checks the values inside tensors."""
    if input_ids is None:
        raise ValueError(f"input_ids is missing: {TENSORS['input_ids']}")
    for name, values in (("input_ids", input_ids), ("attention_mask", attention_mask), ("labels", labels)):
        if values is None:
            continue
        if not isinstance(values, Tensor):
            raise ValueError(f"{name} is a {type(values).__name__}: {TENSORS[name]}")
        if values.ndim != 2 or 0 in values.shape or (name != "attention_mask" and values.dtype not in IDS):
            raise ValueError(f"{name} of shape {tuple(values.shape)} and {values.dtype}: {TENSORS[name]}")
    if past_key_values is not None and not isinstance(past_key_values, ThoughtbubblesCache):
        raise ValueError(
            f"past_key_values is a {type(past_key_values).__name__}: streams need their own kind of cache; give what "
            "an earlier call returned, or ThoughtbubblesCache()"
        )
    for name, value in switches.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name} = {brief(value)}: give True or False, or leave it out")
    is_one = (
        num_items.numel() == 1 if isinstance(num_items, Tensor) else is_number(num_items) and 0 <= num_items < 2**63
    )
    if num_items is not None and not is_one:
        raise ValueError(f"num_items_in_batch = {brief(num_items)}: give the number of labels, or leave it out")
    if not is_columns(logits_to_keep, input_ids.shape[1]):
        raise ValueError(
            f"logits_to_keep = {brief(logits_to_keep)}: give the number of last columns, 0 for all, or a tensor of "
            f"column indices, from 0 to {input_ids.shape[1] - 1}"
        )


def is_columns(wanted: Any, n_columns: int) -> bool:
    """A number of last columns, or column indices; indices on a GPU are not checked, which would synchronise."""
    if not isinstance(wanted, Tensor):
        return is_whole(wanted) and wanted >= 0
    if wanted.ndim != 1 or wanted.dtype not in IDS:
        return False
    is_hidden = torch.compiler.is_compiling() or wanted.device.type != "cpu"
    return is_hidden or all(-n_columns <= column < n_columns for column in wanted.tolist())


def check_checkpointing(options: Mapping[str, Any]) -> None:
    """`gradient_checkpointing_kwargs` may have what torch's checkpoint takes, except one form that loses gradients."""
    for name, value in options.items():
        if name not in CHECKPOINT_OPTIONS:
            raise ValueError(
                f"gradient_checkpointing_kwargs has {name}: what can be set is {', '.join(CHECKPOINT_OPTIONS)}"
            )
        if not CHECKPOINT_OPTIONS[name](value):
            raise ValueError(
                f"gradient_checkpointing_kwargs has {name} = {value!r}: give another value, or leave it out"
            )
    if options.get("use_reentrant"):
        raise ValueError(
            "gradient_checkpointing_kwargs has use_reentrant = True: that form loses the gradients of tensors that "
            "blocks return in tuples; give use_reentrant=False, or leave it out"
        )


def check_device_map(device_map: Mapping[str, object]) -> None:
    devices = sorted({str(device) for device in device_map.values()})
    if len(devices) > 1 or devices == ["disk"]:
        raise ValueError(
            f"device_map has put parts of the model on {' and '.join(devices)}: the embedding is tied to the output, "
            "so the full model must be on one device; give device_map='cuda:0' or 'cpu', or a lower-precision dtype"
        )


def check_caching(config: ModelConfig, labels: Tensor | None) -> None:
    if torch.compiler.is_exporting():
        raise ValueError(
            "torch.export with a cache: the number of streams per token depends on the text, so an exported graph "
            "cannot hold them; export with use_cache=False"
        )
    if labels is not None:
        raise ValueError("labels with a cache: a loss needs gradients through the full row, so give use_cache=False")
    if config.fork_layers and config.budget_mode == "fixed":
        raise ValueError(
            f"{FIXED_BUDGET} cannot be cached: give use_cache=False, or load the model with budget_mode='proportional'"
        )


def check_guesses(config: Any, settings: GenerationConfig, options: Mapping[str, Any]) -> None:
    """Wrong guesses are removed from the cache, of the assistant too; forks that fell out of it would be missing."""
    assistant = options.get("assistant_model")
    lookup = options.get("prompt_lookup_num_tokens", getattr(settings, "prompt_lookup_num_tokens", None))
    if assistant is None and lookup is None:
        return
    for name, its in {"this model": config, "the assistant": getattr(assistant, "config", None)}.items():
        reach, has_forks = getattr(its, "fork_reach", None), bool(getattr(its, "fork_layers", ()))
        if reach and has_forks:
            raise ValueError(
                f"{'prompt_lookup_num_tokens' if assistant is None else 'assistant_model'}: {name} has fork_reach = "
                f"{reach}, so its cache forgets forks and cannot take back wrong guesses; leave it out"
            )


def check_length(block_size: int, settings: GenerationConfig, attention_mask: Tensor | None) -> None:
    """`max_length` is final here; without padding there may be no mask."""
    if attention_mask is not None:
        longest, new = int(attention_mask.sum(1).max()), settings.max_length - attention_mask.shape[1]
    elif settings.max_new_tokens is not None:
        longest, new = settings.max_length - settings.max_new_tokens, settings.max_new_tokens
    elif settings.max_length > block_size:
        raise ValueError(f"max_length = {settings.max_length}: give at most block_size = {block_size}")
    else:
        return
    if longest + new > block_size:
        if longest >= block_size:
            fits = settings.max_new_tokens is not None and new < block_size
            remedy = f"shorten the prompt to {block_size - new}" if fits else "shorten the prompt"
        elif settings.max_new_tokens is None:
            remedy = f"give max_length of at most {settings.max_length - (longest + new - block_size)}"
        else:
            remedy = f"ask for at most {block_size - longest}"
        raise ValueError(
            f"a prompt of {longest} and {new} new tokens are more than block_size = {block_size}, and there is no "
            f"sliding window: {remedy}"
        )


def check_labels(labels: Tensor, is_real: Tensor) -> None:
    """Rejects labels that nothing predicts but that `num_items_in_batch` counts: the mean would be too small."""
    if torch.compiler.is_compiling():
        return
    unpredicted = (labels[:, 1:] != IGNORED) & ~is_real[:, :-1]
    if bool(unpredicted.any()):
        row, column = (int(place) for place in unpredicted.nonzero()[0])
        raise ValueError(
            f"labels has {int(labels[row, column + 1])} in row {row}, column {column + 1}, right after padding: "
            "nothing predicts it, but num_items_in_batch counts it; pad on the right for training "
            "(tokenizer.padding_side = 'right'), with -100 as the label of padding, or give this label -100"
        )


def of_columns(name: str, values: Tensor, ids: Tensor) -> Tensor:
    if values.shape != ids.shape:
        raise ValueError(
            f"input_ids have shape {tuple(ids.shape)}, {name} {tuple(values.shape)}: give one number per id"
        )
    return values
