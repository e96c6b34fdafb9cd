"""Checkpoints of the authors' JAX code: every array finds its place, and the model computes what that code does."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thoughtbubbles
from helpers import ORACLE_GRADIENT, ORACLE_OUTPUT, SAME_FUNCTION, SAME_ROW, lively_model, random_ids, small_config
from interop import authors_reference
from interop.authors_trees import HEADS, PLAN, TOKENS, VOCABULARY, WIDTH, imported, rows_of_ids, tree_of
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.generate.decode import decode_step, predict_uncached, prefill
from thoughtbubbles.interop.authors import budget_for
from thoughtbubbles.model.config import AUTHORS, OURS, ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

# ---- names ----------------------------------------------------------------------------------------------------------


def test_every_array_is_used_exactly_once():
    """Found again by its numbers alone: no two arrays share any."""
    tree = tree_of()
    model = imported(tree)
    theirs = {tuple(array.flatten().sort().values.tolist()): name for name, array in tree.items()}
    ours = [tuple(weight.flatten().sort().values.tolist()) for weight in model.state_dict().values()]
    assert len(theirs) == len(tree) == len(ours)
    assert Counter(ours) == Counter(theirs.keys())


def test_what_the_arrays_determine():
    config = imported(tree_of()).config
    assert config.fork_layers == (2, 5, 8)
    assert (config.n_layer, config.width, config.vocab_size, config.budget) == (10, WIDTH, VOCABULARY, 2)
    assert (config.selection, config.merge, config.budget_mode) == ("block", "residual", "proportional")
    assert config.authors_compat


def test_a_model_without_biases_has_zeros():
    tree = tree_of(bias=False)
    model = imported(tree)
    biases = [weight for name, weight in model.state_dict().items() if name.endswith("bias")]
    assert len(biases) == 6 * len(PLAN) + 3 + 1
    assert not any(bias.any() for bias in biases)


# ---- numbers --------------------------------------------------------------------------------------------------------


def assert_computes_the_same(tree, ids, *, plan=PLAN, most=None, method="residual", **options):
    """Log-probabilities and survivors of every row; returns the reference's results."""
    model = imported(tree, **options)
    if method == "rightmost":
        model.config = replace(model.config, merge="original")
    with torch.no_grad():
        out = model(ids, want=("log_probs",), trace=True)
    most = most or math.ceil(model.config.budget * ids.shape[1])
    results = [authors_reference.run(tree, plan, row, heads=HEADS, most=most, method=method) for row in ids.tolist()]
    for row, result in enumerate(results):
        assert result.margin > 2 / AUTHORS.levels, "these weights decide nothing: another seed"
        for record, kept in zip(out.forks, result.kept, strict=True):
            assert record.selected[row].nonzero().flatten().tolist() == kept
        torch.testing.assert_close(out.log_probs[row], result.log_probs, atol=ORACLE_OUTPUT, rtol=0)
    return results


@pytest.mark.parametrize(("seed", "budget"), [(0, 2), (1, 2), (2, 1.5), (3, 1.25), (4, 4), (5, 3), (9, 1.25)])
def test_it_computes_what_their_code_computes(seed, budget):
    results = assert_computes_the_same(tree_of(seed=seed), rows_of_ids(2, seed=seed), budget=budget)
    streams = [len(kept) for result in results for kept in result.kept]
    assert max(streams) == math.ceil(budget * TOKENS)


def written_down():
    """What their own code gave for these weights and ids: survivors, log-probabilities of some tokens, entropies.

    Their modules at 104ce8f ran on JAX 0.10.2 with every dtype set to float64, the attention's softmax included, and
    without the 1e-10 that they add to a bubble's size, which float32 does not notice.
    """
    return json.loads(Path(__file__).with_name("authors_golden.json").read_text())


@pytest.mark.parametrize("case", written_down(), ids=lambda case: f"seed {case['seed']}, {case['streams']} streams")
def test_it_computes_what_their_code_computed(case):
    tree, ids = tree_of(seed=case["seed"]), torch.tensor(case["ids"])
    model = imported(tree, budget=budget_for(case["streams"], block_size=TOKENS))
    model.config = replace(model.config, merge={"residual": "residual", "rightmost": "original"}[case["method"]])
    with torch.no_grad():
        out = model(ids, want=("log_probs",), trace=True)
    for record, kept in zip(out.forks, case["kept"], strict=True):
        assert [row.nonzero().flatten().tolist() for row in record.selected] == kept
    found = out.log_probs.gather(-1, ids.roll(-1, 1)[..., None])[..., 0]
    exact = {"dtype": torch.float64}
    torch.testing.assert_close(found, torch.tensor(case["log_probs"], **exact), atol=ORACLE_OUTPUT, rtol=0)
    entropy = -(out.log_probs.exp() * out.log_probs).sum(-1)
    torch.testing.assert_close(entropy, torch.tensor(case["entropy"], **exact), atol=ORACLE_OUTPUT, rtol=0)


def test_scores_closer_than_our_steps_are_distinguished():
    """Two scores within 1/4096 of each other, where the choice falls between them."""
    tree, ids = tree_of(seed=9), rows_of_ids(1, seed=9)
    (result,) = assert_computes_the_same(tree, ids, budget=1.25)
    assert result.margin < 1 / OURS.levels


def test_other_plans():
    for plan in (["fork"], ["fork", "fork"], ["regular", "fork"], ["regular", "regular"]):
        assert_computes_the_same(tree_of(plan, seed=3), rows_of_ids(1, seed=5), plan=plan, budget=1.5)


def test_without_biases():
    assert_computes_the_same(tree_of(bias=False, seed=2), rows_of_ids(1))


def test_the_rightmost_stream_alone():
    assert_computes_the_same(tree_of(seed=1), rows_of_ids(1), method="rightmost")


def test_a_budget_of_the_full_block_in_a_shorter_row():
    """As their code had it at that commit: max_block_size streams, however few tokens."""
    ids = rows_of_ids(2, tokens=5, seed=7)
    assert_computes_the_same(tree_of(seed=3), ids, budget=1.5, budget_mode="fixed", most=12)


def test_the_gradient_is_theirs():
    tree = tree_of(seed=5)
    model, ids = imported(tree, budget=1.5), rows_of_ids(1, seed=3)
    model(ids[:, :-1], targets=ids[:, 1:]).loss.backward()
    leaves = {name: array.clone().requires_grad_() for name, array in tree.items()}
    result = authors_reference.run(leaves, PLAN, ids[0, :-1].tolist(), heads=HEADS, most=11)
    (-result.log_probs.gather(1, ids[0, 1:, None]).mean()).backward()
    gradients = imported({name: leaf.grad for name, leaf in leaves.items()}).state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.grad.any(), name
        torch.testing.assert_close(parameter.grad, gradients[name], atol=ORACLE_GRADIENT, rtol=0, msg=name)


def test_what_differs_from_our_own_form_is_seen():
    """Otherwise nothing would test the switch."""
    model = imported(tree_of(seed=1))
    plain = Thoughtbubbles(replace(model.config, authors_compat=False)).double()
    plain.load_state_dict(model.state_dict())
    ids = rows_of_ids(2)
    difference = model(ids, want=("logits",)).logits - plain(ids, want=("logits",)).logits
    assert difference.abs().max() > 0.1


# ---- everything a model does ----------------------------------------------------------------------------------------


def test_both_attention_paths_agree():
    model, ids = imported(tree_of(seed=2)), rows_of_ids(2)
    fused = model(ids, want=("logits",)).logits
    traced = model(ids, want=("logits",), trace="attention")
    torch.testing.assert_close(traced.logits, fused, atol=SAME_FUNCTION, rtol=0)
    assert len(traced.attention) == len(PLAN)


@pytest.mark.parametrize("selection", ["block", "causal"])
def test_a_padded_row_is_what_it_is_alone(selection):
    model, ids = imported(tree_of(seed=4), budget=1.5), rows_of_ids(3)
    lengths = [8, 3, 1]
    together = model(ids, lengths=lengths, selection=selection, want=("log_probs", "next_logits"))
    for row, n in enumerate(lengths):
        alone = model(ids[row : row + 1, :n], selection=selection, want=("log_probs", "next_logits"))
        torch.testing.assert_close(together.log_probs[row, :n], alone.log_probs[0], atol=SAME_ROW, rtol=0)
        torch.testing.assert_close(together.next_logits[row], alone.next_logits[0], atol=SAME_ROW, rtol=0)


@pytest.mark.parametrize("merge", ["residual", "original"])
def test_steps_through_the_cache_equal_the_parallel_forward(merge):
    config = small_config(authors_compat=True, merge=merge, budget=1.5)
    model, ids = lively_model(config), random_ids(config, 3, 16)
    expected = model(ids, want=("log_probs",)).log_probs
    prediction, cache = prefill(model, ids[:, :5])
    for place in range(5, 16):
        torch.testing.assert_close(prediction.logits.log_softmax(-1), expected[:, place - 1], atol=SAME_ROW, rtol=0)
        prediction, cache = decode_step(model, cache, ids[:, place])
    torch.testing.assert_close(prediction.logits.log_softmax(-1), expected[:, -1], atol=SAME_ROW, rtol=0)


def test_decoding_without_a_cache_equals_the_parallel_forward():
    model, ids = imported(tree_of(seed=3)), rows_of_ids(2)
    torch.testing.assert_close(predict_uncached(model, ids).logits, model(ids, want=("logits",)).logits[:, -1])


def test_the_folder_keeps_it(tmp_path):
    model, ids = imported(tree_of(seed=3)), rows_of_ids(2)
    again = thoughtbubbles.load(save_model(tmp_path / "model", model))
    assert again.config == model.config
    assert torch.equal(again(ids, want=("logits",)).logits, model(ids, want=("logits",)).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merge": "mixture"}, r"merge = 'mixture': authors_compat = True .* set merge='residual' or 'original'"),
        ({"gate_qk": False}, r"gate_qk = False: authors_compat = True .* set gate_qk=True"),
        ({"gate_v": False}, r"gate_v = False"),
        ({"gate_residual": False}, r"gate_residual = False"),
        ({"score_scale": "one"}, r"score_scale = 'one': .* set score_scale='head'"),
        ({"score_bias": 1.0}, r"score_bias = 1.0: .* set score_bias=None"),
        ({"head_gate": True}, r"head_gate = True: .* set head_gate=False"),
        ({"copies": 2, "fork_layers": (), "merge": "original"}, r"copies = 2: .* set copies=1"),
        ({"authors_compat": 1}, r"authors_compat = 1: give True or False"),
        ({"n_layer": 60, "fork_layers": tuple(range(51))}, "fork_layers = .*more than 50 fork layers"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_forms_that_their_code_does_not_have(changes, message):
    with pytest.raises(ValueError, match=message):
        small_config(**{"authors_compat": True, "merge": "residual", **changes})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_kernel_of_ours_takes_its_place():
    """A head size and a dtype that our kernels would take. Every candidate survives: rounding can flip nothing."""
    config = ModelConfig(
        n_layer=2,
        n_head=16,
        width=256,
        vocab_size=512,
        block_size=64,
        fork_layers=(1,),
        merge="residual",
        authors_compat=True,
    )
    model, ids = Thoughtbubbles(config).double(), random_ids(config, 2, 64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("blocks") and weight.ndim == 2:
                weight.mul_(4)
        ours = Thoughtbubbles(replace(config, authors_compat=False)).double()
        ours.load_state_dict(model.state_dict())
        exact, other = (form(ids, want=("logits",)).logits for form in (model, ours))
        model.to("cuda", torch.bfloat16)
        rounded = model(ids.cuda(), want=("logits",)).logits.cpu().double()
        model.float()
        with torch.autocast("cuda", torch.bfloat16):
            mixed = model(ids.cuda(), want=("logits",)).logits.cpu().double()
    for found in (rounded, mixed):
        assert (found - exact).norm() < (other - exact).norm() / 10
