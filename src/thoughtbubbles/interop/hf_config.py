"""ModelConfig as a Hugging Face config: the same fields, and the few that its tools expect of every model."""

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch
from transformers import PreTrainedConfig

from thoughtbubbles.model.config import ModelConfig, is_whole

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST_LABELS = 10_000  # transformers creates a name for each


class ThoughtbubblesConfig(PreTrainedConfig):
    """The fields of ModelConfig, with the same validation. With none of them given: our 150m.

    n_ids      the number of ids of the tokenizer; `generate` produces no others
    use_cache  whether `generate` uses the cache, as the default of the generation config; None: if that is exact, which
               is decided at each call, since fields may change
    """

    model_type = "thoughtbubbles"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (these two have the library's own form)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "block_size",
    }

    def __init__(
        self,
        /,
        *,
        n_ids: int | None = None,
        use_cache: bool | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **others: Any,
    ):
        others = {self.attribute_map.get(name, name): value for name, value in others.items()}
        given = {field.name: others.pop(field.name) for field in fields(ModelConfig) if field.name in others}
        core = checked(given) if given else ModelConfig.named("150m")
        tokens = dict(zip(TOKENS, (bos_token_id, eos_token_id, pad_token_id), strict=True))
        check_others(type(self), others, n_ids=n_ids, use_cache=use_cache, tokens=tokens, vocab_size=core.vocab_size)
        for name, value in asdict(core).items():
            setattr(self, name, value)
        if __name__.startswith("thoughtbubbles."):  # the field points to the code next to the weights
            others.pop("auto_map", None)
        try:
            super().__init__(**{**others, "tie_word_embeddings": True})  # the output projection is the embedding
        except Exception as error:  # of any kind: these fields are not ours, and may come from a damaged file
            raise wrong("a field that transformers cannot read", f"({type(error).__name__}: {error})") from None
        self.n_ids = n_ids
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id

    @classmethod
    def of(cls, config: ModelConfig, **others: Any) -> "ThoughtbubblesConfig":
        return cls(**asdict(config), **others)

    def core(self) -> ModelConfig:
        """Validated again: any field may have changed since."""
        return checked({field.name: getattr(self, field.name) for field in fields(ModelConfig)})


def checked(described: dict[str, Any]) -> ModelConfig:
    lists = {name: tuple(value) for name, value in described.items() if isinstance(value, list)}  # JSON has no tuples
    try:
        return ModelConfig(**{**described, **lists})
    except TypeError as error:
        raise wrong(f"fields that do not describe a model ({error})", "give at least n_layer, n_head, width") from None


def check_others(
    kind: type[PreTrainedConfig],
    others: dict[str, Any],
    *,
    n_ids: Any,
    use_cache: Any,
    tokens: dict[str, Any],
    vocab_size: int,
) -> None:
    """Validates fields outside ModelConfig: ours, and those that would break transformers before it checks them."""
    if n_ids is not None and not (is_whole(n_ids) and 1 <= n_ids <= vocab_size):
        raise wrong(f"n_ids = {n_ids!r}", f"give the tokenizer's size, from 1 to vocab_size = {vocab_size}")
    if not (use_cache is None or isinstance(use_cache, bool)):
        raise wrong(f"use_cache = {use_cache!r}", "give True or False, or None: if a cache is exact")
    for name, value in tokens.items():
        several = value if isinstance(value, (list, tuple)) and name == "eos_token_id" else [value]
        if not all(one is None or (is_whole(one) and abs(one) < 2**31) for one in several):
            raise wrong(f"{name} = {value!r}", "give a token id, or None")
    kinds: dict[str, Callable[[Any], bool]] = {
        "num_labels": lambda value: is_whole(value) and 0 <= value <= MOST_LABELS,
        "quantization_config": lambda value: isinstance(value, dict) or hasattr(value, "to_dict"),
        "dtype": lambda value: isinstance(value, (str, torch.dtype)),
        "torch_dtype": lambda value: isinstance(value, (str, torch.dtype)),
    }
    for name, value in others.items():
        taken = getattr(kind, name, None)
        if name.startswith("__") or callable(taken) or isinstance(taken, dict) or name == "sub_configs":
            raise wrong(f"a field {name}", "it is part of the class and cannot be set")
        if name in kinds and value is not None and not kinds[name](value):
            raise wrong(f"{name} = {value!r}", "this is not a valid value; leave it out")


def wrong(what: str, remedy: str) -> ValueError:
    """An error of one line, however long a value in a damaged file is."""
    return ValueError(f"the config has {' '.join(what.split())[:300]}: {' '.join(remedy.split())[:300]}")
