"""The model folder: what is saved is loaded, any damage is reported, and nothing is unpickled."""

import ast
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import thoughtbubbles
from helpers import lively_model, random_ids, small_config
from thoughtbubbles.checkpoint import load_tokenizer, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.files import write_manifest

SOURCE = Path(__file__).parents[1] / "src" / "thoughtbubbles"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fork_layers": (), "merge": "original"},
        {"score_bias": 1.5, "budget": 1.5},
        {"head_gate": True, "block": "modern"},
        {"fork_layers": (1,), "fork_reach": 0, "merge": "forks", "feedback": True},
    ],
)
def test_a_model_comes_back_as_it_was(tmp_path, changes):
    model = lively_model(small_config(**changes), dtype=torch.float32)
    save_model(tmp_path / "model", model)
    opened = thoughtbubbles.load(tmp_path / "model")
    assert opened.config == model.config
    ids = random_ids(model.config, 2, 9)
    assert torch.equal(model(ids, want=("logits",)).logits, opened(ids, want=("logits",)).logits)
    assert all(parameter.requires_grad for parameter in opened.parameters())


def test_what_the_folder_says(tmp_path):
    model = lively_model(small_config(vocab_size=300), dtype=torch.float32)
    save_model(tmp_path / "model", model, tokenizer=tokenizer("bytes"), dtype=torch.bfloat16)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "thoughtbubbles"
    assert config["architectures"] == ["ThoughtbubblesForCausalLM"]
    assert config["fork_layers"] == [1, 2, 3]
    assert (config["dtype"], config["eos_token_id"], config["tie_word_embeddings"]) == ("bfloat16", 256, True)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert [name for name, weight in weights.items() if 300 in weight.shape] == ["embedding.weight"]  # tied: once
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    assert thoughtbubbles.load(tmp_path / "model").embedding.weight.dtype == torch.bfloat16
    assert thoughtbubbles.load(tmp_path / "model", dtype=torch.float64).embedding.weight.dtype == torch.float64
    assert load_tokenizer(tmp_path / "model").name == "bytes"


def test_a_config_from_before_a_field_takes_its_default(tmp_path):
    model = lively_model(small_config(), dtype=torch.float32)
    save_model(tmp_path / "model", model)
    path = tmp_path / "model" / "config.json"
    described = json.loads(path.read_text())
    assert described.pop("head_gate") is False
    assert described.pop("fork_reach") is None
    path.write_text(json.dumps(described))
    opened, ids = thoughtbubbles.load(tmp_path / "model"), random_ids(model.config, 2, 9)
    assert opened.config == model.config
    assert torch.equal(model(ids, want=("logits",)).logits, opened(ids, want=("logits",)).logits)


def test_a_folder_is_replaced_whole(tmp_path):
    for seed in (0, 1):
        save_model(tmp_path / "model", lively_model(small_config(), seed=seed, dtype=torch.float32))
    expected = lively_model(small_config(), seed=1, dtype=torch.float32).embedding.weight
    assert torch.equal(thoughtbubbles.load(tmp_path / "model").embedding.weight, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def other_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt2"}')


def other_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["final_norm.bias"] = torch.zeros(5)
    del weights["final_norm.weight"]
    weights["extra"] = torch.zeros(1)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, r"model\.safetensors cannot be read .* damaged"),
        (no_json, r"config\.json: not JSON"),
        (other_type, "describes a model of type 'gpt2'"),
        (
            other_shape,
            r"extra is not part of this model; final_norm.bias has shape \(5,\), not \(12,\); final_norm.weight",
        ),
    ],
)
def test_damage_is_named(tmp_path, harm, message):
    save_model(tmp_path / "model", lively_model(small_config(), dtype=torch.float32))
    harm(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        thoughtbubbles.load(tmp_path / "model")


def test_a_place_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist: give a model folder"):
        thoughtbubbles.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config.json with model.safetensors"):
        thoughtbubbles.load(tmp_path)


def test_a_loaded_model_is_ready_for_evaluation(tmp_path):
    save_model(tmp_path / "model", lively_model(small_config(), dtype=torch.float32).train())
    assert not any(module.training for module in thoughtbubbles.load(tmp_path / "model").modules())


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 1_000_000}, "n_layer = 1000000: give a whole number from 1 to 10,000"),
        ({"n_layer": 9_999}, "it has 4 blocks, not 9999"),  # within bounds, but minutes to build
        ({"n_layer": True}, "n_layer = True"),
        ({"vocab_size": 10**30}, "vocab_size = .*: give a whole number from 1 to 16,777,216"),
        ({"block_size": 10**12}, "block_size = 1000000000000"),
        ({"width": "12"}, "width = '12'"),
        ({"gate_v": 1}, "gate_v = 1: give True or False"),
        ({"head_gate": True}, r"blocks\.0\.attention\.gate\.bias is missing"),
        ({"budget": True}, "budget = True"),
        ({"fork_reach": -1}, "fork_reach = -1: give a whole number of tokens from 0 to 16,777,216, or None"),
        ({"fork_reach": 1.5}, "fork_reach = 1.5"),
        ({"fork_reach": True}, "fork_reach = True"),
        ({"block": "llama"}, r"block = 'llama': choose one of \('gpt2', 'modern'\)"),
        ({"score_noise": -1}, "score_noise = -1: give a number from 0"),
        ({"score_noise": float("nan")}, "score_noise = nan"),
        ({"feedback": True, "fork_reach": 0}, "feedback = True: give one fork layer, not 3"),
        (
            {"feedback": True, "fork_layers": [1]},
            "feedback = True: forks see forks of fork_reach tokens before: set it, 0 or more",
        ),
        (
            {"feedback": True, "fork_layers": [1], "fork_reach": 0, "merge": "original"},
            "merge='original' does not read",
        ),
        ({"second_pass": 3}, "second_pass = 3: this version does not have it"),
        ({"feedback": 1}, "feedback = 1: give True or False"),
        ({"feedback": True, "fork_layers": []}, "feedback = True: give one fork layer, not 0"),
        ({"fork_layers": [True]}, "fork_layers"),
        ({"fork_layers": 3}, "fork_layers = 3"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_a_config_that_cannot_be_is_refused_at_once(tmp_path, changes, message):
    save_model(tmp_path / "model", lively_model(small_config(), dtype=torch.float32))
    change_config(tmp_path / "model", **changes)
    began = time.monotonic()
    with pytest.raises(ValueError, match=message) as refused:
        thoughtbubbles.load(tmp_path / "model")
    assert time.monotonic() - began < 2
    assert str(tmp_path / "model") in str(refused.value)


def test_json_nested_too_deeply_is_refused(tmp_path):
    save_model(tmp_path / "model", lively_model(small_config(), dtype=torch.float32))
    (tmp_path / "model" / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json: the JSON is nested too deeply"):
        thoughtbubbles.load(tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_weights_that_are_not_floating_point_are_refused(tmp_path, dtype, all_of_them):
    save_model(tmp_path / "model", lively_model(small_config(), dtype=torch.float32))
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    wrong = weights if all_of_them else {"blocks.1.mlp.up.weight"}
    save_file({name: w.to(dtype) if name in wrong else w for name, w in weights.items()}, path)
    with pytest.raises(ValueError, match=rf"model\.safetensors.*has the unsupported dtype {dtype}"):
        thoughtbubbles.load(tmp_path / "model")


def split_in_two(folder: Path, name_of_the_second: object) -> None:
    """As Hugging Face writes large models: an index, and files that it lists."""
    whole = folder / "model.safetensors"
    weights = load_file(whole)
    whole.unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in parts.items():
        save_file({name: weights[name] for name in mine}, folder / file, {"format": "pt"})
    places = {name: file for file, mine in parts.items() for name in mine}
    if name_of_the_second is not None:
        places = {name: name_of_the_second if "00002-of" in file else file for name, file in places.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    "name",
    [
        "../outside/model-00002-of-00002.safetensors",
        "/model-00002-of-00002.safetensors",
        "./model-00002-of-00002.safetensors",
        "sub/model-00002-of-00002.safetensors",
        "..",
        "",
        "tokenizer.json",
        7,
        None,
    ],
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path, name):
    """Even if a file of that name exists in the folder: a path in a name points elsewhere."""
    model = lively_model(small_config(), dtype=torch.float32)
    save_model(tmp_path / "model", model)
    split_in_two(tmp_path / "model", name)
    if name is None:  # as it should be
        assert torch.equal(thoughtbubbles.load(tmp_path / "model").embedding.weight, model.embedding.weight)
        return
    with pytest.raises(ValueError, match=r"index\.json lists .*, which is not a file of this folder"):
        thoughtbubbles.load(tmp_path / "model")


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with two checkpoints and their manifests, as written by training."""
    write_synthetic(tmp_path / "corpus", n_tokens=1000, seed=0)
    model = lively_model(small_config(vocab_size=257), dtype=torch.float32)
    for step in ("step-00000002", "step-00000010"):
        save_model(tmp_path / "run" / step / "model", model, tokenizer=tokenizer("bytes"))
        (tmp_path / "run" / step / "state.json").write_text("{}")
        write_manifest(tmp_path / "run" / step)
    return tmp_path / "run"


def command(*words: object) -> Callable[[Path, Path], Any]:
    def call(run: Path, folder: Path) -> None:
        places = {"RUN": run, "OUT": folder / "out", "DATA": folder / "corpus"}
        try:
            main([str(places.get(str(word), word)) for word in words])
        except SystemExit as stopped:
            raise ValueError(stopped.code) from None

    return call


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda run, _: thoughtbubbles.load(run),
    "the checkpoint": lambda run, _: thoughtbubbles.load(run / "step-00000010"),
    "its model": lambda run, _: thoughtbubbles.load(run / "step-00000010" / "model"),
    "generate": command("generate", "x", "--checkpoint", "RUN", "--max-new", 1, "--device", "cpu"),
    "eval": command("eval", "--checkpoint", "RUN", "--data", "DATA", "--windows", 1, "--device", "cpu", "--out", "OUT"),
    "inspect": command("inspect", "RUN"),
    "export": command("export", "--checkpoint", "RUN", "--out", "OUT"),
}


@pytest.mark.parametrize("reader", READERS)
def test_one_flipped_bit_in_the_newest_weights_is_refused(run, tmp_path, reader):
    READERS[reader](run, tmp_path)  # as it was written, it opens
    flip_a_bit(run / "step-00000010" / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=r"step-00000010 is damaged \(model/model\.safetensors has been altered"):
        READERS[reader](run, tmp_path)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("inside", "given"), [("", "."), ("", "model"), ("model", "."), ("model", "../model")])
def test_paths_without_the_name_of_the_checkpoint(run, monkeypatch, inside, given):
    monkeypatch.chdir(run / "step-00000010" / inside)
    thoughtbubbles.load(given)
    flip_a_bit(run / "step-00000010" / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=r"step-00000010 is damaged"):
        thoughtbubbles.load(given)


def test_a_copy_under_another_name(run, tmp_path):
    best = shutil.copytree(run / "step-00000010", tmp_path / "best")
    thoughtbubbles.load(best)
    flip_a_bit(best / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=r"best is damaged"):
        thoughtbubbles.load(best)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_older_checkpoint_does_not_replace_the_newest(run, name):
    (run / "step-00000010" / "model" / name).unlink()
    with pytest.raises(ValueError, match=r"step-00000010, the newest checkpoint of the run, has no complete model"):
        thoughtbubbles.load(run)
    thoughtbubbles.load(run / "step-00000002")


def drop_from_manifest(step: Path, name: str) -> None:
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest[name]
    (step / "manifest.json").write_text(json.dumps(manifest))


def name_outside(step: Path) -> None:
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["../step-00000002/state.json"] = manifest["state.json"]
    (step / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda step: drop_from_manifest(step, "model/model.safetensors"), "does not list model/model.safetensors"),
        (lambda step: drop_from_manifest(step, "model/tokenizer.json"), "does not list model/tokenizer.json"),
        (lambda step: (step / "manifest.json").write_text("{}"), "does not list model/config.json"),
        (lambda step: (step / "manifest.json").write_text("[]"), "a JSON list instead of an object"),
        (lambda step: (step / "model" / "tokenizer.json").unlink(), "model/tokenizer.json is missing"),
        (name_outside, "'../step-00000002/state.json', which is not inside the folder"),
    ],
)
def test_an_incomplete_manifest_is_damage(run, harm, message):
    harm(run / "step-00000010")
    with pytest.raises(ValueError, match=message) as refused:
        thoughtbubbles.load(run)
    assert "step-00000010" in str(refused.value)


def test_other_files_next_to_the_weights_are_not_damage(run):
    (run / "step-00000010" / "model" / "README.md").write_text("mine")
    (run / "step-00000010" / "results").mkdir()
    (run / "step-00000010" / "state.json").write_text("changed: resume refuses it, the model is whole")
    thoughtbubbles.load(run)


def test_nothing_is_ever_unpickled():
    """Our code calls no function that does; distributed checkpoint is used only with its safetensors reader."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "joblib", "dill", "FileSystemReader"} & set(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path


def test_reading_a_checkpoint_unpickles_nothing(tmp_path, monkeypatch):
    """Not in torch's reader either: with unpickling forbidden, a run still resumes."""
    import pickle

    from thoughtbubbles.train.loop import train
    from train.runs import small_run

    train(small_run(tmp_path / "run", steps=3))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert train(small_run(tmp_path / "run", steps=3), resume=True).step == 3
