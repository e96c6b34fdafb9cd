"""File utilities: atomic writes, and readers that raise one-line errors naming the file.

Everything is written under a temporary name, flushed to disk and renamed. A manifest holds size and CRC-32 of files, so
that damage is found before it is used. Anything wrong with a file raises ValueError.
"""

import fcntl
import json
import os
import shutil
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
SHIPPED = "bubbles-7m"  # the model that comes with the package
CHUNK_BYTES = 1 << 24  # per checksum call


def shipped_model() -> Path:
    return Path(__file__).parent / "assets" / SHIPPED


def or_shipped(checkpoint: Path | None, *, option: str = "--checkpoint") -> Path | None:
    """The checkpoint that was given; without one, the first rank says which model is used."""
    if checkpoint is None and os.environ.get("RANK", "0") == "0":
        print(f"no {option}: using {SHIPPED}, the model in the package", file=sys.stderr)
    return checkpoint


# Reading


@contextmanager
def named(path: Path | str, remedy: str) -> Iterator[None]:
    """Turns OSErrors (permissions, names too long, …) into a one-line ValueError that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{short_name(path)} cannot be used ({reason(error)}): {remedy}") from None


def reason(error: OSError) -> str:
    """The error message without number and file name, which the caller adds."""
    return error.strerror or str(error) or type(error).__name__


def short_name(path: Path | str) -> str:
    """For a one-line message: a name may have a thousand characters, including newlines."""
    text = str(path)
    text = text if len(text) <= 300 else f"{text[:150]}…{text[-100:]}"
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """A hint for a name that is not among the known ones."""
    near = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def read_bytes(path: Path, *, remedy: str) -> bytes:
    """The content of a regular file; raises ValueError for anything else, such as a pipe, which would block."""
    with named(path, remedy):
        if path.exists() and not path.is_file():
            raise ValueError(f"{short_name(path)} is not a file: {remedy}")
        return path.read_bytes()


def read_json(path: Path, *, remedy: str = "it is damaged, use another copy") -> Any:
    return parse_json(read_bytes(path, remedy=remedy), where=short_name(path), remedy=remedy)


def read_object(path: Path, *, remedy: str = "it is damaged, use another copy") -> dict[str, Any]:
    """A JSON file that contains an object."""
    found = read_json(path, remedy=remedy)
    if not isinstance(found, dict):
        raise ValueError(f"{short_name(path)} contains a JSON {type(found).__name__} instead of an object: {remedy}")
    return found


def parse_json(text: str | bytes, *, where: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"{where}: not JSON ({error.msg} at {place}): {remedy}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not JSON (it is not UTF-8): {remedy}") from None
    except ValueError:  # Python does not parse integers of more than a few thousand digits
        raise ValueError(f"{where}: a number has too many digits: {remedy}") from None
    except RecursionError:
        raise ValueError(f"{where}: the JSON is nested too deeply: {remedy}") from None


# Writing


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """The file appears with its full content on disk, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)  # the new name must survive a power failure too


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, [(json.dumps(value, indent=2) + "\n").encode()])


def check_folder(folder: Path, *, option: str) -> Path:
    """Checks that a folder can be written, before any work is done for it; returns it with links resolved."""
    shown, remedy = f"{option} {short_name(folder)}", "give a folder that can be written"
    with named(shown, remedy):
        try:
            folder = folder.resolve()
        except RuntimeError:  # a looping link, before Python 3.13
            raise ValueError(f"{shown} cannot be used (a link points to itself): {remedy}") from None
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not there.is_dir():
            where = shown if there == folder else f"{shown}: {short_name(there)}"
            raise ValueError(f"{where} is a file: {remedy}")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"{shown} cannot be written: {remedy}")
    return folder


def partial_folder(folder: Path) -> Path:
    """An empty folder next to `folder` to write into; leftovers of an earlier attempt are removed."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, folder: Path) -> None:
    """Renames a completely written folder to its final name, replacing an existing one."""
    for path in [*partial.rglob("*"), partial]:
        flush(path)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(folder)
    flush(folder.parent)


def flush(path: Path) -> None:
    """Flushes the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path, *, doing: str, wait: bool = False) -> Iterator[None]:
    """The system releases the lock when the process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ValueError(f"out = {folder}: another process is {doing} this folder; wait for it") from None
        yield
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    try:
        with locked(folder, doing="using"):
            return False
    except ValueError:
        return True


# Manifests


def write_manifest(folder: Path) -> None:
    """Size and CRC-32 of every file, so that damage is found before it is used."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    write_json(
        folder / MANIFEST,
        {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": crc32(path)} for path in paths},
    )


def damage(folder: Path, *, required: Collection[str] = (), only: Collection[str] | None = None) -> str | None:
    """What is wrong with a folder that has a manifest, in words; None if it is undamaged.

    The manifest must list the `required` files. With `only`, other files are not checked: an edited README next to the
    weights is not damage.
    """
    try:
        manifest = read_object(folder / MANIFEST)
        for name, expected in manifest.items():
            if not _is_inside(name):
                return f"{MANIFEST} lists {short_name(name)!r}, which is not inside the folder"
            if not (isinstance(expected, dict) and all(type(expected.get(what)) is int for what in ("bytes", "crc32"))):
                return f"{MANIFEST} has no size and checksum of {short_name(name)}"
        if unlisted := sorted(name for name in required if name not in manifest):
            return f"{MANIFEST} does not list {short_name(unlisted[0])}"
        for name, expected in manifest.items():
            if (only is None or name in only) and (wrong := _altered(folder, name, expected)) is not None:
                return wrong
    except OSError as error:
        return f"{short_name(error.filename or folder)} cannot be read ({reason(error)})"
    except ValueError as error:
        return str(error)
    return None


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return name != "" and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _altered(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    path = folder / name
    if not path.is_file():
        return f"{short_name(name)} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{short_name(name)} has {path.stat().st_size} bytes instead of {short_name(str(expected['bytes']))}"
    if crc32(path) != expected["crc32"]:
        return f"{short_name(name)} has been altered (its checksum differs)"
    return None


def crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
