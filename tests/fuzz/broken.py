"""Readers that are wrong on purpose, one per kind of finding: the fuzzer must detect them.

All read a JSON file without a checksum, and go wrong only if the file has changed.
"""

import json
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cases import CallBase, FileBase

GOOD = {"name": "a", "size": 3}


def _base(go_wrong: Callable[[Path], Any]) -> Callable[[Path], Sequence[FileBase]]:
    def make(folder: Path) -> Sequence[FileBase]:
        good = json.dumps(GOOD).encode()

        def read(path: Path) -> Any:
            file = path / "file.json"
            return GOOD if file.is_file() and file.read_bytes() == good else go_wrong(path)

        return [FileBase(files={"file.json": good}, read=read, checked=("*.json",), is_given=False, reason="")]

    return make


def _raise(error: BaseException) -> Any:
    raise error


def _warn(path: Path) -> Any:
    warnings.warn("careful", stacklevel=1)
    raise ValueError(f"{path} is damaged")


def _unpickle(path: Path) -> Any:
    try:
        return pickle.loads((path / "file.json").read_bytes() if (path / "file.json").is_file() else b"")
    except Exception:
        raise ValueError(f"{path} is damaged") from None


def _allocate(path: Path) -> Any:
    return len(bytes(2 << 30))


def _hidden(path: Path) -> Any:
    """An error whose class hides its cause: how torch and NumPy report too little memory."""
    raise ValueError(f"{path} cannot be read (Unable to allocate 2.00 GiB)")


broken_key = _base(lambda path: {}["name"])
broken_class = _base(lambda path: _raise(BaseException("not an Exception")))
broken_hang = _base(lambda path: time.sleep(60))
broken_memory = _base(_allocate)
broken_hidden = _base(_hidden)
broken_lines = _base(lambda path: _raise(ValueError(f"{path} is damaged:\nin two lines")))
broken_long = _base(lambda path: _raise(ValueError(f"{path} is damaged: {'x' * 2000}")))
broken_unnamed = _base(lambda path: _raise(ValueError("something is damaged")))
broken_part = _base(lambda path: _raise(ValueError("profile.json is damaged")))
broken_warning = _base(_warn)
broken_pickle = _base(_unpickle)
broken_blind = _base(lambda path: "another result")
broken_nothing = _base(lambda path: _raise(ValueError(f"{path} is damaged: use another")))


def broken_call(folder: Path) -> Sequence[CallBase]:
    """A function that is called, not a file that is read."""
    return [CallBase(arguments={"size": 3}, call=lambda given: given["size"] + 1, reason="another size")]
