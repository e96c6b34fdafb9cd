"""What models cost, side by side: the tables of `thoughtbubbles inspect`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thoughtbubbles.checkpoint import WANTED, check_manifest, check_weights, find_model, read_config, read_weights
from thoughtbubbles.files import SHIPPED, named
from thoughtbubbles.generate.cache import cache_memory
from thoughtbubbles.model.budget import Budget, brief
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import activation_bytes, cost, training_state_bytes

MOST_ROWS = 1_000_000


def inspect_model(
    model: str,
    *,
    tokens: int | None,
    rows: int,
    copies: Sequence[int] | None,
    budgets: Sequence[int | float] | None,
    reach: int | None = None,
) -> None:
    """Of a size by name, or of a model in a folder."""
    base, is_size = find_config(model)
    if tokens is not None and not 1 <= tokens <= base.block_size:
        raise ValueError(f"--tokens {brief(tokens)}: a row of {model} has from 1 to {base.block_size} tokens")
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"--rows {brief(rows)}: a batch has from 1 to {MOST_ROWS:,} rows")
    no_forks = base.without_forks()
    plain = replace(no_forks, copies=1, authors_compat=False, head_gate=False)
    if copies is None:
        copies = (3, 5) if is_size else (base.copies,) * (base.copies > 1)
    if budgets is None:
        budgets = (2.0, 4.0) if is_size else (base.budget,)
    elif base.fork_layers and not is_size:
        for budget in budgets:
            base.check_budget(Budget.of(budget, name="--budgets"), name="--budgets")
    variants = {"plain": plain} | ({"plain, head gate": replace(plain, head_gate=True)} if base.head_gate else {})
    variants |= {f"copy-{brief(n)}": replace(plain, copies=n) for n in copies}
    bubbles = [base] if base.fork_layers else []
    if is_size and not base.scores:  # of a size alone, also forks by learned scores, which budgets are for
        bubbles = [ModelConfig.named(f"{model}-causal"), base]
    for each in bubbles:
        for other in [each] if reach is None else [each, replace(each, fork_reach=reach)]:
            rates = budgets if other.scores else (other.budget,)
            variants |= {_label(other, r): replace(other, budget=r) for r in rates}
    show_costs(model, variants, tokens=tokens or base.block_size, rows=rows)


def _label(base: ModelConfig, budget: int | float) -> str:
    reach = "" if base.fork_reach is None else f", reach {base.fork_reach}"
    if not base.scores:
        return f"{'feedback' if base.feedback else 'all fork'}{reach}"
    limit = " (no limit)" * base.is_unlimited(budget)
    return f"{base.selection}, r = {budget:g}{limit}{reach}{', feedback' * base.feedback}"


def find_config(model: str) -> tuple[ModelConfig, bool]:
    """The config, and whether it is that of a size by name."""
    try:
        return ModelConfig.named(model), True
    except ValueError:
        with named(model, WANTED):
            if not Path(model).exists() and model != SHIPPED:
                raise
    folder = find_model(model)
    check_manifest(folder)
    config = read_config(folder)
    check_weights(folder, read_weights(folder), config)  # a config alone could describe a model that takes for ever
    return config, False


def show_costs(size: str, variants: dict[str, ModelConfig], *, tokens: int, rows: int) -> None:
    costs = {name: cost(config, tokens) for name, config in variants.items()}
    plain = costs["plain"]
    flop, flop_unit = (1e9, "GFLOP") if plain.forward_per_token > 1e8 else (1e6, "MFLOP")
    byte, byte_unit = (2**30, "GiB") if plain.parameters > 1e7 else (2**20, "MiB")

    table = Table(title=f"{size}: rows of {tokens} tokens")
    for heading in ("", "parameters", f"{flop_unit} per token\nforward", "\nbackward", "FLOPs\n/ plain"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for heading in (
        f"training state\n({byte_unit})",
        f"kept for backward\n({byte_unit}, {rows} row{'s' * (rows > 1)})",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in costs.items():
        table.add_row(
            name,
            f"{found.parameters:,}",
            f"{found.forward_per_token / flop:.3f}",
            f"{found.backward_per_token / flop:.3f}",
            f"{found.flops / plain.flops:.2f}×",
            f"{training_state_bytes(variants[name]) / byte:.2f}",
            f"{activation_bytes(variants[name], tokens, rows=rows) / byte:.2f}",
        )

    streams = Table(title="Streams in each block, and what decoding keeps of them")
    streams.add_column("", no_wrap=True)
    streams.add_column("blocks: streams per row (per token)")
    streams.add_column(f"decoding cache\n({rows} row{'s' * (rows > 1)})", justify="right", no_wrap=True)
    for name, found in costs.items():
        config = variants[name]
        blocks = [f"{span}: {n:,} ({n / tokens:g})" for span, n in spans(found.streams)]
        cache = cache_memory(config, rows=rows, capacity=tokens, budget=Budget.of(config.budget)).total
        streams.add_row(name, ",  ".join(blocks), f"{cache:,} bytes")

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table, streams)
    console.print(
        "Training state: float32 weights, gradients and AdamW's moments. Kept for backward: what autograd saves in a "
        "forward with bfloat16 products and a float32 residual, counted without compilation or checkpointing, which "
        "both need less. Decoding cache: keys and values in bfloat16, and what the selection needs of the past. "
        "Causal selection may leave a few slots unused; they are computed all the same.",
        soft_wrap=True,
    )


def spans(streams: Sequence[int]) -> list[tuple[str, int]]:
    """Runs of blocks that work on equally many streams."""
    starts = [i for i, n in enumerate(streams) if i == 0 or streams[i - 1] != n]
    ends = [*(start - 1 for start in starts[1:]), len(streams) - 1]
    return [(f"{a}–{b}" if a < b else str(a), streams[a]) for a, b in zip(starts, ends, strict=True)]
