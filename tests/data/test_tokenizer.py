"""Tokenizers: GPT-2's ids without a download, exact round trips, and the same ids with Hugging Face's files."""

import json
import os
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thoughtbubbles.data import tokenizer as module
from thoughtbubbles.data.tokenizer import byte_characters, read_tokenizer, save_tokenizer, tokenizer

BOTH = pytest.mark.parametrize("name", ["gpt2", "bytes"])


def test_gpt2_ids():
    gpt2 = tokenizer("gpt2")
    assert (gpt2.size, gpt2.end_of_text) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Hello world\n\nit's  2024!") == [15496, 995, 198, 198, 270, 338, 220, 48609, 0]
    assert [gpt2.token_bytes(i) for i in (0, 188, 220, 256, 50255, 50256)] == [
        b"!",
        b"\x00",
        b" ",
        b" t",
        b" gazed",
        b"<|endoftext|>",
    ]


@pytest.mark.data
def test_every_entry_of_gpt2s_own_table():
    folder = os.environ.get("THOUGHTBUBBLES_DATA")
    if not folder:
        pytest.skip("THOUGHTBUBBLES_DATA names no folder with gpt2_tokenizer/encoder.json")
    table = json.loads(Path(folder, "gpt2_tokenizer", "encoder.json").read_text())
    assert table.pop("<|endoftext|>") == 50256
    byte_of = byte_characters()
    assert sorted(table.values()) == list(range(50256))
    for written, i in table.items():
        assert tokenizer("gpt2").token_bytes(i) == bytes(byte_of[c] for c in written)


def test_bytes():
    tok = tokenizer("bytes")
    assert (tok.size, tok.end_of_text) == (257, 256)
    assert tok.encode("aé") == [97, 195, 169]
    assert tok.token_bytes(0xC3) == b"\xc3"
    assert tok.decode([195]) == "\ufffd"


@BOTH
@given(text=st.text())
def test_round_trip(name, text):
    tok = tokenizer(name)
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert b"".join(map(tok.token_bytes, ids)) == text.encode()
    array = tok.encode_array(text)
    assert array.dtype == np.uint16
    assert array.tolist() == ids
    assert tok.end_of_text not in ids


@BOTH
def test_special_text_is_ordinary(name):
    tok = tokenizer(name)
    ids = tok.encode("a<|endoftext|>b")
    assert tok.end_of_text not in ids
    assert tok.decode(ids) == "a<|endoftext|>b"


@BOTH
def test_half_a_surrogate_pair_becomes_a_replacement_character(name):
    assert tokenizer(name).decode(tokenizer(name).encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer(name).encode("a\ud83d\ude00b") == tokenizer(name).encode("a😀b")


@given(parts=st.lists(st.sampled_from([" ", "\n", "\t", "\x1c", "\u3000", "a", " b", "7", "é", "."]), max_size=30))
def test_cutting_long_white_space_changes_nothing(parts):
    """With a threshold of 4 characters instead of 65,536, so that cuts are everywhere."""
    text = "".join(parts)
    whole = tokenizer("gpt2").encode(text)
    before, module.LONG_WHITE = module.LONG_WHITE, 4
    try:
        assert tokenizer("gpt2").encode(text) == whole
        pieces = module._split_long_white("ab      cd       ")
    finally:
        module.LONG_WHITE = before
    assert pieces == ["ab     ", " cd       "]


def test_a_million_spaces_before_a_word():
    a, space, b = tokenizer("gpt2").encode("a  b")
    assert tokenizer("gpt2").encode("a" + " " * 1_500_000 + "b") == [a, *[space] * 1_499_999, b]


@BOTH
@pytest.mark.parametrize("token", [-1, 50257, 50303])
def test_unknown_ids_are_errors(name, token):
    with pytest.raises(ValueError, match=f"token = {token}: the tokenizer '{name}' has ids from 0 to"):
        tokenizer(name).decode([65, token])


@pytest.mark.parametrize("name", ["gpt3", "", None, 7, ["gpt2"], {}])
def test_unknown_name(name, no_shape_checks):
    with pytest.raises(ValueError, match=f"tokenizer = {re.escape(repr(name))}: choose from gpt2, bytes"):
        tokenizer(name)


@BOTH
def test_built_once_and_pickled_by_name(name):
    tok = tokenizer(name)
    packed = pickle.dumps(tok)
    assert len(packed) < 200
    assert pickle.loads(packed) is tok is tokenizer(name)


@BOTH
def test_hugging_face_gives_the_same_ids(name, tmp_path):
    from transformers import AutoTokenizer

    tok = tokenizer(name)
    save_tokenizer(tok, tmp_path)
    assert read_tokenizer(tmp_path) is tok
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tok.end_of_text
    assert len(theirs) == tok.size

    generator = random.Random(0)
    words = [
        "a",
        "The",
        " cat's",
        " 2024",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "é",
        "中文",
        " 😀",
        "...",
        "<|endoftext|>",
        "\u2028",
    ]
    for _ in range(200):
        text = "".join(generator.choices(words, k=generator.randrange(30)))
        ids = tok.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.decode([tok.end_of_text]) == tok.decode([tok.end_of_text]) == "<|endoftext|>"


def test_loading_what_is_not_ours(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer_config.json is missing"):
        read_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"tokenizer_class": "T5Tokenizer"}')
    with pytest.raises(ValueError, match="does not name one of our tokenizers in the field 'thoughtbubbles_tokenizer'"):
        read_tokenizer(tmp_path)
    for name in ('["gpt2"]', "{}", "7", "null", "true", '"gpt3"', '""', '"' + "x" * 5000 + '"'):
        path.write_text(f'{{"thoughtbubbles_tokenizer": {name}}}')
        with pytest.raises(ValueError, match=r"tokenizer_config.json does not name one of our tokenizers") as error:
            read_tokenizer(tmp_path)
        assert len(str(error.value)) < 1000
    for content, words in [(b"[]", "a JSON list"), (b"\xff", "not JSON"), (b"[" * 100_000, "nested too deeply")]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"tokenizer_config.json.*{words}"):
            read_tokenizer(tmp_path)
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(ValueError, match=r"tokenizer_config.json cannot be used"):
        read_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"x.* cannot be used \(File name too long\)"):
        read_tokenizer(tmp_path / ("x" * 5000))
