"""`thoughtbubbles eval --harness`: the harness's tasks on local files, its table, and its numbers in results.json.

python -m thoughtbubbles.interop.harness --model thoughtbubbles …      the harness's whole command line, with our model
"""

import json
import logging
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from thoughtbubbles import __version__
from thoughtbubbles.files import write_json
from thoughtbubbles.generate.requests import Method
from thoughtbubbles.interop.harness_tasks import local_tasks
from thoughtbubbles.interop.lm_eval import ThoughtbubblesLM

BOOTSTRAP = 1000  # resamples for the error of a perplexity; the harness's 100,000 take minutes
RESULTS = "results.json"


def run_harness(
    checkpoint: str | Path,
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
    """What results.json holds; shows the harness's table.

    tasks      upstream's names: hellaswag, piqa, …, all of blimp and mmlu_continuation or single ones
    data_dir   the folder that has the evaluation sets; None: upstream's definitions, which ask the Hub for the data
    limit      documents of each task, the first ones; all by default
    batch_tokens
               tokens at a time, padding included; None: what suits the device
    method     how texts are written: cached or recomputed; None: whichever is exact for the model
    compile    on cuda: texts are written in steps as graphs
    out        where results.json goes; CHECKPOINT/eval-harness by default
    cache_dir  where definitions on local files go; ~/.cache/thoughtbubbles/harness by default
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: give 1 or more")
    manager = _manager(tasks, data_dir, cache_dir)
    model = ThoughtbubblesLM(
        checkpoint,
        budget=budget,
        dtype=dtype,
        device=device,
        batch_tokens=batch_tokens,
        method=method,
        compile=compile,
    )
    folder = Path(checkpoint) / "eval-harness" if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
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
    results["thoughtbubbles_version"] = __version__
    write_json(folder / RESULTS, results)
    print(make_table(found))
    if "groups" in found:
        print(make_table(found, "groups"))
    print(f"Written: {folder / RESULTS}")
    return results


def _manager(tasks: Sequence[str], data_dir: str | Path | None, cache_dir: Path | None) -> TaskManager:
    if not tasks:
        raise ValueError("--tasks is empty: name one task of the harness or more, such as hellaswag")
    if data_dir is not None:
        folder = local_tasks(data_dir, tasks, cache_dir=cache_dir)
        return TaskManager(include_path=str(folder), include_defaults=False)
    manager = TaskManager()
    for task in tasks:
        if task not in manager.all_tasks:
            near = get_close_matches(task, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
            raise ValueError(f"--tasks {task}: the harness has no such task; {hint}")
    return manager


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
