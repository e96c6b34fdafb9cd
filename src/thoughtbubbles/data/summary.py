"""What `prepare` prints at its end: what is in the folder, and a command to train on it."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from thoughtbubbles.data.output import SPLITS
from thoughtbubbles.data.shards import SMALL_VALIDATION, Index, open_dataset
from thoughtbubbles.data.tokenizer import TRAINED, read_tokenizer
from thoughtbubbles.files import SHIPPED, shipped_model

VOCAB_SIZE = 8192  # of a vocabulary to train
MUCH = 10**8  # tokens: enough for one of the paper's models
# To suggest for fine-tuning the model in the package: passes, at least this many steps, and its context length.
EPOCHS, LEAST_STEPS, MOST_BLOCK = 5, 100, 512
NEXT = {  # recipes to suggest: name, context length, and minimum number of tokens
    "bytes": (("tiny", 128, 0),),
    "gpt2": (("150m", 512, MUCH), ("small-gpt2", 256, 0)),
    TRAINED: ((SHIPPED, 512, MUCH), ("small-gpt2", 256, 0)),
}


def summarize(out: Path, index: Index) -> None:
    def row(name: str, *numbers: Any) -> str:
        return f"{name:<8}" + "".join(f"{n:>18,}" if isinstance(n, int) else f"{n:>18}" for n in numbers)

    print(f"{out}: {'plain text' if index.kind == 'text' else 'examples'}, tokenizer {index.tokenizer}")
    print(row("", "documents", "tokens", "bytes of text", "shards"))
    for split in SPLITS:
        shards = index.splits[split]
        tokens = sum(shard.n_tokens for shard in shards)
        print(row(split, index.notes["documents"][split], tokens, index.notes["bytes"][split], len(shards)))
    if index.notes["skipped"]:
        print(f"{index.notes['skipped']:,} records were skipped: they contain nothing to learn")
    n_val = sum(shard.n_tokens for shard in index.splits["val"])
    if not n_val:
        print(
            "there is no split val, so training will have no validation loss; to get one, give --val, or at least two "
            "different documents and --val-fraction above 0"
        )
    elif n_val < SMALL_VALIDATION:
        print(
            f"val is very small (fewer than {SMALL_VALIDATION:,} tokens): its loss will depend on the choice of "
            f"documents; give {'more' if index.notes['settings'].get('val') else '--val or a larger --val-fraction'}"
        )
    print(f"next: {_next_command(out, index)}")


def _fine_tuning(out: Path) -> list[str]:
    """Options for the model in the package: a context length that the examples need, since each is one padded row."""
    data = open_dataset(out, split="train", verify=False)
    if data.index.kind == "text":
        block = min(MOST_BLOCK, _longest_context(data.n_tokens))
        n_rows, per_step = -(-data.n_tokens // block), 8
    else:
        splits = [open_dataset(out, split=split, verify=False) for split in SPLITS if data.index.splits[split]]
        sizes = [np.diff(shard.offsets.astype(np.int64)) for split in splits for shard in split.shards]
        longest = max(int(each.max(initial=2)) for each in sizes)
        block = min(MOST_BLOCK, 1 << max(4, (longest - 1).bit_length()))
        n_rows, per_step = data.n_examples, 32
    tokens = max(LEAST_STEPS, EPOCHS * n_rows // per_step) * per_step * block
    fitted = ["--model.block-size", str(block)] if block < MOST_BLOCK else []
    return [*fitted, "--tokens-per-step", str(per_step * block), "--tokens", str(tokens), "--optim.lr", "1e-3"]


def _longest_context(n_tokens: int) -> int:
    """A power of two that leaves a token to predict."""
    return 1 << max(0, (n_tokens - 1).bit_length() - 1)


def _next_command(out: Path, index: Index) -> str:
    n_tokens = sum(shard.n_tokens for shard in index.splits["train"])
    known = NEXT.get(index.tokenizer, NEXT[TRAINED])
    recipe, block_size = next((name, size) for name, size, least in known if n_tokens >= least)
    mixture = ["--data.mixture", f"{out}=1" if "=" in str(out) else str(out)]
    is_little = n_tokens < MUCH or index.kind == "examples"  # too little for a model from random weights
    if n_tokens and is_little and index.tokenizer == read_tokenizer(shipped_model()).name:
        return shlex.join(["thoughtbubbles", "train", SHIPPED, "--init-from", SHIPPED, *mixture, *_fine_tuning(out)])
    words = ["thoughtbubbles", "train", recipe, *mixture]
    if index.kind == "text" and n_tokens <= block_size:  # too few for one window of the recipe's context length
        words += ["--model.block-size", str(_longest_context(n_tokens))]
    if index.tokenizer not in NEXT and (recipe != SHIPPED or index.vocab_size > VOCAB_SIZE):
        words += ["--model.vocab-size", str(-(-index.vocab_size // 64) * 64)]
    return shlex.join(words)
