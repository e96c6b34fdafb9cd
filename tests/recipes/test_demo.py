"""`make demo` end to end, for a few steps, and the words it ends with."""

import io
import json
import re
import sys

import pytest
import torch
from rich.console import Console

from helpers import lively_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.show import coloured, streams_per_token
from thoughtbubbles.recipes.demo import BUBBLES, NAMES, NEXT, RECORD, demo, draw, verdict
from thoughtbubbles.recipes.showcase import BUDGETS, PARAGRAPH, showcase, validation_scores
from train.runs import run_command


@pytest.mark.slow
def test_the_demo_shows_all_it_promises(tmp_path):
    out = tmp_path / "demo"
    shown = run_command("demo", "--out", str(out), "--tokens", "8192")
    assert shown.returncode == 0, shown.stderr
    for expected in ("validation loss", "tokens/s", "streams per token", "A sample, with its bubbles", "checkpoint:"):
        assert expected in shown.stdout
    assert shown.stdout.index("bubbles-7m, the model in the package") < shown.stdout.index("four budgets")
    assert (out / "bubbles.svg").read_text().startswith("<svg")
    assert re.findall(r"^bubbles: 8/8, loss .*; plain GPT: 8/8, loss ", shown.stdout, re.MULTILINE)  # in one line
    _, after = shown.stdout.split("What to try next:")
    assert all(words.split("{")[0] in after for words in NEXT)
    for name, words in NAMES.items():
        assert words in shown.stdout
        assert (out / name / "step-00000008" / "model" / "model.safetensors").exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    again = run_command("demo", "--out", str(out), "--tokens", "2048")  # replaces what the first has left
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_model_in_the_package_continues_a_paragraph(tmp_path, is_terminal):
    output = io.StringIO()
    console = Console(
        file=output, force_terminal=is_terminal, width=110, color_system="truecolor" if is_terminal else None
    )
    showcase(tmp_path / "new", console)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())
    assert PARAGRAPH[:60] in shown
    assert ("\x1b[" in output.getvalue()) == is_terminal
    scores = validation_scores()
    rows = re.findall(r"│ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │ +(\d+) │ +([\d.]+) │", shown)
    assert [float(row[0]) for row in rows] == list(BUDGETS)
    for budget, streams, loss, _, bits in rows:
        assert 0.97 * float(budget) <= float(streams) <= float(budget)  # causal selection uses almost all of it
        assert 3 < float(loss) < 4.5
        assert float(bits) == pytest.approx(scores[budget], abs=1e-4)
    picture = (tmp_path / "new" / "bubbles.svg").read_text()
    assert all(f"budget {budget}: " in picture for budget in ("1.5", "2", "4"))
    assert picture.count("<circle") > 700  # about 1.5 + 2 + 4 streams for each of about 100 tokens


def test_without_matplotlib_there_are_no_curves_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw([], tmp_path / "loss.png") is False
    assert not list(tmp_path.iterdir())


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
        {
            "demo-bubbles": {"validation_loss": b, "tokens_per_second": 100.0},
            "demo-plain": {"validation_loss": p, "tokens_per_second": 210.0},
        }
        for b, p in zip(bubbles, plain, strict=True)
    ]
    found = verdict({"machine": "here", "runs": runs})
    assert words in found
    assert "takes 2.1 times as long" in found


def test_the_record_has_three_seeds():
    record = json.loads(RECORD.read_text())
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2]
    assert verdict(record)
