"""The commands `export`, `import` and `eval --harness`. They import torch when they run, so that --help is fast."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.files import check_folder, or_shipped


def export(
    *,
    checkpoint: Path | None = None,
    out: Path,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    chat: bool = False,
) -> None:
    """Write a model as a folder that is ready for the Hugging Face Hub.

    It has the weights, the tokenizer, a model card written from the run's own numbers, and the code of the model: with
    trust_remote_code=True it opens in transformers without this package installed. Nothing is uploaded. To
    publish it, choose a licence in its README.md, then: hf upload NAME/MODEL DIR

    Args:
        checkpoint: The model: its folder, a checkpoint of a run, or a run (its newest checkpoint). Default: the one
            in the package.
        out: The folder to write: a new or empty one, or that of an earlier export, which is replaced if nothing in it
            has been changed since.
        dtype: The dtype of the weights. auto: as they are.
        chat: Declare that the model was trained on chats (records with messages): writes their format as a chat
            template, with which `thoughtbubbles serve` offers /v1/chat/completions. A model that has it keeps it.
    """
    import torch

    from thoughtbubbles.interop.export import export as write

    dtypes = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    print(f"written: {write(or_shipped(checkpoint), out=out, dtype=dtypes[dtype], chat=chat)}")


def import_authors(
    checkpoint: Annotated[Path, tyro.conf.arg(metavar="CHECKPOINT")],
    /,
    *,
    out: Path,
    heads: int | None = None,
    block_size: int | None = None,
    budget: float | None = None,
    budget_mode: Literal["proportional", "fixed"] = "proportional",
) -> None:
    """Turn a checkpoint of the authors' JAX code (Jemoka/fork-xla) into a model folder.

    The model computes what their code computes, also where that differs from ours. GPT-2's tokenizer, which they use,
    is added if it fits the vocabulary.

    Args:
        checkpoint: The folder that their trainer wrote (to read its Orbax files, orbax-checkpoint must be installed),
            or an .npz or .safetensors file with the same names.
        out: The model folder to write, a new or empty one.
        heads: Number of attention heads, if there is no config.json next to the arrays.
        block_size: Context length, if there is no config.json.
        budget: Streams per token, if there is no config.json: max_block_size / block_size.
        budget_mode: proportional: the budget follows each row's tokens, as the paper evaluates. fixed: always that of
            the full context length. For full rows, as in training, they are the same.
    """
    from thoughtbubbles.checkpoint import save_model
    from thoughtbubbles.data.tokenizer import tokenizer
    from thoughtbubbles.interop.authors import import_model

    folder = check_folder(out, option="--out")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out {out} is not empty: give a new folder")
    model = import_model(checkpoint, heads=heads, block_size=block_size, budget=budget, budget_mode=budget_mode)
    gpt2 = tokenizer("gpt2")
    written = save_model(folder, model, tokenizer=gpt2 if gpt2.size <= model.config.vocab_size else None)
    print(f"written: {written} ({sum(weight.numel() for weight in model.parameters()):,} parameters)")


def evaluate_with_harness(settings: Evaluation) -> None:
    if find_spec("lm_eval") is None:
        raise ValueError("--harness: lm-evaluation-harness is not installed; pip install 'thoughtbubbles[eval]'")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--harness: runs in one process; leave out torchrun, or leave out --harness")
    from thoughtbubbles.evals.documents import VARIABLE
    from thoughtbubbles.interop.harness import run_harness

    run_harness(
        settings.checkpoint,
        tasks=settings.tasks,
        data_dir=settings.data_dir or os.environ.get(VARIABLE),
        limit=settings.limit,
        budget=settings.budget[0] if settings.budget else None,
        dtype=settings.dtype,
        device=settings.device,
        batch_tokens=settings.batch_tokens,
        method=settings.method,
        compile=settings.compile,
        out=settings.out,
    )
