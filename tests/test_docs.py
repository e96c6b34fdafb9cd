"""The documentation is right: commands run, names exist, links work, figures and tables are up to date."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from thoughtbubbles.model.budget import Budget
from thoughtbubbles.model.selection import Rule, candidate_keys, candidate_levels

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
STORY = ROOT / "docs" / "guides" / "fine-tuning.md"  # its commands and its Python need what came before them


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """All commands of a page, in order."""
    return [command for block in blocks(page, "bash") for command in commands_of(block)]


def commands_of(block: str) -> list[str]:
    lines = [line.split(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("git clone ")]  # that is how the reader got here


def runnable(command: str) -> list[str]:
    """What a test runs for a command: a smaller one if it takes long, a dry run if it needs more than a test has."""
    words = shlex.split(command)
    if words[0] == "make":
        return [words[0], "--dry-run", *words[1:]]  # the targets run these tests
    if words[0] == ".venv/bin/torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    elif words[0] == ".venv/bin/thoughtbubbles":
        words[:1] = [sys.executable, "-m", "thoughtbubbles"]
    else:
        pytest.fail(f"no test knows how to run {command!r}")
    if "train" in words and not {"--list", "--help", "--dry-run"} & set(words):
        is_small = words[words.index("train") + 1].startswith(("tiny", "task:")) or "--init-from" in words
        words += (
            ["--tokens", "4096", "--eval.tokens", "512", "--eval.sample-tokens", "2"] if is_small else ["--dry-run"]
        )
    if "bench" in words and "--list" not in words:
        words += ["--quick", "--rows", "1", "--tokens", "16"]
    if "watch" in words:
        words += ["--help"]  # it serves until interrupted; tests/serve runs it
    if "analyze" in words:
        words += ["--budgets", "2"]
    if "eval" in words and "--help" not in words:
        words += ["--windows", "2", "--tokens", "32"]
        words += ["--limit", "20"] if any(word.startswith("task:") for word in words) else []
    return words


def run_in_one_process(tasks: list[dict[str, Any]], folder: Path, *options: str) -> None:
    """Torch is imported once for all of them."""
    done = subprocess.run(
        [sys.executable, *options, str(ROOT / "tests" / "run_commands.py")],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        cwd=folder,
    )
    if done.returncode:
        number = done.stderr.split()[-1]
        pytest.fail(f"{tasks[int(number)] if number.isdecimal() else tasks}\n{done.stderr}")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page != STORY and blocks(page, "python")], ids=name_of)
def test_python(page):
    run_in_one_process([{"code": code} for code in blocks(page, "python")], ROOT, "-W", "error")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page != STORY and commands(page)], ids=name_of)
def test_commands(page, tmp_path):
    """The commands of a page, one after the other, in a folder that looks like a fresh clone."""
    fresh_clone(tmp_path)
    ours = [words[3:] for command in commands(page) if is_ours(words := runnable(command))]
    run_in_one_process([{"words": words} for words in ours], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_of_other_programs(page, tmp_path):
    """`make` and `torchrun`."""
    fresh_clone(tmp_path)
    for command in commands(page):
        if not is_ours(words := runnable(command)):
            run = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
            assert run.returncode == 0, f"{command}\n{run.stderr}"


@pytest.mark.slow
def test_the_story_of_fine_tuning(tmp_path, monkeypatch):
    """From its own JSONL to an answer of the model over HTTP, in the order of the page, with little training."""
    fresh_clone(tmp_path)
    tasks: list[dict[str, Any]] = []
    for language, block in re.findall(r"^```(bash|python)\n(.*?)^```", STORY.read_text(), re.DOTALL | re.MULTILINE):
        each = [runnable(command) for command in commands_of(block)] if language == "bash" else []
        assert all(map(is_ours, each))
        tasks += [{"code": block}] if language == "python" else [{"words": words[3:]} for words in each]
    run_in_one_process(tasks, tmp_path)
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client")):
        pytest.skip("the server's packages are not installed: pip install 'thoughtbubbles[serve]'")
    start, curl = (shlex.split(block, comments=True) for block in blocks(STORY, "sh"))
    assert start[:2] == [".venv/bin/thoughtbubbles", "serve"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import serve

    with serve.Server(*start[2:]) as server:
        asked = [word.replace("http://127.0.0.1:8000/", server.place.geturl()) for word in curl]
        done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "NO_PROXY": "*"})
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["model"] == Path(start[start.index("--checkpoint") + 1]).name
    assert isinstance(answer["choices"][0]["text"], str)


@pytest.mark.parametrize("bad", [{"words": ["inspect", "huge"]}, {"code": "1 / 0"}, {"code": "raise SystemExit(3)"}])
def test_what_fails_is_seen(bad, tmp_path):
    with pytest.raises(pytest.fail.Exception, match=str(next(iter(bad.values()))[0])):
        run_in_one_process([{"words": ["--version"]}, bad, {"words": ["--version"]}], tmp_path)


def fresh_clone(folder: Path) -> None:
    for entry in ROOT.iterdir():
        if entry.name not in ("data", "runs", "models"):
            (folder / entry.name).symlink_to(entry)


def is_ours(words: list[str]) -> bool:
    return words[:3] == [sys.executable, "-m", "thoughtbubbles"]


def test_there_are_commands_to_test():
    assert sum(len(commands(page)) for page in PAGES) >= 15
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 4
    assert sum(not is_ours(runnable(command)) for page in PAGES for command in commands(page)) >= 3


def test_paper_to_code_names_what_exists():
    page = (ROOT / "docs" / "paper-to-code.md").read_text()
    names = re.findall(r"`(\w+\.py):([\w.]+)`", page)
    assert len(names) > 40
    for file, name in names:
        folder = "tests/model" if file.startswith("test_") else "src/thoughtbubbles/model"
        source = (ROOT / folder / file).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(def|class) {part}\b", source, re.MULTILINE), f"{file}:{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("script", ["method.py", "feedback.py", "bubbles.py", "train_step.py", "pictures.py"])
def test_a_figure_is_what_its_script_draws(script):
    subprocess.run([sys.executable, ROOT / "docs" / "figures" / script, "--check"], check=True)


@pytest.mark.parametrize(("guide", "folder"), [("looking-inside.md", "inside"), ("watch.md", "watch")])
def test_pictures_of_a_guide(guide, folder):
    """All that are made are shown, with a text for those who cannot see them and the figure's own sentence; small
    files, in which nothing names the machine they were made on."""
    page = " ".join((ROOT / "docs" / "guides" / guide).read_text().split())
    shown = dict(re.findall(r"!\[([^]]+)\]\(\.\./figures/([^)]+)\)", page))
    shown |= {alt: path for path, alt in re.findall(r'<img src="\.\./figures/([^"]+)"[^>]* alt="([^"]+)">', page)}
    files = sorted((ROOT / "docs" / "figures" / folder).iterdir())
    pictures = [path for path in files if path.suffix != ".json"]
    assert len(pictures) >= 4
    assert {f"{folder}/{path.name}" for path in pictures} == set(shown.values())
    assert all(len(text) > 20 for text in shown)
    for path in files:
        content = path.read_bytes()
        assert len(content) < 150_000, path.name
        assert not re.search(rb"/(home|root|tmp|Users)/", content), path.name
        assert str(ROOT).encode() not in content, path.name
        if path.suffix == ".json":
            assert json.loads(content)["sentence"] in page, path.name


def script(name: str) -> Any:
    """A script of docs/figures as a module."""
    spec = importlib.util.spec_from_file_location(f"figures_{name}", ROOT / "docs" / "figures" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_pictures_of_another_style_are_noticed(monkeypatch):
    pictures = script("pictures")
    assert pictures.check() is None
    monkeypatch.setattr(pictures, "STYLE", pictures.STYLE + 1)
    assert all(name in pictures.check() for name in pictures.FIGURES)


def test_without_a_page_there_are_no_pictures_of_it(monkeypatch):
    pictures = script("pictures")
    monkeypatch.setattr(sys, "executable", "false")  # a program that prints nothing and fails
    with pytest.raises(SystemExit, match="watch did not start"), pictures.server():
        pass


def test_the_figure_follows_our_rules():
    """The drawing script has no dependencies, so it implements selection itself: its survivors must be ours."""
    figure = script("method")
    streams = [figure.Stream(k) for k in range(len(figure.TOKENS))]
    for scores in (figure.SCORES_1, figure.SCORES_2):
        row = figure.candidates(streams, scores)
        kept = figure.select(row)
        token = torch.tensor([[c.token for c in row]])
        forced = torch.tensor([[c.original for c in row]])
        log_score = torch.tensor([[c.log_score for c in row]])
        key = candidate_keys(candidate_levels(log_score, token, forced, len(figure.TOKENS)))
        for selection in ("causal", "block"):
            rule = Rule(selection, Budget.of(figure.BUDGET))
            ours = rule.survives(key, token, torch.tensor([len(figure.TOKENS)]), len(figure.TOKENS))
            assert ours[0].nonzero().flatten().tolist() == kept
        streams = [row[i] for i in kept]


def test_the_tables_are_what_was_measured():
    subprocess.run([sys.executable, "table.py", "--check"], cwd=ROOT / "benchmarks", check=True)
