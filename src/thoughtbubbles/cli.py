"""The `thoughtbubbles` command: a table from verbs to functions. Each verb imports what it needs when it is called."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from thoughtbubbles import __version__


def analyze(arguments: Sequence[str]) -> None:
    from thoughtbubbles.analysis.analyze import analyze as run

    tyro.cli(run, prog="thoughtbubbles analyze", args=arguments)


# Its options are here because importing anything from analysis/ imports torch, which would slow down --help.
def audit(
    *,
    checkpoint: Path | None = None,
    selection: Literal["causal", "block"] | None = None,
    budget: Annotated[tuple[str, ...], tyro.conf.arg(metavar="R [R …]")] = (),
    text: Path | None = None,
    tokens: int | None = None,
    rows: int = 4,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["float64", "float32"] = "float64",
    json: bool = False,
) -> None:
    """Check whether predictions depend on later tokens, in any causal language model.

    Replaces all tokens from a position on and compares the predictions before it: they must be the same. With causal
    selection they are, to the last bit; block selection, the paper's, lets later tokens decide which earlier forks
    survive, and this shows how much that changes.

    Exit codes: 0 no leak; 1 a leak, or an error, in one line on standard error.

    Args:
        checkpoint: The model: its folder, a checkpoint of a run, or a run (its newest checkpoint); or the folder or
            name of any causal language model that Hugging Face's transformers opens. Default: the one in the package.
        selection: The selection rule, instead of the model's own.
        budget: Streams per token instead of the model's own, such as 2, 1.5 or 4/3; several are audited in turn.
        text: A UTF-8 text file, of which the beginning is used. Default: a text of our own, or random tokens for a
            model without a tokenizer.
        tokens: Tokens per row. Default: 128, or fewer if the text or the model's context length is shorter.
        rows: Number of rows, if the text is long enough.
        device: auto: cuda if there is one, else cpu.
        dtype: In float64 any change is a leak. In float32, changes of a log-probability up to 1e-4 count as rounding.
        json: Instead of tables, print one line of JSON.
    """
    from thoughtbubbles.analysis.audit_command import run
    from thoughtbubbles.files import or_shipped

    leak = run(
        or_shipped(checkpoint),
        selection=selection,
        budgets=budget,
        text=text,
        tokens=tokens,
        rows=rows,
        device=device,
        dtype=dtype,
        as_json=json,
    )
    if leak is not None:
        sys.exit(f"thoughtbubbles audit: {leak}")


def bench(arguments: Sequence[str]) -> None:
    from thoughtbubbles.bench.options import bench as run

    tyro.cli(run, prog="thoughtbubbles bench", args=arguments)


def demo(arguments: Sequence[str]) -> None:
    from thoughtbubbles.recipes.demo import run_demo

    tyro.cli(run_demo, prog="thoughtbubbles demo", args=arguments)


def download(arguments: Sequence[str]) -> None:
    from thoughtbubbles.evals.download import download as run

    tyro.cli(run, prog="thoughtbubbles download", args=arguments)


def evaluate(arguments: Sequence[str]) -> None:
    from thoughtbubbles.evals.settings import Evaluation
    from thoughtbubbles.files import or_shipped

    settings = tyro.cli(Evaluation, prog="thoughtbubbles eval", args=arguments)
    or_shipped(settings.checkpoint)
    if settings.harness:
        from thoughtbubbles.interop.options import evaluate_with_harness

        evaluate_with_harness(settings)
        return
    if settings.are_made_up:
        from thoughtbubbles.evals.hard_places_command import evaluate_tasks

        evaluate_tasks(settings)
        return
    from thoughtbubbles.evals.run import evaluate_command

    evaluate_command(settings)


def export(arguments: Sequence[str]) -> None:
    from thoughtbubbles.interop.options import export as run

    tyro.cli(run, prog="thoughtbubbles export", args=arguments)


def generate(arguments: Sequence[str]) -> None:
    from thoughtbubbles.generate.options import generate as run

    tyro.cli(run, prog="thoughtbubbles generate", args=arguments)


def import_authors(arguments: Sequence[str]) -> None:
    from thoughtbubbles.interop.options import import_authors as run

    tyro.cli(run, prog="thoughtbubbles import", args=arguments)


def inspect(arguments: Sequence[str]) -> None:
    from thoughtbubbles.bench.options import inspect as run

    tyro.cli(run, prog="thoughtbubbles inspect", args=arguments)


def prepare(arguments: Sequence[str]) -> None:
    from thoughtbubbles.data.prepare import prepare as run

    tyro.cli(run, prog="thoughtbubbles prepare", args=arguments)


def reproduce(arguments: Sequence[str]) -> None:
    from thoughtbubbles.recipes.reproduce.command import reproduce as run

    tyro.cli(run, prog="thoughtbubbles reproduce", args=arguments)


def serve(arguments: Sequence[str]) -> None:
    from thoughtbubbles.serve.command import serve as run

    tyro.cli(run, prog="thoughtbubbles serve", args=arguments)


def train(arguments: Sequence[str]) -> None:
    """Trains a recipe, or resumes a run; the fields of its RunConfig are options."""
    if not arguments or arguments[0] in ("-h", "--help"):
        from thoughtbubbles.train.usage import TRAIN_USAGE

        print(TRAIN_USAGE)
        return
    if "--list" in arguments:
        from thoughtbubbles.recipes.table import show_recipes

        show_recipes()
        return
    from thoughtbubbles.recipes.command import train_command

    train_command(arguments)


def watch(arguments: Sequence[str]) -> None:
    from thoughtbubbles.serve.command import watch as run

    tyro.cli(run, prog="thoughtbubbles watch", args=arguments)


SLOW_BFLOAT16 = "this CPU has no bfloat16 instructions: --dtype bfloat16 works, but float32 is faster here"


@contextmanager
def short_warnings() -> Iterator[None]:
    """One line where torch prints a C++ backtrace: for the first bfloat16 product on a CPU without bfloat16."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def shown(message: Warning | str, *where: Any, **more: Any) -> None:
            if "mkldnn_matmul failed" in str(message):
                print(SLOW_BFLOAT16, file=sys.stderr)
            else:
                show(message, *where, **more)

        warnings.showwarning = shown
        warnings.filterwarnings("once", message="mkldnn_matmul failed")
        yield


class Verb(NamedTuple):
    run: Callable[[Sequence[str]], None]
    summary: str


VERBS = {
    "analyze": Verb(analyze, "figures of where a model forks and what it brings, and a report of them all"),
    "audit": Verb(
        lambda arguments: tyro.cli(audit, prog="thoughtbubbles audit", args=arguments),
        "do predictions depend on later tokens? of any causal language model",
    ),
    "bench": Verb(bench, "how fast a model trains here: milliseconds, TFLOP/s, memory"),
    "demo": Verb(demo, "see a trained model think, then train one with bubbles and a plain GPT, in three minutes"),
    "download": Verb(download, "the questions of benchmarks, from Hugging Face"),
    "eval": Verb(evaluate, "perplexity, and benchmarks such as HellaSwag and GSM8K"),
    "export": Verb(export, "a folder for the Hugging Face Hub: weights, code, tokenizer, model card"),
    "generate": Verb(generate, "continue a text, with a KV cache and a budget of streams per token"),
    "import": Verb(import_authors, "a checkpoint of the authors' JAX code as a model folder"),
    "inspect": Verb(inspect, "what a model costs: parameters, FLOPs, streams, memory"),
    "prepare": Verb(prepare, "text, chats and questions to shards of tokens"),
    "reproduce": Verb(
        reproduce, "the experiments behind docs/results: train and measure their rows, render the report"
    ),
    "serve": Verb(serve, "a server with OpenAI's API: completions, streaming, a thinking budget for each request"),
    "train": Verb(train, "pretrain, mid-train or fine-tune, on one device or many"),
    "watch": Verb(watch, "a page in the browser: type text, and watch the bubbles of its tokens"),
}

USAGE = f"""\
usage: thoughtbubbles VERB …

{chr(10).join(f"  {name:<10} {verb.summary}" for name, verb in VERBS.items())}

  thoughtbubbles VERB --help    what a verb takes
  thoughtbubbles --version

for example: thoughtbubbles generate "The cell" --show-bubbles"""


def _run(name: str, arguments: Sequence[str]) -> None:
    if name in ("-h", "--help"):
        print(USAGE)
    elif name in ("-V", "--version"):
        print(f"thoughtbubbles {__version__}")
    elif name in VERBS:
        with short_warnings():
            VERBS[name].run(arguments)
    else:
        sys.exit(f"thoughtbubbles: no verb {name!r}; choose from: {', '.join(VERBS)} (thoughtbubbles --help)")


def _flush() -> None:
    if sys.stdout is not None:  # as with `>&-`
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    try:
        try:
            _run(name, rest)
        except SystemExit as end:  # of --help
            if not end.code:
                _flush()
            raise
        _flush()  # here, so that a reader who has stopped is met below
    except ValueError as error:  # invalid input: the message says what and where
        sys.exit(f"thoughtbubbles {name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader has stopped, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a file or folder that cannot be used
        from thoughtbubbles.files import reason, short_name

        where = f"{short_name(error.filename)}: " if error.filename else ""
        sys.exit(f"thoughtbubbles {name}: {where}{reason(error)}")
