"""Incremental decoding of tokens to text: complete characters only, and no part of what may become a stop string."""

import codecs
from collections.abc import Sequence

from thoughtbubbles.data.tokenizer import Tokenizer


class TextStream:
    """Turns the tokens of one row into text that can be shown immediately. `stopped`: a stop string was generated."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # the end of the text so far, while it may be the start of a stop string

    def feed(self, token: int) -> str:
        """The text that can be shown after this token, without a stop string and what follows it."""
        return self._advance(self._bytes.decode(self.tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """The text held back: the start of a stop string, or half a character (as a replacement character)."""
        if self.stopped:
            return ""
        rest = self._advance(self._bytes.decode(b"", final=True))
        held, self._held = self._held, ""
        return rest if self.stopped else rest + held

    def _advance(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
