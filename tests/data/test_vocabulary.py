"""Trained vocabularies: the ids, the same ones in Hugging Face's libraries, and what the merges depend on."""

import os
import pickle
import random
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from thoughtbubbles.data.stdlib import documents
from thoughtbubbles.data.tokenizer import MOST_MERGES, read_tokenizer, save_tokenizer, tokenizer, trained
from thoughtbubbles.data.vocabulary import train_vocabulary

SIZE = 1000
PIECES = [
    *(
        "a",
        "The",
        " the",
        " cat's",
        " 2024",
        "12345",
        "\n",
        "\n\n    ",
        "  ",
        "\t",
        "\r\n",
        "\x00",
        "\x1c",
        "\x7f",
        "\u2028",
    ),
    *("é", "中文", "한국어", " 😀", "👩‍👩‍👧", "\u3000", "...", "====", "def f(x):", "<|endoftext|>", "Ġ", "�"),
]
TEXTS = st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=5)).map("".join)


@pytest.fixture(scope="module")
def corpus():
    """80 topics of Python's help, 500 kB."""
    return list(islice(documents(), 80))


@pytest.fixture(scope="module")
def learned(corpus):
    return train_vocabulary(iter(corpus), size=SIZE)


@pytest.fixture(scope="module")
def saved(learned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(learned, folder)
    return folder


def library(folder):
    """The `tokenizers` library with our file."""
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.encode_special_tokens = True  # as AutoTokenizer reads it in our tokenizer_config.json
    return theirs


@pytest.mark.parametrize("size", [257, 258, 300, 3000])
def test_a_vocabulary_has_the_requested_size(size, corpus):
    tok = train_vocabulary(iter(corpus), size=size)
    assert (tok.size, tok.end_of_text, len(tok.merges)) == (size, size - 1, size - 257)
    assert tok.name.startswith(f"bpe-{size}-")


def test_ids_are_bytes_then_merges_of_earlier_ids_then_end_of_text(learned):
    gpt2 = tokenizer("gpt2")
    assert [learned.token_bytes(i) for i in range(256)] == [gpt2.token_bytes(i) for i in range(256)]
    assert learned.token_bytes(SIZE - 1) == b"<|endoftext|>"
    known = {learned.token_bytes(i) for i in range(256)}
    for i in range(256, SIZE - 1):
        token = learned.token_bytes(i)
        assert token not in known
        assert any(token[:cut] in known and token[cut:] in known for cut in range(1, len(token)))
        known.add(token)


def test_frequent_words_have_an_id_of_their_own(learned, corpus):
    for word in (" the", " of", " is", " object", " class", " method", "\n   "):
        assert len(learned.encode(word)) == 1
    text = "".join(corpus)
    assert len(tokenizer("bytes").encode(text)) > 2.5 * len(learned.encode(text))


@given(text=TEXTS)
def test_any_text_comes_back(text, learned):
    ids = learned.encode(text)
    assert learned.decode(ids) == text
    assert b"".join(map(learned.token_bytes, ids)) == text.encode()
    assert learned.end_of_text not in ids
    array = learned.encode_array(text)
    assert (array.dtype, array.tolist()) == (np.uint16, ids)


def test_half_a_surrogate_pair_becomes_a_replacement_character(learned):
    """In text to encode, and in text to learn from."""
    assert learned.decode(learned.encode("a\ud800b")) == "a\ufffdb"
    assert learned.encode("a\ud83d\ude00b") == learned.encode("a😀b")
    tok = train_vocabulary(iter(["\ud800\ud800 \ud83d\ude00"] * 3), size=300)
    assert tok.name == train_vocabulary(iter(["\ufffd\ufffd 😀"] * 3), size=300).name
    assert len(tok.encode(" 😀")) == 1


def test_long_white_space_comes_back(learned):
    text = "a" + " " * 70_000 + "b" + "\n" * 70_000
    assert learned.decode(learned.encode(text)) == text


@given(text=TEXTS)
def test_the_tokenizers_library_gives_the_same_ids(text, learned, saved):
    theirs = library(saved)
    assert theirs.encode(text).ids == learned.encode(text)
    assert theirs.decode(learned.encode(text), skip_special_tokens=False) == text


@settings(max_examples=60)
@given(data=st.data())
def test_texts_of_few_letters_have_the_same_ids_in_both_libraries(data, tmp_path_factory):
    """Repetitions such as aaa give the most chances for two merges that overlap, or that make the same token."""
    text = st.text(data.draw(st.sampled_from(["a", "ab", "abc", "ab ", "aé", " \n", "a1.'s"])), max_size=40)
    texts = data.draw(st.lists(text, max_size=20))
    tok = train_vocabulary(iter(texts), size=data.draw(st.integers(257, 400)))
    assert len({merge.replace(" ", "") for merge in tok.merges}) == len(tok.merges)
    folder = tmp_path_factory.getbasetemp() / "few letters"
    save_tokenizer(tok, folder)
    theirs = library(folder)
    for other in (*texts, data.draw(text), "".join(texts)):
        assert theirs.encode(other).ids == tok.encode(other)


def test_auto_tokenizer_gives_the_same_ids(learned, saved):
    from transformers import AutoTokenizer

    theirs, generator = AutoTokenizer.from_pretrained(saved), random.Random(0)
    assert (len(theirs), theirs.eos_token_id) == (SIZE, SIZE - 1)
    for _ in range(300):
        text = "".join(generator.choices(PIECES, k=generator.randrange(30)))
        ids = learned.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.decode([SIZE - 1]) == learned.decode([SIZE - 1]) == "<|endoftext|>"


@pytest.mark.parametrize(("texts", "ids"), [([], 0), ([""], 0), (["a"], 0), (["ab"], 1), (["abab", " ab"], 3)], ids=str)
def test_little_text_gives_fewer_ids_than_requested(texts, ids):
    tok = train_vocabulary(iter(texts), size=5000)
    assert tok.size == 257 + ids
    assert tok.decode(tok.encode("abab ab é")) == "abab ab é"


def test_very_long_words_take_no_time():
    """Finding merges is quadratic in the length of a word: without cuts, this takes minutes."""
    letters = "".join(random.Random(0).choices("abcdefgh", k=200_000))
    tok = train_vocabulary(iter([letters, "x" + " " * 300_000 + "y", "-" * 300_000, "the end " * 9000]), size=320)
    assert tok.size == 320
    assert len(tok.encode(" end")) == 1


def test_the_name_depends_on_the_merges_and_on_nothing_else(corpus, learned):
    """Also in another process with another number of threads and other hashes."""
    code = """
import sys
from itertools import islice
from thoughtbubbles.data.stdlib import documents
from thoughtbubbles.data.vocabulary import train_vocabulary
print(train_vocabulary(islice(documents(), 80), size=int(sys.argv[1])).name)
"""
    again = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(SIZE)], capture_output=True, text=True, env=again, check=True
    )
    assert done.stdout.strip() == learned.name == trained(learned.merges).name
    merges = learned.merges
    others = [
        merges[:-1],
        [merges[1], merges[0], *merges[2:]],
        [*merges[:-1], "q q"],
        train_vocabulary(iter(corpus[1:]), size=SIZE).merges,
    ]
    assert len({learned.name, *(trained(other).name for other in others)}) == 5


def test_a_pickled_one_has_the_same_ids_in_another_process(learned, corpus):
    assert pickle.loads(pickle.dumps(learned)) is learned
    code = """
import pickle, sys
tok, text = pickle.load(sys.stdin.buffer)
print(tok.name, tok.size, *tok.encode(text))
"""
    packed = pickle.dumps((learned, corpus[0]))
    done = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=True)
    assert done.stdout.decode().split() == [learned.name, str(SIZE), *map(str, learned.encode(corpus[0]))]


def test_loading_gives_the_same_tokenizer(learned, saved, tmp_path):
    assert read_tokenizer(saved) is learned
    save_tokenizer(read_tokenizer(saved), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes()


def test_files_that_hugging_face_has_written_again(learned, saved, tmp_path):
    """Their newer releases write a merge as a pair instead of one string."""
    tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json")).save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_bytes() != (saved / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer_config.json").write_bytes((saved / "tokenizer_config.json").read_bytes())
    assert read_tokenizer(tmp_path) is learned


def test_the_largest_vocabulary_fits_on_disk():
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    pairs = [a + b for a in letters for b in letters]
    merges = [f"{a} {b}" for a, b in pairs] + [f"{a} {b}" for a in pairs for b in (*letters, *pairs[:20])]
    tok = trained(merges[:MOST_MERGES])
    assert tok.size == 1 << 16
    last = tok.token_bytes((1 << 16) - 2).decode()
    assert tok.encode_array(last).tolist() == [(1 << 16) - 2]
    with pytest.raises(AssertionError, match="65537 ids do not fit into uint16"):
        trained(merges[: MOST_MERGES + 1])
