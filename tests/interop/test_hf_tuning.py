"""Fine-tuning the wrapper: its loss and gradients, gradient checkpointing, adapters and new tokens."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import thoughtbubbles
from helpers import SAME_ROW, SAME_ROW_FLOAT32, lively_model, random_ids
from interop.hf_models import config_of, logits, padded, pair
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.interop.hf import ThoughtbubblesConfig, ThoughtbubblesForCausalLM
from thoughtbubbles.model.config import ModelConfig


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
    model = ThoughtbubblesForCausalLM(ThoughtbubblesConfig.of(ModelConfig.named("nano-causal")))
    with pytest.raises(ValueError, match=message):
        model.gradient_checkpointing_enable(options)
    assert not model.is_gradient_checkpointing


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
