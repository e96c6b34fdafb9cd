"""Functions called with values from outside: requests, the model itself, Hugging Face's config, the command line."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CallBase
from mutate import NASTY, Raw

from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.decode import decode_step, prefill
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

SMALL = ModelConfig(n_layer=2, n_head=2, width=8, vocab_size=260, block_size=16, fork_layers=(1,))


def deep(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


PLAIN = tuple(value for value in NASTY if not isinstance(value, Raw))
OBJECTS = (
    *(10**400, -(10**5000), b"", b"bytes", {1, 2}, (), (1, 2), ("a",), object(), len, int, 1j, range(3), deep(5000)),
    *(Decimal("1e99999999"), Decimal("NaN"), Fraction(4, 3), np.float32(1.5), np.int64(2), np.array([1, 2])),
    *(np.array("x"), np.array([], dtype=object), torch.tensor(2), torch.tensor([1.5]), torch.tensor([[1, 2], [3, 4]])),
    *(torch.zeros(0), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([True]), torch.tensor([[10**9]]), Path("x")),
)
ANYTHING = PLAIN + OBJECTS


def requests(folder: Path) -> Sequence[CallBase]:
    """One request next to another, which must not be affected."""
    torch.manual_seed(0)
    model, tok = Thoughtbubbles(SMALL).eval(), tokenizer("bytes")
    good = Request(prompt="ab", max_new=2, sampling=Sampling(temperature=0))
    alone = generate(model, [good], tokenizer=tok)[0].ids
    drawing = tuple(asdict(Sampling()))

    def ask(given: dict[str, Any]) -> str:
        given = dict(given)
        sampling = Sampling(**{name: given.pop(name) for name in drawing if name in given})
        if "sampling" not in given:
            given["sampling"] = sampling
        request = Request(**{name: value for name, value in given.items() if name in Request.__dataclass_fields__})
        other, answer = generate(model, [good, request], tokenizer=tok, on_error="return")
        assert other.ids == alone, "another request has changed this one"
        if answer.error is not None:
            raise ValueError(answer.error)
        return repr(answer.ids)

    base = {"prompt": "abc", "max_new": 2, "budget": 1.5, "stop": ("x",), "end_ids": (256,), "top": 1}
    base |= {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1}
    ids = {**base, "prompt": [1, 2, 3], "stop": ()}
    reason = "another request has another answer"
    return [
        CallBase(arguments=given, call=ask, nasty=nasty, reason=reason)
        for given, nasty in ((base, PLAIN), (ids, PLAIN), (base, ANYTHING), (ids, ANYTHING))
    ]


def calls(folder: Path) -> Sequence[CallBase]:
    """The public functions of the model."""
    torch.manual_seed(0)
    model = Thoughtbubbles(SMALL).eval()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def forward(given: dict[str, Any]) -> str:
        with torch.no_grad():
            found = model(**{name: value for name, value in given.items() if name in arguments})
        return repr([None if value is None else tuple(getattr(value, "shape", ())) for value in found])

    def decode(given: dict[str, Any]) -> str:
        """A step from a cache with spare capacity; `prefill` creates it, unless it is one of the arguments."""
        with torch.no_grad():
            first = {name: given[name] for name in ("ids", "lengths", "budget", "capacity")}
            _, cache = prefill(model, **first)
            cache = cache.grown(SMALL, given["room"])
            prediction, _ = decode_step(model, cache if given["cache"] is None else given["cache"], given["token"])
        return repr(prediction.logits.argmax(-1).tolist())

    arguments = {"ids": ids, "targets": ids, "lengths": [3, 2], "budget": 1.5, "selection": "causal"}
    arguments |= {"budget_mode": "proportional", "want": ("log_probs",), "trace": False}
    stepping = {"ids": ids, "lengths": [3, 2], "budget": 1.5, "token": torch.tensor([7, 8]), "cache": None}
    stepping |= {"capacity": 4, "room": 9}
    reason = "another call has another answer"
    return [
        CallBase(arguments=arguments, call=forward, nasty=ANYTHING, reason=reason),
        CallBase(arguments=stepping, call=decode, nasty=ANYTHING, reason=reason),
        CallBase(
            arguments={"budget": "1.5"},
            call=lambda given: repr(Budget.of(given.get("budget"))),
            nasty=ANYTHING,
            reason=reason,
        ),
        CallBase(
            arguments=asdict(SMALL),
            call=lambda given: repr(ModelConfig(**{name: given[name] for name in asdict(SMALL) if name in given})),
            nasty=ANYTHING,
            reason=reason,
        ),
    ]


SMALL_FIELDS = tuple(asdict(SMALL))
EMPTY, READ = "an empty cache", "a cache that has read"  # each call has its own
WITHIN = ("ids", "targets", "lengths")  # the model's own names of Hugging Face's fields


def hf(folder: Path) -> Sequence[CallBase]:
    """The config.json of a folder as transformers passes it on, and calls of the model, with a cache and without."""
    from thoughtbubbles.interop.hf import ThoughtbubblesCache, ThoughtbubblesConfig, ThoughtbubblesForCausalLM

    torch.manual_seed(0)
    model = ThoughtbubblesForCausalLM(ThoughtbubblesConfig.of(SMALL)).eval()

    written = {**asdict(SMALL), "fork_layers": [1], "n_ids": 257, "use_cache": None, "eos_token_id": 256}
    names = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}

    def make(given: dict[str, Any]) -> str:
        found = ThoughtbubblesConfig(
            **{name: value for name, value in given.items() if name.isidentifier() and name[0] != "_"}
        )
        return repr((found.core(), found.n_ids, found.use_cache, found.eos_token_id))

    def call(given: dict[str, Any]) -> str:
        given = {name: value for name, value in given.items() if name.isidentifier() and len(name) < 100}
        with torch.no_grad():
            if given["past_key_values"] is EMPTY:
                given["past_key_values"] = ThoughtbubblesCache()
            elif given["past_key_values"] is READ:
                given["past_key_values"] = model(ids, use_cache=True).past_key_values
            found = model(**given)
        logits = found[0] if isinstance(found, tuple) else found.logits
        return repr(None if logits is None else tuple(logits.shape))

    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    alone = {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": None, "logits_to_keep": 2}
    alone |= {"num_items_in_batch": 4, "budget": 1.5, "return_dict": None, "past_key_values": None}
    cached = {"labels": None, "use_cache": True, "past_key_values": EMPTY}
    reason = "another config describes another model"
    return [
        *(
            CallBase(arguments={**alone, **changed}, call=call, nasty=ANYTHING, names=WITHIN, reason="another call")
            for changed in ({}, {"labels": None}, cached, {**cached, "past_key_values": READ})
        ),
        CallBase(arguments=written, call=make, nasty=PLAIN, may_lack=True, reason=reason),
        CallBase(arguments=names, call=make, nasty=PLAIN, names=SMALL_FIELDS, may_lack=True, reason=reason),
    ]


UNNAMED = ("model", "prompt", "source", "file or folder")  # name of the positional argument in messages


def forms(option: str) -> list[str]:
    """How a message may write an option: --max-new, max-new, the field's name; or the wrong one of several values."""
    bare = option.lstrip("-")
    return [option, bare, bare.replace("-", "_"), bare.removesuffix("s")]


def commands(folder: Path) -> Sequence[CallBase]:
    """The fast subcommands, with options as text."""
    from thoughtbubbles import cli

    torch.manual_seed(0)
    model = save_model(folder / "model", Thoughtbubbles(SMALL), tokenizer=tokenizer("bytes"))
    text = folder / "text.txt"
    text.write_text("A text to prepare.")

    (folder / "piqa.validation.jsonl").write_text('{"goal": "Open it", "sol1": "Turn.", "sol2": "Eat.", "label": 0}')

    def run(given: dict[str, Any], out: Path | None) -> str:
        """Its output; or its error message, without its own name."""
        words = [part for name, value in given.items() for part in (name, str(value)) if part and "\0" not in part]
        last = [] if out is None else ["--out", str(out)]  # the last one counts: nothing is written elsewhere
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
            try:
                cli.main([*words, *last])
            except SystemExit as error:
                error.code = error.code.partition(": ")[2] if isinstance(error.code, str) else error.code
                raise
        return printed.getvalue()

    nowhere = Path("/dev/null/x")
    verbs: list[tuple[dict[str, Any], Path | None]] = [
        ({"inspect": "nano", "--tokens": 8, "--rows": 2, "--copies": 3, "--budgets": 2}, None),
        (
            {"generate": "ab", "--checkpoint": model, "--max-new": 2, "--budget": 1.5, "--seed": 1, "--top-k": 3}
            | {"--temperature": 0.5, "--top-p": 0.9, "--stop": "x", "--top": 1, "--device": "cpu"},
            None,
        ),
        (
            {
                "eval": "--fresh",
                "--tasks": "piqa",
                "--checkpoint": model,
                "--data-dir": folder,
                "--limit": 1,
                "--windows": 1,
            }
            | {"--budget": 1.5, "--device": "cpu", "--batch-tokens": 64},
            folder / "results",
        ),
        (
            {"prepare": text, "--tokenizer": "bytes", "--val-fraction": 0.1, "--shard-tokens": 9, "--limit": 1}
            | {"--processes": 1},
            nowhere,
        ),
        (
            {"train": "tiny", "--tokens": 64, "--model.width": 8, "--model.n-head": 2, "--optim.lr": 1, "--seed": 1}
            | {"--eval.every": 1, "--data.mixture": folder},
            nowhere,
        ),
    ]
    # Without paths that rightly take long to read, such as a whole disk.
    short = tuple(v for v in PLAIN if len(str(v)) < 10_000 and v not in ("/", ".", "..", "../x", "~"))
    return [
        CallBase(
            arguments=given,
            call=lambda given, out=out: run(given, out),
            nasty=short,
            names=[*UNNAMED, str(nowhere), *(form for name in list(given)[1:] for form in forms(name))],
            reason="another command does something else",
            is_refused=out is nowhere,
        )
        for given, out in verbs
    ]
