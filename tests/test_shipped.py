"""The model in the package: its checksum, its losses, its card, and that it is what every verb uses by default."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thoughtbubbles
from thoughtbubbles.checkpoint import find_model
from thoughtbubbles.data.loader import Source, ValidationSet
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.windows import windows_for
from thoughtbubbles.files import SHIPPED, read_object, shipped_model
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.loss import IGNORED

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "shipped.json"
TEXT = Path(__file__).parent / "golden" / "shipped.txt"
SAME_LOSS = 0.001  # nats: other machines sum in another order, and a few forks differ


@pytest.fixture(scope="module")
def model():
    return thoughtbubbles.load(dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return thoughtbubbles.load_tokenizer()


@pytest.fixture(scope="module")
def card():
    return read_object(shipped_model() / "run.json")


@torch.no_grad()
def text_loss(model, tokenizer, budget) -> float:
    ids = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode(TEXT.read_text())]])
    assert ids.shape[1] <= model.config.block_size
    return model(ids[:, :-1], targets=ids[:, 1:], budget=budget).loss.item()


@torch.no_grad()
def validation_loss(model, data: Path, *, every: int) -> tuple[float, int]:
    """Nats per token over every n-th batch of four windows of the validation text, and the number of targets."""
    batches = ValidationSet([Source(data)], rows=4, n_tokens=model.config.block_size, split="train")
    total, n = 0.0, 0
    for at in range(0, len(batches), every):
        ids, targets, lengths = (torch.from_numpy(getattr(batches[at], name)) for name in ("ids", "targets", "lengths"))
        nll = model(ids, targets=targets, lengths=lengths, want=("token_nll",)).token_nll
        total += nll.double().sum().item()
        n += int((targets != IGNORED).sum())
    return total / n, n


def test_the_folder_is_small_and_the_weights_are_those_of_the_run_card(card):
    files = list(shipped_model().iterdir())
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    names = {path.name for path in files}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "run.json"} <= names
    weights = (shipped_model() / "model.safetensors").read_bytes()
    assert card["sha256"] == {"model.safetensors": hashlib.sha256(weights).hexdigest()}


def test_it_is_what_its_recipe_makes(model, card):
    from thoughtbubbles.recipes import recipe

    run = recipe(SHIPPED)
    assert model.config == run.model
    assert (model.config.selection, model.config.budget, model.config.fork_layers) == ("causal", 2, (3, 7, 11))
    settings = json.loads(json.dumps(run.as_dict()))
    for name in ("tokens", "tokens_per_step", "budgets", "optim", "seed", "compute"):
        assert card["training"]["config"][name] == settings[name], name
    assert thoughtbubbles.load().embedding.weight.dtype == torch.bfloat16
    twin = recipe(f"{SHIPPED}-plain")
    assert replace(twin, name=run.name, model=run.model, budgets=run.budgets) == run  # the same text in the same order


def test_the_loss_on_a_text_of_ours(model, tokenizer):
    golden = json.loads(GOLDEN.read_text())["text"]
    found = {budget: text_loss(model, tokenizer, float(budget)) for budget in golden}
    assert found == pytest.approx(golden, abs=SAME_LOSS)


@pytest.fixture(scope="module")
def validation(tmp_path_factory):
    if "THOUGHTBUBBLES_DATA" not in os.environ:
        pytest.skip("the validation text is needed: set THOUGHTBUBBLES_DATA to the folder of the data")
    path = Path(os.environ["THOUGHTBUBBLES_DATA"]) / "pretrain" / "val.jsonl.xz"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    out = tmp_path_factory.mktemp("validation") / "val"
    prepare((str(path),), out=out, val_fraction=0.0, tokenizer=SHIPPED, processes=1)
    return out


@pytest.mark.slow
@pytest.mark.data
def test_the_loss_on_a_part_of_the_validation_text(model, validation):
    golden = json.loads(GOLDEN.read_text())["validation"]
    found, n = validation_loss(model, validation, every=32)
    assert n == golden["targets"]
    assert found == pytest.approx(golden["nats"], abs=SAME_LOSS)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif("THOUGHTBUBBLES_WHOLE" not in os.environ, reason="half an hour on one core: THOUGHTBUBBLES_WHOLE=1")
def test_the_loss_on_all_of_the_validation_text(model, validation, card):
    """The number of the card was measured on a GPU."""
    found, n = validation_loss(model, validation, every=1)
    assert n == card["text"]["tokens"] - 1  # nothing predicts the first token
    assert found == pytest.approx(card["scores"]["2"]["nats"], abs=SAME_LOSS)


@pytest.mark.slow
def test_the_card_is_what_its_script_writes(card):
    subprocess.run([sys.executable, ROOT / "benchmarks" / "shipped.py", "card", "--check"], check=True)
    text = (shipped_model() / "README.md").read_text()
    for number in (card["parameters"], card["sha256"]["model.safetensors"], "gzip -9", "xz -9", "plain counterpart"):
        assert (f"{number:,}" if isinstance(number, int) else number) in text
    for budget in ("1", "1.25", "1.5", "2", "4"):
        assert f"| {SHIPPED}, budget {budget} | {card['scores'][budget]['nats']:.4f} |" in text


def test_the_samples_of_the_card_can_be_written_again(model, tokenizer, card):
    """Up to a token where two are almost equally likely, which another machine may choose the other way."""
    first = card["samples"][0]
    sampling = Sampling(temperature=first["temperature"], seed=first["seed"])
    (written,) = generate(model, [Request(prompt=first["prompt"], max_new=12, sampling=sampling)], tokenizer=tokenizer)
    assert first["text"].startswith(written.text)


@pytest.mark.parametrize("n_tokens", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_text_is_the_same_with_and_without_the_cache(model, tokenizer, n_tokens):
    texts = []
    for method in ("cached", "uncached"):
        request = Request(prompt="The cell", max_new=n_tokens, sampling=Sampling(temperature=0), end_ids=())
        (written,) = generate(model, [request], tokenizer=tokenizer, method=method)
        texts.append(written.ids)
    assert len(texts[0]) == n_tokens
    assert texts[0] == texts[1]


def test_transformers_opens_it_and_gives_the_same_logits(model, tokenizer):
    transformers = pytest.importorskip("transformers")
    import thoughtbubbles.interop.hf  # noqa: F401 (registers the model)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32).eval()
    words = transformers.AutoTokenizer.from_pretrained(shipped_model())
    ids = words("The cell divides when", return_tensors="pt").input_ids
    assert ids[0].tolist() == tokenizer.encode("The cell divides when")
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids, want=("logits",)).logits, atol=1e-4, rtol=1e-4)


def test_its_tokenizer_is_that_of_hugging_face_on_any_text(tokenizer):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_file(str(shipped_model() / "tokenizer.json"))
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", *sorted((ROOT / "src").rglob("*.py"))[:40]]
    for page in pages:
        text = page.read_text().replace("<|endoftext|>", "")  # which the library alone does not read as text
        assert theirs.encode(text, add_special_tokens=False).ids == tokenizer.encode(text), page
        assert tokenizer.decode(tokenizer.encode(text)) == text


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thoughtbubbles", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        pytest.param(["generate", "The cell", "--max-new", "3"], "The cell", id="generate"),
        pytest.param(["inspect"], "6,914,496", id="inspect", marks=pytest.mark.slow),
        pytest.param(
            ["eval", "--tasks", "piqa", "--data-dir", str(ROOT / "docs/examples/benchmarks")],
            "runs/eval-bubbles-7m/",
            id="eval",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_verb_without_a_checkpoint_uses_it_and_says_so(tmp_path, words, shown):
    before = {path: path.stat().st_mtime_ns for path in shipped_model().rglob("*")}
    done = run(*words, cwd=tmp_path)
    assert shown in done.stdout
    assert done.stderr.count(f"using {SHIPPED}, the model in the package") == 1
    assert before == {path: path.stat().st_mtime_ns for path in shipped_model().rglob("*")}  # nothing is written there


@pytest.mark.slow
def test_its_export_keeps_what_its_card_reports(tmp_path, card):
    done = run("export", "--out", "exported", cwd=tmp_path)
    assert done.stderr == f"no --checkpoint: using {SHIPPED}, the model in the package\n"
    text = (tmp_path / "exported" / "README.md").read_text()
    assert f"| {SHIPPED}, budget 2 | {card['scores']['2']['nats']:.4f} |" in text
    for kept in (
        "license: mit",
        "Do not trust what it says",
        "## Training",
        "## Samples",
        card["samples"][0]["text"][:50],
    ):
        assert kept in text


@pytest.mark.parametrize("checkpoint", [None, "run"])
def test_text_in_other_tokens_is_refused_with_the_option_that_helps(tmp_path, model, tokenizer, checkpoint):
    """For a run, `prepare` wants the folder of its model, which has the tokenizer."""
    folder = tmp_path / "run" / "step-00000001" / "model"
    shutil.copytree(shipped_model(), folder)
    (tmp_path / "mine.txt").write_text(TEXT.read_text())
    source, out = (str(tmp_path / "mine.txt"),), tmp_path / "data"
    prepare(source, out=out, tokenizer="bytes", val_fraction=0.0, processes=1)
    settings = Evaluation(checkpoint=checkpoint and tmp_path / checkpoint, data=out, split="train")
    with pytest.raises(ValueError, match="prepare the text with --tokenizer ") as error:
        windows_for(settings, model.config, tokenizer)
    option = str(error.value).split("--tokenizer ")[1]
    assert option == (SHIPPED if checkpoint is None else str(folder))
    prepare(source, out=tmp_path / "again", tokenizer=option, val_fraction=0.0, processes=1)


def test_its_name_stands_for_it_unless_there_is_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_model(SHIPPED) == find_model() == shipped_model()
    (tmp_path / SHIPPED).mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_model(SHIPPED)
    assert find_model() == shipped_model()


@pytest.mark.slow
def test_it_can_be_fine_tuned_on_your_own_text(tmp_path):
    (tmp_path / "mine.txt").write_text(TEXT.read_text() * 3)
    run("prepare", "mine.txt", "--tokenizer", SHIPPED, "--val-fraction", "0", "--out", "data", cwd=tmp_path)
    options = ["--tokens", "256", "--tokens-per-step", "128", "--model.block-size", "128", "--out", "tuned"]
    run("train", SHIPPED, "--init-from", SHIPPED, "--data.mixture", "data", *options, "--log.every", "1", cwd=tmp_path)
    losses = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    first = next(line["loss"] for line in losses if "loss" in line)
    assert first < 4.5  # an untrained model has 9.0
