"""The table of recipes, and a dry run of any of them: everything is checked, and one step taken at reduced size."""

import json
import os
import sys
import tempfile
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import cost
from thoughtbubbles.recipes import RECIPES
from thoughtbubbles.train.config import ComputeConfig, DataConfig, EvalConfig, LogConfig, RunConfig, SaveConfig
from thoughtbubbles.train.dry_run import check_run
from thoughtbubbles.train.loop import Result, train

UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))
OPTIONS = """\
Options of every recipe, for example:
  --data.mixture data/pes2o                   another corpus, or several: data/a=0.7 data/b=0.3
  --tokens 5e8 --optim.lr 1e-3 --out DIR      a shorter run, another learning rate, another folder than runs/RECIPE
thoughtbubbles train RECIPE --help shows all of them; thoughtbubbles prepare NAME --out data/NAME makes a corpus."""


def show_recipes() -> None:
    table = Table(title="thoughtbubbles train RECIPE", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("recipe", no_wrap=True)
    for heading in ("parameters", "tokens", "FLOPs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for group, members in groupby(RECIPES.items(), key=lambda item: item[1].group):
        table.add_section()
        title, _, about = group.partition(", ")
        table.add_row(Text(title, style="bold"), "", "", "", Text(about, style="dim"))
        for name, recipe in members:
            config = recipe.make()
            found = cost(config.model)
            flops = expected_flops(config)
            table.add_row(f"  {name}", f"{found.parameters:,}", _short(config.tokens), _short(flops), recipe.summary)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table, Text(OPTIONS), soft_wrap=True)


def expected_flops(config: RunConfig) -> float:
    """Forward and backward over all steps, as counted everywhere."""
    return config.steps * config.rows * config.flops_per_row


def _short(n: int | float) -> str:
    unit, letter = next((unit, letter) for unit, letter in UNITS if n >= unit)
    return f"{n / unit:.3g}{letter}"


def reduced(config: RunConfig, out: Path) -> RunConfig:
    """The same run in small: its shape, rule, merge, schedule and optimizer, at a small width, on synthetic text.

    With the model's own budget, and forks from the start: the one step does what the last ones of the run do.
    """
    model = config.model
    n_layer = min(model.n_layer, (max(model.fork_layers) + 1) if model.fork_layers else 4)
    rows = 4 * int(os.environ.get("WORLD_SIZE", 1))
    small: ModelConfig = replace(model, n_layer=n_layer, n_head=2, width=16, vocab_size=384, block_size=16)
    return replace(
        config,
        model=small,
        tokens=rows * 16,
        tokens_per_step=rows * 16,
        forks_from=0.0,
        budgets=(),
        data=DataConfig(mixture=("synthetic",)),
        compute=ComputeConfig(
            precision=config.compute.precision,
            compile=False,
            activation_checkpointing=config.compute.activation_checkpointing,
            micro_batch_size=1,
        ),
        save=SaveConfig(milestones=config.save.milestones),
        eval=EvalConfig(tokens=256, sample_tokens=0),
        log=LogConfig(),
        init_from=None,
        out=out,
    )


def dry_run(config: RunConfig, *, resume: bool = False) -> Result:
    """Checks the real run without training it, takes one step of the reduced one, and prints the resolved config."""
    with tempfile.TemporaryDirectory() as folder:
        checked = check_run(config, resume=resume, made_in=Path(folder))
        result = train(reduced(config, Path(folder) / "reduced"))
    found = cost(config.model)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(config.as_dict(), indent=2))
        for line in checked:
            print(line)
        print(
            f"{config.name}: {found.parameters:,} parameters, {config.steps:,} steps of {config.tokens_per_step:,} "
            f"tokens, {expected_flops(config) / 1e18:,.4g} EFLOP; all that the run needs was checked, and one "
            "step at reduced size went well"
        )
    return result
