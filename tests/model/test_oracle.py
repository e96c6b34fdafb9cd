"""The model against the oracle: outputs, decisions and gradients, in float64, over every setting."""

from typing import Any

import pytest
import torch

import oracle
from helpers import (
    ORACLE_GRADIENT,
    ORACLE_OUTPUT,
    ask_oracle,
    assert_same_decisions,
    lively_model,
    random_ids,
    small_config,
)
from thoughtbubbles.model.config import ModelConfig, every_fourth_layer
from thoughtbubbles.model.transformer import Thoughtbubbles

SLOW_REFERENCE = pytest.param("reference", marks=pytest.mark.slow)
MERGES = ("mixture", "residual", "forks", "original")


def some_slow(*values: Any) -> list[Any]:
    """Every second one only in `make test-all`."""
    return [value if i % 2 == 0 else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


def compare(
    config: ModelConfig,
    tokens: list[int],
    *,
    call: dict[str, Any] | None = None,
    attention: str = "fused",
    model: Thoughtbubbles | None = None,
) -> None:
    """One padded batch through the model, row by row through the oracle; `call` overrides the config in both."""
    call = call or {}
    model = model or lively_model(config, attention=attention)
    rows, longest = len(tokens), max(tokens)
    ids = random_ids(config, rows, longest)
    targets = random_ids(config, rows, longest, seed=2)
    targets[0, 0] = oracle.IGNORED if longest > 1 or rows > 1 else targets[0, 0]

    budgets = call.get("budget")
    results, row_weights = [], []
    for row, length in enumerate(tokens):
        budget = budgets[row] if isinstance(budgets, list) else budgets
        changes = {k: v for k, v in {**call, "budget": budget}.items() if v is not None}
        result, weights = ask_oracle(model, ids[row, :length], targets[row, :length], **changes)
        results.append(result)
        row_weights.append(weights)

    output = model(ids, targets=targets, lengths=tokens, want=("log_probs", "logits"), trace=True, **call)
    assert_same_decisions(output, results)
    for row, (length, result) in enumerate(zip(tokens, results, strict=True)):
        expected = torch.stack(result.log_probs)
        close(output.log_probs[row, :length], expected)
        close(output.logits[row, :length].log_softmax(-1), expected)
        close(output.streams.x[row, : len(result.x)], torch.stack(result.x))

    nll = [value for result in results for value in result.nll if value is not None]
    loss = torch.stack(nll).mean()
    close(output.loss, loss)

    # Gradients of an uneven sum over token_nll against the oracle's; those of the mean loss, which are computed in its
    # forward pass, against those of token_nll.
    share = torch.arange(1, rows * longest + 1, dtype=torch.float64).sin().view(rows, longest)  # none is 0
    pairs = [(share[r, t], v) for r, result in enumerate(results) for t, v in enumerate(result.nll) if v is not None]
    oracle_grads = summed_gradients(torch.stack([s * v for s, v in pairs]).sum(), row_weights)
    in_full = model(ids, targets=targets, lengths=tokens, want=("token_nll",), **call)
    compare_gradients(model, (in_full.token_nll * share).sum(), oracle_grads)
    recomputed = gradients(model, model(ids, targets=targets, lengths=tokens, want=("token_nll",), **call).loss)
    compare_gradients(model, output.loss, recomputed)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.detach(), theirs.detach(), atol=ORACLE_OUTPUT, rtol=ORACLE_OUTPUT)


def summed_gradients(loss: torch.Tensor, row_weights: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Each row had its own copies of the weights; the gradient of a shared weight is the sum over rows."""
    names = list(row_weights[0])
    flat = [weights[name] for weights in row_weights for name in names]
    grads = torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True)
    return {name: sum(grads[i :: len(names)], torch.zeros(())) for i, name in enumerate(names)}


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def compare_gradients(model: torch.nn.Module, loss: torch.Tensor, expected: dict[str, torch.Tensor]) -> None:
    for name, grad in gradients(model, loss).items():
        torch.testing.assert_close(
            grad,
            expected[name],
            atol=ORACLE_GRADIENT,
            rtol=ORACLE_GRADIENT,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("budget", some_slow(2, 1, 1.15, 1.1, 4, 1.5))
@pytest.mark.parametrize("selection", ["causal", "block"])
@pytest.mark.parametrize("merge", MERGES)
def test_every_merge_selection_and_budget(merge, selection, budget):
    compare(small_config(merge=merge, selection=selection, budget=budget), [7])


@pytest.mark.parametrize("selection", ["causal", "block"])
@pytest.mark.parametrize("merge", MERGES)
def test_padded_rows(merge, selection):
    compare(small_config(merge=merge, selection=selection, budget=1.5), [6, 3, 1])


@pytest.mark.parametrize("selection", ["causal", "block"])
def test_a_budget_for_each_row_and_selection_in_the_call(selection):
    other = {"causal": "block", "block": "causal"}[selection]
    compare(small_config(selection=other), [5, 5, 4, 3], call={"budget": [1, 1.15, 2, 4], "selection": selection})


@pytest.mark.parametrize("selection", ["causal", "block"])
@pytest.mark.parametrize("budget", [1, pytest.param(1.5, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("merge", some_slow(*MERGES))
def test_one_token(merge, budget, selection):
    compare(small_config(merge=merge, budget=budget, selection=selection), [1])


@pytest.mark.parametrize("attention", ["fused", SLOW_REFERENCE])
@pytest.mark.parametrize("selection", ["causal", pytest.param("block", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reach", [0, 1, 3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("merge", some_slow(*MERGES))
def test_the_reach_of_forks(merge, reach, selection, attention):
    config = small_config(merge=merge, fork_reach=reach, selection=selection, budget=4 if reach else 2)
    compare(config, [6, 4], attention=attention)


@pytest.mark.parametrize("attention", ["fused", SLOW_REFERENCE])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"selection": "block", "budget": 1.5},
        {"fork_layers": (3,), "head_gate": True},
        {"fork_layers": (0,), "relative_scores": True},
        {"fork_layers": (2,), "budget": 1.25, "gate_qk": False},
        {"fork_reach": 1, "budget": 1.5},
        {"fork_reach": 3, "score_bias": 2, "head_gate": True},
        {"fork_layers": (0,), "budget": 1, "gate_v": False, "gate_residual": False},
        {"selection": "block", "budget_mode": "fixed", "block_size": 8},
    ],
)
@pytest.mark.parametrize(
    "merge", ["forks", *(pytest.param(merge, marks=pytest.mark.slow) for merge in ("mixture", "residual"))]
)
def test_feedback(merge, form, attention):
    form = {"fork_layers": (1,), "fork_reach": 0, **form}
    compare(small_config(merge=merge, feedback=True, **form), [6, 4, 1], attention=attention)


@pytest.mark.parametrize("form", [{}, {"fork_reach": 0}, {"selection": "block"}, {"head_gate": True, "budget": 4}])
@pytest.mark.parametrize("merge", some_slow(*MERGES))
def test_relative_scores(merge, form):
    compare(small_config(merge=merge, relative_scores=True, **form), [6, 4])


@pytest.mark.parametrize("form", [{}, {"fork_reach": 0, "relative_scores": True}, {"selection": "block"}])
@pytest.mark.parametrize("merge", some_slow(*MERGES))
def test_own_scores(merge, form):
    compare(small_config(merge=merge, own_scores=True, **form), [6, 4])


@pytest.mark.parametrize("attention", ["fused", SLOW_REFERENCE])
@pytest.mark.parametrize(
    "form",
    [
        {"fork_layers": (), "merge": "original"},
        {"budget": 4, "head_gate": True},
        {"selection": "block", "merge": "residual"},
        {"fork_layers": (1,), "fork_reach": 0, "feedback": True, "merge": "forks"},
    ],
)
def test_modern_blocks(form, attention):
    compare(small_config(block="modern", **form), [6, 4], attention=attention)


@pytest.mark.parametrize("merge", MERGES)
def test_scores_at_their_floor(merge):
    """Score heads so steep that many scores are 1 and many are at the floor of exp(−20), where gradients stop."""
    config = small_config(merge=merge, budget=1.5)
    steep = lively_model(config)
    for fork in steep.forks.values():
        torch.nn.init.normal_(fork.score.weight, std=30)
    floors = [r.own_log_score == -20 for r in steep(random_ids(config, 1, 7), trace=True).forks]
    assert any(floor.any() for floor in floors)
    compare(config, [7], model=steep)


@pytest.mark.parametrize("copies", [1, 3, 5])
def test_copies(copies):
    compare(small_config(copies=copies, fork_layers=(), merge="original"), [5, 2])


@pytest.mark.parametrize(
    "off",
    [("gate_qk",), ("gate_v",), ("gate_residual",), ("gate_qk", "gate_v"), ("gate_qk", "gate_v", "gate_residual")],
)
def test_gates_off(off):
    compare(small_config(**dict.fromkeys(off, False)), [6])


@pytest.mark.parametrize(
    "form",
    [
        {"fork_layers": (), "merge": "original"},
        {"fork_layers": (), "merge": "original", "copies": 3},
        *({"merge": merge, "budget": 1.5} for merge in MERGES),
        {"selection": "block", "gate_qk": False, "gate_v": False, "gate_residual": False},
    ],
    ids=["plain", "copies", *MERGES, "no scores"],
)
def test_head_gate(form):
    compare(small_config(head_gate=True, **form), [6, 3])


def test_head_gate_with_reference_attention():
    compare(small_config(head_gate=True), [6], attention="reference")


@pytest.mark.parametrize("attention", ["fused", "reference"])
def test_score_scale_one(attention):
    compare(small_config(score_scale="one"), [6], attention=attention)


@pytest.mark.parametrize("selection", ["causal", "block"])
def test_reference_attention(selection):
    compare(small_config(selection=selection), [6, 4], attention="reference")


@pytest.mark.parametrize(
    "form",
    [
        {"budget": 8},
        {"budget": 8, "fork_reach": 1},
        {"fork_layers": (2,), "fork_reach": 0, "feedback": True, "head_gate": True},
        {"fork_layers": (2,), "fork_reach": 3, "feedback": True},
    ],
)
@pytest.mark.parametrize("merge", ["mixture", "residual", "forks"])
def test_forks_without_scores(merge, form):
    compare(small_config(merge=merge, scores=False, **form), [6, 4, 1])


def test_score_bias():
    compare(small_config(score_bias=1.0, budget=1.5), [7])


def test_fixed_budget():
    compare(small_config(selection="block", budget_mode="fixed", budget=1.15, block_size=9), [5, 3])


@pytest.mark.parametrize("selection", ["causal", "block"])
def test_extended_forking(selection):
    config = small_config(
        n_layer=20, n_head=2, width=8, fork_layers=every_fourth_layer(20), selection=selection, budget=1.5
    )
    assert config.fork_layers == (3, 7, 11, 15, 19)
    compare(config, [6])


@pytest.mark.parametrize("merge", ["mixture", "residual"])
def test_forking_before_every_block(merge):
    """Bubbles of up to 32 in a row of 5 tokens, so that doubling steps run past the row's ends."""
    compare(small_config(n_layer=5, n_head=1, width=6, fork_layers=(0, 1, 2, 3, 4), merge=merge, budget=4), [5])


def test_odd_sizes():
    compare(small_config(n_layer=2, n_head=1, width=10, vocab_size=7, fork_layers=(0,), budget=1.5), [11, 9])
