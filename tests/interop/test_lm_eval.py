"""Our models in lm-evaluation-harness: its requests answered exactly, and its commands."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lm_eval.tasks
import pytest
import torch
from lm_eval.api.instance import Instance

from helpers import SAME_ROW, SAME_ROW_FLOAT32
from interop.harness_benchmarks import GPT2, KINDS, RECORDS, save_models, write_benchmarks, write_records
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.interop.harness import _name, run_harness
from thoughtbubbles.interop.lm_eval import ThoughtbubblesLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"), block_size=48)


def asks(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, doc={}, arguments=of_one, idx=i) for i, of_one in enumerate(arguments)]


def by_hand(model: ThoughtbubblesLM, context: list[int], scored: list[int]) -> tuple[float, bool]:
    """log p(scored | context) of one row alone, from all log-probabilities of the forward."""
    row = (context + scored)[-model.max_length - 1 :]
    with torch.no_grad():
        log_probs = model.model(torch.tensor([row[:-1]]), budget=model.budget, want=("log_probs",)).log_probs[0]
    total, greedy = 0.0, True
    for back, token in enumerate(reversed(scored), start=1):
        total += float(log_probs[-back, token])
        greedy &= int(log_probs[-back, : GPT2.size].argmax()) == token
    return total, greedy


LONG = "one two three four five six seven eight nine ten " * 8
PAIRS = [
    ("The cat sat on the", " mat"),
    ("", " Nobody came."),
    ("A line\n", "and another"),
    ("A space at the end ", "moves"),
    (LONG, " eleven twelve"),
    ("Short", LONG[:90]),
    ("x", " y"),
]


def ids_of(context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Written out, not taken from the harness."""
    end = len(context.rstrip())
    if not context:
        return [GPT2.end_of_text], GPT2.encode(continuation)
    head, tail = context[:end], context[end:] + continuation
    return GPT2.encode(head), GPT2.encode(head + tail)[len(GPT2.encode(head)) :]


@pytest.mark.parametrize("kind", KINDS)
def test_log_likelihoods_are_those_of_each_row_alone(checkpoints, kind):
    model = ThoughtbubblesLM(checkpoints[kind], dtype="float64", budget=None if kind == "plain" else 1.5)
    found = model.loglikelihood(asks("loglikelihood", *PAIRS), disable_tqdm=True)
    for pair, (log_prob, greedy) in zip(PAIRS, found, strict=True):
        expected, likeliest = by_hand(model, *ids_of(*pair))
        assert log_prob == pytest.approx(expected, abs=SAME_ROW)
        assert greedy == likeliest
    assert model.get_model_info()["requests_truncated"] == 1

    backwards = model.loglikelihood(asks("loglikelihood", *PAIRS[::-1]), disable_tqdm=True)[::-1]
    alone = [model.loglikelihood(asks("loglikelihood", pair), disable_tqdm=True)[0] for pair in PAIRS]
    for one, other, third in zip(found, backwards, alone, strict=True):
        assert one[0] == pytest.approx(other[0], abs=SAME_ROW)
        assert one[0] == pytest.approx(third[0], abs=SAME_ROW)


def test_what_is_likeliest_is_called_greedy(checkpoints):
    model = ThoughtbubblesLM(checkpoints["causal"])
    (text,) = model.generate_until(
        asks("generate_until", ("The cat", {"until": [], "max_gen_toks": 3})), disable_tqdm=True
    )
    ids = GPT2.encode("The cat")
    written = generate(model.model, [Request(prompt=ids, max_new=3, sampling=Sampling(temperature=0))], tokenizer=GPT2)[
        0
    ]
    assert written.text == text
    answers = model._loglikelihood_tokens(
        [(None, ids, written.ids), (None, ids, [*written.ids[:2], (written.ids[2] + 1) % GPT2.size])],
        disable_tqdm=True,
    )
    assert [greedy for _, greedy in answers] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_rolling_scores_every_token_once_from_the_windows_of_the_harness(checkpoints, kind):
    """Windows of 48 tokens: the first from end-of-text, the last reaches back to have as many tokens as it can."""
    model = ThoughtbubblesLM(checkpoints[kind], dtype="float64")
    text = LONG + LONG[:100] + "and an end"
    ids = GPT2.encode(text)
    size, expected, done = 48, 0.0, 0
    assert 2 * size < len(ids) < 3 * size
    for end in (size, 2 * size, len(ids)):
        inputs = [GPT2.end_of_text, *ids][end - size : end]
        with torch.no_grad():
            log_probs = model.model(torch.tensor([inputs]), want=("log_probs",)).log_probs[0]
        expected += sum(float(log_probs[i - end, ids[i]]) for i in range(done, end))
        done = end
    long, short, empty = model.loglikelihood_rolling(
        asks("loglikelihood_rolling", (text,), ("A word",), ("",)), disable_tqdm=True
    )
    assert long == pytest.approx(expected, abs=SAME_ROW)
    assert short == pytest.approx(by_hand(model, [GPT2.end_of_text], GPT2.encode("A word"))[0], abs=SAME_ROW)
    assert empty == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_generate(checkpoints, kind):
    model = ThoughtbubblesLM(checkpoints[kind], batch_tokens=100)  # two rows at a time
    prompts = ["The cat sat", "Once upon a time there was", "", LONG, "x"]
    until = {"until": ["zzzz"], "max_gen_toks": 8, "do_sample": False}
    found = model.generate_until(asks("generate_until", *((p, until) for p in prompts)), disable_tqdm=True)
    for prompt, text in zip(prompts, found, strict=True):
        ids = (GPT2.encode(prompt) or [GPT2.end_of_text])[-40:]
        request = Request(prompt=ids, max_new=8, sampling=Sampling(temperature=0))
        assert text == generate(model.model, [request], tokenizer=GPT2)[0].text
    assert model.get_model_info()["requests_truncated"] == 1

    whole = found[0]
    assert len(whole) > 6
    stop = whole[4:6]
    (cut,) = model.generate_until(
        asks("generate_until", (prompts[0], {**until, "until": ["zzzz", stop]})), disable_tqdm=True
    )
    assert cut == whole[: whole.index(stop)]


def test_a_repeated_request_draws_a_new_sample(checkpoints):
    model = ThoughtbubblesLM(checkpoints["causal"])
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    again = asks("generate_until", *[("The cat", settings)] * 3)
    first = model.generate_until(again, disable_tqdm=True)
    assert len(set(first)) == 3
    assert model.generate_until(again, disable_tqdm=True) == first


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"until": [], "max_gen_toks": 48}, "max_gen_toks = 48: the model reads at most block_size = 48"),
        ({"until": [], "max_gen_toks": "many"}, "generation_kwargs = .*'many'"),
        ({"until": [], "num_beams": 4}, "generation_kwargs has num_beams"),
        ({"until": [], "do_sample": True, "temperature": "hot"}, "temperature"),
        ({"until": [], "do_sample": True, "temperature": 1.0, "seed": "x"}, "seed = 'x'"),
        ({"until": 5}, r"stop = \(5,\)"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_what_generation_cannot_do(checkpoints, settings, complaint):
    model = ThoughtbubblesLM(checkpoints["plain"])
    with pytest.raises(ValueError, match=complaint):
        model.generate_until(asks("generate_until", ("The cat", settings)), disable_tqdm=True)


# The commands


def test_run_harness(data, cache, checkpoints, tmp_path, capsys):
    tasks = ("piqa", "lambada_openai", "blimp_wh_island", "arc_easy", "gsm8k_cot_zeroshot")
    results = run_harness(
        checkpoints["block"], tasks=tasks, data_dir=data, budget="3/2", cache_dir=cache, out=tmp_path / "out"
    )
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert set(results["results"]) == set(tasks)
    model = ThoughtbubblesLM(checkpoints["block"], budget=1.5)
    pairs = [
        ("The cat sat on the mat, and the dog lay beside the", " cat"),
        (RECORDS["lambada_openai.test"][1]["context"], " Ben"),
    ]
    expected = [by_hand(model, *ids_of(*pair)) for pair in pairs]
    found = results["results"]["lambada_openai"]
    assert found["perplexity,none"] == pytest.approx(
        math.exp(-sum(one for one, _ in expected) / 2), rel=SAME_ROW_FLOAT32
    )
    assert found["acc,none"] == sum(greedy for _, greedy in expected) / 2
    told = results["config"]
    assert (told["selection"], told["budget"], told["budget_mode"]) == ("block", "3/2", "proportional")
    assert {"lm_eval_version", "thoughtbubbles_version"} <= results.keys()
    shown = capsys.readouterr().out
    assert "|piqa" in shown
    assert f"Written: {tmp_path / 'out' / 'results.json'}" in shown


def test_results_of_other_settings_have_another_name(checkpoints):
    def name(kind: str, *tasks: str, limit: int | None = None, **options) -> str:
        return _name(ThoughtbubblesLM(checkpoints[kind], **options), tasks or ("piqa",), None, limit=limit)

    every = [name("causal"), name("causal", limit=2), name("plain"), name("causal", "piqa", "x")]
    every += [name("causal", budget=1.5), name("causal", dtype="float64"), name("causal", method="uncached")]
    assert len(set(every)) == len(every)
    assert every[1].startswith("harness-piqa-limit2-")
    assert name("causal", budget="3/2") == name("causal", budget="1.50") == every[4]
    assert every[4].startswith("harness-piqa-budget1.5-")
    assert name("causal", budget=2)[-8:] == every[0][-8:]  # which is the model's own


def test_other_questions_and_another_config_are_not_overwritten(checkpoints, tmp_path):
    """The same checkpoint, with weights that are the same to the last bit."""
    folder, found = Path(shutil.copytree(checkpoints["causal"], tmp_path / "model")), []
    config = json.loads((folder / "config.json").read_text())

    def run(goal: str, **changes) -> None:
        write_records(tmp_path, "piqa.validation", [{**RECORDS["piqa.validation"][0], "goal": goal}])
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        found.append(run_harness(folder, tasks=("piqa",), data_dir=tmp_path, cache_dir=tmp_path / "cache")["name"])

    run("Dry a cup")
    run("Dry a pot")
    run("Dry a pot", selection="block")
    assert len(set(found)) == 3
    assert {path.parent.name for path in folder.glob("eval/*/results.json")} == set(found)
    run("Dry a cup")
    assert found[3] == found[0]


def test_results_that_are_moved_aside_are_reported(data, cache, checkpoints, tmp_path, capsys):
    wanted = {"tasks": ("piqa",), "data_dir": data, "cache_dir": cache, "out": tmp_path / "out"}
    first = run_harness(checkpoints["plain"], **wanted)["name"]
    assert "another evaluation" not in capsys.readouterr().err
    run_harness(checkpoints["plain"], **wanted, limit=1)
    message = f"{tmp_path / 'out'} had the results of another evaluation; moved them to {tmp_path / 'out' / first}."
    assert message in capsys.readouterr().err
    assert (tmp_path / "out" / first / "results.json").exists()


def run_command(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment = {**os.environ, **offline, **variables}
    run = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


def test_the_stock_command_knows_our_model(data, checkpoints, tmp_path):
    """In a fresh process that is given only the paths of two definitions."""
    printed = run_command(
        *(sys.executable, "-m", "thoughtbubbles.interop.harness_tasks", data, "--cache-dir", tmp_path / "cache"),
        cwd=tmp_path,
    )
    folder = Path(printed.stdout.strip())
    run = run_command(
        *(Path(sys.executable).parent / "lm_eval", "--model", "thoughtbubbles"),
        *("--model_args", f"checkpoint={checkpoints['causal']},budget=1.5,dtype=float32,device=cpu,batch_tokens=64"),
        *("--tasks", f"{folder / 'piqa.yaml'},{folder / 'lambada_openai.yaml'}"),
        *("--output_path", tmp_path / "out"),
        cwd=tmp_path,
    )
    assert "|piqa" in run.stdout
    (path,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(path.read_text())
    assert (theirs["config"]["budget"], theirs["config"]["selection"]) == (1.5, "causal")
    ours = run_harness(
        *(checkpoints["causal"],),
        tasks=("piqa", "lambada_openai"),
        data_dir=data,
        budget=1.5,
        cache_dir=tmp_path / "cache",
        out=tmp_path / "ours",
    )
    for task in ("piqa", "lambada_openai"):
        for name in ("acc,none", "acc_norm,none", "perplexity,none"):
            if name in ours["results"][task]:
                assert theirs["results"][task][name] == pytest.approx(ours["results"][task][name], rel=SAME_ROW_FLOAT32)


def test_the_commands_of_the_guide(data, checkpoints, tmp_path):
    """All of them, one after the other, as written."""
    mine = shutil.copytree(data, tmp_path / "data")
    upstream = Path(lm_eval.tasks.__file__).parent / "blimp"
    sets = [path.stem for path in upstream.glob("[!_]*.yaml")]
    write_records(mine / "eval", "blimp", [{**RECORDS["blimp"][0], "UID": name} for name in sets])
    guide = Path(__file__).parents[2] / "docs" / "guides" / "harness.md"
    lines = "".join(re.findall(r"^```text\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE))
    assert len(lines.splitlines()) == 4
    script = lines.replace("DATA", str(mine)).replace("DIR", str(checkpoints["plain"]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = run_command("bash", "-euc", script, cwd=tmp_path, PATH=path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    hellaswag = [line for line in run.stdout.splitlines() if line.startswith("|hellaswag")]
    assert len(hellaswag) == 2, "once by each command"
    assert hellaswag[0] == hellaswag[1]
    assert "|blimp  " in run.stdout
    (written,) = checkpoints["plain"].glob("eval/harness-hellaswag-piqa-limit*/results.json")
    results = json.loads(written.read_text())
    assert set(results["results"]) == {"hellaswag", "piqa"}
