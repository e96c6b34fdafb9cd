"""Runs one task with every budget on the same windows or documents, and pairs the results.

An error on one rank (a file, memory, NaN weights) is a ValueError on all of them.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.answers import Answers
from thoughtbubbles.evals.autoregressive import Scores, Windows
from thoughtbubbles.evals.budgets import pair_answers, pair_scores
from thoughtbubbles.evals.documents import Benchmark
from thoughtbubbles.evals.errors import agree
from thoughtbubbles.evals.evaluate import Conditions, evaluate
from thoughtbubbles.evals.metrics import Answer, fits, summary
from thoughtbubbles.evals.perplexity import describe, join, perplexity
from thoughtbubbles.evals.progress import Progress
from thoughtbubbles.evals.results import exact
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.windows import checksum, text_bytes
from thoughtbubbles.generate.requests import exact_method
from thoughtbubbles.model.budget import Number
from thoughtbubbles.model.transformer import Thoughtbubbles


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every task needs."""

    settings: Evaluation
    model: Thoughtbubbles
    tokenizer: Tokenizer
    budgets: tuple[Number | None, ...]
    """The others are compared with the first one. None: the model has no forks."""
    about: Mapping[str, Any]
    """What the answers depend on, in addition to questions and budget."""
    answers: Path
    world: World
    progress: Progress

    def title(self, what: str, budget: Number | None) -> str:
        return f"{what}, r = {budget}" if len(self.budgets) > 1 else what

    def precision(self) -> AbstractContextManager[object]:
        """Context that sets the dtype of matrix products."""
        kind = self.model.embedding.weight.device.type
        return torch.autocast(kind, torch.bfloat16) if self.settings.dtype == "bfloat16" else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of one task."""

    numbers: list[dict[str, Any]]
    """One per budget."""
    paired: dict[str, Any]
    """The budgets compared with the first one."""


def measure_text(job: Job, windows: Windows) -> Found:
    n_bytes, content = text_bytes(windows, job.tokenizer), checksum(windows)
    scores = [_score(job, windows, budget) for budget in job.budgets]
    numbers = [
        {
            **describe(job.model.config, each, vocab_size=job.tokenizer.size, n_bytes=n_bytes),
            "text": content,
        }
        for each in scores
    ]
    return Found(numbers=numbers, paired=pair_scores(numbers[0], scores, job.budgets))


def _score(job: Job, windows: Windows, budget: Number | None) -> dict[str, Scores]:
    world = job.world
    n_shares = min(world.size, len(windows.ids))

    def own() -> dict[str, Scores] | None:
        if world.rank >= n_shares:
            return None
        with job.precision():
            return perplexity(
                job.model,
                windows.every(n_shares, first=world.rank),
                vocab_size=job.tokenizer.size,
                budget=budget,
                batch=job.settings.batch,
                report=lambda title: job.progress.begin(job.title(title, budget)),
            )

    return join([share for share in world.gather(agree(world, own)) if share is not None])


def evaluate_benchmark(job: Job, benchmark: Benchmark) -> Found:
    found = [_answers(job, benchmark, budget) for budget in job.budgets]
    numbers = [
        {**summary(benchmark.task, list(answers.values())), **circumstances, "questions": benchmark.checksum}
        for answers, circumstances in found
    ]
    paired = pair_answers(benchmark, [answers for answers, _ in found], job.budgets)
    return Found(numbers=numbers, paired=paired)


def _answers(job: Job, benchmark: Benchmark, budget: Number | None) -> tuple[dict[int, Answer], dict[str, Any]]:
    """Answers to all documents, in their order; answers on disk are reused."""
    task, world, settings = benchmark.task, job.world, job.settings
    described = {"task": task.name, "version": task.version, "questions": benchmark.checksum, **job.about}
    described["budget"] = None if budget is None else exact(budget)
    if task.max_new:
        described["method"] = settings.method or exact_method(job.model.config)
    answers = Answers(job.answers, task.name, described, rank=world.rank)
    known = world.gather(
        agree(world, lambda: _known(answers, benchmark, fresh=settings.fresh) if world.is_first else {})
    )[0]
    left = [number for number in benchmark.documents if number not in known]
    begun, n_known = time.perf_counter(), len(known)
    agree(world, lambda: _answer(job, benchmark, left[world.rank :: world.size], budget, answers, n_known=n_known))
    seconds = max(world.gather(time.perf_counter() - begun))
    new = world.gather(answers.new)
    every = known | {number: answer for share in new for number, answer in share.items()}
    return {number: every[number] for number in benchmark.documents}, {
        "seconds": seconds,
        "documents_per_second": len(left) / seconds if left else None,
        "answered_before": n_known,
    }


def _known(answers: Answers, benchmark: Benchmark, *, fresh: bool) -> dict[int, Answer]:
    """Saved answers to these documents; none with `fresh`, but those to other documents stay on disk."""
    documents, found = benchmark.documents, {} if fresh else answers.read()
    return {n: answer for n, answer in found.items() if n in documents and fits(documents[n], answer)}


def _answer(
    job: Job, benchmark: Benchmark, numbers: list[int], budget: Number | None, answers: Answers, *, n_known: int
) -> None:
    task, settings, model = benchmark.task, job.settings, job.model
    title = job.title(task.title, budget)
    report = job.progress.begin(f"{title} ({n_known:,} answered before)" if n_known else title)
    if not numbers:
        report(1.0)
        return
    conditions = Conditions(
        budget=budget,
        batch_tokens=settings.batch_tokens,
        answers_at_once=settings.answers_at_once,
        method=settings.method,
        compiled=settings.compile,
    )
    precision = job.precision()
    if task.max_new and settings.dtype == "bfloat16":
        model, precision = deepcopy(model).to(torch.bfloat16), nullcontext()  # decoding reads all weights in every step
    documents = {number: benchmark.documents[number] for number in numbers}
    with answers, precision:
        evaluate(model, job.tokenizer, task, documents, conditions, keep=answers.add, report=report)
