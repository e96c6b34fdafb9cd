"""Incremental text: no half characters, nothing of a stop string, and everything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thoughtbubbles.data.tokenizer import Tokenizer, tokenizer
from thoughtbubbles.generate.text import TextStream

BYTES = tokenizer("bytes")
# Tokens of several characters, and of less than one.
PIECES = Tokenizer(
    "pieces", [b"a", b"b", b"ab", b"ba", b"aab", b"c", b"\xc3", b"\xa9", b"b\xe2\x82", b"\xaca", b"\xff"]
)


def pieces(ids, *, of: Tokenizer = BYTES, stop=()):
    """What is shown after each token, and at the end."""
    text = TextStream(of, stop=stop)
    return [*(text.feed(token) for token in ids), text.finish()]


def cut(ids, *, of: Tokenizer, stop) -> tuple[str, int | None]:
    """The text up to where, after some token, a stop string first occurs in it; and the number of that token."""
    for n in range(1, len(ids) + 1):
        text = TextStream(of)
        whole = "".join(text.feed(token) for token in ids[:n])
        found = [whole.index(s) for s in stop if s in whole]
        if found:
            return whole[: min(found)], n
    return of.decode(ids), None


@given(st.lists(st.integers(0, 255), max_size=40))
def test_pieces_make_up_the_whole_text(ids):
    assert "".join(pieces(ids)) == BYTES.decode(ids) == bytes(ids).decode(errors="replace")


@given(st.text(max_size=20))
def test_every_character_comes_complete(text):
    shown = pieces(BYTES.encode(text))
    assert "".join(shown) == text
    assert all(len(piece) <= 1 for piece in shown)
    assert shown[-1] == ""


@given(st.lists(st.integers(0, PIECES.size - 2), max_size=30))
def test_tokens_of_any_shape_make_up_the_whole_text(ids):
    assert "".join(pieces(ids, of=PIECES)) == PIECES.decode(ids)


def test_a_character_over_four_tokens():
    assert pieces("x🫧y".encode()) == ["x", "", "", "", "🫧", "y", ""]


def test_half_a_character_at_the_end():
    assert pieces("é".encode()[:1]) == ["", "�"]
    assert pieces([0xFF, 0x41]) == ["�", "A", ""]
    assert "".join(pieces([0xE2, 0x82, 0x41])) == "�A"


STOPS = st.lists(st.text("abcé€", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(st.integers(0, PIECES.size - 2), max_size=30), STOPS)
def test_text_ends_before_the_first_stop_string(ids, stop):
    expected, at = cut(ids, of=PIECES, stop=stop)
    text = TextStream(PIECES, stop=stop)
    shown = []
    for number, token in enumerate(ids, start=1):
        assert not text.stopped
        shown.append(text.feed(token))
        assert text.stopped == (at == number), "it is known immediately, and not before"
        if text.stopped:
            break
    shown.append(text.finish())
    assert "".join(shown) == expected
    assert not any(s in "".join(shown[:-1]) for s in stop)


@given(st.text("ab", max_size=25), st.text("ab", min_size=1, max_size=5))
def test_one_stop_string_is_a_partition(text, stop):
    assert "".join(pieces(BYTES.encode(text), stop=(stop,))) == text.partition(stop)[0]


@given(st.text("abc", max_size=25), st.text("abc", min_size=1, max_size=5))
def test_text_is_held_back_no_longer_than_needed(text, stop):
    """After each token, all is shown but the longest end that may still become the stop string."""
    stream, shown = TextStream(BYTES, stop=(stop,)), ""
    for n, token in enumerate(BYTES.encode(text), start=1):
        shown += stream.feed(token)
        if stream.stopped:
            return
        waiting = max(k for k in range(len(stop)) if text[:n].endswith(stop[:k]))
        assert shown == text[: n - waiting]


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one\n\ntwo", ("\n\n",), "one"),
        ("one\ntwo", ("\n\n",), "one\ntwo"),
        ("aab", ("ab",), "a"),  # the first a is shown once the second has come
        ("abac", ("abc", "ac"), "ab"),
        ("xabcd", ("abcd", "ab"), "x"),  # one is the beginning of the other: the shorter comes first
        ("stop", ("stop",), ""),
        ("s", ("s",), ""),
        ("sto", ("stop",), "sto"),
        ("café!", ("é",), "caf"),
    ],
)
def test_stop_strings(text, stop, shown):
    assert "".join(pieces(BYTES.encode(text), stop=stop)) == shown


def test_what_follows_a_stop_string_is_left_out():
    text = TextStream(BYTES, stop=("b",))
    assert [text.feed(token) for token in b"abab"] == ["a", "", "", ""]
    assert text.finish() == ""


def test_what_was_held_back_comes_at_the_end():
    assert pieces(b"xsto", stop=("stop",)) == ["x", "", "", "", "sto"]
    assert pieces(b"st\xe2", stop=("stop",)) == ["", "", "", "st�"]
