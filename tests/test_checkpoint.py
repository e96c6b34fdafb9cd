"""The model folder: what goes in comes out, any damage is named, and nothing is unpickled."""

import ast
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import lively_model, random_ids, small_config
from thoughtbubbles import Thoughtbubbles
from thoughtbubbles.checkpoint import load_folder_tokenizer, save_model
from thoughtbubbles.data.tokenizer import tokenizer

SOURCE = Path(__file__).parents[1] / "src" / "thoughtbubbles"


@pytest.mark.parametrize("changes", [{}, {"fork_layers": (), "merge": "original"}, {"score_bias": 1.5, "budget": 1.5}])
def test_a_model_comes_back_as_it_was(tmp_path, changes):
    model = lively_model(small_config(**changes), dtype=torch.float32)
    save_model(tmp_path / "model", model)
    opened = Thoughtbubbles.load(tmp_path / "model")
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
    assert Thoughtbubbles.load(tmp_path / "model").embedding.weight.dtype == torch.bfloat16
    assert Thoughtbubbles.load(tmp_path / "model", dtype=torch.float64).embedding.weight.dtype == torch.float64
    assert load_folder_tokenizer(tmp_path / "model").name == "bytes"


def test_a_folder_is_replaced_whole(tmp_path):
    for seed in (0, 1):
        save_model(tmp_path / "model", lively_model(small_config(), seed=seed, dtype=torch.float32))
    expected = lively_model(small_config(), seed=1, dtype=torch.float32).embedding.weight
    assert torch.equal(Thoughtbubbles.load(tmp_path / "model").embedding.weight, expected)
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
        Thoughtbubbles.load(tmp_path / "model")


def test_a_place_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist: give a model folder"):
        Thoughtbubbles.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config.json with model.safetensors"):
        Thoughtbubbles.load(tmp_path)


def test_nothing_is_ever_unpickled():
    """No code of ours calls a function that would; distributed checkpoint is used with its safetensors reader only."""
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
