"""Whole runs as Python functions that return a RunConfig. `thoughtbubbles train --list` shows them all.

A recipe begins with the name of its model. The corpus is an option of the run:

    thoughtbubbles train 150m-causal --data.mixture data/pes2o --out runs/150m-causal-pes2o
"""

from collections.abc import Callable
from typing import NamedTuple

from thoughtbubbles.files import did_you_mean
from thoughtbubbles.recipes import demo, paper, shipped, tasks, tiny
from thoughtbubbles.train.config import RunConfig


class Recipe(NamedTuple):
    make: Callable[[], RunConfig]
    summary: str
    group: str


RECIPES: dict[str, Recipe] = {
    name: Recipe(make, summary, group)
    for group, recipes in [
        ("first runs, in minutes on a laptop", [*tiny.recipes(), *demo.recipes()]),
        ("tasks whose hard places are known, in minutes on a laptop", [*tasks.recipes()]),
        ("the model in the package, minutes on one GPU", [*shipped.recipes()]),
        *paper.recipes().items(),
    ]
    for name, make, summary in recipes
}


def recipe(name: str) -> RunConfig:
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES, otherwise=f"for example {', '.join(list(RECIPES)[:3])};")
        raise ValueError(f"no recipe is named {name!r}: {hint} thoughtbubbles train --list shows all")
    return RECIPES[name].make()
