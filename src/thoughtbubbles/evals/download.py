"""Downloads the question files of benchmarks from Hugging Face, in the form that evals/documents.py reads.

`thoughtbubbles download --out DIR`. Each file is written whole or not at all, and one that is there is left alone.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from thoughtbubbles.data.compressed import extra
from thoughtbubbles.data.sources import one_line
from thoughtbubbles.evals.documents import ENDINGS
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.files import check_folder, did_you_mean, write_atomically

Line = Mapping[str, Any]


class Hub(NamedTuple):
    """Where the lines of a file are, and how each becomes ours."""

    repository: str
    config: str | None
    split: str
    line: Callable[[Line], Line] = lambda line: line


ALL = "*"  # every configuration of a repository, one after the other


def last_word(line: Line) -> Line:
    context, target = line["text"].rsplit(" ", 1)
    return {"context": context, "target": target}


def by_letter(line: Line) -> Line:
    """ARC's choices are labelled A to E or 1 to 5; ours are counted from 0."""
    texts, labels = (list(line["choices"][name]) for name in ("text", "label"))
    return {"id": line["id"], "question": line["question"], "choices": texts, "gold": labels.index(line["answerKey"])}


def arc(config: str, split: str) -> Hub:
    return Hub("allenai/ai2_arc", config, split, by_letter)


# By the name of the file. The repositories are those of lm-evaluation-harness 0.4.13: the homes of PIQA and others have
# loading scripts, which `datasets` no longer runs.
FILES: dict[str, Hub] = {
    "lambada_openai.test": Hub("EleutherAI/lambada_openai", "default", "test", last_word),
    "hellaswag.validation": Hub("Rowan/hellaswag", None, "validation"),
    "blimp": Hub("nyu-mll/blimp", ALL, "train"),
    "piqa.validation": Hub("baber/piqa", None, "validation"),
    "arc_easy.test": arc("ARC-Easy", "test"),
    "arc_challenge.test": arc("ARC-Challenge", "test"),
    "mmlu.test": Hub("cais/mmlu", "all", "test"),
    "gsm8k.test": Hub("openai/gsm8k", "main", "test"),
    # To train on, in `reproduce gsm8k` and `two-stage`.
    "arc_easy.train": arc("ARC-Easy", "train"),
    "arc_challenge.train": arc("ARC-Challenge", "train"),
    "mmlu.dev": Hub("cais/mmlu", "all", "dev"),
    "gsm8k_augformat.train": Hub("whynlp/gsm8k-aug", None, "train"),
}
TESTS = tuple(name for name in FILES if any(name == task.file for task in TASKS.values()))


def files_of(names: Sequence[str]) -> list[str]:
    """The files of benchmarks, which are given by the names of `eval --tasks` or of files; by default all tests."""
    found = []
    for name in names or TESTS:
        file = TASKS[name].file if name in TASKS else name
        if file not in FILES:
            home = f"get it from {TASKS[name].home}" if name in TASKS else None
            known = did_you_mean(name, [*TASKS, *FILES], otherwise=f"choose from {', '.join([*TASKS, *FILES])}")
            raise ValueError(f"{name}: {home or f'no benchmark has this name; {known}'}")
        found.append(file)
    return list(dict.fromkeys(found))


def download(names: tyro.conf.Positional[tuple[str, ...]] = (), /, *, out: Path) -> None:
    """Download the questions of benchmarks from Hugging Face, for --data-dir of eval, analyze and reproduce.

    Needs `pip install 'thoughtbubbles[data]'`. Files that are there already are left alone, so an interrupted download
    goes on with the same command. CLUTRR has to be fetched from its own repository.

    Args:
        names: Benchmarks, such as hellaswag or gsm8k, or single files, such as arc_easy.train. Default: all test
            questions.
        out: Folder for the files, such as data/eval.
    """
    files, folder = files_of(names), check_folder(out, option="--out")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        there = next((path for ending in ENDINGS if (path := folder / f"{file}{ending}").is_file()), None)
        if there is not None:
            print(f"{there}: is there already")
            continue
        lines = list(lines_of(file))
        path = folder / f"{file}.jsonl.gz"
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        write_atomically(path, [gzip.compress(text.encode(), mtime=0)])
        print(f"{path}: {len(lines):,} lines from {FILES[file].repository}", flush=True)


def lines_of(file: str) -> Iterator[Line]:
    hub = FILES[file]
    for number, line in enumerate(lines_on(hub, file), 1):
        try:
            yield dict(hub.line(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: line {number} of {hub.repository} is not what it was when this command was written "
                f"({type(error).__name__}: {one_line(error)})"
            ) from error


def lines_on(hub: Hub, file: str) -> Iterator[Line]:
    datasets = extra("datasets", f"to download {hub.repository} from Hugging Face")
    try:
        configs = datasets.get_dataset_config_names(hub.repository) if hub.config == ALL else [hub.config]
        for config in configs:
            yield from datasets.load_dataset(hub.repository, config, split=hub.split)
    except Exception as error:  # the network and the libraries under `datasets` can raise anything
        raise ValueError(
            f"{file}: {hub.repository} cannot be read from Hugging Face ({type(error).__name__}: {one_line(error)}): "
            "run the same command again, which goes on with what is missing"
        ) from error
