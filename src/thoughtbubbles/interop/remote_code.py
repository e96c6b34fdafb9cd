"""Modelling code exported with the weights, for `trust_remote_code=True` where this package is not installed.

Hugging Face loads Python files next to the weights and follows `from .name import …` between them. So every module that
the wrapper needs is written there as one flat file, unchanged except for its imports:

    from thoughtbubbles.model.block import Block         →  from .model_block import Block
    from thoughtbubbles.model import head                →  from .model_head import this_module as head
    from jaxtyping import Float                          →  from .shapes import Float   (a stub that checks nothing)
    from thoughtbubbles.checkpoint import load           →  an ImportError              (not exported; in functions)

GPU kernels are not exported: `kernels` then reports that there are none, and reference implementations run.
"""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

from thoughtbubbles import __version__

PACKAGE = "thoughtbubbles"
ENTRIES = {
    f"{PACKAGE}.interop.hf_config": "configuration_thoughtbubbles",
    f"{PACKAGE}.interop.hf_model": "modeling_thoughtbubbles",
}
AUTO_MAP = {
    "AutoConfig": "configuration_thoughtbubbles.ThoughtbubblesConfig",
    "AutoModelForCausalLM": "modeling_thoughtbubbles.ThoughtbubblesForCausalLM",
}
INSTALLED = {"torch", "transformers", *sys.stdlib_module_names}  # what users of the export have
NO_KERNELS = ("HAS_TRITON", "HAS_TRITON = False  # the kernels are not exported")
THIS_MODULE = """
import sys  # noqa: E402

this_module = sys.modules[__name__]
"""
SHAPES = '''"""Shapes in annotations, for readers: nothing is checked here."""


class Shaped:
    def __class_getitem__(cls, item):
        return item[0]


Bool = Float = Int = Shaped
'''


def remote_code() -> dict[str, str]:
    """All files by name. The same sources give the same files."""
    travelling = closure()
    files = {flat_name(module): rewritten(module, travelling) for module in travelling}
    for name in files:
        if any(f"from .{name} import this_module" in text for text in files.values()):
            files[name] += THIS_MODULE
    return {f"{name}.py": text for name, text in {**files, "shapes": header(None) + SHAPES}.items()}


def closure() -> list[str]:
    """The modules to export: the entries, and what they import at the top level, recursively."""
    found, waiting = [], list(ENTRIES)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.append(module)
            waiting += [target for node in top_imports(ast.parse(source(module))) for target in own_targets(node)]
    return sorted(found)


def top_imports(tree: ast.Module) -> list[ast.ImportFrom]:
    return [node for node in tree.body if isinstance(node, ast.ImportFrom)]


def own_targets(node: ast.ImportFrom) -> list[str]:
    """The modules of this package that an import statement names."""
    if node.module is None or node.module.split(".")[0] != PACKAGE:
        return []
    parts = [f"{node.module}.{alias.name}" for alias in node.names]
    return parts if all(is_module(part) for part in parts) else [node.module]


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False


def source_path(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)


def source(module: str) -> str:
    return source_path(module).read_text(encoding="utf-8")


def flat_name(module: str) -> str:
    return ENTRIES.get(module) or module.removeprefix(f"{PACKAGE}.").replace(".", "_")


def header(module: str | None) -> str:
    origin = f" from {module.replace('.', '/')}" if module else ""
    written = f"# Written by `thoughtbubbles export` (version {__version__}){origin}; edit it there.\n"
    return "# SPDX-License-Identifier: MIT\n" + written


def rewritten(module: str, travelling: list[str]) -> str:
    text = source(module)
    lines, tree = text.splitlines(), ast.parse(text)
    at_top = set(top_imports(tree))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.ImportFrom, ast.Import))]
    for node in sorted(imports, key=lambda node: node.lineno, reverse=True):  # from the bottom: line numbers stay valid
        new = rewritten_import(node, travelling, is_top=node in at_top)
        if new is not None:
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in new]
    text = "\n".join(lines) + "\n"
    return header(module) + (without_kernels(text) if module == f"{PACKAGE}.kernels" else text)


def rewritten_import(node: ast.ImportFrom | ast.Import, travelling: list[str], *, is_top: bool) -> list[str] | None:
    """The lines that replace an import; None leaves it unchanged."""
    if isinstance(node, ast.Import) or node.module == "jaxtyping":
        roots = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
        assert roots <= INSTALLED, f"line {node.lineno}: {roots - INSTALLED} is not installed there"
        return None if isinstance(node, ast.Import) else [f"from .shapes import {names(node)}"]
    assert node.module is not None
    targets = own_targets(node)
    if not targets:
        assert node.module.split(".")[0] in INSTALLED, f"line {node.lineno}: {node.module} is not installed there"
        return None
    if not set(targets) <= set(travelling):
        assert not is_top
        return [f'raise ImportError("{names(node)}: only the package {PACKAGE} itself has this; install it")']
    if targets == [node.module]:
        return [f"from .{flat_name(node.module)} import {names(node)}"]
    return [
        f"from .{flat_name(target)} import this_module as {alias.asname or alias.name}"
        for target, alias in zip(targets, node.names, strict=True)
    ]


def names(node: ast.ImportFrom) -> str:
    return ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in node.names)


def without_kernels(text: str) -> str:
    name, replacement = NO_KERNELS
    lines = text.splitlines()
    places = [i for i, line in enumerate(lines) if line.startswith(f"{name} = ")]
    assert len(places) == 1, f"{name} is not where it was"
    lines[places[0]] = replacement
    return "\n".join(lines) + "\n"
