"""Damaged and hostile checkpoints of the authors' code: an immediate error of one line, nothing allocated."""

import io
import json
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from interop.authors_reference import random_tree
from thoughtbubbles.cli import main
from thoughtbubbles.interop.authors import import_model
from thoughtbubbles.interop.authors_files import read_npz

PLAN = ["regular", "fork"]
SETTINGS = {"n_head": 2, "n_embd": 8, "vocab_size": 11, "plan": PLAN, "bias": True}
SETTINGS |= {"block_size": 8, "max_block_size": 16, "averaging_method": "residual"}
OPTIONS = {"heads": 2, "block_size": 8, "budget": 2}


@pytest.fixture(scope="module")
def tree():
    return {name: array.float() for name, array in random_tree(PLAN, width=8, vocab_size=11).items()}


@pytest.fixture
def npz(tmp_path, tree):
    np.savez(tmp_path / "params.npz", **{name: array.numpy() for name, array in tree.items()})
    return tmp_path / "params.npz"


def refusal(path, **options) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is what is looked at)
        import_model(path, **options)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 900
    return str(error.value)


WRONG_SETTINGS = {
    "max_block_size": (16.5, True, "16", 0, -1, 10**30, float("nan"), float("inf"), [], {}),
    "block_size": (True, "8", 8.5, 0, 10**12, [8], {}),
    "n_head": (True, "2", 2.5, 0, -2, 10**30, [], 3),
    "n_embd": ("8", None, [8], 10**30, float("nan")),
    "vocab_size": ("x" * 5000, {}, 12),
    "plan": ("fork", 5, {}, [1, 2], [None, "fork"], [["fork"], "fork"], ["fork"] * 1_000_000, []),
    "bias": (1, "yes", []),
    "averaging_method": ([], {}, 5, None, "x" * 5000),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
@pytest.mark.usefixtures("no_shape_checks")
def test_wrong_settings(npz, name):
    for value in WRONG_SETTINGS[name]:
        (npz.parent / "config.json").write_text(json.dumps({"config": {**SETTINGS, name: value}}))
        refusal(npz)
        refusal(npz.parent)


DEEP = ["[" * 100_000, '{"config": ' * 100_000]
NUMBERS = ['{"config": {"n_head": 1e999}}', '{"config": {"n_head": ' + "9" * 5000 + "}}"]


@pytest.mark.parametrize(
    "text", [*DEEP, *NUMBERS, '{"config": []}', "[]", "null", "\xff", ""], ids=lambda text: text[:12]
)
def test_a_damaged_config(npz, text):
    (npz.parent / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refusal(npz.parent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 10**30}, "--heads"),
        ({"heads": True}, "--heads true"),
        ({"heads": "2"}, '--heads "2"'),
        ({"heads": -1}, "--heads -1: it must be a whole number from 1"),
        ({"block_size": 10**12}, "--block-size"),
        ({"block_size": 0}, "--block-size 0"),
        ({"budget": float("nan")}, "budget"),
        ({"budget": 10**30}, "budget"),
        ({"budget": "1e99999999"}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget_mode": ["fixed"]}, "budget_mode"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_shape_checks")
def test_absurd_options(npz, options, message):
    assert message in refusal(npz, **(OPTIONS | options))


# ---- .npz -----------------------------------------------------------------------------------------------------------


def header(shape, *, descr="<f4", version=(1, 0)) -> bytes:
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text


def packed(path, name, content, *, kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "a", kind) as archive:
        archive.writestr(f"{name}.npy", content)


@pytest.mark.parametrize(
    "content",
    [
        header((10**12,)),
        header((10**30, 10**30)),
        header((-1, 4)) + bytes(16),
        header((2**62, 4)) + bytes(16),
        header(("a",)),
        header((4,), descr="|O") + bytes(32),
        header((4,), descr="nonsense") + bytes(16),
        header((4,), version=(9, 9)) + bytes(16),
        header((4,))[:-8],
        header((8,)) + bytes(16),
        header((2,)) + bytes(16),
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x10\x00((((((((((((((((",
    ],
    ids=lambda content: ascii(content[:60]),
)
def test_headers_that_lie(npz, content):
    packed(npz, "more", content)
    assert "cannot be read" in refusal(npz, **OPTIONS)


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bomb_is_not_decompressed(tmp_path, kind):
    n = 1 << 22
    packed(tmp_path / "params.npz", "wte", header((n // 8, 2)) + bytes(n), kind=kind)
    assert "its arrays claim 4,19" in refusal(tmp_path / "params.npz", **OPTIONS)


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bomb_that_claims_to_be_small_is_not_decompressed(tmp_path, kind):
    """The directory, which is what is read, is written last: by then the member claims fewer bytes than it has."""
    honest, size = header((16, 2)) + bytes(128), 1 << 26
    with zipfile.ZipFile(tmp_path / "params.npz", "w", kind) as archive:
        archive.writestr("wte.npy", honest + bytes(size))
        archive.getinfo("wte.npy").file_size = len(honest)
    tracemalloc.start()
    try:
        told = refusal(tmp_path / "params.npz", **OPTIONS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (
        "Bad CRC-32" if kind == zipfile.ZIP_DEFLATED else f"wte.npy has compression method {kind}: use np.savez"
    ) in told
    assert peak < size / 4


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_arrays_of_several_pieces(tmp_path, kind):
    """All of it, and with its checksum: a member that changes or lacks a byte in its last piece is refused."""
    array = np.random.default_rng(0).normal(size=(3 << 18, 1)).astype(np.float32)
    content = header(array.shape) + array.tobytes()
    packed(tmp_path / "a.npz", "wte", content, kind=kind)
    assert np.array_equal(read_npz(tmp_path / "a.npz")["wte"], array)
    packed(tmp_path / "b.npz", "wte", content, kind=kind)
    with zipfile.ZipFile(tmp_path / "b.npz", "a") as archive:
        archive.getinfo("wte.npy").CRC ^= 1
        archive.writestr("more.npy", content)  # so that the directory is written again
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
        read_npz(tmp_path / "b.npz")


def test_arrays_that_shrink_well_are_read(tmp_path, tree):
    """As np.savez_compressed writes them; biases are zeros at first."""
    zeros = {name: array.numpy() * (0 if name.endswith("bias") else 1) for name, array in tree.items()}
    np.savez_compressed(tmp_path / "params.npz", **zeros)
    model = import_model(tmp_path / "params.npz", **OPTIONS)
    assert torch.equal(model.embedding.weight, tree["wte"])


def test_bytes_of_the_other_order_are_read(tmp_path, tree):
    np.savez(tmp_path / "params.npz", **{name: array.numpy().astype(">f4") for name, array in tree.items()})
    assert torch.equal(import_model(tmp_path / "params.npz", **OPTIONS).embedding.weight, tree["wte"])


def set_field(path, offset, value):
    """In the headers of every member, at the front and in the directory at the end (which has two bytes more)."""
    data = bytearray(path.read_bytes())
    for signature, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        place = data.find(signature)
        while place >= 0:
            struct.pack_into("<H", data, place + offset + shift, value)
            place = data.find(signature, place + 4)
    path.write_bytes(data)


@pytest.mark.parametrize(("offset", "value"), [(6, 1), (8, 99), (8, 8), (8, 12), (8, 14)], ids=str)
def test_encryption_and_unknown_compression(npz, offset, value):
    """RuntimeError, NotImplementedError, zlib.error, OSError, LZMAError."""
    set_field(npz, offset, value)
    assert "cannot be read" in refusal(npz, **OPTIONS)


def test_two_arrays_of_one_name(npz, tree):
    content = io.BytesIO()
    np.save(content, tree["wte"].numpy())
    with pytest.warns(UserWarning, match="Duplicate name"):
        packed(npz, "wte", content.getvalue())
    assert "two of its arrays have the same name" in refusal(npz, **OPTIONS)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_mutated_files_are_refused_or_read(tmp_path, tree, suffix):
    """Whatever is done to the bytes: the same weights, or one line."""
    path = tmp_path / f"params{suffix}"
    if suffix == ".npz":
        np.savez_compressed(path, **{name: array.numpy() for name, array in tree.items()})
    else:
        save_file(tree, path)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(whole)
        if random.random() < 0.3:
            data = data[: random.integers(len(data))]
        for place in random.integers(max(len(data), 1), size=random.integers(1, 4)) if data else ():
            data[place] = random.integers(256)
        path.write_bytes(data)
        try:
            import_model(path, **OPTIONS)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017 (some are read)
            assert "\n" not in str(error)  # noqa: PT017


# ---- kinds of numbers, and places -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_numbers_that_are_not_weights(tmp_path, tree, dtype):
    save_file({**tree, "ln_f/weight": torch.ones(8).to(dtype)}, tmp_path / "params.safetensors")
    assert f"ln_f/weight has dtype {dtype}" in refusal(tmp_path / "params.safetensors", **OPTIONS)


@pytest.mark.parametrize("dtype", [np.int64, np.complex64, np.bool_, np.longdouble, "U4"], ids=str)
def test_arrays_that_are_not_weights(tmp_path, tree, dtype):
    arrays = {name: array.numpy() for name, array in tree.items()}
    np.savez(tmp_path / "params.npz", **{**arrays, "ln_f/weight": np.ones(8).astype(dtype)})
    told = refusal(tmp_path / "params.npz", **OPTIONS)
    assert "ln_f/weight has dtype" in told or np.longdouble is dtype


def test_an_empty_table_and_a_ragged_leaf(tmp_path, tree):
    arrays = {name: array.numpy() for name, array in tree.items()}
    np.savez(tmp_path / "params.npz", **{**arrays, "wte": np.zeros((0, 8), np.float32)})
    assert "vocab_size = 0" in refusal(tmp_path / "params.npz", **OPTIONS)
    with pytest.raises(ValueError, match="the tree: wte is not an array"):
        import_model({"wte": [[1.0], [1.0, 2.0]]}, **OPTIONS)


def test_places_that_cannot_be_read_or_written(tmp_path, npz):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("")
    options = ["--heads", "2", "--block-size", "8", "--budget", "2"]
    long = str(tmp_path / ("x" * 5000))
    for source, out, message in (
        (tmp_path / "loop", tmp_path / "new", "loop does not exist"),
        (long, tmp_path / "new", "File name too long"),
        (npz, tmp_path / "file", "is a file"),
        (npz, tmp_path / "file" / "below", "file is a file"),
        (npz, tmp_path / "loop", "--out .*loop cannot be used"),
        (npz, long, "--out .*File name too long"),
        (npz, tmp_path / "full", "is not empty: give a new folder"),
    ):
        with pytest.raises(SystemExit, match=message) as exit:
            main(["import", str(source), "--out", str(out), *options])
        assert "\n" not in str(exit.value)
        assert len(str(exit.value)) < 900
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "loop", "params.npz"]
