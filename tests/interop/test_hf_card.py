"""The card of an export: it has its run's own numbers, each of them once, and invents none."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import thoughtbubbles
from helpers import lively_model
from interop.finished_run import model_in
from interop.hf_models import config_of
from thoughtbubbles.checkpoint import load, save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.evals.run import run as evaluate
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.files import write_json
from thoughtbubbles.interop.card import card, evaluation, evaluations
from thoughtbubbles.interop.export import export

pytestmark = pytest.mark.slow


def front_matter(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL).group(1))


def results(place: Path) -> dict:
    return json.loads((place / "results.json").read_text())


def percent(score: dict) -> str:
    return f"{100 * score['mean']:.2f} ± {100 * score['standard_error']:.2f}"


def expected_lines(run: Path, step: int) -> list[str]:
    (whole,) = (run / "eval" / f"step-{step:08}").glob("perplexity-*")
    tasks, limited = results(whole)["tasks"], results(run / f"eval-{step}")["tasks"]["arc_easy"]
    lambada, blimp = tasks["lambada"], tasks["blimp"]
    ways = [
        f"| {way['title']} | {way['nats']:.4f} ± {way['standard_error']:.4f} | {way['perplexity']:,.2f} ± "
        f"{way['perplexity_standard_error']:,.2f} | {way['bits_per_byte']:.4f} | 20 | corpus, val | 2 × 10 | causal "
        "| 2 | float32 |"
        for way in tasks["perplexity"]["ways"].values()
    ]
    assert len(ways) >= 2
    words = f"{lambada['perplexity']['mean']:,.2f} ± {lambada['perplexity']['standard_error']:,.2f}"
    return [
        *ways,
        "| benchmark | documents | accuracy | acc | acc_norm | perplexity | chance | limit | selection | budget | "
        "precision |",
        f"| LAMBADA | 4 | {percent(lambada['accuracy'])} |  |  | {words} |  |  | causal | 2 | float32 |",
        f"| BLiMP | 4 | {percent(blimp['accuracy'])} | {percent(blimp['accuracy_sum'])} | "
        f"{percent(blimp['accuracy_character'])} |  | 50.00 |  | causal | 2 | float32 |",
        f"| {limited['title']} | 2 | {percent(limited['accuracy'])} | {percent(limited['accuracy_sum'])} | "
        f"{percent(limited['accuracy_character'])} |  | 25.00 | 2 | causal | 1.5 | float32 |",
    ]


def test_the_card_has_the_runs_own_numbers(tmp_path, run):
    text = (export(run, out=tmp_path / "my-model") / "README.md").read_text()
    front = front_matter(text)
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert "license" not in front  # the user's to choose
    assert "# my-model" in text
    for line in (
        "| steps | 80 |",
        "| tokens | 8,000 |",
        "| training loss of the last step (nats) | 3.3000 |",
        "| validation loss (nats), books | 3.0300 |",
        "| validation loss (nats), web | 3.1300 |",
        "| recipe | first\\|try |",
        "| data | books, web |",
        "Results of `thoughtbubbles eval`.",
        f"| parameters | {sum(p.numel() for p in thoughtbubbles.load(run).parameters()):,} |",
        *expected_lines(run, 80),
    ):
        assert line in text, line
    assert len(re.findall(r"^\|.*float32 \|$", text, re.MULTILINE)) == len(expected_lines(run, 80))  # dtype is one, too
    for absent in ("4.4000", "4.0400", "None", "seconds", "truncated"):
        assert absent not in text
    earlier = (export(run / "step-00000040", out=tmp_path / "earlier") / "README.md").read_text()
    assert "| steps | 40 |" in earlier
    assert "books | 4.0400 |" in earlier
    for line in expected_lines(run, 40):
        assert line in earlier
    assert not any(later in earlier for later in ("3.3000", "3.0300", expected_lines(run, 80)[0]))


def card_of(run: Path) -> str:
    """Of its newest checkpoint."""
    model = load(run)
    (folder,) = run.glob("step-00000080/model")
    return card("x", model.config, parameters=1, dtype="float32", folder=folder, has_tokenizer=True)


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.endswith("| float32 |") and "causal" in line]


def test_each_result_is_in_the_card_once(run, tmp_path):
    """Of the same settings the newest; other budgets, limits and weights are separate."""
    before = lines_of(card_of(run))
    (path,) = (run / "eval" / "step-00000080").glob("*/results.json")
    older, newer = results(path.parent), results(path.parent)
    older["time"], newer["time"] = "2000", "9999"
    older["tasks"]["blimp"]["accuracy"]["mean"], newer["tasks"]["blimp"]["accuracy"]["mean"] = 0.11, 0.99
    for name, each in (("older", older), ("newer", newer)):
        (run / f"eval-{name}").mkdir()
        write_json(run / f"eval-{name}" / "results.json", each)
    text = card_of(run)
    assert len(lines_of(text)) == len(before)
    assert text.count("| BLiMP | 4 | 99.00 ±") == 1
    assert "11.00" not in text
    other = {**newer, "settings": {**newer["settings"], "limit": 3}, "weights": {"model.safetensors": 1}}
    write_json(run / "eval-newer" / "results.json", other)
    assert lines_of(card_of(run)) == before  # those are other weights
    write_json(run / "eval-newer" / "results.json", {**other, "weights": newer["weights"]})
    assert len([line for line in lines_of(card_of(run)) if line.startswith("| BLiMP |")]) == 2


def test_several_budgets_are_separate_lines(run):
    place = run / "step-00000080"
    benchmarks = Path(__file__).parents[2] / "docs" / "examples" / "benchmarks"
    evaluate(
        Evaluation(checkpoint=place, data_dir=benchmarks, tasks=("blimp",), budget=("1", "1.5", "2.0")),
        World(torch.device("cpu")),
    )
    found = [line for line in lines_of(card_of(run)) if line.startswith("| BLiMP |")]
    assert sorted(line.split(" | ")[-2] for line in found) == ["1", "1.5", "2.0"]  # 2 has been evaluated before


DAMAGE = ["", "{", "[1]", "null", "[" * 10**5, "1" * 5000, '{"a": ' * 10**5, '"x"', "\0", '{"step": "x"}']
DAMAGE += ['{"config": [1], "versions": 3}', '{"config": {"data": 7}}', '{"step": 80, "validation_loss": {"a": []}}']


def test_damaged_files_of_a_run_are_as_good_as_none(run):
    (path,) = (run / "eval" / "step-00000080").glob("*/results.json")
    for file in (run / "run.json", run / "metrics.jsonl", path):
        whole = file.read_bytes()
        for content in DAMAGE:
            file.write_text(content)
            assert "## The model" in card_of(run), (file, content[:40])
        file.write_bytes(whole)


def test_damaged_fields_of_results_are_as_good_as_none(run):
    """Every value in turn is something else."""
    (path,) = (run / "eval" / "step-00000080").glob("*/results.json")
    whole = results(path.parent)
    folder, tasks = run / "step-00000080" / "model", whole["tasks"]
    places = [whole, whole["settings"], tasks, *tasks.values(), tasks["blimp"]["accuracy"]]
    places += [tasks["perplexity"]["ways"], tasks["perplexity"]["ways"]["blockwise"]]
    for place in places:
        for name in list(place):
            kept = place[name]
            for wrong in (None, [1], 10**400):
                place[name] = wrong
                path.write_text(json.dumps(whole))
                assert "| ARC-Easy | 2 | " in evaluation(evaluations(folder)), (name, wrong)
            place[name] = kept


def test_half_a_line_of_metrics_is_one_line_less(tmp_path, run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 80, "validation_loss": {"bo')
    text = (export(run, out=tmp_path / "out") / "README.md").read_text()
    assert "| validation loss (nats), books | 3.0300 |" in text
    assert "| tokens | 8,000 |" in text


def test_an_export_of_an_export_keeps_its_numbers(tmp_path, run):
    first = export(run, out=tmp_path / "first", dtype=torch.bfloat16)
    once = (first / "README.md").read_text()
    again = (export(first, out=tmp_path / "again", dtype=torch.float32) / "README.md").read_text()
    tail = once[once.index("The numbers below") :]
    assert "## Training" in tail
    assert "## Evaluation" in tail
    assert again.endswith(tail)
    assert again.count("The numbers below") == 1


def test_an_export_that_was_evaluated_lists_each_result_once(tmp_path, run):
    first = export(run, out=tmp_path / "first")
    once = (first / "README.md").read_text()
    shutil.copytree(run / "eval" / "step-00000080", first / "eval")  # the same numbers, in a table of other columns
    benchmarks = Path(__file__).parents[2] / "docs" / "examples" / "benchmarks"
    evaluate(Evaluation(checkpoint=first, data_dir=benchmarks, tasks=("piqa",)), World(torch.device("cpu")))
    again = (export(first, out=tmp_path / "again") / "README.md").read_text()

    def rows(text: str) -> list[list[str]]:
        return sorted([cell.strip() for cell in line.split("|") if cell.strip()] for line in lines_of(text))

    (new,) = (row for row in rows(again) if row[0] == "PIQA")
    assert rows(again) == sorted([*rows(once), new])
    for paragraph in ("Results of `thoughtbubbles eval`.", "Accuracy in percent ± standard error", "## Evaluation"):
        assert again.count(paragraph) == 1
    tables = again[again.index("## Evaluation") :].split("\n\n")
    assert [table.splitlines()[1][:5] for table in tables if table.startswith("|")] == ["| ---"] * 3  # with headings


def test_a_card_without_a_run_invents_nothing(tmp_path):
    model_in(tmp_path / "model", "block")
    text = (export(tmp_path / "model", out=tmp_path / "out", dtype=torch.bfloat16) / "README.md").read_text()
    assert "## Training" not in text
    assert "## Evaluation" not in text
    assert "no cache is exact" in text
    (tmp_path / "metrics.jsonl").write_text("no json")
    for kind, words in (
        ("plain", "without forks"),
        ("copy-3", "copy-3 baseline"),
        ("causal-residual", "A row keeps at most 1.5 streams per token on average"),
        ("causal-residual", "a single token may have up to 8."),
        (
            "near",
            "Before the blocks 1, every stream forks, so each token has 2 streams in the end. Merge: forks. Forks",
        ),
        ("block-fixed", "A row of any length keeps at most as many streams as a full row with 2 streams per token"),
    ):
        described = card(
            "x", config_of(kind), parameters=1, dtype="float32", folder=tmp_path, has_tokenizer=kind == "plain"
        )
        assert words in " ".join(described.split())
        assert ("AutoTokenizer" in described) == (kind == "plain")
    save_model(tmp_path / "ids", lively_model(config_of("causal"), dtype=torch.float32))
    assert "AutoTokenizer" not in (export(tmp_path / "ids", out=tmp_path / "no-text") / "README.md").read_text()


@pytest.mark.parametrize(("block_size", "has_tokenizer"), [(2, True), (24, True), (80, True), (4, False)])
def test_the_example_fits_the_context_length(tmp_path, capsys, block_size, has_tokenizer):
    """At a token per byte."""
    config = config_of("causal", vocab_size=300, block_size=block_size)
    tokens = {"tokenizer": tokenizer("bytes")} if has_tokenizer else {}
    save_model(tmp_path / "model", lively_model(config, dtype=torch.float32), **tokens)
    described = (export(tmp_path / "model", out=tmp_path / "out") / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", described, re.DOTALL)[1]
    exec(example.replace('folder = "."', f"folder = {str(tmp_path / 'out')!r}"), {})
    begin = {2: "O", 24: "Once", 80: "Once upon a time", 4: "tensor([1,2,"}[block_size]
    printed = capsys.readouterr().out
    assert (printed if has_tokenizer else printed.replace(" ", "")).startswith(begin)


def test_numbers_of_a_converted_model_are_those_before(tmp_path, run):
    text = (export(run, out=tmp_path / "out", dtype=torch.bfloat16) / "README.md").read_text()
    assert "The numbers below are those of the float32 weights, before they were converted to bfloat16." in text
    text = (export(run, out=tmp_path / "same", dtype=torch.float32) / "README.md").read_text()
    assert "converted" not in text
