"""`thoughtbubbles generate`: the command streams the text of the library, and reports mistakes."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from generate.generate_command import (
    BYTES,
    EXACT,
    GREEDY,
    N_PROMPT,
    PROMPT,
    mistake,
    model_of,
    run,
    run_json,
    save_models,
)
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.requests import Request, generate, stream
from thoughtbubbles.generate.sample import Sampling
from train.runs import command, environment


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return save_models(tmp_path_factory)


def pipe_in(monkeypatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


@pytest.mark.parametrize("form", ["causal", "block", "plain"])
def test_the_text_is_the_library_s(folders, form, capsys):
    request = Request(prompt=PROMPT, max_new=30, sampling=Sampling(temperature=0.8))
    (expected,) = generate(model_of(folders[form], torch.float32), [request], tokenizer=BYTES)
    out, err = run(capsys, PROMPT, "--checkpoint", folders[form], "--max-new", "30")
    assert out == PROMPT + expected.text + "\n"
    for words in ("30 new tokens at ", f"prompt of {N_PROMPT} read in ", "seed 0", "ended: --max-new 30 is reached"):
        assert words in err
    mean = sum(expected.streams) / 30
    over = "mean over the 30 tokens that predicted a new one"
    rest = "" if form == "plain" else ", after the last fork layer; budget 2, over prompt and text"
    assert f"; {mean:.2f} streams per token ({over}{rest});" in err
    assert "no limit" not in err
    assert ("; uncached;" if form == "block" else "; cached;") in err


def test_every_option_reaches_the_request(folders, capsys):
    sampling = Sampling(temperature=1.5, top_k=40, top_p=0.95, min_p=0.001, repetition_penalty=1.3, seed=7)
    request = Request(prompt=PROMPT, max_new=25, budget="4/3", sampling=sampling, stop=("zz", "qq"), top=2)
    (expected,) = generate(model_of(folders["causal"]), [request], tokenizer=BYTES)
    options = "--temperature 1.5 --top-k 40 --top-p 0.95 --min-p 0.001 --repetition-penalty 1.3 --seed 7 --max-new 25"
    more = ["--budget", "4/3", "--stop", "zz", "--stop", "qq", "--top", "2", "--device", "cpu"]
    found = run_json(capsys, PROMPT, "--checkpoint", folders["causal"], *options.split(), *more, *EXACT)
    assert found["prompt"] == PROMPT
    assert found["prompt_ids"] == BYTES.encode(PROMPT)
    for name in ("text", "ids", "log_probs", "streams", "finish"):
        assert found[name] == getattr(expected, name), name
    assert [[(one["id"], one["log_prob"]) for one in place] for place in found["top"]] == [*map(list, expected.top)]
    assert found["tokens_per_second"] > 0
    assert found["prefill_seconds"] > 0
    settings = found["settings"]
    assert settings["checkpoint"] == folders["causal"]
    assert settings["budget"] == pytest.approx(4 / 3)
    assert settings["stop"] == ["zz", "qq"]
    assert (settings["method"], settings["selection"]) == ("cached", "causal")
    assert (settings["seed"], settings["top_k"], settings["min_p"]) == (7, 40, 0.001)
    assert (settings["device"], settings["dtype"]) == ("cpu", "float64")


def test_text_is_flushed_piece_by_piece(folders, monkeypatch):
    class Watched(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def flush(self) -> None:
            self.seen += [self.getvalue()] if self.getvalue() not in self.seen[-1:] else []

    request = Request(prompt=PROMPT, max_new=30, sampling=Sampling(temperature=0.8))
    expected = [PROMPT]
    for token in stream(model_of(folders["causal"]), [request], tokenizer=BYTES):
        expected += [expected[-1] + token.text] if token.text else []
    monkeypatch.setattr(sys, "stdout", watched := Watched())
    main(["generate", PROMPT, "--checkpoint", folders["causal"], "--max-new", "30", *EXACT])
    assert len(expected) > 20
    assert watched.seen == [*expected, expected[-1] + "\n"]


@pytest.mark.parametrize("options", [(), ("--show-bubbles", "--json"), ("--method", "uncached")], ids=str)
def test_the_prompt_is_tokenized_once(folders, capsys, monkeypatch, options):
    encoded, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [encoded.append(text), encode(self, text)][1])
    run(capsys, PROMPT, "--checkpoint", folders["causal"], "--max-new", "3", *options)
    assert encoded == [PROMPT]


@pytest.mark.slow
def test_seeds(folders, capsys):
    texts = [
        run(capsys, PROMPT, "--checkpoint", folders["causal"], "--max-new", "20", "--temperature", "2", *seed)[0]
        for seed in ((), ("--seed", "0"), ("--seed", "1"))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_both_methods_write_the_same_greedy_text(folders, capsys):
    same = (PROMPT, "--checkpoint", folders["causal"], *GREEDY, *EXACT)
    cached, uncached = (run(capsys, *same, "--method", method) for method in ("cached", "uncached"))
    assert cached[0] == uncached[0]
    assert "; cached;" in cached[1]
    assert "; uncached;" in uncached[1]
    assert "the model's context of 64 tokens is full" in cached[1]


def test_the_prompt_from_standard_input(folders, capsys, monkeypatch):
    options = ("--checkpoint", folders["causal"], "--max-new", "8")
    for dash in ((), ("-",)):
        pipe_in(monkeypatch, b"a b\r\n\n\n")
        assert run_json(capsys, *dash, *options)["prompt"] == "a b\r\n\n"  # one newline less, nothing else
    pipe_in(monkeypatch, PROMPT.encode())
    piped = run(capsys, *options)[0]
    assert piped == run(capsys, PROMPT, *options)[0]
    pipe_in(monkeypatch, b"h\xffi")
    assert "not UTF-8 text" in mistake(capsys, *options)
    pipe_in(monkeypatch, b"\n")
    assert "the prompt is empty" in mistake(capsys, *options)
    _, terminal = pty.openpty()
    with open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert "there is no prompt: give it as an argument" in mistake(capsys, *options)


def test_an_approximation_says_so(folders, capsys):
    options = ("--max-new", "3", "--method", "cached")
    _, err = run(capsys, PROMPT, "--checkpoint", folders["block"], *options)
    assert "approximation; `thoughtbubbles eval --tasks perplexity`" in err
    for form in ("causal", "plain"):
        assert "approximation" not in run(capsys, PROMPT, "--checkpoint", folders[form], *options)[1]


@pytest.mark.parametrize(
    ("form", "budget", "remark"),
    [
        ("causal", "9", "budget = 9: 3 fork layers make at most 8 streams per token, so this is no limit\n"),
        ("plain", "1_0", "budget = 1_0: this model has no fork layers, so a budget changes nothing\n"),
    ],
)
def test_a_budget_that_is_no_limit_says_so(folders, form, budget, remark, capsys):
    options = (PROMPT, "--checkpoint", folders[form], "--max-new", "4", "--top-k", str(10**30))
    out, err = run(capsys, *options, "--budget", budget)
    assert err.startswith(remark)
    most, err = run(capsys, *options, "--budget", "8" if form == "causal" else "1")
    assert most == out
    assert "no limit" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--budget 0.5", "budget = 0.5 is below 1"),
        ("--budget 1e99999999", "budget = '1e99999999' is not a number"),
        ("--budget 1e-99999999", "budget = '1e-99999999' is not a number"),
        ("--budget 1e9_9999999", "budget = '1e9_9999999' is not a number"),
        ("--budget 1/3e9", "budget = '1/3e9' is not a number"),
        (f"--budget {'9' * 5000}", "is not a number"),
        (f"--budget {10**60 + 1}/{10**60}", "budget is too large or has too many digits for 64 tokens"),
        ("--budget ０", "budget = ０ is below 1"),
        ("--temperature nan", "temperature = nan: give 0 (greedy) or 0.001"),
        ("--temperature inf", "temperature = inf: give 0 (greedy) or 0.001"),
        (f"--seed {10**30}", f"seed = {10**30}: give a whole number from"),
        (f"--max-new {10**30}", f"a prompt of 9 and {10**30} new tokens are more than block_size = 64"),
        (f"--top {10**30}", f"top = {10**30}: give a whole number from 0 to 257"),
        ("--budget much", "budget = 'much' is not a number"),
        ("--budget-mode fixed", "it requires a model with block selection"),
        ("--budget-mode fixed --method uncached", "it requires block selection"),
        ("--temperature -1", "temperature = -1.0: give 0 (greedy) or 0.001"),
        ("--top-k 0", "top_k = 0"),
        ("--top-p 1.5", "top_p = 1.5"),
        ("--min-p -1", "min_p = -1.0"),
        ("--repetition-penalty 0", "repetition_penalty = 0.0"),
        ("--max-new 0", "max_new = 0: ask for 1 new token or more"),
        ("--max-new 56", "a prompt of 9 and 56 new tokens are more than block_size = 64"),
        ("--top 290", "top = 290: give a whole number from 0 to 257"),
        ("--top -1", "top = -1"),
        ("--stop=", "none of them empty"),
    ],
)
def test_mistakes(folders, options, message, capsys):
    said = mistake(capsys, PROMPT, "--checkpoint", folders["causal"], *options.split())
    assert said.startswith("thoughtbubbles generate: ")
    assert message in said
    assert "\n" not in said


def test_mistakes_in_prompt_and_checkpoint(folders, capsys, tmp_path):
    assert "the prompt is empty" in mistake(capsys, "", "--checkpoint", folders["causal"])
    told = mistake(capsys, "The", "cell", "is", "--checkpoint", folders["causal"])
    assert '3 prompts: put quotes around the text, as in "The cell is"' in told
    assert "shorten the prompt to 63" in mistake(capsys, "x" * 64, "--checkpoint", folders["causal"])
    assert "does not exist" in mistake(capsys, PROMPT, "--checkpoint", str(tmp_path / "nowhere"))
    assert "no checkpoint with them" in mistake(capsys, PROMPT, "--checkpoint", str(tmp_path))
    save_model(tmp_path / "mute", model_of(folders["causal"]))
    assert "has no tokenizer.json" in mistake(capsys, PROMPT, "--checkpoint", str(tmp_path / "mute"))
    if not torch.cuda.is_available():
        assert "--device cuda" in mistake(capsys, PROMPT, "--checkpoint", folders["causal"], "--device", "cuda")


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command("generate", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment(), "PYTHONIOENCODING": "utf-8"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # these tests may run where it is ignored
        **options,
    )
    assert process.stdout is not None
    return process


def test_as_a_process_it_writes_what_it_writes_here(folders, capsys):
    options = ("--checkpoint", folders["causal"], "--max-new", "20", *EXACT)
    process = start(*options, stdin=subprocess.PIPE)
    out, err = process.communicate(PROMPT.encode() + b"\n", timeout=120)
    assert process.returncode == 0, err
    assert out.decode() == run(capsys, PROMPT, *options)[0]


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(folders):
    process = start(PROMPT, "--checkpoint", folders["long"], "--method", "uncached")
    assert os.read(process.stdout.fileno(), 5) == PROMPT.encode()[:5]
    process.stdout.close()
    process.wait(timeout=120)
    with process.stderr:
        assert process.stderr.read() == b""


@pytest.mark.slow
def test_an_interruption_keeps_what_is_written(folders):
    process = start(PROMPT, "--checkpoint", folders["long"], "--method", "uncached")
    out = b""
    while len(out) < 20:
        out += os.read(process.stdout.fileno(), 20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (out + rest).decode().startswith(PROMPT)
    assert re.fullmatch(rb"interrupted after \d+ new tokens\n", err)


def test_a_run_s_folder_will_do(folders, capsys, tmp_path):
    (tmp_path / "step-00000003").mkdir()
    Path(folders["causal"]).rename(tmp_path / "step-00000003" / "model")
    try:
        assert run(capsys, PROMPT, "--checkpoint", str(tmp_path), "--max-new", "2")[0].startswith(PROMPT)
    finally:
        (tmp_path / "step-00000003" / "model").rename(folders["causal"])
