"""`thoughtbubbles eval --harness`: the harness's tasks on local files, its table, and its numbers in results.json.

python -m thoughtbubbles.interop.harness --model thoughtbubbles …      the harness's full command line, with our model
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from thoughtbubbles import __version__
from thoughtbubbles.checkpoint import find_model
from thoughtbubbles.evals.results import RESULTS, exact, home_of, make_folders, move_aside, named_by, weights_of
from thoughtbubbles.files import check_folder, crc32, did_you_mean, short_name, write_json
from thoughtbubbles.generate.requests import Method
from thoughtbubbles.interop.harness_tasks import local_tasks
from thoughtbubbles.interop.lm_eval import ThoughtbubblesLM
from thoughtbubbles.model.config import is_whole

BOOTSTRAP = 1000  # bootstrap samples for the error of a perplexity; the harness's 100,000 take minutes
MOST_DOCUMENTS = 2**40


def run_harness(
    checkpoint: str | Path | None = None,
    *,
    tasks: Sequence[str],
    data_dir: str | Path | None,
    limit: int | None = None,
    budget: int | float | str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    batch_tokens: int | None = None,
    method: Method | None = None,
    compile: bool = False,
    out: Path | None = None,
    cache_dir: Path | None = None,
) -> dict[str, Any]:
    """Returns the contents of results.json, and prints the harness's table.

    tasks      upstream's names: hellaswag, piqa, …, all of blimp and mmlu_continuation or single ones
    data_dir   the folder with the evaluation sets; None: upstream's definitions, which download data from the Hub
    limit      the number of documents per task, the first ones; all by default
    batch_tokens
               tokens per batch, including padding; None: depends on the device
    method     how text is generated: cached or uncached; None: whichever is exact for the model
    compile    on cuda: generate with CUDA graphs
    out        the folder for results.json; by default a new one next to those of `thoughtbubbles eval`
    cache_dir  the folder for definitions on local files; ~/.cache/thoughtbubbles/harness by default
    """
    if limit is not None and not (is_whole(limit) and 1 <= limit <= MOST_DOCUMENTS):
        raise ValueError(f"--limit {short_name(str(limit))}: give a whole number of 1 or more")
    if out is not None:
        check_folder(Path(out), option="--out")
    if not tasks:
        raise ValueError("--tasks is empty: name one task of the harness or more, such as hellaswag")
    definitions = None if data_dir is None else local_tasks(data_dir, tasks, cache_dir=cache_dir)
    manager = _manager(tasks, definitions)
    model = ThoughtbubblesLM(
        find_model(checkpoint),
        budget=budget,
        dtype=dtype,
        device=device,
        batch_tokens=batch_tokens,
        method=method,
        compile=compile,
    )
    name = _name(model, tasks, definitions, limit=limit)
    home = home_of(model.folder) if out is None else Path(out)
    folder = make_folders(home, name, is_given=out is not None)
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(dict.fromkeys(tasks)),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=BOOTSTRAP,
        log_samples=False,
    )
    results: dict[str, Any] = json.loads(json.dumps(found, default=handle_non_serializable))
    results |= {"thoughtbubbles_version": __version__, "name": name}
    if out is not None:
        move_aside(folder, name)
    write_json(folder / RESULTS, results)
    print(make_table(found))
    if "groups" in found:
        print(make_table(found, "groups"))
    print(f"Written: {folder / RESULTS}")
    return results


def _name(model: ThoughtbubblesLM, tasks: Sequence[str], definitions: Path | None, *, limit: int | None) -> str:
    """A name with a checksum of all that the numbers depend on, so that no evaluation replaces another one."""
    config, asked = model.model.config, {"limit": limit, "dtype": model.dtype, "method": model.method}
    told = [f"{name}{value}" for name, value in asked.items() if value not in (None, "float32")]
    if model.budget is not None:
        told.insert(0, f"budget{float(Fraction(str(model.budget))):g}")  # one word for 2, 2.0 and "4/2"
    depends_on = {
        **asked,
        "tasks": list(tasks),
        "weights": weights_of(model.folder),
        "config": asdict(config),
        "tokenizer": model.tokenizer.name,
        "budget": exact(config.budget if model.budget is None else model.budget) if config.fork_layers else None,
        "harness": lm_eval.__version__,
        "data": {path.name: crc32(path) for path in definitions.glob("*.jsonl")} if definitions else None,
    }
    return named_by(["harness", *tasks, *told], depends_on)


def _manager(tasks: Sequence[str], definitions: Path | None) -> TaskManager:
    if definitions is not None:
        return TaskManager(include_path=str(definitions), include_defaults=False)
    manager = TaskManager()
    for task in tasks:
        if task not in manager.all_tasks:
            hint = did_you_mean(task, manager.all_tasks, otherwise="`lm_eval ls tasks` lists them")
            raise ValueError(f"--tasks {short_name(task)}: the harness has no such task; {hint}")
    return manager


if __name__ == "__main__":
    import sys

    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ValueError as error:  # a user's mistake: no traceback
        sys.exit(f"python -m thoughtbubbles.interop.harness: {error}")
