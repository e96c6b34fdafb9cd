"""Input validation: arguments of `forward` are checked once, before any work. Errors name the value and the remedy."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from thoughtbubbles.model.budget import Budget, BudgetLike, brief
from thoughtbubbles.model.config import FIXED_BUDGET, BudgetMode, ModelConfig, Selection
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.model.selection import Rule

WANTED = ("log_probs", "logits", "next_logits", "token_nll")
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # not bool


class Inputs(NamedTuple):
    ids: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"] | None
    lengths: Int[Tensor, "B"]
    rule: Rule


def check(
    config: ModelConfig,
    ids: Tensor,
    *,
    targets: Tensor | None,
    lengths: Tensor | Sequence[int] | None,
    budget: BudgetLike | Budget | None,
    selection: str | None,
    budget_mode: str | None = None,
    want: Collection[str],
    trace: bool | str,
    training: bool,
) -> Inputs:
    """Validates all arguments. Ids and targets past a row's length become harmless: id 0, ignored target.

    Values inside tensors are checked too, unless that would synchronise with a GPU in training or break a graph.
    """
    _check_whole_numbers("ids", ids)
    batch, n_tokens = ids.shape
    if n_tokens > config.block_size:
        raise ValueError(
            f"ids have {n_tokens} tokens per row, more than block_size = {config.block_size}: "
            "shorten the rows or use a model with a larger block_size"
        )
    if targets is not None:
        _check_whole_numbers("targets", targets)
        if targets.shape != ids.shape:
            raise ValueError(f"targets have shape {tuple(targets.shape)}, ids {tuple(ids.shape)}: they must be equal")
    _check_words(want, trace, has_targets=targets is not None)
    rule = rule_of(config, batch, budget=budget, selection=selection, budget_mode=budget_mode)

    look_inside = not torch.compiler.is_compiling() and (ids.device.type == "cpu" or not training)
    row_lengths = _row_lengths(lengths, ids, look_inside)
    padding = torch.arange(n_tokens, device=ids.device) >= row_lengths[:, None]
    ids = ids.long().masked_fill(padding, 0)
    targets = None if targets is None else targets.long().masked_fill(padding, IGNORED)
    if look_inside:
        _check_range("ids", ids, config.vocab_size)
        if targets is not None:
            _check_range("targets", targets.masked_fill(targets == IGNORED, 0), config.vocab_size)
    return Inputs(ids, targets, row_lengths, rule)


def _check_whole_numbers(name: str, values: Tensor) -> None:
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} is a {type(values).__name__}: give a tensor, e.g. torch.tensor({name})")
    if values.ndim != 2 or values.dtype not in (torch.int64, torch.int32) or 0 in values.shape:
        raise ValueError(
            f"{name} of shape {tuple(values.shape)} and {values.dtype}: give whole numbers (int64) of shape "
            "(batch, tokens), at least one of each"
        )


def _check_words(want: Collection[str], trace: bool | str, *, has_targets: bool) -> None:
    if not isinstance(want, (tuple, list, set, frozenset)):
        raise ValueError(f"want = {brief(want)}: give a tuple of names, such as ('log_probs',)")
    for name in want:
        if not isinstance(name, str) or name not in WANTED:
            raise ValueError(f"want has {brief(name)}: choose from {WANTED}")
    if "token_nll" in want and not has_targets:
        raise ValueError("want has 'token_nll' but there are no targets: pass targets= as well")
    if not isinstance(trace, (bool, str)) or trace not in (False, True, "attention"):
        raise ValueError(f"trace = {brief(trace)}: choose False, True or 'attention'")


def check_choice(name: str, value: object, kind: object) -> None:
    """`kind` is a Literal of strings; None is the default."""
    if value is not None and (not isinstance(value, str) or value not in get_args(kind)):
        raise ValueError(f"{name} = {brief(value)}: choose one of {get_args(kind)}")


def rule_of(
    config: ModelConfig,
    batch: int,
    *,
    budget: BudgetLike | Budget | None,
    selection: str | None,
    budget_mode: str | None,
) -> Rule:
    check_choice("selection", selection, Selection)
    check_choice("budget_mode", budget_mode, BudgetMode)
    if not config.scores and (selection or "causal") != "causal":
        raise ValueError(f"selection = {selection!r}: without scores this model keeps all forks; leave it out")
    if (budget_mode or config.budget_mode) == "fixed" and (selection or config.selection) == "causal":
        raise ValueError(
            f"{FIXED_BUDGET} requires block selection: use budget_mode='proportional' with selection='causal'"
        )
    exact = None if budget is None else Budget.of(budget)
    if exact is not None:
        if exact.rows not in (1, batch):
            raise ValueError(
                f"budget has {exact.rows} numbers for a batch of {batch} rows: give one, or one for each row"
            )
        config.check_budget(exact)
    return Rule.of(config, budget=exact, selection=selection, budget_mode=budget_mode)  # type: ignore[arg-type]


def _row_lengths(lengths: Tensor | Sequence[int] | None, ids: Tensor, look_inside: bool) -> Int[Tensor, "B"]:
    batch, n_tokens = ids.shape
    if lengths is None:
        return torch.full((batch,), n_tokens, device=ids.device)
    look_inside = look_inside or not isinstance(lengths, Tensor)  # Python numbers can always be checked
    lengths = whole_numbers("lengths", lengths, f"one whole number for each of the {batch} rows")
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths have shape {tuple(lengths.shape)} and {lengths.dtype}: "
            f"give one whole number for each of the {batch} rows"
        )
    if look_inside and not torch.compiler.is_compiling():
        wrong = [n for n in lengths.tolist() if not 1 <= n <= n_tokens]
        if wrong:
            raise ValueError(f"lengths has {wrong[0]}: each row has from 1 to {n_tokens} tokens here; omit empty rows")
    return lengths.to(device=ids.device, dtype=torch.int64)


def whole_numbers(name: str, values: object, wanted: str) -> Tensor:
    """`values` as an integer tensor, converted if necessary."""
    if not isinstance(values, Tensor):
        try:
            if isinstance(values, (list, tuple)) and any(getattr(value, "shape", ()) != () for value in values):
                raise ValueError  # a list of arrays, for which torch warns
            tensor = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # text, rows of unequal length, 10^30, …
            raise ValueError(f"{name} = {brief(values)}: give {wanted}") from None
    else:
        tensor = values
    if tensor.dtype not in WHOLE:
        raise ValueError(f"{name} have shape {tuple(tensor.shape)} and {tensor.dtype}: give {wanted}")
    return tensor


def _check_range(name: str, values: Tensor, vocab_size: int) -> None:
    low, high = (int(v) for v in torch.aminmax(values))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} has {low if low < 0 else high}: the vocabulary has ids from 0 to {vocab_size - 1}"
            + (f", and {IGNORED} marks a target to ignore" if name == "targets" else "; is it the right tokenizer?")
        )
