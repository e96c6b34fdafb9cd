"""RunConfig: everything that defines a training run, checked once. Field docstrings are the help text of the command.

A run is the same run wherever it goes on: on another number of devices, after a kill, with other logging. `same_run`
says which fields may change between a start and a resume.
"""

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from thoughtbubbles.data.loader import Source
from thoughtbubbles.generate.sample import is_temperature
from thoughtbubbles.model.budget import brief
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.train.fields import LARGEST, Count, check_kinds, option

Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "bf16", "float32", "float64"]
Residual = Literal["float32", "bf16"]
Schedule = Literal["cosine", "wsd", "constant"]
Optimizer = Literal["adamw", "muon"]

# Whole numbers: the least and the most that makes sense. Larger ones would overflow somewhere, or never end.
BOUNDS = {
    "tokens": (1, LARGEST),
    "tokens_per_step": (1, 2**30),
    "seed": (-(2**63), 2**63 - 1),
    "optim.max_skipped": (0, 10**9),
    "save.every": (0, LARGEST),
    "save.keep": (1, 10**6),  # without one, nothing could be resumed
    "eval.every": (0, LARGEST),
    "eval.tokens": (1, LARGEST),
    "eval.sample_tokens": (0, 2**24),
    "log.every": (1, LARGEST),
}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    mixture: tuple[str, ...] = ("synthetic",)
    """Prepared folders, each as DIR or DIR=WEIGHT (its share of the rows); `synthetic` and `stdlib` are made on the
    spot: byte text from a formula, and the documentation inside Python's own standard library."""
    val: tuple[str, ...] = ()
    """Prepared folders to validate on, in place of the `val` splits of the mixture: the `val` split of each, or all of
    it where it has none. Made with the same tokenizer."""
    verify: bool = True
    """Check every shard's checksum before step 0."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    kind: Optimizer = "adamw"
    """muon: torch.optim.Muon for the matrices of the blocks, AdamW for everything else."""
    lr: float = 2.5e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.1
    """Of tensors with two dimensions or more."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    schedule: Schedule = "cosine"
    """Of the learning rate after the warm-up. wsd: constant, then a linear fall over the last part (`decay`)."""
    warmup: float = 0.01
    """Share of the steps in which the learning rate rises from 0."""
    decay: float = 0.2
    """Share of the steps at the end in which wsd falls."""
    floor: float = 0.1
    """Share of the peak at which cosine and wsd end."""
    max_skipped: int = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite, before the run stops."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    precision: Precision = "auto"
    """Of matrix products; weights, scores and loss stay float32. auto: bf16 on CUDA, float32 elsewhere."""
    residual: Residual = "float32"
    """Of the streams between blocks, and of their gradients. bf16 goes with bf16 products: less memory, and less to
    move. A checkpoint does not know of it: elsewhere its model has the dtype of its weights."""
    compile: bool | None = None
    """torch.compile for fork layers, positions and the loss, and for blocks where they are not replayed as a CUDA graph
    of our own kernels. By default on CUDA only."""
    graph: bool | None = None
    """Replay forward and backward as one CUDA graph. By default on CUDA, where torchrun has not started the run."""
    activation_checkpointing: bool = False
    """Activation checkpointing: blocks are computed again in the backward, for less memory."""
    micro_batch_size: int | None = None
    """Rows of one forward on one device; gradients add up over the rest. All of a device's rows by default."""


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    every: int = 1000
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Checkpoints to keep besides milestones."""
    milestones: tuple[float, ...] = ()
    """Shares of the run after which a checkpoint is kept for good, such as 0.5."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int = 1000
    """Steps between evaluations on the validation split; 0 evaluates at the end only."""
    tokens: Count = 1 << 20
    """Validation tokens of each source to use, at most."""
    sample_tokens: int = 64
    """Tokens to write after each prompt at every evaluation; 0 writes none."""
    prompts: tuple[str, ...] = ()
    """What samples begin with; by default the first tokens of each source's validation text."""
    temperature: float = 0.8
    """Of the samples."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: int = 10
    """Steps between log lines. Every step goes to metrics.jsonl all the same."""
    peak_tflops: float | None = None
    """What MFU is measured against, for each device; known for common GPUs."""
    wandb: str | None = None
    """Project to log to with Weights & Biases (extra `wandb`)."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run's folder (extra `tensorboard`)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    """What the run is called in logs."""
    model: ModelConfig
    """The model's shape."""
    tokens: Count
    """Tokens to train on, rounded up to whole steps."""
    tokens_per_step: Count
    """Tokens of one optimizer step over all devices: a multiple of the block size."""
    data: DataConfig = field(default_factory=DataConfig)
    """What to learn from."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How to learn."""
    device: Device = "auto"
    """auto: cuda where there is one, else mps, else cpu."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """In which precision, and how."""
    save: SaveConfig = field(default_factory=SaveConfig)
    """Checkpoints."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Validation loss and samples."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is shown and written."""
    profile: bool = False
    """Watch a few steps after the warm-up: a trace and a table of where the time goes, in the run's folder."""
    seed: int = 0
    """Of the initial weights, the order of the data and the samples."""
    out: Path | None = None
    """The run's folder; runs/NAME by default."""
    init_from: Path | None = None
    """Start from a model's weights: a model folder, a checkpoint or a run. Fork layers that it lacks start fresh."""

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
            f"give a multiple of the block size, {block}",
        )
        _require(bool(self.data.mixture), "data.mixture", self.data.mixture, "name at least one prepared folder")
        for entry in self.data.mixture:
            Source.parse(entry)
        self._check_optim()
        for share in self.save.milestones:
            _require(0 < share <= 1, "save.milestones", share, "give shares of the run between 0 and 1, such as 0.5")
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
            _require(0 <= value <= 1, f"optim.{name}", value, "give a share between 0 and 1")
        for beta in optim.betas:
            _require(0 <= beta < 1, "optim.betas", optim.betas, "give two numbers from 0 to below 1")
        _require(0 <= optim.clip < math.inf, "optim.clip", optim.clip, "give 0 (no clipping) or more")
        _require(0 <= optim.weight_decay < math.inf, "optim.weight_decay", optim.weight_decay, "give 0 or more")

    def _value(self, name: str) -> Any:
        group, _, field_name = name.rpartition(".")
        return getattr(getattr(self, group) if group else self, field_name)

    @property
    def rows(self) -> int:
        """Rows of one step over all devices."""
        return self.tokens_per_step // self.model.block_size

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.tokens_per_step)

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
        """For JSON."""
        return _plain(asdict(self))


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Where two configs (as dictionaries) would not be the same run, in words."""
    found = []
    for name in (f.name for f in fields(RunConfig) if f.name not in MAY_CHANGE):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [
                f"{name}.{key} was {old.get(key)!r}, is {new.get(key)!r}"
                for key in sorted(old.keys() | new.keys())
                if f"{name}.{key}" not in MAY_CHANGE and old.get(key) != new.get(key)
            ]
        elif old != new:
            found.append(f"{name} was {old!r}, is {new!r}")
    return found


# Where a run happens, what is logged, kept and evaluated; nothing that the weights depend on.
MAY_CHANGE = {
    *("name", "out", "init_from", "save", "eval", "log", "profile", "optim.max_skipped"),
    "data",  # compared by content, see `RunData.fingerprints`
    *("device", "compute.compile", "compute.graph", "compute.activation_checkpointing", "compute.micro_batch_size"),
}


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _require(condition: bool, name: str, value: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{option(name)} {brief(value)}: {remedy}")
