"""Tokenizers, without downloads.

    gpt2     GPT-2's byte-pair encoding: 256 bytes, 50,000 merges in order of their rank, and end-of-text (50256)
    bytes    every byte is its own id (0 … 255), and end-of-text (256): for tiny models and tests
    a folder with one of these, or with a byte-pair encoding of its own (vocabulary.py trains one)

A byte-pair encoding is defined by its list of merges (that of `gpt2` ships with the package): the ids of single bytes
follow from the order in which GPT-2 maps bytes to printable characters, every other id from the position of its merge.
One that was trained is named after its size and a hash of its merges, so equal names mean equal ids. Text that spells a
special token, such as "<|endoftext|>" in a document, is encoded as ordinary text.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import tiktoken

from thoughtbubbles.files import named, read_object, short_name, write_atomically

END_OF_TEXT = "<|endoftext|>"
NAME_FIELD = "thoughtbubbles_tokenizer"
CONFIG, DEFINITION = "tokenizer_config.json", "tokenizer.json"
TRAINED = "bpe"  # how names of trained encodings begin
REMEDY = "give a folder with a tokenizer that Thoughtbubbles saved, or copy this one again"

# GPT-2's pattern that splits text into words, with possessive quantifiers, which backtrack less.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# Python counts four control characters as white space that the pattern above does not.
WHITE = r"[^\S\x1c-\x1f]"
LONG_WHITE = 1 << 16
MOST_MERGES = (1 << 16) - 257  # ids are uint16 on disk


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
        return np.frombuffer(whole_characters(text).encode(), dtype=np.uint8).astype(np.uint16)

    def _hugging_face_model(self) -> tuple[dict[str, int], list[str], bool]:
        return dict(byte_characters()), [], False


class BPE(Tokenizer):
    """Byte-pair encoding of bytes within words, which GPT-2's pattern finds."""

    def __init__(self, name: str, merges: Sequence[str]):
        """`merges`: pairs of tokens in printable characters, such as "Ġ t", in order of their rank."""
        self.merges = list(merges)
        to_byte = {ord(character): chr(byte) for character, byte in byte_characters().items()} | {ord(" "): ""}
        table = [token.translate(to_byte).encode("latin-1") for token in [*byte_characters(), *self.merges]]
        super().__init__(name, table)
        self._encoding = tiktoken.Encoding(
            name,
            pat_str=GPT2_WORDS,
            mergeable_ranks={token: rank for rank, token in enumerate(table)},
            special_tokens={END_OF_TEXT: self.end_of_text},  # never encoded, but encoding is slower without any
            explicit_n_vocab=self.size,
        )

    def encode_array(self, text: str) -> np.ndarray:
        parts = [self._encode_part(part) for part in _split_long_white(whole_characters(text))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_part(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def __reduce__(self) -> tuple[Any, ...]:
        return super().__reduce__() if self.name in NAMED else (_trained, (self.name, "\n".join(self.merges)))

    def _hugging_face_model(self) -> tuple[dict[str, int], list[str], bool]:
        vocabulary = [*byte_characters(), *(merge.replace(" ", "") for merge in self.merges)]
        return {token: i for i, token in enumerate(vocabulary)}, self.merges, True


def _gpt2() -> BPE:
    packed = files("thoughtbubbles").joinpath("assets", "gpt2-vocab.bpe.gz").read_bytes()
    return BPE("gpt2", gzip.decompress(packed).decode().split("\n")[1:-1])  # the first line is the version


NAMED: dict[str, Callable[[], Tokenizer]] = {"gpt2": _gpt2, "bytes": Bytes}


def tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name, built once per process."""
    if not isinstance(name, str) or name not in NAMED:
        raise ValueError(f"tokenizer = {short_name(repr(name))}: choose from {', '.join(NAMED)}")
    return _build(name)


@cache
def _build(name: str) -> Tokenizer:
    return NAMED[name]()


def trained(merges: Sequence[str]) -> Tokenizer:
    """The byte-pair encoding with these merges, named after them."""
    written = "\n".join(merges)
    return _trained(f"{TRAINED}-{257 + len(merges)}-{hashlib.sha256(written.encode()).hexdigest()[:8]}", written)


def is_trained(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and name.startswith(f"{TRAINED}-")


@cache
def _trained(name: str, merges: str) -> Tokenizer:
    return BPE(name, merges.split("\n") if merges else ())


@cache
def byte_characters() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes, in order of the ids; unprintable bytes start at U+0100."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def whole_characters(text: str) -> str:
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


def save_tokenizer(
    tok: Tokenizer, folder: Path, *, max_length: int | None = None, chat_template: str | None = None
) -> None:
    """Writes two files for Hugging Face's AutoTokenizer (which gives the same ids) and for `read_tokenizer`.

    max_length     the model's context length, for truncation in Hugging Face
    chat_template  how the model was trained on chats, as a Jinja template
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
        # Text that spells a special token is ordinary text; but a chat template ends turns with such text.
        "split_special_tokens": chat_template is None,
        **({} if max_length is None else {"model_max_length": max_length}),
        **({} if chat_template is None else {"chat_template": chat_template}),
        NAME_FIELD: tok.name,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((DEFINITION, definition), (CONFIG, config)):
        write_atomically(folder / name, [(json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()])


def read_tokenizer(folder: Path, *, remedy: str = REMEDY) -> Tokenizer:
    """The tokenizer that `save_tokenizer` wrote."""
    path = folder / CONFIG
    with named(path, remedy):
        if not path.exists() and not path.is_symlink():
            raise ValueError(f"{short_name(path)} is missing: {remedy}")
    name = read_object(path, remedy=remedy).get(NAME_FIELD)
    if isinstance(name, str) and name in NAMED:
        return tokenizer(name)
    if not is_trained(name):
        raise ValueError(
            f"{short_name(path)} does not name one of our tokenizers in the field {NAME_FIELD!r} (it is "
            f"{short_name(repr(name))}, the tokenizers are {', '.join(NAMED)}, or {TRAINED}-… for a trained one): "
            f"{remedy}"
        )
    found = trained(_merges(folder / DEFINITION, remedy=remedy))
    if found.name != name:
        raise ValueError(
            f"{short_name(folder / DEFINITION)} is not the tokenizer {short_name(repr(name))} that {CONFIG} names (its "
            f"merges make {found.name!r}): {remedy}"
        )
    return found


def saved_tokenizer(name: str, folder: Path, *, remedy: str = REMEDY) -> Tokenizer:
    """The tokenizer with this name: one that was trained is read from the folder."""
    if not is_trained(name):
        return tokenizer(name)
    found = read_tokenizer(folder, remedy=remedy)
    if found.name != name:
        raise ValueError(
            f"{short_name(folder / CONFIG)} names the tokenizer {found.name!r} instead of {short_name(repr(name))}: "
            f"{remedy}"
        )
    return found


def _merges(path: Path, *, remedy: str) -> list[str]:
    """The list of merges in a tokenizer.json, each written as one string or, by Hugging Face, as a pair."""
    model = read_object(path, remedy=remedy).get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list):
        raise ValueError(f"{short_name(path)} has no list of merges: {remedy}")
    if len(merges) > MOST_MERGES:
        raise ValueError(f"{short_name(path)} has {len(merges):,} merges, more than {MOST_MERGES:,}: {remedy}")

    def refusal(merge: object, because: str) -> ValueError:
        return ValueError(f"{short_name(path)} has the merge {short_name(repr(merge))}, {because}: {remedy}")

    characters, found = set(byte_characters()), {}
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) and p for p in pair)):
            raise refusal(merge, "which is not a pair")
        token = "".join(pair)
        if not characters.issuperset(token):
            raise refusal(merge, "which is not bytes")
        if token in found:
            raise refusal(merge, "but another merge makes the same token")
        found[token] = " ".join(pair)
    return list(found.values())
