"""Mutations: what a bad disk, a bad copy, an old tool or an attacker does to files.

Everything is a function of the given random numbers. Files are a dictionary from names to contents; something else may
have the name of a file: a folder, a broken link, a pipe without a writer.
"""

import json
from collections.abc import Callable
from enum import Enum
from random import Random
from typing import Any, NamedTuple

from packed import PACKINGS, mutate_npz, mutate_safetensors, pickle_bomb, torch_bomb


class Fault(Enum):
    """What may be in place of a file."""

    FOLDER = "a folder"
    LOOP = "a link to itself"
    DANGLING = "a link to nothing"
    PIPE = "a pipe"


Files = dict[str, bytes | Fault]


class Raw(NamedTuple):
    """Raw JSON text that json.dumps would not write."""

    text: str


def nested(depth: int, opening: str = "[", closing: str = "]") -> Raw:
    return Raw(opening * depth + closing * depth)


NASTY: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 16.5, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**12, 10**30),
    *(float("nan"), float("inf"), Raw("1e999"), Raw("-1e99999999"), Raw("1" * 5000), Raw("1E400")),
    *(True, False, None, "", " ", "0", "1", "-1", "1e99999999", "NaN", "x" * 5000, "\ud800", "\u2028", "a\nb", "\0"),
    *("..", ".", "../x", "/", "/etc/passwd", "/dev/zero", "a/b", "C:\\x", "~", "$HOME", "é" * 300, "nul\0l"),
    *([], {}, [[]], [None], [1, 2], {"": ""}, {"a": {"b": []}}, ["a", "b"], [True], [0.5], [[1], [2]], [{}]),
    *(nested(100_000), Raw('{"a":' * 100_000 + "1" + "}" * 100_000), nested(300), nested(900), list(range(2000))),
)


def mutate_tree(rng: Random, tree: Any, nasty: tuple[Any, ...] = NASTY) -> Any:
    """A copy of plain data (dictionaries, lists, scalars) in which one place has changed."""
    places: list[tuple[Any, Any]] = []
    tree = _copied(tree, places)
    if not places or rng.random() < 0.02:
        return rng.choice(nasty)
    container, key = rng.choice(places)
    value = container[key]
    how = rng.random()
    if how < 0.6:
        container[key] = rng.choice(nasty)
    elif how < 0.75:
        container[key] = _almost(rng, value)
    elif how < 0.85:
        del container[key]
    elif how < 0.9:
        other, place = rng.choice(places)
        container[key] = other[place] if other is not container else [value]
    elif isinstance(container, list):
        container.insert(key, rng.choice([value, *nasty]))
    else:
        container[rng.choice(["extra", "", f"{key}\0again", "\ud800", "__class__", "x" * 5000])] = rng.choice(nasty)
    return tree


def _copied(tree: Any, places: list[tuple[Any, Any]], depth: int = 0) -> Any:
    if not isinstance(tree, (dict, list)) or depth > 50:
        return tree
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    copy: Any = tree.copy()
    for key in keys:
        copy[key] = _copied(tree[key], places, depth + 1)
        places.append((copy, key))
    return copy


Change = Callable[[Any], Any]
ALMOST: dict[type, tuple[Change, ...]] = {
    bool: (int, str, lambda value: not value),
    int: (lambda n: n + 1, lambda n: n - 1, lambda n: -n, lambda n: 1000 * n, float, lambda n: n + 0.5, str),
    float: (lambda n: n + 1, lambda n: -n, lambda n: 1000 * n, round, str),
    str: (lambda s: s + "x", lambda s: s[:-1], str.upper, lambda s: s * 2, lambda s: f"./{s}", lambda s: s[::-1]),
    list: (lambda part: part[::-1], lambda part: part[:-1], lambda part: part * 2, lambda part: {"0": part}),
    dict: (lambda part: list(part.items()), lambda part: {}),
}


def _almost(rng: Random, value: Any) -> Any:
    """Something similar to the old value."""
    change = rng.choice([*ALMOST.get(type(value), ()), lambda value: [value], lambda value: {"value": value}])
    try:
        return change(value)
    except (ValueError, OverflowError):  # an integer that is too large, a float that is none
        return [value]


def dump_json(tree: Any) -> bytes:
    """With raw text where requested, and duplicate keys where their name says so."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value.text)
            return f"@raw {len(raw) - 1}@"
        if isinstance(value, dict):
            return {str(key): marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, (list, tuple)) else value

    text = json.dumps(marked(tree)).replace('\\u0000again"', '"')
    for number, given in enumerate(raw):
        text = text.replace(f'"@raw {number}@"', given)
    return text.encode()


def mutate_json(rng: Random, data: bytes) -> bytes:
    return dump_json(mutate_tree(rng, json.loads(data)))


def mutate_lines(rng: Random, data: bytes) -> bytes:
    """One line of a file of JSON lines."""
    lines = data.splitlines()
    place = rng.randrange(len(lines))
    how = rng.random()
    if how < 0.8:
        lines[place] = mutate_json(rng, lines[place])
    elif how < 0.9:
        lines.insert(place, rng.choice([b"", b"   ", b"{", b"null", b"[]", b"\xff\xfe", b"{}", b"\0" * 9]))
    else:
        lines[place] = mutate_bytes(rng, lines[place], b"")
    return rng.choice([b"\n", b"\n", b"\n", b"\r\n"]).join(lines) + rng.choice([b"\n", b"\n", b""])


def mutate_bytes(rng: Random, data: bytes, donor: bytes) -> bytes:
    """Ignoring the meaning of the bytes."""
    size = len(data)
    a, b = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
    if rng.random() < 0.7:
        b = min(b, a + rng.choice([1, 2, 4, 8, 64]))  # headers are short
    if rng.random() < 0.4:
        a, b = (min(place, size) for place in (a % 80, a % 80 + b - a))  # and come first
    how = rng.randrange(9)
    if how == 0 and size:
        flipped = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            flipped[rng.randrange(size)] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    middle = {
        1: rng.choice([b"\0", b"\xff", b"\x7f", b"\x80", b"A"]) * (b - a),
        2: rng.randbytes(b - a),
        3: b"",
        4: data[a:b] * rng.choice([2, 3, 50]),
        5: donor[a:b],
        6: data[a:b] + rng.randbytes(rng.choice([1, 8, 1000])),
    }
    if how in middle:
        return data[:a] + middle[how] + data[b:]
    return data[:a] if how == 7 else data[:a] + donor[b:]


def mutate_content(rng: Random, name: str, data: bytes, donor: bytes) -> bytes:
    """Mostly uses the format that the file name implies."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, donor)
    packing = next((ending for ending in PACKINGS if name.endswith(ending)), "")
    by_name: dict[str, Callable[[Random, bytes], bytes]] = {
        ".json": mutate_json,
        ".jsonl": mutate_lines,
        ".safetensors": lambda rng, data: mutate_safetensors(rng, data, mutate_tree, dump_json),
        ".npz": lambda rng, data: mutate_npz(rng, data, lambda part: mutate_bytes(rng, part, donor)),
    }
    kind = "." + name.removesuffix(packing).rpartition(".")[2]
    change = by_name.get(kind, lambda rng, data: mutate_bytes(rng, data, donor))
    try:
        if not packing:
            return change(rng, data)
        unpack, pack = PACKINGS[packing]
        return pack((by_name[".jsonl"] if packing == ".parquet" else change)(rng, unpack(data)))
    except Exception:  # an earlier mutation has left nothing to take apart, or nothing that can be put together
        return mutate_bytes(rng, data, donor)


def mutate_files(rng: Random, files: Files, name: str) -> tuple[Files, list[str], str]:
    """The files with this one changed, the names concerned, and the mutation in words."""
    files = dict(files)
    content, how = files[name], rng.random()
    if how < 0.86 and isinstance(content, bytes):
        donors = [data for data in files.values() if isinstance(data, bytes)]
        files[name] = mutate_content(rng, name, content, rng.choice(donors))
        return files, [name], f"{name} has other bytes"
    if how < 0.88:
        del files[name]
        return files, [name], f"{name} is gone"
    if how < 0.91:
        fault = rng.choice(list(Fault))
        files[name] = fault
        return files, [name], f"{name} is {fault.value}"
    if how < 0.94:
        files[name] = rng.choice([b"", b"\0" * 64, b"{}", b"[]", pickle_bomb(), torch_bomb(), b"\xff" * 9, b"\n"])
        return files, [name], f"{name} has {bytes(files[name][:16])!r} …"
    if how < 0.97:
        other = rng.choice(sorted(files))
        files[name], files[other] = files[other], content
        return files, [name, other], f"{name} and {other} have changed places"
    folder, _, last = name.rpartition("/")
    last = last[:100]  # it may be long from an earlier change, and there is more to come
    new = rng.choice([f"{last}.bak", f".{last}", "x" * 255, f"{last} 2", "a\nb", "\u2028", last.upper(), "é" * 100])
    new = f"{folder}/{new}" if folder else new
    files[new] = content
    if rng.random() < 0.5:
        del files[name]
    return files, [name, new], f"{name} is called {new!r}"
