"""`make demo` end to end, for a few steps, and the words it ends with."""

import json

import pytest
import torch

from helpers import lively_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.show import coloured, streams_per_token
from thoughtbubbles.recipes.demo import BUBBLES, NAMES, RECORD, demo, verdict
from train.runs import run_command


@pytest.mark.slow
def test_the_demo_shows_all_it_promises(tmp_path):
    out = tmp_path / "demo"
    shown = run_command("demo", "--out", str(out), "--tokens", "8192")
    assert shown.returncode == 0, shown.stderr
    for expected in ("validation loss", "tokens/s", "streams per token", "A sample, with its bubbles", "checkpoint:"):
        assert expected in shown.stdout
    for name, words in NAMES.items():
        assert words in shown.stdout
        assert (out / name / "step-00000008" / "model" / "model.safetensors").exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    again = run_command("demo", "--out", str(out), "--tokens", "2048")  # replaces what the first has left
    assert again.returncode == 0, again.stderr


def test_both_models_have_the_same_size():
    bubbles, plain = demo("demo-bubbles"), demo("demo-plain")
    assert bubbles.model == BUBBLES
    assert plain.model.fork_layers == ()
    assert (plain.model.n_layer, plain.model.width) == (bubbles.model.n_layer, bubbles.model.width)
    assert plain.steps == bubbles.steps
    assert plain.optim == bubbles.optim


def test_colours_tell_the_streams():
    model = lively_model(BUBBLES, dtype=torch.float32)
    ids = tokenizer("bytes").encode("Return the value")
    text, numbers = coloured(tokenizer("bytes"), ids, streams_per_token(model, ids))
    sizes = model(torch.tensor([ids]), trace=True).forks[-1].bubble_size[0].tolist()
    assert text.plain == "Return the value"
    assert numbers == "".join(map(str, sizes))
    colours = {str(span.style): sizes[span.start] for span in text.spans}
    assert len(set(colours.values())) == len(colours) > 1


@pytest.mark.parametrize(
    ("bubbles", "plain", "words"),
    [
        ([1.0, 1.1], [1.2, 1.2], "bubbles were ahead in 2 of 2 seeds, by 0.150 nats"),
        ([1.2, 1.2], [1.0, 1.1], "the plain model was ahead in 2 of 2 seeds, by 0.150 nats"),
        ([1.0, 1.2], [1.1, 1.1], "equal within noise: bubbles were ahead in 1 of 2 seeds"),
    ],
)
def test_the_verdict_follows_the_numbers(bubbles, plain, words):
    runs = [
        {"demo-bubbles": {"validation_loss": b}, "demo-plain": {"validation_loss": p}}
        for b, p in zip(bubbles, plain, strict=True)
    ]
    assert words in verdict({"machine": "here", "runs": runs})


def test_the_record_has_three_seeds():
    record = json.loads(RECORD.read_text())
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2]
    assert verdict(record)
