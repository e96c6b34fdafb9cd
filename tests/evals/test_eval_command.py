"""`thoughtbubbles eval` end to end: on small trained models, and with everything that can be wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import BFLOAT16, SAME_FUNCTION, SAME_ROW, SAME_ROW_FLOAT32
from thoughtbubbles.checkpoint import load, load_tokenizer, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.loader import Source, ValidationSet
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.autoregressive import through_cache, without_cache
from thoughtbubbles.evals.figures import draw_perplexity
from thoughtbubbles.evals.run import run, windows_for
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.train.config import DataConfig
from thoughtbubbles.train.loop import train
from train.runs import tiny

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_synthetic(folder, n_tokens=20_000, seed=0)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus) -> dict[str, Path]:
    """Runs of a few steps: causal selection, the paper's block selection, and plain."""
    torch.set_num_threads(1)
    folders = {}
    for name in ("tiny-causal", "tiny-block", "tiny-plain"):
        base = tiny(name)
        forks = base.model.fork_layers and (1, 2)
        small = replace(base.model, n_layer=3, width=32, block_size=12, fork_layers=forks)
        folders[name] = tmp_path_factory.mktemp("runs") / name
        config = replace(
            base,
            model=small,
            tokens=8 * 8 * 12,
            tokens_per_step=8 * 12,
            data=DataConfig(mixture=(str(corpus),)),
            eval=replace(base.eval, every=0, tokens=240, sample_tokens=0),
            out=folders[name],
        )
        train(config)
    return folders


def evaluate(checkpoint: Path, corpus: Path, **changes) -> dict:
    return run(Evaluation(checkpoint=checkpoint, data=corpus, **changes), World(torch.device("cpu")))


def test_the_command(trained, corpus, tmp_path, capsys):
    out = tmp_path / "found"
    main(
        [
            *("eval", "--checkpoint", str(trained["tiny-block"]), "--tasks", "perplexity", "--data", str(corpus)),
            *("--windows", "3", "--tokens", "10", "--batch", "2", "--budget", "1.5", "--device", "cpu"),
            *("--dtype", "float64", "--out", str(out)),
        ]
    )
    shown = capsys.readouterr()
    for expected in (
        "block selection, r = 1.5; 3 windows of 10 tokens",
        "autoregressive, proportional budget",
        "autoregressive, fixed budget",
        "approximation: cache, causal rule",
        "of the greedy predictions agree",
        f"Written: {out / 'results.json'} and {out / 'perplexity.png'}",
    ):
        assert expected in shown.out
    assert "autoregressive, fixed budget: 100%, done in" in shown.err

    results = json.loads((out / "results.json").read_text())
    assert (out / "perplexity.png").read_bytes().startswith(PNG)
    assert results["config"]["selection"] == results["selection"] == "block"
    assert results["config"]["fork_layers"] == [1, 2]
    assert results["budget"] == "1.5"
    assert results["settings"]["windows"] == 3
    assert results["versions"]["torch"] == torch.__version__
    assert "command" in results
    assert Path(results["checkpoint"]).name == "model"

    settings = Evaluation(checkpoint=trained["tiny-block"], data=corpus, windows=3, tokens=10)
    model = load(trained["tiny-block"], dtype=torch.float64)
    windows = windows_for(settings, model.config, load_tokenizer(trained["tiny-block"]))
    ways = results["tasks"]["perplexity"]["ways"]
    for name, scores in (
        ("autoregressive", without_cache(model, windows, budget=1.5)),
        ("fixed", without_cache(model, windows, budget=1.5, budget_mode="fixed")),
        ("cached", through_cache(model, windows, budget=1.5)),
    ):
        assert ways[name]["nats"] == pytest.approx(scores.mean, abs=SAME_FUNCTION)
        assert ways[name]["perplexity"] == pytest.approx(scores.perplexity, abs=SAME_FUNCTION)
        assert [w["nats"] for w in ways[name]["windows"]] == pytest.approx(scores.window_means, abs=SAME_FUNCTION)
        assert ways[name]["tokens"] == 30


def test_a_causal_model_and_its_run(trained, corpus, capsys):
    results = evaluate(trained["tiny-causal"], corpus, dtype="float64")
    found = results["tasks"]["perplexity"]
    assert list(found["ways"]) == ["blockwise", "autoregressive"]
    assert found["differences"]["autoregressive - blockwise"]["largest"] < SAME_ROW
    (written,) = trained["tiny-causal"].glob("eval/step-*/*/results.json")
    assert written.parent.name == results["name"]
    assert results["name"].startswith("perplexity-corpus-val-windows8-float64-")
    shown = capsys.readouterr().out
    assert "A fixed budget does not exist: causal selection decides at each token" in shown
    assert "causal selection, r = 2; 8 windows of 12 tokens" in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-causal", "tiny-block", "tiny-plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_stays_close(trained, corpus, tmp_path, name, dtype):
    wide = evaluate(trained[name], corpus, windows=2, dtype="float64", out=tmp_path / "wide")
    narrow = evaluate(trained[name], corpus, windows=2, dtype=dtype, out=tmp_path / "narrow")
    for way, expected in wide["tasks"]["perplexity"]["ways"].items():
        tolerance = SAME_ROW_FLOAT32 if dtype == "float32" else BFLOAT16
        assert narrow["tasks"]["perplexity"]["ways"][way]["nats"] == pytest.approx(expected["nats"], rel=tolerance)


def test_a_plain_model_has_no_budget(trained, corpus, tmp_path, capsys):
    results = evaluate(trained["tiny-plain"], corpus, windows=2, out=tmp_path)
    assert (results["budget"], results["selection"]) == (None, None)
    assert "no forks; 2 windows of 12 tokens" in capsys.readouterr().out


def test_windows_are_spread_over_the_split_and_all_of_it_is_there_when_asked_for(trained, corpus):
    config, tokenizer = load(trained["tiny-causal"]).config, load_tokenizer(trained["tiny-causal"])
    validation = ValidationSet([Source(corpus)], rows=1, n_tokens=12)
    settings = Evaluation(checkpoint=trained["tiny-causal"], data=corpus, windows=4)
    few = windows_for(settings, config, tokenizer)
    rows = [i * len(validation) // 4 for i in range(4)]
    assert few.ids.tolist() == [validation[i].ids[0].tolist() for i in rows]
    assert few.targets[:, :-1].tolist() == few.ids[:, 1:].tolist()
    every = windows_for(replace(settings, windows=10**6), config, tokenizer)
    assert len(every.ids) == len(validation)
    assert int(every.counted.sum()) == sum(int((batch.targets != -100).sum()) for batch in validation)
    assert 1 <= int(every.lengths[-1]) < 12  # the last window is shorter
    train_split = windows_for(replace(settings, split="train"), config, tokenizer)
    assert not torch.equal(train_split.ids, few.ids)


def test_the_figure_comes_from_the_file(tmp_path):
    windows = [{"tokens": 3, "nats": 1.0, "perplexity": 2.718}]
    way = {"title": "one", "perplexity": 2.718, "windows": windows}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"tasks": {"perplexity": {"ways": {"blockwise": way, "autoregressive": way}}}}))
    figure = draw_perplexity(path)
    assert figure == tmp_path / "perplexity.png"
    assert figure.read_bytes().startswith(PNG)


def test_mistakes(trained, corpus, tmp_path, capsys):
    checkpoint, text = str(trained["tiny-causal"]), tmp_path / "some.txt"
    text.write_text("some text")
    other = tmp_path / "other"
    main(["prepare", str(text), "--out", str(other), "--val-fraction", "0.0", "--tokenizer", "gpt2"])
    save_model(tmp_path / "bare", load(checkpoint))
    shard = next(corpus.glob("val-*.bin"))
    for arguments, message in (
        (["--tasks", "perplexitty"], "--tasks perplexitty: there is no such task; did you mean perplexity?"),
        (["--tasks", "xyz"], "--tasks xyz: there is no such task; choose from all, zero-shot, perplexity, lambada"),
        ([], "--data is missing: perplexity needs validation text; give a folder written by `thoughtbubbles prepare`"),
        (["--data", str(text)], f"is a file: prepare it first: thoughtbubbles prepare {text} --out DIR"),
        (["--data", str(shard)], f"is a file: give its folder, {corpus}"),
        (["--data", str(tmp_path / "nowhere")], "is not a prepared dataset"),
        (["--data", str(other), "--split", "train"], "made with tokenizer 'gpt2', but the model was trained with"),
        (["--data", str(corpus), "--split", "test"], "has no split 'test'"),
        (["--data", str(corpus), "--tokens", "13"], "the model's context length; give at most 12"),
        (["--data", str(corpus), "--windows", "0"], "--windows 0: give a whole number from 1 to"),
        (["--data", str(corpus), "--batch", "-1"], "--batch -1: give a whole number from 1 to"),
        (["--data", str(corpus), "--budget", "0.5"], "--budget = 0.5 is below 1"),
        (["--data", str(corpus), "--out", str(text / "below")], "cannot be written (Not a directory)"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "--checkpoint", checkpoint, "--device", "cpu", *arguments])
        shown = " ".join(f"{stopped.value} {capsys.readouterr().err}".split())  # mistakes in options come in a box
        assert message in shown
        assert "Traceback" not in shown
    for folder, message in (("bare", "has no tokenizer.json"), ("nowhere", "does not exist: give a model folder")):
        with pytest.raises(SystemExit, match=f"^thoughtbubbles eval: .*{message}"):
            main(["eval", "--checkpoint", str(tmp_path / folder), "--data", str(corpus), "--device", "cpu"])


def test_help_says_what_it_costs_and_imports_no_torch():
    code = """
import contextlib, sys
from thoughtbubbles.cli import main
with contextlib.suppress(SystemExit):
    main(["eval", "--help"])
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "jaxtyping")]
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for expected in ("--checkpoint", "--windows", "512 times", "RUN/eval/step-N", "R [R …]"):
        assert expected in shown
