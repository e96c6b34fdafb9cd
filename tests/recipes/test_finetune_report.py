"""The tables and the figure of `reproduce clutrr` and `reproduce gsm8k`, from made-up records with known numbers."""

import json
from pathlib import Path

import pytest

from thoughtbubbles.recipes.reproduce.finetune.protocol import CLUTRR_FORMS, SETS
from thoughtbubbles.recipes.reproduce.finetune.records import read_finetune_records
from thoughtbubbles.recipes.reproduce.finetune.report import clutrr_figure, clutrr_table, gsm8k_table

SET = "089907f8"


def test_nothing_is_measured_yet(tmp_path):
    assert clutrr_table(tmp_path) == gsm8k_table(tmp_path) == "Not measured yet."
    assert clutrr_figure(tmp_path).series == {}
    assert clutrr_figure(tmp_path).sentence == "Not measured yet."


def made_up(protocol: str, row: str, seed: int, test: dict, **changes) -> dict:
    """A record with the fields that tables use."""
    known = {"version": 1, "protocol": protocol, "row": row, "form": row, "seed": seed, "start": "shipped"}
    known |= {"parameters": 7_000_000, "steps": 100, "epochs": 9.99, "device": "NVIDIA H200", "commit": "abc1234"}
    known |= {"command": "thoughtbubbles …", "time": "2026-01-02", "wall_seconds": 9.0, "versions": {}, "test": test}
    return {**known, "text": {"tokenizer": "bytes", "checksum": "12345678"}, **changes}


def stories_of(accuracy: dict[int, float], *, streams: tuple[float, float, float] | None = None) -> dict:
    def number(mean: float) -> dict:
        return {"documents": 50, "whole_answer": {"mean": mean, "standard_error": 0.03}}

    kinds = zip(("names", "question", "elsewhere"), streams or (), strict=False)
    return {
        **number(sum(accuracy.values()) / len(accuracy)),
        "by": {"hops": {str(hops): number(mean) for hops, mean in accuracy.items()}},
        "streams": {kind: {"tokens": 9, "streams": [1.0, each]} for kind, each in kinds} if streams else None,
    }


def save(folder: Path, *records: dict) -> Path:
    for record in records:
        path = folder / record["protocol"] / f"{record['row']}-seed{record['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    return folder


def clutrr_record(name: str, form: str, seed: int, test: dict, **changes) -> dict:
    return made_up("clutrr", f"{name}-{form}", seed, test, **{"form": form, "set": name, **changes})


@pytest.fixture
def results(tmp_path):
    """shipped-r2 on three sets, two of them with two seeds; scratch-plain on two sets."""
    two = (1.2, 1.9, 1.1)
    return save(
        tmp_path,
        clutrr_record("089907f8", "shipped-r2", 0, stories_of({2: 0.9, 3: 0.8, 10: 0.3}, streams=two)),
        clutrr_record("089907f8", "shipped-r2", 1, stories_of({2: 0.8, 3: 0.8, 10: 0.5}, streams=two)),
        clutrr_record("db9b8f04", "shipped-r2", 0, stories_of({2: 0.7, 3: 0.6, 10: 0.4}, streams=two)),
        clutrr_record("db9b8f04", "shipped-r2", 1, stories_of({2: 0.6, 3: 0.6, 10: 0.4}, streams=(1.4, 1.7, 1.3))),
        clutrr_record("7c5b0e70", "shipped-r2", 0, stories_of({2: 0.5, 3: 0.1}, streams=two)),
        clutrr_record("089907f8", "scratch-plain", 0, stories_of({2: 0.5, 3: 0.4, 10: 0.25})),
        clutrr_record("db9b8f04", "scratch-plain", 0, stories_of({2: 0.3, 3: 0.2, 10: 0.15})),
    )


def cells(table: str, first: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_by_hops_and_by_set(results):
    by_hops, by_set, streams, *rest = clutrr_table(results).split("\n\n")
    assert cells(by_hops, "form")[4:] == ["2 hops (2 sets)", "3 hops (2 sets)", "10 hops (2 sets)"]
    # 2 hops: the mean of 85 and 65, without the set that scratch-plain does not have; seeds with 80 and 70.
    assert cells(by_hops, "`shipped-r2`")[2:] == ["3 of 6", "1 to 2", "75.0 (10.0)", "70.0 (0.0)", "40.0 (10.0)"]
    assert cells(by_hops, "`scratch-plain`")[2:] == ["2 of 6", "1", "40.0", "30.0", "20.0"]
    assert cells(by_hops, "`scratch-r2`")[2:] == ["not run", "–", "–", "–", "–"]
    assert cells(by_set, "set")[2:] == [f"`{form}`" for form in CLUTRR_FORMS]
    assert cells(by_set, "`7c5b0e70`")[2:] == ["not run", "not run", "not run", "30.0 ± 3.0"]
    assert cells(by_set, "`db9b8f04`")[2:] == ["21.7 ± 3.0", "not run", "not run", "55.0 ± 3.0"]
    assert len(by_set.splitlines()) == 2 + len(SETS)
    assert cells(streams, "`shipped-r2`")[1:] == ["1.240", "1.860", "1.140"]  # the mean of five records
    assert "scratch-plain" not in streams
    assert "`scratch-r2` (all sets), `shipped-plain` (all sets), `06b8f2a1-shipped-r2`" in rest[-1]
    assert "`7c5b0e70-scratch-plain`" in rest[-1]
    assert "`089907f8-shipped-r2`" not in rest[-1]


def test_forms_without_a_common_set(tmp_path):
    """By number of hops: both have a set that tests 2 hops, but none of these is the same; 10 hops have one form."""
    save(
        tmp_path,
        clutrr_record("089907f8", "shipped-r2", 0, stories_of({2: 0.9, 10: 0.3})),
        clutrr_record("7c5b0e70", "scratch-r2", 0, stories_of({2: 0.5, 3: 0.4})),
    )
    by_hops, *_ = clutrr_table(tmp_path).split("\n\n")
    own = "no common set: each form's own"
    assert cells(by_hops, "form")[4:] == [f"{hops} hops ({own})" for hops in (2, 3, 10)]
    assert cells(by_hops, "`shipped-r2`")[4:] == ["90.0", "–", "30.0"]
    assert cells(by_hops, "`scratch-r2`")[4:] == ["50.0", "40.0", "–"]
    save(tmp_path, clutrr_record("7c5b0e70", "shipped-r2", 0, stories_of({2: 0.1, 3: 0.2})))
    by_hops, *_ = clutrr_table(tmp_path).split("\n\n")
    assert cells(by_hops, "form")[4:] == ["2 hops (1 set)", "3 hops (1 set)", f"10 hops ({own})"]
    assert cells(by_hops, "`shipped-r2`")[4:] == ["10.0", "20.0", "30.0"]


def test_every_row_is_run(tmp_path):
    for name in SETS:
        save(tmp_path, *(clutrr_record(name, form, 0, stories_of({2: 0.5})) for form in CLUTRR_FORMS))
    table = clutrr_table(tmp_path)
    assert "ot run" not in table
    assert "after the last fork layer" not in table  # no model has forks


def test_the_figure_by_hops(results):
    figure = clutrr_figure(results)
    assert list(figure.series) == ["scratch-plain", "shipped-r2"]
    bubbles = figure.series["shipped-r2"]
    assert (bubbles.x, bubbles.y) == ([2, 3, 10], [75, 70, 40])  # only the two sets with many hops
    assert bubbles.error == [pytest.approx(100 * 0.03 / 2**0.5, rel=1e-5)] * 3
    assert "at 2 and at 10 hops" in figure.sentence
    assert "`scratch-plain` 40.0 and 20.0; `shipped-r2` 75.0 and 40.0" in figure.sentence
    assert "Not run on both sets: `scratch-r2`, `shipped-plain`." in figure.sentence
    (results / "clutrr" / "db9b8f04-scratch-plain-seed0.json").unlink()
    assert list(clutrr_figure(results).series) == ["shipped-r2"]


def test_the_table_of_gsm8k(tmp_path):
    def answers(mean: float, ended: int, streams: float | None) -> dict:
        kinds = {kind: {"tokens": 9, "streams": [1.0, streams]} for kind in ("questions", "answers")}
        number = {"mean": mean, "standard_error": 0.005}
        return {"documents": 1319, "exact_match": number, "ended": ended, "streams": streams and kinds}

    save(
        tmp_path,
        made_up("gsm8k", "shipped-r2", 0, answers(0.02, 1319, 1.9)),
        made_up("gsm8k", "shipped-r2", 1, answers(0.04, 1187, 1.7)),
        made_up("gsm8k", "shipped-plain", 0, answers(0.01, 1319, None)),
    )
    table = gsm8k_table(tmp_path)
    found = cells(table, "`shipped-r2`")[2:]
    assert found == ["2", "7,000,000", "10", "3.0 ± 0.5 (2.0)", "95.0%", "1.800", "1.800"]
    assert cells(table, "`shipped-plain`")[5:] == ["1.0 ± 0.5", "100.0%", "–", "–"]
    assert cells(table, "`large-r2`")[2:] == ["not run", *["–"] * 6]
    assert "1,319 questions." in table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": f"{SET}-scratch-r2"}, "is a record of clutrr/089907f8-scratch-r2-seed0; rename it"),
        ({"text": {"tokenizer": "bytes", "checksum": "0"}}, "were trained on different examples"),
        ({"test": None, "start": None}, None),
    ],
)
def test_records_that_cannot_be_compared(changes, message, tmp_path):
    good = clutrr_record(SET, "shipped-plain", 0, stories_of({2: 0.5}))
    save(tmp_path, good)
    path = tmp_path / "clutrr" / f"{SET}-shipped-r2-seed0.json"
    path.write_text(json.dumps({**clutrr_record(SET, "shipped-r2", 0, stories_of({2: 0.5})), **changes}))
    if message is None:
        assert len(read_finetune_records(tmp_path, "clutrr", ())) == 2
        return
    with pytest.raises(ValueError, match=message):
        read_finetune_records(tmp_path, "clutrr", ())


@pytest.mark.parametrize("absent", ["test", "versions", "wall_seconds"])
def test_a_damaged_record_is_named(absent, tmp_path):
    record = clutrr_record(SET, "shipped-r2", 0, stories_of({2: 0.5}))
    save(tmp_path, {name: value for name, value in record.items() if name != absent})
    with pytest.raises(ValueError, match=rf"shipped-r2-seed0\.json: has no {absent}: it is not a record"):
        clutrr_table(tmp_path)
