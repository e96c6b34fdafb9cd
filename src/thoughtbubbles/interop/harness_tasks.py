"""The harness's own tasks on local files: nothing is downloaded; prompts, choices and metrics are upstream's.

    DATA/hellaswag.validation.jsonl.gz  →  FOLDER/hellaswag.validation.jsonl   the same records in upstream's fields
                                           FOLDER/hellaswag.yaml               upstream's definition, reading that file

FOLDER is in a cache, under a name derived from the sources' sizes and times: a second run finds it, changed data gets
another. It is published when it is complete. To print its path, for the `lm_eval` command:

    python -m thoughtbubbles.interop.harness_tasks DATA
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks._yaml_loader import load_yaml

from thoughtbubbles.evals.documents import ENDINGS, data_folder, find_files, records
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.evals.tasks.task import Task
from thoughtbubbles.files import check_folder, did_you_mean, short_name

FORMAT = 1  # version of the written files; another one makes new folders
UPSTREAM = Path(lm_eval.tasks.__file__).parent
LOCAL_TASK = "thoughtbubbles.interop.lm_eval.LocalTask"

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalSet:
    """Upstream tasks that read the file of one of our benchmarks."""

    benchmark: Task
    split: str
    """Upstream's name of the evaluated split."""
    definitions: tuple[str, ...]
    """Upstream's definitions, as patterns in its folder of tasks."""
    rewrite: Callable[[Record], Record]
    """Converts one of our records to upstream's fields."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Files for upstream's other splits, used for few-shot prompts if available."""
    part: str | None = None
    """The field with a record's task (upstream's dataset_name), if one file serves many tasks."""
    group: str | None = None
    """Upstream's definition of the group of all these tasks."""

    @property
    def files(self) -> dict[str, str]:
        """Our file for each of upstream's splits, without extension."""
        return {self.split: self.benchmark.file, **self.more}


def _lambada(record: Record) -> Record:
    return {"text": f"{record['context']} {record['target']}"}


def _hellaswag(record: Record) -> Record:
    kept = {name: record[name] for name in ("activity_label", "ctx_a", "ctx_b", "endings")}
    return {**kept, "label": str(record["label"])}


def _arc(record: Record) -> Record:
    labels = "ABCDEFGH"[: len(record["choices"])]
    choices = {"text": record["choices"], "label": list(labels)}
    return {"question": record["question"], "choices": choices, "answerKey": labels[record["gold"]]}


def _same(*names: str) -> Callable[[Record], Record]:
    return lambda record: {name: record[name] for name in names}


SETS = (
    LocalSet(benchmark=TASKS["lambada"], split="test", definitions=("lambada/lambada_openai.yaml",), rewrite=_lambada),
    LocalSet(
        benchmark=TASKS["hellaswag"], split="validation", definitions=("hellaswag/hellaswag.yaml",), rewrite=_hellaswag
    ),
    LocalSet(
        benchmark=TASKS["blimp"],
        split="train",
        definitions=("blimp/[!_]*.yaml",),
        rewrite=_same("sentence_good", "sentence_bad"),
        part="UID",
        group="blimp/_blimp.yaml",
    ),
    *(
        LocalSet(
            benchmark=TASKS[name],
            split="test",
            definitions=(f"arc/{name}.yaml",),
            rewrite=_arc,
            more={split: f"{name}.{split}" for split in ("validation", "train")},
        )
        for name in ("arc_easy", "arc_challenge")
    ),
    LocalSet(
        benchmark=TASKS["piqa"],
        split="validation",
        definitions=("piqa/piqa.yaml",),
        rewrite=_same("goal", "sol1", "sol2", "label"),
        more={"train": "piqa.train"},
    ),
    LocalSet(
        benchmark=TASKS["mmlu_continuation"],
        split="test",
        definitions=("mmlu/continuation/mmlu_*.yaml",),
        rewrite=_same("subject", "question", "choices", "answer"),
        more={"dev": "mmlu.dev"},
        part="subject",
        group="mmlu/continuation/_mmlu.yaml",
    ),
    LocalSet(
        benchmark=TASKS["gsm8k"],
        split="test",
        definitions=("gsm8k/gsm8k.yaml", "gsm8k/gsm8k-cot-zeroshot.yaml", "gsm8k/gsm8k-cot.yaml"),
        rewrite=_same("question", "answer"),
        more={"train": "gsm8k.train"},
    ),
)


def local_tasks(data_dir: str | Path, tasks: Sequence[str] = (), *, cache_dir: Path | None = None) -> Path:
    """The folder with the definitions of these tasks (none named: all that have files), written if necessary."""
    data_dir = data_folder(Path(data_dir))
    check_tasks(tasks, data_dir)
    wanted = [of_set for of_set in SETS if not tasks or set(tasks) & set(task_names(of_set))]
    sources = find_sources(wanted, data_dir)
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources.values()]
    key = json.dumps([FORMAT, lm_eval.__version__, str(UPSTREAM), sorted(states)])
    cache = check_folder(cache_dir or default_cache(), option="--cache-dir")
    folder = cache / f"tasks-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for of_set in wanted:
                _write_set(of_set, sources, partial, folder)
            partial.chmod(0o755)
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    for of_set in wanted if tasks else ():
        _check_complete(of_set, tasks, folder)
    return folder


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thoughtbubbles" / "harness"


def find_sources(sets: Iterable[LocalSet], data_dir: Path) -> dict[str, Path]:
    """The available files by name without extension: in the folder itself, or in its subfolder `eval`."""
    names = {name for of_set in sets for name in of_set.files.values()}
    places = [(folder, ending) for folder in (data_dir, data_dir / "eval") for ending in ENDINGS]
    found = {
        name: [path for folder, ending in places if (path := folder / (name + ending)).is_file()] for name in names
    }
    return {name: paths[0] for name, paths in found.items() if paths}


def check_tasks(tasks: Sequence[str], data_dir: Path) -> None:
    known = {name: of_set for of_set in SETS for name in task_names(of_set)}
    for task in tasks:
        if task not in known:
            short = [name for of_set in SETS for name in task_names(of_set)[: None if of_set.group is None else 1]]
            hint = did_you_mean(task, known, otherwise=f"choose from {', '.join(short)}")
            raise ValueError(f"--tasks {short_name(task)}: the harness has no such task on local files; {hint}")
        find_files(known[task].benchmark, data_dir)  # its error says what to fetch and where to put it


def _check_complete(of_set: LocalSet, tasks: Sequence[str], folder: Path) -> None:
    lacking = [name for name in _own_names(of_set) if not (folder / f"{name}.yaml").exists()]
    for task in tasks:
        if task in lacking or (lacking and task == task_names(of_set)[0]):
            parts = ", ".join(lacking[:3]) + (", …" if len(lacking) > 3 else "")
            raise ValueError(
                f"--tasks {task}: {of_set.benchmark.file}.jsonl has no records for {parts}; fetch the full file"
            )


@cache
def task_names(of_set: LocalSet) -> tuple[str, ...]:
    """All names that can be requested: the group if there is one, single tasks, and their tags."""
    if of_set.group is None:
        return _own_names(of_set)
    tags = {str(tag) for path in definitions(of_set) if (tag := load_yaml(path, resolve_func=False).get("tag"))}
    return (load_yaml(UPSTREAM / of_set.group, resolve_func=False)["group"], *_own_names(of_set), *sorted(tags))


@cache
def _own_names(of_set: LocalSet) -> tuple[str, ...]:
    return tuple(load_yaml(path, resolve_func=False)["task"] for path in definitions(of_set))


def definitions(of_set: LocalSet) -> list[Path]:
    return [path for pattern in of_set.definitions for path in sorted(UPSTREAM.glob(pattern))]


def _write_set(of_set: LocalSet, sources: Mapping[str, Path], partial: Path, folder: Path) -> None:
    if of_set.benchmark.file not in sources:
        return
    at_hand = {split: name for split, name in of_set.files.items() if name in sources}
    written = {split: _write_records(of_set, sources[name], partial, name) for split, name in at_hand.items()}
    for path in definitions(of_set):
        upstream = load_yaml(path, resolve_func=False)
        part = upstream["dataset_name"] if of_set.part else None
        data_files = {split: str(folder / files[part]) for split, files in written.items() if part in files}
        if of_set.split in data_files:
            (partial / f"{upstream['task']}.yaml").write_text(_definition(path, upstream, data_files))
    if of_set.group:
        (partial / f"{task_names(of_set)[0]}.yaml").write_text(f"include: {json.dumps(str(UPSTREAM / of_set.group))}\n")


def _definition(path: Path, upstream: Record, data_files: Mapping[str, str]) -> str:
    lines = {
        "include": json.dumps(str(path)),
        "class": f"!function {LOCAL_TASK}",
        "dataset_path": "json",
        "dataset_name": "null",
        "dataset_kwargs": json.dumps({"data_files": data_files}),
    }
    for split in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if upstream.get(split) is not None and upstream[split] not in data_files:
            lines[split] = "null"  # otherwise upstream looks for it
    return "".join(f"{name}: {value}\n" for name, value in lines.items())


def _write_records(of_set: LocalSet, source: Path, partial: Path, name: str) -> dict[str | None, str]:
    """Writes the records in upstream's fields; returns the file names by part."""
    parts: dict[str | None, list[str]] = {}
    named_parts = {load_yaml(path, resolve_func=False)["dataset_name"] for path in definitions(of_set)}
    for number, record in records(source):
        try:
            of_set.benchmark.document(record)  # validates the fields
            if of_set.part and record[of_set.part] not in named_parts:
                continue
            line = json.dumps(of_set.rewrite(record), ensure_ascii=False)
            parts.setdefault(record[of_set.part] if of_set.part else None, []).append(line)
        except KeyError as error:
            missing = f"the field {error} is missing; a line has {of_set.benchmark.fields}"
            raise ValueError(f"{source}, line {number}: {missing}") from None
        except (IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{source}, line {number}: {error}; a line has {of_set.benchmark.fields}") from None
        except RecursionError:
            raise ValueError(f"{source}, line {number}: a field is nested too deeply") from None
    files = {part: f"{name}.jsonl" if part is None else f"{name}.{part}.jsonl" for part in parts}
    for part, lines in parts.items():
        (partial / files[part]).write_text("\n".join(lines) + "\n")
    return files


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():  # if it does, another process has written the same
            raise


def main() -> None:
    """Prints the folder with the definitions."""
    import sys

    import tyro

    def tasks(data_dir: tyro.conf.Positional[Path], *, cache_dir: Path | None = None) -> None:
        """Write the harness's tasks for local files, and print their folder.

        Args:
            data_dir: The folder with the evaluation sets, or the parent of a folder `eval` with them.
            cache_dir: Where to create the folder; ~/.cache/thoughtbubbles/harness by default.
        """
        print(local_tasks(data_dir, cache_dir=cache_dir))

    name = "python -m thoughtbubbles.interop.harness_tasks"
    try:
        tyro.cli(tasks, prog=name)
    except (ValueError, OSError) as error:  # a user's mistake: no traceback
        sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
