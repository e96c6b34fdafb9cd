"""The command line: starts fast, explains itself, and reports a user's mistake in one line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from helpers import named
from thoughtbubbles import __version__
from thoughtbubbles.bench.costs import spans
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.cli import main
from thoughtbubbles.generate.decode import prefill
from thoughtbubbles.model.cost import parameter_count
from thoughtbubbles.model.transformer import Thoughtbubbles


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "thoughtbubbles", *arguments], capture_output=True, text=True)


@pytest.fixture
def show(capsys) -> Callable[..., str]:
    """The output of a successful command, in this process, where torch is already imported."""

    def call(*arguments: str) -> str:
        with suppress(SystemExit):
            main(list(arguments))
        return str(capsys.readouterr().out)

    return call


def test_help_and_version():
    for arguments in ((), ("--help",), ("-h",)):
        shown = run(*arguments)
        assert shown.returncode == 0
        assert "usage: thoughtbubbles VERB" in shown.stdout
        assert "inspect" in shown.stdout
    assert run("--version").stdout == f"thoughtbubbles {__version__}\n"
    assert "parameters, FLOPs, streams" in run("inspect", "--help").stdout


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_who_has_stopped(arguments, options):
    """As with `| head`: no traceback."""
    end, pipe = os.pipe()
    os.close(end)
    command = [sys.executable, *options, "-m", "thoughtbubbles", *arguments]
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_without_standard_output():
    """As with `>&-`: nothing is shown, and a mistake is still one line."""
    for words, code, said in (("--version", 0, ""), ("inspect nothing-here", 1, "thoughtbubbles inspect: ")):
        command = f"exec '{sys.executable}' -m thoughtbubbles {words} >&-"
        done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
        assert done.returncode == code
        assert done.stderr.startswith(said)
        assert len(done.stderr.splitlines()) == code


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["--version"],
        ["audit", "--help"],
        ["bench", "--help"],
        ["eval", "--help"],
        ["export", "--help"],
        ["generate", "--help"],
        ["import", "--help"],
        ["inspect", "--help"],
        ["prepare", "--help"],
        ["train", "--help"],
        ["watch", "--help"],
    ],
)
def test_help_imports_no_torch(arguments):
    code = f"""
import contextlib, sys
from thoughtbubbles.cli import main
with contextlib.suppress(SystemExit):
    main({arguments!r})
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "jaxtyping")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
def test_inspect_of_a_size_of_the_paper(show):
    shown = show("inspect", "150m", "--budgets", "2", "--copies", "3")
    for expected in (
        "152,040,960",
        "152,052,480",
        "plain",
        "copy-3",
        "causal, r = 2",
        "3–15: 1,024 (2)",
        "0–15: 1,536 (3)",
    ):
        assert expected in shown


def test_inspect(show):
    assert "block, r = 2" in show("inspect", "nano-paper")
    assert "causal, r = 2, reach 0" in show("inspect", "nano", "--reach", "0")
    assert "r = " not in show("inspect", "nano-plain")
    of_all = show("inspect", "nano")
    assert all(label in of_all for label in ("plain, head gate", "causal, r = 2", "causal, r = 4", "feedback, reach 4"))


def test_inspect_shows_the_bytes_of_the_kv_cache(show):
    shown = show("inspect", "nano", "--rows", "3", "--tokens", "20", "--budgets", "1.5", "--copies", "3")
    told = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", shown)]
    found = []
    forms = (named(f"nano-{form}", budget=1.5) for form in ("plain", "gate", "copy-3", "causal"))
    for config in (*forms, named("nano")):
        model = Thoughtbubbles(config).to(torch.bfloat16)
        _, cache = prefill(model, torch.ones(3, 5, dtype=torch.int64), capacity=20)
        kept = [part for span in cache.spans for part in span if isinstance(part, torch.Tensor)]
        kept += [cache.n_tokens, cache.numerator, cache.denominator]
        kept += [] if cache.last is None else [cache.last]
        found.append(sum(tensor.nbytes for tensor in kept))
    assert told == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "no verb 'fly'; choose from: analyze, audit, bench, demo, download, eval"),
        (["inspect", "huge"], "thoughtbubbles inspect: no model is named 'huge'"),
        (["inspect", "nano", "--budgets", "0.5"], "budget = 0.5 is below 1"),
        (["inspect", "nano", "--tokens", "99"], "--tokens 99: a row of nano has from 1 to 32 tokens"),
        (["inspect", "nano", "--rows", "0"], "--rows 0"),
        (["inspect", "nano", "--reach", "-1"], "fork_reach = -1: give a whole number"),
        (["inspect", "nano", "--rows", str(10**21)], "--rows 1000000000000000000000: a batch has from 1 to 1,000,000"),
        (["inspect", "nano", "--copies", str(10**21)], "copies = 1000000000000000000000"),
        (["inspect", "nano", "--budgets", "1e99"], "budget = 1e+99 is not a number"),
        (["inspect", "nano-copy-99999999999999999999"], "no model is named 'nano-copy-99999999999999999999'"),
        (["inspect", "/dev/null"], "/dev/null has no config.json"),
        (["inspect", "x" * 5000], "File name too long"),
        (["bench", "tiny-plane"], "no case is named 'tiny-plane': did you mean tiny-plain"),
        (["bench", "tiny-plain", "--rows", "0"], "--rows 0: give 1 or more"),
        (["bench", "tiny-plain", "--data", "nowhere"], "nowhere"),
        (["train", "tiny-plane"], "no recipe is named 'tiny-plane': did you mean tiny-plain"),
        (["train", "tiny", "--optim.lr", "-1"], "--optim.lr -1.0: give a positive number"),
        (["train", "tiny", "--out", "/dev/null/run"], "/dev/null/run"),
        (["train", "150m-causal"], "data/openwebtext"),
        (["train", "150m-causal", "--out", "/tmp/never"], "data/openwebtext"),
        (["train", "150m-causal", "--dry-run"], "data/openwebtext"),
        (["train", "tiny", "--dry-run", "--data.val", "nowhere"], "nowhere"),
        (["train", "tiny", "--dry-run", "--model.vocab-size", "100"], "--model.vocab-size 100 is too small"),
        (["train", "tiny", "--dry-run", "--init-from", "nowhere"], "nowhere does not exist"),
        (["train", "tiny", "--dry-run", "--compute.residual", "bf16", "--device", "cpu"], "--compute.residual bf16"),
        (["train", "tiny", "--dry-run", "--out", "/dev/null"], "--out /dev/null is a file"),
        (["train", "tiny", "--out", "/dev/null"], "--out /dev/null"),
        (["train", "tiny", "--out", "x" * 5000], "File name too long"),
        (["train", "tiny", "--tokens", "1.5"], "'1.5': give a whole number"),
        (["train", "tiny", "--tokens", "nan"], "'nan': give a whole number"),
        (["train", "tiny", "--tokens", "1e16"], "'1e16': give a whole number"),
        (["train", "tiny", "--eval.tokens", "1e-3"], "'1e-3': give a whole number"),
        (["train", "tiny", "--tokens-per-step", "1e12"], "--tokens-per-step 1000000000000"),
        (["prepare", "nowhere.txt", "--out", "/tmp/never"], "nowhere.txt"),
        (["prepare", "--out", "/tmp/never"], "source"),
    ],
)
def test_mistakes(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    shown = f"{stopped.value} {capsys.readouterr().err}"
    assert stopped.value.code not in (0, None)
    assert message in shown
    assert "Traceback" not in shown


def test_inspect_refuses_a_budget_that_the_model_cannot_have(tmp_path, capsys):
    folder = str(save_model(tmp_path / "model", Thoughtbubbles(named("nano"))))
    main(["inspect", folder, "--budgets", "2"])
    with pytest.raises(SystemExit, match="--budgets = 1: without scores this model keeps all forks; give 2 or more"):
        main(["inspect", folder, "--budgets", "1"])


def test_a_mistake_is_one_line_on_standard_error():
    shown = run("inspect", "huge")
    assert shown.returncode == 1
    assert shown.stderr.startswith("thoughtbubbles inspect: no model is named 'huge'")
    assert "Traceback" not in shown.stderr


def test_inspect_a_folder(tmp_path, capsys):
    config = named("nano-causal", budget=9, fork_layers=(1, 3))
    folder = save_model(tmp_path / "run" / "step-00000002" / "model", Thoughtbubbles(config))
    for path in (folder, folder.parent, tmp_path / "run"):
        main(["inspect", str(path)])
        shown = capsys.readouterr().out
        assert f"{parameter_count(config):,}" in shown
        assert "causal, r = 9 (no limit)" in shown  # two fork layers make 4 of one at most
        assert "copy-3" not in shown
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "n_layer": 9999}))
    with pytest.raises(SystemExit, match="it has 4 blocks, not 9999"):
        main(["inspect", str(folder)])


def test_help_says_what_the_exit_codes_are(show):
    shown = show("train", "--help")
    for expected in ("SIGINT 130, SIGTERM 143", "--resume DIR", "--data.val DIR"):
        assert expected in shown


def test_the_list_of_recipes(show):
    shown = show("train", "--list")
    for expected in (
        "small-gpt2",
        "7,648,792",
        "scaling suite",
        "150m-causal",
        "150m-paper",
        "--data.mixture data/pes2o",
        "1.9b-causal-midtrain",
        "1,915,955,200",
        "772m-extended-forking",
        "2.5B",
    ):
        assert expected in shown


def test_a_dry_run_checks_the_real_run_and_prints_the_resolved_config(show, tmp_path):
    """At full size, on the real data: only the one step is small."""
    out = tmp_path / "run"
    words = [
        "train",
        "1.9b-causal",
        "--dry-run",
        "--optim.lr",
        "3e-4",
        "--data.mixture",
        "synthetic",
        "--out",
        str(out),
    ]
    shown = show(*words)
    assert "synthetic: 1,000,000 tokens" in shown
    assert not out.exists()
    text, _, summary = shown.rpartition("\n}\n")
    config = json.loads(text + "\n}")
    assert config["optim"]["lr"] == 3e-4
    assert config["model"]["width"] == 2048
    assert "1,915,955,200 parameters, 162,761 steps of 245,760 tokens" in summary


def test_help_shows_every_field_of_a_run(show):
    shown = show("train", "tiny", "--help")
    for expected in (
        "--optim.lr",
        "--model.budget",
        "--save.milestones",
        "--data.mixture",
        "--compute.activation-checkpointing",
    ):
        assert expected in shown


def testspans():
    assert spans([1, 1, 2, 3, 3]) == [("0–1", 1), ("2", 2), ("3–4", 3)]


def test_a_cpu_without_bfloat16_is_named_in_one_line():
    """In a fresh process, since torch warns once: on such a CPU one line of ours, on another nothing; no backtrace."""
    code = """
import torch, warnings
from thoughtbubbles.cli import SLOW_BFLOAT16, short_warnings
with short_warnings():
    x = torch.ones(256, 256, dtype=torch.bfloat16)
    x @ x
    for _ in range(2):
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: Exception raised from")
    warnings.warn("something else")
print(SLOW_BFLOAT16)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Exception raised" not in done.stderr
    assert done.stderr.count(done.stdout.strip()) >= 1
    assert "UserWarning: something else" in done.stderr
