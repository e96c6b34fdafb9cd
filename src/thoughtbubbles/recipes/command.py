"""The `train` command: a recipe, or the folder of a run, changed by options.

train RECIPE …                  the recipe's RunConfig is the default, and its fields are options
train RECIPE --init-from DIR    the architecture is that of the model in DIR; --model.* options change it
train --resume DIR …            run.json in DIR is the default
"""

import os
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from thoughtbubbles.checkpoint import find_model, read_config
from thoughtbubbles.recipes import recipe
from thoughtbubbles.recipes.table import dry_run as check_and_try
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.loop import train
from thoughtbubbles.train.resume import RUN, read_run


def train_command(arguments: Sequence[str]) -> None:
    name, *rest = arguments
    if name.startswith("-"):
        _resume(*_resumed(arguments))
        return
    default = _shaped(recipe(name), rest)

    def run(
        config: Annotated[RunConfig, tyro.conf.arg(name="")] = default, *, resume: bool = False, dry_run: bool = False
    ) -> None:
        """Train this recipe.

        Args:
            config: The run.
            resume: Resume from the newest complete checkpoint in the run's folder.
            dry_run: Open the data and check that it fits the model, take one step at reduced size, and print the
                resolved config.
        """
        _start(config, resume=resume, dry_run=dry_run)

    if (folder := _value(rest, "--resume")) is not None:
        raise ValueError(
            f"{name} --resume {folder}: give the folder alone (thoughtbubbles train --resume {folder}), or the recipe "
            f"with all its options (thoughtbubbles train {name} --out {folder} … --resume)"
        )
    tyro.cli(run, prog=f"thoughtbubbles train {name}", args=rest)


def _resume(folder: Path, rest: list[str]) -> None:
    default = read_run(folder)

    def run(config: Annotated[RunConfig, tyro.conf.arg(name="")] = default, *, dry_run: bool = False) -> None:
        """Resume this run from its newest complete checkpoint.

        Args:
            config: The run, as run.json in its folder says.
            dry_run: Open the data and the checkpoint and check that they fit, take one step at reduced size, and print
                the resolved config.
        """
        if config.out != folder:
            raise ValueError(f"--out {config.out}: a run is resumed in its own folder, {folder}; leave out --out")
        _start(config, resume=True, dry_run=dry_run)

    tyro.cli(run, prog=f"thoughtbubbles train --resume {folder}", args=rest)


def _start(config: RunConfig, *, resume: bool, dry_run: bool) -> None:
    if dry_run:
        check_and_try(config, resume=resume)
        return
    result = train(config, resume=resume)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{'finished' if result.finished else 'stopped'}: {result.checkpoint}", flush=True)
    if result.exit_code:
        sys.exit(result.exit_code)


def _resumed(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder after --resume, and the other words."""
    folder = _value(arguments, "--resume")
    if folder is None:
        raise ValueError(f"{arguments[0]}: a recipe comes first, or --resume DIR (thoughtbubbles train --help)")
    rest = list(arguments)
    if f"--resume={folder}" in rest:
        rest.remove(f"--resume={folder}")
    else:
        at = rest.index("--resume")
        del rest[at : at + 2]
    return Path(folder), rest


def _value(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option, as the next word or after `=`; None if it has none."""
    for word, following in pairwise([*arguments, "-"]):
        given, equals, value = word.partition("=")
        if given.replace("_", "-") == option:
            return value if equals else None if following.startswith("-") else following
    return None


def _shaped(default: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """With --init-from, the recipe with that model's architecture; a resumed run keeps its own."""
    start = _value(arguments, "--init-from")
    if start in (None, "None"):
        return default
    own = replace(default, name=_value(arguments, "--name") or default.name).folder
    folder = Path(_value(arguments, "--out") or own)
    is_resumed = "--resume" in arguments and (folder / RUN).is_file()
    shaped = copy(default)
    # Without validation: the recipe's tokens per step may not fit this model until the options are applied.
    shape = read_run(folder).model if is_resumed else read_config(find_model(start))
    object.__setattr__(shaped, "model", shape)
    return shaped
