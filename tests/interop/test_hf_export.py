"""`thoughtbubbles export`: a folder that loads without this package, and deletes nothing."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

import thoughtbubbles
from helpers import SAME_ROW_FLOAT32, random_ids
from interop.finished_run import model_in
from thoughtbubbles import cli
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.files import write_manifest
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.interop.export import export
from thoughtbubbles.interop.hf import ThoughtbubblesForCausalLM
from thoughtbubbles.interop.remote_code import remote_code

pytestmark = pytest.mark.slow

PROBE = Path(__file__).with_name("hf_remote_probe.py")
KINDS = ("plain", "copy-3", "gated", "causal", "causal-residual", "near", "block", "block-residual")


# ---- the exported code ----------------------------------------------------------------------------------------------


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
    assert found["tokenizer"] == (tokenizer("bytes").encode("fork"), 16)
    assert "custom code" in found["asked"]
    for kind, folder in zip(KINDS, folders, strict=True):
        check_like_ours(cores[kind], tmp_path / kind / "native", found[folder])


def check_like_ours(core, native, found):
    assert found["names"] == list(core.state_dict())
    assert found["config"] == "ThoughtbubblesConfig"
    assert ("budget = 0.5 is below 1" if core.config.scores else "budget = 1.5: without scores") in found["refused"]
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


# ---- the folder -----------------------------------------------------------------------------------------------------


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
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"not just an earlier export \(it has no manifest.json\)"):
        export(run, out=out)

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
