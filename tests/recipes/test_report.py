"""The report of `thoughtbubbles reproduce`, from made-up records with known numbers; and the committed pages."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import PER_STEP, made_up, rows, write

from thoughtbubbles.recipes.reproduce.answers import answers
from thoughtbubbles.recipes.reproduce.best import best_table
from thoughtbubbles.recipes.reproduce.compare_rows import (
    Difference,
    curve_differences,
    difference,
    variation_between_seeds,
)
from thoughtbubbles.recipes.reproduce.figures import figures
from thoughtbubbles.recipes.reproduce.overview import overview
from thoughtbubbles.recipes.reproduce.plots import HIGHEST, LOWEST, clear_of, is_current, spread
from thoughtbubbles.recipes.reproduce.records import (
    STEPS_FILE,
    gpu_seconds,
    read_evidence,
    read_protocol,
    with_scores_off,
)
from thoughtbubbles.recipes.reproduce.report import SECTIONS, rendered, write_report
from thoughtbubbles.recipes.reproduce.sentences import sentence
from thoughtbubbles.recipes.reproduce.tables import (
    autoregressive_table,
    forks_table,
    protocol_table,
    provenance_table,
    screen_table,
    sources_table,
    sweep_table,
)
from thoughtbubbles.recipes.reproduce.zero_shot import zero_shot_difference, zero_shot_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
# Differences of r2 to plain: −0.03, −0.02, −0.03: mean −0.08/3, deviation 0.01/√3, standard error 0.01/3.
THREE = {"plain": [3.00, 3.02, 3.01], "r2": [2.97, 3.00, 2.98]}


def line_of(table: str, row: str) -> list[str]:
    (found,) = (line for line in table.splitlines() if line.startswith(f"| `{row}` |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def paragraph(text: str, question: str) -> str:
    return next(part for part in text.split("### ")[1:] if part.startswith(question)).partition("\n\n")[2].strip()


@pytest.mark.parametrize("page", [RESULTS / "index.md", ROOT / "README.md"], ids=lambda page: page.name)
def test_the_committed_pages_are_what_the_records_say(page):
    assert page.read_text(encoding="utf-8") == rendered(page)


def test_the_committed_page_has_every_part_and_its_figures_are_current():
    page = (RESULTS / "index.md").read_text(encoding="utf-8")
    for name in SECTIONS:
        if name not in ("evidence", "laptop"):
            assert f"<!-- {name} -->\n" in page, name
    assert "<!-- evidence -->\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    for part in figures(read_evidence(RESULTS)).values():
        for figure in part:
            assert not figure.series or is_current(figure, RESULTS / "figures"), figure.name


def test_a_difference_is_paired_by_seed(tmp_path):
    found = difference(read_protocol(write(tmp_path, *rows("long", THREE)), "long"), "r2", "plain")
    assert found.mean == pytest.approx(-0.08 / 3)
    assert found.error == pytest.approx(0.01 / 3)
    assert (found.seeds, found.degrees) == ((0, 1, 2), 2)
    assert found.cell == "−0.0267 ± 0.0033"


def test_only_common_seeds_count(tmp_path):
    write(tmp_path, made_up("long", "plain", 0, 3.0), made_up("long", "plain", 1, 9.0), made_up("long", "r1", 0, 2.9))
    results = read_protocol(tmp_path, "long")
    assert difference(results, "r1", "plain").mean == pytest.approx(-0.1)
    assert difference(results, "r1", "r2") is None
    assert line_of(protocol_table(results), "plain")[6] == "6.0000 (6.0000)"


def test_the_error_of_one_seed_is_over_windows(tmp_path):
    """Windows of 4, 4 and 2 parts of 128 tokens, differences −0.1, 0 and −0.2: mean −0.08; Σ (4·0.02)² + (4·0.08)²
    + (2·0.12)² = 0.1664, times 3/2, its root 0.4996, over 10 parts."""
    one, two = made_up("long", "plain", 0, 3.0), made_up("long", "r2", 0, 2.92)
    one["validation"]["windows"] = [3.0, 3.0, 3.0]
    two["validation"]["windows"] = [2.9, 3.0, 2.8]
    results = read_protocol(write(tmp_path, one, two), "long")
    assert "differences to `plain` have a standard error of 0.0500 to 0.0500." in protocol_table(results)
    found = difference(results, "r2", "plain")
    assert found.error == pytest.approx(0.04996, abs=1e-6)
    assert found.cell == "−0.0800 ± 0.0500 \\*"
    assert found.degrees == 2
    assert not found.is_measurable


def test_the_variation_between_seeds_is_that_of_all_rows_together(tmp_path):
    """Its square is the mean of the variances of all paired differences: (1/3 + 0 + 1/3) / 3 · 10⁻⁴ for r2 − plain,
    r1 − plain and r2 − r1. So one seed has an error too, and that of three is no luck: r1 − plain never varies."""
    several = rows("long", {**THREE, "r1": [2.985, 3.005, 2.995]})
    longer = [made_up(protocol, "longer", 0, 2.9) for protocol in ("long", "scarce")]
    evidence = read_evidence(write(tmp_path, *several, *longer, made_up("scarce", "plain", 0, 3.0)))
    expected = (2e-4 / 9) ** 0.5  # windows of one loss have no error of their own
    assert variation_between_seeds(evidence.results["long"]) == (pytest.approx(expected), 4)
    for protocol in ("long", "scarce"):
        found = difference(evidence.results[protocol], "longer", "plain")
        assert (found.error, found.degrees) == (pytest.approx(expected), 4), protocol
        assert found.cell.endswith(" \\*"), protocol
    for row in ("r1", "r2"):
        found = difference(evidence.results["long"], row, "plain")
        assert (found.error, found.degrees) == (pytest.approx(expected / 3**0.5), 4), row
        assert not found.cell.endswith("*"), row
    assert "deviation of 0.0047 in `long` (4 degrees" in protocol_table(evidence.results["long"])
    assert "deviation of 0.0047 in `long` (4 degrees" in protocol_table(evidence.results["scarce"])


def test_the_error_has_the_seeds_and_the_text(tmp_path):
    """The windows of three seeds differ by −0.1, 0 and −0.2 on average, as those of one seed above: the text counts as
    much as there, whatever the seeds do to single windows."""
    records = rows("long", THREE)
    for seed, more in enumerate((-0.3, 0.1, 0.2)):
        one, two = (record for record in records if record["seed"] == seed)
        one["validation"]["windows"] = [3.0, 3.0, 3.0]
        two["validation"]["windows"] = [2.9 + more, 3.0 - more, 2.8 + 2 * more]
    found = difference(read_protocol(write(tmp_path, *records), "long"), "r2", "plain")
    assert found.error == pytest.approx(math.hypot(0.04996, 0.01 / 3), abs=1e-6)
    assert found.degrees == 2


def test_a_row_with_some_of_its_seeds_does_not_change_what_is_known_of_others(tmp_path):
    """r1 has seeds 1 and 2 only: r2 − plain still has its three. By hand for r2 and plain alone: differences of −0.02,
    −0.03 and −0.03, whose variance is 1/3 · 10⁻⁴."""
    write(tmp_path, *rows("long", THREE))
    deviation, degrees = variation_between_seeds(read_protocol(tmp_path, "long"))
    assert (deviation, degrees) == (pytest.approx((1e-4 / 3) ** 0.5), 2)
    write(tmp_path, made_up("long", "wider", 7, 2.5))  # one seed of its own
    assert variation_between_seeds(read_protocol(tmp_path, "long")) == (pytest.approx(deviation), 2)
    levels = {1: 0.01, 2: 0.0}  # beside plain as if nothing varied, were it not for r2
    plain = read_protocol(tmp_path, "long").rows["plain"]
    for seed, more in levels.items():
        write(tmp_path, made_up("long", "r1", seed, plain[seed]["validation"]["nats"] - more))
    with_r1, degrees = variation_between_seeds(read_protocol(tmp_path, "long"))
    assert degrees == 3
    assert 0 < with_r1 < 2 * deviation


def test_runs_that_share_others_say_nothing_of_the_variation(tmp_path):
    """An ensemble is made of plain runs; r2-late is r1 for three quarters of its run."""
    write(tmp_path, *rows("long", {**THREE, "r2-late": [2.9, 2.9, 3.0]}), *rows("scarce", {"plain": [3.0, 3.02]}))
    late = [json.loads(path.read_text()) for path in (tmp_path / "long").glob("r2-late-*")]
    write(tmp_path, *({**record, "config": {**record["config"], "forks_from": 0.75}} for record in late))
    assert variation_between_seeds(read_protocol(tmp_path, "long")) == (pytest.approx((1e-4 / 3) ** 0.5), 2)
    for seed, nats in enumerate((2.9, 3.0)):
        write(tmp_path, made_up("scarce", "ensemble", seed, nats))
    assert variation_between_seeds(read_protocol(tmp_path, "scarce")) is None


def test_two_protocols_with_the_same_model_know_more_together(tmp_path):
    """Variances of 1/3 · 10⁻⁴ with 2 degrees of freedom in `long`, and of 2 · 10⁻⁴ with 1 in `scarce`."""
    write(tmp_path, *rows("long", THREE), *rows("scarce", {"plain": [3.0, 3.0], "r2": [2.9, 2.92]}))
    found = difference(read_evidence(tmp_path).results["scarce"], "r2", "plain")
    expected = (2 * 1e-4 / 3 + 2e-4) / 3
    assert (found.error, found.degrees) == (pytest.approx((expected / 2) ** 0.5), 3)


def test_without_common_seeds_nothing_is_known_of_the_variation(tmp_path):
    for row, seeds in {"plain": (0, 1), "r2": (2, 3)}.items():
        write(tmp_path, *(made_up("long", row, seed, 3.0 + seed) for seed in seeds))
    assert variation_between_seeds(read_protocol(tmp_path, "long")) is None
    assert variation_between_seeds(read_protocol(tmp_path, "short")) is None


def test_neighbouring_windows_do_not_count_as_independent(tmp_path):
    """256 windows, 64 stretches of four equal ones with differences of ±0.1: an error of 0.1 / √63, not 0.1 / √255."""
    one, two = made_up("long", "plain", 0, 3.0), made_up("long", "r2", 0, 3.0)
    gaps = [0.1 * (-1) ** (i // 4) for i in range(256)]
    for record, windows in ((one, [3.0] * 256), (two, [3.0 + gap for gap in gaps])):
        record["validation"] |= {"windows": windows, "tokens": 256 * 512}
    assert difference(read_protocol(write(tmp_path, one, two), "long"), "r2", "plain").error == pytest.approx(
        0.1 / 63**0.5
    )


def test_windows_that_do_not_make_the_tokens_are_damage(tmp_path):
    bad = made_up("long", "r2", 0, 2.9)
    bad["validation"]["tokens"] = 2000
    results = read_protocol(write(tmp_path, made_up("long", "plain", 0, 3.0), bad), "long")
    with pytest.raises(ValueError, match=r"long/r2-seed0: 3 windows of 512 tokens do not make 2000"):
        difference(results, "r2", "plain")


def test_a_row_of_the_table(tmp_path):
    results = read_protocol(write(tmp_path, *rows("long", THREE)), "long")
    table = protocol_table(results)
    assert line_of(table, "r2") == [
        "`r2`",
        "causal selection, 2 streams per token",
        "3 of 3",
        "12,000,000",
        "13.1M",
        "≤ 300",
        "2.9833 (0.0300)",
        "0.9944",
        "−0.0267 ± 0.0033",
        "0.250",
        "0.0000",
    ]
    assert "`r1` (scores and attenuation, no fork survives (r = 1); 3 seeds); `head-gate` (" in table
    assert "`block` (block selection (the paper's), 2 streams per token); " in table
    assert (
        "Between seeds, the difference of two rows has a standard deviation of 0.0058 in `long` (2 degrees of freedom)."
        in table
    )
    assert "Device: NVIDIA H200." in table
    assert "(checksum 12345678)" in table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": {"tokens": 1, "tokenizer": "x", "checksum": "other"}}, r"text.*plain-seed0\.json.*r2-seed0\.json"),
        ({"version": 2}, r"version.*\(1: plain-seed0\.json; 2: r2-seed0\.json\)"),
        ({"device": "x86_64 CPU, 2 threads"}, r"device.*\(GPU: plain-seed0\.json; CPU: r2-seed0\.json\)"),
    ],
)
def test_records_that_cannot_be_compared_are_rejected(change, message, tmp_path):
    write(tmp_path, made_up("long", "plain", 0, 3.0), made_up("long", "r2", 0, 2.9, **change))
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)


def test_a_record_under_another_name_is_rejected(tmp_path):
    write(tmp_path, made_up("long", "plain", 0, 3.0))
    (tmp_path / "long" / "plain-seed0.json").rename(tmp_path / "long" / "plain-seed1.json")
    with pytest.raises(ValueError, match="is a record of long/plain-seed0"):
        read_protocol(tmp_path, "long")
    (tmp_path / "long" / "plain-seed1.json").write_text("{}")
    with pytest.raises(ValueError, match="has no version"):
        read_protocol(tmp_path, "long")
    damaged = made_up("long", "plain", 1, 3.0)
    del damaged["validation"]["nats"]
    write(tmp_path, damaged)
    with pytest.raises(ValueError, match=r"plain-seed1\.json: has no validation\.nats"):
        read_protocol(tmp_path, "long")


def test_records_of_other_settings_are_rejected(tmp_path):
    """As after a change of the protocol."""
    record = made_up("long", "r2", 0, 3.0)
    record["config"]["optim"]["lr"] = 9.0
    record["config"]["model"]["width"] = 128
    with pytest.raises(ValueError, match=r"r2-seed0.*\(model\.width was 128, is 256; optim\.lr was 9\.0, is 0\.003\)"):
        read_protocol(write(tmp_path, record), "long")
    del record["config"]["model"]["head_gate"]  # a field that came later has its default
    record["config"]["optim"]["lr"], record["config"]["model"]["width"] = 3e-3, 256
    assert list(read_protocol(write(tmp_path, record), "long").rows) == ["r2"]
    late = made_up("long", "r2-late", 0, 3.0)
    late["config"] |= {"forks_from": 0.5, "budgets": []}
    with pytest.raises(ValueError, match=r"r2-late-seed0.*\(forks_from was 0\.5, is 0\.75\)"):
        read_protocol(write(tmp_path, late), "long")


@pytest.mark.parametrize(("layers", "same"), [((3,), True), ((3, 7), False)])
def test_scores_of_1_are_no_scores_if_all_forks_survive(layers, same):
    model = {"score_bias": 60, "budget": 2, "fork_layers": list(layers)}
    found = with_scores_off({"model": model, "seed": 0})
    assert found == ({"model": {**model, "score_bias": None, "scores": False}, "seed": 0} if same else found)
    assert (found["model"] != model) == same


def test_confidence_follows_the_degrees_of_freedom():
    """Student's t: 12.7, 4.3 and 3.2 standard errors with one, two and three."""
    for n, needed in ((2, 12.71), (3, 4.30), (4, 3.18), (6, 2.571), (8, 2.365), (11, 2.228), (31, 2.042), (64, 1.998)):
        near = Difference(mean=needed - 0.01, error=1.0, seeds=(0, 1), degrees=n - 1)
        assert not near.is_measurable
        assert replace(near, mean=-needed - 0.01).is_measurable


def test_times_of_different_gpus_are_shown_but_not_compared(tmp_path):
    losses = {"plain": [3.0], "r2": [2.9], "wider": [2.8]}
    records = rows("long", losses)
    records[1]["device"] = "NVIDIA H100"
    evidence = read_evidence(write(tmp_path, *records))
    assert line_of(protocol_table(evidence.results["long"]), "r2")[5] == "≤ 300 (NVIDIA H100)"
    assert "different devices (NVIDIA H100, NVIDIA H200)" in paragraph(answers(evidence), "Does it help at equal GPU")
    (figure,) = (each for each in figures(evidence)["pays"] if each.name == "long-gpu-seconds")
    assert not figure.series
    assert "cannot be compared" in figure.sentence


@pytest.mark.parametrize(
    ("mean", "error", "said"),
    [
        (-0.02, 0.004, "`r2` ends 0.0200 ± 0.0040 nats per token below `r1` (3 seeds)"),
        (0.02, 0.004, "`r2` ends 0.0200 ± 0.0040 nats per token above `r1` (3 seeds)"),
        (
            -0.02,
            0.0047,
            "between `r2` and `r1` there is no difference that we can measure "
            "(−0.0200 ± 0.0047 nats per token, 3 seeds)",
        ),
    ],
)
def test_a_sentence_follows_sign_and_error(mean, error, said):
    assert sentence(Difference(mean=mean, error=error, seeds=(0, 1, 2), degrees=2), "r2", "r1") == said


def test_answers_without_records_name_what_they_need(tmp_path):
    text = answers(read_evidence(tmp_path))
    assert "Not measured yet: needs rows `r2`, `plain` of `long`." in paragraph(text, "Does it help at equal tokens")
    assert "needs the decoding times" in paragraph(text, "Does it help at equal decoding")
    assert "**" not in text, "no answer without records"


def test_answers_from_three_seeds(tmp_path):
    losses = {**THREE, "r1": [2.985, 3.005, 2.995], "wider": [2.95], "longer": [3.5]}
    records = rows("long", losses)
    for record in records:
        if record["row"] != "plain":
            record |= {"flops": 2e18, "gpu_seconds": 500.0}
        if record["row"] == "wider":
            record["parameters"] *= 2
    text = answers(read_evidence(write(tmp_path, *records)))
    tokens = paragraph(text, "Does it help at equal tokens")
    assert tokens.startswith("- In `long`: **Yes.** `r2` ends 0.0267 ± 0.0027 nats per token below `plain` (3 seeds).")
    assert "0.030 nats per token (the paper, table 2: 150M, OpenWebText" in tokens
    assert "The gain of `r2` in `long` is 88% of that" in tokens  # 0.02667 / ln(24.51 / 23.78)
    flops = paragraph(text, "Does it help at equal FLOPs")
    assert flops.startswith(
        "Against the best plain model, with a gate per head or without, that takes from 0.8 to 1.25 × the training "
        "FLOPs, or less without being measurably worse:\n\n"
        "- `r2` in `long`, no more parameters: **yes, in the only seed so far** (`longer`).\n"
        "- `r2` in `long`, more parameters: **no, in the only seed so far** (`wider`).\n\n"
    )
    assert "| `r2` | `long` | `plain` | 1.00 × | 0.50 × | −0.0267 ± 0.0027 |" in flops
    assert "| `r2` | `long` | `wider` | 2.00 × | 1.00 × | +0.0200 ± 0.0047 \\* |" in flops
    assert (
        "`r2` in `scarce`: Not measured yet: needs rows `plain`, `r2`, `head-gate`, `wider`, `ensemble` of `scarce`."
        in flops
    )
    parts = paragraph(text, "Is it the forks")
    alone = "`r1` ends 0.0150 ± 0.0027 nats per token below `plain` (3 seeds). That is 56% of the gain of `r2`"
    assert f"{alone}, by seed 50% to 75%." in parts
    assert "Forks in addition to it: `r2` ends 0.0117 ± 0.0027 nats per token below `r1` (3 seeds)." in parts
    assert "2505.06708): Not measured yet: needs row `head-gate` of `long`." in parts


def test_a_cheaper_plain_model_that_is_as_good_is_an_answer_too(tmp_path):
    """At half of the cost head-gate is better than r2, and plain is worse: that says nothing about equal cost."""
    records = rows("long", {**THREE, "head-gate": [2.95, 2.98, 2.961]})
    for record in records:
        record["flops"] = 2e18 if record["row"] == "r2" else 1e18

    def answer() -> str:
        return paragraph(answers(read_evidence(write(tmp_path, *records))), "Does it help at equal FLOPs")

    assert "- `r2` in `long`, no more parameters: **no** (`head-gate`).\n" in answer()
    for record in records:
        if record["row"] == "head-gate":
            record["validation"]["nats"] += 0.1
    assert "no such model was run; `plain` takes 0.50 ×; `head-gate` takes 0.50 ×." in answer()


def test_the_figure_of_differences_leaves_out_models_of_another_size(tmp_path):
    losses = {**THREE, "head-gate": [2.99], "wider": [2.9], "wider-gate": [2.8], "longer-gate": [2.9]}
    drawn = {each.name: each for each in figures(read_evidence(write(tmp_path, *rows("long", losses))))["curves"]}
    assert list(drawn["long-difference"].series) == ["r2", "head-gate"]


def test_the_table_of_the_readme_before_there_is_anything_to_compare(tmp_path):
    assert "are running: [results]" in overview(read_evidence(tmp_path))
    assert "are running: [results]" in overview(read_evidence(write(tmp_path, made_up("long", "plain", 0, 3.0))))


def test_the_table_of_the_readme(tmp_path):
    write(tmp_path, *rows("long", {"plain": [3.0, 3.02], "r2": [2.97, 2.992]}))
    longer = made_up("long", "longer-gate", 0, 2.95, gpu_seconds=600.0)
    write(tmp_path, longer | {"tokens": int(1.8 * longer["tokens"]), "epochs": 7.2})
    decode = {row: {"1": {"milliseconds": time}} for row, time in (("plain", 0.2), ("r2", 0.25))}
    (tmp_path / "decode.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": decode}))
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in overview(read_evidence(tmp_path)).split("\n")
    ]
    plain, r2, more = lines[2:5]
    assert plain == ["plain GPT", "3.0100 (2)", "–", "1.00 ×", "1.00 ×", "–"]
    assert r2[1:] == ["2.9810 (2)", "−0.0290 ± 0.0010", "1.00 ×", "1.25 ×", "–"]
    assert more[:3] == ["plain GPT with the gate, 1.80 × the tokens (7.2 epochs)", "2.9500 (1)", "−0.0500 ± 0.0014 \\*"]
    assert more[3:] == ["2.00 ×", "–", "–"]
    assert lines[5] == [""], "no row without a record"
    (tmp_path / "decode.json").write_text(json.dumps({"device": "another", "rows": decode}))
    assert " 1.25 × " not in overview(read_evidence(tmp_path)), "times of another device than the table's"
    write(tmp_path, made_up("long", "r2", 1, 2.992, device="another"))
    assert "2.00 ×" not in overview(read_evidence(tmp_path)), "times of several devices"


def test_gpu_time_is_that_of_the_seed_that_had_the_gpu_to_itself(tmp_path):
    shared = made_up("long", "plain", 0, 3.0) | {"tokens": 600, "gpu_seconds": 500.0}
    alone = made_up("long", "plain", 1, 3.0) | {"tokens": 400, "gpu_seconds": 160.0}
    results = read_evidence(write(tmp_path, shared, alone)).results["long"]
    assert results.cost("plain", gpu_seconds) == 200.0  # 500 tokens on average, 2.5 per second


def test_gpu_time_is_that_of_a_step_alone_if_it_was_measured(tmp_path):
    plain, r2 = made_up("long", "plain", 0, 3.0), made_up("long", "r2", 0, 2.9)
    write(tmp_path, plain, r2)
    per_step = plain["config"]["tokens_per_step"]
    size = {"tokens": per_step, "vocab_size": plain["config"]["model"]["vocab_size"]}
    alone = {"device": plain["device"], "torch": "2", **size, "rows": {"plain": {"milliseconds": 13.0, "commit": "a"}}}

    def shown(**changes) -> list[str]:
        (tmp_path / "long" / STEPS_FILE).write_text(json.dumps({**alone, **changes}))
        table = protocol_table(read_evidence(tmp_path).results["long"])
        return [line_of(table, row)[5] for row in ("plain", "r2")]

    steps = plain["tokens"] / per_step
    assert shown() == [f"{steps * 0.013:,.0f}", "≤ 300"]
    for other in ({"device": "another"}, {"tokens": 1}, {"vocab_size": 1}):
        assert shown(**other) == ["≤ 300", "≤ 300"]

    write(tmp_path, made_up("long", "r2-late", 0, 2.95))
    shown(rows={"r1": {"milliseconds": 10.0, "commit": "a"}, "r2": {"milliseconds": 30.0, "commit": "a"}})
    late = read_evidence(tmp_path).results["long"]
    assert late.cost("r2-late", gpu_seconds) == pytest.approx(steps * (0.75 * 0.01 + 0.25 * 0.03))
    write(tmp_path, made_up("screen", "r2", 0, 3.1), made_up("screen", "modern-muon-r2", 0, 3.1))
    screen = read_evidence(tmp_path).results["screen"]  # the model of r2 is that of `long`
    assert screen.cost("r2", gpu_seconds) == pytest.approx(steps * 0.03)
    assert screen.cost("modern-muon-r2", gpu_seconds) == 300
    shown(rows={"r2": {"milliseconds": 30.0, "commit": "a"}})
    assert read_evidence(tmp_path).results["long"].cost("r2-late", gpu_seconds) == 300

    write(tmp_path, made_up("long", "feedback-3-reach64-late-gate", 0, 2.95))
    write(tmp_path, made_up("screen", "feedback-3-reach64-drawn-gate", 0, 2.95))
    measured = {"head-gate": 12.0, "feedback-3-reach64-gate": 24.0}
    shown(rows={row: {"milliseconds": time, "commit": "a"} for row, time in measured.items()})
    results = read_evidence(tmp_path).results
    assert results["long"].cost("feedback-3-reach64-late-gate", gpu_seconds) == pytest.approx(steps * 0.015)
    assert results["screen"].cost("feedback-3-reach64-drawn-gate", gpu_seconds) == pytest.approx(steps * 0.018)


def test_the_best_rows_at_each_cost(tmp_path):
    times = {"plain": 300.0, "r1": 301.0, "head-gate": 330.0, "r2": 540.0, "wider": 540.1}
    losses = {"plain": 3.0, "r1": 2.99, "head-gate": 2.995, "r2": 2.97, "wider": 2.98}
    records = [made_up("long", row, 0, nats, gpu_seconds=times[row]) for row, nats in losses.items()]
    records += [made_up("long", "longer", 0, 2.9, gpu_seconds=999.0, parameters=24_000_000)]
    table = best_table(read_evidence(write(tmp_path, *records)))
    lines = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if "`--only" in line]
    same_size = [
        ["training tokens", "1.00 ×", "`r2`"],  # as many tokens for all
        ["training FLOPs", "1.00 ×", "`r2`"],
        # r1 takes no longer than plain, to a hundredth; head-gate is worse than it, wider than r2.
        ["GPU time of training", "1.00 ×", "`r1`"],
        ["", "1.80 ×", "`r2`"],
    ]
    of_any_size = [
        ["training tokens", "1.00 ×", "`longer`"],  # twice the parameters
        ["training FLOPs", "1.00 ×", "`longer`"],
        *same_size[2:],
        ["", "3.33 ×", "`longer`"],
    ]
    assert lines == [*same_size, *of_any_size]
    assert table.index("With no more parameters than `plain`:") < table.index("With any number of parameters:")
    no_larger = best_table(read_evidence(write(tmp_path / "no larger", *records[:-1])))
    assert "With any number" not in no_larger, "it would be the same table again"
    error = "± 0.0000 \\*"
    assert f"| 2.9700 | −0.0300 {error} | −0.0200 {error} |" in table  # against plain, and against r1 above it
    # A row that is better by less than its error is not, nor one that is better in other seeds.
    few = [made_up("long", "r2", seed, nats, gpu_seconds=540.0) for seed, nats in enumerate((2.989, 3.0, 2.98))]
    few += [made_up("long", row, seed, losses[row]) for row in ("plain", "r1") for seed in range(3)]
    times = best_table(read_evidence(write(tmp_path / "few", *few))).split("GPU time")[1]
    assert "`r1`" in times
    assert "`r2`" not in times
    # Nor one that is measurably better than plain, but not than a row between them.
    gains = {"plain": (0, 0, 0), "r1": (-0.026, -0.005, -0.005), "r2": (-0.0145, -0.015, -0.0155)}
    between = [
        made_up("long", row, seed, 3 + gain, gpu_seconds=gpu)
        for gpu, (row, each) in zip((300.0, 360.0, 420.0), gains.items(), strict=True)
        for seed, gain in enumerate(each)
    ]
    between_plain = best_table(read_evidence(write(tmp_path / "two", *between[:3], *between[6:])))
    assert "`r2`" in between_plain.split("GPU time")[1]
    assert "`r2`" not in best_table(read_evidence(write(tmp_path / "three", *between))).split("GPU time")[1]
    # A row that costs as much and is not measurably worse is named too: plain is, in view of how all rows vary now.
    few += [made_up("long", "head-gate", seed, nats) for seed, nats in enumerate((2.98, 3.0, 3.0))]
    times = best_table(read_evidence(write(tmp_path / "few", *few))).split("GPU time")[1]
    assert "| 1.00 × | `r1`, `plain`, `head-gate` |" in times
    few += [made_up("long", "copy-3", seed, 3.1) for seed in range(3)]  # but not one that is
    times = best_table(read_evidence(write(tmp_path / "few", *few))).split("GPU time")[1]
    assert "| 1.00 × | `r1`, `plain`, `head-gate` |" in times
    assert "--only r2 --seed 0`" in table
    assert table.endswith(
        "different devices: time of a decoded token, batch size 1; time of a decoded token, batch size 32."
    )
    decode = {row: {"1": {"milliseconds": time}} for row, time in {"plain": 1.0, "r1": 1.2, "r2": 1.1}.items()}
    (tmp_path / "decode.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": decode}))
    table = best_table(read_evidence(tmp_path))
    assert "| time of a decoded token, batch size 1 | 1.00 × | `plain` |" in table
    assert "|  | 1.10 × | `r2` |" in table
    assert best_table(read_evidence(tmp_path / "empty")) == "Not measured yet."


def test_the_leak_of_block_selection(tmp_path):
    gap = {"mean": 0.012, "standard_error": 0.002, "largest": 1.5, "same_greedy": 0.9}
    ways = {"blockwise": 2.9, "autoregressive": 2.912, "fixed": 2.98, "cached": 2.915}
    scored = {"windows": 64, "nats": ways, "differences": {"autoregressive - blockwise": gap}}
    block = made_up("long", "block", 0, 2.9, autoregressive=scored)
    evidence = read_evidence(write(tmp_path, block, made_up("long", "r2", 0, 2.9)))
    text = paragraph(answers(evidence), "Is causal selection")
    assert "the blockwise number of `block` is too low" in text
    assert "(+0.0120 ± 0.0020 nats per token, one seed, ± over windows)" in text
    assert "+0.0100 nats per token (figure 6: perplexity 20.97 blockwise, 21.18 token by token" in text
    line = line_of(autoregressive_table(evidence.results["long"]), "block")
    assert line[1:6] == ["64", "2.9000", "2.9120", "2.9800", "2.9150"]
    gap["standard_error"] = 0.007
    write(tmp_path, block)
    assert "no leak that we can measure" in paragraph(answers(read_evidence(tmp_path)), "Is causal selection")


def test_growth_is_judged_by_how_all_rows_vary(tmp_path):
    """r2 is 0.01 ahead at half of the training and 0.03 (seed 0) or 0.032 (seed 1) at its end. There r1 − plain is 0 or
    0.006, so the variances of r2 − plain, r1 − plain and r2 − r1 are 2, 18 and 32 · 10⁻⁶, and half of their mean is
    0.0029²."""
    curves = {"plain": [3.5, 3.4, 3.3, 3.2], "r2": [3.5, 3.39, 3.28, 3.17]}
    records = [
        made_up("long", row, seed, 3.2, curve=[[100 * (i + 1), loss] for i, loss in enumerate(curve)])
        for row, curve in curves.items()
        for seed in (0, 1)
    ]
    records[-1]["curve"][-1][1] = 3.168
    plain = curves["plain"][:-1]
    for row, protocol, seed, last in (
        *(("r1", "long", 0, 3.2), ("r1", "long", 1, 3.206), ("block", "long", 0, 3.19)),
        *(("plain", "scarce", 0, 3.2), ("r2", "scarce", 0, 3.1)),
    ):
        curve = [[100 * (i + 1), loss] for i, loss in enumerate([*plain, last])]
        records.append(made_up(protocol, row, seed, 3.2, curve=curve))
    evidence = read_evidence(write(tmp_path, *records))
    text = paragraph(answers(evidence), "Does the gain grow")
    assert "0.0000 ± 0.0000 at 25%, −0.0100 ± 0.0000 at 50%, −0.0200 ± 0.0000 at 75%, −0.0310 ± 0.0029 at 100%" in text
    assert "the difference moves in favour of `r2` (−0.0210 ± 0.0029 nats per token)" in text
    points = curve_differences(evidence.results["long"], "r2", "plain")
    assert [tokens for tokens, _ in points] == [step * PER_STEP for step in (100, 200, 300, 400)]
    assert [gap.degrees for _, gap in points] == [2] * 4
    (_, single) = curve_differences(evidence.results["long"], "block", "plain")[-1]
    assert single.error == pytest.approx((52e-6 / 3) ** 0.5)
    (_, elsewhere) = curve_differences(evidence.results["scarce"], "r2", "plain")[-1]
    assert elsewhere.error is None, "as many tokens of `long` are another part of its schedule"


def test_a_row_whose_forks_begin_late_is_drawn_from_there_on(tmp_path):
    curve = [[step, 4 - step / 1000] for step in range(50, 401, 50)]
    late = made_up("long", "r2-late", 0, 3.1, steps=400, curve=[[step, loss - 0.01] for step, loss in curve])
    late["config"]["forks_from"] = 0.75
    evidence = read_evidence(write(tmp_path, made_up("long", "plain", 0, 3.2, curve=curve), late))
    points = curve_differences(evidence.results["long"], "r2-late", "plain")
    assert [tokens for tokens, _ in points] == [step * PER_STEP for step in (350, 400)]
    (figure,) = (found for found in figures(evidence)["curves"] if found.name == "long-difference")
    assert figure.sentence.endswith("and at its end: `r2-late` at the end −0.0100 (1 seed).")


def test_decoding_times_and_cache(tmp_path):
    at = {"plain": (1.0, 100), "r2": (1.2, 200), "wider": (1.1, 150), "longer": (1.0, 100)}  # the last has no record
    decode = {
        row: {batch: {"milliseconds": time, "cache_bytes": size * 2**20} for batch in ("1", "32")}
        for row, (time, size) in at.items()
    }
    wider = rows("long", {"wider": [2.95, 2.97, 2.96]}, parameters=24_000_000)
    write(tmp_path, *rows("long", THREE), *wider)
    (tmp_path / "decode.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": decode}))
    evidence = read_evidence(tmp_path)
    text = paragraph(answers(evidence), "Does it help at equal decoding")
    assert text.startswith(
        "Against the best plain model, with a gate per head or without, that takes at most 1.05 × the time:\n\n"
        "- `r2` at batch size 1, no more parameters: **yes** (`plain`).\n"
        "- `r2` at batch size 1, more parameters: **no** (`wider`).\n"
        "- `r2` at batch size 32, no more parameters: **yes** (`plain`).\n"
        "- `r2` at batch size 32, more parameters: **no** (`wider`).\n\n"
    )
    assert "| `r2` | 1 | 1.200 ms | `plain` | 1.000 ms | −0.0267 ± 0.0027 |" in text
    assert "| `r2` | 32 | 1.200 ms | `wider` | 1.100 ms |" in text
    assert "longer" not in text, "it has no record"
    found = {figure.name: figure for figure in figures(evidence)["pays"]}
    assert found["long-cache"].series["r2"].x == [200]
    assert found["long-decode-32"].series["wider"].x == [1.1]


def test_ideas_are_compared_with_both_plain_models(tmp_path):
    for row, nats in (("plain", 3.4), ("head-gate", 3.38), ("r2-private", 3.37)):
        write(tmp_path, made_up("screen", row, 0, nats, autoregressive=None))
    write(tmp_path, *rows("long", {"plain": [3.0, 3.02], "head-gate": [2.99, 3.0]}))
    found = read_evidence(tmp_path).results
    table = screen_table(found["screen"], found["long"])
    assert line_of(table, "plain")[3:5] == ["3.4000", "–"]
    assert line_of(table, "r2-private")[3] == "**3.3700**"
    assert line_of(table, "r2-private")[4].startswith("−0.0300")
    assert line_of(table, "r2-private")[5].startswith("−0.0100")
    assert "`state-3` (every token forked once before block 3" in table.split("Planned, not run: ")[1]
    trusted = next(line for line in table.splitlines() if line.startswith("How far"))
    assert "`head-gate` −0.0200 ±" in trusted
    assert " here and −0.0150 ± 0.0050 in `long`." in trusted
    assert "r2-private" not in trusted


def test_ideas_on_a_stronger_baseline_are_compared_with_that(tmp_path):
    losses = {
        "plain": 3.4,
        "head-gate": 3.38,
        "modern": 3.3,
        "modern-gate": 3.29,
        "modern-r2": 3.28,
        "modern-muon": 3.2,
    }
    for row, nats in {**losses, "modern-muon-r2": 3.15}.items():
        write(tmp_path, made_up("screen", row, 0, nats, autoregressive=None))
    found = read_evidence(tmp_path).results
    table = screen_table(found["screen"], found["long"])
    assert [cell[:7] for cell in line_of(table, "modern-r2")[4:]] == ["−0.0200", "−0.0100"]
    assert line_of(table, "modern")[4] == "–"
    assert line_of(table, "modern-muon-r2")[4].startswith("−0.0500")
    assert line_of(table, "modern-muon-r2")[5] == "–"  # its plain model with a gate is not run


def test_sweep_sources_forks_and_benchmarks(tmp_path):
    for row, nats, lr in (("plain-lr0.0015-wd0.1", 3.4, 1.5e-3), ("plain-lr0.003-wd0.1", 3.3, 3e-3)):
        record = made_up("long-sweep", row, 0, nats, autoregressive=None)
        assert record["config"]["optim"]["lr"] == lr
        write(tmp_path, record)
    layers = [{"layer": 3, "streams": 2.0, "dropped": 0.0, "alive": 0.5, "scores": [0.1, 0.2, 0.3]}]
    score = {"accuracy": 0.25, "standard_error": 0.01, "documents": 100, "chance": 0.5}
    write(tmp_path, made_up("long", "r2", 0, 3.0, forks=layers, zero_shot={"piqa": score}))
    write(tmp_path, made_up("long", "plain", 0, 3.1))
    evidence = read_evidence(tmp_path)
    long = evidence.results["long"]
    sweep = sweep_table(evidence.results["long-sweep"])
    assert "| 0.1 | 3.4000 | **3.3000** | not run |" in sweep
    assert "| 0.03 | – | not run | – |" in sweep
    drawn = figures(evidence)["sweep"][0]
    assert drawn.series["plain"].x == [0.0015, 0.003]
    assert drawn.sentence == "Best learning rate: `plain`: not all rows are run."
    write(tmp_path, made_up("long-sweep", "plain-lr0.006-wd0.1", 0, 3.5, autoregressive=None))
    assert figures(read_evidence(tmp_path))["sweep"][0].sentence == "Best learning rate: `plain` 0.003."
    assert line_of(sources_table(long), "r2") == ["`r2`", "1", "2.5000 (0.7500)"]
    assert line_of(forks_table(long), "r2")[1:] == ["3", "2.000", "0.100", "0.200", "0.300", "50.0%"]
    table = zero_shot_table(long)
    assert "| ours, 1 seed | `r2` | – | – | – | 25.0 ± 1.0 | – | – |" in table
    assert "| ours: not run | `plain` | – |" in table
    assert "|  | chance | – | – | – | 50.0 | – | – |" in table
    assert "| the paper, table 1: 1.9B, FineWeb and peS2o, 40B tokens | plain | 39.15 | 47.29 |" in table
    assert "| [long/r2-seed0.json](long/r2-seed0.json) | abc1234 | 2.11.0 | NVIDIA H200 |" in provenance_table([long])


def test_benchmarks_of_several_seeds_are_judged_by_how_all_rows_vary(tmp_path):
    """PIQA: r2 gains 1, 1.2 and 1.4 points; BLiMP: 5, 0 and −5. Then r1, with 0, 2 and −2 of PIQA: variances of 0.04, 4
    and 4.44, of whose mean a third is 0.97²."""
    accuracies = {"plain": [(0.50, 0.7), (0.51, 0.7), (0.52, 0.7)], "r2": [(0.51, 0.75), (0.522, 0.7), (0.534, 0.65)]}
    for row, seeds in accuracies.items():
        for seed, (piqa, blimp) in enumerate(seeds):
            scores = {"piqa": {"accuracy": piqa}, "blimp": {"accuracy": blimp}}
            scores = {name: {**score, "standard_error": 0.01, "chance": 0.5} for name, score in scores.items()}
            write(tmp_path, made_up("long", row, seed, 3.0, zero_shot=scores))
    table = zero_shot_table(read_evidence(tmp_path).results["long"])
    assert "| ours, 3 seeds | `r2` | – | – | 70.0 ± 1.0 (65.0 to 75.0) | 52.2 ± 1.0 (51.0 to 53.4) |" in table
    sentence = "Of 2 differences to `plain`, paired by seed, 1 can be measured: `r2` PIQA +1.2 ± 0.1 points."
    assert f"{sentence} At 95 % confidence, about 0.1 of them would be measured by chance alone." in table
    for seed, piqa in enumerate((0.50, 0.53, 0.50)):
        scores = {"piqa": {"accuracy": piqa, "standard_error": 0.01, "chance": 0.5}}
        write(tmp_path, made_up("long", "r1", seed, 3.0, zero_shot=scores))
    long = read_evidence(tmp_path).results["long"]
    assert "Of 3 differences to `plain`, paired by seed, none can be measured." in zero_shot_table(long)
    gain = zero_shot_difference(long, "r2", "piqa")
    assert (gain.mean, gain.error, gain.degrees) == (pytest.approx(1.2), pytest.approx((8.48 / 9) ** 0.5), 4)


def test_an_ensemble_has_a_loss_but_no_curve(tmp_path):
    """It is compared with the mean of its members, 3.02."""
    ensemble = made_up("scarce", "ensemble", 0, 2.9)
    for field in ("autoregressive", "copying", "forks"):
        del ensemble[field]
    evidence = read_evidence(write(tmp_path, ensemble, *rows("scarce", {"plain": [3.0, 3.04], "r2": [2.95]})))
    assert line_of(protocol_table(evidence.results["scarce"]), "ensemble")[8:] == [
        "−0.1200 ± 0.0000 \\*",
        "–",
        "–",
    ]
    drawn = {figure.name: list(figure.series) for figure in figures(evidence)["curves"]}
    assert drawn["scarce-difference"] == ["r2"]
    assert drawn["scarce-training"] == ["plain", "r2"]


def test_the_report_is_written_and_stays(tmp_path, capsys):
    """Figures with their numbers, a page where there is none, the README's line; the second time nothing changes."""
    pytest.importorskip("matplotlib")
    out = write(tmp_path / "docs" / "results", *rows("long", {**THREE, "r1": [2.98, 3.00, 2.99]}))
    readme = tmp_path / "README.md"
    readme.write_text("# A\n\n<!-- evidence -->\n<!-- /evidence -->\n<!-- results -->\nkept\n<!-- /results -->\n")
    written = write_report(out)
    numbers = json.loads((out / "figures" / "long-difference.json").read_text())
    assert numbers["series"]["r2"]["y"] == pytest.approx([-0.08 / 3] * 4, rel=1e-5)
    assert numbers["series"]["r2"]["x"] == [3.2768, 6.5536, 9.8304, 13.1072]
    assert (out / "figures" / "long-difference.png").read_bytes()[:4] == b"\x89PNG"
    points = json.loads((out / "figures" / "long-flops.json").read_text())["series"]
    assert points["r2"]["y"] == [pytest.approx(3.01 - 0.08 / 3, rel=1e-5)]
    assert points["r2"]["error"] == [pytest.approx((2e-4 / 27) ** 0.5, rel=1e-5)]
    line = readme.read_text()
    assert "2.9833 (3) | −0.0267 ± 0.0027 |" in line
    assert "<!-- results -->\nkept\n<!-- /results -->" in line
    page = (out / "index.md").read_text()
    assert "![long: training loss](figures/long-training.png)" in page
    assert {path.name for path in written} >= {"index.md", "README.md", "long-flops.svg", "long-training.json"}
    assert [path.name for path in write_report(out)] == ["index.md", "README.md"]
    assert ((out / "index.md").read_text(), readme.read_text()) == (page, line)


def test_a_page_has_what_there_are_records_of(tmp_path):
    """Of one protocol alone; what comes later is added at the end; a folder without records is a mistake."""
    with pytest.raises(ValueError, match=r"nowhere: has no records \(PROTOCOL/ROW-seedN.json\)"):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    laptop = made_up("laptop", "plain", 0, 5.3347)
    laptop["config"]["tokens_per_step"] = 8 * 128
    write_report(write(tmp_path, laptop))
    page = (tmp_path / "index.md").read_text()
    assert line_of(page, "plain")[6] == "5.3347"
    assert "Protocol `long`" not in page
    write_report(write(tmp_path, *rows("long", THREE)))
    later = (tmp_path / "index.md").read_text()
    assert later.index("## Protocol `laptop`") < later.index("## The best so far") < later.index("## Protocol `long`")
    assert "## Protocol `short`" not in later


def test_without_matplotlib_there_are_tables_and_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(write(tmp_path, *rows("long", THREE)))
    assert capsys.readouterr().out == "tables only: the plots need `pip install 'thoughtbubbles[analysis]'`\n"
    assert not list((tmp_path / "figures").glob("*.png"))
    page = (tmp_path / "index.md").read_text()
    assert "[Numbers](figures/long-difference.json); the plots need" in page
    assert line_of(page.partition("<!-- long -->")[2].partition("<!-- /long -->")[0], "r2")[2] == "3 of 3"


def test_names_of_lines_are_moved_apart():
    assert spread([0.5, 0.5], gap=0.1) == pytest.approx([0.45, 0.55])
    assert spread([0.1, 0.5], gap=0.1) == [0.1, 0.5]
    assert spread([0.2, 0.2, 0.9], gap=0.1) == pytest.approx([0.15, 0.25, 0.9])
    inside = spread([0.0, 0.0, 0.5, 1.0, 1.0], gap=0.1)
    assert inside == pytest.approx([LOWEST, LOWEST + 0.1, 0.5, HIGHEST - 0.1, HIGHEST])


def test_a_name_covers_no_point():
    """Points at heights of 0.5, and one higher; a name of width 0.2 begins 0.04 right of its point."""
    points = [(0.1, 0.5), (0.3, 0.51), (0.5, 0.5), (0.2, 0.7)]
    assert clear_of(points, 0.5, 0.5, width=0.2) == pytest.approx(0.54)
    assert clear_of(points, 0.2, 0.7, width=0.2) == pytest.approx(0.24), "others are lower"
    assert clear_of(points, 0.1, 0.5, width=0.1) == pytest.approx(0.14), "it ends before the next one"
    assert clear_of(points, 0.1, 0.5, width=0.2) == pytest.approx(0.54), "nor is there room behind that"
