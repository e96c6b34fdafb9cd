"""The wrapper is the core: the same weights and logits, however rows are padded and parts are replaced."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import thoughtbubbles
from helpers import SAME_ROW, SAME_ROW_FLOAT32, lively_model, random_ids
from interop.hf_models import KINDS, config_of, logits, padded, pair, slow_but
from thoughtbubbles import Thoughtbubbles
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.interop.hf import ThoughtbubblesCache, ThoughtbubblesConfig, ThoughtbubblesForCausalLM
from thoughtbubbles.model.config import ModelConfig


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
@pytest.mark.parametrize("kind", ["copy-3", "gated", "causal", "block-residual"])
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
    config = ModelConfig.named("nano-causal")
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


def test_unknown_weights_do_not_pass_silently(tmp_path):
    pair(tmp_path / "model", "causal")
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|shape|mismatch"):
        ThoughtbubblesForCausalLM.from_pretrained(tmp_path / "model", width=24)


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
