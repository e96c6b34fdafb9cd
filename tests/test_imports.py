"""The order of the packages: imports only go down the levels, and the model package needs only torch and jaxtyping."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "thoughtbubbles"
LEVEL = {
    "files": -1,
    "distributed": -1,
    "provenance": -1,
    "plotting": -1,
    "written": -1,
    "kernels": -1,
    "model": 0,
    "data": 0,
    "checkpoint": 1,
    "generate": 2,
    "evals": 3,
    "train": 4,
    "bench": 5,
    "recipes": 5,
    "analysis": 6,
    "interop": 6,
    "serve": 7,
    "cli": 8,
    "__main__": 9,
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of everything a file imports, including imports inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_left_never_imports_right(path):
    if path == PACKAGE / "__init__.py":
        return  # the list of public names, imported on first use
    here = room(path)
    assert here in LEVEL, f"{path}: add the new package to this table"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "thoughtbubbles" and len(parts) > 1 and parts[1] in LEVEL and parts[1] != here:
            assert LEVEL[parts[1]] < LEVEL[here], f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").rglob("*.py")), ids=lambda path: path.name)
def test_the_model_package_imports_only_torch(path):
    allowed = {"torch", "jaxtyping", *sys.stdlib_module_names}
    outside = {name for name in imported(path) if name.split(".")[0] not in allowed}
    assert all(name.startswith(("thoughtbubbles.model", "thoughtbubbles.kernels")) for name in outside), outside


def test_triton_is_imported_only_in_the_kernels_package():
    """But not in those of its files that models import."""
    having = {path for path in FILES if any(name.split(".")[0] == "triton" for name in imported(path))}
    assert having
    assert {room(path) for path in having} == {"kernels"}
    assert not having & {PACKAGE / "kernels" / name for name in ("__init__.py", "ops.py", "launch.py")}


def test_operators_are_registered_in_one_file():
    registering = {path for path in FILES if "torch.library" in path.read_text()}
    assert registering == {PACKAGE / "kernels" / "ops.py"}


def test_the_check_sees_every_file():
    assert len(FILES) > 10
    assert {room(path) for path in FILES} <= {*LEVEL, "__init__"}
