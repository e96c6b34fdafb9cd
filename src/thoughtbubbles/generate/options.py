"""The command `generate` with its options. It imports torch when it runs, so that --help is fast."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from thoughtbubbles.files import or_shipped, short_name


def generate(
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[PROMPT]")] = ("-",),
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

    if len(prompt) > 1:
        raise ValueError(f'{len(prompt)} prompts: put quotes around the text, as in "{short_name(" ".join(prompt))}"')
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
    )
    write(
        Request(prompt=read_prompt(*prompt), max_new=max_new, budget=budget, sampling=sampling, stop=stop, top=top),
        checkpoint=or_shipped(checkpoint),
        method=method,
        budget_mode=budget_mode,
        compiled=compile,
        device=device,
        dtype=dtype,
        show_bubbles=show_bubbles,
        as_json=json,
    )
