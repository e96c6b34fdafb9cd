"""The decoding times of the rows of `long`: measured on a CPU, and drawn by the report."""

import sys
from pathlib import Path

import pytest

from recipes.made_up import rows, write
from thoughtbubbles.recipes.reproduce.answers import answers
from thoughtbubbles.recipes.reproduce.figures import figures
from thoughtbubbles.recipes.reproduce.plots import write_figure
from thoughtbubbles.recipes.reproduce.records import read_evidence

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOSSES = {"plain": [3.1, 3.12], "r2": [3.0, 3.03], "wider": [2.95, 2.97], "longer": [3.05, 3.07]}


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decode
    import decode_steps

    for module in (decode, decode_steps):
        monkeypatch.setattr(module, "PROMPT", 64)
    monkeypatch.setattr(sys, "argv", ["benchmarks/decode.py", "--protocol", "long", *arguments])
    decode.main()


@pytest.mark.slow
def test_the_report_draws_what_is_measured(tmp_path, monkeypatch):
    out = write(tmp_path / "results", *rows("long", LOSSES))
    run(monkeypatch, "--rows", "1", "--new", "3", "--out", str(out))
    evidence = read_evidence(out)
    found = evidence.decode
    assert found["rows"]["r2"]["1"]["command"] == "python benchmarks/decode.py --protocol long --rows 1 --new 3"
    assert (found["dtype"], found["prompt"], found["new"]) == ("float32", 64, 3)
    assert set(found["rows"]) == set(evidence.results["long"].protocol.rows) - {"block"}
    assert all(at["1"]["milliseconds"] > 0 for at in found["rows"].values())
    streams = {row: at["1"]["streams_per_token"] for row, at in found["rows"].items()}
    assert (streams["plain"], streams["r1"], streams["all-forked"], streams["copy-3"]) == (1, 1, 2, 3)
    assert 1.5 < streams["r2"] <= 2 < 3 < streams["r4"] <= 4  # nearer to the budget in a longer text
    size = {row: at["1"]["cache_bytes"] for row, at in found["rows"].items()}
    assert size["plain"] == pytest.approx(2 * 12 * 512 * 256 * 4, rel=0.01)  # keys and values, 12 layers, 512 tokens
    ratios = {"r1": 1, "all-forked": (3 + 9 * 2) / 12, "r2": (3 + 9 * 2) / 12, "copy-3": 3, "wider": 1.5}
    for row, ratio in ratios.items():
        assert size[row] == pytest.approx(ratio * size["plain"], rel=0.01), row
    assert found["rows"]["longer"] == {"measured_as": "plain", **found["rows"]["plain"]}

    run(monkeypatch, "--rows", "2", "--new", "3", "--cases", "longer", "--out", str(out))  # all else stays
    again = read_evidence(out).decode["rows"]
    assert again["r2"] == found["rows"]["r2"]
    assert again["plain"]["1"] == found["rows"]["plain"]["1"]
    assert again["longer"] == {"measured_as": "plain", **again["plain"]}
    assert again["longer"]["2"]["milliseconds"] > 0
    with pytest.raises(SystemExit, match="was measured with"):
        run(monkeypatch, "--rows", "1", "--new", "4", "--out", str(out))

    drawn = {figure.name: figure for figure in figures(evidence)["pays"]}
    for figure in (drawn["long-decode-1"], drawn["long-cache"]):
        assert set(figure.series) == set(LOSSES)
        assert figure.series["longer"].x == figure.series["plain"].x
        assert f"{figure.name}.png" in [path.name for path in write_figure(figure, out)]
    assert drawn["long-cache"].series["r2"].x == [pytest.approx(size["r2"] / 2**20, rel=1e-5)]
    assert f"Device: {found['device']}." in answers(evidence)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --out: docs/results/decode.json has the times of a GPU"),
        (["--out", "x", "--new", "1"], "--new 1: give 2 to 256"),
        (["--device", "cuda", "--new", "4"], "only with --protocol on a CPU"),
        (["--out", "x", "--cases", "block"], "long has no rows block with an exact KV cache"),
    ],
)
def test_options_that_do_not_go_together(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert message in capsys.readouterr().err
