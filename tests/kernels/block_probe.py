"""The kernels of a block on the CPU, against float64. Run by kernels/interpreted.py, with words [PART PARTS].

With PART of PARTS, every PARTS-th case from PART on. Prints one JSON object: for each case the errors of outputs and
gradients by name (relative to the norm of what they should be), and facts that must be true. New memory is NaN, and
tiles are small, so that a short row has several. test_gpu.py takes the comparisons from here too.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers import lively_model, random_ids, small_config
from kernels import norm_probe
from kernels.norm_probe import Found, error
from thoughtbubbles import kernels
from thoughtbubbles.kernels import attention, gelu, launch, norm, ops, reach, sums
from thoughtbubbles.model.attention import PATHS, Update, reference_attention
from thoughtbubbles.model.block import Block, Residual
from thoughtbubbles.model.layout import Layout, Reach
from thoughtbubbles.model.rope import Rotary, rotary, rotate
from thoughtbubbles.model.streams import streams_up_to

TILES = [(32, 16), (16, 32), (16, 16), (32, 32)]
GELU_TILES = [(2, 4, 16, 3), (4, 1, 32, 2), (1, 2, 64, 5)]
WHOLE_ROWS = (1, 2, 8192, 4)


def set_tiles(turn: int) -> None:
    """Each kernel another tile, so that queries are more, fewer and as many as keys for all three."""
    reach.NEAR = (16, 32)[turn % 2]
    for shift, tiles in enumerate(
        (attention.FORWARD, attention.QUERY_GRADIENT, attention.KEY_GRADIENT, reach.WITH_NEAR)
    ):
        for size in tiles:
            tiles[size] = attention.Tile(*TILES[(turn + shift) % len(TILES)], 4, 1)
    attention.ROTATED_STREAMS = 8
    gelu.ROWS, gelu.BACKWARD_ROWS, gelu.COLUMNS, gelu.DEEP = GELU_TILES[turn % len(GELU_TILES)]
    sums.ROWS, sums.COLUMNS, launch.MULTIPROCESSORS = (4, 8, 16)[turn % 3], (16, 32)[turn % 2], (1, 2, 132)[turn % 3]
    sums.LAST_ROWS, sums.FEW = (4, 32, 8)[turn % 3], (8, 64)[turn % 2]


class Heads:
    """Random projections, positions and scores, and the way through the kernels and through the reference."""

    def __init__(
        self, streams: int, head: int, *, qk: bool = True, value: bool = True, n_head: int = 2, batch: int = 2,
        low: float = -6.0, high: float = 0.0, size: float = 1.0, dtype: torch.dtype = torch.float32,
        device: str = "cpu", is_bounded: bool = True, least: float | None = None, near: int | None = None,
        bubble: int = 4, n_unused: int = 0,
    ):  # fmt: skip
        """`least`: the bound of the key biases that the kernels are given; by default one that `is_bounded` decides.

        With `near`, forks have that reach; bubbles have at most `bubble` streams, and rows end with unused slots.
        """
        self.head, self.n_head, self.qk, self.value = head, n_head, qk, value
        self.least = least if least is not None else 0.0 if is_bounded else -math.inf
        width = n_head * head
        self.qkv = (size * torch.randn(batch, streams, 3 * width, device=device)).to(dtype)
        self.log_score = low + (high - low) * torch.rand(batch, streams, device=device)
        self.rotary = rotary(torch.rand(batch, streams, device=device).cumsum(1), head)
        self.upstream = torch.randn(batch, streams, width, device=device).to(dtype)
        self.bias = 0.5 * size * torch.randn(3 * width, device=device)
        self.reach = None if near is None else random_bubbles(batch, streams, n_unused, bubble, near, device)
        if n_unused:  # what they predict is not read
            self.upstream[:, -n_unused:] = 0

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in (self.qkv, self.bias, self.log_score)]

    def layout(self, log_score: Tensor) -> Layout:
        """Tables and scores in one dtype. Updates are gated as values are, where a test asks for it."""
        tables = Rotary(*(table.to(log_score.dtype) for table in self.rotary))
        key_bias = log_score / math.sqrt(self.head) if self.qk else None
        visible = None if self.reach is None else self.reach.visible()
        return Layout(tables, key_bias, log_score.exp() if self.value else None, reach=self.reach, visible=visible)

    def through_kernels(self) -> dict[str, Tensor]:
        qkv, bias, log_score = self.leaves()
        layout = self.layout(log_score)._replace(rotary=self.rotary)
        token, up_to, near = self.reach or (None, None, None)
        out, _ = ops.attention(
            qkv, bias, *layout.rotary, key_bias=layout.key_bias, value_gate=layout.value_gate, n_head=self.n_head,
            least_bias=self.least, token=token, up_to=up_to, reach=near,
        )  # fmt: skip
        return self._named(out, qkv, bias, log_score, layout)

    def exact(self) -> dict[str, Tensor]:
        qkv, bias, log_score = self.leaves(torch.float64)
        layout = self.layout(log_score)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in (qkv + bias).chunk(3, dim=-1))
        out = reference_attention(rotate(q, layout.rotary), rotate(k, layout.rotary), v, layout)
        return self._named(out.transpose(1, 2).flatten(2), qkv, bias, log_score, layout)

    def _named(self, out: Tensor, qkv: Tensor, bias: Tensor, log_score: Tensor, layout: Layout) -> dict[str, Tensor]:
        wanted = {"qkv": qkv, "bias": bias}
        if self.qk or self.value:
            wanted["log_score"] = log_score
        if self.qk:
            wanted["key_bias"] = layout.key_bias
        if self.value:
            wanted["value"] = layout.value_gate
        grads = dict(
            zip(wanted, torch.autograd.grad(out, list(wanted.values()), self.upstream.to(out.dtype)), strict=True)
        )
        if self.value:  # the gradient of a score of 0 does not matter: exp passes nothing on
            grads["value"] = grads["value"] * (self.log_score.exp() > 0)
        parts = zip("qkv", grads.pop("qkv").chunk(3, dim=-1), strict=True)  # none is hidden by a larger one
        grads |= {f"gradient of {name}": part for name, part in parts}
        return {"out": out.detach(), **grads}

    def errors(self, ours: dict[str, Tensor] | None = None) -> Found:
        """Relative to the norm of what they should be; unused slots are left out."""
        ours, exact = ours or self.through_kernels(), self.exact()
        used = slice(None) if self.reach is None else self.reach.token < self.reach.up_to.shape[1]
        chosen = {name: slice(None) if name == "bias" else used for name in exact}
        return {name: error(ours[name][chosen[name]], exact[name][chosen[name]]) for name in exact}


def random_bubbles(batch: int, streams: int, n_unused: int, bubble: int, near: int, device: str) -> Reach:
    """Every row has other bubbles; the longest row has T tokens."""
    n_used, rows = streams - n_unused, []
    for _ in range(batch):
        sizes = torch.randint(1, bubble + 1, (n_used,))
        rows.append(torch.arange(n_used).repeat_interleave(sizes)[:n_used])
    n_tokens = max(int(row[-1]) for row in rows) + 1
    unused = torch.full((n_unused,), n_tokens)
    token = torch.stack([torch.cat([row, unused]) for row in rows]).to(device)
    return Reach(token, streams_up_to(token, n_tokens), near)


def finite(found: dict[str, Tensor]) -> Found:
    return {f"{name} is finite": bool(x.isfinite().all()) for name, x in found.items()}


def vanished() -> Found:
    """Scores that exp takes to zero, and to the smallest numbers above it."""
    heads = Heads(20, 16)
    heads.log_score[:, 3:9] = -200.0
    heads.log_score[:, 12] = -103.0
    ours = heads.through_kernels()
    silent = bool((ours["gradient of v"][:, 3:9] == 0).all())
    return {**heads.errors(ours), **finite(ours), "no score, no gradient of v": silent}


def strong(streams: int = 21, **options: Any) -> Found:
    """Logits in the hundreds: too large to exponentiate, and too large for float32 to agree with float64."""
    return finite(Heads(streams + options.get("n_unused", 0), 16, size=12.0, **options).through_kernels())


def half() -> Found:
    """In float16 a weight without its key's bias would overflow, though the bias is bounded."""
    return finite(Heads(21, 16, low=-80.0, high=-60.0, dtype=torch.float16).through_kernels())


def unused_slots() -> Found:
    """The contents of unused slots at the end do not change a bit elsewhere."""
    heads, n_used = Heads(38, 16, batch=1), 19
    heads.upstream[:, n_used:] = 0
    results = []
    for log_score in (0.0, -1e4, 30.0):
        heads.log_score[:, n_used:] = log_score
        heads.qkv[:, n_used:] = 3 * torch.randn_like(heads.qkv[:, n_used:])
        found = heads.through_kernels()
        results.append({name: x if name == "bias" else x[:, :n_used] for name, x in found.items()})
    first = results[0]
    return {name: all(torch.equal(other[name], x) for other in results[1:]) for name, x in first.items()}


def reached(streams: int, **options: Any) -> Found:
    return Heads(streams, 16, **options).errors()


def unlimited_reach() -> Found:
    """With a reach of more tokens than there are, the kernels of reach.py compute causal attention."""
    heads = Heads(70, 16, near=1000)
    near = heads.through_kernels()
    heads.reach = None
    return {name: error(near[name], x) for name, x in heads.exact().items()}


def poisoned_neighbour(near: int | None = None) -> Found:
    """A row of the batch full of NaN, into whose rows the last tiles of the row before reach."""
    heads = Heads(33, 16, near=near)
    clean = heads.through_kernels()
    heads.qkv[1], heads.upstream[1], heads.log_score[1] = torch.nan, torch.nan, torch.nan
    found = heads.through_kernels()
    del found["bias"]  # a sum over all rows
    return {name: torch.equal(x[0], clean[name][0]) for name, x in found.items()}


def strided() -> Found:
    """Tensors that are views of others, and an upstream gradient that is one number for all."""
    heads = Heads(19, 16)
    heads.qkv, heads.log_score = heads.qkv.mT.contiguous().mT, heads.log_score.T.contiguous().T
    heads.rotary = Rotary(*(table.mT.contiguous().mT for table in heads.rotary))
    heads.upstream = torch.ones(()).expand_as(heads.upstream)
    return heads.errors()


def what_is_kept(near: int | None = None) -> Found:
    heads, sizes = Heads(130, 16, n_head=1, batch=1, near=near), []

    def count(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        first = heads.through_kernels()
    second = heads.through_kernels()
    return {
        "nothing of S × S": 0 < max(sizes) < 130 * 130,
        "same bits twice": all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True)),
    }


def operators() -> Found:
    """torch's own checks of a custom operator: shapes without data, no hidden aliasing, gradients under compilation."""
    heads = Heads(3, 16, n_head=1, batch=1)
    layout = heads.layout(heads.log_score)
    for key_bias, value in ((layout.key_bias, layout.value_gate), (None, None)):
        qkv, bias, _ = heads.leaves()
        torch.library.opcheck(
            torch.ops.thoughtbubbles.attention.default,
            (qkv, bias, *heads.rotary, key_bias, value, None, None, None, None, 1, None, True),
        )
        token, up_to, near = random_bubbles(1, 3, 0, 2, 0, "cpu")
        far, far_bias = torch.randn(3, 1, 1, 4, 16, requires_grad=True), None if key_bias is None else torch.randn(1, 4)
        tokens = torch.tensor([[0, 1, 3]]), torch.tensor([[1, 2, 2, 3]])
        for given in ((token, up_to, None, None), (*tokens, far, far_bias)):
            torch.library.opcheck(
                torch.ops.thoughtbubbles.attention.default,
                (qkv, bias, *heads.rotary, key_bias, value, *given, 1, near, True),
            )
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.library.opcheck(torch.ops.thoughtbubbles.gelu.default, (x, bias))
    x, bias = x.detach(), bias.detach()
    update, shift, weight, score = torch.randn_like(x), torch.randn_like(bias), torch.randn_like(bias), torch.rand(3)
    form, add_norm = (1e-5, torch.float32), torch.ops.thoughtbubbles.add_norm
    for given in ((update, shift, score), (update, None, None), (None, None, None)):
        torch.library.opcheck(add_norm.default, (x, *given, weight, bias, *form))
        _, h, mean, rstd = add_norm(x, *given, weight, bias, *form)
        for later in (x, None):
            dtype = None if given[0] is None else torch.float32
            torch.library.opcheck(
                torch.ops.thoughtbubbles.add_norm_backward.default,
                (h, later, x, *given, weight, mean, rstd, dtype is None, dtype),
            )
    return {"hold": True}


def block(head: int, *, head_gate: bool = False) -> Found:
    """A full block on the kernels, as if the CPU were a GPU, against the reference path in float64."""
    heads = Heads(21, head)
    module = Block(small_config(width=2 * head, n_head=2, head_gate=head_gate))
    x = torch.randn(2, 21, 2 * head)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain = module_results(module.double(), x.double(), heads.layout(heads.log_score.double()), "reference")
    with as_on_a_gpu():
        ours = module_results(module.float(), x, heads.layout(heads.log_score), "fused")
    return {name: error(ours[name], exact) for name, exact in plain.items()}


def feedback(n_tokens: int, lengths: list[int] | None = None, **changes: Any) -> Found:
    """Originals first, then forks, on the kernels, against the reference path in float64."""
    form: dict[str, Any] = {"fork_layers": (1,), "fork_reach": 0, "feedback": True, "merge": "forks"}
    shape = {"n_layer": 3, "width": 32, "n_head": 2, "block_size": n_tokens}
    config = small_config(**{**shape, **form, **changes})
    ids = random_ids(config, 2, n_tokens)
    found = []
    for dtype, path in ((torch.float64, "reference"), (torch.float32, "fused")):
        model = lively_model(config, attention=path).to(dtype)
        with as_on_a_gpu() if path == "fused" else nullcontext():
            out = model(ids, targets=ids.roll(-1, 1), lengths=lengths)
            out.loss.backward()
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        found.append({"loss": out.loss.detach(), **dict(zip(names, gradients, strict=True))})
        n_originals = sum(lengths or [n_tokens] * 2)
        assert (out.streams.token < n_tokens).sum() - n_originals > n_originals // 4, "forks"
    exact, ours = found
    return {name: error(ours[name], each) for name, each in exact.items() if each.norm() > 0}


def checkpointed() -> Found:
    """A block under activation checkpointing has the bits of one that keeps everything."""
    heads = Heads(21, 16)
    module, x = Block(small_config(width=32, n_head=2)), torch.randn(2, 21, 32)
    layout = heads.layout(heads.log_score)
    with as_on_a_gpu():
        kept = module_results(module, x, layout, "fused")
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
        again = module_results(module, x, layout, "fused")
    return {name: torch.equal(again[name], found) for name, found in kept.items()}


@contextmanager
def as_on_a_gpu(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Iterator[None]:
    """Blocks take their kernels on the CPU too, for products in these dtypes."""
    before = kernels.for_blocks
    kernels.for_blocks = lambda device, dtype: dtype in dtypes
    try:
        yield
    finally:
        kernels.for_blocks = before


def module_results(module: Block, x: Tensor, layout: Layout, path: str) -> dict[str, Tensor]:
    """What a block adds to its input, and all gradients. Updates are gated as values are."""
    layout = layout._replace(gate=layout.value_gate)
    x = x.detach().requires_grad_()
    waiting = Update(x.detach().roll(1, 0).requires_grad_())
    added = module(Residual(x, waiting), layout, PATHS[path]).total(layout.gate) - x
    names, parameters = zip(*module.named_parameters(), strict=True)
    upstream = torch.arange(added.numel(), device=x.device, dtype=torch.float64).sin().view_as(added)
    grads = torch.autograd.grad(added, (x, waiting.value, *parameters), upstream.to(added.dtype))
    return {"added": added.detach(), **dict(zip(("x", "update", *names), grads, strict=True))}


def on_a_grid(*shape: int, device: str = "cpu") -> Tensor:
    """Multiples of 1/256 within ±6: the sum of two is exact in float32."""
    return torch.randint(-6 * 256, 6 * 256 + 1, shape, device=device) / 256


def gelu_results(x: Tensor, bias: Tensor, upstream: Tensor, form: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
    y = form(x, bias)
    return [y.detach(), *torch.autograd.grad(y, (x, bias), upstream.to(y.dtype))]


def plain_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def gelus(*shape: int) -> Found:
    given = (on_a_grid(*shape), on_a_grid(shape[-1]), 2 * torch.rand(shape) - 1)
    ours = gelu_results(*given, ops.gelu)
    exact = gelu_results(*(x.double() for x in given), plain_gelu)
    worst = [float((a.double() - b).abs().max()) for a, b in zip(ours, exact, strict=True)]
    return {"y, absolute": worst[0], "x, absolute": worst[1], "bias": error(ours[2], exact[2])}


class Recorded:
    """A kernel that notes the forms it is launched in: dtypes and compile-time constants."""

    def __init__(self, kernel: Any, forms: set[Any]):
        self.kernel, self.forms = kernel, forms

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            dtypes = tuple(str(getattr(arg, "dtype", type(arg).__name__)) for arg in args)
            self.forms.add((self.kernel.fn.__name__, dtypes, tuple(sorted(constants.items()))))
            return self.kernel[grid](*args, **constants)

        return launch


def compiled_ahead(**changes: Any) -> Found:
    """What is compiled in the background when a run starts is what a step of it launches."""
    from thoughtbubbles.model.config import ModelConfig
    from thoughtbubbles.model.transformer import Thoughtbubbles
    from thoughtbubbles.train.kernel_warmup import run_two_blocks

    names = {
        norm: ("_add_norm", "_add_norm_backward"),
        attention: ("rotate_qkv", "_attend_forward", "_query_gradient", "_key_gradient"),
        reach: ("_attend_forward", "_query_gradient", "_far_key_gradient", "_near_key_gradient"),
        gelu: ("_gelu", "_gelu_backward"),
        sums: ("_column_sums",),
    }
    shape: dict[str, Any] = {"n_layer": 4, "n_head": 2, "width": 32, "vocab_size": 64, "block_size": 16}
    config = ModelConfig(**{**shape, "fork_layers": (1, 3), "merge": "residual", **changes})
    model, ids = Thoughtbubbles(config), torch.randint(64, (2, 16))
    forms: dict[str, set[Any]] = {"ahead": set(), "a step": set()}
    before = {(module, name): getattr(module, name) for module, every in names.items() for name in every}
    is_for_blocks, kernels.for_blocks = kernels.for_blocks, lambda device, dtype: True
    try:
        for when, noted in forms.items():
            for (module, name), kernel in before.items():
                setattr(module, name, Recorded(kernel, noted))
            if when == "ahead":
                run_two_blocks(config, torch.device("cpu"), torch.float32)
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(ids, targets=ids).loss
                loss.backward()
    finally:
        kernels.for_blocks = is_for_blocks
        for (module, name), kernel in before.items():
            setattr(module, name, kernel)
    missing = forms["a step"] - forms["ahead"]
    print(*sorted(map(str, missing)), sep="\n", file=sys.stderr)
    launched = {name for name, *_ in forms["a step"]}
    expected = {
        name
        for module, every in names.items()
        for name in every
        if module is not reach or config.fork_reach is not None
    }
    return {"a step launches them": launched == expected, "no form is missing": not missing}


def gelu_everywhere() -> Found:
    """Over [−12, 12], without a bias; the slope too."""
    x = torch.linspace(-12, 12, 6001).expand(2, -1)
    given = (x, torch.zeros(6001), torch.ones_like(x))
    gelu.ROWS, gelu.BACKWARD_ROWS, gelu.COLUMNS, gelu.DEEP = WHOLE_ROWS
    ours = gelu_results(*given, ops.gelu)
    exact = gelu_results(*(x.double() for x in given), plain_gelu)
    return {
        n: float((a.double() - b).abs().max())
        for n, a, b in zip(("y, absolute", "x, absolute"), ours, exact, strict=False)
    }


def cases() -> dict[str, Callable[[], Found]]:
    gates = [(True, True), (True, False), (False, True), (False, False)]
    lengths = (1, 5, 16, 33, 64, 70, 130)
    sizes = [(streams, 16, qk, value) for streams in lengths for qk, value in gates]
    sizes += [(streams, head, True, True) for streams in lengths for head in (32, 64)]
    return {
        "alone": lambda: Heads(1, 16, qk=False).errors(),
        "a full tile": lambda: Heads(32, 16, value=False).errors(),
        "several tiles": lambda: Heads(70, 16).errors(),
        "not bounded": lambda: Heads(40, 16, is_bounded=False).errors(),
        "bounded too low": lambda: Heads(40, 16, low=-450.0, high=-400.0, value=False, least=-112.5).errors(),
        "all low": lambda: Heads(33, 16, low=-60.0, high=-55.0).errors(),
        "private forks": lambda: Heads(70, 16, near=0).errors(),
        "forks of near tokens": lambda: Heads(70, 16, near=3, n_unused=9).errors(),
        "vanished": vanished,
        "strong": strong,
        "unused slots": unused_slots,
        "poisoned neighbour": poisoned_neighbour,
        "block": lambda: block(16),
        "block with gates of heads": lambda: block(16, head_gate=True),
        "checkpointed": checkpointed,
        "gelu": lambda: gelus(5, 7, 21),
        "gelu everywhere": gelu_everywhere,
        **{str(size): lambda size=size: Heads(*size[:2], qk=size[2], value=size[3]).errors() for size in sizes},
        **{
            f"reach {near} of {streams}, {unused} unused, {gates[i % 4]}": partial(
                reached, streams, near=near, n_unused=unused, bubble=bubble, qk=gates[i % 4][0], value=gates[i % 4][1]
            )
            for i, (streams, unused, bubble) in enumerate(((1, 0, 1), (16, 0, 8), (33, 20, 3), (70, 1, 8), (64, 0, 2)))
            for near in (0, 2, 40)
        },
        "reach, not bounded": lambda: Heads(70, 16, near=0, is_bounded=False).errors(),
        "reach, poisoned neighbour": lambda: poisoned_neighbour(near=1),
        **{f"reach, strong, {n} unused": lambda n=n: strong(near=3, n_unused=n) for n in (5, 13, 21, 30)},
        "reach, what is kept": lambda: what_is_kept(near=0),
        "a reach without end is none": unlimited_reach,
        **{f"low, {s} streams": lambda s=s: Heads(s, 32, low=-60.0).errors() for s in (16, 70)},
        "very low, not bounded": lambda: Heads(70, 16, low=-450.0, high=-400.0, value=False, is_bounded=False).errors(),
        **{f"strong {i}": strong for i in range(4)},
        **{f"unused slots {i}": unused_slots for i in range(4)},
        "strided": strided,
        "half": half,
        "what is kept": what_is_kept,
        "operators": operators,
        "block, heads of 32": lambda: block(32),
        **norm_probe.cases(),
        **{
            f"feedback {given}": lambda given=given: feedback(**given)
            for given in (
                {"n_tokens": 16},
                {"n_tokens": 40, "fork_reach": 7, "head_gate": True},
                {"n_tokens": 32, "fork_reach": 7, "lengths": [32, 13], "budget": 1.5, "score_bias": 1},
                {"n_tokens": 40, "fork_reach": 34},
                {"n_tokens": 40, "budget": 1.5, "head_gate": True},
                {"n_tokens": 33, "lengths": [33, 9], "merge": "residual"},
                {"n_tokens": 24, "gate_qk": False, "gate_v": False},
                {"n_tokens": 21, "lengths": [1, 20], "score_bias": 60, "head_gate": True},
                {"n_tokens": 40, "lengths": [40, 19], "fork_reach": 9, "scores": False, "head_gate": True},
            )
        },
        "compiled ahead": compiled_ahead,
        "compiled ahead, private forks": lambda: compiled_ahead(fork_reach=0),
        "compiled ahead, feedback": lambda: compiled_ahead(fork_reach=0, feedback=True, fork_layers=(2,)),
        "compiled ahead, feedback, near forks": lambda: compiled_ahead(fork_reach=3, feedback=True, fork_layers=(2,)),
        **{f"gelu {shape}": lambda shape=shape: gelus(*shape) for shape in ((1, 8), (37, 100), (300, 33), (3, 5, 129))},
    }


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # which fills every new buffer with NaN: none is right by luck
    assert torch.empty(1).isnan().all()
    assert torch.ones(1).new_empty(1).isnan().all()
    part, parts = map(int, sys.argv[1:] or (0, 1))
    found = {}
    for turn, (name, case) in enumerate(cases().items()):
        if turn % parts != part:
            continue
        torch.manual_seed(turn)
        set_tiles(turn)
        found[name] = case()
    json.dump(found, sys.stdout)
