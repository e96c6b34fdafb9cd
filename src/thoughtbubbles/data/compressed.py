"""Compressed files as streams of bytes: gzip (.gz), xz (.xz) and Zstandard (.zst), also several members in one file.

Truncated data raises EOFError; damage raises OSError, zlib.error or LZMAError. This also detects what the libraries'
own readers miss: `lzma` takes a damaged second stream for the end of the file, `zstandard` ignores truncation.
"""

import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

SUFFIXES = (".gz", ".xz", ".zst")
DAMAGE = (OSError, EOFError, MemoryError, lzma.LZMAError, zlib.error)  # raised by reading a damaged file
STEP = 1 << 12  # bytes decompressed at a time: 4 kB of zstd can be 128 MB of text
BUFFER = 1 << 20


def decompressed(raw: io.BufferedReader, suffix: str) -> io.BufferedIOBase:
    """The decompressed content of an open file with this suffix; the file itself if it is not in `SUFFIXES`."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".xz":
        return io.BufferedReader(_Members(raw, lzma.LZMADecompressor, padding=b"\0"), BUFFER)
    if suffix == ".zst":
        new = extra("zstandard", "to read .zst files").ZstdDecompressor().decompressobj
        return io.BufferedReader(_Members(raw, new), BUFFER)
    return raw


class _Members(io.RawIOBase):
    """Concatenated compressed members (xz: streams, Zstandard: frames), with zeros between them if allowed."""

    def __init__(self, raw: io.BufferedReader, new: Callable[[], Any], padding: bytes = b""):
        self._raw, self._new, self._padding = raw, new, padding
        self._member: Any = None  # none started
        self._packed, self._plain = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            self._packed = self._packed or self._raw.read(STEP)
            if not self._packed:
                if self._member is not None:
                    raise EOFError("it ends in the middle of its compressed data")
                return 0
            if self._member is None:
                self._packed = self._packed.lstrip(self._padding) if self._padding else self._packed
                self._member = self._new() if self._packed else None
                continue
            try:
                self._plain = memoryview(self._member.decompress(self._packed))
            except DAMAGE:
                raise
            except Exception as error:  # the package's own class is known only once it is installed
                raise OSError(str(error)) from None
            self._packed = self._member.unused_data if self._member.eof else b""
            self._member = None if self._member.eof else self._member
        n = min(len(buffer), len(self._plain))
        buffer[:n], self._plain = self._plain[:n], self._plain[n:]
        return n


def extra(module: str, purpose: str) -> Any:
    """Imports an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(
            f"the package {package} is needed {purpose}: install it with pip install 'thoughtbubbles[data]', or give "
            "the data as .jsonl or .jsonl.gz files"
        ) from None
