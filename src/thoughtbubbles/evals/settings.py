"""The settings of an evaluation, checked once. Field docstrings are the help text of `thoughtbubbles eval`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from thoughtbubbles.data.tasks import PREFIX, task_named
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.files import did_you_mean

NAMES = ("perplexity", *TASKS)
ZERO_SHOT = ("lambada", "hellaswag", "blimp", "piqa", "arc_easy", "arc_challenge")
SUITES = {"all": NAMES, "zero-shot": ZERO_SHOT}
MOST = 10**9  # upper limit of all counts


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluate a trained model; prints tables and writes results.json.

    perplexity: every token of validation text, scored in one parallel forward (blockwise) and from its own prefix
    (autoregressive). With causal selection the latter uses the KV cache, one step per token. With block selection every
    prefix is a new forward, once with the proportional and once with the fixed budget: windows of T tokens cost about T
    times as much as the parallel forward, 512 times for a context length of 512. Start with few windows.

    lambada, hellaswag, blimp, piqa, arc_easy, arc_challenge, mmlu, mmlu_continuation, clutrr: picks the choice with the
    lowest loss. gsm8k: generates an answer, correct if its last number is. Benchmarks need question files: --data-dir.
    The budget is always proportional to the tokens of each row.

    task:NAME, such as task:khop: a made-up task whose hard places are known, for models that `train task:NAME` has
    trained: right answers by the work that they need, and the streams there, on --limit examples of each split (1,024).
    Of the other options only --checkpoint, --budget, --device and --out apply.

    Every answer of a benchmark is saved immediately: repeat the command after a kill and it resumes (perplexity starts
    again). Under torchrun the ranks share the work.

    A task that cannot run (its file is missing or damaged, a choice is longer than the model's context length) is
    reported with its reason, the others run, and the exit code is 1.
    """

    checkpoint: Path | None = None
    """A model folder, a checkpoint of a run, or a run (its newest checkpoint). Default: the model in the package."""
    tasks: tuple[str, ...] = ("perplexity",)
    """What to evaluate: names from above; zero-shot (the paper's six: lambada, hellaswag, blimp, piqa, arc_easy,
    arc_challenge); or all (including perplexity if --data is given, without made-up tasks)."""
    data_dir: Path | None = None
    """Folder with the benchmark files (such as hellaswag.validation.jsonl.gz), directly or in its eval/. Default: the
    environment variable THOUGHTBUBBLES_DATA."""
    limit: int | None = None
    """Maximum number of documents per benchmark, spread evenly (with --harness the first ones). Default: all."""
    data: Path | None = None
    """For perplexity: a folder written by `thoughtbubbles prepare`, or RUN/data/synthetic of a tiny run."""
    split: str = "val"
    """For perplexity: the split of the data; val is not trained on."""
    windows: int = 8
    """For perplexity: number of windows to score, spread evenly over the split; all if there are fewer."""
    tokens: int | None = None
    """For perplexity: tokens per window. Default: the model's context length (`block_size`)."""
    budget: Annotated[tuple[str, ...], tyro.conf.arg(metavar="R [R …]")] = ()
    """Streams per token instead of the model's own budget, such as 2, 1.5 or 4/3. Several, as in --budget 1 1.5 2 4,
    are compared with the first one on the same tokens and documents: one table and one figure with paired errors."""
    batch: int = 8
    """For perplexity: windows per batch."""
    batch_tokens: int | None = None
    """For benchmarks: tokens per batch, including padding. Default: 65,536 on cuda, 8,192 on mps, 4,096 on cpu."""
    answers_at_once: int = 32
    """For gsm8k: answers generated per batch."""
    method: Literal["cached", "uncached"] | None = None
    """For gsm8k: decoding with or without the KV cache. Default: whichever is exact for the model. With block selection
    that is uncached, which is slow; cached is then an approximation."""
    compile: bool = False
    """For gsm8k, on cuda: decode with CUDA graphs of compiled kernels, many times faster after twenty seconds."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda if available, else mps, else cpu."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16: matrix products only, as in training on a GPU (for gsm8k also the weights, as in generate). Rounding
    then changes which streams survive in a few places, so methods that agree in float32 differ slightly."""
    fresh: bool = False
    """Answer everything again, ignoring saved answers."""
    harness: bool = False
    """Use lm-evaluation-harness (pip install 'thoughtbubbles[eval]'), with its tasks, prompts and scores; --tasks then
    takes its names."""
    out: Path | None = None
    """Folder for results.json, the answers and the figures. Default: one folder per combination of settings in
    RUN/eval/step-N, or in eval in a model folder, so that evaluations do not replace each other; answers are shared.
    If the folder given here has results of another evaluation, they are moved to a subfolder."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"--tasks is empty: choose from {', '.join((*SUITES, *NAMES))}")
        if not self.harness:
            for task in self.tasks:
                _check_name(task)
            if len({task.startswith(PREFIX) for task in self.tasks}) > 1:
                raise ValueError(f"--tasks {' '.join(self.tasks)}: give made-up tasks ({PREFIX}NAME) by themselves")
        for name in ("limit", "windows", "tokens", "batch", "batch_tokens", "answers_at_once"):
            _check_number(name, getattr(self, name))
        if not isinstance(self.budget, tuple) or not all(isinstance(budget, str) for budget in self.budget):
            raise ValueError(f"budget = {self.budget!r}: give a tuple of strings, such as ('1', '1.5')")
        if self.harness and len(self.budget) > 1:
            raise ValueError(f"--budget {' '.join(self.budget)}: with --harness give one, or leave out --harness")
        if "perplexity" in self.names and self.data is None and not self.harness:
            raise ValueError(
                "--data is missing: perplexity needs validation text; give a folder written by `thoughtbubbles "
                "prepare` (with --tokenizer bubbles-7m for the model in the package), or RUN/data/synthetic of a tiny "
                "run"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tasks; `all` includes perplexity only if there is text for it."""
        named = [name for task in self.tasks for name in SUITES.get(task, (task,))]
        if self.data is None and "perplexity" not in self.tasks:
            named = [name for name in named if name != "perplexity"]
        return tuple(dict.fromkeys(named))

    @property
    def are_made_up(self) -> bool:
        """Whether the tasks are those of data/tasks."""
        return self.tasks[0].startswith(PREFIX)

    def as_dict(self) -> dict[str, Any]:
        """As a JSON-serializable dictionary."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def _check_number(name: str, value: object) -> None:
    if value is None and name in ("limit", "tokens", "batch_tokens"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        is_long = isinstance(value, int) and abs(value) >= 10**30  # Python refuses to print very long integers
        shown = "with very many digits" if is_long else repr(value)[:60]
        raise ValueError(f"--{name.replace('_', '-')} {shown}: give a whole number from 1 to {MOST:,}")


def _check_name(task: str) -> None:
    if task.startswith(PREFIX):
        task_named(task.removeprefix(PREFIX))
        return
    known = (*SUITES, *NAMES)
    if task not in known:
        hint = did_you_mean(task, known, otherwise=f"choose from {', '.join(known)}")
        raise ValueError(f"--tasks {task}: there is no such task; {hint}")
