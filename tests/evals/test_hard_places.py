"""Accuracy by work, and streams at hard and easy positions, against one prediction at a time."""

import json
from collections import defaultdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from helpers import lively_model, small_config
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.cli import main
from thoughtbubbles.data.tasks import TASKS
from thoughtbubbles.data.tasks.task import Example
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.evals import hard_places
from thoughtbubbles.evals.hard_places import measure_task
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.generate.show import streams_per_token
from thoughtbubbles.model.transformer import Thoughtbubbles

N = 12


def model_of(**changes: Any) -> Thoughtbubbles:
    return lively_model(small_config(vocab_size=384, block_size=160, **changes)).eval()


def one_by_one(model: Thoughtbubbles, task: str, split: str) -> tuple[dict[str, float], dict[str, int]]:
    """Every answer from the text before it alone."""
    right = defaultdict(list)
    for example in islice(TASKS[task].examples(split, seed=1), N):
        for at, counts in enumerate(example.counts):
            if counts and (example.work[at] or task == "copy"):
                ids = torch.tensor([list(example.text[:at].encode())])
                with torch.no_grad():
                    logits = model(ids, want=("next_logits",)).next_logits
                right[str(example.work[at])].append(int(logits[0, :257].argmax()) == ord(example.text[at]))
    return {work: fmean(found) for work, found in right.items()}, {work: len(found) for work, found in right.items()}


@pytest.mark.parametrize(
    "task", ["permute", *(pytest.param(name, marks=pytest.mark.slow) for name in ("parity", "copy"))]
)
@pytest.mark.parametrize("changes", [{}, {"fork_layers": (), "merge": "original"}], ids=["causal", "plain"])
def test_accuracy_is_that_of_single_predictions(task: str, changes: dict[str, Any]):
    model = model_of(**changes)
    found = measure_task(model, TASKS[task], "val", n_examples=N)
    accuracy, count = one_by_one(model, task, "val")
    assert found["accuracy"] == pytest.approx(accuracy)
    assert found["count"] == count
    assert "alone" not in found


def test_block_selection_is_measured_from_prefixes_too():
    model = model_of(selection="block", budget=1.5)
    found = measure_task(model, TASKS["permute"], "val", n_examples=N)
    assert found["alone"] == pytest.approx(one_by_one(model, "permute", "val")[0])
    assert found["alone"].keys() == found["accuracy"].keys()


def test_streams_at_hard_and_easy_positions():
    model, task = model_of(budget=1.5), TASKS["lookups"]
    found = measure_task(model, task, "longer", n_examples=N)
    sizes = defaultdict(list)
    for example in islice(task.examples("longer", seed=1), N):
        for at, n in enumerate(streams_per_token(model, list(example.text.encode()))):
            sizes[str(example.hard.get(at, "easy"))].append(n)
            if at not in example.hard and any(example.text[hard] == example.text[at] for hard in example.hard):
                sizes["alike"].append(n)
    assert {work: layers[-1] for work, layers in found["streams"].items()} == pytest.approx(
        {work: fmean(each) for work, each in sizes.items()}
    )
    assert all(len(layers) == 3 for layers in found["streams"].values())
    assert len({round(layers[-1], 3) for layers in found["streams"].values()}) > 1


def test_models_without_forks_have_their_copies():
    model = model_of(fork_layers=(), merge="original", copies=2)
    found = measure_task(model, TASKS["parity"], "val", n_examples=3)
    assert {tuple(layers) for layers in found["streams"].values()} == {(2.0,)}


def test_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    model = model_of(selection="block")
    whole = measure_task(model, TASKS["chain"], "longer", n_examples=N)
    monkeypatch.setattr(hard_places, "BATCH_TOKENS", 1)
    assert measure_task(model, TASKS["chain"], "longer", n_examples=N) == whole


def test_a_model_that_knows_the_answer_is_right():
    """With the true next character as its prediction everywhere, accuracy is 1 at every work."""

    class Knowing(Thoughtbubbles):
        def forward(self, ids: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
            out = super().forward(ids, **options)
            following = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
            logits = torch.nn.functional.one_hot(following, 384).double()
            return out._replace(logits=logits)

    model = Knowing(small_config(vocab_size=384, block_size=160, fork_layers=(), merge="original")).eval()
    assert set(measure_task(model, TASKS["permute"], "val", n_examples=5)["accuracy"].values()) == {1.0}


def test_where_nothing_is_hard_every_target_is_asked():
    example = Example("ab|ab", (False, False, False, True, True), (0, 0, 0, 0, 0))
    assert hard_places.asked(example) == {2: 0, 3: 0}


def test_a_budget_is_passed_on():
    model, task = model_of(), TASKS["permute"]
    ones = measure_task(model, task, "val", n_examples=N, budget=1)
    assert {layers[-1] for layers in ones["streams"].values()} == {1.0}
    block = model_of(selection="block", budget=4)
    assert measure_task(block, task, "val", n_examples=N, budget=1)["alone"] == pytest.approx(
        one_by_one(model_of(selection="block", budget=1), "permute", "val")[0]
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", model_of(budget=1.5).float(), tokenizer=tokenizer("bytes"))
    return tmp_path / "model"


def test_the_command_shows_and_writes(saved: Path, capsys: pytest.CaptureFixture[str]):
    main(["eval", "--checkpoint", str(saved), "--tasks", "task:permute", "--limit", "5", "--budget", "1"])
    shown = capsys.readouterr().out
    assert "task:permute: what is in five cups after several exchanges?" in shown
    assert "deeper" in shown
    found = json.loads((saved / "eval" / "task-permute-r1-limit5.json").read_text())
    expected = measure_task(model_of().float(), TASKS["permute"], "deeper", n_examples=5, budget=1)
    assert found["splits"]["deeper"] == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["task:khop"], "--tasks task:khop: has texts of up to 232 tokens, but the model's context length"),
        (["task:permute", "--budget", "1", "2"], "--budget 1 2: with made-up tasks give one"),
        (["task:permute", "--budget", "0"], "--budget"),
        (["task:permute", "--dtype", "bfloat16"], "--dtype bfloat16: made-up tasks are measured in float32"),
    ],
)
def test_mistakes_are_named(saved: Path, words: list[str], expected: str):
    with pytest.raises(SystemExit, match=expected):
        main(["eval", "--checkpoint", str(saved), "--tasks", *words])


def test_another_tokenizer_is_named(tmp_path: Path):
    save_model(tmp_path / "model", model_of().float())
    with pytest.raises(SystemExit, match="its tokenizer is none; give a model that `thoughtbubbles train task:copy`"):
        main(["eval", "--checkpoint", str(tmp_path / "model"), "--tasks", "task:copy"])


def test_names_are_checked_with_the_settings():
    with pytest.raises(ValueError, match=r"give made-up tasks \(task:NAME\) by themselves"):
        Evaluation(tasks=("task:permute", "lambada"))
    with pytest.raises(ValueError, match="task:permuted: no task has this name; did you mean permute"):
        Evaluation(tasks=("task:permuted",))
