"""The leak audit: exactly zero for causal models, and known numbers for known leaks."""

import json
import math
import sys

import pytest
import torch
from torch import nn

from helpers import SAME_FUNCTION, lively_model, random_ids, small_config
from thoughtbubbles.analysis import audit
from thoughtbubbles.analysis.subjects import open_model
from thoughtbubbles.checkpoint import load, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.tokenizer import save_tokenizer, tokenizer
from thoughtbubbles.interop.export import export
from thoughtbubbles.model.transformer import Thoughtbubbles

PLAIN = {"fork_layers": (), "merge": "original"}
FORMS = {
    "mixture": {"merge": "mixture", "budget": 1.5},
    "residual": {"merge": "residual", "budget": 1.5},
    "original": {"merge": "original", "budget": 1.5},
    "budget 1": {"budget": 1},
    "no limit": {"budget": 8},
    "plain": PLAIN,
    "copy-3": {**PLAIN, "copies": 3},
}


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `thoughtbubbles audit`."""
    capsys.readouterr()
    code, message = 0, ""
    try:
        main(["audit", *arguments])
    except SystemExit as stopped:
        code, message = (1, str(stopped.code)) if isinstance(stopped.code, str) else (int(stopped.code or 0), "")
    shown = capsys.readouterr()
    return code, shown.out, shown.err + message


def binary(probability: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of two tokens, from those of token 0."""
    return torch.stack([probability, 1 - probability], dim=-1).log()


def looking_ahead(far: int):
    """p(0) is 1/2, but 1/4 if the token `far` ahead of the position is 1."""

    def predict(ids):
        ahead = torch.cat([ids[:, far:], torch.zeros_like(ids[:, :far])], dim=1)
        return binary(torch.where(ahead == 1, 0.25, 0.5).double())

    return predict


@pytest.mark.parametrize("form", FORMS)
def test_causal_models_do_not_leak(form):
    config = small_config(**FORMS[form])
    for seed in range(2):
        found = audit(lively_model(config, seed=seed), random_ids(config, 3, 14), cuts=6)
        assert not found.leaks
        assert found.dtype == "float64"
        assert found.tolerance == 0
        for part in (found.total, *found.by_distance):
            assert part.moved == part.share == part.largest == part.largest_any == part.mean_kl == part.largest_kl == 0
            assert part.mean == part.loss_difference == 0


@pytest.mark.parametrize("mode", ["proportional", "fixed"])
def test_block_selection_leaks_and_the_causal_rule_repairs_it(mode):
    """A fixed budget below the limit applies to block selection only."""
    model = lively_model(small_config(selection="block", budget=1.1, budget_mode=mode))
    ids = random_ids(model.config, 4, 16)
    found = audit(model, ids, cuts=6)
    assert found.leaks
    assert (found.selection, found.budget) == ("block", "1.1")
    assert found.total.largest_kl > 0
    assert not audit(model, ids, cuts=6, selection="causal").leaks
    assert not audit(model, ids, cuts=6, selection="causal", budget="4/3").leaks
    assert not audit(model, ids, cuts=6, budget=8).leaks or mode == "fixed"


def test_the_numbers_of_a_known_leak():
    """All predictions see the last token: p(0) is 1/2 if it is 0, else 1/4. Tokens are 0, and false ones 1."""

    def predict(ids):
        return binary(torch.where(ids[:, -1:] == 0, 0.5, 0.25).double().expand(ids.shape))

    found = audit(predict, torch.zeros(2, 9, dtype=torch.int64), cuts=8)
    kl = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert (found.rows, found.tokens, found.cuts) == (2, 9, 8)
    assert found.total.comparisons == 2 * sum(range(1, 9))  # every cut once in each row
    assert found.reach == 8
    assert [(part.nearest, part.farthest) for part in found.by_distance] == [(1, 1), (2, 3), (4, 7), (8, 8)]
    assert [part.label for part in found.by_distance] == ["1", "2–3", "4–7", "8"]
    assert [part.comparisons for part in found.by_distance] == [2 * 8, 2 * (7 + 6), 2 * (5 + 4 + 3 + 2), 2]
    for part in (found.total, *found.by_distance):
        assert part.share == 1
        assert part.largest == pytest.approx(math.log(2), abs=SAME_FUNCTION)
        assert part.mean == pytest.approx(math.log(2), abs=SAME_FUNCTION)
        assert part.largest_any == pytest.approx(math.log(2), abs=SAME_FUNCTION)
        assert part.mean_kl == pytest.approx(kl, abs=SAME_FUNCTION)
        assert part.largest_kl == pytest.approx(kl, abs=SAME_FUNCTION)
        assert part.loss_difference == pytest.approx(-math.log(2), abs=SAME_FUNCTION)


@pytest.mark.parametrize(
    ("far", "moved"), [(0, [0, 0, 0, 0]), (1, [16, 0, 0, 0]), (2, [14, 14, 0, 0]), (3, [12, 24, 0, 0])]
)
def test_a_leak_is_reported_at_its_distance(far, moved):
    """The last `far` positions of a row have nothing to look at."""
    found = audit(looking_ahead(far), torch.zeros(2, 9, dtype=torch.int64), cuts=8)
    assert [part.moved for part in found.by_distance] == moved
    assert [part.mean_kl > 0 for part in found.by_distance] == [count > 0 for count in moved]
    assert found.leaks == (far > 0)
    assert found.reach == far


def test_the_share_and_the_means_count_all_comparisons():
    """One of the two rows leaks: the one whose first token is 1."""

    def predict(ids):
        sees = (ids[:, :1] == 1) & (ids[:, -1:] == 0)
        return binary(torch.where(sees, 0.25, 0.5).double().expand(ids.shape))

    ids = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    found = audit(predict, ids, cuts=4)
    assert found.total.share == 0.5
    assert found.total.largest == pytest.approx(math.log(0.75 / 0.5), abs=SAME_FUNCTION)  # the true next token is 1
    assert found.total.mean == pytest.approx(math.log(0.75 / 0.5) / 2, abs=SAME_FUNCTION)
    assert found.total.loss_difference == pytest.approx(-math.log(0.5 / 0.75) / 2, abs=SAME_FUNCTION)


def test_what_is_changed():
    """From the cut on every token is another one, of the other rows; before it none is. Cuts are spread over a row."""
    calls = []

    def predict(ids):
        calls.append(ids.clone())
        return torch.zeros(*ids.shape, 50).log_softmax(-1)

    ids = torch.arange(36).view(3, 12)
    audit(predict, ids, cuts=4)
    true, *false = calls
    assert torch.equal(true, ids)
    assert len(false) == 4
    seen = []
    for changed in false:
        for row in range(3):
            first = int((changed[row] != ids[row]).nonzero()[0])
            assert (changed[row, first:] != ids[row, first:]).all()
            assert not set(changed[row, first:].tolist()) & set(ids[row].tolist())
            seen.append(first)
    assert min(seen) <= 2
    assert max(seen) == 11
    assert len(set(seen)) >= 9
    again = [each.clone() for each in calls]
    calls.clear()
    audit(predict, ids, cuts=4)
    assert all(torch.equal(a, b) for a, b in zip(again, calls, strict=True))  # the seed is fixed
    calls.clear()
    audit(predict, ids, cuts=4, seed=1)
    assert not all(torch.equal(a, b) for a, b in zip(again, calls, strict=True))


def test_a_prediction_of_minus_infinity_gives_numbers():
    def predict(ids):
        return binary((ids[:, -1:] == 0).double().expand(ids.shape))

    found = audit(predict, torch.zeros(1, 4, dtype=torch.int64))
    assert found.total.share == 1
    assert found.total.largest > 1e29
    json.loads(json.dumps(found.as_dict(), allow_nan=False))


@pytest.mark.parametrize(
    ("dtype", "change", "leaks"),
    [(torch.float64, 1e-12, True), (torch.float32, 2e-5, False), (torch.float32, 1e-3, True)],
)
def test_rounding_is_tolerated_in_low_precision_only(dtype, change, leaks):
    def predict(ids):
        logits = torch.zeros(*ids.shape, 4, dtype=dtype)
        logits[..., 0] = torch.where(ids[:, -1:] == 0, 0.0, change).to(dtype)
        return logits.log_softmax(-1)

    assert audit(predict, torch.zeros(1, 6, dtype=torch.int64)).leaks == leaks
    assert not audit(predict, torch.zeros(1, 6, dtype=torch.int64), tolerance=0.01).leaks


def test_a_model_in_training_mode_is_audited_without_dropout_and_given_back():
    class Dropped(nn.Module):
        """Looks like a model of Hugging Face."""

        def __init__(self):
            super().__init__()
            self.embedding, self.dropout = nn.Embedding(5, 5).double(), nn.Dropout(0.5)
            self.config = None

        def get_input_embeddings(self):
            return self.embedding

        def forward(self, input_ids):
            return type("Output", (), {"logits": self.dropout(self.embedding(input_ids))})

    model = Dropped().train()
    found = audit(model, rows=2, tokens=6)
    assert not found.leaks
    assert (found.rows, found.tokens) == (2, 6)
    assert model.training


@pytest.mark.parametrize(
    ("predict", "message"),
    [
        (lambda ids: torch.rand(*ids.shape, 3).log_softmax(-1), "deterministic"),
        (lambda ids: torch.ones(*ids.shape, 3), "not log-probabilities"),
        (lambda ids: torch.full((*ids.shape, 3), math.nan), "NaN"),
        (lambda ids: torch.zeros(ids.shape), "one row of numbers for each id"),
        (lambda ids: None, "NoneType"),
        (7, "model is a int"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_functions_that_cannot_be_audited(predict, message):
    with pytest.raises(ValueError, match=message):
        audit(predict, torch.zeros(2, 6, dtype=torch.int64))


@pytest.mark.usefixtures("no_shape_checks")
def test_mistakes_in_python():
    model = lively_model(small_config())
    ids = random_ids(model.config, 2, 8)
    plain = lively_model(small_config(**PLAIN))
    for call, message in (
        (lambda: audit(model, ids[:, :1]), "a row has 1 tokens"),
        (lambda: audit(model, ids[0]), "shape"),
        (lambda: audit(model, ids.float()), "float32"),
        (lambda: audit(model, ids, cuts=0), "cuts = 0"),
        (lambda: audit(model, "text"), "text needs a tokenizer"),
        (lambda: audit(model, torch.zeros(1, 99, dtype=torch.int64)), "tokens = 99: more than the model's context"),
        (lambda: audit(model, tokens=99), "tokens = 99: more than the model's context length, 16"),
        (lambda: audit(model, rows=0), "rows = 0"),
        (lambda: audit(model, ids, selection="both"), "selection"),
        (lambda: audit(model, ids, budget=0.5), "below 1"),
        (lambda: audit(plain, ids, selection="block"), "no fork layers"),
        (lambda: audit(plain, ids, budget=2), "no fork layers"),
        (lambda: audit(looking_ahead(1), ids, selection="block"), "only Thoughtbubbles models"),
        (lambda: audit(looking_ahead(1)), "text is missing"),
        (lambda: audit(looking_ahead(1), "", tokenizer=tokenizer("bytes")), "text is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_shipped_model_does_not_leak(capsys):
    code, out, err = run(capsys, "--rows", "1", "--tokens", "48")
    assert code == 0
    assert "causal selection, r = 2" in out
    assert "no leak found (causal selection, r = 2): changing later tokens moves the prediction in none of" in out
    assert "using bubbles-7m" in err


def test_block_selection_of_the_shipped_model_leaks(capsys):
    code, out, err = run(
        capsys, "--selection", "block", "--budget", "1.5", "1", "--rows", "2", "--tokens", "48", "--json"
    )
    found = json.loads(out)
    assert code == 1
    assert err.splitlines()[-1].startswith("thoughtbubbles audit: leak (block selection, r = 1.5): ")
    assert "r = 1)" not in err  # without forks there is nothing to drop
    assert out.count("\n") == 1
    assert (found["version"], found["model"], found["leaks"]) == (1, "bubbles-7m", True)
    first, second = found["audits"]
    assert (first["budget"], first["leaks"], second["budget"], second["leaks"]) == ("1.5", True, "1", False)
    assert (first["rows"], first["tokens"], first["dtype"], first["tolerance"]) == (2, 48, "float64", 0)
    assert 0 < first["total"]["moved"] <= first["total"]["comparisons"]
    assert sum(part["comparisons"] for part in first["by_distance"]) == first["total"]["comparisons"]
    assert f", up to {first['reach']} tokens before the change; log p" in err
    assert 0 < first["reach"] < 48
    assert second["reach"] == 0
    assert sum(part["moved"] for part in first["by_distance"]) == first["total"]["moved"]


def test_float32_states_its_tolerance(capsys, tmp_path):
    save_model(tmp_path, lively_model(small_config(), dtype=torch.float32))
    code, out, _ = run(capsys, "--checkpoint", str(tmp_path), "--dtype", "float32", "--device", "cpu")
    assert code == 0
    assert "up to 0.0001, the tolerance of float32" in out
    assert "random ids" in out


def test_a_text_file(capsys, tmp_path):
    """The beginning of a long file, also if that ends within a character."""
    model = lively_model(small_config(vocab_size=257, budget=1.5))
    save_model(tmp_path / "model", model, tokenizer=tokenizer("bytes"))
    (tmp_path / "text.txt").write_text("a" + "é" * (1 << 21))  # a byte more than what is read
    code, out, _ = run(
        capsys, "--checkpoint", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--rows", "3", "--json"
    )
    (found,) = json.loads(out)["audits"]
    assert code == 0
    assert (found["rows"], found["tokens"]) == (3, 16)


def gpt2(folder, **changes):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        **{
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 16,
            "vocab_size": 257,
            "n_positions": 40,
            "bos_token_id": 256,
            "eos_token_id": 256,
            **changes,
        }
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_gpt2_of_transformers_does_not_leak(capsys, tmp_path):
    code, out, _ = run(capsys, "--checkpoint", str(gpt2(tmp_path)), "--json")
    (found,) = json.loads(out)["audits"]
    assert code == 0
    assert (found["selection"], found["budget"], found["dtype"]) == (None, None, "float64")
    assert (found["rows"], found["tokens"]) == (4, 40)
    assert found["total"]["largest_any"] == 0


def test_a_tokenizer_next_to_gpt2_is_used(capsys, tmp_path):
    save_tokenizer(tokenizer("bytes"), gpt2(tmp_path))
    (tmp_path / "text.txt").write_text("A text of thirty-two characters.")
    text = ["--text", str(tmp_path / "text.txt")]
    code, out, _ = run(capsys, "--checkpoint", str(tmp_path), *text)
    assert code == 0
    assert "1 rows of 32 tokens of text" in out
    assert audit(tmp_path, "A text.").tokens == 7


def test_a_bidirectional_model_leaks(capsys, tmp_path):
    """BERT attends in both directions, also when it is opened as a causal model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=99
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    code, out, err = run(capsys, "--checkpoint", str(tmp_path), "--tokens", "16")
    assert code == 1
    assert "100.0%" in out
    assert "leak (no forks)" in err


def test_our_export_is_opened_as_ours(tmp_path):
    save_model(tmp_path / "model", lively_model(small_config(vocab_size=257)), tokenizer=tokenizer("bytes"))
    export(tmp_path / "model", out=tmp_path / "exported", dtype=None)
    opened = open_model(tmp_path / "exported")
    assert type(opened.model) is Thoughtbubbles
    assert opened.tokenizer is tokenizer("bytes")
    assert opened.model.embedding.weight.dtype == torch.float64


def test_our_hugging_face_class_has_selection(tmp_path):
    hf = pytest.importorskip("thoughtbubbles.interop.hf")
    save_model(tmp_path, lively_model(small_config(budget=1.5)))
    model = hf.ThoughtbubblesForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids = random_ids(load(tmp_path).config, 4, 14)
    assert not audit(model, ids).leaks
    assert audit(model, ids, selection="block").leaks


def test_code_that_comes_with_a_model_is_not_run(capsys, tmp_path):
    pytest.importorskip("transformers")
    code = f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (tmp_path / "mine.py").write_text(code)
    described = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    code, _, err = run(capsys, "--checkpoint", str(tmp_path))
    assert code == 1
    assert "code of its own, which audit does not run" in err
    assert not (tmp_path / "was-run").exists()


def test_transformers_is_optional(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run(capsys, "--checkpoint", str(tmp_path))
    assert code == 1
    assert "pip install 'thoughtbubbles[hf]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "{}"], "has no config.json with model.safetensors"),
        (["--checkpoint", "{}/nowhere"], "nowhere does not exist"),
        (["--checkpoint", "gpt2/nowhere"], "nowhere does not exist: give a model folder"),  # gpt2 is a folder here
        (["--checkpoint", "{}/gpt2"], "transformers' AutoModelForCausalLM cannot open it"),
        (["--checkpoint", "{}/broken"], "config.json"),
        (["--checkpoint", "{}/" + "x" * 5000], "File name too long"),
        (["--tokens", "513"], "tokens = 513: more than the model's context length, 512"),
        (["--tokens", "1"], "tokens = 1: give 2 or more"),
        (["--rows", "0"], "rows = 0: give 1 or more"),
        (["--text", "{}/empty.txt"], "text is empty"),
        (["--text", "{}/latin.txt"], "latin.txt is not UTF-8"),
        (["--text", "{}/nowhere.txt"], "nowhere.txt"),
        (["--text", "{}/short.txt", "--tokens", "100"], "the text has only"),
        (["--text", "{}/short.txt", "--checkpoint", "{}/plain"], "has no tokenizer; leave --text out"),
        (["--selection", "block", "--checkpoint", "{}/plain"], "selection = block: this model has no fork layers"),
        (["--budget", "2", "--checkpoint", "{}/plain"], "budget = 2: this model has no fork layers"),
        (["--budget", "0.5", "--tokens", "8"], "below 1"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text("A few words.")
    save_model(tmp_path / "plain", lively_model(small_config(**PLAIN)))
    for name, content in (("gpt2", '{"model_type": "gpt2"}'), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    code, out, err = run(capsys, *(argument.replace("{}", str(tmp_path)) for argument in arguments))
    lines = [line for line in err.splitlines() if not line.startswith("no --checkpoint")]
    assert code == 1
    assert out == ""
    assert len(lines) == 1
    assert lines[0].startswith("thoughtbubbles audit: ")
    assert message in lines[0]
