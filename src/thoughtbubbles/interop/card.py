"""The model card: a README.md written from the run's own files. Numbers that are missing there are left out.

Damaged files count as missing. Each result is listed once: of evaluations with the same settings only the newest; other
settings get their own lines, which name them. An export does not know its run: when it is exported again, the numbers
of its own card are kept.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thoughtbubbles.evals.results import exact, home_of, weights_of
from thoughtbubbles.files import parse_json, read_object, shipped_model
from thoughtbubbles.model.config import ModelConfig

LICENCE = "# license: choose one and write it here; the modelling code next to this file is under the MIT licence"
FRONT = f"""\
---
{LICENCE}
library_name: transformers
pipeline_tag: text-generation
tags:
- thoughtbubbles
- adaptive-computation
---
"""
USE = """\
## How to use it

```python
{snippet}```

The code next to the weights needs PyTorch and transformers 5.17 or newer. With the package `thoughtbubbles` installed,
`import thoughtbubbles.interop.hf` takes its place, and `trust_remote_code` is not needed.
"""
WITH_TOKENIZER = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # or the name of this repository
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # needs no custom code
inputs = tokenizer("{prompt}", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={new})[0]))
"""
WITH_IDS = """\
import torch
from transformers import AutoModelForCausalLM

folder = "."  # or the name of this repository
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = torch.tensor([[{ids}]])  # no tokenizer came with these weights
print(model.generate(ids, max_new_tokens={new})[0])
"""
PROMPTS = ("Once upon a time", "Once", "O")
PLAIN = "It is the plain baseline: a GPT without forks."
COPIES = "It is the copy-{copies} baseline: every embedding is repeated {copies} times, and nothing forks."
FORKS = """\
It forks: before the blocks {layers}, streams may be copied or deleted. {most}
(`generate(…, budget=…)` changes that number); a single token may have up to {bubble}.
Selection: {selection}. Merge: {merge}."""
ALL_FORK = (
    "Before the blocks {layers}, every stream forks, so each token has {bubble} streams in the end. Merge: {merge}."
)
MOST = {
    "proportional": "A row keeps at most {budget} streams per token on average",
    "fixed": "A row of any length keeps at most as many streams as a full row with {budget} streams per token",
}
BLOCK = """\
Block selection ranks the full row, including later tokens, so no cache is exact: `generate` reads the full row again
for each token, unless given `use_cache=True`, which uses the causal rule instead."""
REACH = "Forks are visible to their own token and to {reach} tokens after it; others fall out of the KV cache."
MODERN = "Its blocks have RMSNorm, SwiGLU, and normalised queries and keys."
FEEDBACK = "Forks start from the last state of the previous token too, and originals see none of them."
CONVERTED = "The numbers below are those of the {before} weights, before they were converted to {dtype}.\n"
RESULTS = "Results of `thoughtbubbles eval`.\n"
PERPLEXITY = ("text, scored", "nats per token", "perplexity", "bits per byte", "tokens")
BENCHMARKS = ("benchmark", "documents", "accuracy", "acc", "acc_norm", "perplexity", "chance")
CONDITIONS = ("limit", "data", "windows", "method", "selection", "budget", "precision")
DAMAGED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    ZeroDivisionError,
)  # raised by reading damaged files
METRICS = """\
Accuracy in percent ± standard error; accuracy: the choice of the lowest mean loss per token, acc: of the lowest loss in
all, acc_norm: of the lowest loss per character (the last two as in lm-evaluation-harness).
"""


class Fact(NamedTuple):
    name: str
    value: object


def card(name: str, config: ModelConfig, *, parameters: int, dtype: str, folder: Path, has_tokenizer: bool) -> str:
    """`folder` is where the model comes from, inside its run or alone; `dtype` is that of the exported weights."""
    snippet = WITH_TOKENIZER if has_tokenizer else WITH_IDS
    room = config.block_size // 2  # for the prompt, at a token per character or fewer
    prompt = next((each for each in PROMPTS if len(each) <= room), PROMPTS[-1])
    ids = ", ".join(map(str, range(1, 1 + max(1, min(3, room)))))
    use = USE.format(snippet=snippet.format(new=max(1, min(32, room)), prompt=prompt, ids=ids))
    known = earlier_sections(folder)
    front, begin = known.get("front", FRONT), known.get("begin", "")
    parts = [front, f"# {name}\n", about(config) + "\n", begin, use, "## The model\n"]
    parts.append(facts([Fact("parameters", parameters), Fact("dtype", dtype), *shape(config)]))
    training = facts(training_rows(folder)) or known.get("Training", "")
    scores = joined(evaluation(evaluations(folder)), known.get("Evaluation", ""))
    before = read_json(folder / "config.json").get("dtype", dtype)
    if training or scores:
        parts.append(known.get("converted", CONVERTED.format(before=before, dtype=dtype) if before != dtype else ""))
    parts += ["## Training\n", training] if training else []
    parts += ["## Evaluation\n", scores] if scores else []
    parts += ["## Samples\n", known["Samples"]] if "Samples" in known else []
    return "\n".join(part for part in parts if part)


def earlier_sections(folder: Path) -> dict[str, str]:
    """The sections of a card, by heading, if the folder has one: it is an export, or the model in the package.

    `converted` is its remark on a dtype conversion; of the model in the package, `front` is the metadata with its
    licence and `begin` its first paragraph.
    """
    is_shipped = folder.resolve() == shipped_model().resolve()
    is_ours = (folder / "modeling_thoughtbubbles.py").is_file() or is_shipped
    if not is_ours or not (folder / "README.md").is_file():
        return {}
    text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    _, *parts = re.split(r"^## (.+)\n+", text, flags=re.MULTILINE)
    found = {heading: body.rstrip() + "\n" for heading, body in zip(parts[::2], parts[1::2], strict=True)}
    converted = re.search(r"^The numbers below are those of .*\n", text, flags=re.MULTILINE)
    if is_shipped:
        begin = re.search(r"^# .*\n\n((?:.+\n)+)", text, flags=re.MULTILINE)
        found["front"] = FRONT.replace(LICENCE, "license: mit")
        found["begin"] = begin.group(1) if begin else ""
    return found | ({"converted": converted.group()} if converted else {})


def joined(new: str, old: str) -> str:
    """The new section, and the lines of the old one that it lacks, ignoring empty columns of tables."""
    if not (new and old):
        return new or old
    known, parts = set(map(cells_of, new.splitlines())), [new.rstrip()]
    for part in re.split(r"\n{2,}", old.strip()):
        n_heading = 2 if part.startswith("|") else 0
        heading, lines = part.splitlines()[:n_heading], part.splitlines()[n_heading:]
        if left := [line for line in lines if cells_of(line) not in known]:
            parts.append("\n".join([*heading, *left] if heading else lines))
    return "\n\n".join(parts) + "\n"


def cells_of(line: str) -> tuple[str, ...]:
    return tuple(cell for each in re.split(r"(?<!\\)\|", line) if (cell := each.strip()))


def about(config: ModelConfig) -> str:
    kind = PLAIN if config.copies == 1 else COPIES.format(copies=config.copies)
    if config.fork_layers:
        layers = ", ".join(map(str, config.fork_layers))
        most = MOST[config.budget_mode].format(budget=config.budget)
        kind = (FORKS if config.scores else ALL_FORK).format(
            layers=layers, most=most, bubble=config.max_bubble, selection=config.selection, merge=config.merge
        )
        kind += f"\n{BLOCK}" if config.selection == "block" else ""
        kind += "" if config.fork_reach is None else f"\n{REACH.format(reach=config.fork_reach)}"
        kind += f"\n{FEEDBACK}" if config.feedback else ""
    kind += f"\n{MODERN}" if config.block == "modern" else ""
    return f"A language model of the Thoughtbubbles family. {kind}"


def shape(config: ModelConfig) -> list[Fact]:
    return [
        Fact("blocks", config.n_layer),
        Fact("heads", config.n_head),
        Fact("width", config.width),
        Fact("vocabulary", config.vocab_size),
        Fact("context length", config.block_size),
    ]


def training_rows(folder: Path) -> list[Fact]:
    """What the run reports about the step that this model comes from."""
    step_name = folder.parent.name.removeprefix("step-")
    run = folder.parent.parent
    if folder.name != "model" or not step_name.isdecimal() or not (described := read_json(run / "run.json")):
        return []
    step = int(step_name)
    return [
        *whole(recipe_rows(described)),
        Fact("steps", step),
        *whole(metric_rows(metrics(run), step)),
        *whole(data_rows(described)),
    ]


def whole(rows: Iterator[Fact]) -> list[Fact]:
    """All rows, or none if one cannot be read."""
    try:
        return list(rows)
    except DAMAGED:
        return []


def recipe_rows(described: dict[str, Any]) -> Iterator[Fact]:
    yield Fact("recipe", described["config"].get("name"))


def metric_rows(found: list[dict[str, Any]], step: int) -> Iterator[Fact]:
    lines = [line for line in found if isinstance(line.get("step"), int) and line["step"] <= step]
    trained = [line for line in lines if line["step"] == step and "loss" in line]
    if trained:
        yield Fact("tokens", trained[-1].get("tokens"))
        yield Fact("training loss of the last step (nats)", trained[-1]["loss"])
    for line in reversed(lines):
        losses = line.get("validation_loss", line.get("held_out"))  # its name in the first run folders
        if isinstance(losses, dict):
            at = "" if line["step"] == step else f", step {line['step']:,}"
            yield from (Fact(f"validation loss (nats), {source}{at}", loss) for source, loss in losses.items())
            return


def data_rows(described: dict[str, Any]) -> Iterator[Fact]:
    mixture = described["config"].get("data", {}).get("mixture")
    if mixture:
        yield Fact("data", ", ".join(Path(str(source)).name for source in mixture))
    for library, version in described.get("versions", {}).items():
        yield Fact(f"version of {library}", version)


class Line(NamedTuple):
    """A line in a table of results."""

    measured: tuple[str, ...]  # what was measured, and how: of equal lines the newest counts
    cells: dict[str, object]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Results of `thoughtbubbles eval` for exactly these weights, whatever their folder's name; the oldest first."""
    places = [folder]
    if folder.name == "model" and folder.parent.name.startswith("step-"):
        places += [folder.parent, folder.parent.parent]
    paths = [*home_of(folder).glob("*/results.json")]
    paths += [
        path for place in places for form in ("eval-*/", "eval-*/*/") for path in place.glob(f"{form}results.json")
    ]
    if not paths:
        return []
    weights = weights_of(folder)
    found = [results for path in sorted(set(paths)) if is_about(results := read_json(path), folder, weights)]
    return sorted(found, key=lambda results: str(results.get("time", "")))


def is_about(results: dict[str, Any], folder: Path, weights: dict[str, int]) -> bool:
    if "weights" in results:
        return bool(results["weights"] == weights)
    told = str(results.get("checkpoint", ""))  # all that results before 0.2 have
    return Path(told).parts[-2:] == folder.resolve().parts[-2:]


def evaluation(every: Sequence[dict[str, Any]]) -> str:
    """Perplexity by way, and one line per benchmark; groups, single windows and times are only in results.json."""
    lines: dict[str, dict[tuple[str, ...], dict[str, object]]] = {"perplexity": {}, "benchmarks": {}}
    for results in every:
        for kind, line in result_lines(results):
            lines[kind].pop(line.measured, None)
            lines[kind][line.measured] = line.cells
    ways, benchmarks = (list(lines[kind].values()) for kind in ("perplexity", "benchmarks"))
    parts = [table((*PERPLEXITY, *CONDITIONS), [list(cells.values()) for cells in ways])]
    parts.append(table((*BENCHMARKS, *CONDITIONS), [list(cells.values()) for cells in benchmarks]))
    parts.append(METRICS if benchmarks else "")
    return "\n".join([RESULTS, *filter(None, parts)]) if ways or benchmarks else ""


def result_lines(results: dict[str, Any]) -> list[tuple[str, Line]]:
    """The lines of one results.json, for all its budgets; none if anything in it cannot be read."""
    try:
        found = [(results["budget"], results["tasks"])]
        if "budgets" in results:
            found += [(budget, other["tasks"]) for budget, other in results["budgets"]["others"].items()]
        return [
            (kind, line)
            for budget, tasks in found
            for task, scores in tasks.items()
            for kind, line in task_lines(results, task, scores, budget)
        ]
    except DAMAGED:
        return []


def task_lines(
    results: dict[str, Any], task: str, scores: dict[str, Any], budget: object
) -> Iterator[tuple[str, Line]]:
    told = conditions(results, task, scores, budget)
    same = [task, told["limit"], told["method"], told["selection"], told["precision"], budget and exact(budget)]
    if task == "perplexity":
        text = scores.get("text", (told["data"], told["windows"]))
        for name, way in scores["ways"].items():
            yield "perplexity", Line(tuple(map(str, [*same, text, name])), way_cells(way) | told)
    else:
        asked = [scores["version"], scores.get("questions")]
        yield "benchmarks", Line(tuple(map(str, [*same, *asked])), benchmark_cells(scores) | told)


def way_cells(way: dict[str, Any]) -> dict[str, object]:
    return {
        "title": way["title"],
        "nats": with_error(way["nats"], way["standard_error"], "{:.4f}"),
        "perplexity": with_error(way["perplexity"], way["perplexity_standard_error"], "{:,.2f}"),
        "bits_per_byte": way["bits_per_byte"],
        "tokens": way["tokens"],
    }


def benchmark_cells(benchmark: dict[str, Any]) -> dict[str, object]:
    scores = [benchmark.get(way) for way in ("accuracy", "accuracy_sum", "accuracy_character")]
    percent = [each and with_error(100 * each["mean"], scaled(each["standard_error"]), "{:.2f}") for each in scores]
    words = benchmark.get("perplexity")
    return {
        "title": benchmark["title"],
        "documents": benchmark["documents"],
        **dict(zip(BENCHMARKS[2:5], percent, strict=True)),
        "words": words and with_error(words["mean"], words["standard_error"], "{:,.2f}"),
        "chance": None if benchmark["chance"] is None else f"{100 * benchmark['chance']:.2f}",
    }


def conditions(results: dict[str, Any], task: str, scores: dict[str, Any], budget: object) -> dict[str, object]:
    """What the numbers depend on, in the order of CONDITIONS."""
    settings, is_text = results["settings"], task == "perplexity"
    return {
        "limit": None if is_text else settings["limit"],
        "data": f"{Path(settings['data']).name}, {settings['split']}" if is_text else None,
        "windows": windows_of(scores) if is_text else None,
        "method": settings.get("method") if task == "gsm8k" else None,
        "selection": results["selection"],
        "budget": budget,
        "precision": settings["dtype"],
    }


def windows_of(scores: Mapping[str, Any]) -> str:
    sizes = [window["tokens"] for window in scores["ways"]["blockwise"]["windows"]]
    return f"{len(sizes):,} × {max(sizes):,}"


def scaled(error: float | None) -> float | None:
    return None if error is None else 100 * error


def with_error(value: float, error: float | None, form: str) -> str:
    return form.format(value) + ("" if error is None else f" ± {form.format(error)}")


def facts(rows: list[Fact]) -> str:
    return table(("", ""), [list(row) for row in rows if row.value is not None])


def table(heading: Sequence[str], lines: list[list[object]]) -> str:
    """A Markdown table without its empty columns; nothing if there are no lines."""
    used = [i for i in range(len(heading)) if any(line[i] is not None for line in lines)]
    every: list[Sequence[object]] = [heading, ["---"] * len(heading), *lines]
    written = ["| " + " | ".join(one_line(line[i]) for i in used) + " |" for line in every]
    return "\n".join([*written, ""]) if lines else ""


def one_line(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}"
    return (f"{value:,}" if isinstance(value, int) else str(value)).replace("|", "\\|").replace("\n", " ")


def metrics(run: Path) -> list[dict[str, Any]]:
    """The run's metrics; a run that was killed may have left half a line."""
    path = run / "metrics.jsonl"
    return [parsed(line) for line in path.read_bytes().splitlines()] if path.is_file() else []


def read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path) if path.is_file() else {}
    except ValueError:
        return {}


def parsed(text: bytes) -> dict[str, Any]:
    try:
        found = parse_json(text, where="", remedy="")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
