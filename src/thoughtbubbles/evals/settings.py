"""What an evaluation is: its settings, checked once. Field docstrings are the help text of `thoughtbubbles eval`."""

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

TASKS = ("perplexity",)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Examine a trained model; the numbers go to results.json and to a table.

    perplexity: each held-out token scored in one parallel forward (blockwise) and from its own prefix (autoregressive).
    Through the cache, as with causal selection, the second takes one step a token. With block selection every prefix is
    read anew, once with the proportional and once with the fixed budget: windows of T tokens cost about T times what
    the parallel forward costs, 512 times for a block of 512 tokens. Begin with few windows.
    """

    checkpoint: Path
    """The model: its folder, a checkpoint of a run, or a run (its newest checkpoint)."""
    tasks: tuple[str, ...] = ("perplexity",)
    """What to examine; perplexity is all there is so far."""
    data: Path | None = None
    """For perplexity: a folder that `thoughtbubbles prepare` wrote, or RUN/data/synthetic of a tiny run."""
    split: str = "val"
    """Which part of the data; val is what training held out."""
    windows: int = 8
    """Windows to score, spread evenly over the split; all, if there are fewer."""
    tokens: int | None = None
    """Tokens of a window; the model's block size by default."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="R")] = None
    """Streams per token in place of the model's own, such as 2, 1.5 or 4/3."""
    batch: int = 8
    """Windows at a time."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda where there is one, else mps, else cpu."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16: matrix products only, as training on a GPU has them. Rounding then decides which streams survive
    here and there, so ways that are equal in float32 differ a little."""
    out: Path | None = None
    """Where results.json and the figure go; CHECKPOINT/eval-TASK by default."""

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                near = get_close_matches(task, TASKS, n=2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(TASKS)}"
                raise ValueError(f"--tasks {task}: there is no such task; {hint}")
        if not self.tasks:
            raise ValueError(f"--tasks is empty: choose from {', '.join(TASKS)}")
        for name in ("windows", "tokens", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}: give 1 or more")

    @property
    def folder(self) -> Path:
        return self.checkpoint / f"eval-{'-'.join(self.tasks)}" if self.out is None else self.out

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
