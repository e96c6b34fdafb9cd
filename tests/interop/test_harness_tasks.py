"""The harness's tasks on local files: they ask what upstream asks, are written once, and reject mistakes."""

import json
import os
import shutil
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from helpers import lively_model
from interop.harness_benchmarks import RECORDS, save_models, write_benchmarks, write_records
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.files import write_manifest
from thoughtbubbles.interop.harness import run_harness
from thoughtbubbles.interop.harness_tasks import local_tasks
from thoughtbubbles.interop.lm_eval import ThoughtbubblesLM
from thoughtbubbles.model.config import ModelConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def requests_of(folder: Path, *names: str, few_shot: int = 0) -> dict[str, list[tuple]]:
    """What the harness would ask, task by task."""
    tasks = TaskManager(include_path=str(folder), include_defaults=False).load(list(names))["tasks"]
    for task in tasks.values():
        task.set_config("num_fewshot", few_shot)
        task.set_fewshot_seed(0)
        task.build_all_requests()
    return {name: [instance.args for instance in task.instances] for name, task in tasks.items()}


def test_local_tasks_ask_what_upstream_asks(data, cache):
    folder = local_tasks(data, cache_dir=cache)
    single = ("lambada_openai", "hellaswag", "arc_easy", "arc_challenge", "piqa")
    parts = ("blimp_adjunct_island", "blimp_wh_island", "mmlu_high_school_biology_continuation")
    found = requests_of(folder, *single, *parts)
    biology = "The following are questions (with answers) about high school biology.\n\nQuestion: What eats?\nAnswer:"
    bread, rowing = (
        "Baking bread: A woman kneads dough. Then She waits",
        "Rowing: Two men push a boat into the lake.",
    )
    assert found == {
        "lambada_openai": [
            ("The cat sat on the mat, and the dog lay beside the", " cat"),
            ('Anna gave Ben an apple.\n\n"Thank you," said', " Ben"),
        ],
        "hellaswag": [
            *((bread, ending) for ending in (" for it to rise.", " in. the sea.", "  on the moon.", " never.")),
            *((rowing, f" they {verb}.") for verb in ("row", "sing", "sleep", "fly")),
        ],
        "blimp_adjunct_island": [("", " Who left?"), ("", " Left who?")],
        "blimp_wh_island": [("", f" {s}.") for s in ("The boys run", "The boys runs", "The boy runs", "The boy run")],
        "arc_easy": [("Question: What melts?\nAnswer:", f" {choice}") for choice in ("ice", "stone", "air")],
        "arc_challenge": [("Question: What falls? \nAnswer:", " up"), ("Question: What falls? \nAnswer:", " down")],
        "piqa": [("Question: Dry a cup\nAnswer:", " use a towel"), ("Question: Dry a cup\nAnswer:", " use a stone")],
        "mmlu_high_school_biology_continuation": [(biology, f" {choice}") for choice in "abcd"],
    }


def test_local_tasks_know_the_right_answers(data, cache):
    names = (
        "hellaswag",
        "arc_easy",
        "arc_challenge",
        "piqa",
        "blimp_wh_island",
        "mmlu_high_school_biology_continuation",
    )
    manager = TaskManager(include_path=str(local_tasks(data, cache_dir=cache)), include_defaults=False)
    tasks = manager.load(list(names))["tasks"]
    found = {name: [task.doc_to_target(doc) for doc in task.eval_docs] for name, task in tasks.items()}
    assert list(found.values()) == [[0, 2], [0], [1], [0], [0, 0], [3]]


def test_groups_have_all_their_parts(tmp_path):
    """Every set of BLiMP and every subject of MMLU, as upstream lists them."""
    upstream = Path(lm_eval.tasks.__file__).parent
    sets = sorted(path.stem for path in (upstream / "blimp").glob("[!_]*.yaml"))
    subjects = sorted(path.stem.removeprefix("mmlu_") for path in (upstream / "mmlu/continuation").glob("mmlu_*.yaml"))
    assert (len(sets), len(subjects)) == (67, 57)
    write_records(tmp_path, "blimp", [{**RECORDS["blimp"][0], "UID": name} for name in sets])
    write_records(tmp_path, "mmlu.test", [{**RECORDS["mmlu.test"][0], "subject": name} for name in subjects])
    folder = local_tasks(tmp_path, ["blimp", "mmlu_continuation"], cache_dir=tmp_path / "cache")
    loaded = TaskManager(include_path=str(folder), include_defaults=False).load(["blimp", "mmlu_continuation"])
    assert len(loaded["tasks"]) == 67 + 57
    assert {name for name in loaded["groups"] if "::" not in name} == {"blimp", "mmlu_continuation"}

    write_records(tmp_path, "blimp", [{**RECORDS["blimp"][0], "UID": name} for name in sets[1:]])
    with pytest.raises(ValueError, match=rf"--tasks blimp: blimp.jsonl has no records for blimp_{sets[0]}"):
        local_tasks(tmp_path, ["blimp"], cache_dir=tmp_path / "cache")
    local_tasks(tmp_path, [f"blimp_{sets[1]}"], cache_dir=tmp_path / "cache")


def test_generation_tasks_ask_what_upstream_asks(data, cache):
    folder = local_tasks(data, cache_dir=cache)
    question = "Ann has 2 figs and 3 plums. How many?"
    (thought,) = requests_of(folder, "gsm8k_cot_zeroshot")["gsm8k_cot_zeroshot"]
    assert thought[0] == f"Q: {question}\nA: Let's think step by step."
    assert thought[1]["until"] == ["Q:", "</s>", "<|im_end|>"]
    (shown,) = requests_of(folder, "gsm8k", few_shot=5)["gsm8k"]
    assert shown[0].endswith(f"\n\nQuestion: {question}\nAnswer:")
    assert shown[0].count("Question: What is ") == 5


def test_few_shot_prompts_come_from_the_other_splits(data, cache):
    name = "mmlu_high_school_biology_continuation"
    (context, _), *_ = requests_of(local_tasks(data, cache_dir=cache), name, few_shot=1)[name]
    assert "Question: Who?\nAnswer: e\n\nQuestion: What eats?\nAnswer:" in context


def test_definitions_are_written_once_and_again_when_the_data_changes(tmp_path):
    path, cache = tmp_path / "piqa.validation.jsonl", tmp_path / "cache"
    record = RECORDS["piqa.validation"][0]
    path.write_text(json.dumps(record) + "\n")
    first = local_tasks(tmp_path, ["piqa"], cache_dir=cache)
    before = (first / "piqa.yaml").stat().st_mtime_ns
    assert local_tasks(tmp_path, ["piqa"], cache_dir=cache) == first
    assert (first / "piqa.yaml").stat().st_mtime_ns == before

    written = path.stat()
    path.write_text(json.dumps({**record, "goal": record["goal"].upper()}) + "\n")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns + 1_000_000_000))
    assert path.stat().st_size == written.st_size
    second = local_tasks(tmp_path, ["piqa"], cache_dir=cache)
    assert second != first
    assert requests_of(second, "piqa")["piqa"][0] == ("Question: DRY A CUP\nAnswer:", " use a towel")
    assert sorted(cache.iterdir()) == sorted([first, second])


def test_only_what_is_asked_for_is_read(data, tmp_path):
    mine = shutil.copytree(data / "eval", tmp_path / "data")
    (mine / "blimp.jsonl.gz").write_bytes(b"damaged")
    folder = local_tasks(mine, ["arc_easy", "arc_challenge"], cache_dir=tmp_path / "cache")
    assert {path.stem for path in folder.glob("*.yaml")} == {"arc_easy", "arc_challenge"}
    with pytest.raises(ValueError, match=r"blimp.jsonl.gz, after line 0: cannot be decompressed"):
        local_tasks(mine, ["blimp"], cache_dir=tmp_path / "cache")


def test_the_cache_is_where_the_system_has_it(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert local_tasks(data).parent == tmp_path / "thoughtbubbles" / "harness"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{no json", "line 2: Expecting property name"),
        ('["a", "list"]', "line 2: a list, not an object"),
        ('{"goal": "x", "sol1": "y", "label": 0}', "line 2: the field 'sol2' is missing"),
        ('{"goal": 5, "sol1": "y", "sol2": "z", "label": 0}', "line 2: goal is 5: it must be text"),
        ('{"goal": "x", "sol1": "y", "sol2": "z", "label": 9}', "line 2: label is 9: it must be a number from 0 to 1"),
        ('{"goal": "x", "sol1": "y", "sol2": ["z"], "label": 0}', "line 2: sol2 is "),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_left(tmp_path, line, complaint):
    (tmp_path / "piqa.validation.jsonl").write_text(json.dumps(RECORDS["piqa.validation"][0]) + f"\n{line}\n")
    with pytest.raises(ValueError, match=complaint):
        local_tasks(tmp_path, ["piqa"], cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("no_shape_checks")
def test_bad_input(data, tmp_path):
    checkpoints = save_models(tmp_path / "models", block_size=48)

    def refused(**changes) -> str:
        wanted = {"tasks": ("piqa",), "data_dir": data, "cache_dir": tmp_path / "cache", "out": tmp_path / "out"}
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is what is looked at)
            run_harness(checkpoints["plain"], **(wanted | changes))
        return str(error.value)

    assert "did you mean hellaswag?" in refused(tasks=("helaswag",))
    assert "did you mean blimp_wh_island" in refused(tasks=("piqa", "blimp_wh_ilsand"))
    assert "choose from lambada_openai, hellaswag, blimp, arc_easy" in refused(tasks=("xyz",))
    assert "--tasks is empty" in refused(tasks=())
    assert "does not exist" in refused(data_dir=tmp_path / "nowhere")
    missing = refused(data_dir=tmp_path, tasks=("hellaswag",))
    assert f"{tmp_path} has no hellaswag.validation.jsonl" in missing
    assert "datasets/Rowan/hellaswag" in missing
    assert "activity_label, ctx_a, ctx_b, endings, label" in missing
    for limit in (0, -1, True, "5", 1.5, 10**30):
        assert f"--limit {limit}: give a whole number of 1 or more" in refused(limit=limit)
    assert "choose float32" in refused(dtype="float8")
    assert "dtype = ['float32']" in refused(dtype=["float32"])
    assert "is below 1" in refused(budget=0.5)
    for budget in ("abc", True, [2], "1e99999999", float("nan")):
        assert "budget" in refused(budget=budget)
    for tokens in (0, True, "64", 1.5, 10**30):
        assert f"batch_tokens = {tokens!r}" in refused(batch_tokens=tokens)
    assert "method = 'guessed': choose one of cached, uncached" in refused(method="guessed")
    assert "compile = 'yes'" in refused(compile="yes")
    for device in ("nonsense", "cpu:x", 5.5, None):
        assert "device = " in refused(device=device)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (tmp_path / "file", tmp_path / "loop", tmp_path / ("x" * 5000)):
        for option in ("out", "cache_dir"):
            told = refused(**{option: place})
            assert f"--{option.replace('_', '-')} " in told
            assert "give a folder that can be written" in told
    flipped = tmp_path / "models" / "plain" / "model.safetensors"
    write_manifest(flipped.parent)
    weights = bytearray(flipped.read_bytes())
    weights[len(weights) // 2] ^= 1
    flipped.write_bytes(weights)
    assert "model.safetensors has been altered" in refused()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "--model_args has no checkpoint"),
        ({"checkpoint": 5}, "checkpoint = 5: give the model's folder"),
        ({"checkpoint": "nowhere"}, "nowhere does not exist"),
        ({"checkpoint": "x" * 5000}, "File name too long"),
        ({"checkpoint": "nowhere", "bugdet": 2}, "--model_args has bugdet: what can be set is checkpoint, budget"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_bad_model_args(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        ThoughtbubblesLM.create_from_arg_obj(arguments, {"device": "cpu", "batch_size": 1})


def test_a_part_that_upstream_does_not_name_is_left_out(tmp_path):
    """A part's name becomes a file's: one from the data alone could lead anywhere."""
    records = [*RECORDS["blimp"], {**RECORDS["blimp"][0], "UID": "../../escaped"}, {**RECORDS["blimp"][0], "UID": "x"}]
    (tmp_path / "data").mkdir()
    write_records(tmp_path / "data", "blimp", records)
    folder = local_tasks(tmp_path / "data", cache_dir=tmp_path / "cache")
    assert {path.name for path in folder.glob("blimp*.jsonl")} == {
        "blimp.adjunct_island.jsonl",
        "blimp.wh_island.jsonl",
    }
    assert not list(tmp_path.rglob("*escaped*"))


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    config = ModelConfig(n_layer=1, n_head=1, width=8, vocab_size=257, block_size=16)
    save_model(tmp_path / "model", lively_model(config))
    with pytest.raises(ValueError, match="has no tokenizer"):
        ThoughtbubblesLM(tmp_path / "model")
