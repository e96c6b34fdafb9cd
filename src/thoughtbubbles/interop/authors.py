"""Imports weights of the authors' JAX code (github.com/Jemoka/fork-xla, MIT): their names and layout, and ours.

Their parameters are a tree of arrays, here with names joined by slashes. V vocabulary, D width, i the block:

    wte                                  (V, D)        embedding.weight                  also the output projection
    blocks_i/ln_1/weight, bias           (D,)          blocks.i.attention_norm
    blocks_i/attn/c_attn/kernel, bias    (D, 3D)       blocks.i.attention.qkv            q, k, v; heads contiguous
    blocks_i/attn/c_proj/kernel, bias    (D, D)        blocks.i.attention.out
    blocks_i/ln_2/weight, bias           (D,)          blocks.i.mlp_norm
    blocks_i/mlp/c_fc/kernel, bias       (D, 4D)       blocks.i.mlp.up
    blocks_i/mlp/c_proj/kernel, bias     (4D, D)       blocks.i.mlp.down
    blocks_i/forking_ln/weight, bias     (D,)          forks.i.norm                      in forking blocks only,
    blocks_i/forking_score/kernel        (D, 2)        forks.i.score.weight              column 0 fork, 1 keep
    blocks_i/fork_embedding              (D,)          forks.i.embedding
    ln_f/weight, bias                    (D,)          final_norm

A kernel has shape (in, out) there and (out, in) here, so each is transposed; nothing else changes. A model trained
without biases has none in its tree; here they are zeros. The config field `authors_compat` covers what their code
computes differently from ours.
"""

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from thoughtbubbles.checkpoint import mismatches
from thoughtbubbles.files import short_name
from thoughtbubbles.interop.authors_files import CONFIG, GUIDE, Checkpoint, flatten, read_checkpoint
from thoughtbubbles.model.config import MOST, BudgetMode, Merge, ModelConfig, is_whole
from thoughtbubbles.model.transformer import Thoughtbubbles

MERGES: dict[str, Merge] = {"residual": "residual", "rightmost": "original"}  # their averaging methods

WHOLE = {"wte": "embedding.weight", "ln_f/weight": "final_norm.weight", "ln_f/bias": "final_norm.bias"}
BLOCK = {
    "ln_1/weight": "attention_norm.weight",
    "ln_1/bias": "attention_norm.bias",
    "attn/c_attn/kernel": "attention.qkv.weight",
    "attn/c_attn/bias": "attention.qkv.bias",
    "attn/c_proj/kernel": "attention.out.weight",
    "attn/c_proj/bias": "attention.out.bias",
    "ln_2/weight": "mlp_norm.weight",
    "ln_2/bias": "mlp_norm.bias",
    "mlp/c_fc/kernel": "mlp.up.weight",
    "mlp/c_fc/bias": "mlp.up.bias",
    "mlp/c_proj/kernel": "mlp.down.weight",
    "mlp/c_proj/bias": "mlp.down.bias",
}
FORK = {
    "forking_ln/weight": "norm.weight",
    "forking_ln/bias": "norm.bias",
    "forking_score/kernel": "score.weight",
    "fork_embedding": "embedding",
}


def import_model(
    source: str | Path | Mapping[str, Any],
    *,
    heads: int | None = None,
    block_size: int | None = None,
    budget: int | float | None = None,
    budget_mode: BudgetMode = "proportional",
) -> Thoughtbubbles:
    """A model that computes what the authors' code computes with these weights.

    source       a checkpoint's folder, an .npz or .safetensors file, or the tree of arrays itself
    heads, block_size, budget
                 attention heads, context length and streams per token, if no config.json has them
    budget_mode  whether the cap scales with a row's tokens ("proportional"), or is always that of a full row ("fixed")
    """
    if isinstance(source, Mapping):
        checkpoint = Checkpoint(flatten(source, name="the tree"), {}, "the tree")
    else:
        checkpoint = read_checkpoint(Path(source))
    config = find_config(checkpoint, heads=heads, block_size=block_size, budget=budget, budget_mode=budget_mode)
    with torch.device("meta"):
        model = Thoughtbubbles(config)
    names = parameter_names(config, has_biases=has_biases(checkpoint))
    check_tensors(checkpoint, names, model)
    weights = {
        ours: (checkpoint.tensors[theirs].T if theirs.endswith("kernel") else checkpoint.tensors[theirs]).contiguous()
        for theirs, ours in names.items()
    }
    dtype = weights["embedding.weight"].dtype
    for ours, parameter in model.state_dict().items():
        weights.setdefault(ours, torch.zeros(parameter.shape))  # a bias that they did not train
    model.load_state_dict({ours: weight.to(dtype) for ours, weight in weights.items()}, assign=True)
    return model.requires_grad_(True).eval()


def parameter_names(config: ModelConfig, *, has_biases: bool = True) -> dict[str, str]:
    """The parameters of such a model: their names, mapped to ours."""
    names = dict(WHOLE)
    for i in range(config.n_layer):
        names |= {f"blocks_{i}/{theirs}": f"blocks.{i}.{ours}" for theirs, ours in BLOCK.items()}
    for i in config.fork_layers:
        names |= {f"blocks_{i}/{theirs}": f"forks.{i}.{ours}" for theirs, ours in FORK.items()}
    return {theirs: ours for theirs, ours in names.items() if has_biases or not theirs.endswith("bias")}


def has_biases(checkpoint: Checkpoint) -> bool:
    told = checkpoint.settings.get("bias")
    if told is not None and not isinstance(told, bool):
        raise ValueError(f"{checkpoint.name}: {CONFIG} says bias = {_shown(told)}: it must be true or false")
    return any(name.endswith("bias") for name in checkpoint.tensors) if told is None else told


def check_tensors(checkpoint: Checkpoint, names: Mapping[str, str], model: Thoughtbubbles) -> None:
    ours = model.state_dict()
    expected = {
        name: tuple(ours[own].shape[::-1] if name.endswith("kernel") else ours[own].shape)
        for name, own in names.items()
    }
    if wrong := mismatches(expected, checkpoint.tensors):
        raise ValueError(f"{checkpoint.name} does not have the layout of the authors' code: {wrong}. See {GUIDE}")


# The config: from the arrays where possible, else from the run's own settings, else from the caller.


def find_config(
    checkpoint: Checkpoint,
    *,
    heads: int | None,
    block_size: int | None,
    budget: int | float | None,
    budget_mode: BudgetMode,
) -> ModelConfig:
    tensors, settings, name = checkpoint
    if "wte" not in tensors or tensors["wte"].ndim != 2:
        shown = ", ".join(sorted(tensors)[:3])[:200] or "nothing"
        raise ValueError(f"{name} has no array wte of shape (vocabulary, width), but {shown}: see {GUIDE}")
    vocab_size, width = tensors["wte"].shape
    plan = find_plan(checkpoint)
    for key, found in (("vocab_size", vocab_size), ("n_embd", width)):
        if settings.get(key, found) != found:
            raise ValueError(f"{name}: {CONFIG} says {key} = {_shown(settings[key])}, but wte has {found}")
    n_head = _told(heads, settings.get("n_head"), f"{name}: the number of attention heads", "--heads")
    n_tokens = _told(block_size, settings.get("block_size"), f"{name}: the context length", "--block-size")
    streams = _whole(settings.get("max_block_size"), f"{name}: {CONFIG} says max_block_size")
    known = None if streams is None else budget_for(streams, block_size=n_tokens)
    if "fork" not in plan:
        known = budget = 2  # it has no effect
    method = settings.get("averaging_method", "residual")
    if not isinstance(method, str) or method not in MERGES:
        raise ValueError(
            f"{name}: averaging_method = {_shown(method)} is not in the authors' JAX code; known: {tuple(MERGES)}"
        )
    try:
        return ModelConfig(
            n_layer=len(plan),
            n_head=n_head,
            width=width,
            vocab_size=vocab_size,
            block_size=n_tokens,
            fork_layers=tuple(i for i, kind in enumerate(plan) if kind == "fork"),
            budget=_told(budget, known, f"{name}: the streams per token", "--budget", most=None),
            budget_mode=budget_mode,
            selection="block",
            merge=MERGES[method],
            authors_compat=True,
        )
    except ValueError as error:
        told = str(error)
        raise ValueError(told if told.startswith(name) else f"{name} cannot be imported: {told}") from None


def find_plan(checkpoint: Checkpoint) -> list[str]:
    """One word per block, `fork` if it has a fork layer."""
    tensors, settings, name = checkpoint
    n_blocks = len({part.split("/")[0] for part in tensors if part.startswith("blocks_")})
    found = ["fork" if f"blocks_{i}/forking_score/kernel" in tensors else "regular" for i in range(n_blocks)]
    told = settings.get("plan")
    if told is None:
        return found
    if not isinstance(told, list) or not all(isinstance(word, str) for word in told):
        raise ValueError(f"{name}: {CONFIG} says plan = {_shown(told)}: it must be a list with one word per block")
    if len(told) != n_blocks:
        raise ValueError(f"{name}: {CONFIG} has a plan of {len(told)} blocks, but there are arrays of {n_blocks}")
    return told


def budget_for(streams: int, *, block_size: int) -> int | float:
    """Streams per token, as a number that gives a full row exactly `streams`, not one more."""
    if streams % block_size == 0:
        return streams // block_size
    ratio = streams / block_size
    while math.ceil(Fraction(str(ratio)) * block_size) > streams:  # the decimal of 1000/300 is a little too large
        ratio = math.nextafter(ratio, 0)
    return ratio


def _told(given: Any, known: Any, what: str, option: str, *, most: int | None = MOST["block_size"]) -> Any:
    """The value given by the caller or by their config; an integer up to `most`, unless that is None."""
    if given is None and known is None:
        raise ValueError(f"{what}: neither the arrays nor a {CONFIG} have it; give {option}")
    if most is not None:
        known, given = _whole(known, f"{what}: {CONFIG} says", most), _whole(given, f"{what}: {option}", most)
    if given is not None and known is not None and given != known:
        raise ValueError(f"{what}: {option} {given}, but {CONFIG} says {known}; leave the option out")
    return known if given is None else given


def _whole(value: Any, what: str, most: int = 2**40) -> int | None:
    if value is None or (is_whole(value) and 1 <= value <= most):
        found: int | None = value
        return found
    raise ValueError(f"{what} {_shown(value)}: it must be a whole number from 1 to {most:,}")


def _shown(value: Any) -> str:
    return short_name(json.dumps(value, default=repr))
