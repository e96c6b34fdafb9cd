"""Text with its bubbles: the colour of a token shows its number of streams."""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.text import TextStream
from thoughtbubbles.model.transformer import Thoughtbubbles

COLOURS = ("white", "green", "yellow", "dark_orange", "red")  # for 1, 2, 3, 4, and more streams

# A model may write anything: on a terminal, control characters are replaced by printable symbols.
HARMLESS = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    0x7F: 0x2421,
}


def colour(streams: int) -> str:
    return COLOURS[min(streams, len(COLOURS)) - 1]


def shown(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token; a token that is part of a character becomes a replacement character."""
    return "¶" if token == tokenizer.end_of_text else tokenizer.token_bytes(token).decode(errors="replace")


def coloured(tokenizer: Tokenizer, ids: Iterable[int], streams: Iterable[int]) -> tuple[Text, str]:
    """The coloured text, and the numbers of streams as digits, for output without colours."""
    text, numbers = Text(), ""
    for token, count in zip(ids, streams, strict=True):
        word = shown(tokenizer, token)
        text.append(word, style=colour(count))
        numbers += digits(word, count)
    return text, numbers


def digits(text: str, streams: int) -> str:
    """The number of streams (at most 9) for each character; newlines are kept."""
    return "".join("\n" if character == "\n" else str(min(streams, 9)) for character in text)


def legend(model: Thoughtbubbles) -> Text:
    text = Text("streams of each token after the last fork layer: ")
    most = model.config.max_bubble
    for count, name in enumerate(COLOURS[:most], start=1):
        text.append(f" {count}{'+' if count == len(COLOURS) < most else ''} ", style=f"reverse {name}")
    return text


@torch.no_grad()
def streams_per_token(model: Thoughtbubbles, ids: Sequence[int], **options: object) -> list[int]:
    """Streams of each token after the last fork layer; `options` are passed to the model."""
    device = model.embedding.weight.device
    out = model(torch.tensor([list(ids)], device=device), trace=True, **options)
    if not out.forks:
        return [model.config.copies] * len(ids)
    sizes: list[int] = out.forks[-1].bubble_size[0].tolist()
    return sizes


class BubblePrinter:
    """Text with the streams of its tokens. A token's number is known only when it has predicted the next token."""

    def __init__(self, tokenizer: Tokenizer):
        self.sizes: list[int] = []  # streams of each token, as far as known
        self.digits = ""  # for the text shown so far
        self._n_tokens = 0
        self._text = TextStream(tokenizer)
        self._characters: deque[tuple[str, int]] = deque()  # not shown yet, with the token that completed each
        self._released = 0  # how many of them are not part of a stop string

    def add(self, token: int, *, is_text: bool = True, is_last: bool = False) -> None:
        self._n_tokens += is_text
        text = (self._text.feed(token) if is_text else "") + (self._text.finish() if is_last else "")
        self._characters.extend((character, self._n_tokens - 1) for character in text)

    def release(self, n_characters: int) -> None:
        self._released += n_characters

    def ready(self) -> list[tuple[str, int]]:
        """The text that can be shown now, in pieces with their numbers of streams."""
        pieces: list[tuple[str, int]] = []
        last = -1
        while self._released and self._characters and self._characters[0][1] < len(self.sizes):
            character, number = self._characters.popleft()
            self._released -= 1
            self.digits += digits(character, self.sizes[number])
            before = pieces.pop()[0] if number == last else ""
            pieces.append((before + character, self.sizes[number]))
            last = number
        return pieces


class Screen:
    """Standard output, in colours if it supports them, without buffering. `silent`: text is not shown."""

    def __init__(self, *, silent: bool) -> None:
        self.console = Console(highlight=False)
        self.silent = silent
        self.has_colours = self.console.color_system is not None and not self.console.no_color

    def show(self, text: str, style: str = "") -> None:
        if not self.silent and text:
            self.put(text, style)

    def put(self, text: str, style: str = "") -> None:
        if self.console.is_terminal:
            text = text.translate(HARMLESS)
        self.console.print(Segments([Segment(text, Style.parse(style))]), soft_wrap=True)
