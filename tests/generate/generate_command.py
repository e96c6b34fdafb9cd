"""What the tests of `thoughtbubbles generate` share: saved models, and ways to run the command in this process."""

import json
from typing import Any

import pytest
import torch

from helpers import lively_model, small_config
from thoughtbubbles.checkpoint import load, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.model.transformer import Thoughtbubbles

BYTES = tokenizer("bytes")
PROMPT = "wörd\tby "
N_PROMPT = 9  # its bytes
EXACT = ("--dtype", "float64")
GREEDY = ("--temperature", "0", "--repetition-penalty", "3")  # the penalty keeps it from writing one byte for ever
FORMS = {"causal": {}, "block": {"selection": "block"}, "plain": {"fork_layers": ()}, "long": {"block_size": 512}}


def save_models(tmp_path_factory) -> dict[str, str]:
    """Saved models that write wild bytes, half characters among them, and practically never the end of text."""
    found = {}
    for name, changes in FORMS.items():
        model = lively_model(small_config(**{"vocab_size": 300, "block_size": 64, **changes}))
        with torch.no_grad():
            model.embedding.weight *= 2.5
            model.embedding.weight[BYTES.end_of_text] = 0
        found[name] = str(save_model(tmp_path_factory.mktemp(name) / "model", model, tokenizer=BYTES))
    return found


def run(capsys, *arguments: str) -> tuple[str, str]:
    main(["generate", *arguments])
    captured = capsys.readouterr()
    return captured.out, captured.err


def run_json(capsys, *arguments: str) -> dict[str, Any]:
    out, _ = run(capsys, *arguments, "--json")
    assert out.endswith("}\n")
    assert out.count("\n") == 1
    return json.loads(out)


def mistake(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as raised:
        main(["generate", *arguments])
    assert capsys.readouterr().out == ""
    return str(raised.value.code)


def model_of(folder: str, dtype: torch.dtype = torch.float64) -> Thoughtbubbles:
    return load(folder, dtype=dtype)
