"""Exams from end to end: a model sits them, is killed, goes on, shares them with other ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evals.test_tasks import RECORDS, write
from helpers import SAME_ROW, lively_model
from thoughtbubbles.checkpoint import load_model, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.evals.likelihood import encode_choices, log_likelihoods
from thoughtbubbles.evals.run import run
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.config import ModelConfig

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"
FEW = ("lambada", "arc_easy", "clutrr")
FORMS = {"causal": {}, "block": {"selection": "block"}, "plain": {"fork_layers": ()}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Of bytes, 160 a row: long enough for all but one question of the exams below."""
    folders = {}
    for name, form in FORMS.items():
        base = {"n_layer": 2, "n_head": 2, "width": 8, "vocab_size": 300, "block_size": 160, "fork_layers": (1,)}
        folders[name] = tmp_path_factory.mktemp("models") / name
        model = lively_model(ModelConfig(**{**base, **form}), dtype=torch.float32)
        save_model(folders[name], model, tokenizer=tokenizer("bytes"))
    return folders


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Three documents of each exam; the last LAMBADA passage and GSM8K question are longer than a block."""
    folder = tmp_path_factory.mktemp("exams")
    for name, record in RECORDS.items():
        if name == "mmlu_continuation":
            continue
        asked = next(field for field in ("context", "goal", "question", "story", "ctx_a", "UID") if field in record)
        more = "many more words " * 12 if name in ("lambada", "gsm8k") else "more "
        write(folder, name, [{**record, asked: f"{text}{record[asked]}"} for text in ("", "One ", more)])
    return folder


def evaluate(checkpoint: Path, questions: Path, out: Path, **changes) -> dict:
    settings = {"tasks": FEW, "dtype": "float64", **changes}
    return run(Evaluation(checkpoint=checkpoint, data_dir=questions, out=out, **settings), device="cpu")


def numbers(results: dict) -> dict:
    """What does not depend on how long anything took."""
    dropped = ("seconds", "documents_per_second", "answered_before")
    return {
        name: {key: value for key, value in found.items() if key not in dropped}
        for name, found in results["tasks"].items()
    }


def same(a: object, b: object) -> bool:
    """Equal but for the last bits of a float."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == pytest.approx(b, abs=SAME_ROW) if isinstance(a, float) else a == b


def answers(out: Path, task: str) -> list[dict]:
    return [json.loads(line) for line in (out / "answers" / f"{task}.jsonl").read_text().splitlines()[1:]]


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
        "LAMBADA: 1 of 3 documents were longer than the model's block and lost",
        "GSM8K: 1 of 3 documents were longer than the model's block and lost",
        "lm-evaluation-harness's acc",
        f"Written: {out / 'results.json'} and {out / 'perplexity.png'}, {out / 'exams.png'}",
    ):
        assert expected in shown.out
    assert "HellaSwag: 100%, done in" in shown.err
    results = json.loads((out / "results.json").read_text())
    assert (out / "exams.png").read_bytes().startswith(PNG)
    assert list(results["tasks"]) == ["perplexity", *TASKS]
    assert (results["budget"], results["selection"], results["ranks"]) == ("1.5", "causal", 1)
    assert results["config"]["block_size"] == 160
    assert results["versions"]["torch"] == torch.__version__
    assert {found["version"] for name, found in results["tasks"].items() if name != "perplexity"} == {1}
    text = results["tasks"]["perplexity"]
    blockwise = text["ways"]["blockwise"]  # of bytes: one a token, but for end-of-text
    assert blockwise["bits_per_byte"] * text["bytes"] == pytest.approx(blockwise["nats"] * 20 / 0.6931471805599453)
    assert 0 < text["bytes"] <= 20


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_what_the_model_says(models, questions, tmp_path, form):
    results = evaluate(models[form], questions, tmp_path, tasks=("arc_easy", "gsm8k"))
    model, tok = load_model(models[form], dtype=torch.float64), tokenizer("bytes")
    document = TASKS["arc_easy"].document(RECORDS["arc_easy"])
    expected = log_likelihoods(model, encode_choices(tok, document.context, document.choices), vocab_size=tok.size)
    first = next(answer for answer in answers(tmp_path, "arc_easy") if answer["document"] == 0)
    assert first["log_probs"] == pytest.approx([found.log_prob for found in expected], abs=SAME_ROW)
    assert first["tokens"] == [len(choice) for choice in document.choices]
    assert results["selection"] == (None if form == "plain" else form)

    prompt = tok.encode("How many?\n")
    (said,) = generate(model, [Request(prompt=prompt, max_new=150, sampling=Sampling(temperature=0))], tokenizer=tok)
    written = {answer["document"]: answer for answer in answers(tmp_path, "gsm8k")}
    assert written[0]["text"] == said.text
    assert written[0]["truncated"] == 0
    long = len(tok.encode("many more words " * 12 + "How many?\n"))
    assert written[2]["truncated"] == long - 80  # half of the block is kept for the answer
    assert 0 < len(written[2]["text"]) <= 80


def test_a_killed_exam_goes_on(models, questions, tmp_path):
    """A line that was cut short is answered again, the others are not."""
    tasks = ("lambada", "clutrr", "gsm8k")
    whole = evaluate(models["causal"], questions, tmp_path / "whole", tasks=tasks)
    out = tmp_path / "killed"
    evaluate(models["causal"], questions, out, tasks=tasks)
    for task in tasks:
        path = out / "answers" / f"{task}.jsonl"
        path.write_bytes(path.read_bytes()[:-9])
    (out / "results.json").unlink()
    again = evaluate(models["causal"], questions, out, tasks=tasks)
    assert same(numbers(again), numbers(whole))
    assert {found["answered_before"] for found in again["tasks"].values()} == {2}
    for task in tasks:
        assert sorted(answer["document"] for answer in answers(out, task)) == [0, 1, 2]
    third = evaluate(models["causal"], questions, out, tasks=tasks)
    assert {found["answered_before"] for found in third["tasks"].values()} == {3}
    assert same(numbers(third), numbers(whole))


def test_answers_of_other_settings_are_not_mixed_in(models, questions, tmp_path):
    base = {"tasks": ("piqa",)}
    evaluate(models["causal"], questions, tmp_path, **base)
    for changes in ({"budget": "1.5"}, {"dtype": "float32"}, {"fresh": True}, {"fresh": True}, {"limit": 2}):
        found = evaluate(models["causal"], questions, tmp_path, **base, **changes)["tasks"]["piqa"]
        assert found["answered_before"] == 0, changes
        assert found["documents"] == changes.get("limit", 3)
    assert evaluate(models["plain"], questions, tmp_path, **base)["tasks"]["piqa"]["answered_before"] == 0
    assert evaluate(models["plain"], questions, tmp_path, **base)["tasks"]["piqa"]["answered_before"] == 3


def test_narrow_numbers_stay_near(models, questions, tmp_path):
    wide = evaluate(models["causal"], questions, tmp_path / "wide")
    narrow = evaluate(models["causal"], questions, tmp_path / "narrow", dtype="bfloat16")
    assert narrow["tasks"]["lambada"]["nats"]["mean"] == pytest.approx(
        wide["tasks"]["lambada"]["nats"]["mean"], rel=0.1
    )


@pytest.mark.slow
def test_a_process_that_is_killed(models, tmp_path):
    """SIGKILL in the middle; the same command finishes with the numbers of a run that nobody disturbed."""
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
    path, deadline = tmp_path / "out" / "answers" / "blimp.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and path.read_bytes().count(b"\n") > 100):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
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
def test_ranks_share_the_work(models, questions, tmp_path, ranks):
    """Also where there are more ranks than documents and windows, and when another number of ranks goes on."""
    corpus, out = tmp_path / "corpus", tmp_path / "many"
    write_synthetic(corpus, n_tokens=4_000, seed=0)
    options = {"tasks": ("perplexity", *FEW, "gsm8k"), "data": corpus, "windows": 3, "tokens": 10}
    alone = evaluate(models["block"], questions, tmp_path / "one", **options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "thoughtbubbles", "eval", "--checkpoint", str(models["block"]), "--tasks", *options["tasks"]]
    command += ["--data-dir", str(questions), "--data", str(corpus), "--windows", "3", "--tokens", "10"]
    command += ["--device", "cpu", "--dtype", "float64", "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=env)
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


@pytest.mark.data
@pytest.mark.skipif("THOUGHTBUBBLES_DATA" not in os.environ, reason="THOUGHTBUBBLES_DATA names no folder of real sets")
def test_real_sets(tmp_path):
    """All of them, a few documents each, with GPT-2's tokens."""
    config = ModelConfig(n_layer=2, n_head=2, width=8, vocab_size=50304, block_size=256, fork_layers=(1,))
    folder = save_model(tmp_path / "model", lively_model(config, dtype=torch.float32), tokenizer=tokenizer("gpt2"))
    data = Path(os.environ["THOUGHTBUBBLES_DATA"])
    names = tuple(name for name in TASKS if name != "gsm8k")
    found = evaluate(folder, data, tmp_path / "out", tasks=names, limit=6, dtype="float32")["tasks"]
    written = evaluate(folder, data, tmp_path / "out", tasks=("gsm8k",), limit=2, dtype="float32")["tasks"]
    for name, exam in {**found, **written}.items():
        assert exam["documents"] == (2 if name == "gsm8k" else 6)
        assert 0 <= exam["accuracy"]["mean"] <= 1


def test_mistakes(models, questions, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("THOUGHTBUBBLES_DATA", raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    write(damaged, "piqa", [RECORDS["piqa"], '{"goal": "x"'])
    small = tmp_path / "small"
    model = lively_model(replace(load_model(models["plain"]).config, block_size=8), dtype=torch.float32)
    save_model(small, model, tokenizer=tokenizer("bytes"))
    for arguments, message in (
        (["--tasks", "helaswag"], "--tasks helaswag: there is no such task; did you mean hellaswag"),
        (["--tasks", "piqa"], "--data-dir is missing: give the folder with the exams"),
        (["--tasks", "piqa", "--data-dir", str(tmp_path / "x")], "there is no such folder"),
        (["--tasks", "piqa", "--data-dir", str(empty)], "has no piqa.validation.jsonl (.gz or .xz): get the set from"),
        (["--tasks", "piqa", "--data-dir", str(damaged)], "piqa.validation.jsonl, line 2: Expecting"),
        (["--tasks", "gsm8k", "--data-dir", str(questions), "--compile"], "--compile: needs a CUDA GPU"),
        (["--tasks", "piqa", "--data-dir", str(questions), "--batch-tokens", "0"], "--batch-tokens 0: give 1 or more"),
        (
            ["--checkpoint", str(small), "--tasks", "piqa", "--data-dir", str(questions)],
            "more than block_size = 8: a context can be shortened, but not what is scored",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "--checkpoint", str(models["plain"]), "--out", str(tmp_path), "--device", "cpu", *arguments])
        shown = " ".join(f"{stopped.value} {capsys.readouterr().err}".split())
        assert message in shown
        assert "Traceback" not in shown
