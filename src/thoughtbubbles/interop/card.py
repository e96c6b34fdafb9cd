"""The model card: a README.md written from the run's own files. A number that is not there is not in the card."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from thoughtbubbles.model.config import ModelConfig

FRONT = """\
---
# license: yours to choose and to write here; the modelling code beside this file is under the MIT licence
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
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # or the name of this repository
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```

The code beside the weights needs PyTorch and transformers 5.17 or newer. With the package `thoughtbubbles` installed,
`import thoughtbubbles.interop.hf` takes its place, and `trust_remote_code` is not needed.
"""
PLAIN = "It is the plain baseline: a GPT without forks."
COPIES = "It is the copy-{copies} baseline: every token enters {copies} times, and nothing forks."
FORKS = """\
It forks: before the blocks {layers}, streams may be copied or deleted, and at most {budget} streams a token survive
(`generate(…, budget=…)` changes that number). Selection: {selection}. Merge: {merge}."""
BLOCK = """\
Block selection looks at the whole row, later tokens included, so no cache is exact: `generate` reads all of every row
anew unless it is told `use_cache=True`, which lets the causal rule stand in."""


class Row(NamedTuple):
    name: str
    value: object


def card(name: str, config: ModelConfig, *, parameters: int, dtype: str, folder: Path) -> str:
    """`folder` is the one that the model comes from, inside its run or alone; `dtype` that of the exported weights."""
    parts = [FRONT, f"# {name}\n", about(config) + "\n", USE, "## The model\n"]
    parts.append(table([Row("parameters", parameters), Row("dtype", dtype), *shape(config)]))
    training = list(training_rows(folder))
    scores = [row for path in result_files(folder) for row in result_rows(path)]
    before = read_json(folder / "config.json").get("dtype", dtype)
    if before != dtype and (training or scores):
        parts.append(f"The numbers below are those of the {before} weights, before they were converted to {dtype}.\n")
    parts += ["## Training\n", table(training)] if training else []
    parts += ["## Evaluation\n", table(scores)] if scores else []
    return "\n".join(parts)


def about(config: ModelConfig) -> str:
    kind = PLAIN if config.copies == 1 else COPIES.format(copies=config.copies)
    if config.fork_layers:
        layers = ", ".join(map(str, config.fork_layers))
        kind = FORKS.format(layers=layers, budget=config.budget, selection=config.selection, merge=config.merge)
        kind += f"\n{BLOCK}" if config.selection == "block" else ""
    return f"A language model of the Thoughtbubbles family. {kind}"


def shape(config: ModelConfig) -> list[Row]:
    return [
        Row("blocks", config.n_layer),
        Row("heads", config.n_head),
        Row("width", config.width),
        Row("vocabulary", config.vocab_size),
        Row("tokens in a row, at most", config.block_size),
    ]


def training_rows(folder: Path) -> Iterator[Row]:
    """What the run says of the step that this model is from."""
    step_name = folder.parent.name.removeprefix("step-")
    run = folder.parent.parent
    if folder.name != "model" or not step_name.isdecimal() or not (described := read_json(run / "run.json")):
        return
    step, config = int(step_name), described.get("config", {})
    yield Row("recipe", config.get("name"))
    yield Row("steps", step)
    facts = [line for line in metrics(run) if isinstance(line.get("step"), int) and line["step"] <= step]
    trained = [line for line in facts if line["step"] == step and "loss" in line]
    if trained:
        yield Row("tokens", trained[-1].get("tokens"))
        yield Row("training loss of the last step (nats)", trained[-1]["loss"])
    held_out = [line for line in facts if isinstance(line.get("held_out"), dict)]
    if held_out:
        at = "" if held_out[-1]["step"] == step else f", step {held_out[-1]['step']:,}"
        for source, loss in held_out[-1]["held_out"].items():
            yield Row(f"held-out loss (nats), {source}{at}", loss)
    mixture = config.get("data", {}).get("mixture")
    if mixture:
        yield Row("data", ", ".join(Path(str(source)).name for source in mixture))
    for library, version in described.get("versions", {}).items():
        yield Row(f"version of {library}", version)


def result_files(folder: Path) -> list[Path]:
    """Evaluations of this very model, by whatever name it was called when they ran."""
    places = [folder]
    if folder.name == "model" and folder.parent.name.startswith("step-"):
        places += [folder.parent, folder.parent.parent]
    found = [path for place in places for path in sorted(place.glob("eval-*/results.json"))]
    return [path for path in found if is_about(path, folder)]


def is_about(path: Path, folder: Path) -> bool:
    named = Path(str(read_json(path).get("checkpoint", "")))
    return named.resolve() == folder.resolve() or named.parts[-2:] == folder.resolve().parts[-2:]


def result_rows(path: Path) -> Iterator[Row]:
    found = read_json(path)
    rule = f" ({found['selection']} selection, budget {found['budget']})" if found.get("selection") else ""
    tasks = found.get("tasks")
    for task, scores in (tasks if isinstance(tasks, dict) else {}).items():
        for name, value in numbers(scores):
            yield Row(f"{task}{rule}: {name}", value)


def numbers(value: Any, name: str = "", *, depth: int = 2) -> Iterator[tuple[str, object]]:
    """The numbers of a task by name; lists and what lies deeper, such as single subjects, stay in results.json."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, dict) and isinstance(value.get("mean"), float):
        error = value.get("standard_error")
        yield name, one_line(value["mean"]) + (f" ± {one_line(error)}" if isinstance(error, float) else "")
    elif isinstance(value, dict) and depth:
        for key, part in value.items():
            yield from numbers(part, f"{name} {key}".strip(), depth=depth - 1)


def table(rows: list[Row]) -> str:
    lines = [f"| {one_line(row.name)} | {one_line(row.value)} |" for row in rows if row.value is not None]
    return "\n".join(["| | |", "| --- | --- |", *lines, ""])


def one_line(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return (f"{value:,}" if isinstance(value, int) else str(value)).replace("|", "\\|").replace("\n", " ")


def metrics(run: Path) -> list[dict[str, Any]]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if isinstance(line, dict)]
    except (OSError, ValueError):
        return []


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
