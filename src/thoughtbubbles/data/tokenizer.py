"""Tokenizers, without downloads.

    gpt2     GPT-2's byte-pair encoding: 256 bytes, 50,000 merges in order of their rank, and end-of-text (50256)
    bytes    every byte is its own id (0 … 255), and end-of-text (256): for tiny models and tests

`gpt2` is built from the list of merges that ships with the package: the ids of single bytes follow from the order in
which GPT-2 maps bytes to printable characters, every other id from the position of its merge. Text that spells a
special token, such as "<|endoftext|>" in a document, is encoded as ordinary text.
"""

import gzip
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from thoughtbubbles.files import named, read_object, short_name, write_atomically

END_OF_TEXT = "<|endoftext|>"
NAME_FIELD = "thoughtbubbles_tokenizer"
CONFIG = "tokenizer_config.json"

# GPT-2's pattern that splits text into words, with possessive quantifiers, which backtrack less.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# Python counts four control characters as white space that the pattern above does not.
WHITE = r"[^\S\x1c-\x1f]"
LONG_WHITE = 1 << 16


class Tokenizer:
    """Base class. Ids are below `size`; decoding any other id, such as vocabulary padding, raises ValueError."""

    def __init__(self, name: str, table: list[bytes]):
        self.name = name
        self.end_of_text = len(table)
        self._table = [*table, END_OF_TEXT.encode()]
        self.size = len(self._table)
        assert self.size <= 1 << 16, f"{name}: {self.size} ids do not fit into uint16, the dtype of tokens on disk"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        """The ids as uint16, their dtype on disk."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Invalid UTF-8, such as half a character at the end, becomes replacement characters."""
        return b"".join(self.token_bytes(int(token)) for token in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.size:
            raise ValueError(
                f"token = {token}: the tokenizer {self.name!r} has ids from 0 to {self.size - 1}; mask the padding of "
                "the vocabulary before sampling, and decode with the tokenizer that the model was trained with"
            )
        return self._table[token]

    def __reduce__(self) -> tuple[Any, ...]:
        return tokenizer, (self.name,)  # a worker process builds its own copy once

    def __repr__(self) -> str:
        return f"tokenizer({self.name!r})"

    def _hugging_face_model(self) -> tuple[dict[str, int], list[str], bool]:
        """Vocabulary, merges, and whether text is split into words first, as in a tokenizer.json."""
        raise NotImplementedError


class Bytes(Tokenizer):
    def __init__(self) -> None:
        super().__init__("bytes", [bytes([b]) for b in range(256)])

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(_whole_characters(text).encode(), dtype=np.uint8).astype(np.uint16)

    def _hugging_face_model(self) -> tuple[dict[str, int], list[str], bool]:
        return dict(byte_characters()), [], False


class GPT2(Tokenizer):
    def __init__(self) -> None:
        packed = files("thoughtbubbles").joinpath("assets", "gpt2-vocab.bpe.gz").read_bytes()
        self._merges = gzip.decompress(packed).decode().split("\n")[1:-1]  # the first line is the version
        to_byte = {ord(character): chr(byte) for character, byte in byte_characters().items()} | {ord(" "): ""}
        written = [*byte_characters(), *self._merges]
        table = [token.translate(to_byte).encode("latin-1") for token in written]
        super().__init__("gpt2", table)
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_WORDS,
            mergeable_ranks={token: rank for rank, token in enumerate(table)},
            special_tokens={END_OF_TEXT: self.end_of_text},  # never encoded, but encoding is slower without any
            explicit_n_vocab=self.size,
        )

    def encode_array(self, text: str) -> np.ndarray:
        parts = [self._encode_part(part) for part in _split_long_white(_whole_characters(text))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_part(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def _hugging_face_model(self) -> tuple[dict[str, int], list[str], bool]:
        vocabulary = [*byte_characters(), *(merge.replace(" ", "") for merge in self._merges)]
        return {token: i for i, token in enumerate(vocabulary)}, self._merges, True


KINDS: dict[str, type[Bytes] | type[GPT2]] = {"gpt2": GPT2, "bytes": Bytes}


def tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name, built once per process."""
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"tokenizer = {short_name(repr(name))}: choose from {', '.join(KINDS)}")
    return _build(name)


@cache
def _build(name: str) -> Tokenizer:
    return KINDS[name]()


@cache
def byte_characters() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes, in order of the ids; unprintable bytes start at U+0100."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _whole_characters(text: str) -> str:
    """Replaces lone surrogates, which JSON allows and UTF-8 does not, by replacement characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _split_long_white(text: str) -> list[str]:
    """Cuts before the last character of a very long run of white space, where the pattern ends a word anyway.

    On such runs the pattern backtracks once per character, and fails from about a million on.
    """
    blocks = range(0, len(text), LONG_WHITE)
    if len(text) < LONG_WHITE or not any(text[i : i + LONG_WHITE].isspace() for i in blocks):
        return [text]
    runs = re.finditer(rf"{WHITE}{{{LONG_WHITE},}}(?!{WHITE})", text)
    cuts = [0, *(run.end() - 1 for run in runs if run.end() < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


def save_tokenizer(tok: Tokenizer, folder: Path, *, max_length: int | None = None) -> None:
    """Writes two files for Hugging Face's AutoTokenizer (which gives the same ids) and for `load_tokenizer`.

    max_length  the model's context length, for truncation in Hugging Face
    """
    vocabulary, merges, words = tok._hugging_face_model()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    added = {"content": END_OF_TEXT, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": tok.end_of_text, **added, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "added_tokens_decoder": {str(tok.end_of_text): {**added, "special": True}},
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text that spells a special token is ordinary text
        **({} if max_length is None else {"model_max_length": max_length}),
        NAME_FIELD: tok.name,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", definition), (CONFIG, config)):
        write_atomically(folder / name, [(json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()])


def load_tokenizer(folder: Path) -> Tokenizer:
    path, remedy = folder / CONFIG, "give the folder of a model saved by Thoughtbubbles"
    with named(path, remedy):
        if not path.exists() and not path.is_symlink():
            raise ValueError(f"{short_name(path)} is missing: {remedy}")
    name = read_object(path, remedy=remedy).get(NAME_FIELD)
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(
            f"{short_name(path)} does not name one of our tokenizers in the field {NAME_FIELD!r} (it is "
            f"{short_name(repr(name))}, the tokenizers are {', '.join(KINDS)}): {remedy}"
        )
    return tokenizer(name)
