"""The `thoughtbubbles` command: a table from verbs to functions. Each verb imports what it needs when it is called."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from thoughtbubbles import __version__

if TYPE_CHECKING:
    from thoughtbubbles.evals.settings import Evaluation


def or_shipped(checkpoint: Path | None, *, option: str = "--checkpoint") -> Path | None:
    """The checkpoint that was given; without one, the first rank says which model is used."""
    if checkpoint is None and os.environ.get("RANK", "0") == "0":
        from thoughtbubbles.files import SHIPPED

        print(f"no {option}: using {SHIPPED}, the model in the package", file=sys.stderr)
    return checkpoint


def inspect(
    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None,
    /,
    *,
    tokens: int | None = None,
    rows: int = 1,
    copies: tuple[int, ...] | None = None,
    budgets: tuple[float, ...] | None = None,
) -> None:
    """Show what a model costs: parameters, FLOPs, streams at each layer and memory, against plain GPT and copy-N.

    Args:
        model: A size by name (nano, tiny, 150m, 319m, 772m, 1.9b; 150m-paper has the paper's block selection), or a
            model folder, a checkpoint of a run, or a run (its newest checkpoint). Default: the model in the package.
        tokens: Tokens per row; by default the model's context length.
        rows: Rows per batch, for the memory that the backward needs.
        copies: The copy-N baselines to show; by default 3 and 5 for a size.
        budgets: The budgets (streams per token) to show; by default 2 and 4 for a size, the model's own for a folder.
    """
    from thoughtbubbles.files import SHIPPED
    from thoughtbubbles.recipes.costs import inspect_model

    if model is None:
        or_shipped(None, option="MODEL")
    inspect_model(model or SHIPPED, tokens=tokens, rows=rows, copies=copies, budgets=budgets)


TRAIN_USAGE = """\
usage: thoughtbubbles train RECIPE [--resume] [--dry-run] [--FIELD VALUE …]
       thoughtbubbles train --resume DIR [--dry-run] [--FIELD VALUE …]
       thoughtbubbles train --list
       torchrun --nproc-per-node N -m thoughtbubbles train RECIPE …

  --list             all recipes, with parameters, tokens and expected FLOPs
  RECIPE --help      all options, with their values in this recipe
  --resume DIR       resume the run in this folder, with the settings in its run.json
  --resume           with a recipe: resume from the newest complete checkpoint in --out, or start at step 0
  --dry-run          open the data and check everything the run needs, take one step at reduced size, print the config
  --init-from DIR    start from the weights, and with the architecture, of a model, checkpoint or run;
                     --model.* options change it
  --data.val DIR …   compute the validation loss on other folders than the training data
  --profile          profile a few steps: a trace, and a table of where the time goes

Exit codes: 0 the run is finished; 1 an error, in one line; 2 options that cannot be parsed. Stopped by a signal,
after saving: 128 + its number (SIGINT 130, SIGTERM 143).

for example: thoughtbubbles train tiny --optim.lr 1e-3 --out runs/first"""


def train(arguments: Sequence[str]) -> None:
    """Trains a recipe, or resumes a run; the fields of its RunConfig are options."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(TRAIN_USAGE)
        return
    if "--list" in arguments:
        from thoughtbubbles.recipes.table import show_recipes

        show_recipes()
        return
    from thoughtbubbles.recipes.command import train_command

    train_command(arguments)


def prepare(arguments: Sequence[str]) -> None:
    from thoughtbubbles.data.prepare import prepare as run

    tyro.cli(run, prog="thoughtbubbles prepare", args=arguments)


def demo(arguments: Sequence[str]) -> None:
    from thoughtbubbles.recipes.demo import run_demo

    tyro.cli(run_demo, prog="thoughtbubbles demo", args=arguments)


def reproduce(arguments: Sequence[str]) -> None:
    from thoughtbubbles.recipes.reproduce.command import reproduce as run

    tyro.cli(run, prog="thoughtbubbles reproduce", args=arguments)


def analyze(arguments: Sequence[str]) -> None:
    from thoughtbubbles.analysis.analyze import analyze as run

    tyro.cli(run, prog="thoughtbubbles analyze", args=arguments)


def evaluate(arguments: Sequence[str]) -> None:
    from thoughtbubbles.evals.settings import Evaluation

    settings = tyro.cli(Evaluation, prog="thoughtbubbles eval", args=arguments)
    or_shipped(settings.checkpoint)
    if settings.harness:
        _through_harness(settings)
        return
    from thoughtbubbles.distributed import joined
    from thoughtbubbles.evals.run import run

    with joined(settings.device) as world:
        failed = run(settings, world)["failed"]
    if failed:  # reported in full above
        few = f"{len(failed)} of {len(settings.names)} tasks could not run: {', '.join(failed)}"
        sys.exit(f"thoughtbubbles eval: {few}" if world.is_first else 1)


def _through_harness(settings: "Evaluation") -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ValueError("--harness: lm-evaluation-harness is not installed; pip install 'thoughtbubbles[eval]'")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--harness: runs in one process; leave out torchrun, or leave out --harness")
    from thoughtbubbles.evals.documents import VARIABLE
    from thoughtbubbles.interop.harness import run_harness

    run_harness(
        settings.checkpoint,
        tasks=settings.tasks,
        data_dir=settings.data_dir or os.environ.get(VARIABLE),
        limit=settings.limit,
        budget=settings.budget[0] if settings.budget else None,
        dtype=settings.dtype,
        device=settings.device,
        batch_tokens=settings.batch_tokens,
        method=settings.method,
        compile=settings.compile,
        out=settings.out,
    )


def generate(
    prompt: Annotated[str, tyro.conf.arg(metavar="PROMPT")] = "-",
    /,
    *,
    checkpoint: Path | None = None,
    max_new: int | None = None,
    budget: Annotated[str | None, tyro.conf.arg(metavar="R")] = None,
    budget_mode: Literal["proportional", "fixed"] | None = None,
    method: Literal["cached", "uncached"] | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto",
    compile: bool = False,
    show_bubbles: bool = False,
    top: int = 0,
    json: bool = False,
) -> None:
    """Continue a text with a trained model, token by token.

    Standard output gets the prompt, its continuation and a newline. Speed, streams per token and the reason why the
    text ended are printed on standard error.

    Args:
        prompt: The text to continue. Without it, or with -, it is read from standard input, less one newline at its
            end. Use that for a prompt that begins with a dash.
        checkpoint: The model: its folder, a checkpoint of a run, or a run (its newest checkpoint). Default: the one
            in the package.
        max_new: Maximum number of new tokens; by default as many as fit in the model's context length.
        budget: Streams per token instead of the model's own, such as 2, 1.5 or 4/3. 1: no forks. At the largest bubble
            that the fork layers can make, or above it: no limit.
        budget_mode: What the budget is counted on, instead of the model's own. proportional: the tokens so far. fixed:
            the full context length (block selection and --method uncached only).
        method: How to decode; by default the method that is exact for the model.
            cached: with a KV cache. Fast; exact for causal selection, an approximation for block selection.
            uncached: without one, all tokens are computed again for each new one. Slow; exact for both.
        temperature: 0: greedy decoding. 1: sample from the model's distribution. Higher: more random.
        top_k: Sample only from the k most likely tokens.
        top_p: Sample only from the most likely tokens that together have this probability.
        min_p: Sample only from tokens with at least this fraction of the most likely one's probability.
        repetition_penalty: Above 1: tokens that have occurred become less likely; 1.2 is strong.
        seed: Of the random numbers: the same seed gives the same text.
        stop: A text that ends the generation and is not shown; repeat the option for several. A newline, in bash:
            --stop $'\\n'
        device: auto: cuda if there is one, else cpu.
        dtype: The model's dtype. auto: bfloat16 on cuda, else float32.
        compile: On cuda: decode with CUDA graphs of compiled kernels. Starts about twenty seconds later, then many
            times faster: for long texts.
        show_bubbles: Colour each token by its number of streams after the last fork layer, one token late. Without
            colours (a pipe, NO_COLOR), digits follow below the text. With block selection: the number that a token had
            when it was the newest; for the prompt, before any new token.
        top: Print a table of this many most likely tokens for each new one, with log-probabilities.
        json: Instead of text, print one line of JSON at the end: prompt, text, ids, log_probs, streams (of the token
            that predicted each new one), finish, settings, tokens_per_second and more; with --show-bubbles also
            bubbles: the streams of each token itself, the prompt's first.
    """
    from thoughtbubbles.generate.command import read_prompt, write
    from thoughtbubbles.generate.requests import Request
    from thoughtbubbles.generate.sample import Sampling

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
    )
    write(
        Request(prompt=read_prompt(prompt), max_new=max_new, budget=budget, sampling=sampling, stop=stop, top=top),
        checkpoint=or_shipped(checkpoint),
        method=method,
        budget_mode=budget_mode,
        compiled=compile,
        device=device,
        dtype=dtype,
        show_bubbles=show_bubbles,
        as_json=json,
    )


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


def bench(
    cases: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[CASE …]")] = (),
    /,
    *,
    list: bool = False,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    rows: int | None = None,
    tokens: int | None = None,
    repeats: int | None = None,
    quick: bool = False,
    data: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure how fast a model trains on this machine: forward and backward, and the full step, side by side.

    Before a case is timed, its loss and gradients are checked against the slow reference path. A case that fails, for
    example out of memory, is reported, and the others continue.

    Args:
        cases: What to measure, each as SIZE-FORM, such as 150m-plain 150m-r2-causal-residual. By default, with a GPU,
            all forms of 150m and three of 1.9b (some minutes); without one, forms of tiny.
        list: Only show all sizes and forms.
        device: auto: cuda if there is one, else mps, else cpu.
        rows: Rows per batch instead of the size's own. Fewer need less memory.
        tokens: Tokens per row instead of the size's own (512 from 150m on). A plain-double row has twice as many.
        repeats: Number of runs of which the median is taken; 20 on a GPU, 10 elsewhere.
        quick: A first impression: 3 repeats and, unless cases are named, only plain and r2-causal-residual.
        data: Measure on a folder that `thoughtbubbles prepare` wrote; by default on random tokens with the frequencies
            of words.
        out: Also write all numbers to this file, as JSON.
    """
    from thoughtbubbles.bench.table import bench as run
    from thoughtbubbles.bench.table import list_cases

    if list:
        list_cases()
        return
    run(cases, device=device, rows=rows, tokens=tokens, repeats=repeats, data=data, out=out, quick=quick)


def export(
    *, checkpoint: Path | None = None, out: Path, dtype: Literal["auto", "float32", "bfloat16"] = "auto"
) -> None:
    """Write a model as a folder that is ready for the Hugging Face Hub.

    It has the weights, the tokenizer, a model card written from the run's own numbers, and the code of the model: with
    trust_remote_code=True it opens in transformers without this package installed. Nothing is uploaded. To
    publish it, choose a licence in its README.md, then: hf upload NAME/MODEL DIR

    Args:
        checkpoint: The model: its folder, a checkpoint of a run, or a run (its newest checkpoint). Default: the one
            in the package.
        out: The folder to write: a new or empty one, or that of an earlier export, which is replaced if nothing in it
            has been changed since.
        dtype: The dtype of the weights. auto: as they are.
    """
    import torch

    from thoughtbubbles.interop.export import export as write

    dtypes = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    print(f"written: {write(or_shipped(checkpoint), out=out, dtype=dtypes[dtype])}")


def import_authors(
    checkpoint: Annotated[Path, tyro.conf.arg(metavar="CHECKPOINT")],
    /,
    *,
    out: Path,
    heads: int | None = None,
    block_size: int | None = None,
    budget: float | None = None,
    budget_mode: Literal["proportional", "fixed"] = "proportional",
) -> None:
    """Turn a checkpoint of the authors' JAX code (Jemoka/fork-xla) into a model folder.

    The model computes what their code computes, also where that differs from ours. GPT-2's tokenizer, which they use,
    is added if it fits the vocabulary.

    Args:
        checkpoint: The folder that their trainer wrote (to read its Orbax files, orbax-checkpoint must be installed),
            or an .npz or .safetensors file with the same names.
        out: The model folder to write, a new or empty one.
        heads: Number of attention heads, if there is no config.json next to the arrays.
        block_size: Context length, if there is no config.json.
        budget: Streams per token, if there is no config.json: max_block_size / block_size.
        budget_mode: proportional: the budget follows each row's tokens, as the paper evaluates. fixed: always that of
            the full context length. For full rows, as in training, they are the same.
    """
    from thoughtbubbles.checkpoint import save_model
    from thoughtbubbles.data.tokenizer import tokenizer
    from thoughtbubbles.files import check_folder
    from thoughtbubbles.interop.authors import import_model

    folder = check_folder(out, option="--out")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out {out} is not empty: give a new folder")
    model = import_model(checkpoint, heads=heads, block_size=block_size, budget=budget, budget_mode=budget_mode)
    gpt2 = tokenizer("gpt2")
    written = save_model(folder, model, tokenizer=gpt2 if gpt2.size <= model.config.vocab_size else None)
    print(f"written: {written} ({sum(weight.numel() for weight in model.parameters()):,} parameters)")


def watch(
    *,
    checkpoint: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR [DIR …]")] = (),
    host: str = "127.0.0.1",
    port: int = 8321,
    open: bool = True,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Open a page in the browser on which to watch a model fork: type text, and see each token with its bubble.

    Everything stays on this computer, and nothing is downloaded. Ctrl-C ends it.

    Args:
        checkpoint: One or more models to choose from and to compare: their folders, checkpoints of runs, or runs
            (their newest checkpoints). Default: the one in the package.
        host: The address to listen on. With another one than 127.0.0.1, others can use the page too: there is no
            password.
        port: The port to listen on; 0 takes a free one.
        open: Whether to open the browser, if started from a terminal.
        device: auto: cuda if there is one, else cpu.
    """
    from thoughtbubbles.serve.command import watch as run

    if not checkpoint:
        or_shipped(None)
    run(checkpoint, host=host, port=port, open_browser=open, device=device)


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
    "bench": Verb(
        lambda arguments: tyro.cli(bench, prog="thoughtbubbles bench", args=arguments),
        "how fast a model trains here: milliseconds, TFLOP/s, memory",
    ),
    "demo": Verb(demo, "see a trained model think, then train one with bubbles and a plain GPT, in two minutes"),
    "eval": Verb(evaluate, "perplexity, and benchmarks such as HellaSwag and GSM8K"),
    "export": Verb(
        lambda arguments: tyro.cli(export, prog="thoughtbubbles export", args=arguments),
        "a folder for the Hugging Face Hub: weights, code, tokenizer, model card",
    ),
    "generate": Verb(
        lambda arguments: tyro.cli(generate, prog="thoughtbubbles generate", args=arguments),
        "continue a text, with a KV cache and a budget of streams per token",
    ),
    "import": Verb(
        lambda arguments: tyro.cli(import_authors, prog="thoughtbubbles import", args=arguments),
        "a checkpoint of the authors' JAX code as a model folder",
    ),
    "inspect": Verb(
        lambda arguments: tyro.cli(inspect, prog="thoughtbubbles inspect", args=arguments),
        "what a model costs: parameters, FLOPs, streams, memory",
    ),
    "prepare": Verb(prepare, "text, chats and questions to shards of tokens"),
    "reproduce": Verb(
        reproduce, "the experiments behind docs/results: train and measure their rows, render the report"
    ),
    "train": Verb(train, "pretrain, mid-train or fine-tune, on one device or many"),
    "watch": Verb(
        lambda arguments: tyro.cli(watch, prog="thoughtbubbles watch", args=arguments),
        "a page in the browser: type text, and watch the bubbles of its tokens",
    ),
}

USAGE = f"""\
usage: thoughtbubbles VERB …

{chr(10).join(f"  {name:<10} {verb.summary}" for name, verb in VERBS.items())}

  thoughtbubbles VERB --help    what a verb takes
  thoughtbubbles --version

for example: thoughtbubbles generate "The cell" --show-bubbles"""


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if arguments[0] in ("-V", "--version"):
        print(f"thoughtbubbles {__version__}")
        return
    name, *rest = arguments
    if name not in VERBS:
        sys.exit(f"thoughtbubbles: no verb {name!r}; choose from: {', '.join(VERBS)} (thoughtbubbles --help)")

    try:
        with short_warnings():
            VERBS[name].run(rest)
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
