"""ModelConfig as Hugging Face keeps it: the same fields, with the few that its tools ask every model for."""

from dataclasses import asdict, fields
from typing import Any

from transformers import PreTrainedConfig

from thoughtbubbles.model.config import ModelConfig


class ThoughtbubblesConfig(PreTrainedConfig):
    """The fields of ModelConfig, checked as there. With none of them given: our 150m.

    n_ids      ids that mean something, those of the tokenizer; `generate` writes no others
    use_cache  whether `generate` reads through the cache, for the generation config to begin with; None: where that is
               exact, which is seen when it is asked, for fields may change
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
        if n_ids is not None and not 1 <= n_ids <= core.vocab_size:
            raise ValueError(f"n_ids = {n_ids}: give the tokenizer's size, from 1 to vocab_size = {core.vocab_size}")
        for name, value in asdict(core).items():
            setattr(self, name, value)
        if __name__.startswith("thoughtbubbles."):  # not the code beside the weights, which is what this would point to
            others.pop("auto_map", None)
        super().__init__(**{**others, "tie_word_embeddings": True})  # the output table is the embedding
        self.n_ids = n_ids
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id

    @classmethod
    def of(cls, config: ModelConfig, **others: Any) -> "ThoughtbubblesConfig":
        return cls(**asdict(config), **others)

    def core(self) -> ModelConfig:
        """Checked anew: any field may have been changed since."""
        return checked({field.name: getattr(self, field.name) for field in fields(ModelConfig)})


def checked(described: dict[str, Any]) -> ModelConfig:
    lists = {name: tuple(value) for name, value in described.items() if isinstance(value, list)}  # JSON has no tuples
    try:
        return ModelConfig(**{**described, **lists})
    except TypeError as error:
        raise ValueError(
            f"{described} does not describe a model ({error}): give at least n_layer, n_head, width"
        ) from None
