"""Text as it comes: whole characters only, and nothing of a stop string before it is known not to be one."""

import codecs
from collections.abc import Sequence

from thoughtbubbles.data.tokenizer import Tokenizer


class TextStream:
    """Turns the tokens of one row into text that can be shown at once. `stopped` tells that a stop string has come."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # the end of the text so far, as long as it may begin a stop string

    def feed(self, token: int) -> str:
        """The text that this token makes certain; the stop string and what follows it is left out."""
        return self._advance(self._bytes.decode(self.tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """What was held back: half a stop string, or half a character (as a replacement character)."""
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
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
