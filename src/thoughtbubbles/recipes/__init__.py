"""Whole runs as Python functions that return a RunConfig. `thoughtbubbles train --list` shows them all."""

from collections.abc import Callable
from typing import NamedTuple

from thoughtbubbles.recipes import demo, paper, tiny
from thoughtbubbles.train.config import RunConfig


class Recipe(NamedTuple):
    make: Callable[[], RunConfig]
    summary: str


RECIPES: dict[str, Recipe] = {
    name: Recipe(make, summary) for name, make, summary in [*tiny.recipes(), *demo.recipes(), *paper.recipes()]
}


def recipe(name: str) -> RunConfig:
    if name not in RECIPES:
        from difflib import get_close_matches

        near = get_close_matches(name, RECIPES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"for example {', '.join(list(RECIPES)[:3])};"
        raise ValueError(f"no recipe is named {name!r}: {hint} thoughtbubbles train --list shows all")
    return RECIPES[name].make()
