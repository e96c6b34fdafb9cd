"""`thoughtbubbles generate`: streams generated text to a terminal or a pipe.

Standard output gets the prompt and its continuation (followed by the numbers of streams or a colour legend, if
requested), or one line of JSON. Remarks and the summary go to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from thoughtbubbles.checkpoint import find_model, load, load_tokenizer
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.distributed import find_device
from thoughtbubbles.generate.requests import Completion, Method, Request, Token, budget_remark, exact_method, stream
from thoughtbubbles.generate.show import BubblePrinter, Screen, colour, legend, shown, streams_per_token
from thoughtbubbles.model.config import BudgetMode
from thoughtbubbles.model.inputs import rule_of
from thoughtbubbles.model.transformer import Thoughtbubbles

DEVICES = ("cuda", "cpu")  # not mps: sampling uses float64, which mps lacks
APPROXIMATE = (
    "This model uses block selection, which ranks the full row. The KV cache uses the causal rule instead, an "
    "approximation; `thoughtbubbles eval --tasks perplexity` measures its effect."
)


def read_prompt(given: str) -> str:
    """The prompt from the command line, or for "-" from standard input, without one trailing newline."""
    if given != "-":
        text = os.fsencode(given).decode(errors="replace")
    elif sys.stdin.isatty():
        raise ValueError(
            "there is no prompt: give it as an argument, or through a pipe: echo 'Once upon a time' | thoughtbubbles "
            "generate"
        )
    else:
        try:
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"the prompt on standard input is not UTF-8 text ({error}): convert it first") from None
    if not text:
        raise ValueError("the prompt is empty: give at least one character to continue")
    return text


@dataclass(frozen=True)
class Reader:
    """A model loaded for one request, and how it decodes."""

    folder: Path
    model: Thoughtbubbles
    tokenizer: Tokenizer
    request: Request
    prompt: list[int]  # the request's prompt as ids: it is tokenized once
    method: Method
    budget_mode: BudgetMode | None
    compiled: bool

    @classmethod
    def open(
        cls,
        folder: Path | None,
        request: Request,
        *,
        method: Method | None,
        budget_mode: BudgetMode | None,
        compiled: bool,
        device: str,
        dtype: torch.dtype,
    ) -> "Reader":
        folder = find_model(folder)
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise ValueError(
                f"--checkpoint {folder} has no tokenizer.json, which text generation needs: save the model with "
                "save_model(…, tokenizer=…)"
            )
        model = load(folder, device=device, dtype=dtype).eval()
        prompt = tokenizer.encode(str(request.prompt))
        method = method or exact_method(model.config)
        return cls(folder, model, tokenizer, request, prompt, method, budget_mode, compiled)

    def start(self) -> Iterable[Token]:
        """The new tokens, as they are generated; a bad request raises ValueError here."""
        tokens = stream(
            self.model,
            [replace(self.request, prompt=self.prompt)],
            tokenizer=self.tokenizer,
            method=self.method,
            budget_mode=self.budget_mode,
            compiled=self.compiled,
        )
        rule_of(self.model.config, 1, **self.rule)
        return tokens

    @property
    def rule(self) -> dict[str, Any]:
        """Options of the model's forward under which it forks as it does here: the cache has its own rule."""
        by_cache = {"selection": "causal", "budget_mode": "proportional"}
        as_is = {"selection": None, "budget_mode": self.budget_mode}
        return {"budget": self.request.budget, **(by_cache if self.method == "cached" else as_is)}

    @property
    def is_approximate(self) -> bool:
        return self.method == "cached" != exact_method(self.model.config)

    @property
    def budget(self) -> float | None:
        """Streams per token; None for a model that has nothing to choose."""
        config, asked = self.model.config, self.request.budget
        return float(Fraction(str(config.budget if asked is None else asked))) if config.chooses_forks else None

    def settings(self) -> dict[str, Any]:
        """The settings, for JSON."""
        config, weight = self.model.config, self.model.embedding.weight
        return {
            "checkpoint": str(self.folder),
            "method": self.method,
            "selection": (self.rule["selection"] or config.selection) if config.chooses_forks else None,
            "budget": self.budget,
            "budget_mode": (self.rule["budget_mode"] or config.budget_mode) if config.chooses_forks else None,
            "max_new": self.request.max_new,
            "stop": list(self.request.stop),
            **asdict(self.request.sampling),
            "device": weight.device.type,
            "dtype": str(weight.dtype).removeprefix("torch."),
        }


@dataclass
class Written(Completion):
    """A completion with timings, in seconds."""

    prefill: float = 0.0  # until the first new token
    decode: float = 0.0  # from the first to the last
    begin: float = field(default_factory=time.perf_counter)

    def add(self, token: Token, *, with_text: bool = True) -> None:
        elapsed = time.perf_counter() - self.begin
        self.prefill, self.decode = (self.prefill, elapsed - self.prefill) if self.ids else (elapsed, 0.0)
        super().add(token, with_text=with_text)

    @property
    def rate(self) -> float | None:
        """Tokens per second, without the first token."""
        return (len(self.ids) - 1) / self.decode if len(self.ids) > 1 else None


def write(
    request: Request,
    *,
    checkpoint: Path | None = None,
    method: Method | None = None,
    budget_mode: BudgetMode | None = None,
    compiled: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    show_bubbles: bool = False,
    as_json: bool = False,
) -> None:
    """Writes the continuation of the request's prompt, and a summary; `options.generate` documents the options."""
    device = find_device(device, among=DEVICES)
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    reader = Reader.open(
        checkpoint,
        request,
        method=method,
        budget_mode=budget_mode,
        compiled=compiled,
        device=device,
        dtype=getattr(torch, dtype),
    )
    tokens = reader.start()
    screen, remarks = Screen(silent=as_json), Console(stderr=True, highlight=False, markup=False)
    if reader.is_approximate:
        remarks.print(APPROXIMATE, soft_wrap=True)
    if request.budget is not None and (remark := budget_remark(reader.model.config, request.budget)):
        remarks.print(remark, soft_wrap=True)
    written, bubbles = Written(), BubblePrinter(reader.tokenizer) if show_bubbles else None
    try:
        if bubbles is None:
            _show_text(reader, tokens, written, screen)
        else:
            _show_bubbles(reader, tokens, written, screen, bubbles)
    except KeyboardInterrupt:
        screen.show("\n")
        remarks.print(f"interrupted after {len(written.ids)} new tokens", style="dim")
        raise
    screen.show("\n")
    if as_json:
        screen.put(json.dumps(described(reader, written, bubbles), ensure_ascii=False) + "\n")
    elif bubbles is not None and screen.has_colours:
        screen.console.print(legend(reader.model), soft_wrap=True)
    elif bubbles is not None:
        screen.put(bubbles.digits + "\n")
        remarks.print("digits: streams of each token after the last fork layer (9: nine or more)", style="dim")
    if request.top and not as_json:
        remarks.print(top_table(reader.tokenizer, written))
    remarks.print(summary(reader, written), style="dim", soft_wrap=True)


def _show_text(reader: Reader, tokens: Iterable[Token], written: Written, screen: Screen) -> None:
    screen.show(str(reader.request.prompt), "dim")
    for token in tokens:
        written.add(token)
        screen.show(token.text)


def _show_bubbles(
    reader: Reader, tokens: Iterable[Token], written: Written, screen: Screen, bubbles: BubblePrinter
) -> None:
    """Shows tokens one step late: each event has the number of streams of the token before."""

    def show() -> None:
        for text, streams in bubbles.ready():
            screen.show(text, colour(streams))

    bubbles.sizes += streams_per_token(reader.model, reader.prompt, **reader.rule)
    for number in reader.prompt:
        bubbles.add(number)
    bubbles.release(len(str(reader.request.prompt)))
    show()
    written.begin = time.perf_counter()
    for token in tokens:
        if written.ids:
            bubbles.sizes.append(token.streams)
        written.add(token)
        bubbles.add(token.id, is_text=token.finish != "end", is_last=token.finish is not None)
        bubbles.release(len(token.text))
        show()
    bubbles.sizes.append(streams_per_token(reader.model, [*reader.prompt, *written.ids], **reader.rule)[-1])
    show()


def described(reader: Reader, written: Written, bubbles: BubblePrinter | None) -> dict[str, Any]:
    """The completion, for JSON."""
    top = [
        [{"id": i, "text": shown(reader.tokenizer, i), "log_prob": log_prob} for i, log_prob in likeliest]
        for likeliest in written.top
    ]
    return {
        "prompt": reader.request.prompt,
        "text": written.text,
        "prompt_ids": reader.prompt,
        "ids": written.ids,
        "log_probs": written.log_probs,
        "streams": written.streams,
        **({"bubbles": bubbles.sizes} if bubbles else {}),
        **({"top": top} if reader.request.top else {}),
        "finish": written.finish,
        "prefill_seconds": written.prefill,
        "tokens_per_second": written.rate,
        "settings": reader.settings(),
    }


def top_table(tokenizer: Tokenizer, written: Written) -> Table:
    table = Table("token", "log p", "likeliest tokens", title="the model's own log-probabilities")
    for token, log_prob, likeliest in zip(written.ids, written.log_probs, written.top, strict=True):
        others = "  ".join(f"{shown(tokenizer, i)!r} {found:.2f}" for i, found in likeliest)
        table.add_row(repr(shown(tokenizer, token)), f"{log_prob:.2f}", others)
    return table


def summary(reader: Reader, written: Written) -> str:
    count, block = len(written.ids), reader.model.config.block_size
    full = f"the model's context of {block} tokens is full"
    why = {
        "stop": "a stop string was generated",
        "end": "the model ended the text",
        "length": full if len(reader.prompt) + count == block else f"--max-new {count} is reached",
    }
    over = f"mean over the {count} token{'s' * (count > 1)} that predicted a new one"
    if reader.budget is not None:
        over += f", after the last fork layer; budget {reader.budget:g}, over prompt and text"
    parts = [
        f"{count} new token{'s' * (count > 1)}" + (f" at {written.rate:,.1f} tokens/s" if written.rate else ""),
        f"prompt of {len(reader.prompt)} read in {written.prefill:.3f} s",
        f"{sum(written.streams) / count:.2f} streams per token ({over})",
        reader.method,
        f"seed {reader.request.sampling.seed}",
        f"ended: {why[written.finish or '']}",
    ]
    return "; ".join(parts)
