"""Benchmarks: their prompts, their scores, and what happens if files are missing or damaged."""

import gzip
import json
import lzma
import math
import os
import random
import re
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from thoughtbubbles.data.records import choice_answers, choices_prompt
from thoughtbubbles.evals.documents import LINE_BYTES, data_folder, find_files, open_benchmark
from thoughtbubbles.evals.likelihood import Likelihood
from thoughtbubbles.evals.metrics import Answer, mean_and_error, score_choices, scores, summary
from thoughtbubbles.evals.settings import NAMES, SUITES, Evaluation
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.evals.tasks.gsm8k import is_right, last_number
from thoughtbubbles.evals.tasks.hellaswag import cleaned
from thoughtbubbles.evals.tasks.task import Choices

RECORDS = {
    "lambada": {"context": "He went to the sea and saw the", "target": "ship"},
    "hellaswag": {
        "activity_label": "Boats",
        "ctx_a": "A man [header] sits.",
        "ctx_b": "he Then",
        "endings": [" rows [step] away.", "sinks  .", "sings [title] loud", "sleeps"],
        "label": "2",
    },
    "blimp": {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps.", "UID": "agreement"},
    "piqa": {"goal": "Open a jar", "sol1": "turn it", "sol2": "sing to it", "label": 0},
    "arc_easy": {"question": "What is wet?", "choices": ["fire", "water", "air"], "gold": 1},
    "arc_challenge": {"question": "What is dry?", "choices": ["sand", "rain"], "gold": "0"},
    "mmlu": {"subject": "high_school_law", "question": " Who? ", "choices": ["a ", "b", "c", "d"], "answer": 3},
    "clutrr": {
        "story": "[Ann] has a son, [Bob]. [Bob] has a daughter, [Eve].",
        "query": "('Ann', 'Eve')",
        "target": "granddaughter",
        "task_name": "task_1.2",
        "split": "test",
    },
    "gsm8k": {"question": "How many?", "answer": "It is 3*4=<<3*4=12>>12.\n#### 1,012"},
}
RECORDS["mmlu_continuation"] = RECORDS["mmlu"]


def write(folder: Path, name: str, lines: list, *, suffix: str = ".jsonl") -> Path:
    path = folder / f"{TASKS[name].file.replace('*', 'x')}{suffix}"
    opener = {".jsonl": open, ".jsonl.gz": gzip.open, ".jsonl.xz": lzma.open}[suffix]
    with opener(path, "wt") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    return path


def test_what_is_asked():
    assert set(RECORDS) == set(TASKS) == {*NAMES} - {"perplexity"}
    asked = {name: TASKS[name].document(record) for name, record in RECORDS.items()}
    assert asked["lambada"][:3] == ("He went to the sea and saw the", (" ship",), 0)
    assert asked["hellaswag"][:3] == (
        "Boats: A man sits. He then",
        (" rows away.", " sinks .", " sings. loud", " sleeps"),
        2,
    )
    assert asked["blimp"] == ("", (" Cats sleep.", " Cats sleeps."), 0, {"set": "agreement"})
    assert asked["piqa"][:3] == ("Question: Open a jar\nAnswer:", (" turn it", " sing to it"), 0)
    assert asked["arc_easy"][:3] == ("Question: What is wet?\nAnswer:", (" fire", " water", " air"), 1)
    assert asked["arc_challenge"].gold == 0
    shown, answers = choices_prompt("Who?", "abcd"), tuple(choice_answers("abcd"))
    assert asked["mmlu"] == (shown, answers, 3, {"subject": "high_school_law"})
    assert asked["mmlu"].choices[3] == " D. d"
    assert asked["mmlu_continuation"][:2] == (
        "The following are questions (with answers) about high school law.\n\nQuestion: Who?\nAnswer:",
        (" a ", " b", " c", " d"),
    )
    assert asked["clutrr"].context == "Ann has a son, Bob. Bob has a daughter, Eve. Eve is Ann's"
    assert asked["clutrr"].choices[asked["clutrr"].gold] == " granddaughter"
    assert asked["clutrr"].groups == {"hops": "2", "noise": "none"}
    assert asked["gsm8k"][:2] == ("How many?\n", "1,012")


def test_training_stories_are_not_in_the_benchmark():
    assert TASKS["clutrr"].document({**RECORDS["clutrr"], "split": "train"}) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 18.", "18"),
        ("#### 1,234", "1234"),
        ("from 3 to -4.50 dollars", "-4.5"),
        ("$.75", "0.75"),
        ("12,000,000.25", "12000000.25"),
        ("first 5, then 7,", "7"),
        ("20-18", "18"),
        ("it is (4)-3", "3"),
        ("minus: -3", "-3"),
        ("none", None),
    ],
)
def test_the_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def test_a_free_answer_is_right_by_its_last_number():
    assert is_right("3 + 4 = 7, so $1,012.00", "1,012")
    assert not is_right("1012 or 1013", "1,012")
    assert not is_right("no idea", "1,012")


def found(*sums: tuple[float, int]) -> list[Likelihood]:
    return [Likelihood(total, n, False, 0) for total, n in sums]


def test_four_ways_to_be_right():
    """Each metric picks another choice: of 1, 8, 2 and 4 characters (one of three bytes) and different token counts."""
    document = Choices("?", (" a", " bbbbbbbb", " é€", " cccc"), 0)
    sums = found((-2.0, 1), (-8.5, 6), (-3.0, 2), (-4.4, 3))
    best = {
        "accuracy": 1,  # −1.42 per token
        "accuracy_sum": 0,
        "accuracy_character": 1,  # −1.06 per character
        "accuracy_byte": 2,  # −0.6 per byte
    }
    for gold in range(4):
        marks = scores(document._replace(gold=gold), sums)
        assert marks == {way: float(place == gold) for way, place in best.items()}
    equal = found((-1.0, 1), (-1.0, 1))
    assert scores(Choices("?", (" a", " b"), 0), equal) == dict.fromkeys(best, 1.0)  # the first of equals


def test_a_last_word():
    word = Likelihood(-2.5, 2, True, 3)
    answer = score_choices(Choices("text", (" word",), 0), [word])
    assert answer == Answer(scores={"accuracy": 1.0, "nats": 2.5}, truncated=3, log_probs=[-2.5], tokens=[2])
    assert score_choices(Choices("text", (" word",), 0), [word._replace(greedy=False)]).scores["accuracy"] == 0


@pytest.mark.parametrize("cuts", [(3, 7, 0), (7, 3, 0), (0, 3, 7)])
def test_the_most_truncated_choice_counts(cuts):
    likelihoods = [Likelihood(-1.0, 2, False, cut) for cut in cuts]
    assert score_choices(Choices("text", (" a", " b", " c"), 0), likelihoods).truncated == 7


def test_means_and_standard_errors():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    mean, error = mean_and_error(values)
    assert (mean, error) == pytest.approx((0.6, np.std(values, ddof=1) / math.sqrt(5)))
    assert mean_and_error([0.5]) == (0.5, None)


def test_the_error_of_a_perplexity():
    """To first order: that of the mean loss, times the perplexity."""
    nats = [2.0, 3.0, 2.5, 4.0]
    about = summary(TASKS["lambada"], [Answer(scores={"accuracy": 0.0, "nats": n}, tokens=[1]) for n in nats])
    error = np.std(nats, ddof=1) / 2
    assert about["perplexity"]["standard_error"] == pytest.approx(math.exp(np.mean(nats)) * error)


def test_a_summary_has_parts():
    answers = [
        Answer(scores={"accuracy": right, "nats": 2.0}, groups={"hops": hops}, truncated=cut, tokens=[1, 1, 1, 1])
        for right, hops, cut in ((1.0, "10", 0), (0.0, "2", 7), (1.0, "2", 5), (1.0, "3", 0))
    ]
    about = summary(TASKS["clutrr"], answers)
    assert about["accuracy"]["mean"] == 0.75
    assert about["truncated"] == {"documents": 2, "tokens": 12}
    assert about["perplexity"] == {"mean": pytest.approx(math.exp(2)), "standard_error": pytest.approx(0)}
    assert list(about["by"]["hops"]) == ["2", "3", "10"]  # as numbers
    assert about["by"]["hops"]["2"]["accuracy"] == {"mean": 0.5, "standard_error": pytest.approx(0.5)}
    assert about["chance"] == 0.25
    assert (about["documents"], about["version"], about["title"]) == (4, 1, "CLUTRR")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_files_packed_or_not(tmp_path, suffix):
    (tmp_path / "eval").mkdir()
    write(tmp_path / "eval", "piqa", [RECORDS["piqa"], "", {**RECORDS["piqa"], "label": 1}], suffix=suffix)
    benchmark = open_benchmark(TASKS["piqa"], tmp_path)
    assert [document.gold for document in benchmark.documents.values()] == [0, 1]


def test_a_part_is_spread_evenly_and_known_by_its_content(tmp_path):
    write(tmp_path, "blimp", [{**RECORDS["blimp"], "UID": f"set {i}"} for i in range(10)])
    few, every = (open_benchmark(TASKS["blimp"], tmp_path, limit=limit) for limit in (4, None))
    assert list(few.documents) == [0, 2, 5, 7]
    assert list(every.documents) == list(range(10))
    assert few.documents[5].groups == {"set": "set 5"}
    write(tmp_path, "blimp", [{**RECORDS["blimp"], "UID": f"set {i}", "sentence_bad": "!"} for i in range(10)])
    assert open_benchmark(TASKS["blimp"], tmp_path, limit=4).checksum != few.checksum


def test_all_sets_of_a_benchmark_count(tmp_path):
    for name, suffix in (("one", ".jsonl"), ("two", ".jsonl.xz"), ("two", ".jsonl")):
        path = write(tmp_path, "clutrr", [RECORDS["clutrr"], {**RECORDS["clutrr"], "split": "train"}], suffix=suffix)
        path.rename(tmp_path / f"clutrr.data_{name}{suffix}")
    found = find_files(TASKS["clutrr"], tmp_path)
    assert [path.name for path in found] == ["clutrr.data_one.jsonl", "clutrr.data_two.jsonl"]  # each once
    (tmp_path / "clutrr.data_two.jsonl").unlink()
    assert len(open_benchmark(TASKS["clutrr"], tmp_path).documents) == 2


def test_a_missing_file_says_what_to_download(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"hellaswag: .* has no hellaswag.validation.jsonl.*: `thoughtbubbles download hellaswag.validation --out "
        ".*`, or get the dataset from https://",
    ):
        find_files(TASKS["hellaswag"], tmp_path)
    with pytest.raises(ValueError, match="with the fields activity_label, ctx_a, ctx_b, endings, label"):
        find_files(TASKS["hellaswag"], tmp_path)


def test_the_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("THOUGHTBUBBLES_DATA", raising=False)
    with pytest.raises(ValueError, match="--data-dir is missing: give the folder with the benchmarks"):
        data_folder(None)
    with pytest.raises(ValueError, match="does not exist: give the folder"):
        data_folder(tmp_path / "nowhere")
    monkeypatch.setenv("THOUGHTBUBBLES_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("piqa", '{"goal": "x"', "line 2: Expecting ',' delimiter"),
        ("piqa", "[1]", "line 2: a list, not an object; expected one JSON object per line"),
        ("piqa", {"goal": "x"}, "line 2: field 'sol1' is missing; expected goal, sol1, sol2, label"),
        ("piqa", {**RECORDS["piqa"], "label": 2}, "line 2: label is 2: it must be a number from 0 to 1"),
        ("piqa", {**RECORDS["piqa"], "goal": 3}, "line 2: goal is 3: it must be text"),
        ("arc_easy", {**RECORDS["arc_easy"], "gold": "B"}, "line 2: gold is 'B': it must be a number from 0 to 2"),
        ("arc_easy", {**RECORDS["arc_easy"], "choices": "ab"}, "line 2: choices is 'ab': it must be a list"),
        ("gsm8k", {"question": "?", "answer": "#### four"}, "line 2: answer ends in 'four': it must end in ####"),
        ("gsm8k", {"question": "?", "answer": "It is 4"}, "line 2: answer ends in 'It is 4': it must end in ####"),
        ("piqa", {**RECORDS["piqa"], "label": 0.7}, "line 2: label is 0.7: it must be a number from 0 to 1"),
        ("piqa", {**RECORDS["piqa"], "label": True}, "line 2: label is True: it must be a number"),
        ("clutrr", {**RECORDS["clutrr"], "query": "Ann"}, r"line 2: query is 'Ann': it must be a pair of names"),
        ("clutrr", {**RECORDS["clutrr"], "target": "friend"}, r"line 2: target is 'friend'"),
        ("clutrr", {**RECORDS["clutrr"], "query": "(" * 100_000}, r"line 2: query is '\(\(.*…: it must be a pair"),
        ("clutrr", {**RECORDS["clutrr"], "query": "('a', 'b', 'c')"}, "line 2: query is .*: it must be a pair"),
        ("clutrr", {**RECORDS["clutrr"], "query": "(9**9**9, 'b')"}, "line 2: query is .*: it must be a pair"),
        ("clutrr", {**RECORDS["clutrr"], "task_name": f"task_1.{'9' * 5000}"}, "line 2: target is .*…: not a relation"),
        ("clutrr", {**RECORDS["clutrr"], "split": ["test"]}, r"line 2: split is \['test'\]: it must be text"),
        ("piqa", {**RECORDS["piqa"], "label": "9" * 5000}, "line 2: label is '9{99}…: it must be a number"),
        ("piqa", {**RECORDS["piqa"], "goal": ["x" * 100_000]}, r"line 2: goal is \['x{98}…: it must be text"),
        ("piqa", {**RECORDS["piqa"], "goal": "\ud800"}, r"line 2: goal is '\\ud800': it must be text"),
        ("arc_easy", {**RECORDS["arc_easy"], "choices": ["a", "\udfff"]}, "line 2: choices is .*: it must be a list"),
        ("arc_easy", {**RECORDS["arc_easy"], "choices": {"a": 1}}, "line 2: choices is .*: it must be a list"),
        ("blimp", {**RECORDS["blimp"], "UID": None}, "line 2: UID is None: it must be text"),
        ("lambada", "[" * 100_000, "line 2: the JSON is nested too deeply"),
        ("lambada", '{"context": ' + "9" * 5000, "line 2: "),
        ("gsm8k", {"question": {}, "answer": "#### 4"}, "line 2: question is {}: it must be text"),
        ("hellaswag", {**RECORDS["hellaswag"], "endings": [1, 2]}, r"line 2: endings is \[1, 2\]: it must be a list"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_line_is_reported_with_its_number(tmp_path, name, line, message):
    path = write(tmp_path, name, [RECORDS[name], line])
    with pytest.raises(ValueError, match=rf"{path.name}, {message}"):
        open_benchmark(TASKS[name], tmp_path)


def test_a_line_without_an_end(tmp_path, monkeypatch):
    """A few kilobytes may expand to a line that fills the memory: it is read up to a limit, and rejected."""
    path = tmp_path / f"{TASKS['piqa'].file}.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(RECORDS["piqa"]).encode() + b"\n" + b"1" * (LINE_BYTES + 1)))
    with pytest.raises(ValueError, match=rf"line 2: it has {LINE_BYTES:,} bytes or more"):
        open_benchmark(TASKS["piqa"], tmp_path)


def test_markers_are_removed_as_in_the_harness():
    texts = ["a [b] c", "[a][b]", "[a", "a]b[c]", "[[a]b]", "[a\nb] c", "x [title] y [", "a  b [ c ]  d", ""]
    texts += ["".join(random.Random(seed).choices("[]a \n", k=30)) for seed in range(200)]
    for text in texts:
        expected = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
        assert cleaned(text) == expected
    begun = time.monotonic()
    cleaned("[" * 10**6)  # a regular expression would take minutes
    assert time.monotonic() - begun < 2


def test_names_in_quotes_of_both_kinds():
    pair = {**RECORDS["clutrr"], "query": """ ( "O'Neil" , 'Bob' ) """}
    assert TASKS["clutrr"].document(pair).context.endswith("Bob is O'Neil's")


def test_a_line_that_is_not_utf8(tmp_path):
    path = write(tmp_path, "piqa", [RECORDS["piqa"]] * 30)
    path.write_bytes(path.read_bytes() + b'{"goal": "\xff"}\n')
    with pytest.raises(ValueError, match=r"jsonl, line 31: 'utf-8' codec can't decode"):
        open_benchmark(TASKS["piqa"], tmp_path)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.xz"])
def test_every_damage_of_a_packed_file_is_one_line(tmp_path, suffix):
    """Each byte flipped, and the file truncated at each position: read, or rejected with the name of the file."""
    path = write(tmp_path, "piqa", [RECORDS["piqa"]] * 3, suffix=suffix)
    whole = path.read_bytes()
    turned = [whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1 :] for i in range(len(whole))]
    told = []
    for content in (*turned, *(whole[:i] for i in range(len(whole)))):
        path.write_bytes(content)
        try:
            open_benchmark(TASKS["piqa"], tmp_path)
        except ValueError as error:
            told.append(str(error))
    assert len(told) > len(whole)
    assert [line for line in told if path.name not in line and "have no document" not in line] == []


def test_what_is_not_a_file(tmp_path):
    name = f"{TASKS['piqa'].file}.jsonl"
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is not a file"):  # does not block
        open_benchmark(TASKS["piqa"], tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"{name} is not a file"):
        open_benchmark(TASKS["piqa"], tmp_path)


def test_a_damaged_file(tmp_path):
    path = write(tmp_path, "piqa", [RECORDS["piqa"]] * 500, suffix=".jsonl.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cannot be decompressed .*; download it again"):
        open_benchmark(TASKS["piqa"], tmp_path)
    write(tmp_path, "clutrr", [{**RECORDS["clutrr"], "split": "train"}])
    with pytest.raises(ValueError, match="have no document of the benchmark"):
        open_benchmark(TASKS["clutrr"], tmp_path)


def test_names_and_suites():
    some = {"checkpoint": Path("x")}
    assert Evaluation(**some, tasks=("all",)).names == tuple(TASKS)
    assert Evaluation(**some, tasks=("all",), data=Path("d")).names == ("perplexity", *TASKS)
    assert Evaluation(**some, tasks=("piqa", "zero-shot")).names[:2] == ("piqa", "lambada")
    assert len(SUITES["zero-shot"]) == 6
    for wrong, hint in (("helaswag", "did you mean hellaswag"), ("arc-easy", "did you mean arc_easy"), ("x", "choose")):
        with pytest.raises(ValueError, match=f"--tasks {wrong}: there is no such task; {hint}"):
            Evaluation(**some, tasks=(wrong,))
    with pytest.raises(ValueError, match="--limit 0: give a whole number from 1 to 1,000,000,000"):
        Evaluation(**some, limit=0)


@pytest.mark.parametrize("name", ["limit", "windows", "tokens", "batch", "batch_tokens", "answers_at_once"])
@pytest.mark.parametrize("value", [True, 0, -1, 1.5, "3", 10**30, pytest.param(10**5000, id="very long")])
def test_numbers_are_bounded(no_shape_checks, name, value):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*: give a whole number from 1 to 1,000,000,000"):
        Evaluation(checkpoint=Path("x"), tasks=("piqa",), **{name: value})


@pytest.mark.parametrize("budget", ["1.5", 2, [1], (1.5,)])
def test_budgets_are_a_tuple_of_strings(no_shape_checks, budget):
    with pytest.raises(ValueError, match="give a tuple of strings"):
        Evaluation(checkpoint=Path("x"), tasks=("piqa",), budget=budget)


COUNTS = {"lambada": 5153, "hellaswag": 10042, "blimp": 67000, "piqa": 1838, "arc_easy": 2376, "arc_challenge": 1172}
COUNTS |= {"mmlu": 14042, "mmlu_continuation": 14042, "clutrr": 3977, "gsm8k": 1319}


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif("THOUGHTBUBBLES_DATA" not in os.environ, reason="THOUGHTBUBBLES_DATA names no folder of real sets")
@pytest.mark.parametrize("name", TASKS)
def test_the_real_sets_are_read_whole(name):
    benchmark = open_benchmark(TASKS[name], Path(os.environ["THOUGHTBUBBLES_DATA"]))
    assert len(benchmark.documents) == COUNTS[name]
    groups = {"blimp": ("set", 67), "mmlu": ("subject", 57), "clutrr": ("hops", 9)}
    if name in groups:
        key, n = groups[name]
        assert len({document.groups[key] for document in benchmark.documents.values()}) == n
