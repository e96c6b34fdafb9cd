"""RunConfig: everything that defines a training run, checked once. Field docstrings are the help text of the command.

A run stays the same run when it is resumed after a kill, on another number of devices or with other logging:
`MAY_CHANGE` lists the fields that may differ between a start and a resume.
"""

import math
import random
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from thoughtbubbles.data.loader import Source
from thoughtbubbles.generate.sample import is_temperature
from thoughtbubbles.model.budget import Budget, brief
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import cost
from thoughtbubbles.train.budget import is_plain, with_budget
from thoughtbubbles.train.fields import LARGEST, Count, check_kinds, option

Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "bf16", "float32", "float64"]
ResidualDtype = Literal["float32", "bf16"]
Schedule = Literal["cosine", "wsd", "constant"]
Optimizer = Literal["adamw", "muon"]

# The smallest and largest sensible value of each integer field. Larger ones would overflow, or the run would never end.
BOUNDS = {
    "tokens": (1, LARGEST),
    "tokens_per_step": (1, 2**30),
    "seed": (-(2**63), 2**63 - 1),
    "optim.max_skipped": (0, 10**9),
    "save.every": (0, LARGEST),
    "save.keep": (1, 10**6),  # at least one, or nothing could be resumed
    "eval.every": (0, LARGEST),
    "eval.tokens": (1, LARGEST),
    "eval.sample_tokens": (0, 2**24),
    "log.every": (1, LARGEST),
}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    mixture: tuple[str, ...] = ("synthetic",)
    """Prepared folders, each as DIR or DIR=WEIGHT (its share of the rows). `synthetic` (byte text from a formula),
    `stdlib` (the documentation in Python's standard library) and made-up tasks such as `task:khop` need no
    preparation."""
    val: tuple[str, ...] = ()
    """Prepared folders to validate on instead of the `val` splits of the mixture: the `val` split of each, or all of it
    if it has none. They must use the same tokenizer."""
    verify: bool = True
    """Check every shard's checksum before step 0."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    kind: Optimizer = "adamw"
    """muon: Muon for the weight matrices of the blocks, AdamW for everything else."""
    lr: float = 2.5e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates for the first and second moment."""
    weight_decay: float = 0.1
    """Weight decay of tensors with two or more dimensions."""
    clip: float = 1.0
    """Clip the global gradient norm to this value; 0 disables clipping."""
    schedule: Schedule = "cosine"
    """Learning rate schedule after the warm-up. wsd: constant, then a linear decay at the end (see `decay`)."""
    warmup: float = 0.01
    """Fraction of the steps over which the learning rate rises linearly from 0."""
    decay: float = 0.2
    """Fraction of the steps at the end over which wsd decays."""
    floor: float = 0.1
    """Final learning rate of cosine and wsd, as a fraction of the peak."""
    max_skipped: int = 10
    """Stop the run when more steps in a row than this were skipped for a loss or gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    precision: Precision = "auto"
    """Dtype of matrix products; weights, scores and loss stay float32. auto: bf16 on CUDA, float32 elsewhere."""
    residual: ResidualDtype = "float32"
    """Dtype of the residual streams between blocks and of their gradients. bf16 needs --compute.precision bf16; it
    saves memory and bandwidth. Checkpoints do not store it: a loaded model uses the dtype of its weights."""
    compile: bool | None = None
    """torch.compile for fork layers, positions and the loss, and for blocks unless they are replayed as a CUDA graph
    of our own kernels. On by default on CUDA only."""
    graph: bool | None = None
    """Replay forward and backward as one CUDA graph. On by default on CUDA, unless the run was started by torchrun."""
    activation_checkpointing: bool = False
    """Recompute the blocks' activations in the backward pass, to save memory."""
    micro_batch_size: int | None = None
    """Rows per forward pass on one device; the rest is gradient accumulation. Default: all rows of the device."""

    def compiles(self, device: str) -> bool:
        return device == "cuda" if self.compile is None else self.compile


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    every: int = 1000
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Number of newest checkpoints to keep, in addition to milestones."""
    milestones: tuple[float, ...] = ()
    """Fractions of the run, such as 0.5, whose checkpoints are never deleted."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int = 1000
    """Steps between evaluations on the validation split; 0 evaluates at the end only."""
    tokens: Count = 1 << 20
    """Maximum number of validation tokens per source."""
    sample_tokens: int = 64
    """Tokens to generate per prompt at every evaluation; 0 generates no samples."""
    prompts: tuple[str, ...] = ()
    """Prompts of the samples. Default: the first tokens of each source's validation text."""
    temperature: float = 0.8
    """Sampling temperature."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: int = 10
    """Steps between log lines. metrics.jsonl always gets every step."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device, for MFU. Known for common GPUs."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs the extra `wandb`)."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run's folder (needs the extra `tensorboard`)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    """Name of the run in logs."""
    model: ModelConfig
    """Model shape."""
    tokens: Count
    """Tokens to train on, rounded up to whole steps."""
    tokens_per_step: Count
    """Tokens per optimizer step over all devices (the batch size): a multiple of the context length (`block_size`)."""
    budgets: tuple[float, ...] = ()
    """Budgets (streams per token) to train with, such as 1 1.5 2 4: each step draws one at random, so that the model
    works with all of them. Default: always the model's own. Validation uses that one, once tokens may fork."""
    forks_from: float = 0.0
    """Fraction of the run after which tokens may fork: until then training and validation have budget 1, which takes
    less time. Without scores, budget 1 is the plain model with the same blocks."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training and validation data."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning rate."""
    device: Device = "auto"
    """auto: cuda if available, else mps, else cpu."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """Precision, compilation and memory."""
    save: SaveConfig = field(default_factory=SaveConfig)
    """Checkpoints."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Validation loss and samples."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""
    profile: bool = False
    """Profile a few steps after the warm-up; writes a trace and a table of where the time goes to the run's folder."""
    seed: int = 0
    """Seed of the initial weights, the data order and the samples."""
    out: Path | None = None
    """The run's folder. Default: runs/NAME."""
    init_from: Path | None = None
    """Start from the weights of a model folder, a checkpoint or a run. Fork layers missing there are initialized."""

    def __post_init__(self) -> None:
        check_kinds(self)
        for group in ("data", "optim", "compute", "save", "eval", "log"):
            check_kinds(getattr(self, group), prefix=f"{group}.")
        for name, (least, most) in BOUNDS.items():
            value = self._value(name)
            _require(least <= value <= most, name, value, f"give a whole number from {least} to {most:,}")
        block = self.model.block_size
        _require(
            self.tokens_per_step % block == 0,
            "tokens_per_step",
            self.tokens_per_step,
            f"give a multiple of the context length (--model.block-size), {block}",
        )
        _require(bool(self.data.mixture), "data.mixture", self.data.mixture, "name at least one prepared folder")
        for entry in self.data.mixture:
            Source.parse(entry)
        self._check_optim()
        self._check_budgets()
        for share in self.save.milestones:
            _require(0 < share <= 1, "save.milestones", share, "give fractions of the run between 0 and 1, such as 0.5")
        _require(self.eval.tokens >= block, "eval.tokens", self.eval.tokens, f"give at least one row, {block}")
        heat = self.eval.temperature
        _require(is_temperature(heat), "eval.temperature", heat, "give 0 (greedy), or from 0.001 to a million")
        peak = self.log.peak_tflops
        _require(peak is None or 0 < peak < math.inf, "log.peak_tflops", peak, "give a positive number")
        micro = self.compute.micro_batch_size
        _require(
            micro is None or (micro >= 1 and self.rows % micro == 0),
            "compute.micro_batch_size",
            micro,
            f"give a divisor of the {self.rows} rows of a step",
        )

    def _check_optim(self) -> None:
        optim = self.optim
        _require(0 < optim.lr < math.inf, "optim.lr", optim.lr, "give a positive number")
        for name in ("warmup", "decay", "floor"):
            value = getattr(optim, name)
            _require(0 <= value <= 1, f"optim.{name}", value, "give a fraction between 0 and 1")
        for beta in optim.betas:
            _require(0 <= beta < 1, "optim.betas", optim.betas, "give two numbers from 0 to below 1")
        _require(0 <= optim.clip < math.inf, "optim.clip", optim.clip, "give 0 (no clipping) or more")
        _require(0 <= optim.weight_decay < math.inf, "optim.weight_decay", optim.weight_decay, "give 0 or more")

    def _check_budgets(self) -> None:
        _require(
            not self.budgets or bool(self.model.fork_layers),
            "budgets",
            self.budgets,
            "a model without fork layers has no budget; give --budgets without values",
        )
        for budget in self.budgets:
            if not is_plain(self.model, budget):
                self.model.check_budget(Budget.of(budget, name="--budgets"), name="--budgets")
        begin = self.forks_from
        _require(0 <= begin <= 1, "forks_from", begin, "give a fraction of the run between 0 and 1, such as 0.75")
        _require(
            begin == 0 or bool(self.model.fork_layers),
            "forks_from",
            begin,
            "a model without fork layers never forks; leave it 0",
        )

    def _value(self, name: str) -> Any:
        group, _, field_name = name.rpartition(".")
        return getattr(getattr(self, group) if group else self, field_name)

    @property
    def rows(self) -> int:
        """Rows per step over all devices."""
        return self.tokens_per_step // self.model.block_size

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.tokens_per_step)

    def budget_of(self, step: int) -> float | None:
        """The budget of step 0, 1, …, which depends only on it and on the seed; None: the model's own."""
        if step < self.steps_before_forks:
            return 1.0
        if not self.budgets:
            return None
        return random.Random(f"budget {self.seed} {step}").choice(self.budgets)

    def validation_budget(self, done: int) -> float | None:
        """After `done` steps; None: the model's own, as always at the end. Untrained forks would only disturb."""
        is_before = self.forks_from > 0 and done <= self.steps_before_forks
        return 1.0 if is_before and done < self.steps else None

    @property
    def flops_per_row(self) -> float:
        """Forward and backward of a row, as counted everywhere; with several budgets, the mean over the run."""
        begin, last = self.steps_before_forks, self.steps - 1
        before, after = begin / self.steps, (self.steps - begin) / self.steps
        return sum(share * self.flops_per_row_in(step) for share, step in ((before, 0), (after, last)) if share)

    def flops_per_row_in(self, step: int) -> float:
        """The same for the steps from 0 on before forks begin, or for those after it."""
        budgets = (1,) if step < self.steps_before_forks else self.budgets or (self.model.budget,)
        return fmean(cost(with_budget(self.model, budget)).flops for budget in budgets)

    @property
    def steps_before_forks(self) -> int:
        return round(self.forks_from * self.steps)

    @property
    def folder(self) -> Path:
        return Path("runs") / self.name if self.out is None else self.out

    @property
    def milestone_steps(self) -> set[int]:
        """Counted in finished steps."""
        return {max(1, round(share * self.steps)) for share in self.save.milestones}

    def logs_after(self, step: int) -> bool:
        """`step` counts finished steps, here and below."""
        return step % self.log.every == 0 or step == self.steps

    def saves_after(self, step: int) -> bool:
        return step == self.steps or step in self.milestone_steps or _is_multiple(step, self.save.every)

    def evaluates_after(self, step: int) -> bool:
        return step == self.steps or _is_multiple(step, self.eval.every)

    def as_dict(self) -> dict[str, Any]:
        """As a JSON-serializable dictionary."""
        return _plain(asdict(self))


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The fields, in words, in which two configs (as dictionaries) define different runs.

    A field that `before` does not have yet, since it is newer than that run, had its default value.
    """
    found = []
    for own in fields(RunConfig):
        if (name := own.name) in MAY_CHANGE:
            continue
        old, new = before.get(name, _default(own)), now.get(name)
        if name == "model" and isinstance(old, dict):
            old = {each.name: _default(each) for each in fields(ModelConfig)} | old
        if isinstance(old, dict) and isinstance(new, dict):
            found += [
                f"{name}.{key} was {old.get(key)!r}, is {new.get(key)!r}"
                for key in sorted(old.keys() | new.keys())
                if f"{name}.{key}" not in MAY_CHANGE and old.get(key) != new.get(key)
            ]
        elif old != new:
            found.append(f"{name} was {old!r}, is {new!r}")
    return found


# Fields that the trained weights do not depend on: where the run happens, what it logs, saves and evaluates.
MAY_CHANGE = {
    *("name", "out", "init_from", "save", "eval", "log", "profile", "optim.max_skipped"),
    "data",  # compared by content, see `RunData.fingerprints`
    *("device", "compute.compile", "compute.graph", "compute.activation_checkpointing", "compute.micro_batch_size"),
}


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _default(own: Field[Any]) -> Any:
    return None if own.default is MISSING else _plain(own.default)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _require(condition: bool, name: str, value: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{option(name)} {brief(value)}: {remedy}")
