"""The wrapper is the core: the same weights, logits and loss, however rows are padded; and errors say what to do."""

import copy
import json
from dataclasses import fields

import pytest
import torch
from hf_models import KINDS, config_of, pair, slow_but
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

import thoughtbubbles
from helpers import SAME_ROW, SAME_ROW_FLOAT32, lively_model, random_ids
from thoughtbubbles import Thoughtbubbles
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.requests import exact_method
from thoughtbubbles.interop.hf import ThoughtbubblesCache, ThoughtbubblesConfig, ThoughtbubblesForCausalLM
from thoughtbubbles.model.config import ModelConfig


def logits(core, ids, **options):
    with torch.no_grad():
        return core(ids, want=("logits",), **options).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_native_folder_opens_with_the_same_logits(tmp_path, kind, dtype):
    core = lively_model(config_of(kind), dtype=torch.float32).eval()
    save_model(tmp_path / "native", core)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "native", dtype=dtype).eval()
    assert type(model) is ThoughtbubblesForCausalLM
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert list(model.state_dict()) == list(core.state_dict())
    ids = random_ids(core.config, 3, 13)
    native = thoughtbubbles.load(tmp_path / "native", dtype=dtype).eval()
    with torch.no_grad():
        found = model(ids).logits
    assert found.dtype == torch.float32
    assert torch.equal(found, logits(native, ids))


@pytest.mark.parametrize("shard", ["5GB", "5KB"])
@pytest.mark.parametrize("kind", ["copy-3", "causal", "block-residual"])
def test_what_save_pretrained_writes_opens_natively(tmp_path, kind, shard):
    model, core = pair(tmp_path / "native", kind)
    model.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    n_files = len(list((tmp_path / "saved").glob("*.safetensors")))
    assert (n_files > 1) == (shard == "5KB")
    ids = random_ids(core.config, 2, 9)
    native = thoughtbubbles.load(tmp_path / "saved")
    assert native.config == core.config
    assert torch.equal(logits(native, ids), logits(core, ids))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids).logits, logits(core, ids))


def test_a_missing_shard_is_named(tmp_path):
    model, _ = pair(tmp_path / "native", "causal")
    model.save_pretrained(tmp_path / "saved", max_shard_size="5KB")
    lost = sorted((tmp_path / "saved").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=lost.name):
        thoughtbubbles.load(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json has no weight_map"):
        thoughtbubbles.load(tmp_path / "saved")


def test_a_fresh_model_is_drawn_as_the_core_draws(tmp_path):
    config = ModelConfig.named("nano")
    torch.manual_seed(7)
    core = Thoughtbubbles(config)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(ThoughtbubblesConfig.of(config))
    for name, weight in core.named_parameters():
        assert torch.equal(model.get_parameter(name), weight)


def test_fork_layers_that_the_file_lacks_are_drawn(tmp_path):
    _, core = pair(tmp_path / "plain", "plain")
    model = ThoughtbubblesForCausalLM.from_pretrained(tmp_path / "plain", fork_layers=(1, 3), merge="mixture")
    assert torch.equal(model.embedding.weight, core.embedding.weight)
    assert torch.equal(model.forks["3"].norm.weight, torch.ones(12))
    assert 0.1 < model.forks["1"].embedding.std() < 0.6  # N(0, 1) / √12
    assert torch.isfinite(model(random_ids(core.config, 1, 9)).logits).all()


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


def padded(rows, side, width):
    """Ids 0 as padding, which are ids of the vocabulary too."""
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        start = {"left": width - len(row), "right": 0, "both": (width - len(row)) // 2}[side]
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = row, 1
    return ids, mask


@pytest.mark.parametrize("side", slow_but(["left", "right"], ["left", "right", "both"]))
@pytest.mark.parametrize("kind", slow_but(["plain", "causal", "block-residual"], KINDS))
def test_a_padded_row_is_the_row_alone(tmp_path, kind, side):
    model, core = pair(tmp_path / "model", kind, dtype=torch.float64)
    rows = [random_ids(core.config, 1, n, seed=n)[0] for n in (13, 5, 1, 8)]
    ids, mask = padded(rows, side, 20)  # longer than block_size, which counts tokens
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, labels=labels)
    total = 0.0
    for i, row in enumerate(rows):
        targets = torch.cat([row[1:], row.new_tensor([-100])])[None]
        with torch.no_grad():
            alone = core(row[None], targets=targets, want=("logits", "token_nll"))
        torch.testing.assert_close(out.logits[i][mask[i] == 1], alone.logits[0], atol=SAME_ROW, rtol=0)
        assert not out.logits[i][mask[i] == 0].any()
        total += float(alone.token_nll.sum())
    assert float(out.loss) == pytest.approx(total / sum(len(row) - 1 for row in rows), abs=SAME_ROW)


def test_without_a_mask_everything_is_a_token(tmp_path):
    model, core = pair(tmp_path / "model", "causal")
    ids, _ = padded([random_ids(core.config, 1, 5)[0]], "right", 12)
    assert torch.equal(model(ids).logits, logits(core, ids))


@pytest.mark.parametrize("kind", ["causal", "block-residual", "plain"])
def test_the_loss_is_the_cores(tmp_path, kind):
    model, core = pair(tmp_path / "model", kind)
    ids = random_ids(core.config, 4, 11)
    labels = ids.masked_fill(random_ids(core.config, 4, 11, seed=5) < 6, -100)
    targets = torch.cat([labels[:, 1:], torch.full((4, 1), -100)], dim=1)
    expected = core(ids, targets=targets).loss
    assert model(ids, labels=labels).logits.shape == (4, 11, 23)  # in evaluation both are there
    model.train()
    out = model(ids, labels=labels)
    assert out.logits is None
    assert torch.equal(out.loss, expected)
    n = int((targets != -100).sum())
    for given in (n * 3, torch.tensor(n * 3)):
        torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=given).loss, expected / 3)
    expected.backward()
    out.loss.backward()
    for name, weight in core.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, weight.grad)


def test_accumulated_micro_batches_equal_the_full_batch(tmp_path):
    model, core = pair(tmp_path / "model", "causal", dtype=torch.float64)
    rows = [random_ids(core.config, 1, n, seed=n)[0] for n in (13, 3, 7, 5)]
    ids, mask = padded(rows, "right", 14)
    labels = ids.masked_fill(mask == 0, -100)
    n = int((labels[:, 1:] != -100).sum())
    whole = model(ids, attention_mask=mask, labels=labels).loss
    pieces = [
        model(ids[i : i + 1], attention_mask=mask[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=n).loss
        for i in range(4)
    ]
    torch.testing.assert_close(sum(pieces), whole, atol=SAME_ROW, rtol=0)


def test_logits_to_keep(tmp_path):
    model, core = pair(tmp_path / "model", "causal")
    ids = random_ids(core.config, 2, 9)
    with torch.no_grad():
        every = model(ids).logits
        torch.testing.assert_close(model(ids, logits_to_keep=1).logits, every[:, -1:], atol=SAME_ROW_FLOAT32, rtol=0)
        assert torch.equal(model(ids, logits_to_keep=3).logits, every[:, -3:])
        assert torch.equal(model(ids, logits_to_keep=2**63).logits, every)  # more than there are
        assert torch.equal(model(ids, logits_to_keep=torch.tensor([-1, 0])).logits, every[:, [-1, 0]])
        assert torch.equal(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, every[:, [0, 4]])
        as_tuple = model(ids, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], every)


def test_a_budget_for_one_call(tmp_path):
    model, core = pair(tmp_path / "model", "causal", budget=4)
    ids = random_ids(core.config, 2, 14)
    with torch.no_grad():
        assert torch.equal(model(ids, budget=1.5).logits, logits(core, ids, budget=1.5))
        assert torch.equal(model(ids, budget=[1, "4/3"]).logits, logits(core, ids, budget=[1, "4/3"]))
        assert not torch.equal(model(ids, budget=1).logits, model(ids).logits)
    wider = ThoughtbubblesForCausalLM.from_pretrained(tmp_path / "model", budget=2).eval()
    assert torch.equal(wider(ids).logits, logits(core, ids, budget=2))


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


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_that_nothing_predicts(tmp_path, side):
    """The Trainer divides by all labels but the first column's; a row that starts later has one more."""
    model, core = pair(tmp_path / "model", "causal")
    ids, mask = padded([random_ids(core.config, 1, n, seed=n)[0] for n in (7, 4)], side, 7)
    labels = ids.masked_fill(mask == 0, -100)
    counted = int((labels[:, 1:] != -100).sum())
    inputs = {"input_ids": ids, "attention_mask": mask}
    mean = model(**inputs, labels=labels).loss
    model.train()
    torch.testing.assert_close(model(**inputs, labels=labels).loss, mean)
    if side == "right":
        torch.testing.assert_close(model(**inputs, labels=labels, num_items_in_batch=counted).loss, mean)
        return
    with pytest.raises(ValueError, match=r"in row 1, column 3, right after padding.*pad on the right for training"):
        model(**inputs, labels=labels, num_items_in_batch=counted)
    labels[1, 3] = -100  # the remedy, if the side is to stay
    torch.testing.assert_close(model(**inputs, labels=labels, num_items_in_batch=counted - 1).loss, mean)
    model.eval()
    assert model(**inputs, labels=ids.masked_fill(mask == 0, -100), num_items_in_batch=counted).loss < mean


def test_unknown_weights_do_not_pass_silently(tmp_path):
    pair(tmp_path / "model", "causal")
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|shape|mismatch"):
        ThoughtbubblesForCausalLM.from_pretrained(tmp_path / "model", width=24)


@pytest.mark.parametrize("kind", ["causal", "plain"])
def test_gradient_checkpointing_changes_memory_only(tmp_path, kind):
    model, core = pair(tmp_path / "model", kind, dtype=torch.float64)
    ids = random_ids(core.config, 2, 11)
    model.train()
    gradients, saved = [], []
    for enable in (False, True, False):
        if enable:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        assert model.is_gradient_checkpointing == enable
        model.zero_grad()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            loss = model(ids, labels=ids).loss
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        saved.append(sum(kept))
    assert saved[1] < saved[0] / 2
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient)
        assert torch.equal(gradients[2][name], gradient)
    with pytest.raises(ValueError, match="every_n_layers"):
        model.gradient_checkpointing_enable(every_n_layers=2)


CHECKPOINTING = [
    {"use_reentrant": False},
    {"use_reentrant": None, "preserve_rng_state": True},
    {"determinism_check": "none", "debug": False, "early_stop": False},
]


@pytest.mark.parametrize("kind", ["causal", "plain"])
def test_every_accepted_form_of_gradient_checkpointing_has_all_gradients(tmp_path, kind):
    model, core = pair(tmp_path / "model", kind, dtype=torch.float64)
    ids = random_ids(core.config, 2, 9)
    model.train()
    model(ids, labels=ids).loss.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    for options in CHECKPOINTING:
        model.zero_grad()
        model.gradient_checkpointing_enable(options)
        model(ids, labels=ids).loss.backward()
        for name, weight in model.named_parameters():
            assert torch.equal(weight.grad, expected[name]), (options, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_reentrant": True}, "use_reentrant = True: that form loses the gradients"),
        ({"use_reentrant": "no"}, "use_reentrant = 'no'"),
        ({"every_n_layers": 2}, "has every_n_layers: what can be set is use_reentrant, preserve_rng_state"),
        ({"preserve_rng_state": 1}, "preserve_rng_state = 1"),
        ({"determinism_check": ["default"]}, "determinism_check = "),
        ({"context_fn": 3}, "context_fn = 3"),
    ],
    ids=str,
)
def test_forms_of_gradient_checkpointing_that_are_refused(options, message):
    model = ThoughtbubblesForCausalLM(ThoughtbubblesConfig.of(ModelConfig.named("nano")))
    with pytest.raises(ValueError, match=message):
        model.gradient_checkpointing_enable(options)
    assert not model.is_gradient_checkpointing


def test_copies_and_replaced_children_stay_consistent(tmp_path):
    model, core = pair(tmp_path / "model", "causal")
    ids = random_ids(core.config, 2, 9)
    expected = logits(core, ids)
    with torch.no_grad():
        other = copy.deepcopy(model)
        other.embedding.weight.zero_()
        assert torch.equal(model(ids).logits, expected)
        assert not torch.equal(other(ids).logits, expected)
        replica = model._replicate_for_data_parallel()  # as for a second GPU: its own children follow
        assert replica.core is not model.core
        replica._modules["final_norm"] = torch.nn.Identity()
        assert not torch.equal(replica(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)
        model.final_norm = torch.nn.Identity()
        assert not torch.equal(model(ids).logits, expected)


class Adapted(torch.nn.Module):
    """Like LoRA: the layer itself, and trainable weights next to it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.more = layer, torch.nn.Linear(layer.in_features, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.more(x)


@pytest.mark.parametrize("place", ["attention.qkv", "attention.out", "mlp.up", "mlp.down"])
def test_wrapped_layers(tmp_path, place):
    model, core = pair(tmp_path / "model", "causal")
    model.requires_grad_(False)
    part, name = place.split(".")
    adapted = Adapted(core.blocks[1].get_submodule(place))
    setattr(model.blocks[1].get_submodule(part), name, adapted)
    ids = random_ids(core.config, 2, 9)
    model(ids, labels=ids).loss.backward()
    assert adapted.more.weight.grad.any()
    with torch.no_grad():
        every = model(ids).logits
        assert not torch.equal(every, logits(core, ids))
        cache = model(ids[:, :6], use_cache=True).past_key_values
        found = model(ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(found, every[:, 6:], atol=SAME_ROW_FLOAT32, rtol=0)


def test_the_vocabulary_can_grow(tmp_path):
    model, core = pair(tmp_path / "model", "causal")
    assert model.get_input_embeddings() is model.embedding
    model.resize_token_embeddings(30, mean_resizing=False)
    ids = torch.tensor([[1, 29, 3]])
    assert model(ids).logits.shape == (1, 3, 30)
    assert torch.equal(model.embedding.weight[:23], core.embedding.weight)
    model.save_pretrained(tmp_path / "grown")
    assert thoughtbubbles.load(tmp_path / "grown").config.vocab_size == 30


@pytest.mark.parametrize(("added", "size"), [(2, 259), (50, 307), (0, 257)])
def test_new_tokens_may_be_written(tmp_path, added, size):
    """A table that grows, and one that shrinks since its padding goes."""
    core = lively_model(config_of("causal", vocab_size=300, merge="original"), dtype=torch.float32)
    save_model(tmp_path / "model", core, tokenizer=tokenizer("bytes"))
    model, theirs = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    theirs.add_tokens([f"<{i}>" for i in range(added)])
    model.resize_token_embeddings(len(theirs), mean_resizing=False)
    assert (len(theirs), model.config.n_ids) == (size, size)
    with torch.no_grad():  # the last token is the most likely, whatever comes before
        model.final_norm.weight.zero_()
        model.final_norm.bias.normal_()
        model.embedding.weight[-1] = model.final_norm.bias * 10
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert again.generate(torch.tensor([[65]]), max_new_tokens=1, do_sample=False)[0, 1] == size - 1
    again.resize_token_embeddings(len(theirs) + 1, pad_to_multiple_of=64, mean_resizing=False)
    assert (again.config.n_ids, again.config.vocab_size % 64) == (size + 1, 0)
    again.resize_token_embeddings(pad_to_multiple_of=128, mean_resizing=False)
    assert (again.config.n_ids, again.config.vocab_size % 128) == (size + 1, 0)


def test_a_device_map(tmp_path):
    _, core = pair(tmp_path / "model", "causal")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="auto")
    ids = random_ids(core.config, 2, 9).to(model.device)
    torch.testing.assert_close(model(ids).logits.cpu(), logits(core, ids.cpu()), atol=SAME_ROW_FLOAT32, rtol=0)


def test_the_tokenizer_next_to_it(tmp_path):
    core = lively_model(config_of("causal", vocab_size=300), dtype=torch.float32)
    save_model(tmp_path / "model", core, tokenizer=tokenizer("bytes"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "forks <|endoftext|> ü"
    assert theirs(text)["input_ids"] == tokenizer("bytes").encode(text)
    assert theirs.pad_token_id == theirs.eos_token_id == 256
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.n_ids, model.config.eos_token_id, model.config.pad_token_id) == (257, 256, 256)
    assert model(**theirs("ab", return_tensors="pt")).logits.shape == (1, 2, 300)


def test_a_new_cache_is_empty():
    cache = ThoughtbubblesCache()
    assert (cache.get_seq_length(), cache.batch_size, cache.is_initialized) == (0, -1, False)
    cache.batch_repeat_interleave(2)
    cache.crop(-1)
    with pytest.raises(ValueError, match="holds streams"):
        cache.update(None, None, 0)


ON_CPU = {"embedding": "cpu", "forks": "cpu", "final_norm": "cpu"}


@pytest.mark.parametrize("parts", [{**ON_CPU, "blocks": "disk"}, {"": "disk"}], ids=["split", "disk"])
def test_a_model_in_parts(tmp_path, parts):
    pair(tmp_path / "model", "causal")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=parts, offload_folder=str(tmp_path / "offloaded")
    )
    with pytest.raises(ValueError, match="must be on one device; give device_map="):
        model(torch.tensor([[1, 2, 3]]))
