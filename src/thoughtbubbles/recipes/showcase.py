"""The first seconds of the demo: the model in the package continues a paragraph, with its bubbles, at four budgets."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from thoughtbubbles.checkpoint import load, load_tokenizer
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.files import SHIPPED, read_object, shipped_model, write_atomically
from thoughtbubbles.generate.picture import Panel, draw, lines
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.generate.show import coloured, legend, shown, streams_per_token
from thoughtbubbles.model.transformer import Thoughtbubbles

BUDGETS = (1.0, 1.5, 2.0, 4.0)
SHOWN = 4  # the budget of the text in colour: its bubbles differ the most
NEW_TOKENS = 40
TIMED_TOKENS = 16
PARAGRAPH = """\
The lighthouse stands on a narrow strip of rock at the mouth of the bay. It was built in 1871, after a storm had \
driven three ships onto the reef in one night, and for almost a century a keeper and his family lived in the small \
house beside it. Every evening he climbed the stairs, filled the lamp with oil and lit it; every morning he wrote the \
weather and the names of the passing ships into a book. One winter night"""


CAUTION = "One paragraph is too short to tell budgets apart; the last column is over 1.1 million tokens."


class Score(NamedTuple):
    """What the paragraph costs at one budget."""

    budget: float
    streams: list[int]  # of each token, after the last fork layer
    nats: float  # per token
    milliseconds: float  # per new token


def showcase(out: Path, console: Console) -> None:
    """Prints the text and the table, and saves a picture in `out`."""
    tokenizer = load_tokenizer()
    assert tokenizer is not None
    model = load(dtype=torch.float32)
    ids = tokenizer.encode(PARAGRAPH)
    parameters = sum(weight.numel() for weight in model.parameters())
    console.print(
        f"{SHIPPED}, the model in the package ({parameters / 1e6:.1f}M parameters), continues a paragraph, with a "
        f"budget of {SHOWN} streams per token:\n",
        soft_wrap=True,
    )
    show_continuation(model, tokenizer, ids, console)
    scores = [score(model, ids, budget) for budget in BUDGETS]
    card = shipped_model() / "README.md"
    card = card.relative_to(Path.cwd()) if card.is_relative_to(Path.cwd()) else card
    console.print(table(scores), CAUTION, f"more about the model:   {card}", sep="\n", soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "bubbles.svg"
    write_atomically(picture, [draw([panel(tokenizer, ids, each) for each in scores[1:]]).encode()])
    console.print(f"picture of its bubbles: {picture}", soft_wrap=True)


def show_continuation(model: Thoughtbubbles, tokenizer: Tokenizer, ids: Sequence[int], console: Console) -> None:
    request = Request(
        prompt=ids, max_new=NEW_TOKENS, budget=SHOWN, sampling=Sampling(temperature=0.7, seed=1), end_ids=()
    )
    (written,) = generate(model, [request], tokenizer=tokenizer)
    both = [*ids, *written.ids]
    streams = streams_per_token(model, both, budget=SHOWN)
    for line in [range(len(both))] if console.is_terminal else lines([shown(tokenizer, i) for i in both]):
        text, numbers = coloured(tokenizer, [both[at] for at in line], [streams[at] for at in line])
        console.print(text, soft_wrap=True)
        if not console.is_terminal:  # without colours, the numbers of streams below each line
            console.print(numbers, style="dim", soft_wrap=True)
    console.print(legend(model) if console.is_terminal else "digits: streams of each token above", "\n")


@torch.no_grad()
def score(model: Thoughtbubbles, ids: Sequence[int], budget: float) -> Score:
    row = torch.tensor([list(ids)])
    loss = model(row[:, :-1], targets=row[:, 1:], budget=budget).loss
    assert loss is not None
    seconds = generation_time(model, ids, budget, 1 + TIMED_TOKENS) - generation_time(model, ids, budget, 1)
    streams = streams_per_token(model, ids, budget=budget)
    return Score(budget, streams, loss.item(), 1000 * seconds / TIMED_TOKENS)


def generation_time(model: Thoughtbubbles, ids: Sequence[int], budget: float, n_tokens: int) -> float:
    """In seconds, with the reading of the prompt."""
    request = Request(prompt=ids, max_new=n_tokens, budget=budget, sampling=Sampling(temperature=0), end_ids=())
    begin = time.perf_counter()
    generate(model, [request])
    return time.perf_counter() - begin


def table(scores: Sequence[Score]) -> Table:
    recorded = validation_scores()
    found = Table(title="The same paragraph at four budgets", title_justify="left")
    for heading in (
        "budget",
        "streams\nper token",
        "loss here\n(nats per token)",
        "ms per\nnew token",
        "all validation text\n(bits per byte)",
    ):
        found.add_column(heading, justify="right", no_wrap=True)
    for each in scores:
        found.add_row(
            f"{each.budget:g}",
            f"{sum(each.streams) / len(each.streams):.2f}",
            f"{each.nats:.3f}",
            f"{each.milliseconds:.0f}",
            f"{recorded[f'{each.budget:g}']:.4f}",
        )
    return found


def validation_scores() -> dict[str, float]:
    """Bits per byte by budget, over the whole validation text, from the model's run card."""
    card: dict[str, Any] = read_object(shipped_model() / "run.json")
    return {budget: each["bits_per_byte"] for budget, each in card["scores"].items()}


def panel(tokenizer: Tokenizer, ids: Sequence[int], each: Score) -> Panel:
    caption = f"{SHIPPED}, budget {each.budget:g}: {sum(each.streams) / len(each.streams):.2f} streams per token"
    return Panel(f"{caption}, loss {each.nats:.3f} nats per token", [shown(tokenizer, i) for i in ids], each.streams)
