"""Configs and inputs of the wrapper: they convert both ways, and errors name what is wrong."""

import json
from dataclasses import fields

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from interop.hf_models import KINDS, config_of, pair
from thoughtbubbles.generate.requests import exact_method
from thoughtbubbles.interop.hf import ThoughtbubblesConfig, ThoughtbubblesForCausalLM
from thoughtbubbles.model.config import ModelConfig

# ---- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_configs_convert_both_ways(tmp_path, kind):
    core = config_of(kind)
    config = ThoughtbubblesConfig.of(core, n_ids=20)
    assert config.core() == core
    assert core.is_causal == (exact_method(core) == "cached")
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {field.name for field in fields(ModelConfig)} <= written.keys()
    opened = AutoConfig.from_pretrained(tmp_path)
    assert (opened.core(), opened.n_ids, opened.use_cache) == (core, 20, None)
    assert (opened.hidden_size, opened.num_hidden_layers, opened.max_position_embeddings) == (12, 4, 16)


def test_a_config_is_checked(no_shape_checks):
    assert ThoughtbubblesConfig().core() == ModelConfig.named("150m")
    with pytest.raises(ValueError, match=r"ModelConfig.width = 13: make it a multiple of n_head"):
        ThoughtbubblesConfig(n_layer=2, n_head=2, width=13)
    with pytest.raises(ValueError, match="give at least n_layer, n_head, width"):
        ThoughtbubblesConfig(n_layer=2)
    with pytest.raises(ValueError, match="n_ids = 99: give the tokenizer's size"):
        ThoughtbubblesConfig(n_layer=2, n_head=2, width=8, vocab_size=50, n_ids=99)
    config = ThoughtbubblesConfig(n_layer=2, n_head=2, width=8)
    config.selection = "widest"
    with pytest.raises(ValueError, match=r"ModelConfig.selection = 'widest'"):
        ThoughtbubblesForCausalLM(config)


BASE = {"n_layer": 2, "n_head": 2, "width": 8, "vocab_size": 50}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n_ids", (True, 0, -1, 51, 10**30, 1.5, "20", [20], {})),
        ("use_cache", (1, "yes", [])),
        ("bos_token_id", (True, "1", 1.5, [1], 10**30)),
        ("eos_token_id", (True, "1", {}, ["1"], [None, 2.5])),
        ("pad_token_id", ([1], {}, -(10**30))),
        ("num_labels", (10**30, -1, "2", True)),
        ("quantization_config", (5, "int8", [])),
        ("dtype", (5, [], {}, True)),
        ("core", (1,)),
        ("to_dict", (None,)),
        ("attribute_map", ({},)),
        ("sub_configs", (1,)),
        ("__class__", (5,)),
        ("n_layer", (True, 10**9, "2", 2.0, None, [2])),
        ("hidden_size", ("8", 10**12)),
        ("fork_layers", (5, "1", [[1]], [True], {})),
        ("budget", ("1e99999999", float("nan"), True, [])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_field_is_one_line_that_names_it(no_shape_checks, tmp_path, field, values):
    """Given to the class, and from a file."""
    for value in values:
        name = "width" if field == "hidden_size" else field
        described = {key: known for key, known in BASE.items() if key != name} | {field: value}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "thoughtbubbles", **described}))
        for opening in (lambda d=described: ThoughtbubblesConfig(**d), lambda: AutoConfig.from_pretrained(tmp_path)):
            with pytest.raises(ValueError, match=name) as error:
                opening()
            assert "\n" not in str(error.value)
            assert len(str(error.value)) < 700


@pytest.mark.parametrize(("field", "value"), [("id2label", "x\ny"), ("dtype", "float7"), ("self", 1)])
def test_fields_that_transformers_cannot_read(no_shape_checks, field, value):
    with pytest.raises(ValueError, match="a field that transformers cannot read") as error:
        ThoughtbubblesConfig(**BASE, **{field: value})
    assert "\n" not in str(error.value)


# ---- arguments of the forward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": [[1, 0, 1, 1], [1, 1, 1, 1]]}, "hole in row 0"),
        ({"attention_mask": [[1, 1, 1, 1], [0, 0, 0, 0]]}, "lengths has 0"),
        ({"attention_mask": [[1, 1], [1, 1]]}, r"input_ids have shape \(2, 4\)"),
        ({"attention_mask": [[[[1]]]]}, r"attention_mask of shape \(1, 1, 1, 1\)"),
        ({"labels": [[1, 1], [1, 1]]}, r"shape \(2, 4\)"),
        ({"labels": [1, 1, 1, 1]}, r"labels of shape \(4,\) and torch.int64"),
        ({"labels": [[1, 1, 1, 99], [1, 1, 1, 1]]}, "targets has 99"),
        ({"position_ids": [[0, 1, 2, 3]] * 2}, "positions follow from the attention mask"),
        ({"inputs_embeds": [[0.0]]}, "give input_ids"),
        ({"output_attentions": True}, "use trace="),
        ({"output_hidden_states": True}, "use trace="),
        ({"token_types": [[0]]}, "token_types: this model has no such input"),
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_ids": [[1, 2, 3, 23]] * 2}, "ids has 23"),
        ({"input_ids": [[1] * 17] * 2}, "more than block_size = 16"),
        ({"budget": 0.5}, "budget = 0.5 is below 1"),
        ({"past_key_values": DynamicCache()}, "past_key_values is a DynamicCache"),
        ({"use_cache": True, "labels": [[1, 1, 1, 1]] * 2}, "labels with a cache"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_bad_input(tmp_path, no_shape_checks, given, message):
    model, _ = pair(tmp_path / "model", "causal")
    given = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.tensor([[1, 2, 3, 4]] * 2), **given})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("input_ids", value) for value in ([[1, 2]], torch.zeros(0, 4), torch.tensor([1, 2]), torch.ones(2, 4))),
        *(("attention_mask", value) for value in ([[1, 1, 1, 1]] * 2, True, torch.ones(8), torch.ones(2, 4, 1))),
        *(("labels", value) for value in ([[1, 2, 3, 4]] * 2, "x", torch.ones(2, 4), torch.ones(2, 4).bool())),
        *(("logits_to_keep", value) for value in ("x", 2.5, -1, True, None, [1], torch.tensor(1), torch.tensor([0.0]))),
        *(("logits_to_keep", torch.tensor(value)) for value in ([True, False, True, True], [4], [-5])),
        *((name, value) for name in ("use_cache", "return_dict") for value in ("no", 0, 1, [], torch.tensor(True))),
        *(("past_key_values", value) for value in (3, [], ((torch.ones(1),),), DynamicCache())),
        *(("num_items_in_batch", value) for value in ("x", True, [4], 10**30, -1, float("nan"), torch.ones(2))),
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_wrong_kinds_name_their_argument(tmp_path, name, value):
    model, _ = pair(tmp_path / "model", "causal")
    for others in ({}, {"use_cache": False}, {"use_cache": True}, {"labels": torch.tensor([[1, 2, 3, 4]] * 2)}):
        with pytest.raises(ValueError, match=f"^{name} (=|is|of) ") as error:
            model(**{"input_ids": torch.tensor([[1, 2, 3, 4]] * 2), **others, name: value})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_a_config_that_asks_for_too_much(tmp_path, name):
    model, _ = pair(tmp_path / "model", "causal")
    setattr(model.config, f"_{name}" if name == "output_attentions" else name, True)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=f"{name}: .* use trace="):
        model(ids)
    assert model(ids, **{name: False}).logits.shape == (1, 3, 23)


def test_bad_ways_to_generate(tmp_path):
    model, _ = pair(tmp_path / "model", "causal")
    right = {"input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    with pytest.raises(ValueError, match="pad on the left"):
        model.generate(**right, max_new_tokens=2)
    with pytest.raises(ValueError, match="cache_implementation = 'static'"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="budgets"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, budgets=2)
    with pytest.raises(ValueError, match="budget = 0 is below 1"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, budget=0)
