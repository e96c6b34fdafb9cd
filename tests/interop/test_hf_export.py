"""`thoughtbubbles export`: a folder that loads without this package, has its run's own numbers, and deletes nothing."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from hf_models import config_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

import thoughtbubbles
from helpers import SAME_ROW_FLOAT32, lively_model, random_ids
from thoughtbubbles import Thoughtbubbles, cli
from thoughtbubbles.checkpoint import load, save_model
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.run import run as evaluate
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.files import write_json, write_manifest
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.interop.card import card, evaluation, evaluations
from thoughtbubbles.interop.export import export
from thoughtbubbles.interop.hf import ThoughtbubblesForCausalLM
from thoughtbubbles.interop.remote_code import remote_code

PROBE = Path(__file__).with_name("hf_remote_probe.py")
KINDS = ("plain", "copy-3", "causal", "causal-residual", "block", "block-residual")


def model_in(folder: Path, kind: str = "causal", *, seed: int = 0, **changes) -> Thoughtbubbles:
    core = lively_model(config_of(kind, vocab_size=300, **changes), seed=seed, dtype=torch.float32).eval()
    save_model(folder, core, tokenizer=tokenizer("bytes"))
    return core


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run's folder with two checkpoints, and real evaluations of both."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    described = {
        "config": {"name": "first|try", "data": {"mixture": ["data/books", "web"]}},
        "versions": {"torch": "9"},
    }
    lines = [
        {"step": 40, "tokens": 4000, "loss": 4.4},
        {"step": 40, "validation_loss": {"books": 4.04}},
        {"step": 80, "tokens": 8000, "loss": 3.3},
        {"step": 80, "validation_loss": {"books": 3.03, "web": 3.13}},
    ]
    corpus = folder.parent / "corpus"
    write_synthetic(corpus, n_tokens=4_000, seed=0)
    benchmarks = Path(__file__).parents[2] / "docs" / "examples" / "benchmarks"
    for step in (40, 80):
        place = folder / f"step-{step:08}"
        model_in(place / "model", seed=step, block_size=160)
        asked = {"checkpoint": place, "data_dir": benchmarks, "data": corpus, "windows": 2, "tokens": 10}
        evaluate(Evaluation(**asked, tasks=("perplexity", "lambada", "blimp")), World(torch.device("cpu")))
        limited = Evaluation(**asked, tasks=("arc_easy",), limit=2, budget=("1.5",), out=folder / f"eval-{step}")
        evaluate(limited, World(torch.device("cpu")))
    write_json(folder / "run.json", described)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path, finished) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


# The exported code


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


@pytest.mark.parametrize(
    ("version", "kinds"),
    [
        ("newest", ("causal", "block-residual")),
        pytest.param("newest", KINDS, marks=pytest.mark.slow),
        pytest.param("oldest", KINDS, marks=pytest.mark.slow),
    ],
)
def test_a_fresh_process_without_the_package(tmp_path, version, kinds):
    paths = site_packages()
    if version == "oldest":
        oldest = Path(sys.prefix) / "oldest-hf"
        if not oldest.is_dir():
            pytest.skip("the oldest transformers is not installed here: `make test-all` does it")
        paths = f"{oldest}{os.pathsep}{paths}"
    cores, folders = {}, []
    for kind in kinds:
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
    assert found["tokenizer"] == (tokenizer("bytes").encode("fork"), 16)
    assert "custom code" in found["asked"]
    for kind, folder in zip(kinds, folders, strict=True):
        check_like_ours(cores[kind], tmp_path / kind / "native", found[folder])


def check_like_ours(core, native, found):
    assert found["names"] == list(core.state_dict())
    assert found["config"] == "ThoughtbubblesConfig"
    ids = torch.arange(24).view(2, 12)
    for dtype in (torch.bfloat16, torch.float32):  # as there: on some CPUs torch multiplies otherwise after bfloat16
        with torch.no_grad():
            expected = thoughtbubbles.load(native, dtype=dtype).eval()(ids, want=("logits",)).logits
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
    }
    wanted = None if dtype == "auto" else torch.bfloat16
    native = thoughtbubbles.load(run, dtype=wanted).eval()
    ids = random_ids(native.config, 2, 9)
    with torch.no_grad():
        expected = native(ids, want=("logits",)).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out).eval()(ids).logits, expected)  # our class, at hand
        assert torch.equal(thoughtbubbles.load(out).eval()(ids, want=("logits",)).logits, expected)


def test_nothing_is_lost(tmp_path, run):
    out = tmp_path / "out"
    export(run, out=out)
    export(run, out=out)  # its own work may be replaced
    (out / "README.md").write_text("licensed with care")
    with pytest.raises(ValueError, match=r"not just an earlier export \(README.md has"):
        export(run, out=out)
    assert (out / "README.md").read_text() == "licensed with care"

    export(run, out=tmp_path / "second")
    (tmp_path / "second" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt is not part of it"):
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
    (tmp_path / "empty" / "drafts").mkdir()
    with pytest.raises(ValueError, match="drafts is not part of it"):
        export(run, out=tmp_path / "empty")
    (tmp_path / "empty" / "drafts").rmdir()
    (tmp_path / "empty" / "weights").symlink_to(tmp_path / "second")
    with pytest.raises(ValueError, match="weights is not part of it"):
        export(run, out=tmp_path / "empty")
    (tmp_path / "empty" / "weights").unlink()
    kept = tmp_path / "kept.py"
    (tmp_path / "empty" / "shapes.py").rename(kept)
    (tmp_path / "empty" / "shapes.py").symlink_to(kept)
    with pytest.raises(ValueError, match=r"shapes\.py is not part of it"):
        export(run, out=tmp_path / "empty")


def test_a_link_and_the_current_folder(tmp_path, run, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    export(run, out=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert "# disk" in (tmp_path / "disk" / "README.md").read_text()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(run, out=Path("."))
    assert "# here" in (tmp_path / "here" / "README.md").read_text()


def test_saving_an_export_again_points_to_no_code(tmp_path):
    """Loaded with our class, so there is no code next to the weights to write again."""
    model_in(tmp_path / "native")
    model = AutoModelForCausalLM.from_pretrained(export(tmp_path / "native", out=tmp_path / "out"))
    assert type(model) is ThoughtbubblesForCausalLM
    model.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_flipped_bit_is_refused_however_the_folder_is_opened(tmp_path, name):
    model_in(tmp_path / "native")
    out = export(tmp_path / "native", out=tmp_path / "out")
    (out / "README.md").write_text("with a licence")  # no damage
    AutoModelForCausalLM.from_pretrained(out)
    flip(out / name)
    message = rf"out is damaged \({name} has been altered .*if you changed it yourself, delete manifest\.json"
    for opening in (
        lambda: ThoughtbubblesForCausalLM.from_pretrained(out),
        lambda: ThoughtbubblesForCausalLM.from_pretrained(tmp_path, subfolder="out"),
        lambda: thoughtbubbles.load(out),
        lambda: export(out, out=tmp_path / "again"),
    ):
        with pytest.raises(ValueError, match=message):
            opening()
    assert not (tmp_path / "again").exists()
    if name == "model.safetensors":
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(out)
        (out / "manifest.json").unlink()
        AutoModelForCausalLM.from_pretrained(out)


def test_a_flipped_bit_of_a_checkpoint_is_refused_by_its_model_folder(run):
    write_manifest(run / "step-00000080")
    model = run / "step-00000080" / "model"
    AutoModelForCausalLM.from_pretrained(model)
    flip(model / "model.safetensors")
    with pytest.raises(ValueError, match=r"step-00000080 is damaged"):
        AutoModelForCausalLM.from_pretrained(model)


def test_a_model_that_is_saved_over_an_export_opens(tmp_path):
    model_in(tmp_path / "native")
    out = export(tmp_path / "native", out=tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    model.save_pretrained(out)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(out).embedding.weight, model.embedding.weight)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "an app"}')  # nothing of ours
    model.save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "manifest.json").exists()


def test_the_tokenizer_knows_the_context_length(tmp_path):
    model_in(tmp_path / "native", block_size=24)
    out = export(tmp_path / "native", out=tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(out)  # the package is here: nothing to ask about
    assert theirs.model_max_length == 24
    assert len(theirs("x" * 99, truncation=True)["input_ids"]) == 24


def test_places_that_cannot_be_written(tmp_path):
    model_in(tmp_path / "native")
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out, message in (
        (tmp_path / "file", "is a file: give a folder"),
        (tmp_path / "file" / "below", "file is a file: give a folder"),
        (tmp_path / "loop", "--out .*loop cannot be used"),
        (tmp_path / "loop" / "below", "--out .*loop/below cannot be used"),
        (tmp_path / ("x" * 5000), "--out .*… ?.*cannot be used .File name too long"),
    ):
        arguments = ["export", "--checkpoint", str(tmp_path / "native"), "--out", str(out)]
        with pytest.raises(SystemExit, match=message) as exit:
            cli.main(arguments)
        assert "\n" not in str(exit.value)
        assert len(str(exit.value)) < 900
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "native"]


# The card


def front_matter(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL).group(1))


def results(place: Path) -> dict:
    return json.loads((place / "results.json").read_text())


def percent(score: dict) -> str:
    return f"{100 * score['mean']:.2f} ± {100 * score['standard_error']:.2f}"


def expected_lines(run: Path, step: int) -> list[str]:
    (whole,) = (run / "eval" / f"step-{step:08}").glob("perplexity-*")
    tasks, limited = results(whole)["tasks"], results(run / f"eval-{step}")["tasks"]["arc_easy"]
    lambada, blimp = tasks["lambada"], tasks["blimp"]
    ways = [
        f"| {way['title']} | {way['nats']:.4f} ± {way['standard_error']:.4f} | {way['perplexity']:,.2f} ± "
        f"{way['perplexity_standard_error']:,.2f} | {way['bits_per_byte']:.4f} | 20 | corpus, val | 2 × 10 | causal "
        "| 2 | float32 |"
        for way in tasks["perplexity"]["ways"].values()
    ]
    assert len(ways) >= 2
    words = f"{lambada['perplexity']['mean']:,.2f} ± {lambada['perplexity']['standard_error']:,.2f}"
    return [
        *ways,
        "| benchmark | documents | accuracy | acc | acc_norm | perplexity | chance | limit | selection | budget | "
        "precision |",
        f"| LAMBADA | 4 | {percent(lambada['accuracy'])} |  |  | {words} |  |  | causal | 2 | float32 |",
        f"| BLiMP | 4 | {percent(blimp['accuracy'])} | {percent(blimp['accuracy_sum'])} | "
        f"{percent(blimp['accuracy_character'])} |  | 50.00 |  | causal | 2 | float32 |",
        f"| {limited['title']} | 2 | {percent(limited['accuracy'])} | {percent(limited['accuracy_sum'])} | "
        f"{percent(limited['accuracy_character'])} |  | 25.00 | 2 | causal | 1.5 | float32 |",
    ]


def test_the_card_has_the_runs_own_numbers(tmp_path, run):
    text = (export(run, out=tmp_path / "my-model") / "README.md").read_text()
    front = front_matter(text)
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert "license" not in front  # the user's to choose
    assert "# my-model" in text
    for line in (
        "| steps | 80 |",
        "| tokens | 8,000 |",
        "| training loss of the last step (nats) | 3.3000 |",
        "| validation loss (nats), books | 3.0300 |",
        "| validation loss (nats), web | 3.1300 |",
        "| recipe | first\\|try |",
        "| data | books, web |",
        "Results of `thoughtbubbles eval`.",
        f"| parameters | {sum(p.numel() for p in thoughtbubbles.load(run).parameters()):,} |",
        *expected_lines(run, 80),
    ):
        assert line in text, line
    assert len(re.findall(r"^\|.*float32 \|$", text, re.MULTILINE)) == len(expected_lines(run, 80))  # dtype is one, too
    for absent in ("4.4000", "4.0400", "None", "seconds", "truncated"):
        assert absent not in text
    earlier = (export(run / "step-00000040", out=tmp_path / "earlier") / "README.md").read_text()
    assert "| steps | 40 |" in earlier
    assert "books | 4.0400 |" in earlier
    for line in expected_lines(run, 40):
        assert line in earlier
    assert not any(later in earlier for later in ("3.3000", "3.0300", expected_lines(run, 80)[0]))


def card_of(run: Path) -> str:
    """Of its newest checkpoint."""
    model = load(run)
    (folder,) = run.glob("step-00000080/model")
    return card("x", model.config, parameters=1, dtype="float32", folder=folder, has_tokenizer=True)


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.endswith("| float32 |") and "causal" in line]


def test_each_result_is_in_the_card_once(run, tmp_path):
    """Of the same settings the newest; other budgets, limits and weights are separate."""
    before = lines_of(card_of(run))
    (path,) = (run / "eval" / "step-00000080").glob("*/results.json")
    older, newer = results(path.parent), results(path.parent)
    older["time"], newer["time"] = "2000", "9999"
    older["tasks"]["blimp"]["accuracy"]["mean"], newer["tasks"]["blimp"]["accuracy"]["mean"] = 0.11, 0.99
    for name, each in (("older", older), ("newer", newer)):
        (run / f"eval-{name}").mkdir()
        write_json(run / f"eval-{name}" / "results.json", each)
    text = card_of(run)
    assert len(lines_of(text)) == len(before)
    assert text.count("| BLiMP | 4 | 99.00 ±") == 1
    assert "11.00" not in text
    other = {**newer, "settings": {**newer["settings"], "limit": 3}, "weights": {"model.safetensors": 1}}
    write_json(run / "eval-newer" / "results.json", other)
    assert lines_of(card_of(run)) == before  # those are other weights
    write_json(run / "eval-newer" / "results.json", {**other, "weights": newer["weights"]})
    assert len([line for line in lines_of(card_of(run)) if line.startswith("| BLiMP |")]) == 2


def test_several_budgets_are_separate_lines(run):
    place = run / "step-00000080"
    benchmarks = Path(__file__).parents[2] / "docs" / "examples" / "benchmarks"
    evaluate(
        Evaluation(checkpoint=place, data_dir=benchmarks, tasks=("blimp",), budget=("1", "1.5", "2.0")),
        World(torch.device("cpu")),
    )
    found = [line for line in lines_of(card_of(run)) if line.startswith("| BLiMP |")]
    assert sorted(line.split(" | ")[-2] for line in found) == ["1", "1.5", "2.0"]  # 2 has been evaluated before


DAMAGE = ["", "{", "[1]", "null", "[" * 10**5, "1" * 5000, '{"a": ' * 10**5, '"x"', "\0", '{"step": "x"}']
DAMAGE += ['{"config": [1], "versions": 3}', '{"config": {"data": 7}}', '{"step": 80, "validation_loss": {"a": []}}']


def test_damaged_files_of_a_run_are_as_good_as_none(run):
    (path,) = (run / "eval" / "step-00000080").glob("*/results.json")
    for file in (run / "run.json", run / "metrics.jsonl", path):
        whole = file.read_bytes()
        for content in DAMAGE:
            file.write_text(content)
            assert "## The model" in card_of(run), (file, content[:40])
        file.write_bytes(whole)


def test_damaged_fields_of_results_are_as_good_as_none(run):
    """Every value in turn is something else."""
    (path,) = (run / "eval" / "step-00000080").glob("*/results.json")
    whole = results(path.parent)
    folder, tasks = run / "step-00000080" / "model", whole["tasks"]
    places = [whole, whole["settings"], tasks, *tasks.values(), tasks["blimp"]["accuracy"]]
    places += [tasks["perplexity"]["ways"], tasks["perplexity"]["ways"]["blockwise"]]
    for place in places:
        for name in list(place):
            kept = place[name]
            for wrong in (None, [1], 10**400):
                place[name] = wrong
                path.write_text(json.dumps(whole))
                assert "| ARC-Easy | 2 | " in evaluation(evaluations(folder)), (name, wrong)
            place[name] = kept


def test_half_a_line_of_metrics_is_one_line_less(tmp_path, run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 80, "validation_loss": {"bo')
    text = (export(run, out=tmp_path / "out") / "README.md").read_text()
    assert "| validation loss (nats), books | 3.0300 |" in text
    assert "| tokens | 8,000 |" in text


def test_an_export_of_an_export_keeps_its_numbers(tmp_path, run):
    first = export(run, out=tmp_path / "first", dtype=torch.bfloat16)
    once = (first / "README.md").read_text()
    again = (export(first, out=tmp_path / "again", dtype=torch.float32) / "README.md").read_text()
    tail = once[once.index("The numbers below") :]
    assert "## Training" in tail
    assert "## Evaluation" in tail
    assert again.endswith(tail)
    assert again.count("The numbers below") == 1


def test_an_export_that_was_evaluated_lists_each_result_once(tmp_path, run):
    first = export(run, out=tmp_path / "first")
    once = (first / "README.md").read_text()
    shutil.copytree(run / "eval" / "step-00000080", first / "eval")  # the same numbers, in a table of other columns
    benchmarks = Path(__file__).parents[2] / "docs" / "examples" / "benchmarks"
    evaluate(Evaluation(checkpoint=first, data_dir=benchmarks, tasks=("piqa",)), World(torch.device("cpu")))
    again = (export(first, out=tmp_path / "again") / "README.md").read_text()

    def rows(text: str) -> list[list[str]]:
        return sorted([cell.strip() for cell in line.split("|") if cell.strip()] for line in lines_of(text))

    (new,) = (row for row in rows(again) if row[0] == "PIQA")
    assert rows(again) == sorted([*rows(once), new])
    for paragraph in ("Results of `thoughtbubbles eval`.", "Accuracy in percent ± standard error", "## Evaluation"):
        assert again.count(paragraph) == 1
    tables = again[again.index("## Evaluation") :].split("\n\n")
    assert [table.splitlines()[1][:5] for table in tables if table.startswith("|")] == ["| ---"] * 3  # with headings


def test_a_card_without_a_run_invents_nothing(tmp_path):
    model_in(tmp_path / "model", "block")
    text = (export(tmp_path / "model", out=tmp_path / "out", dtype=torch.bfloat16) / "README.md").read_text()
    assert "## Training" not in text
    assert "## Evaluation" not in text
    assert "no cache is exact" in text
    (tmp_path / "metrics.jsonl").write_text("no json")
    for kind, words in (
        ("plain", "without forks"),
        ("copy-3", "copy-3 baseline"),
        ("causal-residual", "A row keeps at most 1.5 streams per token on average"),
        ("causal-residual", "a single token may have up to 8."),
        ("block-fixed", "A row of any length keeps at most as many streams as a full row with 2 streams per token"),
    ):
        described = card(
            "x", config_of(kind), parameters=1, dtype="float32", folder=tmp_path, has_tokenizer=kind == "plain"
        )
        assert words in " ".join(described.split())
        assert ("AutoTokenizer" in described) == (kind == "plain")
    save_model(tmp_path / "ids", lively_model(config_of("causal"), dtype=torch.float32))
    assert "AutoTokenizer" not in (export(tmp_path / "ids", out=tmp_path / "no-text") / "README.md").read_text()


def test_numbers_of_a_converted_model_are_those_before(tmp_path, run):
    text = (export(run, out=tmp_path / "out", dtype=torch.bfloat16) / "README.md").read_text()
    assert "The numbers below are those of the float32 weights, before they were converted to bfloat16." in text
    text = (export(run, out=tmp_path / "same", dtype=torch.float32) / "README.md").read_text()
    assert "converted" not in text
