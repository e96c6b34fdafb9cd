"""Checkpoints on disk: a consistent copy, complete or rejected, and every error names its folder."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import lively_model, small_config
from thoughtbubbles.data.tokenizer import Bytes
from thoughtbubbles.distributed import World
from thoughtbubbles.files import write_manifest
from thoughtbubbles.train.config import OptimConfig
from thoughtbubbles.train.optim import Optimizer
from thoughtbubbles.train.state import Checkpoints, checkpoint_damage, newest_good, read_state, restore

CPU = World(torch.device("cpu"))
FACTS = {
    "step": 3,
    "updates": 3,
    "skipped_in_a_row": 0,
    "warmup_steps": 1,
    "ranks": 1,
    "precision": "float32",
    "data": [{"name": "corpus", "share": 1.0, "index": 7}],
    "config": {},
}


class Patient(Bytes):
    """A tokenizer whose writing waits until the weights have changed."""

    def __init__(self, changed: threading.Event):
        super().__init__()
        self._changed = changed

    @property
    def end_of_text(self) -> int:
        assert self._changed.wait(timeout=30)
        return 256

    @end_of_text.setter
    def end_of_text(self, _: int) -> None:
        pass


def something_to_save() -> tuple[torch.nn.Module, Optimizer]:
    model = lively_model(small_config(vocab_size=257), dtype=torch.float32)
    optimizer = Optimizer(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-2, clip=1.0)
    return model, optimizer


def save(run: Path, model, optimizer, **facts) -> Path:
    checkpoints = Checkpoints(run, CPU, keep=9, milestones=set(), tokenizer=Bytes())
    checkpoints.save(model, optimizer, FACTS | facts)
    checkpoints.finish()
    return run / f"step-{(FACTS | facts)['step']:08d}"


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("state") / "run"
    return save(run, *something_to_save())


@pytest.fixture
def saved(once, tmp_path) -> Path:
    """A checkpoint of step 3."""
    return shutil.copytree(once, tmp_path / "run" / once.name)


@pytest.mark.parametrize("troubles", [[None, "its disk is full"], ["its disk is full", "and this one's"], [None, None]])
def test_what_fails_on_any_rank_fails_on_all(troubles, monkeypatch):
    def gather(found: list, _: object, group: object = None) -> None:
        found[:] = troubles

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert World(torch.device("cpu"), 0, 2, is_distributed=True).first_error(troubles[0]) == next(
        filter(None, troubles), None
    )


def test_what_changes_after_save_is_not_in_the_checkpoint(tmp_path):
    """The next steps continue while it is written: weights and moments are those at the time of saving."""
    model, optimizer = something_to_save()
    changed = threading.Event()
    checkpoints = Checkpoints(tmp_path, CPU, keep=1, milestones=set(), tokenizer=Patient(changed))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    checkpoints.save(model, optimizer, FACTS)
    with torch.no_grad():
        for tensor in (*model.state_dict().values(), *optimizer.tensors().values()):
            tensor.add_(1)
    changed.set()
    checkpoints.finish()
    folder = tmp_path / "step-00000003"
    files = {folder / "model" / "model.safetensors": weights, optimizer_file(folder): moments}
    for path, expected in files.items():
        found = load_file(path)
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


def change_manifest(folder: Path, *, without: str = "", **more: object) -> None:
    path = folder / "manifest.json"
    manifest = {name: facts for name, facts in json.loads(path.read_text()).items() if name != without}
    path.write_text(json.dumps(manifest | more))


def optimizer_file(folder: Path) -> Path:
    (path,) = (folder / "optimizer").glob("*.safetensors")
    return path


def empty(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


def without_the_optimizer(folder: Path) -> None:
    name = f"optimizer/{optimizer_file(folder).name}"
    optimizer_file(folder).unlink()
    change_manifest(folder, without=name)


def one_more_file_of_tensors(folder: Path) -> None:
    """Torch's reader would load it: the last file with a tensor wins."""
    shutil.copy(optimizer_file(folder), folder / "optimizer" / "shard-99999-model-00001-of-00001.safetensors")


def one_more_file_of_weights(folder: Path) -> None:
    shutil.copy(folder / "model" / "model.safetensors", folder / "model" / "zzz.safetensors")


def outside(folder: Path) -> None:
    change_manifest(folder, **{"../elsewhere": {"bytes": 1, "crc32": 1}})


def nested(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (empty, "manifest.json does not list"),
        (lambda folder: change_manifest(folder, without="state.json"), "does not list state.json"),
        (lambda folder: change_manifest(folder, without="model/config.json"), "does not list model/config.json"),
        (
            lambda folder: change_manifest(folder, without="model/model.safetensors"),
            "does not list model/model.safetensors",
        ),
        (
            lambda folder: change_manifest(folder, without=f"optimizer/{optimizer_file(folder).name}"),
            "does not list optimizer/",
        ),
        (without_the_optimizer, "lists 0 optimizer files, expected 1"),
        (one_more_file_of_tensors, "does not list optimizer/shard-99999"),
        (one_more_file_of_weights, "does not list model/zzz.safetensors"),
        (outside, "'../elsewhere', which is not inside the folder"),
        (nested, "nested too deeply"),
        (lambda folder: optimizer_file(folder).write_bytes(b""), "has 0 bytes instead of"),
    ],
)
def test_a_damaged_checkpoint_is_skipped(saved, harm, message):
    assert checkpoint_damage(saved) is None
    harm(saved)
    said: list[str] = []
    assert newest_good(saved.parent, said.append) is None
    assert said[0].startswith(f"{saved} is damaged and is skipped: ")
    assert message in said[0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step": True}, "step"),
        ({"step": 4}, "step"),  # not the step of its folder
        ({"step": 3.0}, "step"),
        ({"updates": -1}, "updates"),
        ({"updates": 10**30}, "updates"),
        ({"skipped_in_a_row": None}, "skipped_in_a_row"),
        ({"warmup_steps": "1"}, "warmup_steps"),
        ({"ranks": 1.5}, "ranks"),
        ({"precision": 32}, "precision"),
        ({"config": []}, "config"),
        ({"data": {}}, "data"),
        ({"data": [7]}, "data"),
        ({"data": [{"name": "corpus", "share": "all", "index": 7}]}, "data"),
        ({"data": [{"name": "corpus", "share": 1.0}]}, "data"),
    ],
)
def test_a_state_of_wrong_kinds_names_its_file(saved, changes, field):
    assert read_state(saved).step == 3
    path = saved / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"state\.json is damaged \({field} is missing or wrong\)"):
        read_state(saved)
    write_manifest(saved)
    said: list[str] = []
    assert newest_good(saved.parent, said.append) is None  # even if the checksums agree
    assert str(path) in said[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "a JSON list instead of an object"),
        ("{", "not JSON"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("{" + '"step":' + "9" * 5000 + "}", "too many digits"),
        (b'{"step": "\xff"}', "not UTF-8"),
    ],
)
def test_a_state_that_is_not_json_names_its_file(saved, content, message):
    path = saved / "state.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message) as refused:
        read_state(saved)
    assert str(path) in str(refused.value)


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def drop_a_moment(folder: Path) -> None:
    rewrite(optimizer_file(folder), lambda tensors: tensors.pop("exp_avg.embedding.weight"))


def cut_a_moment(folder: Path) -> None:
    rewrite(optimizer_file(folder), lambda tensors: tensors.update({"exp_avg.embedding.weight": torch.zeros(3, 3)}))


def drop_a_weight(folder: Path) -> None:
    rewrite(folder / "model" / "model.safetensors", lambda tensors: tensors.pop("final_norm.bias"))


def no_safetensors(folder: Path) -> None:
    optimizer_file(folder).write_bytes(b"\xff" * 64)


def no_file(folder: Path) -> None:
    optimizer_file(folder).unlink()


@pytest.mark.parametrize("harm", [drop_a_moment, cut_a_moment, drop_a_weight, no_safetensors, no_file])
def test_what_cannot_be_restored_names_its_checkpoint(saved, harm):
    """Whatever torch's reader raises, including CheckpointException, which is not an Exception."""
    model, optimizer = something_to_save()
    restore(saved, model, optimizer, CPU)
    harm(saved)
    with pytest.raises(ValueError, match="cannot be restored") as refused:
        restore(saved, model, optimizer, CPU)
    assert str(refused.value).startswith(f"{saved} ")
    assert "\n" not in str(refused.value)
