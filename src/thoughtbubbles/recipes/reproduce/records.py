"""The records of docs/results, ROW-seedN.json in a folder per protocol: read, and checked before they are compared.

Beside them, steps.json has the time of a training step of each row, alone on the GPU (benchmarks/train_step.py); that
of `long` is used for all rows with a model of it.

Records of one protocol must have the same version and the same text, and all be from a GPU or all from a CPU: anything
else cannot be compared, and raises ValueError. GPU times are compared only between records of the same device.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from thoughtbubbles.files import read_object
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.recipes.reproduce.parts import PLAIN, Protocol
from thoughtbubbles.recipes.reproduce.protocols import PROTOCOLS, protocol
from thoughtbubbles.recipes.reproduce.study import Record, read_record
from thoughtbubbles.train.budget import with_budget

STEPS_FILE = "steps.json"
Value = Callable[[Record], float]
REQUIRED = (  # what every table uses; a dot goes into a nested field
    *("version", "protocol", "row", "seed", "what", "device", "parameters", "tokens", "flops", "gpu_seconds", "curve"),
    *("wall_seconds", "commit", "command", "time", "versions.torch", "text.checksum", "text.tokens", "training_loss"),
    *("config.model.block_size", "config.optim.lr", "config.optim.weight_decay", "config.tokens_per_step"),
    "config.eval.tokens",
    *("validation.nats", "validation.bits_per_byte", "validation.tokens", "validation.windows"),
)


class Step(NamedTuple):
    seconds: float
    commit: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """All records of a protocol, by row and seed, rows in the protocol's order."""

    name: str
    protocol: Protocol
    rows: Mapping[str, Mapping[int, Record]]
    step_alone: Mapping[str, "Step"] = field(default_factory=dict)
    """A training step alone on the device that all records are from, by row."""
    like: "Results | None" = None
    """Those of `long` for another protocol with its model: they have more seeds."""

    def __contains__(self, row: str) -> bool:
        return row in self.rows

    @property
    def records(self) -> list[Record]:
        return [record for seeds in self.rows.values() for record in seeds.values()]

    @property
    def same_device(self) -> bool:
        return len(self.devices) <= 1

    @property
    def devices(self) -> list[str]:
        return sorted({record["device"] for record in self.records})

    def what(self, row: str) -> str:
        known = self.protocol.rows.get(row)
        return known.what if known else next(iter(self.rows[row].values()))["what"]

    def planned(self, row: str) -> tuple[int, ...]:
        known = self.protocol.rows.get(row)
        return known.seeds if known else ()

    def missing(self, rows: Sequence[str]) -> list[str]:
        return [row for row in rows if row not in self]

    def mean(self, row: str, value: Value) -> float:
        """Over the seeds of a row."""
        return statistics.fmean(map(value, self.rows[row].values()))

    def cost(self, row: str, value: Value) -> float:
        """What a row costs, in the mean. GPU time: at the speed of a step alone on the GPU; if that is not measured, of
        the fastest seed, since others shared the GPU."""
        if value is not gpu_seconds:
            return self.mean(row, value)
        if row in self.step_alone:
            return self.mean(row, steps) * self.step_alone[row].seconds
        return self.mean(row, tokens) / max(tokens(each) / gpu_seconds(each) for each in self.rows[row].values())

    def ratio(self, row: str, value: Value, *, over: str = PLAIN) -> float:
        return self.cost(row, value) / self.cost(over, value)


def nats(record: Record) -> float:
    return float(record["validation"]["nats"])


def gpu_seconds(record: Record) -> float:
    return float(record["gpu_seconds"])


def flops(record: Record) -> float:
    return float(record["flops"])


def parameters(record: Record) -> float:
    return float(record["parameters"])


def epochs(record: Record) -> float:
    return float(record["epochs"])


def tokens(record: Record) -> float:
    """Trained on, with repetitions."""
    return float(record["tokens"])


def steps(record: Record) -> float:
    return tokens(record) / float(record["config"]["tokens_per_step"])


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All there is in docs/results."""

    folder: Path
    results: Mapping[str, Results]
    decode: Mapping[str, Any] | None
    """Time and KV cache of a decoded token by row of `long` and batch size; None: not measured."""


def read_evidence(folder: Path) -> Evidence:
    path = folder / "decode.json"
    return Evidence(folder=folder, results=read_results(folder), decode=read_object(path) if path.is_file() else None)


def read_results(folder: Path) -> dict[str, Results]:
    """Of every protocol; those without records have no rows."""
    found = {name: read_protocol(folder, name) for name in PROTOCOLS}
    long = found["long"]
    return {
        name: replace(each, like=long) if each is not long and each.protocol.model == long.protocol.model else each
        for name, each in found.items()
    }


def read_protocol(folder: Path, name: str) -> Results:
    found = protocol(name)
    records: dict[Path, Record] = {
        path: read_record(path, name, required=REQUIRED) for path in sorted((folder / name).glob("*-seed*.json"))
    }
    _check_same(records, "version", lambda record: record["version"])
    _check_same(records, "text (its checksum)", lambda record: record["text"]["checksum"])
    _check_same(records, "kind of device", lambda record: "CPU" if is_cpu(record["device"]) else "GPU")
    for path, record in records.items():
        if record["row"] in found.rows and (changed := other_settings(found, record)):
            raise ValueError(f"{path}: was run with other settings than {name} has now ({changed}); run it again")
    rows: dict[str, dict[int, Record]] = {}
    order = [*found.rows, *sorted({record["row"] for record in records.values()} - set(found.rows))]
    for row in order:
        of_row = {record["seed"]: record for record in records.values() if record["row"] == row}
        if of_row:
            rows[row] = dict(sorted(of_row.items()))
    return Results(name=name, protocol=found, rows=rows, step_alone=steps_alone(folder, name, rows))


def steps_alone(folder: Path, name: str, rows: Mapping[str, Mapping[int, Record]]) -> dict[str, Step]:
    """A training step by row: of the first row with its model that was measured, for the protocol or `long`."""
    found = protocol(name)
    same: dict[str, Step] = {}
    for source_name, source in ((name, found), ("long", protocol("long"))):
        if source.model != found.model:
            continue
        for other, step in read_steps(folder / source_name / STEPS_FILE, rows).items():
            for row, settings in found.rows.items():
                model = replace(found.model, **settings.model)
                if other in source.rows and not settings.run and is_step_of(source, other, model, settings.optim):
                    same.setdefault(row, step)
    return with_changing_budgets(same, found)


def is_step_of(source: Protocol, name: str, model: ModelConfig, optim: Mapping[str, Any]) -> bool:
    """Whether a row has this model and this kind of optimizer from the first step on."""
    row = source.rows[name]
    is_same = replace(source.model, **row.model) == model and row.optim.get("kind") == optim.get("kind")
    return is_same and not row.run


def read_steps(path: Path, rows: Mapping[str, Mapping[int, Record]]) -> dict[str, Step]:
    """A training step by row; those of another device or size than the records' say nothing."""
    if not path.is_file():
        return {}
    found = read_object(path)
    measured = found["device"], found["tokens"], found["vocab_size"]
    records = [record for seeds in rows.values() for record in seeds.values()]
    if {(each["device"], *size_of_step(each["config"])) for each in records} != {measured}:
        return {}
    return {row: Step(each["milliseconds"] / 1000, each["commit"]) for row, each in found["rows"].items()}


def with_changing_budgets(known: Mapping[str, Step], found: Protocol) -> dict[str, Step]:
    """A row whose budget changes while it trains has the mean time of the rows that always have one of its budgets."""
    steps = dict(known)
    for name, row in found.rows.items():
        own, begin = replace(found.model, **row.model), row.run.get("forks_from", 0.0)
        budgets = row.run.get("budgets") or (own.budget,)
        shares = [(begin, 1.0), *(((1 - begin) / len(budgets), budget) for budget in budgets)]
        parts = [
            (share, step_of(with_budget(own, budget), row.optim, known, found)) for share, budget in shares if share
        ]
        measured = [(share, step) for share, step in parts if step is not None]
        if row.run and len(measured) == len(parts):
            steps[name] = Step(sum(share * step.seconds for share, step in measured), measured[-1][1].commit)
    return steps


def step_of(model: ModelConfig, optim: Mapping[str, Any], known: Mapping[str, Step], found: Protocol) -> Step | None:
    rows = (name for name in known if name in found.rows)
    return next((known[name] for name in rows if is_step_of(found, name, model, optim)), None)


def size_of_step(config: Mapping[str, Any]) -> tuple[int, int | None]:
    """Tokens, and the vocabulary."""
    return config["tokens_per_step"], config["model"].get("vocab_size")


def is_cpu(device: str) -> bool:
    return " CPU, " in device


def other_settings(found: Protocol, record: Record) -> str:
    """In words, the settings that the protocol has changed since; a field that a record does not have is new."""
    kept = with_scores_off(record["config"])
    expected = found.config(
        record["row"],
        protocol=record["protocol"],
        seed=record["seed"],
        data="corpus",
        n_tokens=record["text"]["tokens"],
        vocab_size=kept["model"].get("vocab_size", 128),
    ).as_dict()
    pairs = [
        (f"{group}.{name}", value, expected[group].get(name))
        for group in ("model", "optim")
        for name, value in kept[group].items()
    ]
    of_run = ("tokens", "tokens_per_step", "forks_from", "budgets")
    pairs += [(name, kept[name], expected[name]) for name in of_run if name in kept]
    return "; ".join(f"{name} was {old}, is {new}" for name, old, new in pairs if old != new)


def with_scores_off(config: dict[str, Any]) -> dict[str, Any]:
    """Before `scores` could be turned off, a bias of 60 gave all forks the score 1: the same function.

    A test compares their losses and gradients. Only if the budget keeps all forks.
    """
    model = config["model"]
    if model.get("score_bias") != 60 or model["budget"] < 2 ** len(model["fork_layers"]):
        return config
    return {**config, "model": {**model, "score_bias": None, "scores": False}}


def _check_same(records: Mapping[Path, Record], what: str, value: Callable[[Record], Any]) -> None:
    groups: dict[Any, list[str]] = {}
    for path, record in records.items():
        groups.setdefault(value(record), []).append(path.name)
    if len(groups) > 1:
        named = "; ".join(f"{each}: {', '.join(paths)}" for each, paths in groups.items())
        folder = next(iter(records)).parent
        raise ValueError(f"{folder}: records that differ in {what} cannot be compared ({named}); remove one kind")
