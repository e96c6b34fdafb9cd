"""What `thoughtbubbles generate` shows: streams as digits and colours, no stop strings, and the likeliest tokens."""

import codecs
import re
from typing import Any

import pytest
import torch

from generate.generate_command import BYTES, EXACT, GREEDY, N_PROMPT, PROMPT, model_of, run, run_json, save_models
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.generate.show import HARMLESS, BubblePrinter, colour, streams_per_token
from thoughtbubbles.model.transformer import Thoughtbubbles


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return save_models(tmp_path_factory)


def new_sizes(model: Thoughtbubbles, ids: list[int], **rule: Any) -> list[int]:
    """Of each token when it was the newest, and of the prompt before there was any."""
    newest = [streams_per_token(model, ids[:n], **rule)[-1] for n in range(N_PROMPT + 1, len(ids) + 1)]
    return [*streams_per_token(model, ids[:N_PROMPT], **rule), *newest]


@pytest.mark.parametrize(
    ("form", "options", "rule"),
    [
        ("causal", "--budget 1.5", {"budget": 1.5}),
        ("causal", "--method uncached", {}),
        ("block", "", {}),
        ("block", "--budget-mode fixed --budget 3/2", {"budget": 1.5, "budget_mode": "fixed"}),
        ("block", "--method cached", {"selection": "causal"}),
        ("plain", "", {}),
    ],
)
def test_bubbles_are_the_model_s_own(folders, form, options, rule, capsys):
    arguments = (PROMPT, "--checkpoint", folders[form], "--max-new", "12", "--show-bubbles", *options.split(), *EXACT)
    found = run_json(capsys, *arguments)
    model, ids = model_of(folders[form]), [*found["prompt_ids"], *found["ids"]]
    assert found["bubbles"] == new_sizes(model, ids, **rule)
    assert found["bubbles"][N_PROMPT - 1 : -1] == found["streams"]
    assert form == "plain" or len(set(found["bubbles"])) > 1
    if form == "causal":  # nothing is ever revised
        assert found["bubbles"] == model(torch.tensor([ids]), trace=True, **rule).forks[-1].bubble_size[0].tolist()


def per_character(ids: list[int], sizes: list[int]) -> list[tuple[str, int]]:
    """Every character with the streams of the token that completed it."""
    decoder, found = codecs.getincrementaldecoder("utf-8")(errors="replace"), []
    for i, (token, size) in enumerate(zip(ids, sizes, strict=True)):
        found += [(c, size) for c in decoder.decode(BYTES.token_bytes(token), final=i == len(ids) - 1)]
    return found


@pytest.mark.slow
def test_digits_below_the_text_without_colours(folders, capsys, monkeypatch):
    arguments = (PROMPT, "--checkpoint", folders["causal"], "--max-new", "40", "--show-bubbles", *EXACT)
    found = run_json(capsys, *arguments)
    characters = per_character([*found["prompt_ids"], *found["ids"]], found["bubbles"])
    text = "".join(character for character, _ in characters)
    digits = "".join("\n" if character == "\n" else str(size) for character, size in characters)
    assert text == PROMPT + found["text"]
    out, err = run(capsys, *arguments)
    assert out == f"{text}\n{digits}\n"
    assert "digits: streams of each token" in err


@pytest.mark.slow
def test_colours_show_the_streams(folders, capsys, monkeypatch):
    arguments = (PROMPT, "--checkpoint", folders["causal"], "--max-new", "40", "--show-bubbles", *EXACT)
    found = run_json(capsys, *arguments)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, _ = run(capsys, *arguments)
    codes = {"white": "37", "green": "32", "yellow": "33", "dark_orange": "38;5;208", "red": "31"}
    characters = per_character([*found["prompt_ids"], *found["ids"]], found["bubbles"])
    expected = [(codes[colour(size)], character.translate(HARMLESS)) for character, size in characters]
    shown, _, rest = out.partition("\x1b[0m\nstreams of each token")
    pieces = re.findall(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", shown + "\x1b[0m", re.DOTALL)
    assert [(code, character) for code, piece in pieces for character in piece] == expected
    assert " 4 " in rest
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in run(capsys, *arguments)[0]


def test_on_a_terminal_the_prompt_is_dim_and_control_characters_are_replaced(folders, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out, _ = run(capsys, "a\x1b[2J\x9bb", "--checkpoint", folders["causal"], "--max-new", "5")
    assert out.startswith("\x1b[2ma␛[2J�b\x1b[0m")


def test_a_character_has_the_colour_of_the_token_that_completes_it():
    bubbles = BubblePrinter(BYTES)
    first, second = "é".encode()
    bubbles.add(first)
    bubbles.sizes.append(1)
    assert bubbles.ready() == []
    bubbles.add(second)
    bubbles.release(1)
    assert bubbles.ready() == []  # the size of the second half is not known yet
    bubbles.sizes.append(3)
    assert bubbles.ready() == [("é", 3)]
    bubbles.add(ord("x"))
    bubbles.sizes.append(2)
    assert bubbles.ready() == []  # it may begin a stop string
    bubbles.add(first, is_last=True)
    bubbles.release(2)
    bubbles.sizes.append(4)
    assert bubbles.ready() == [("x", 2), ("�", 4)]
    assert bubbles.digits == "324"


@pytest.mark.slow
@pytest.mark.parametrize("bubbles", [(), ("--show-bubbles",)])
def test_stop_strings_are_not_shown(folders, bubbles, capsys):
    arguments = (PROMPT, "--checkpoint", folders["causal"], "--max-new", "40", *EXACT)
    whole = run_json(capsys, *arguments)["text"]
    at = next(i for i in range(5, len(whole)) if whole.find(whole[i : i + 2]) == i)
    out, err = run(capsys, *arguments, "--stop", whole[at : at + 2], *bubbles)
    assert out.startswith(PROMPT + whole[:at] + "\n")
    assert bubbles or out == PROMPT + whole[:at] + "\n"
    assert "ended: a stop string was generated" in err


@pytest.mark.parametrize("bubbles", [(), ("--show-bubbles",)])
def test_the_end_of_text_is_not_shown(folders, bubbles, capsys, tmp_path):
    """Two tokens swap their places in the vocabulary, so that the model ends where it wrote the other."""
    model = model_of(folders["causal"])
    request = Request(prompt=PROMPT, max_new=30, sampling=Sampling(temperature=0, repetition_penalty=3))
    ids = generate(model, [request], tokenizer=BYTES)[0].ids
    at = next(i for i in range(5, 30) if ids[i] not in [*ids[:i], *BYTES.encode(PROMPT)])
    with torch.no_grad():
        model.embedding.weight[[ids[at], BYTES.end_of_text]] = model.embedding.weight[[BYTES.end_of_text, ids[at]]]
    save_model(tmp_path / "model", model, tokenizer=BYTES)
    out, err = run(capsys, PROMPT, "--checkpoint", str(tmp_path / "model"), *GREEDY, *EXACT, *bubbles)
    assert out.startswith(PROMPT + BYTES.decode(ids[:at]) + "\n")
    assert f"{at + 1} new tokens" in err
    assert "ended: the model ended the text" in err


def test_the_table_of_likeliest_tokens(folders, capsys):
    out, err = run(capsys, PROMPT, "--checkpoint", folders["causal"], "--max-new", "4", "--top", "3", "--seed", "3")
    found = run_json(capsys, PROMPT, "--checkpoint", folders["causal"], "--max-new", "4", "--top", "3", "--seed", "3")
    assert out == PROMPT + found["text"] + "\n"
    assert "likeliest tokens" in err
    for place in found["top"]:
        assert f"{place[0]['text']!r} {place[0]['log_prob']:.2f}" in err
