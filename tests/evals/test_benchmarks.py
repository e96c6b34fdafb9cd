"""Benchmarks end to end: a model is evaluated, killed, resumed, and shares the work with other ranks."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from evals.test_tasks import RECORDS, write
from helpers import SAME_ROW, lively_model
from thoughtbubbles.checkpoint import load, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.likelihood import encode_choices, log_likelihoods
from thoughtbubbles.evals.run import run
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.show import benchmark_table
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"
NEW = 24  # tokens of a generated answer
FEW = ("lambada", "arc_easy", "clutrr")
FORMS = {"causal": {}, "block": {"selection": "block"}, "plain": {"fork_layers": ()}}


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch):
    monkeypatch.setitem(TASKS, "gsm8k", replace(TASKS["gsm8k"], max_new=NEW))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Byte models with a context length of 160: long enough for all but one question of the benchmarks below."""
    folders = {}
    for name, form in FORMS.items():
        base = {"n_layer": 3, "n_head": 2, "width": 16, "vocab_size": 300, "block_size": 160, "merge": "residual"}
        base |= {"fork_layers": (1, 2), "budget": 1.5}  # so that the selection rules matter and differ
        folders[name] = tmp_path_factory.mktemp("models") / name
        model = lively_model(ModelConfig(**{**base, **form}), dtype=torch.float32)
        save_model(folders[name], model, tokenizer=tokenizer("bytes"))
    return folders


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Three documents per benchmark; the last LAMBADA passage and GSM8K question exceed the context length."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, record in RECORDS.items():
        if name == "mmlu_continuation":
            continue
        asked = next(field for field in ("context", "goal", "question", "story", "ctx_a", "UID") if field in record)
        more = "many more words " * 12 if name in ("lambada", "gsm8k") else "more "
        write(folder, name, [{**record, asked: f"{text}{record[asked]}"} for text in ("", "One ", more)])
    return folder


def evaluate(checkpoint: Path, questions: Path, out: Path, **changes) -> dict:
    settings = {"tasks": FEW, "dtype": "float64", **changes}
    return run(Evaluation(checkpoint=checkpoint, data_dir=questions, out=out, **settings), World(torch.device("cpu")))


def numbers(results: dict) -> dict:
    """The results without timings."""
    dropped = ("seconds", "documents_per_second", "answered_before")
    return {
        name: {key: value for key, value in found.items() if key not in dropped}
        for name, found in results["tasks"].items()
    }


def same(a: object, b: object) -> bool:
    """Equal up to the last bits of a float."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == pytest.approx(b, abs=SAME_ROW, rel=SAME_ROW) if isinstance(a, float) else a == b


def answers(out: Path, task: str) -> list[dict]:
    (path,) = (out / "answers").glob(f"{task}-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_the_command(models, questions, tmp_path, capsys):
    out, corpus = tmp_path / "out", tmp_path / "corpus"
    write_synthetic(corpus, n_tokens=4_000, seed=0)
    main(
        [
            *("eval", "--checkpoint", str(models["causal"]), "--tasks", "all", "--data-dir", str(questions)),
            *("--data", str(corpus), "--windows", "2", "--tokens", "10", "--budget", "1.5", "--device", "cpu"),
            *("--out", str(out)),
        ]
    )
    shown = capsys.readouterr()
    for expected in (
        "causal selection, r = 1.5; 2 windows of 10 tokens",
        "causal selection, r = 1.5, proportional budget",
        *(task.title for task in TASKS.values()),
        "hops: 2",
        "LAMBADA: perplexity of the last word",
        "LAMBADA: 1 of 3 documents were longer than the model's context length; ",
        "GSM8K: 1 of 3 documents were longer than the model's context length; ",
        "lm-evaluation-harness's acc",
        f"Written: {out / 'results.json'} and {out / 'perplexity.png'}, {out / 'benchmarks.png'}",
    ):
        assert expected in shown.out
    assert "HellaSwag: 100%, done in" in shown.err
    results = json.loads((out / "results.json").read_text())
    assert (out / "benchmarks.png").read_bytes().startswith(PNG)
    assert list(results["tasks"]) == ["perplexity", *TASKS]
    assert (results["budget"], results["selection"], results["ranks"]) == ("1.5", "causal", 1)
    assert results["config"]["block_size"] == 160
    assert results["versions"]["torch"] == torch.__version__
    assert {found["version"] for name, found in results["tasks"].items() if name != "perplexity"} == {1}
    text = results["tasks"]["perplexity"]
    blockwise = text["ways"]["blockwise"]  # bytes: one per token, except end-of-text
    assert blockwise["bits_per_byte"] * text["bytes"] == pytest.approx(blockwise["nats"] * 20 / 0.6931471805599453)
    assert 0 < text["bytes"] <= 20


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_what_the_model_says(models, questions, tmp_path, form):
    results = evaluate(models[form], questions, tmp_path, tasks=("arc_easy", "gsm8k"))
    model, tok = load(models[form], dtype=torch.float64), tokenizer("bytes")
    document = TASKS["arc_easy"].document(RECORDS["arc_easy"])
    expected = log_likelihoods(model, encode_choices(tok, document.context, document.choices), vocab_size=tok.size)
    first = next(answer for answer in answers(tmp_path, "arc_easy") if answer["document"] == 0)
    assert first["log_probs"] == pytest.approx([found.log_prob for found in expected], abs=SAME_ROW)
    assert first["tokens"] == [len(choice) for choice in document.choices]
    assert results["selection"] == (None if form == "plain" else form)

    prompt = tok.encode("How many?\n")
    (said,) = generate(model, [Request(prompt=prompt, max_new=NEW, sampling=Sampling(temperature=0))], tokenizer=tok)
    written = {answer["document"]: answer for answer in answers(tmp_path, "gsm8k")}
    assert written[0]["text"] == said.text
    assert written[0]["truncated"] == 0
    long = len(tok.encode("many more words " * 12 + "How many?\n"))
    assert written[2]["truncated"] == long - (160 - NEW)  # room is kept for the answer
    assert 0 < len(written[2]["text"]) <= NEW


@pytest.mark.slow
def test_a_killed_benchmark_resumes(models, questions, tmp_path):
    """A truncated line is answered again, the others are not."""
    tasks = ("lambada", "clutrr", "gsm8k")
    whole = evaluate(models["causal"], questions, tmp_path / "whole", tasks=tasks)
    out = tmp_path / "killed"
    evaluate(models["causal"], questions, out, tasks=tasks)
    for task in tasks:
        (path,) = (out / "answers").glob(f"{task}-*.jsonl")
        path.write_bytes(b"".join([*path.read_bytes().splitlines(True)[:-1], b'{"of": "no use"}\n', b'{"document": 1']))
    (out / "results.json").unlink()
    again = evaluate(models["causal"], questions, out, tasks=tasks)
    assert same(numbers(again), numbers(whole))
    assert {found["answered_before"] for found in again["tasks"].values()} == {2}
    for task in tasks:
        assert sorted(a["document"] for a in answers(out, task) if "document" in a) == [0, 1, 2]
    third = evaluate(models["causal"], questions, out, tasks=tasks)
    assert {found["answered_before"] for found in third["tasks"].values()} == {3}
    assert same(numbers(third), numbers(whole))


@pytest.mark.slow
def test_answers_of_other_settings_are_not_mixed_in(models, questions, tmp_path, monkeypatch):
    """Each has its own file, so another evaluation in between loses nothing."""
    out, folder = tmp_path / "out", tmp_path / "model"
    shutil.copytree(models["causal"], folder)

    def answered_before(**changes) -> int:
        settings = {"tasks": ("piqa",), **changes}
        return evaluate(folder, questions, out, **settings)["tasks"]["piqa"]["answered_before"]

    assert answered_before() == 0
    for changes in ({"budget": ("1.25",)}, {"dtype": "float32"}):
        assert (answered_before(**changes), answered_before(**changes)) == (0, 3), changes
    assert answered_before() == answered_before(budget=("3/2",)) == 3  # which is the model's own
    assert answered_before(method="uncached") == 3  # choices are not written
    assert answered_before(limit=2) == 2  # of the same benchmark
    monkeypatch.setitem(TASKS, "piqa", replace(TASKS["piqa"], version=2))
    assert (answered_before(), answered_before()) == (0, 3)
    other = lively_model(load(folder).config, seed=5, dtype=torch.float32)
    save_model(folder, other, tokenizer=tokenizer("bytes"))
    assert (answered_before(), answered_before()) == (0, 3)


def test_a_fresh_start_is_kept(models, questions, tmp_path):
    before = [
        evaluate(models["causal"], questions, tmp_path, tasks=("piqa",), fresh=fresh)["tasks"]["piqa"][
            "answered_before"
        ]
        for fresh in (False, True, False)
    ]
    assert before == [0, 0, 3]


def test_a_part_first_and_the_rest_later(models, questions, tmp_path):
    few = evaluate(models["causal"], questions, tmp_path / "a", tasks=("piqa",), limit=2)["tasks"]["piqa"]
    every = evaluate(models["causal"], questions, tmp_path / "a", tasks=("piqa",))
    assert (few["documents"], every["tasks"]["piqa"]["answered_before"]) == (2, 2)
    assert same(numbers(every), numbers(evaluate(models["causal"], questions, tmp_path / "b", tasks=("piqa",))))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["causal", "block"])
def test_the_budget_is_the_one_asked_for(models, questions, tmp_path, form):
    """For choices and for generated answers; the proportional budget replaces a fixed one in the config."""
    folder = tmp_path / "model"
    if form == "block":
        model = load(models[form])
        fixed = Thoughtbubbles(replace(model.config, budget_mode="fixed"))
        fixed.load_state_dict(model.state_dict())
        save_model(folder, fixed, tokenizer=tokenizer("bytes"))
    else:
        folder = models[form]
    model, tok = load(folder, dtype=torch.float64), tokenizer("bytes")
    document = TASKS["arc_easy"].document(RECORDS["arc_easy"])
    queries = encode_choices(tok, document.context, document.choices)
    asked = Request(prompt=tok.encode("How many?\n"), max_new=NEW, sampling=Sampling(temperature=0))
    mode = None if form == "causal" else "proportional"
    found = {}
    for budget in (None, "1"):
        out = tmp_path / f"out {budget}"
        given = () if budget is None else (budget,)
        evaluate(folder, questions, out, tasks=("arc_easy", "gsm8k"), budget=given, limit=1)
        expected = log_likelihoods(model, queries, vocab_size=tok.size, budget=budget)
        found[budget] = answers(out, "arc_easy")[0]["log_probs"]
        assert found[budget] == pytest.approx([each.log_prob for each in expected], abs=SAME_ROW)
        (said,) = generate(model, [replace(asked, budget=budget)], tokenizer=tok, budget_mode=mode)
        assert answers(out, "gsm8k")[0]["text"] == said.text
    assert found["1"] != pytest.approx(found[None], abs=1e-3)


@pytest.mark.slow
def test_the_method_is_the_one_asked_for(models, questions, tmp_path):
    """With block selection the cache approximates: answers are those of `generate` with the cache."""
    model, tok = load(models["block"], dtype=torch.float64), tokenizer("bytes")
    asked = Request(prompt=tok.encode("How many?\n"), max_new=NEW, sampling=Sampling(temperature=0))
    texts = {}
    for method in ("cached", "uncached"):
        evaluate(models["block"], questions, tmp_path / method, tasks=("gsm8k",), method=method, limit=1)
        (said,) = generate(model, [asked], tokenizer=tok, method=method)
        texts[method] = answers(tmp_path / method, "gsm8k")[0]["text"]
        assert texts[method] == said.text
    assert texts["cached"] != texts["uncached"]


def test_bfloat16_stays_close(models, questions, tmp_path):
    wide = evaluate(models["plain"], questions, tmp_path / "wide", tasks=("lambada", "gsm8k"))
    narrow = evaluate(models["plain"], questions, tmp_path / "narrow", tasks=("lambada", "gsm8k"), dtype="bfloat16")
    a, b = (results["tasks"]["lambada"]["nats"]["mean"] for results in (wide, narrow))
    assert 1e-6 < abs(a - b) < 0.1 * a


def test_weights_in_several_files(models, questions, tmp_path):
    """As Hugging Face's save_pretrained writes large models."""
    folder = shutil.copytree(models["plain"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    parts = {"a.safetensors": sorted(weights)[:5], "b.safetensors": sorted(weights)[5:]}
    for name, tensors in parts.items():
        save_file({tensor: weights[tensor] for tensor in tensors}, folder / name)
    places = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink()
    found, expected = (
        evaluate(checkpoint, questions, tmp_path / name, tasks=("piqa",))
        for name, checkpoint in (("parts", folder), ("whole", models["plain"]))
    )
    assert numbers(found) == numbers(expected)


def test_a_model_of_nans_is_not_scored(models, questions, tmp_path):
    """Comparisons with NaN are false, so the first choice, always right in BLiMP, would be the best."""
    model = load(models["plain"])
    torch.nn.init.constant_(model.final_norm.weight, float("nan"))
    save_model(tmp_path / "model", model, tokenizer=tokenizer("bytes"))
    with pytest.raises(ValueError, match="the model's logits are NaN"):
        evaluate(tmp_path / "model", questions, tmp_path / "out", tasks=("blimp",))


def test_the_table_fits_into_80_columns(models, questions, tmp_path):
    results = evaluate(models["causal"], questions, tmp_path, tasks=tuple(set(TASKS) - {"gsm8k"}))
    results["tasks"]["blimp"]["by"]["set"]["[red]x[/blue]"] = results["tasks"]["blimp"]["by"]["set"].pop("agreement")
    results["tasks"]["piqa"]["accuracy"] = {"mean": 0.5, "standard_error": 0.0123}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(benchmark_table(results["tasks"], title="title"))
    shown = console.export_text()
    for text in ("MMLU", "continuation", "ARC-Challenge", "HellaSwag", "[red]x", "docu-", "char-", "chance"):
        assert text in shown
    assert "│ PIQA " in shown
    assert "50.00 │" in shown
    assert "± 1.23 │" in shown
    assert "…" not in shown
    assert all(len(line) <= 80 and line[-1] in "┓┃┩│┘" for line in shown.splitlines()[1:])  # up to the last border


@pytest.mark.slow
def test_a_process_that_is_killed(models, tmp_path):
    """SIGKILL in the middle; the same command finishes with the numbers of an uninterrupted run."""
    write(tmp_path, "blimp", [{**RECORDS["blimp"], "sentence_bad": f"Cats sleeps {i}."} for i in range(4000)])
    command = [sys.executable, "-m", "thoughtbubbles", "eval", "--checkpoint", str(models["causal"]), "--device", "cpu"]
    command += [
        "--tasks",
        "blimp",
        "--data-dir",
        str(tmp_path),
        "--batch-tokens",
        "200",
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    lines, deadline = 0, time.monotonic() + 120
    while time.monotonic() < deadline and lines <= 100:
        time.sleep(0.05)
        lines = sum(path.read_bytes().count(b"\n") for path in (tmp_path / "out" / "answers").glob("blimp-*.jsonl"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    (path,) = (tmp_path / "out" / "answers").glob("blimp-*.jsonl")
    kept = path.read_bytes().count(b"\n") - 1
    assert 100 <= kept < 4000
    assert not (tmp_path / "out" / "results.json").exists()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["tasks"]["blimp"]["answered_before"] >= kept
    undisturbed = evaluate(models["causal"], tmp_path, tmp_path / "whole", tasks=("blimp",), dtype="float32")
    assert results["tasks"]["blimp"]["accuracy"] == undisturbed["tasks"]["blimp"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_work(models, questions, tmp_path, ranks, monkeypatch):
    """Also with more ranks than documents and windows, and when another number of ranks resumes."""
    monkeypatch.undo()  # the ranks write answers of the usual length
    corpus, out = tmp_path / "corpus", tmp_path / "many"
    write_synthetic(corpus, n_tokens=4_000, seed=0)
    options = {"tasks": ("perplexity", *FEW, "gsm8k"), "data": corpus, "windows": 3, "tokens": 10}
    alone = evaluate(models["block"], questions, tmp_path / "one", **options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "thoughtbubbles", "eval", "--checkpoint", str(models["block"]), "--tasks", *options["tasks"]]
    command += ["--data-dir", str(questions), "--data", str(corpus), "--windows", "3", "--tokens", "10"]
    command += ["--device", "cpu", "--dtype", "float64", "--out", str(out)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert told.stdout.count("Written:") == 1
    shared = json.loads((out / "results.json").read_text())
    assert shared["ranks"] == ranks
    alone = json.loads(json.dumps(alone))
    text, expected = (results["tasks"].pop("perplexity") for results in (shared, alone))
    for name, way in expected["ways"].items():
        assert all(same(a, b) for a, b in zip(text["ways"][name]["windows"], way["windows"], strict=True))
    assert same(numbers(shared), numbers(alone))
    again = evaluate(models["block"], questions, out, tasks=(*FEW, "gsm8k"))
    assert {found["answered_before"] for found in again["tasks"].values()} == {3}


@pytest.mark.slow  # to unpack them all takes half a minute
@pytest.mark.data
@pytest.mark.skipif("THOUGHTBUBBLES_DATA" not in os.environ, reason="THOUGHTBUBBLES_DATA names no folder of real sets")
def test_real_sets(tmp_path):
    """All of them, a few documents each, with GPT-2's tokens."""
    config = ModelConfig(n_layer=2, n_head=2, width=8, vocab_size=50304, block_size=256, fork_layers=(1,))
    folder = save_model(tmp_path / "model", lively_model(config, dtype=torch.float32), tokenizer=tokenizer("gpt2"))
    data = Path(os.environ["THOUGHTBUBBLES_DATA"])
    n_choices = {"lambada": 1, "hellaswag": 4, "blimp": 2, "piqa": 2, "mmlu": 4, "clutrr": 18, "gsm8k": 0}
    names = tuple(name for name in TASKS if name != "gsm8k")
    found = evaluate(folder, data, tmp_path / "out", tasks=names, limit=6, dtype="float32")["tasks"]
    written = evaluate(folder, data, tmp_path / "out", tasks=("gsm8k",), limit=2, dtype="float32")["tasks"]
    for name, benchmark in {**found, **written}.items():
        assert benchmark["documents"] == (2 if name == "gsm8k" else 6)
        for answer in answers(tmp_path / "out", name):
            assert len(answer["log_probs"]) == len(answer["tokens"]) == n_choices.get(name, len(answer["tokens"]))
            assert all(log_prob < 0 for log_prob in answer["log_probs"])
            assert all(tokens > 0 for tokens in answer["tokens"])


def test_mistakes(models, questions, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("THOUGHTBUBBLES_DATA", raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    write(damaged, "piqa", [RECORDS["piqa"], '{"goal": "x"'])
    small = tmp_path / "small"
    model = lively_model(replace(load(models["plain"]).config, block_size=8), dtype=torch.float32)
    save_model(small, model, tokenizer=tokenizer("bytes"))
    for arguments, message in (
        (["--tasks", "helaswag"], "--tasks helaswag: there is no such task; did you mean hellaswag"),
        (["--tasks", "piqa"], "--data-dir is missing: give the folder with the benchmarks"),
        (["--tasks", "piqa", "--data-dir", str(tmp_path / "x")], "does not exist: give the folder"),
        (["--tasks", "piqa", "--data-dir", str(empty)], "`thoughtbubbles download piqa.validation --out "),
        (["--tasks", "piqa", "--data-dir", str(damaged)], "piqa.validation.jsonl, line 2: Expecting"),
        (["--tasks", "gsm8k", "--data-dir", str(questions), "--compile"], "--compile: needs a CUDA GPU"),
        (["--tasks", "piqa", "--data-dir", str(questions), "--batch-tokens", "0"], "--batch-tokens 0: give a whole"),
        (
            ["--checkpoint", str(small), "--tasks", "piqa", "--data-dir", str(questions)],
            "piqa, document 0: a choice has 11 tokens, more than the model's block_size = 8",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "--checkpoint", str(models["plain"]), "--out", str(tmp_path), "--device", "cpu", *arguments])
        shown = " ".join(f"{stopped.value} {capsys.readouterr().err}".split())
        assert message in shown
        assert "Traceback" not in shown
