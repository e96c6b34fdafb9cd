"""ModelConfig: the named sizes, and a clear message for every mistake."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from helpers import named, small_config
from thoughtbubbles.model.config import SIZES, ModelConfig, every_fourth_layer
from thoughtbubbles.model.transformer import Thoughtbubbles

PARAMETERS = {  # from the architecture's table
    "150m": (16, 12, 768, 152_040_960, 152_052_480),
    "319m": (24, 16, 1024, 353_822_720, 353_838_080),
    "772m": (36, 20, 1280, 772_779_520, 772_798_720),
    "1.9b": (36, 16, 2048, 1_915_924_480, 1_915_955_200),
}


def count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Thoughtbubbles(config).parameters())


@pytest.mark.parametrize("size", PARAMETERS)
def test_paper_sizes(size):
    layers, heads, width, plain, forked = PARAMETERS[size]
    ours, paper = (ModelConfig.named(f"{size}-{form}") for form in ("causal", "paper"))
    assert (ours.n_layer, ours.n_head, ours.width) == (layers, heads, width)
    assert (ours.vocab_size, ours.block_size, ours.fork_layers, ours.budget) == (50304, 512, (3, 7, 11), 2)
    assert ours.merge == ("residual" if size == "1.9b" else "mixture")
    assert (ours.selection, paper.selection) == ("causal", "block")
    assert named(f"{size}-causal", selection="block") == paper, "the selection is all that differs"
    assert count(ours) == count(paper) == forked
    assert count(ModelConfig.named(f"{size}-plain")) == count(ModelConfig.named(f"{size}-copy-3")) == plain


def test_a_score_bias_adds_two_parameters_per_fork_layer():
    assert count(named("150m-causal", score_bias=2.0)) - count(ModelConfig.named("150m-causal")) == 6


def test_without_scores_there_is_no_score_head():
    scored, unscored = (ModelConfig(n_layer=4, n_head=2, width=16, fork_layers=(1,), scores=on) for on in (True, False))
    assert count(scored) - count(unscored) == 2 * 16 + 2 * 16, "its LayerNorm, and a row each for fork and keep"


def test_a_head_gate_adds_a_row_and_a_bias_per_head():
    plain = ModelConfig.named("150m-plain")
    assert not plain.head_gate
    assert count(named("150m-plain", head_gate=True)) - count(plain) == 16 * 12 * (768 + 1)


def test_forms_and_changes():
    assert ModelConfig.named("tiny-copy-5").copies == 5
    assert ModelConfig.named("tiny-plain").fork_layers == ()
    for form in ("causal", "paper"):
        assert ModelConfig.named(f"150m-{form}-r4") == named(f"150m-{form}", budget=4)
    assert every_fourth_layer(36) == (3, 7, 11, 15, 19, 23, 27, 31, 35)
    assert ModelConfig.named("nano-causal").max_bubble == 8


@pytest.mark.parametrize(
    "name", ["gigantic", "150m-huge", "150m-copy-", "150m-copy-x", "150m-plain-r4", "150m-r4", "150m-causal-r4-r4", ""]
)
def test_unknown_names(name):
    with pytest.raises(ValueError, match=r"no model is named .*150m"):
        ModelConfig.named(name)


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        SIZES["nano"].width = 5


@pytest.mark.usefixtures("no_shape_checks")
def test_lists_from_json_become_tuples():
    assert small_config(fork_layers=[1, 3]).fork_layers == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 0}, r"ModelConfig.n_layer = 0: give a whole number"),
        ({"n_layer": 2.5}, r"ModelConfig.n_layer = 2.5: give a whole number"),
        ({"width": 13}, r"ModelConfig.width = 13: make it a multiple of n_head = 3"),
        ({"width": 15}, r"ModelConfig.width = 15: .*5 channels each.*even"),
        ({"fork_layers": (1, 4)}, r"ModelConfig.fork_layers = \(1, 4\): 4 is not a block .* 0 to n_layer - 1 = 3"),
        ({"fork_layers": (-1,)}, r"fork_layers = \(-1,\): -1 is not a block"),
        ({"fork_layers": (2, 1)}, r"fork_layers = \(2, 1\): list each layer once, in increasing order"),
        ({"fork_layers": (1, 1)}, r"fork_layers = \(1, 1\): list each layer once"),
        ({"copies": 3}, r"fork_layers = \(1, 2, 3\): copies = 3 is the baseline that does not fork"),
        ({"copies": 3, "fork_layers": ()}, r"merge = 'mixture': copy-N decodes the rightmost copy"),
        ({"budget": 0.5}, r"ModelConfig.budget = 0.5 is below 1"),
        ({"budget": [1, 2]}, r"budget = \[1, 2\]: give one number"),
        ({"budget": None}, r"budget = None: give one number"),
        ({"fork_layers": 5}, r"fork_layers = 5: give a tuple"),
        ({"gate_qk": "False"}, r"gate_qk = 'False': give True or False"),
        ({"head_gate": 1}, r"head_gate = 1: give True or False"),
        ({"score_bias": "x"}, r"score_bias = 'x': give a finite number"),
        ({"budget_mode": "fixed"}, r"budget_mode = 'fixed': .*requires selection='block'"),
        ({"budget_mode": "free"}, r"budget_mode = 'free': choose one of"),
        ({"selection": "random"}, r"selection = 'random': choose one of \('block', 'causal'\)"),
        ({"merge": "sum"}, r"merge = 'sum': choose one of"),
        ({"score_scale": "two"}, r"score_scale = 'two': choose one of"),
        ({"score_bias": float("nan")}, r"score_bias = nan: give a finite number"),
        ({"scores": "no"}, r"scores = 'no': give True or False"),
        ({"scores": False}, r"ModelConfig.budget = 2: without scores this model keeps all forks; give 8 or more"),
        ({"scores": False, "budget": 8, "selection": "block"}, r"selection = 'block': scores = False .* 'causal'"),
        ({"scores": False, "budget": 8, "score_bias": 2}, r"score_bias = 2: scores = False has no use for it.* None"),
        ({"scores": False, "budget": 8, "own_scores": True}, r"own_scores = True: scores = False has no use for it"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_mistakes_are_named_with_their_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        small_config(**changes)
