"""`thoughtbubbles download`, with `datasets`, from local repositories of the form of the public ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thoughtbubbles.cli import main
from thoughtbubbles.evals.documents import open_benchmark
from thoughtbubbles.evals.download import FILES, TESTS, by_letter, files_of, last_word
from thoughtbubbles.evals.tasks import TASKS

ROWS = {  # by file: configuration, and rows as the public repositories have them
    "lambada_openai.test": [("default", [{"text": "She went to the sea, and there was the sea"}])],
    "hellaswag.validation": [
        (
            "default",
            [
                {
                    "ind": 4,
                    "activity_label": "Tea",
                    "ctx_a": "He boils water.",
                    "ctx_b": "he",
                    "label": "1",
                    "ctx": "He boils water. he",
                    "endings": ["sleeps.", "adds leaves."],
                    "split": "val",
                }
            ],
        )
    ],
    "blimp": [
        (name, [{"sentence_good": f"It {name}s.", "sentence_bad": f"It {name}.", "UID": name, "pairID": 0}])
        for name in ("run", "fall")
    ],
    "arc_easy.test": [
        (
            "ARC-Easy",
            [
                {"id": str(i), "question": "q", "choices": {"text": ["a", "b", "c"], "label": labels}, "answerKey": key}
                for i, (labels, key) in enumerate(((["A", "B", "C"], "C"), (["1", "2", "3"], "2")))
            ],
        )
    ],
    "gsm8k.test": [("main", [{"question": "1 + 1?", "answer": "two\n#### 2"}])],
}


@pytest.fixture
def repositories(tmp_path):
    """Folders in place of the repositories, with a card that names their configurations."""
    found = {}
    for file, configs in ROWS.items():
        folder = tmp_path / "hub" / file
        folder.mkdir(parents=True)
        card, split = "---\nconfigs:\n", FILES[file].split
        for name, rows in configs:
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            card += f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {name}.jsonl\n"
        (folder / "README.md").write_text(f"{card}---\n")
        found[file] = str(folder)
    return found


def run(repositories, names, out, tmp_path):
    code = f"""
from pathlib import Path
from thoughtbubbles.evals.download import FILES, download
for name, folder in {repositories!r}.items():
    FILES[name] = FILES[name]._replace(repository=folder)
download({names!r}, out=Path({str(out)!r}))
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_downloaded_files_are_what_eval_reads(repositories, tmp_path):
    out = tmp_path / "eval"
    done = run(repositories, ("lambada", "hellaswag", "blimp", "arc_easy", "gsm8k"), out, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{out / 'blimp.jsonl.gz'}: 2 lines from {repositories['blimp']}" in done.stdout

    def documents(name):
        return list(open_benchmark(TASKS[name], out).documents.values())

    assert documents("lambada")[0] == ("She went to the sea, and there was the", (" sea",), 0, {})
    assert documents("hellaswag")[0] == ("Tea: He boils water. He", (" sleeps.", " adds leaves."), 1, {})
    assert [each.groups for each in documents("blimp")] == [{"set": "run"}, {"set": "fall"}]
    assert [each.gold for each in documents("arc_easy")] == [2, 1]
    assert documents("gsm8k")[0].answer == "2"

    kept, lost = out / "lambada_openai.test.jsonl.gz", out / "gsm8k.test.jsonl.gz"
    written, content = kept.stat().st_mtime_ns, lost.read_bytes()
    lost.unlink()
    again = run(repositories, ("lambada", "gsm8k"), out, tmp_path)
    assert f"{kept}: is there already" in again.stdout
    assert (kept.stat().st_mtime_ns, lost.read_bytes()) == (written, content)


@pytest.mark.slow
def test_a_download_that_fails_says_what_to_do_and_leaves_nothing(repositories, tmp_path):
    repositories["gsm8k.test"] = str(tmp_path / "nothing here")
    done = run(repositories, ("lambada", "gsm8k"), tmp_path / "eval", tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: gsm8k.test: {tmp_path / 'nothing here'} cannot be read from Hugging Face (")
    assert last.endswith("run the same command again, which goes on with what is missing")
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["lambada_openai.test.jsonl.gz"]


@pytest.mark.slow
def test_a_line_that_has_changed_is_no_trouble_of_the_network(repositories, tmp_path):
    rows = Path(repositories["arc_easy.test"]) / "ARC-Easy.jsonl"
    rows.write_text(rows.read_text().replace('"answerKey": "2"', '"answerKey": "9"'))
    done = run(repositories, ("arc_easy",), tmp_path / "eval", tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: arc_easy.test: line 2 of {repositories['arc_easy.test']} is not what it was")
    assert not list((tmp_path / "eval").iterdir())


def test_names_of_benchmarks_and_of_files():
    assert files_of(()) == list(TESTS)
    assert {TASKS[name].file for name in TASKS if name != "clutrr"} == set(TESTS)
    assert files_of(("mmlu", "mmlu_continuation", "arc_easy.train")) == ["mmlu.test", "arc_easy.train"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["clutrr"], "clutrr: get it from https://github.com/facebookresearch/clutrr"),
        (["helaswag"], "helaswag: no benchmark has this name; did you mean hellaswag"),
    ],
)
def test_mistakes_end_in_one_line(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["download", *words, "--out", str(tmp_path / "eval")])
    said = str(stopped.value.code) if isinstance(stopped.value.code, str) else capsys.readouterr().err
    assert message in said
    assert not (tmp_path / "eval").exists()


def test_lines():
    assert last_word({"text": "a b c"}) == {"context": "a b", "target": "c"}
    line = {"id": "x", "question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
    assert by_letter(line) == {"id": "x", "question": "q", "choices": ["a", "b"], "gold": 1}
