"""Thoughtbubbles as a whole: padding, budgets, outputs, traces, learning, precision, and wrong input."""

import math
from dataclasses import replace

import pytest
import torch

import thoughtbubbles
from helpers import SAME_FUNCTION, SAME_ROW, lively_model, named, random_ids, small_config
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.streams import is_original
from thoughtbubbles.model.transformer import Thoughtbubbles

MERGES = ("mixture", "residual", "original")


@pytest.mark.parametrize("selection", ["block", "causal"])
@pytest.mark.parametrize("merge", MERGES)
def test_every_row_of_a_padded_batch_gives_what_it_gives_alone(merge, selection):
    config = small_config(merge=merge, selection=selection)
    model = lively_model(config).requires_grad_(False)
    lengths, budgets = [16, 9, 1, 12], [1.5, 2, 4, 1.15]
    ids, targets = random_ids(config, 4, 16), random_ids(config, 4, 16, seed=2)
    want = ("log_probs", "logits", "token_nll")
    together = model(ids, targets=targets, lengths=lengths, budget=budgets, want=want)
    total = 0.0
    for row, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        mine = slice(row, row + 1), slice(0, length)
        alone = model(ids[mine], targets=targets[mine], budget=budget, want=want)
        for name in want:
            torch.testing.assert_close(getattr(together, name)[mine], getattr(alone, name), atol=SAME_ROW, rtol=0)
        used = (together.streams.token[row] < 16).sum()
        assert used == (alone.streams.token[0] < length).sum()
        torch.testing.assert_close(together.streams.x[row, :used], alone.streams.x[0, :used], atol=SAME_ROW, rtol=0)
        assert (together.token_nll[row, length:] == 0).all(), "padding is never a target"
        total += float(alone.token_nll.sum())
    assert together.loss.item() == pytest.approx(total / sum(lengths), abs=SAME_ROW)


def test_the_content_of_padding_does_not_matter():
    config = small_config()
    model = lively_model(config)
    ids = random_ids(config, 2, 10)
    other = ids.clone()
    other[1, 4:] = -7  # not even a valid id
    a, b = (model(x, targets=ids, lengths=[10, 4], want=("log_probs",)) for x in (ids, other))
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.log_probs, b.log_probs)


def test_padding_gets_no_gradient():
    config = small_config()
    model = lively_model(config)
    ids = random_ids(config, 2, 10) % 5  # tokens 0 … 4 in the text
    ids[1, 4:] = 22
    model(ids, targets=ids, lengths=[10, 4]).loss.backward()
    alone = lively_model(config)
    a, b = alone(ids[:1], targets=ids[:1]).loss, alone(ids[1:, :4], targets=ids[1:, :4]).loss
    ((10 * a + 4 * b) / 14).backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=SAME_ROW, rtol=SAME_ROW, msg=name)


@pytest.mark.parametrize("merge", MERGES)
def test_outputs_belong_together(merge):
    config = small_config(merge=merge)
    model = lively_model(config)
    ids, targets = random_ids(config, 3, 12), random_ids(config, 3, 12, seed=2)
    targets[0, 3:6] = IGNORED
    out = model(ids, targets=targets, want=("log_probs", "logits", "token_nll"))
    torch.testing.assert_close(out.log_probs.exp().sum(-1), torch.ones(3, 12, dtype=torch.float64))
    torch.testing.assert_close(out.logits.log_softmax(-1), out.log_probs, atol=SAME_FUNCTION, rtol=0)
    real = targets != IGNORED
    chosen = -out.log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(out.token_nll, torch.where(real, chosen, 0), atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    torch.testing.assert_close(out.loss, out.token_nll.sum() / real.sum())
    torch.testing.assert_close(model(ids, targets=targets).loss, out.loss, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    bare = model(ids)
    assert [bare.loss, bare.log_probs, bare.logits, bare.token_nll, bare.forks, bare.attention] == [None] * 6


def test_trace():
    config = small_config(budget=1.5)
    model = lively_model(config)
    ids = random_ids(config, 2, 12)
    plain, traced, attended = (
        model(ids, want=("logits",)),
        model(ids, trace=True),
        model(ids, want=("logits",), trace="attention"),
    )
    assert [record.layer for record in traced.forks] == [1, 2, 3]
    assert traced.attention is None
    assert torch.equal(traced.forks[-1].token, plain.streams.token)
    torch.testing.assert_close(attended.logits, plain.logits, atol=SAME_FUNCTION, rtol=SAME_FUNCTION)
    streams = [12, *(record.token.shape[1] for record in attended.forks)]
    assert [tuple(w.shape) for w in attended.attention] == [(2, 3, s, s) for s in streams]


def test_with_r_1_originals_are_still_attenuated():
    """After the first fork layer, r = 1 is not a plain GPT."""
    config = small_config(budget=1)
    model = lively_model(config)
    plain = Thoughtbubbles(small_config(fork_layers=(), merge="original")).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("forks.")})
    ids = random_ids(config, 1, 8)
    assert not torch.allclose(model(ids, want=("logits",)).logits, plain(ids, want=("logits",)).logits)


def test_forks_at_the_start_are_attenuated_from_there_only():
    """Before the first fork layer the block is exactly a plain GPT block: the first attention weights agree."""
    config = small_config()
    model = lively_model(config)
    plain = Thoughtbubbles(small_config(fork_layers=(), merge="original")).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("forks.")})
    ids = random_ids(config, 1, 8)
    ours, theirs = (m(ids, trace="attention").attention for m in (model, plain))
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].shape != theirs[1].shape


@pytest.mark.parametrize(
    ("selection", "merge"),
    [
        pytest.param(selection, merge, marks=[] if (selection, merge) == ("causal", "mixture") else [pytest.mark.slow])
        for selection in ("block", "causal")
        for merge in MERGES
    ],
)
def test_a_tiny_model_overfits_one_batch(merge, selection, no_shape_checks):
    torch.manual_seed(0)
    config = named("nano-causal", width=32, merge=merge, selection=selection)
    model = Thoughtbubbles(config)
    ids = torch.randint(config.vocab_size, (2, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    first = model(ids[:, :-1], targets=ids[:, 1:]).loss.item()
    assert first == pytest.approx(math.log(config.vocab_size), rel=0.05), "an untrained model knows nothing"
    for _ in range(120):
        optimizer.zero_grad()
        loss = model(ids[:, :-1], targets=ids[:, 1:]).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_feedback_learns():
    """Of forks that start from the previous token's last state, everything that makes up this start."""
    config = named("nano-causal", fork_layers=(1,), fork_reach=0, feedback=True, merge="forks")
    torch.manual_seed(0)
    model, ids = Thoughtbubbles(config), random_ids(config, 4, 32)
    model(ids, targets=ids.roll(-1, 1)).loss.backward()
    for name, parameter in model.forks["1"].named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("form", [{"fork_layers": (1, 3)}, {"fork_layers": (1,), "fork_reach": 2, "feedback": True}])
def test_without_scores_is_as_if_all_were_1(form):
    """Of a model whose score heads have a bias that gives scores of 1: the same loss and gradients."""
    config = small_config(budget=4, merge="residual", **form)
    ids = random_ids(config, 2, 14)
    models = []
    for part in ({"scores": False}, {"score_bias": 60}):
        torch.manual_seed(0)  # initial weights depend on their names
        models.append(Thoughtbubbles(replace(config, **part)).double())
        models[-1](ids, targets=ids.roll(-1, 1), lengths=[14, 9]).loss.backward()
    unscored, scored = models
    for name, parameter in unscored.named_parameters():
        assert torch.equal(parameter, scored.get_parameter(name)), name
        torch.testing.assert_close(parameter.grad, scored.get_parameter(name).grad, rtol=1e-12, atol=1e-14, msg=name)


def test_attention_of_forks_after_originals():
    """Recorded: one matrix per block, in which originals see no fork, and forks no original of their own token."""
    config = small_config(fork_layers=(1,), fork_reach=0, feedback=True, merge="forks")
    model, ids = lively_model(config), random_ids(config, 2, 6)
    out = model(ids, trace="attention")
    assert [weights.shape[-1] for weights in out.attention] == [6] + [out.streams.token.shape[1]] * (config.n_layer - 1)
    token = out.streams.token
    original = is_original(token, 6)
    for weights in out.attention[1:]:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        for row in range(2):
            for i in range(token.shape[1]):
                seen = (weights[row, :, i] > 0).all(0).nonzero()[:, 0].tolist()
                if token[row, i] < 6:
                    earlier = [j for j in range(i + 1) if original[row, j] and token[row, j] < 6]
                    assert seen == sorted({*earlier, i})


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("selection", ["block", "causal"])
def test_every_score_head_and_fork_embedding_learns(merge, selection):
    config = named("nano-causal", merge=merge, selection=selection)
    torch.manual_seed(0)
    model = Thoughtbubbles(config)
    ids = torch.randint(config.vocab_size, (4, 32))
    model(ids, targets=ids.roll(-1, 1)).loss.backward()
    for layer, fork in model.forks.items():
        for name, parameter in fork.named_parameters():
            assert parameter.grad is not None, (layer, name)
            assert parameter.grad.abs().sum() > 0, (layer, name)
        assert (fork.score.weight.grad.abs().sum(1) > 0).all(), "both the fork and the keep score"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"ids": torch.tensor([[1, 23]])}, r"ids has 23: the vocabulary has ids from 0 to 22"),
        ({"ids": torch.tensor([[-1, 2]])}, r"ids has -1: the vocabulary"),
        ({"ids": torch.zeros(1, 17).long()}, r"ids have 17 tokens per row, more than block_size = 16: shorten"),
        ({"ids": torch.zeros(4).long()}, r"ids of shape \(4,\) .*\(batch, tokens\)"),
        ({"ids": torch.zeros(1, 0).long()}, r"ids of shape \(1, 0\)"),
        ({"ids": torch.zeros(0, 4).long()}, r"ids of shape \(0, 4\)"),
        ({"ids": torch.zeros(1, 4)}, r"ids of shape \(1, 4\) and torch.float32: give whole numbers"),
        ({"targets": torch.zeros(2, 4).long()}, r"targets have shape \(2, 4\), ids \(2, 5\)"),
        ({"targets": torch.full((2, 5), 23)}, r"targets has 23: .*-100 marks a target to ignore"),
        ({"lengths": [5, 0]}, r"lengths has 0: each row has from 1 to 5 tokens here"),
        ({"lengths": [6, 5]}, r"lengths has 6: each row has from 1 to 5"),
        ({"lengths": [5]}, r"lengths have shape \(1,\) .*give one whole number for each of the 2 rows"),
        ({"lengths": [2.7, 3.0]}, r"lengths have shape \(2,\) and torch.float32: give one whole number"),
        ({"targets": torch.zeros(2, 5)}, r"targets of shape \(2, 5\) and torch.float32: give whole numbers"),
        ({"ids": [[1, 2]]}, r"ids is a list: give a tensor, e.g. torch.tensor\(ids\)"),
        ({"targets": [[1, 2]]}, r"targets is a list: give a tensor"),
        ({"want": iter(("logits",))}, r"want = .*: give a tuple of names"),
        ({"budget": Budget((1,), (2,))}, r"budget = 1/2 is below 1"),
        ({"budget": 0.9}, r"budget = 0.9 is below 1"),
        ({"budget": [1, 2, 3]}, r"budget has 3 numbers for a batch of 2 rows"),
        ({"selection": "best"}, r"selection = 'best': choose one of"),
        ({"want": ("loss",)}, r"want has 'loss': choose from"),
        ({"want": "logits"}, r"want = 'logits': give a tuple"),
        ({"want": ("token_nll",)}, r"want has 'token_nll' but there are no targets"),
        ({"trace": "all"}, r"trace = 'all': choose False, True or 'attention'"),
        ({"trace": 3}, r"trace = 3: choose"),
        ({"trace": torch.ones(2)}, r"trace = tensor.*: choose"),
        ({"ids": None}, r"ids is a NoneType: give a tensor"),
        ({"ids": "abc"}, r"ids is a str: give a tensor"),
        ({"ids": torch.zeros(2, 5, dtype=torch.bool)}, r"ids of shape \(2, 5\) and torch.bool"),
        ({"targets": torch.zeros(2, 5, dtype=torch.bool)}, r"targets of shape \(2, 5\) and torch.bool"),
        ({"targets": 3}, r"targets is a int: give a tensor"),
        ({"lengths": "abc"}, r"lengths = 'abc': give one whole number for each of the 2 rows"),
        ({"lengths": ["a", "b"]}, r"lengths = \['a', 'b'\]: give one whole number"),
        ({"lengths": [[1], [2, 3]]}, r"lengths = .*: give one whole number"),
        ({"lengths": [10**30, 1]}, r"lengths = .*: give one whole number"),
        ({"lengths": [None, 1]}, r"lengths = .*: give one whole number"),
        ({"lengths": {"a": 1}}, r"lengths = .*: give one whole number"),
        ({"lengths": [True, True]}, r"lengths have shape \(2,\) and torch.bool: give one whole number"),
        ({"lengths": torch.ones(2, dtype=torch.bool)}, r"lengths have shape \(2,\) and torch.bool"),
        ({"lengths": 5}, r"lengths have shape \(\) .*: give one whole number"),
        ({"want": ([],)}, r"want has \[\]: choose from"),
        ({"want": (torch.ones(2),)}, r"want has tensor.*: choose from"),
        ({"want": 5}, r"want = 5: give a tuple"),
        ({"selection": 5}, r"selection = 5: choose one of"),
        ({"selection": torch.ones(2)}, r"selection = tensor.*: choose one of"),
        ({"budget_mode": []}, r"budget_mode = \[\]: choose one of"),
        ({"budget": "abc"}, r"budget = 'abc' is not a number"),
        ({"budget": {}}, r"budget = \{\} is not a number"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_mistakes_are_found_before_any_work(call, message):
    model = lively_model(small_config())

    def no_work(*_):
        pytest.fail("work began before the mistake was found")

    model.embedding.register_forward_pre_hook(no_work)
    with pytest.raises(ValueError, match=message):
        model(**{"ids": torch.zeros(2, 5).long(), **call})


def test_causal_selection_in_a_fixed_budget_model():
    model = lively_model(small_config(selection="block", budget_mode="fixed"))
    with pytest.raises(ValueError, match="requires block selection"):
        model(torch.zeros(1, 4).long(), selection="causal")


@pytest.mark.parametrize("rule", [{}, {"selection": "block"}, {"selection": "block", "budget_mode": "fixed"}], ids=str)
def test_budgets_beyond_what_the_forks_can_make_are_no_limit(rule):
    """Bitwise equal to the largest useful budget, in a call and in a config; without forks any budget is equal."""
    config, ids = small_config(fork_layers=(1, 3), **rule), torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    for forks, budgets in (((1, 3), (4, 4.01, 10**9, [4, 7])), ((), (1, 2, 10**9))):
        model = lively_model(replace(config, fork_layers=forks))
        first, *others = [model(ids, lengths=[4, 2], budget=r, want=("log_probs",)) for r in budgets]
        model.config = replace(model.config, budget=10**9)
        others.append(model(ids, lengths=[4, 2], want=("log_probs",)))
        assert (first.streams.token[0] == 3).sum() == 2 ** len(forks)
        for other in others:
            assert torch.equal(first.log_probs, other.log_probs)
            assert torch.equal(first.streams.token, other.streams.token)


def test_a_loaded_model_is_in_evaluation_mode(tmp_path):
    save_model(tmp_path / "model", Thoughtbubbles(small_config()).train())
    assert not any(module.training for module in thoughtbubbles.load(tmp_path / "model").modules())


@pytest.mark.usefixtures("no_shape_checks")
def test_unknown_attention_path():
    with pytest.raises(ValueError, match="attention = 'slow': choose one of"):
        Thoughtbubbles(small_config(), attention="slow")
