"""The windows of validation text that perplexity is measured on, cut as in training."""

import zlib
from pathlib import Path

import numpy as np
import torch

from thoughtbubbles.checkpoint import find_model
from thoughtbubbles.data.loader import Source, ValidationSet
from thoughtbubbles.data.tokenizer import NAMED, Tokenizer
from thoughtbubbles.evals.autoregressive import Windows
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.files import SHIPPED, named, short_name
from thoughtbubbles.model.config import ModelConfig


def windows_for(settings: Evaluation, config: ModelConfig, tokenizer: Tokenizer) -> Windows:
    """Windows spread evenly over the split."""
    check_tokens(settings, config)
    assert settings.data is not None
    _check_folder(settings.data)
    n_tokens = config.block_size if settings.tokens is None else settings.tokens
    source = Source(settings.data)
    found = ValidationSet([source], rows=1, n_tokens=n_tokens, split=settings.split)
    if found.tokenizer != tokenizer.name:
        raise ValueError(
            f"--data {source.path}: made with tokenizer {found.tokenizer!r}, but the model was trained with "
            f"{tokenizer.name!r}: prepare the text with --tokenizer {_option(settings, tokenizer)}"
        )
    found.check_vocab(config.vocab_size)
    n_windows = min(settings.windows, len(found))
    chosen = [found[i * len(found) // n_windows] for i in range(n_windows)]
    ids, targets, lengths = (
        torch.from_numpy(np.concatenate([getattr(batch, name) for batch in chosen]))
        for name in ("ids", "targets", "lengths")
    )
    return Windows.of(config, ids, targets=targets, lengths=lengths)


def _option(settings: Evaluation, tokenizer: Tokenizer) -> str:
    """How `prepare` is told to use this tokenizer: a trained one is in the model's folder."""
    if tokenizer.name in NAMED:
        return tokenizer.name
    return SHIPPED if settings.checkpoint is None else str(find_model(settings.checkpoint))


def text_bytes(windows: Windows, tokenizer: Tokenizer) -> int:
    """Number of UTF-8 bytes in the targets; end-of-text has none."""
    targets = windows.targets[windows.counted].tolist()
    return sum(len(tokenizer.token_bytes(token)) for token in targets if token != tokenizer.end_of_text)


def checksum(windows: Windows) -> int:
    """Checksum of everything that is scored."""
    value = 0
    for part in windows:
        value = zlib.crc32(part.contiguous().numpy().tobytes(), value)
    return value


def check_tokens(settings: Evaluation, config: ModelConfig) -> None:
    if settings.tokens is not None and settings.tokens > config.block_size:
        raise ValueError(
            f"--tokens {settings.tokens}: is more than the model's context length; give at most {config.block_size}"
        )


def _check_folder(data: Path) -> None:
    with named(f"--data {short_name(data)}", "give a folder written by `thoughtbubbles prepare`"):
        is_file = data.is_file()
    if is_file:
        remedy = (
            f"give its folder, {data.parent}"
            if data.suffix == ".bin"
            else f"prepare it first: thoughtbubbles prepare {data} --out DIR, then --data DIR"
        )
        raise ValueError(f"--data {data} is a file: {remedy}")
