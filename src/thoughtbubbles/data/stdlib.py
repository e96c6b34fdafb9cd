"""Real text that needs no download: the documentation in Python's standard library, about 2 MB of English.

One document per help topic, and one per source file: the docstrings of the module, its classes and its functions, in
order, without repetitions. The text depends on the version of Python, which is stored in the folder's notes.
"""

import ast
import hashlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from thoughtbubbles.data.builtin import encode, write_once

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
VALIDATION = 20  # one document in 20, by the hash of its text


def documents() -> Iterator[str]:
    """In sorted order: help topics, then source files."""
    seen: set[str] = set()
    for name in sorted(topics):
        yield from _unseen([topics[name].strip()], seen)
    for path in _source_files():
        yield from _unseen(_docstrings(path), seen)


def _source_files() -> list[Path]:
    root = sysconfig.get_paths()["stdlib"]
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _unseen(texts: list[str], seen: set[str]) -> Iterator[str]:
    """One document of the texts that are new, if there are any."""
    new = [text for text in dict.fromkeys(texts) if text and text not in seen]
    seen.update(new)
    if new:
        yield "\n\n".join(new) + "\n"


def _docstrings(path: Path) -> list[str]:
    """In the order of the file; none if it is not valid Python or not valid text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the code of those files
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    texts = ((ast.get_docstring(node) or "").strip() for node in _documented(tree))
    return [text for text in texts if _is_valid(text)]


def _documented(tree: ast.Module) -> Iterator[Documented]:
    """In the order of the file. Skips expressions, most of a tree, since they contain no docstrings."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Documented):
            yield node
        stack += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)][::-1]


def _is_valid(text: str) -> bool:
    """Without lone surrogates, which escapes can produce and UTF-8 cannot encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def write_stdlib(folder: Path) -> None:
    """Writes a prepared folder, unless it exists; several processes may call it at the same time."""
    notes = {"made_by": "stdlib", "version": 1, "python": ".".join(map(str, sys.version_info[:3]))}
    texts = (("val" if is_validation(text) else "train", encode(text)) for text in documents())
    write_once(folder, texts, kind="text", notes=notes)


def is_validation(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % VALIDATION == 0
