"""Text with its bubbles: every token in a colour that tells how many streams it has."""

from collections.abc import Iterable, Sequence

import torch
from rich.text import Text

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.model.transformer import Thoughtbubbles

COLOURS = ("white", "green", "yellow", "dark_orange", "red")  # of 1, 2, 3, 4, and more streams


def colour(streams: int) -> str:
    return COLOURS[min(streams, len(COLOURS)) - 1]


def shown(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself; half a character, as some tokens are, becomes a replacement character."""
    return "¶" if token == tokenizer.end_of_text else tokenizer.token_bytes(token).decode(errors="replace")


def coloured(tokenizer: Tokenizer, ids: Iterable[int], streams: Iterable[int]) -> tuple[Text, str]:
    """The text, and the numbers of streams below each other, where colours are lost."""
    text, numbers = Text(), ""
    for token, count in zip(ids, streams, strict=True):
        word = shown(tokenizer, token)
        text.append(word, style=colour(count))
        numbers += "\n" if word == "\n" else str(min(count, 9)) * len(word)
    return text, numbers


def legend(model: Thoughtbubbles) -> Text:
    text = Text("streams of each token after the last fork layer: ")
    most = model.config.max_bubble
    for count, name in enumerate(COLOURS[:most], start=1):
        text.append(f" {count}{'+' if count == len(COLOURS) < most else ''} ", style=f"reverse {name}")
    return text


@torch.no_grad()
def bubble_sizes(model: Thoughtbubbles, ids: Sequence[int], **options: object) -> list[int]:
    """Streams of each token after the last fork layer; `options` are those of the model's call."""
    device = model.embedding.weight.device
    out = model(torch.tensor([list(ids)], device=device), trace=True, **options)
    if not out.forks:
        return [model.config.copies] * len(ids)
    sizes: list[int] = out.forks[-1].bubble_size[0].tolist()
    return sizes
