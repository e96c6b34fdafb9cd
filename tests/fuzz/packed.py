"""Container formats (compressed text, parquet, safetensors, zip): unpacked, mutated and packed again."""

import gzip
import io
import json
import lzma
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

DTYPES = ("F64", "F32", "BF16", "F16", "I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "F4", "U16", "X", "", 5, None)


def _unzstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 20)


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def _rows(data: bytes) -> bytes:
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    return "\n".join(map(json.dumps, rows)).encode()


def _parquet(lines: bytes) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in lines.splitlines()]), sink)
    return sink.getvalue()


PACKINGS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (gzip.decompress, lambda data: gzip.compress(data, 1, mtime=0)),
    ".xz": (lzma.decompress, lambda data: lzma.compress(data, preset=0)),
    ".zst": (_unzstd, _zstd),
    ".parquet": (_rows, _parquet),  # as JSON lines
}


def mutate_safetensors(
    rng: Random,
    data: bytes,
    mutate_tree: Callable[[Random, Any], Any],
    dump: Callable[[Any], bytes],
) -> bytes:
    """The header is its length, then JSON: names with dtype, shape and offsets."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    how = rng.random()
    if how < 0.1:
        size = rng.choice([0, 1, size - 1, size + 1, 2 * size, len(data), 10**8, 2**31, 2**63 - 1, 2**64 - 1])
        return struct.pack("<Q", size) + data[8:]
    tensor = header[rng.choice([name for name in sorted(header) if name != "__metadata__"])]
    if how < 0.3:
        tensor["dtype"] = rng.choice(DTYPES)
    elif how < 0.45:
        shape = tensor["shape"]
        tensor["shape"] = rng.choice([shape[::-1], [*shape, 1], shape[1:], [], [0], [2**40, 2**40], [-1], [2**63]])
    elif how < 0.6:
        a, b = tensor["data_offsets"]
        tensor["data_offsets"] = rng.choice([[b, a], [a, b - 1], [a + 1, b], [0, 2**63], [a, b + 8], [0, 0], [a]])
    elif how < 0.7:
        name = rng.choice(sorted(header))
        header[rng.choice(["x", "", "blocks.0", "blocks.99999999.x", f"{name}.x", "é"])] = header.pop(name)
    elif how < 0.8:
        body = rng.choice([body[:-1], body + b"\0" * 8, b"", body * 2, b"\xff" * len(body)])
    else:
        header = mutate_tree(rng, header)
    text = dump(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def mutate_npz(rng: Random, data: bytes, mutate: Callable[[bytes], bytes]) -> bytes:
    """A zip file of arrays, each with its own header, which is a Python literal."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        members = {name: file.read(name) for name in file.namelist()}
    name = rng.choice(sorted(members))
    how, packing = rng.random(), rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
    if how < 0.35:
        members[name] = _mutate_npy(rng, members[name])
    elif how < 0.5:
        members[name] = mutate(members[name])
    elif how < 0.6:
        new = rng.choice(["../x.npy", "/x.npy", "x", "wte.npy", "a.b.npy", "é.npy", "wte/value.npy", "params/wte.npy"])
        members[new] = members.pop(name) if rng.random() < 0.5 else members[name]
    elif how < 0.65:
        del members[name]
    elif how < 0.7:
        return _liar(rng, members, name)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", packing) as file:
        for member, content in members.items():
            file.writestr(zipfile.ZipInfo(member), content, packing)
    whole = packed.getvalue()
    if how >= 0.85:  # flags (encrypted), methods and sizes are in the records of the directory and of each member
        mark = rng.choice([b"PK\1\2", b"PK\3\4", b"PK\5\6"])
        at = whole.find(mark, rng.randrange(len(whole))) + rng.randrange(4, 30)
        whole = whole[:at] + bytes([rng.choice([0, 1, 8, 9, 99, 255])]) + whole[at + 1 :]
    return whole if how < 0.7 or how >= 0.85 else mutate(whole)


def _liar(rng: Random, members: dict[str, bytes], name: str) -> bytes:
    """One member has two GiB, but claims its old size in the directory, which is written last."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for member, content in members.items():
            info = zipfile.ZipInfo(member)
            file.writestr(info, _many_zeros(2048) if member == name else content)
            if member == name:
                info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, len(content)
                info.CRC = rng.choice([info.CRC, zlib.crc32(bytes(len(content)))])
    return packed.getvalue()


@cache
def _many_zeros(mebibytes: int) -> bytes:
    """Deflated, without deflating them all: every mebibyte of them is the same bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    one = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return one * mebibytes + packer.flush()


def _mutate_npy(rng: Random, array: bytes) -> bytes:
    old, new = rng.choice(
        [
            (
                b"<f4",
                rng.choice([b"|O", b"<i8", b"<f8", b"<c8", b">f4", b"<f2", b"<U4", b"|V4", b"<M8", b"xx", b"|S4"]),
            ),
            (b"(", rng.choice([b"(0, ", b"(-1, ", b"(99999999999, ", b"(True, ", b"('a', ", b"((", b"(1.5, ", b"("])),
            (b"False", rng.choice([b"True", b"None", b"__import__('os')"])),
            (b"descr", rng.choice([b"shape", b"x", b"d\\x65scr"])),
            (b"{", rng.choice([b"[", b"{" * 9, b"(" * 500, b"-" * 3000, b"{**"])),
        ]
    )
    length = int.from_bytes(array[8:10], "little")
    header = array[10 : 10 + length].replace(old, new, 1)[:65000]
    if b"|O" in header and rng.random() < 0.8:
        return array[:8] + len(header).to_bytes(2, "little") + header + pickle_bomb()
    return array[:8] + len(header).to_bytes(2, "little") + header + array[10 + length :]


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ.get("FUZZ_CANARY", "fuzz-canary"),)


def pickle_bomb() -> bytes:
    """Unpickling this creates a folder that the fuzzer looks for after every input."""
    return pickle.dumps(_Bomb())


def torch_bomb() -> bytes:
    """The same as torch.save would pack it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, content in (("data.pkl", pickle_bomb()), ("byteorder", b"little"), ("version", b"3\n")):
            file.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return packed.getvalue()
