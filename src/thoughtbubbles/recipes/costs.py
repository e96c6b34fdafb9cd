"""What models cost, side by side: the tables of `thoughtbubbles inspect`."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from thoughtbubbles.generate.cache import cache_memory
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import activation_bytes, cost, training_state_bytes


def show_costs(size: str, variants: dict[str, ModelConfig], *, tokens: int, rows: int) -> None:
    costs = {name: cost(config, tokens) for name, config in variants.items()}
    plain = costs["plain"]
    flop, flop_unit = (1e9, "GFLOP") if plain.forward_per_token > 1e8 else (1e6, "MFLOP")
    byte, byte_unit = (2**30, "GiB") if plain.parameters > 1e7 else (2**20, "MiB")

    table = Table(title=f"{size}: rows of {tokens} tokens")
    for heading in ("", "parameters", f"{flop_unit} a token\nforward", "\nbackward", "FLOPs\n/ plain"):
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
    streams.add_column("blocks: streams a row (a token)")
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
