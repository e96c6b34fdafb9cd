"""What can be audited: our models, causal language models of Hugging Face, and any function from ids to log_probs."""

import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thoughtbubbles.checkpoint import CONFIG, WANTED, find_model, load, load_tokenizer
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.files import SHIPPED, named, read_object, short_name
from thoughtbubbles.model.budget import BudgetLike
from thoughtbubbles.model.transformer import Thoughtbubbles

Predict = Callable[[Tensor], Tensor]  # ids (B, T) → log-probabilities of the next token (B, T, V)
Encode = Callable[[str], list[int]]
HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
INSTALL = "pip install 'thoughtbubbles[hf]'"


class Subject(NamedTuple):
    predict: Predict
    encode: Encode | None = None
    n_ids: int | None = None  # of the embedding; None: as many as there are predictions
    context: int | None = None  # tokens per row; None: any number
    dtype: torch.dtype | None = None  # None: that of the predictions
    module: nn.Module | None = None  # is put into evaluation mode
    selection: str | None = None
    budget: str | None = None


class Opened(NamedTuple):
    model: nn.Module
    tokenizer: Any  # ours, one of Hugging Face, or None
    name: str


def subject_of(
    model: Any, *, tokenizer: Any = None, selection: str | None = None, budget: BudgetLike | None = None
) -> Subject:
    """A loaded model or a function, with its settings."""
    core = getattr(model, "core", None)  # of our Hugging Face class
    if isinstance(core, Thoughtbubbles):
        model = core
    if isinstance(model, Thoughtbubbles):
        return _ours(model, tokenizer, selection, budget)
    for option, value in (("selection", selection), ("budget", budget)):
        if value is not None:
            raise ValueError(f"{option} = {value}: only Thoughtbubbles models have it; leave it out")
    if isinstance(model, nn.Module) and hasattr(model, "get_input_embeddings"):
        return _hugging_face(model, tokenizer)
    if not callable(model):
        raise ValueError(
            f"model is a {type(model).__name__}: give a model, its folder, or a function from ids (B, T) to "
            "log-probabilities (B, T, V)"
        )
    return Subject(model, _encoder(tokenizer))


def _ours(model: Thoughtbubbles, tokenizer: Any, selection: str | None, budget: BudgetLike | None) -> Subject:
    config = model.config
    options: dict[str, Any] = {"selection": selection, "budget": budget}
    if not config.fork_layers:
        for option, value in options.items():
            if value is not None:
                raise ValueError(f"{option} = {value}: this model has no fork layers; leave it out")
    if selection == "causal":
        options["budget_mode"] = "proportional"  # a fixed budget exists for block selection only
    weight = model.embedding.weight

    def predict(ids: Tensor) -> Tensor:
        found = model(ids.to(weight.device), want=("log_probs",), **options).log_probs
        assert found is not None
        return found

    return Subject(
        predict,
        _encoder(tokenizer),
        n_ids=config.vocab_size,
        context=config.block_size,
        dtype=weight.dtype,
        module=model,
        selection=(selection or config.selection) if config.chooses_forks else None,
        budget=str(config.budget if budget is None else budget) if config.fork_layers else None,
    )


def _hugging_face(model: Any, tokenizer: Any) -> Subject:
    embedding = model.get_input_embeddings().weight
    knows_cache = "use_cache" in inspect.signature(model.forward).parameters
    options = {"use_cache": False} if knows_cache else {}

    def predict(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids.to(embedding.device), **options).logits
        return logits.double().log_softmax(-1)

    context = getattr(model.config, "max_position_embeddings", None)
    return Subject(
        predict,
        _encoder(tokenizer),
        n_ids=embedding.shape[0],
        context=context if isinstance(context, int) and context > 0 else None,
        dtype=embedding.dtype,
        module=model,
    )


def _encoder(tokenizer: Any) -> Encode | None:
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return None if tokenizer is None else tokenizer.encode
    return lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False)


def open_model(checkpoint: str | Path | None, *, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Opened:
    """One of our models, or one that transformers' AutoModelForCausalLM opens; by default the model in the package."""
    if is_ours(checkpoint):
        if checkpoint is not None and HUB_NAME.fullmatch(str(checkpoint)) and _is_misspelt(path := Path(checkpoint)):
            raise ValueError(
                f"{path} does not exist: {WANTED}; for the model of this name on the Hub, call the command where there "
                f"is no folder {path.parent}"
            )
        folder = find_model(checkpoint)
        return Opened(
            load(folder, device=device, dtype=dtype), load_tokenizer(folder), short_name(checkpoint or SHIPPED)
        )
    return _open_hugging_face(str(checkpoint), device=device, dtype=dtype)


def is_ours(checkpoint: str | Path | None) -> bool:
    """Whether it is ours to open, or to reject: not a folder of another kind of model, nor the name of one online."""
    if checkpoint is None or str(checkpoint) == SHIPPED:
        return True
    path = Path(checkpoint)
    with named(path, "give the folder or the name of a model"):
        if (path / CONFIG).is_file():
            return read_object(path / CONFIG).get("model_type") == "thoughtbubbles"
        return path.exists() or _is_misspelt(path) or not HUB_NAME.fullmatch(str(checkpoint))


def _is_misspelt(path: Path) -> bool:
    """Whether it is more likely runs/NAME with a typing error than a name on the Hub."""
    return len(path.parts) > 1 and path.parent.is_dir() and not path.exists()


def _open_hugging_face(name: str, *, device: str, dtype: torch.dtype) -> Opened:
    shown = short_name(name)
    if find_spec("transformers") is None:
        raise ValueError(f"{shown} is not a Thoughtbubbles model, and to open others transformers is needed: {INSTALL}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:  # False, not None, with which it asks whether to run code that comes with the model
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # of any kind: files, network, and everything that a damaged model can raise
        why = short_name(" ".join(str(error).split()) or type(error).__name__)
        hint = "transformers' AutoModelForCausalLM cannot open it"
        if "trust_remote_code" in why:
            why = "it comes with code of its own, which audit does not run"
            hint = "open it yourself, and call thoughtbubbles.analysis.audit(model) in Python"
        raise ValueError(f"{shown} is not a Thoughtbubbles model: {hint} ({why})") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokenizer = tokenizer if tokenizer.encode("a text") else None  # an empty one if there are no files of it
    except Exception:  # likewise; the audit then uses random ids
        tokenizer = None
    return Opened(model.to(device).eval(), tokenizer, shown)
