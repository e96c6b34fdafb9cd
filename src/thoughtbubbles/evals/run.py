"""`thoughtbubbles eval`: opens a checkpoint and the exams, has the model sit them, shows tables, writes results.json.

Everything that can be wrong with settings and files is found before the first forward. Answers are kept as they come
(evals/answers.py), and tables and figures are made from results.json.
"""

import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thoughtbubbles import __version__
from thoughtbubbles.checkpoint import find_model, load_folder_tokenizer, load_model, weight_files
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.answers import Answers
from thoughtbubbles.evals.autoregressive import Report, Windows
from thoughtbubbles.evals.documents import Exam, data_folder, open_exam
from thoughtbubbles.evals.exam import Conditions, Keep, check_lengths, sit
from thoughtbubbles.evals.marks import summary
from thoughtbubbles.evals.perplexity import describe, join, perplexity
from thoughtbubbles.evals.progress import Progress
from thoughtbubbles.evals.ranks import Ranks
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.show import show
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.evals.tasks.task import Choices, Question, Task
from thoughtbubbles.evals.windows import text_bytes, windows_for
from thoughtbubbles.files import write_json
from thoughtbubbles.generate.requests import budget_problem, exact_method
from thoughtbubbles.model.transformer import Thoughtbubbles

RESULTS = "results.json"


def run(settings: Evaluation, *, device: str | torch.device, ranks: Ranks = Ranks()) -> dict[str, Any]:  # noqa: B008
    """What results.json holds, on every rank. `device` is one that this machine has."""
    device = torch.device(device)
    folder = find_model(settings.checkpoint)
    tokenizer = _tokenizer(folder)
    model = _model(folder, settings, device)
    if tokenizer.size > model.config.vocab_size:
        raise ValueError(f"--checkpoint {folder}: its tokenizer has {tokenizer.size} ids, more than the model knows")
    windows = windows_for(settings, model.config, tokenizer) if "perplexity" in settings.names else None
    chosen = [TASKS[name] for name in settings.names if name in TASKS]
    exams = [open_exam(task, data_folder(settings.data_dir), limit=settings.limit) for task in chosen]
    for exam in exams:
        check_lengths(exam, tokenizer, block_size=model.config.block_size)
    path = _make_folder(settings) / RESULTS
    about = _about(folder, model, settings)
    tasks: dict[str, Any] = {}
    with Progress(quiet=not ranks.is_first) as progress:
        if windows is not None:
            tasks["perplexity"] = _perplexity(settings, model, windows, tokenizer, ranks, progress)
        for exam in exams:
            tasks[exam.task.name] = _sit(settings, model, tokenizer, exam, about, ranks, progress)
    results = {
        "tasks": {name: tasks[name] for name in settings.names},
        "checkpoint": str(folder),
        "budget": _budget(model, settings),
        "selection": model.config.selection if model.config.fork_layers else None,
        "config": asdict(model.config),
        "settings": {**settings.as_dict(), "device": str(device)},
        "ranks": ranks.size,
        **_circumstances(),
    }
    if ranks.is_first:
        write_json(path, results)
        show(results, path)
    ranks.gather(None)  # nobody leaves before the file is there
    return results


def _model(folder: Path, settings: Evaluation, device: torch.device) -> Thoughtbubbles:
    if settings.dtype == "float64" and device.type == "mps":
        raise ValueError("--dtype float64: mps has none; take --device cpu")
    if settings.compile and device.type != "cuda":
        raise ValueError("--compile: needs a CUDA GPU; leave it out on other devices")
    model = load_model(folder, device=device, dtype=torch.float64 if settings.dtype == "float64" else torch.float32)
    if settings.budget is not None and (wrong := budget_problem(model.config, settings.budget)):
        raise ValueError(f"--{wrong}")
    if settings.compile and (settings.method or exact_method(model.config)) == "recomputed":
        raise ValueError("--compile: only the cache can be compiled; add --method cached, or leave it out")
    return model.eval()


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_folder_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(
            f"--checkpoint {folder} has no tokenizer.json, so nobody can tell whether the data's ids are the model's: "
            "save the model with save_model(…, tokenizer=…)"
        )
    return tokenizer


def _make_folder(settings: Evaluation) -> Path:
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(settings.folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ValueError(f"--out {settings.folder}: cannot be written ({error.strerror}); give another") from None
    return settings.folder


def _budget(model: Thoughtbubbles, settings: Evaluation) -> Any:
    if not model.config.fork_layers:
        return None
    return model.config.budget if settings.budget is None else settings.budget


def _about(folder: Path, model: Thoughtbubbles, settings: Evaluation) -> dict[str, Any]:
    """What answers depend on, beside the questions."""
    files = [path.stat() for path in weight_files(folder)]
    return {
        "weights": [[file.st_size, file.st_mtime_ns] for file in files],
        "config": asdict(model.config),
        "budget": str(_budget(model, settings)),
        "dtype": settings.dtype,
        "method": settings.method,
    }


def _perplexity(
    settings: Evaluation,
    model: Thoughtbubbles,
    windows: Windows,
    tokenizer: Tokenizer,
    ranks: Ranks,
    progress: Progress,
) -> dict[str, Any]:
    n_shares = min(ranks.size, len(windows.ids))
    own = None
    if ranks.rank < n_shares:
        with _products(settings, model):
            own = perplexity(
                model,
                windows.every(n_shares, first=ranks.rank),
                vocab_size=tokenizer.size,
                budget=settings.budget,
                batch=settings.batch,
                report=progress.begin,
            )
    scores = join([share for share in ranks.gather(own) if share is not None])
    return describe(model.config, scores, vocab_size=tokenizer.size, n_bytes=text_bytes(windows, tokenizer))


def _sit(
    settings: Evaluation,
    model: Thoughtbubbles,
    tokenizer: Tokenizer,
    exam: Exam,
    about: Mapping[str, Any],
    ranks: Ranks,
    progress: Progress,
) -> dict[str, Any]:
    task = exam.task
    described = {"task": task.name, "version": task.version, "questions": exam.checksum, **about}
    answers = Answers(settings.folder / "answers", task.name, described, rank=ranks.rank)
    if settings.fresh and ranks.is_first:
        answers.forget()
    known = ranks.gather(answers.read() if ranks.is_first else {})[0]  # all ranks agree on what is left
    left = [number for number in exam.documents if number not in known]
    own = {number: exam.documents[number] for number in left[ranks.rank :: ranks.size]}
    begun = time.perf_counter()
    n_known = len(exam.documents) - len(left)
    report = progress.begin(f"{task.title} ({n_known:,} answered before)" if n_known else task.title)
    if own:
        with answers:
            _answer(settings, model, tokenizer, exam.task, own, keep=answers.add, report=report)
    else:
        report(1.0)
    seconds = max(ranks.gather(time.perf_counter() - begun))
    new = ranks.gather(answers.new)
    every = known | {number: answer for found in new for number, answer in found.items()}
    return {
        **summary(task, [every[number] for number in exam.documents]),
        "seconds": seconds,
        "documents_per_second": len(left) / seconds if left else None,
        "answered_before": n_known,
    }


def _answer(
    settings: Evaluation,
    model: Thoughtbubbles,
    tokenizer: Tokenizer,
    task: Task,
    documents: Mapping[int, Choices | Question],
    *,
    keep: Keep,
    report: Report,
) -> None:
    conditions = Conditions(
        budget=settings.budget,
        batch_tokens=settings.batch_tokens,
        answers_at_once=settings.answers_at_once,
        method=settings.method,
        compiled=settings.compile,
    )
    narrow = _products(settings, model)
    if task.max_new and settings.dtype == "bfloat16":
        model, narrow = deepcopy(model).to(torch.bfloat16), nullcontext()  # writing reads all weights at every step
    with narrow:
        sit(model, tokenizer, task, documents, conditions, keep=keep, report=report)


def _products(settings: Evaluation, model: Thoughtbubbles) -> AbstractContextManager[object]:
    """The precision of matrix products."""
    kind = model.embedding.weight.device.type
    return torch.autocast(kind, torch.bfloat16) if settings.dtype == "bfloat16" else nullcontext()


def _circumstances() -> dict[str, Any]:
    """As run.json of a training run has them."""
    return {
        "command": sys.argv,
        "versions": {"thoughtbubbles": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.platform(),
        "commit": os.environ.get("THOUGHTBUBBLES_COMMIT"),
    }
