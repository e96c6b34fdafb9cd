"""On real documents, native benchmarks, the harness with our model, and the harness with its `hf` model agree."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # `hf` would ask the Hub even about a local folder

import lm_eval
import pytest
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import thoughtbubbles.interop.hf  # noqa: F401 (so that `hf` can open our folders)
from helpers import SAME_ROW_FLOAT32
from interop.harness_benchmarks import GPT2, KINDS, save_models
from thoughtbubbles.evals.documents import open_benchmark
from thoughtbubbles.evals.evaluate import evaluate
from thoughtbubbles.evals.metrics import Answer
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.interop.harness_tasks import local_tasks
from thoughtbubbles.interop.lm_eval import ThoughtbubblesLM

pytestmark = [pytest.mark.slow, pytest.mark.data]

SAME_SCORES = {"accuracy_sum": "acc", "accuracy_character": "acc_norm"}  # ours, and the harness's names for them

REAL = (
    ({"lambada_openai", "hellaswag", "arc_easy", "arc_challenge", "piqa"}, 200),
    ({"blimp"}, 3),
    ({"mmlu_continuation"}, 4),
)


@pytest.fixture(scope="module")
def real_data() -> Path:
    if not os.environ.get("THOUGHTBUBBLES_DATA"):
        pytest.skip("THOUGHTBUBBLES_DATA does not name a folder with the benchmarks")
    return Path(os.environ["THOUGHTBUBBLES_DATA"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def harness_samples(model: LM, folder: Path, tasks: set[str], limit: int) -> dict:
    """What the harness found, document by document."""
    return lm_eval.simple_evaluate(
        model=model,
        tasks=sorted(tasks),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )["samples"]


def native_answers(model: ThoughtbubblesLM, task: str, data: Path, limit: int) -> dict[str, list[Answer]]:
    """Our own benchmark on the first documents of each part, under the names that the harness gives the parts."""
    benchmark = open_benchmark(TASKS[task], data)
    parts: dict[str, list[int]] = {}
    for number, document in benchmark.documents.items():
        name = {
            "lambada": "lambada_openai",
            "blimp": f"blimp_{document.groups.get('set')}",
            "mmlu_continuation": f"mmlu_{document.groups.get('subject')}_continuation",
        }.get(task, task)
        parts.setdefault(name, []).append(number)
    chosen = {name: numbers[:limit] for name, numbers in parts.items()}
    found: dict[int, Answer] = {}
    asked = {number: benchmark.documents[number] for numbers in chosen.values() for number in numbers}
    evaluate(model.model, GPT2, benchmark.task, asked, keep=found.__setitem__)
    return {name: [found[number] for number in numbers] for name, numbers in chosen.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_native_and_harness_agree_on_real_documents(real_data, cache, tmp_path, kind):
    """Most documents fit into 256 tokens: some are truncated and most are not."""
    checkpoints = save_models(tmp_path, block_size=256, merge="residual")  # decodes one row per token, which saves time
    model = ThoughtbubblesLM(checkpoints[kind])
    folder = local_tasks(real_data, cache_dir=cache)
    for tasks, limit in REAL:
        samples = harness_samples(model, folder, tasks, limit)
        for task in tasks:
            native = native_answers(model, task.removesuffix("_openai"), real_data, limit)
            n_documents = 0
            for name, answers in native.items():
                for sample, answer in zip(samples[name], answers, strict=True):
                    n_documents += 1
                    theirs = [log_prob for ((log_prob, _),) in sample["resps"]]
                    assert answer.log_probs == pytest.approx(theirs, abs=SAME_ROW_FLOAT32, rel=0)
                    ways = {"accuracy": "acc"} if len(theirs) == 1 else SAME_SCORES
                    assert all(answer.scores[way] == sample[acc] for way, acc in ways.items() if acc in sample)
            assert n_documents >= 200
    assert model.get_model_info()["requests_truncated"] > 0


def test_the_hf_model_of_the_harness_gives_the_same_scores(real_data, cache, tmp_path):
    """It pads without a mask; where nothing depends on later tokens, that harms nothing."""
    checkpoint = save_models(tmp_path, block_size=256)["causal"]
    folder = local_tasks(real_data, cache_dir=cache)
    tasks, limit = {"lambada_openai", "piqa", "hellaswag"}, 8
    theirs = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float64", batch_size=8)
    assert theirs.max_length == 256
    expected = harness_samples(ThoughtbubblesLM(checkpoint, dtype="float64"), folder, tasks, limit)
    found = harness_samples(theirs, folder, tasks, limit)
    for task in tasks:
        for ours, other in zip(expected[task], found[task], strict=True):
            for (one,), (two,) in zip(ours["resps"], other["resps"], strict=True):
                assert one[0] == pytest.approx(two[0], abs=1e-8)
                assert one[1] == two[1]
            assert ours["acc"] == other["acc"]
