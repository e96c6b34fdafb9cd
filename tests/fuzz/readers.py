"""The fuzzed readers by name, and where their bases are made. The package is imported only when needed."""

import shutil
from importlib import import_module
from pathlib import Path

from cases import Reader

HOMES = {
    "shards": "read_data",
    "journal": "read_data",
    "sources": "read_data",
    "models": "read_models",
    "runs": "read_models",
    "cards": "read_models",
    "authors": "read_models",
    "tasks": "read_evals",
    "answers": "read_evals",
    "requests": "read_calls",
    "calls": "read_calls",
    "hf": "read_calls",
    "commands": "read_calls",
}
NAMES = tuple(HOMES)
PATIENCE = {"commands": 10, "runs": 5}  # times longer than others before it counts as a hang: these also do some work


def make_reader(name: str, folder: Path) -> Reader:
    """`folder` is for files that the bases are made of. Readers named broken-… must be detected."""
    module = import_module(HOMES[name]) if name in HOMES else import_module("broken")
    make = getattr(module, name.replace("-", "_"))
    shutil.rmtree(folder / name, ignore_errors=True)  # of a process that has died
    (folder / name).mkdir(parents=True)
    return Reader(name=name, bases=make(folder / name))
