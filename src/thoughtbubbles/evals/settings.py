"""What an evaluation is: its settings, checked once. Field docstrings are the help text of `thoughtbubbles eval`."""

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from thoughtbubbles.evals.tasks import TASKS

NAMES = ("perplexity", *TASKS)
ZERO_SHOT = ("lambada", "hellaswag", "blimp", "piqa", "arc_easy", "arc_challenge")
SUITES = {"all": NAMES, "zero-shot": ZERO_SHOT}
MOST = 10**9  # of anything that is counted


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluate a trained model; the numbers go to results.json and to tables.

    perplexity: each token of validation text, scored in one parallel forward (blockwise) and from its own prefix
    (autoregressive). Through the KV cache, as with causal selection, the second takes one step per token. With block
    selection every prefix is read anew, once with the proportional and once with the fixed budget: windows of T tokens
    cost about T times what the parallel forward costs, 512 times for a block of 512 tokens. Begin with few windows.

    lambada, hellaswag, blimp, piqa, arc_easy, arc_challenge, mmlu, mmlu_continuation, clutrr: the choice of the lowest
    loss. gsm8k: answered freely, right if the last number is. They need files of questions: --data-dir. The budget is
    always proportional to each row's tokens.

    Every answer of a benchmark is kept at once: a command that was killed goes on where it was when it is given again
    (perplexity begins anew). Under torchrun the ranks share the work.

    A task that cannot run (its file is missing or damaged, a choice is longer than the model's block) is reported with
    its reason, the others run, and the exit status is 1.
    """

    checkpoint: Path
    """The model: its folder, a checkpoint of a run, or a run (its newest checkpoint)."""
    tasks: tuple[str, ...] = ("perplexity",)
    """What to evaluate: names from above; zero-shot (the paper's six: lambada, hellaswag, blimp, piqa, arc_easy,
    arc_challenge); or all (perplexity among them if there is --data)."""
    data_dir: Path | None = None
    """A folder with the benchmarks (files such as hellaswag.validation.jsonl.gz), in it or in its eval/. By default
    the environment's THOUGHTBUBBLES_DATA."""
    limit: int | None = None
    """Documents of each benchmark at most, evenly spread over it (with --harness the first ones); all by default."""
    data: Path | None = None
    """For perplexity: a folder that `thoughtbubbles prepare` wrote, or RUN/data/synthetic of a tiny run."""
    split: str = "val"
    """For perplexity: which part of the data; val is what was not trained on."""
    windows: int = 8
    """For perplexity: windows to score, spread evenly over the split; all, if there are fewer."""
    tokens: int | None = None
    """For perplexity: tokens of a window; the model's block size by default."""
    budget: Annotated[tuple[str, ...], tyro.conf.arg(metavar="R [R …]")] = ()
    """Streams per token in place of the model's own, such as 2, 1.5 or 4/3. Several, as in --budget 1 1.5 2 4, are
    compared with the first one, on the same tokens and documents: one table and one figure with paired errors."""
    batch: int = 8
    """For perplexity: windows at a time."""
    batch_tokens: int | None = None
    """For benchmarks: tokens of a batch, padding included; by default 65,536 on cuda, 8,192 on mps, 4,096 on cpu."""
    answers_at_once: int = 32
    """For gsm8k: answers written at a time."""
    method: Literal["cached", "uncached"] | None = None
    """For gsm8k: how a new token sees those before it; by default whichever is exact for the model. With block
    selection that is uncached, which is slow; cached then approximates."""
    compile: bool = False
    """For gsm8k, on cuda: steps as graphs of compiled kernels, many times faster after twenty seconds."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda where there is one, else mps, else cpu."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16: matrix products only, as training on a GPU has them (for gsm8k the weights too, as in generate).
    Rounding then decides which streams survive here and there, so ways that are equal in float32 differ a little."""
    fresh: bool = False
    """Answer everything anew, also what is answered already."""
    harness: bool = False
    """Through lm-evaluation-harness (pip install 'thoughtbubbles[eval]'), with its tasks, prompts and scores; --tasks
    then takes its names."""
    out: Path | None = None
    """Where results.json, the answers and the figures go. By default a folder for each combination of settings in
    RUN/eval/step-N, or in eval in a model folder, so that no evaluation replaces another one; answers are shared there.
    What another evaluation has left in the folder given here is moved into a folder of its own."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"--tasks is empty: choose from {', '.join((*SUITES, *NAMES))}")
        if not self.harness:
            for task in self.tasks:
                _check_name(task)
        for name in ("limit", "windows", "tokens", "batch", "batch_tokens", "answers_at_once"):
            _check_number(name, getattr(self, name))
        if not isinstance(self.budget, tuple) or not all(isinstance(budget, str) for budget in self.budget):
            raise ValueError(f"budget = {self.budget!r}: give a tuple of texts, such as ('1', '1.5')")
        if self.harness and len(self.budget) > 1:
            raise ValueError(f"--budget {' '.join(self.budget)}: with --harness give one, or leave out --harness")
        if "perplexity" in self.names and self.data is None and not self.harness:
            raise ValueError(
                "--data is missing: perplexity needs validation text; give a folder that `thoughtbubbles prepare` "
                "wrote, or RUN/data/synthetic of a tiny run"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks one by one; `all` has perplexity only where there is text for it."""
        named = [name for task in self.tasks for name in SUITES.get(task, (task,))]
        if self.data is None and "perplexity" not in self.tasks:
            named = [name for name in named if name != "perplexity"]
        return tuple(dict.fromkeys(named))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def _check_number(name: str, value: object) -> None:
    if value is None and name in ("limit", "tokens", "batch_tokens"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        is_long = isinstance(value, int) and abs(value) >= 10**30  # Python writes no number of very many digits
        shown = "of very many digits" if is_long else repr(value)[:60]
        raise ValueError(f"--{name.replace('_', '-')} {shown}: give a whole number from 1 to {MOST:,}")


def _check_name(task: str) -> None:
    known = (*SUITES, *NAMES)
    if task not in known:
        near = get_close_matches(task, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}"
        raise ValueError(f"--tasks {task}: there is no such task; {hint}")
