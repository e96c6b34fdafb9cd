"""`thoughtbubbles export`: a folder that opens without this package, tells its run's own numbers, and eats nothing."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from hf_models import config_of
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from helpers import SAME_ROW_FLOAT32, lively_model, random_ids
from thoughtbubbles import Thoughtbubbles, cli
from thoughtbubbles.checkpoint import save_model, write_json, write_manifest
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.interop.card import card
from thoughtbubbles.interop.export import export
from thoughtbubbles.interop.hf import ThoughtbubblesForCausalLM
from thoughtbubbles.interop.remote_code import remote_code

PROBE = Path(__file__).with_name("hf_remote_probe.py")
KINDS = ("plain", "copy-3", "causal", "causal-residual", "block", "block-residual")


def model_in(folder: Path, kind: str = "causal") -> Thoughtbubbles:
    core = lively_model(config_of(kind, vocab_size=300), dtype=torch.float32).eval()
    save_model(folder, core, tokenizer=tokenizer("bytes"))
    return core


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with numbers that can be told apart."""
    folder = tmp_path / "run"
    model_in(folder / "step-00000040" / "model")
    model_in(folder / "step-00000080" / "model")
    described = {
        "config": {"name": "first|try", "data": {"mixture": ["data/books", "web"]}},
        "versions": {"torch": "9"},
    }
    write_json(folder / "run.json", described)
    lines = [
        {"step": 40, "tokens": 4000, "loss": 4.4},
        {"step": 40, "held_out": {"books": 4.04}},
        {"step": 80, "tokens": 8000, "loss": 3.3},
        {"step": 80, "held_out": {"books": 3.03, "web": 3.13}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, accuracy in ((40, 0.4), (80, 0.8)):
        for task, place in (("blimp", folder / f"step-{step:08}" / "eval-blimp"), ("piqa", folder / f"eval-{step}")):
            place.mkdir()
            scores = {"accuracy": {"mean": accuracy, "standard_error": 0.0125}, "nats": {"mean": 1.5}, "version": 1}
            scores |= {"sets": {"agreement": accuracy / 2}, "by": {"hops": {"2": {"accuracy": 0.15}}}, "curve": [1.25]}
            where = f"elsewhere/step-{step:08}/model"
            found = {"tasks": {task: scores}, "checkpoint": where, "budget": 2, "selection": "causal"}
            write_json(place / "results.json", found)
    return folder


# The code that travels


def test_the_code_needs_torch_and_transformers_alone(tmp_path):
    files = remote_code()
    assert files == remote_code()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name in files:
        for node in ast.walk(ast.parse(files[name])):
            assert not (isinstance(node, ast.ImportFrom) and node.level == 0 and "thoughtbubbles" in str(node.module))
        needed = set(get_imports(tmp_path / name))
        assert needed <= {"torch", "transformers", *sys.stdlib_module_names}, name
    # Hugging Face fetches what it finds by following relative imports from the two entries: that must be all.
    found = {Path(path).name for path in get_relative_import_files(tmp_path / "modeling_thoughtbubbles.py")}
    assert found | {"modeling_thoughtbubbles.py"} == set(files)


def test_the_code_is_ours_but_for_its_imports():
    """Line by line, with the imports left out of both."""
    source = Path(__file__).parents[2] / "src" / "thoughtbubbles"
    files = remote_code()
    for name, path in (
        ("model_head", "model/head"),
        ("model_fork", "model/fork"),
        ("generate_decode", "generate/decode"),
    ):
        texts = []
        for text in (files[f"{name}.py"], (source / f"{path}.py").read_text()):
            tree = ast.parse(text)
            tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
            texts.append(ast.unparse(tree).split("\nthis_module")[0])
        assert texts[0] == texts[1]


def site_packages() -> str:
    return os.pathsep.join(dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib")))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_a_fresh_process_without_the_package(tmp_path, version):
    paths = site_packages()
    if version == "oldest":
        oldest = Path(sys.prefix) / "oldest-hf"
        if not oldest.is_dir():
            pytest.skip("the oldest transformers is not installed here: `make test-all` does it")
        paths = f"{oldest}{os.pathsep}{paths}"
    cores, folders = {}, []
    for kind in KINDS:
        cores[kind] = model_in(tmp_path / kind / "native", kind)
        folders.append(str(export(tmp_path / kind / "native", out=tmp_path / kind / "out")))
    process = subprocess.run(
        [sys.executable, "-I", "-S", PROBE, tmp_path / "found.pt", paths, *folders],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    found = torch.load(tmp_path / "found.pt")
    assert found["version"].startswith("5.17.") == (version == "oldest")
    for kind, folder in zip(KINDS, folders, strict=True):
        check_like_ours(cores[kind], tmp_path / kind / "native", found[folder])


def check_like_ours(core, native, found):
    assert found["names"] == list(core.state_dict())
    assert found["config"] == "ThoughtbubblesConfig"
    ids = torch.arange(24).view(2, 12)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            expected = Thoughtbubbles.load(native, dtype=dtype).eval()(ids, want=("logits",)).logits
        assert torch.equal(found[str(dtype)], expected)
    requests = [Request(prompt=p, max_new=6, sampling=Sampling(temperature=0)) for p in ("fork", "a")]
    texts = [completion.ids for completion in generate(core, requests, tokenizer=tokenizer("bytes"))]
    assert [row[: len(text)] for row, text in zip(found["greedy"][:, 4:].tolist(), texts, strict=True)] == texts
    theirs = ThoughtbubblesForCausalLM.from_pretrained(native).train()
    inputs = torch.tensor([[102, 111, 114, 107], [256, 256, 256, 97]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1]])
    loss = theirs(inputs, attention_mask=mask, labels=inputs.masked_fill(mask == 0, -100)).loss
    loss.backward()
    assert torch.equal(found["loss"], loss.detach())
    torch.testing.assert_close(found["gradient"], theirs.embedding.weight.grad, atol=SAME_ROW_FLOAT32, rtol=0)


# The folder


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_command(tmp_path, run, dtype, capsys):
    cli.main(["export", "--checkpoint", str(run), "--out", str(tmp_path / "out"), "--dtype", dtype])
    assert "written" in capsys.readouterr().out
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_thoughtbubbles.ThoughtbubblesForCausalLM"
    assert (config["n_ids"], config["dtype"]) == (257, "float32" if dtype == "auto" else "bfloat16")
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 256,
        "use_cache": True,
    }
    wanted = None if dtype == "auto" else torch.bfloat16
    native = Thoughtbubbles.load(run, dtype=wanted).eval()
    ids = random_ids(native.config, 2, 9)
    with torch.no_grad():
        expected = native(ids, want=("logits",)).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out).eval()(ids).logits, expected)  # our class, at hand
        assert torch.equal(Thoughtbubbles.load(out).eval()(ids, want=("logits",)).logits, expected)


def test_nothing_is_lost(tmp_path, run):
    out = tmp_path / "out"
    export(run, out=out)
    export(run, out=out)  # its own work may be replaced
    (out / "README.md").write_text("licensed with care")
    with pytest.raises(ValueError, match=r"not just what an earlier export wrote \(README.md has"):
        export(run, out=out)
    assert (out / "README.md").read_text() == "licensed with care"

    export(run, out=tmp_path / "second")
    (tmp_path / "second" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt is not from there"):
        export(run, out=tmp_path / "second")
    write_manifest(run / "step-00000080")  # as training does
    for taken in (run, run / "step-00000080", run / "step-00000080" / "model"):
        with pytest.raises(ValueError, match="is not empty"):
            export(run, out=taken)
    with pytest.raises(ValueError, match="is a file"):
        export(run, out=run / "run.json")
    with pytest.raises(ValueError, match="does not exist"):
        export(tmp_path / "nowhere", out=tmp_path / "third")
    assert not (tmp_path / "third").exists()
    (tmp_path / "empty").mkdir()
    export(run, out=tmp_path / "empty")


# The card


def front_matter(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL).group(1))


def test_the_card_tells_the_runs_own_numbers(tmp_path, run):
    text = (export(run, out=tmp_path / "my-model") / "README.md").read_text()
    front = front_matter(text)
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert "license" not in front  # the user's to choose
    assert "# my-model" in text
    for line in (
        "| steps | 80 |",
        "| tokens | 8,000 |",
        "| training loss of the last step (nats) | 3.3000 |",
        "| held-out loss (nats), books | 3.0300 |",
        "| held-out loss (nats), web | 3.1300 |",
        "| recipe | first\\|try |",
        "| data | books, web |",
        "| blimp (causal selection, budget 2): accuracy | 0.8000 ± 0.0125 |",
        "| piqa (causal selection, budget 2): nats | 1.5000 |",
        "| piqa (causal selection, budget 2): accuracy | 0.8000 ± 0.0125 |",
        "| blimp (causal selection, budget 2): sets agreement | 0.4000 |",
        f"| parameters | {sum(p.numel() for p in Thoughtbubbles.load(run).parameters()):,} |",
    ):
        assert line in text, line
    assert text.count("accuracy") == 2
    for absent in ("4.4", "4.04", "1.25", "0.15", "None"):
        assert absent not in text
    earlier = (export(run / "step-00000040", out=tmp_path / "earlier") / "README.md").read_text()
    assert "| steps | 40 |" in earlier
    assert "accuracy | 0.4000 ± 0.0125 |" in earlier
    assert "books | 4.0400 |" in earlier
    assert not any(later in earlier for later in ("3.3", "3.03", "0.8"))


def test_a_card_without_a_run_invents_nothing(tmp_path):
    model_in(tmp_path / "model", "block")
    text = (export(tmp_path / "model", out=tmp_path / "out", dtype=torch.bfloat16) / "README.md").read_text()
    assert "## Training" not in text
    assert "## Evaluation" not in text
    assert "no cache is exact" in text
    (tmp_path / "metrics.jsonl").write_text("no json")
    for kind, words in (("plain", "without forks"), ("copy-3", "copy-3 baseline")):
        assert words in card("x", config_of(kind), parameters=1, dtype="float32", folder=tmp_path)


def test_numbers_of_a_converted_model_are_those_before(tmp_path, run):
    text = (export(run, out=tmp_path / "out", dtype=torch.bfloat16) / "README.md").read_text()
    assert "The numbers below are those of the float32 weights, before they were converted to bfloat16." in text
    text = (export(run, out=tmp_path / "same", dtype=torch.float32) / "README.md").read_text()
    assert "converted" not in text
