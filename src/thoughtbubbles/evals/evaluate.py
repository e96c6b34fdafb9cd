"""Evaluates a model on a benchmark: answers every document that has no saved answer.

Choices are compared by likelihood, batched by length over all documents. Answers to questions are generated greedily,
in batches, with the KV cache. Block selection has no exact cache, so by default it decodes without one: every token is
a new forward of its row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.documents import Benchmark
from thoughtbubbles.evals.likelihood import Likelihood, each_likelihood, encode_choices
from thoughtbubbles.evals.metrics import Answer, score_choices
from thoughtbubbles.evals.tasks.task import Choices, Question, Task
from thoughtbubbles.generate.requests import Completion, Method, Request, generate
from thoughtbubbles.generate.sample import Sampling
from thoughtbubbles.model.budget import Number
from thoughtbubbles.model.transformer import Thoughtbubbles

Keep = Callable[[int, Answer], object]
Report = Callable[[float], object]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a benchmark is run."""

    budget: Number | None = None
    """Streams per token instead of the model's own budget."""
    batch_tokens: int | None = None
    """Tokens per batch, including padding. Default: depends on the device."""
    answers_at_once: int = 32
    """Generated answers per batch."""
    method: Method | None = None
    """How answers are generated. Default: whichever is exact for the model."""
    compiled: bool = False
    """Decode with CUDA graphs."""


def check_lengths(benchmark: Benchmark, tokenizer: Tokenizer, *, block_size: int) -> None:
    """Raises ValueError if a choice does not fit: contexts can be truncated, choices cannot."""
    for number, document in benchmark.documents.items():
        if isinstance(document, Choices) and max(len(choice.encode()) for choice in document.choices) >= block_size:
            for query in encode_choices(tokenizer, document.context, document.choices):
                if len(query.continuation) > block_size:
                    raise ValueError(
                        f"{benchmark.task.name}, document {number}: a choice has {len(query.continuation)} tokens, "
                        f"more than the model's block_size = {block_size}; use a model with a larger block_size"
                    )


def evaluate(
    model: Thoughtbubbles,
    tokenizer: Tokenizer,
    task: Task,
    documents: Mapping[int, Choices | Question],
    conditions: Conditions = Conditions(),  # noqa: B008 (frozen)
    *,
    keep: Keep,
    report: Report = lambda share: None,
) -> None:
    """Calls `keep` with each answer as soon as it is computed, in no particular order."""
    choices = {number: document for number, document in documents.items() if isinstance(document, Choices)}
    questions = {number: document for number, document in documents.items() if isinstance(document, Question)}
    if choices:
        _choose(model, tokenizer, choices, conditions, keep=keep, report=report)
    if questions:
        _write(model, tokenizer, task, questions, conditions, keep=keep, report=report)


def _choose(
    model: Thoughtbubbles,
    tokenizer: Tokenizer,
    documents: Mapping[int, Choices],
    conditions: Conditions,
    *,
    keep: Keep,
    report: Report,
) -> None:
    queries, owners = [], []
    for number, document in documents.items():
        encoded = encode_choices(tokenizer, document.context, document.choices)
        queries += encoded
        owners += [(number, place) for place in range(len(encoded))]
    waiting: dict[int, dict[int, Likelihood]] = {number: {} for number in documents}
    done = 0
    for index, likelihood in each_likelihood(
        model,
        queries,
        vocab_size=tokenizer.size,
        budget=conditions.budget,
        batch_tokens=conditions.batch_tokens,
    ):
        number, place = owners[index]
        found, document = waiting[number], documents[number]
        found[place], done = likelihood, done + 1
        if len(found) == len(document.choices):
            keep(number, score_choices(document, [found[i] for i in range(len(found))]))
            del waiting[number]
        report(done / len(queries))


def _write(
    model: Thoughtbubbles,
    tokenizer: Tokenizer,
    task: Task,
    documents: Mapping[int, Question],
    conditions: Conditions,
    *,
    keep: Keep,
    report: Report,
) -> None:
    block_size = model.config.block_size
    room = min(task.max_new, (block_size + 1) // 2)  # at least half of the context length is left for the prompt
    numbers, requests, cut, done = list(documents), [], [], 0
    for document in documents.values():
        ids = tokenizer.encode(document.prompt)
        cut.append(max(0, len(ids) - (block_size - room)))
        requests.append(
            Request(
                prompt=ids[cut[-1] :],
                max_new=min(task.max_new, block_size - len(ids) + cut[-1]),
                budget=conditions.budget,
                sampling=Sampling(temperature=0),
            )
        )

    def finished(index: int, completion: Completion) -> None:
        nonlocal done
        done += 1
        document, text = documents[numbers[index]], completion.text or ""
        right = {"accuracy": float(task.is_right(text, document.answer))}
        keep(numbers[index], Answer(scores=right, groups=document.groups, truncated=cut[index], text=text))
        report(done / len(requests))

    generate(
        model,
        requests,
        tokenizer=tokenizer,
        method=conditions.method,
        budget_mode=None if model.config.is_causal else "proportional",
        batch_size=conditions.answers_at_once,
        compiled=conditions.compiled,
        finished=finished,
    )
