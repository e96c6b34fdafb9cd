"""`analyze`: the numbers of every figure on hand-made models and inputs whose answers are known, and the command."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import lively_model, small_config
from thoughtbubbles.analysis import attention, audit, dial, fates, future, kinds, leaks, places, uncertainty, writes
from thoughtbubbles.analysis.analyze import check_target
from thoughtbubbles.analysis.html import token_text, whole_characters
from thoughtbubbles.analysis.sample import as_windows
from thoughtbubbles.analysis.trace import Stage, Stream, Trace, trace
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.evals.autoregressive import Scores
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.provenance import device_name
from thoughtbubbles.written import signed

BYTES = tokenizer("bytes")
CLOSE = {"abs": 1e-4}  # LayerNorm's eps moves the scores of the hand-made model a little


def one_fork_model(**changes: object) -> Thoughtbubbles:
    """Only "b" forks: fork score 3/4, everything is kept with score 1/2, and there is room for one fork in 4 tokens.

    All other weights are 0, so attention is uniform and blocks write nothing.
    """
    settings = {"n_layer": 2, "n_head": 1, "width": 4, "vocab_size": 257, "block_size": 8, "fork_layers": (1,)}
    config = ModelConfig(**{**settings, "budget": 1.25, "selection": "block", "gate_qk": False, **changes})
    model = Thoughtbubbles(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
        model.embedding.weight[:] = torch.tensor([0.0, 0.0, 100.0, -100.0])
        model.embedding.weight[ord("b")] = torch.tensor([100.0, -100.0, 0.0, 0.0])
        k = math.log(3) / (2 * math.sqrt(2))
        model.forks["1"].score.weight[0] = torch.tensor([k, -k, -k, k])
    return model


@pytest.fixture
def found() -> Trace:
    return trace(one_fork_model(), "abcd", tokenizer=BYTES, attention=True)


def test_where_it_forks(found):
    numbers = places.numbers(found)
    assert numbers["tokens"] == ["a", "b", "c", "d"]
    assert numbers["layers"] == [1]
    assert numbers["streams"] == [[1, 2, 1, 1]]
    assert "1 of 4 tokens" in places.sentence(numbers)
    assert "the mean is 1.25, the largest bubble has 2, for example at “b”" in places.sentence(numbers)


def test_tokens_that_share_a_character_are_one_piece_of_the_text():
    found = trace(one_fork_model(budget=1), "aéb", tokenizer=BYTES)
    numbers = places.numbers(found) | {"streams": [[1, 1, 2, 3]]}
    assert whole_characters(numbers) == [("a", [1]), ("é", [1, 2]), ("b", [3])]
    page = token_text(numbers)
    assert re.sub("<[^>]*>", "", page) == "aéb"
    assert 'title="1, 2 streams"' in page


def test_uniform_attention_is_divided_by_the_number_of_streams(found):
    """Streams of block 1: a b' b c d, where b' is the fork."""
    before, after = attention.numbers([found])["blocks"]
    assert before["fork"] is None
    assert before["original"]["mass"] == pytest.approx(
        [(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, 0, (1 / 2 + 2 / 3 + 3 / 4) / 4, 0]
    )
    itself, own, others, forks = after["original"]["mass"]
    assert itself == pytest.approx((1 + 1 / 3 + 1 / 4 + 1 / 5) / 4)
    assert own == pytest.approx(1 / 3 / 4)
    assert others == pytest.approx((0 + 1 / 3 + 2 / 4 + 3 / 5) / 4)
    assert forks == pytest.approx((1 / 4 + 1 / 5) / 4)
    assert after["original"]["per_key"][1] == pytest.approx(1 / 3)
    assert after["original"]["per_key"][3] == pytest.approx((1 / 4 + 1 / 5) / 2)
    assert after["fork"]["mass"] == pytest.approx([1 / 2, 0, 1 / 2, 0])
    assert after["fork"]["per_key"][1] is None, "b' has no sibling"


def test_forks_out_of_reach_are_no_keys(found):
    """b' is seen by b, and with a reach of 1 by c, not by d."""
    for reach, keys in ((0, None), (1, 1), (2, 2)):
        near = replace(found, settings={**found.settings, "fork_reach": reach})
        per_key = attention.numbers([near])["blocks"][1]["original"]["per_key"]
        assert per_key[1] == pytest.approx(1 / 3)
        assert per_key[3] == (None if keys is None else pytest.approx((1 / 4 + 1 / 5) / keys))


def test_originals_that_come_first_see_no_forks():
    config = small_config(vocab_size=384, fork_layers=(1,), fork_reach=0, feedback=True, merge="forks")
    traced = trace(lively_model(config), BYTES.encode("abcdef"), tokenizer=BYTES, attention=True)
    numbers = attention.numbers([traced])
    for block in numbers["blocks"][1:]:
        assert block["original"]["per_key"][1] is block["original"]["per_key"][3] is None
        assert block["fork"]["per_key"][2] is not None
    assert attention.sentence(numbers) == "Originals see no forks: they go through the blocks first."


def test_attention_that_goes_to_one_place(found):
    """Block 1: every stream from b on looks only at the fork of b."""
    weights = torch.eye(5)[None].clone()
    weights[0, 2:] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    numbers = attention.numbers([replace(found, attention=(found.attention[0], weights))])
    assert numbers["blocks"][1]["original"]["mass"] == [1 / 4, 1 / 4, 0, 2 / 4]
    assert numbers["blocks"][1]["fork"]["mass"] == [1, 0, 0, 0]
    assert "block 1: 25.0% of their attention" in attention.sentence(numbers)


def test_scores_that_were_given(found):
    (stage,) = fates.score_numbers([found])["stages"]
    assert stage["layer"] == 1
    assert stage["originals"]["quantiles"] == pytest.approx([0.5] * 5)
    assert stage["forks"]["streams"] == 1
    assert stage["forks"]["quantiles"] == pytest.approx([0.75] * 5, **CLOSE)


def test_norms_of_given_updates():
    """Attention writes a vector of norm 5 and the MLP one of norm 2; block 1 multiplies them by the scores."""
    model = one_fork_model()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.bias[:] = torch.tensor([3.0, 4.0, 0.0, 0.0]) / 1e6  # leaves the scores as they are
            block.mlp.down.bias[:] = torch.tensor([0.0, 0.0, 0.0, 2.0]) / 1e6
    numbers = writes.numbers(model, [BYTES.encode("abcd")], tokenizer=BYTES)
    mean = (4 * 0.5 + 0.75) / 5
    first, second = numbers["blocks"]
    assert first["attention"]["before"] == first["attention"]["after"] == pytest.approx(5e-6)
    assert second["attention"] == {"before": pytest.approx(5e-6), "after": pytest.approx(5e-6 * mean, rel=1e-4)}
    assert second["mlp"] == {"before": pytest.approx(2e-6), "after": pytest.approx(2e-6 * mean, rel=1e-4)}
    assert "55% in block 1" in writes.sentence(numbers)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("form", [{}, {"fork_reach": 0, "feedback": True}], ids=["all at once", "forks last"])
def test_unused_slots_do_not_count_as_written(form):
    """Without gates every stream writes the same, however many slots a causal selection leaves empty."""
    model = one_fork_model(selection="causal", budget=2, gate_residual=False, **form)
    with torch.no_grad():
        model.blocks[1].mlp.down.bias[0] = 1e-6
        model.forks["1"].score.weight.mul_(-1)
    numbers = writes.numbers(model, [BYTES.encode("abcd")], tokenizer=BYTES)
    assert numbers["blocks"][1]["mlp"] == {"before": pytest.approx(1e-6), "after": pytest.approx(1e-6)}


def stream(token: int, place: int, *, parent: int | None, is_fork: bool, weight: float = 1.0) -> Stream:
    return Stream(token=token, place=place, position=0.0, score=0.5, weight=weight, parent=parent, is_fork=is_fork)


def test_survival_and_streams_that_count(found):
    """Two forks of stage 1. The first lives on only in a fork of its own, the second in stage 3 not at all."""
    stages = (
        Stage(layer=0, streams=tuple(stream(t, 0, parent=None, is_fork=False) for t in (0, 1)), dropped=()),
        Stage(
            layer=1,
            streams=(
                stream(0, 1, parent=0, is_fork=True, weight=0.04),
                stream(0, 0, parent=0, is_fork=False, weight=0.96),
                stream(1, 1, parent=1, is_fork=True, weight=0.5),
                stream(1, 0, parent=1, is_fork=False, weight=0.5),
            ),
            dropped=(),
        ),
        Stage(
            layer=2,
            streams=(
                stream(0, 1, parent=0, is_fork=True),
                stream(0, 0, parent=1, is_fork=False),
                stream(1, 1, parent=2, is_fork=False),
                stream(1, 0, parent=3, is_fork=False),
            ),
            dropped=(),
        ),
        Stage(
            layer=3,
            streams=(
                stream(0, 1, parent=0, is_fork=False),
                stream(0, 0, parent=1, is_fork=False),
                stream(1, 0, parent=3, is_fork=False),
            ),
            dropped=(),
        ),
    )
    numbers = fates.survival_numbers([replace(found, tokens=found.tokens[:2], stages=stages)])
    first, second, third = numbers["born"]
    assert first == {"layer": 1, "forks": 2, "layers": [1, 2, 3], "itself": [1, 0.5, 0], "descendant": [1, 1, 0.5]}
    assert second == {"layer": 2, "forks": 1, "layers": [2, 3], "itself": [1, 1], "descendant": [1, 1]}
    assert third["itself"] is None
    assert numbers["streams"][0] == {"layer": 1, "all": 2, "effective": 1.5}
    assert numbers["streams"][2] == {"layer": 3, "all": 1.5, "effective": 1.5}


def test_groups_do_not_cross_texts():
    numbers = uncertainty.numbers([[1, 1, 2, 2, 9], [3, 3, 3, 3]], {"it": [[0, 1, 2, 3, 9], [4, 4, 4, 4]]})
    assert numbers["streams"] == [1.5, 3]
    assert numbers["sources"]["it"]["entropy"] == [1.5, 4]
    assert numbers["sources"]["it"]["correlation"] is None, "two points are too few"


def test_a_parabola_is_found():
    x = [0.0, 1.0, 2.0, 3.0, 4.0]
    fit = uncertainty.parabola(x, [1 + 4 * each - each**2 for each in x])
    assert fit == pytest.approx({"a": 1, "b": 4, "c": -1, "explained": 1, "extreme": 2})
    assert uncertainty.parabola([1, 1, 2, 2], [1, 2, 3, 4]) is None, "two places do not make a parabola"


def test_correlation_and_its_interval():
    rng = np.random.default_rng(0)
    x = rng.normal(size=100)
    y = 0.5 * x + rng.normal(size=100)
    found = uncertainty.correlation(x.tolist(), y.tolist())
    r = np.corrcoef(x, y)[0, 1]
    assert found["r"] == pytest.approx(r)
    assert found["low"] == pytest.approx(np.tanh(np.arctanh(r) - 1.96 / np.sqrt(97)), abs=1e-4)
    assert found["low"] < found["r"] < found["high"]
    assert uncertainty.correlation([1, 2, 3, 4], [2, 4, 6, 8]) == {"r": 1, "low": 1, "high": 1}
    assert uncertainty.correlation([1, 2, 3, 4], [5, 5, 5, 5]) is None


def test_signs_in_sentences():
    x = [0.0, 1.0, 2.0, 3.0, 4.0]
    falling = uncertainty.sentence(uncertainty.numbers([[1, 2, 1, 0, 1]], {"it": [x]}, size=1))
    assert "a correlation of −0.45 (95% interval −0.95 to +0.72, 5 groups of 1 tokens)" in falling
    assert [signed(each) for each in (0.5, -0.5, 0.0, -0.00001)] == ["+0.5000", "−0.5000", "0.0000", "0.0000"]
    assert [signed(each, ".2g") for each in (-9.7e-5, 0.0)] == ["−9.7e-05", "0"]


def test_kinds_of_tokens():
    texts = [
        "The",
        " l",
        "ight",
        " cost",
        " 18",
        "71",
        ".",
        " It",
        "'s",
        "\n",
        "Why",
        "?",
        "”",
        " So",
        " –",
        "\ufffd",
        "",
    ]
    expected = [
        {kinds.START},
        {kinds.START},
        {kinds.PART},
        {kinds.START},
        {kinds.DIGITS},
        {kinds.DIGITS},
        {kinds.PUNCTUATION},
        {kinds.START, kinds.AFTER_STOP},
        {kinds.PART},
        {kinds.NEWLINE},
        {kinds.START},
        {kinds.PUNCTUATION},
        {kinds.PUNCTUATION},
        {kinds.START, kinds.AFTER_STOP},
        {kinds.PUNCTUATION},
        {kinds.OTHER},
        {kinds.END},
    ]
    assert kinds.kinds_of(texts) == expected


def test_rare_words_are_the_least_frequent_quarter():
    row = [1] * 6 + [2] * 3 + [3] * 2 + [4]
    assert kinds.rare_tokens([row], [[True] * 12]) == [[token in (3, 4) for token in row]]
    assert kinds.rare_tokens([[1, 2, 2]], [[True] * 3]) == [[True, False, False]], "a single occurrence is rare"


def test_bubbles_by_kind(found):
    numbers = kinds.bubble_numbers([found], [[{kinds.START}, {kinds.PART}, {kinds.PART}, {kinds.PART, kinds.RARE}]])
    assert numbers["kinds"][kinds.PART]["streams"] == pytest.approx(4 / 3)
    assert numbers["kinds"][kinds.RARE]["streams"] == 1
    assert numbers["kinds"]["all tokens"]["by_stage"] == [1, 1.25]
    assert kinds.DIGITS not in numbers["kinds"]


def scores(rows: list[list[float]]) -> Scores:
    nll = torch.tensor(rows, dtype=torch.float64)
    return Scores(nll, torch.zeros_like(nll, dtype=torch.long), torch.ones_like(nll, dtype=torch.bool), 0.0)


def test_what_forks_bring_by_kind():
    of_targets = [[{kinds.START}, {kinds.PART}], [{kinds.START}, {kinds.START}]]
    numbers = kinds.gain_numbers(scores([[1, 2], [3, 4]]), scores([[2, 2], [3, 6]]), of_targets, budget=2)["kinds"]
    assert numbers[kinds.START]["difference"] == pytest.approx(-1)
    assert numbers[kinds.START]["without"] == pytest.approx(11 / 3)
    assert numbers[kinds.PART]["difference"] == 0
    assert numbers["all tokens"]["difference"] == pytest.approx(-3 / 4)
    # By windows: sums −1 and −2 of 2 tokens each, so −1/2 and −1 around −3/4.
    assert numbers["all tokens"]["standard_error"] == pytest.approx(1 / 4)


def test_the_dial_is_paired_with_budget_1():
    first = [[float(i) for i in range(10)], [0.0] * 10]
    other = [[float(i) for i in range(10)], [0.0] * 10]
    other[0][9] = 5.0
    numbers = dial.numbers({"1": scores(first), "2": scores(other)}, own="2")["series"]
    every, hard, _ = numbers.values()
    assert every["rows"][1]["difference"] == pytest.approx(-4 / 20)
    assert hard["tokens"] == 2
    assert hard["rows"][0]["nats"] == pytest.approx((9 + 8) / 2)
    assert hard["rows"][1]["difference"] == pytest.approx(-4 / 2)
    assert every["rows"][0]["difference"] == 0


def test_budgets_of_the_dial():
    assert dial.default_budgets(small_config()) == ["1", "1.25", "1.5", "2", "3", "4", "6", "8"]
    assert dial.default_budgets(small_config(fork_layers=(1,), budget=1.75)) == ["1", "1.25", "1.5", "1.75", "2"]
    assert dial.default_budgets(small_config(fork_layers=(1,), budget=4)) == ["1", "1.25", "1.5", "2", "4"]


def test_documents_end_at_the_end_of_text():
    """Row 0: x x END y, then z is predicted; the target after END belongs to the new document."""
    config, end = small_config(), 22
    windows = as_windows(config, [[1, 2, end, 3, 4], [5, 6]])
    numbered = future.documents(windows, end)
    assert numbered[0].tolist() == [0, 0, 1, 1]
    assert numbered[1, 0] == 2
    nll = torch.tensor([[1.0, 3.0, 5.0, 7.0], [2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    way = Scores(nll, torch.zeros_like(nll, dtype=torch.long), windows.counted, 0.0)
    later = way._replace(nll=nll + windows.counted * 0.5)
    found = future.numbers(config, {"blockwise": way, "autoregressive": later}, windows, vocab_size=23, end_of_text=end)
    assert found["document_tokens"] == [2, 2], "documents with few tokens are not drawn, but count"
    assert found["ways"]["blockwise"]["documents"] == [2, 6]
    assert found["ways"]["autoregressive"]["documents"] == [2.5, 6.5]
    assert found["differences"]["autoregressive - blockwise"]["mean"] == pytest.approx(0.5)
    assert found["tokens"] == 5


def one_place_model() -> tuple[Thoughtbubbles, float]:
    """In 4 tokens there is a place for one fork: a "c" has it (fork score 0.83), else a "b" (0.75), before all others.

    The fork of a "b" predicts what follows an "a", and weighs 0.75 / (0.75 + 0.5). Also returns log p of an "a" after a
    "b" with the fork, minus without it.
    """
    model = one_fork_model(merge="mixture")
    a, b = model.embedding.weight[ord("a")], model.embedding.weight[ord("b")]
    scale = 0.02  # the product of norm(b) and b is log k: b and c have k times the probability of any other token
    k = math.exp(scale * 200 * math.sqrt(2))
    with torch.no_grad():
        model.embedding.weight[ord("c")] = b - a
        model.forks["1"].embedding[:] = a - b
        model.final_norm.weight.fill_(scale)
    original, fork = 1 / (2 * k + 255), k / (255 * k + 1 + 1 / k)
    return model, math.log((0.6 * fork + 0.4 * original) / original)


def test_a_later_token_takes_the_place_of_an_earlier_fork():
    """The tokens of "abaa" are replaced by c, so the prediction at b loses its fork, and no other one moves: a does not
    fork, and in "cccc" the first c has the place, whatever follows."""
    model, change = one_place_model()
    ids = torch.tensor([BYTES.encode("abaa"), BYTES.encode("cccc")])
    found = leaks.numbers([audit(model, ids, selection=rule, cuts=3) for rule in leaks.RULES], own="block")
    assert found["budget"] == "1.25"
    causal, block = found["rules"]["causal"], found["rules"]["block"]
    for part in (causal["total"], *causal["by_distance"]):
        assert part["moved"] == part["largest"] == part["largest_any"] == part["mean"] == 0
    near, far = block["by_distance"]  # cuts 1, 2, 3 in both rows: 6 comparisons at distance 1, and 4 + 2 at 2 and 3
    assert (near["label"], near["comparisons"], far["label"], far["comparisons"]) == ("1", 6, "2–3", 6)
    assert (near["moved"], far["moved"], block["total"]["moved"]) == (1, 1, 2)
    for part in (near, far, block["total"]):
        assert part["largest"] == pytest.approx(change, **CLOSE)
        assert part["mean"] == pytest.approx(change / 6, **CLOSE)
        assert part["loss_difference"] == pytest.approx(-change / 6, **CLOSE)
    assert change > 0.5
    assert (causal["reach"], block["reach"]) == (0, 2)  # b is the second token, and the last change is at the fourth
    first, second = leaks.sentence(found).split(". With ")
    changing = "changing later tokens moves the prediction in"
    assert first.startswith(f"With block selection, the rule of this model, {changing} 2 of 12 comparisons (16.7%), ")
    assert "up to 2 tokens before the change" in first
    assert second == f"causal selection, {changing} none of 12 comparisons."


def test_the_audit_has_rows_of_one_length_in_float64():
    assert leaks.same_length([[1, 2], [3, 4, 5], [6, 7, 8]]).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert leaks.same_length([[1] * 300] * 9).shape == (leaks.ROWS, 128)
    model = lively_model(small_config()).float()
    assert leaks.in_float64(model).embedding.weight.dtype == torch.float64
    assert model.embedding.weight.dtype == torch.float32


FIGURES = (
    *("where-it-forks", "token-kinds", "uncertainty", "attention", "scores", "survival", "writes", "dial"),
    *("what-forks-bring", "future", "leak-audit"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    config = small_config(vocab_size=257, block_size=24)
    return save_model(tmp_path_factory.mktemp("models") / "tiny", lively_model(config).float(), tokenizer=BYTES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    config = small_config(vocab_size=257, block_size=24, fork_layers=())
    return save_model(tmp_path_factory.mktemp("models") / "plain", lively_model(config).float(), tokenizer=BYTES)


def outside(page: str) -> list[str]:
    """Everything a browser would load or that leads elsewhere."""
    references = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    return [each for each in references if not each.startswith("#") and re.match(r"(?:\w+:|//)", each)]


@pytest.mark.slow
def test_the_command_writes_figures_numbers_and_a_report(checkpoint, plain, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text('<script>alert("1")</script> & $x$ مرحبا\n' * 3, encoding="utf-8")
    story = {"story": "[Ann] <b>has</b> a brother, [Bob].", "split": "test"}
    (tmp_path / "clutrr.data_1.jsonl").write_text(json.dumps(story) + "\n")
    out = tmp_path / "out"
    options = {"--checkpoint": checkpoint, "--plain": plain, "--text": text, "--data-dir": tmp_path, "--out": out}
    words = ["analyze", *(str(word) for pair in options.items() for word in pair), "--windows", "2"]
    main([*words, "--budgets", "2", "8", "--device", "cpu"])
    assert "report.html" in capsys.readouterr().out
    for name in (*FIGURES, "where-it-forks-clutrr-1"):
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (out / f"{name}.svg").read_text()
        assert json.loads((out / f"{name}.json").read_text())["sentence"]
    page = (out / "report.html").read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert outside(page) == []
    assert "http:" not in page
    assert "https:" not in page
    assert all(f'<section id="{name}">' in page for name in FIGURES)
    for each in re.findall(r"<figcaption>(.+?)<", page):
        assert "nan" not in each.split()
    rows = json.loads((out / "dial.json").read_text())["series"]["all tokens"]["rows"]
    assert [row["budget"] for row in rows] == ["1", "2", "8"]
    assert len(json.loads((out / "uncertainty.json").read_text())["sources"]) == 2
    timed = json.loads((out / "dial.json").read_text())
    assert timed["device"] == device_name("cpu")
    assert timed["sentence"].endswith(f"as long ({timed['device']}).")
    leak = json.loads((out / "leak-audit.json").read_text())
    assert leak["note"].endswith(" Text: 48 tokens of text.txt.")
    assert (leak["own"], leak["dtype"], leak["rows"], leak["tokens"]) == ("causal", "float64", 2, 24)
    assert leak["rules"]["causal"]["total"]["largest_any"] == 0
    assert leak["rules"]["block"]["total"]["moved"] > 0
    # An analysis may be replaced by another one, but nothing else.
    assert check_target(out) == out
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt: give a new folder"):
        check_target(out)


@pytest.mark.slow
def test_a_model_that_keeps_all_forks(tmp_path, capsys):
    """There is no choice to look at; attention, the future and leaks are."""
    forms = {"fork_layers": (1,), "fork_reach": 3, "feedback": True, "scores": False, "merge": "forks"}
    model = lively_model(small_config(vocab_size=257, block_size=24, **forms)).float()
    folder, out = save_model(tmp_path / "all", model, tokenizer=BYTES), tmp_path / "out"
    words = ["analyze", "--checkpoint", str(folder), "--out", str(out), "--windows", "2", "--device", "cpu"]
    with pytest.raises(SystemExit, match="--budgets: budget = 1: without scores this model keeps all forks"):
        main([*words, "--budgets", "1"])
    main(words)
    assert {each.stem for each in out.glob("*.svg")} == {"attention", "future", "leak-audit"}
    leak = json.loads((out / "leak-audit.json").read_text())
    assert (list(leak["rules"]), leak["own"]) == (["no"], "no")
    assert leak["rules"]["no"]["total"]["largest_any"] == 0
    assert leak["sentence"].startswith("With no selection, changing later tokens moves the prediction in none of")
    assert "every token forks" in (out / "report.html").read_text()


@pytest.mark.slow
def test_block_selection_is_scored_from_every_prefix(tmp_path, monkeypatch):
    config = small_config(vocab_size=257, block_size=12, selection="block")
    folder = save_model(tmp_path / "block", lively_model(config).float(), tokenizer=BYTES)
    monkeypatch.delenv("THOUGHTBUBBLES_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    main(["analyze", "--checkpoint", str(folder), "--device", "cpu", "--budgets", "2"])
    found = json.loads((tmp_path / "runs" / "analyze-block" / "future.json").read_text())
    assert {"blockwise", "autoregressive", "fixed"} <= set(found["ways"])
    assert "passages that come with the package" in found["text"]
    assert found["note"].endswith(f" Text: {found['tokens']} tokens of 6 short passages that come with the package.")
    sentence = json.loads((tmp_path / "runs" / "analyze-block" / "leak-audit.json").read_text())["sentence"]
    assert re.search(r"^With block selection, the rule of this model, .* in [1-9]\d* of \d+ comparisons", sentence)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "{plain}"], "has no fork layers, so there are no forks to look at"),
        (["--budgets", "0.5"], "--budgets: budget = 0.5 is below 1"),
        (["--windows", "0"], "--windows 0: give a whole number"),
        (["--text", "{plain}"], "is not a file"),
        (["--plain", "bubbles-7m"], "has fork layers: give a model without them"),
        (["--plain", "{short}"], "its context length is 8, that of the model 24"),
        (["--plain", "{other}"], "give a model with the same tokenizer"),
    ],
)
def test_mistakes_end_in_one_line(options, message, checkpoint, plain, tmp_path):
    small = lively_model(small_config(vocab_size=50304, block_size=8, fork_layers=())).float()
    folders = {"plain": plain, "short": tmp_path / "short", "other": tmp_path / "other"}
    if {"{short}", "{other}"} & set(options):
        save_model(folders["short"], small, tokenizer=BYTES)
        save_model(folders["other"], small, tokenizer=tokenizer("gpt2"))
    words = [word.format(**folders) for word in options]
    given = [] if "--checkpoint" in words else ["--checkpoint", str(checkpoint)]
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", *given, *words, "--out", str(tmp_path / "out")])
    assert message in str(stopped.value)
    assert "\n" not in str(stopped.value)
    assert not (tmp_path / "out").exists()


def test_matplotlib_is_needed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install 'thoughtbubbles\[analysis\]'"):
        main(["analyze", "--out", str(tmp_path / "out")])
