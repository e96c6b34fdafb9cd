"""`past_key_values` in a custom loop: when a call returns them, what they cost, and what they support."""

import copy

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Trainer, TrainingArguments

from helpers import SAME_ROW, random_ids
from interop.hf_models import CACHED, pair, slow_but
from thoughtbubbles.interop.hf import ThoughtbubblesCache


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("causal") / "model", "causal", dtype=torch.float64)


def read_on(model, ids, mask, first, **options):
    """The loop as it is written for any model: one call for the prompt, one for each later token."""
    out = model(ids[:, :first], attention_mask=None if mask is None else mask[:, :first], **options)
    pieces = [out.logits]
    for i in range(first, ids.shape[1]):
        seen = None if mask is None else mask[:, : i + 1]
        out = model(ids[:, i : i + 1], attention_mask=seen, past_key_values=out.past_key_values)
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("kind", slow_but(["causal", "plain"], CACHED))
def test_the_usual_loop_reads_all_tokens(tmp_path, kind):
    model, core = pair(tmp_path / "model", kind, dtype=torch.float64)
    ids = random_ids(core.config, 3, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [2]])).long()
    for given in (None, mask):
        whole = model(ids, attention_mask=given, use_cache=False).logits
        with torch.set_grad_enabled(given is None):
            assert torch.equal(model(ids, attention_mask=given).logits, whole)
            torch.testing.assert_close(read_on(model, ids, given, 5), whole, atol=SAME_ROW, rtol=0)
    alone = model(ids[:, -1:], use_cache=False).logits
    assert not torch.allclose(alone, whole[:, -1:])  # else the loop would prove nothing


def test_an_evaluation_pays_nothing_for_a_cache_it_does_not_use(causal):
    model, core = causal
    calls = []
    hook = model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    cache = model(random_ids(core.config, 2, 9)).past_key_values
    hook.remove()
    assert (len(calls), cache.state) == (1, None)
    assert (cache.get_seq_length(), cache.batch_size, cache.is_initialized) == (9, 2, True)


class Counting(TorchFunctionMode):
    """How often a function of torch is called."""

    def __init__(self, function):
        super().__init__()
        self.function, self.calls = function, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += function is self.function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("use_cache", [None, False, True])
def test_a_mask_is_taken_apart_once(causal, use_cache):
    """Shown by the one `argmax` that this takes; every one synchronises with a GPU."""
    model, core = causal
    ids, mask = random_ids(core.config, 2, 4), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with Counting(Tensor.argmax) as counted:
        model(ids, attention_mask=mask, use_cache=use_cache)
    assert counted.calls == 1


def test_when_a_call_returns_a_cache(tmp_path, causal):
    model, core = causal
    ids = random_ids(core.config, 2, 9)
    assert model(ids, labels=ids).past_key_values is None
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, return_dict=False)[1].get_seq_length() == 9
    model.config.use_cache = False
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None
    model.config.use_cache = True
    assert model(ids).past_key_values is not None
    model.config.use_cache = None
    model.train()
    assert model(ids).past_key_values is None
    model.eval()
    assert model._replicate_for_data_parallel()(ids).past_key_values is None  # results of replicas are gathered
    block, _ = pair(tmp_path / "block", "block", dtype=torch.float64)
    for said in (None, True):  # a cache would be an approximation: only a call can ask for one
        block.config.use_cache = said
        assert block(ids).past_key_values is None
    assert block(ids, use_cache=True).past_key_values is not None


def test_the_trainer_predicts_logits_alone(tmp_path, causal):
    model, core = causal
    rows = [{"input_ids": row} for row in random_ids(core.config, 3, 9)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False
    )
    trainer = Trainer(model=copy.deepcopy(model), args=arguments)
    trainer.model.config.use_cache = True  # which the Trainer has set to False
    predicted = trainer.predict(rows).predictions
    assert predicted.shape == (3, 9, core.config.vocab_size)


def test_a_cache_grows_with_the_budget_of_its_first_call(tmp_path):
    """Larger than the config's: with that one, the larger storage would have no room for all streams."""
    model, core = pair(tmp_path / "model", "causal", dtype=torch.float64, budget=1.2)
    ids = random_ids(core.config, 2, 16)
    with torch.no_grad():
        for budget, piece in ((8, 2), ([8, 1], 6)):
            whole = model(ids, budget=budget, use_cache=False).logits
            assert not torch.allclose(whole, model(ids, use_cache=False).logits)
            cache = ThoughtbubblesCache(capacity=2)
            pieces = [model(ids[:, :2], past_key_values=cache, budget=budget, logits_to_keep=2).logits]
            for i in range(2, 14, piece):
                pieces.append(model(ids[:, i : i + piece], past_key_values=cache).logits)
            assert cache.state.capacity == 16
            torch.testing.assert_close(torch.cat(pieces, dim=1), whole[:, :14], atol=SAME_ROW, rtol=0)


def test_a_cache_that_is_not_read_yet_can_do_all_that_one_can(causal):
    model, core = causal
    ids = random_ids(core.config, 3, 12)
    budgets = [1, 2, 8]
    with torch.no_grad():
        whole = model(ids, budget=budgets, use_cache=False).logits[:, 8:]

        def held():
            return model(ids[:, :8], budget=budgets).past_key_values

        cache = held()
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        found = model(ids[[2, 0, 0], 8:], past_key_values=cache).logits
        torch.testing.assert_close(found, whole[[2, 0, 0]], atol=SAME_ROW, rtol=0)
        cache = held()
        cache.batch_repeat_interleave(2)
        found = model(ids[:, 8:].repeat_interleave(2, dim=0), past_key_values=cache).logits
        torch.testing.assert_close(found, whole.repeat_interleave(2, dim=0), atol=SAME_ROW, rtol=0)
        cache = held()
        cache.crop(-3)
        found = model(ids[:, 5:], past_key_values=cache).logits[:, 3:]
        torch.testing.assert_close(found, whole, atol=SAME_ROW, rtol=0)
        cache = held()
        ids[:, :8] = 0  # what the caller does to its ids afterwards is nothing to the cache
        torch.testing.assert_close(model(ids[:, 8:], past_key_values=cache).logits, whole, atol=SAME_ROW, rtol=0)
        cache.reset()
        assert (cache.get_seq_length(), len(cache), cache.is_initialized) == (0, 0, False)


@pytest.mark.parametrize("is_read", [False, True])
def test_columns_of_padded_rows_are_removed(causal, is_read):
    """Padding is a column but not a token: a row with more of it has fewer tokens left."""
    model, core = causal
    ids = random_ids(core.config, 3, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [4], [2]])).long()
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        last = {"logits_to_keep": 1, "use_cache": True} if is_read else {}
        cache = model(ids[:, :10], attention_mask=mask[:, :10], **last).past_key_values
        assert (cache.state is not None) == is_read
        cache.crop(-3)
        assert cache.get_seq_length() == 7
        found = model(ids[:, 7:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found, whole[:, 7:], atol=SAME_ROW, rtol=0)


def test_what_a_cache_answers_to_code_that_knows_layers(causal):
    model, core = causal
    assert len(ThoughtbubblesCache()) == 0
    cache = model(random_ids(core.config, 1, 4)).past_key_values
    assert len(cache) == core.config.n_layer
    assert cache  # as `if past_key_values:` asks
    for use in (lambda: cache[0], lambda: list(cache), lambda: cache.update(None, None, 0)):
        with pytest.raises(ValueError, match="holds streams, not the keys and values of layers: pass it to the model"):
            use()
    model(torch.tensor([[1]]), past_key_values=cache)
    assert len(cache) == core.config.n_layer


@pytest.mark.slow
def test_torch_export_of_a_call_without_a_cache(causal, no_shape_checks):
    model, core = causal
    ids = random_ids(core.config, 1, 9)
    exported = torch.export.export(model, (ids,), strict=False).module()(ids)
    torch.testing.assert_close(exported.logits, model(ids).logits, atol=SAME_ROW, rtol=0)
    assert exported.past_key_values is None


def test_torch_export_with_a_cache_is_refused(causal, no_shape_checks):
    model, core = causal
    with pytest.raises(ValueError, match=r"torch\.export with a cache: .* export with use_cache=False"):
        torch.export.export(model, (random_ids(core.config, 1, 9),), {"use_cache": True}, strict=False)
