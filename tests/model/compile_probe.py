"""The checks of test_compile.py, as a separate program: torch.compile cannot trace the shape checks of the test run.

In the folder of the tests, python -m model.compile_probe CHECK exits 0 if the check holds.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from helpers import BFLOAT16, BFLOAT16_GRADIENT, SAME_FUNCTION_FLOAT32, SAME_ROW_FLOAT32, named, scores_only
from thoughtbubbles.model.attention import fused_attention, reference_attention
from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

# As few blocks as have everything: compilers take their time for each.
FORMS: dict[str, dict[str, Any]] = {
    "nano-gate": {"n_layer": 2},  # of one graph alone: generated code of "nano" has its gate too
    "nano": {"n_layer": 2},
    "nano-causal": {"n_layer": 2, "fork_layers": (0, 1)},
    "nano-paper": {"n_layer": 2, "fork_layers": (1,), "merge": "residual"},
    "nano-copy-3": {"n_layer": 1},
}


def make(form: str) -> tuple[Thoughtbubbles, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Thoughtbubbles(named(form, **FORMS[form]))
    return model, torch.randint(model.config.vocab_size, (2, 32))


def same_numbers(backend: str, forms: Iterable[str]) -> None:
    """The full model in one graph, forward and backward, against eager."""
    for form in forms:
        model, ids = make(form)
        results = []
        for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
            model.zero_grad()
            out = run(ids, targets=ids.roll(-1, 1), want=("log_probs",))
            out.loss.backward()
            results.append((out.loss, out.log_probs, *(p.grad for p in model.parameters())))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=SAME_FUNCTION_FLOAT32, rtol=SAME_FUNCTION_FLOAT32)


def every_way_to_call() -> None:
    model, ids = make("nano-causal")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([32, 7])
    calls = [
        {"budget": 1.5},
        {"budget": [1, 1.15]},
        {"budget": Budget.of("1.25")},
        {"selection": "block"},
        {"want": ("token_nll",)},
        {"trace": True},
    ]
    for call in calls:
        a, b = (run(ids, targets=ids, lengths=lengths, **call).loss for run in (model, compiled))
        torch.testing.assert_close(a, b)


def autocast() -> None:
    model, ids = make("nano-causal")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        a, b = (run(ids, targets=ids).loss for run in (model, compiled))
    torch.testing.assert_close(a, b)


def no_new_graph() -> None:
    """Other tokens, other weights, other decisions: the shapes are the same, so the graph is too."""
    model, _ = make("nano-causal")
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    for _ in range(4):
        ids = torch.randint(model.config.vocab_size, (2, 32))
        compiled(ids, targets=ids).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert len(graphs) == 1, f"{len(graphs)} graphs"


def low_scores_in_bfloat16(device: str = "cpu") -> None:
    """A log score near −57 needs more bits than bfloat16 has; compiled code must not round them away."""
    torch.manual_seed(0)
    q, k = (torch.zeros(1, 1, 40, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    v = torch.randn(1, 1, 40, 64, dtype=torch.bfloat16, device=device)
    bias = (-55 - 5 * torch.rand(1, 40, device=device)).requires_grad_()
    exact = reference_attention(q.double(), k.double(), v.double(), scores_only(bias.double()))
    (expected,) = torch.autograd.grad(exact.square().sum(), bias)
    fused = torch.compile(fused_attention, fullgraph=True)(q, k, v, scores_only(bias))
    (found,) = torch.autograd.grad(fused.square().sum(), bias)
    assert (fused - exact).norm() / exact.norm() < BFLOAT16
    assert (found - expected).norm() / expected.norm() < BFLOAT16_GRADIENT


def same_numbers_on_a_gpu() -> None:
    """At the shapes of training: 512 tokens, few rows and many. Kernels differ, so float32 results do a little."""
    for rows, changes in ((4, {}), (64, {"selection": "block", "merge": "residual"})):
        torch._dynamo.reset()
        torch.manual_seed(0)
        shape = {"n_layer": 4, "n_head": 2, "width": 128, "vocab_size": 1024, "fork_layers": (1, 2, 3)}
        model = Thoughtbubbles(ModelConfig(**{**shape, **changes})).cuda()
        ids = torch.randint(1024, (rows, 512), device="cuda")
        found = []
        for run in (model, torch.compile(model, fullgraph=True)):
            model.zero_grad()
            loss = run(ids, targets=ids.roll(-1, 1)).loss
            loss.backward()
            found.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
        (a, g), (b, h) = found
        assert abs(a - b) < SAME_ROW_FLOAT32, (a, b)
        assert (g - h).norm() / g.norm() < BFLOAT16, (g - h).norm() / g.norm()


CHECKS = {
    "one graph": lambda *forms: same_numbers("aot_eager", forms),
    "generated code": lambda *forms: same_numbers("inductor", forms),
    "low scores in bfloat16": low_scores_in_bfloat16,
    "generated code on a GPU": same_numbers_on_a_gpu,
    "low scores in bfloat16 on a GPU": lambda: low_scores_in_bfloat16("cuda"),
    "every way to call": every_way_to_call,
    "autocast": autocast,
    "no new graph": no_new_graph,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
