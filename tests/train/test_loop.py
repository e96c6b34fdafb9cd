"""The training loop: golden losses, its order, the global mean, skipped steps, and the files of a run."""

import json
import math
import os
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thoughtbubbles
from helpers import GOLDEN, SAME_FUNCTION, named, no_waiting_for_the_gpu
from thoughtbubbles.checkpoint import load_tokenizer, save_model
from thoughtbubbles.data.loader import Batch
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.tokenizer import Bytes, tokenizer
from thoughtbubbles.distributed import World
from thoughtbubbles.model.cost import cost
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.recipes import recipe
from thoughtbubbles.train.data import RunData
from thoughtbubbles.train.dry_run import check_run
from thoughtbubbles.train.initialize import build_model, check_tokenizer, own_folder
from thoughtbubbles.train.loop import Trainer, train
from thoughtbubbles.train.state import checkpoint_damage
from train.runs import assert_same_bits, losses, metrics, small_corpus, small_run, tiny, uneven_examples
from train.write_golden import FORMS, golden, golden_run

GOLDEN_FILE = Path(__file__).parents[1] / "golden" / "tiny.json"
CPU = World(torch.device("cpu"))


@pytest.mark.parametrize(
    "form", [form if form == "tiny" else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_the_first_golden_losses(form, tmp_path):
    """Before and after the first update of the weights."""
    trainer, found = Trainer(golden_run(form, tmp_path), CPU), []
    for trainer.done in range(2):
        found.append(trainer.read(trainer.launch())["loss"])
    assert found == pytest.approx(json.loads(GOLDEN_FILE.read_text())[form]["losses"][:2], abs=GOLDEN)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_golden_losses(form, tmp_path):
    """In float64, so that they hold on every machine: refactoring must not change numbers."""
    found, expected = golden(form, tmp_path), json.loads(GOLDEN_FILE.read_text())[form]
    assert found["losses"] == pytest.approx(expected["losses"], abs=GOLDEN)
    assert found["validation_loss"] == pytest.approx(expected["validation_loss"], abs=GOLDEN)


def test_order_and_what_is_left_behind(tmp_path):
    out = tmp_path / "run"
    result = train(small_run(out, steps=8, save_milestones=(0.25,), save_every=4))
    kinds = [
        (line["step"], next(k for k in ("loss", "saving", "validation_loss", "sample") if k in line))
        for line in metrics(out)
    ]
    at_four = [kind for step, kind in kinds if step == 4]
    assert at_four == ["loss", "saving", "validation_loss", "sample"]
    assert [step for step, kind in kinds if kind == "loss"] == list(range(1, 9))
    assert {folder.name for folder in out.glob("step-*")} == {"step-00000002", "step-00000004", "step-00000008"}
    assert not list(out.glob(".*"))
    assert losses(out)[-1] < losses(out)[0]

    described = json.loads((out / "run.json").read_text())
    assert described["config"]["optim"]["lr"] == 2e-3
    assert described["versions"]["torch"] == torch.__version__

    forks = [line["forks"] for line in metrics(out) if "forks" in line]
    assert [fork["layer"] for fork in forks[0]] == [1, 3]
    for fork in forks[-1]:
        assert 1 <= fork["streams"] <= 2
        assert 0 <= fork["dropped"] < 1
        assert 0 <= fork["alive"] <= 1
        assert 0 <= fork["scores"][0] <= fork["scores"][1] <= fork["scores"][2] <= 1
    assert forks[-1][0]["dropped"] == 0  # at r = 2 the first fork layer keeps every candidate

    model = thoughtbubbles.load(out)
    assert model.config == small_run(out).model
    assert load_tokenizer(out).name == "bytes"
    assert result.validation_loss.keys() == {"corpus"}


def test_milestones_outlive_the_last_k(tmp_path):
    train(small_run(tmp_path / "run", steps=8, save_every=1, save_keep=2, save_milestones=(0.5,)))
    kept = sorted(folder.name for folder in (tmp_path / "run").glob("step-*"))
    assert kept == ["step-00000004", "step-00000007", "step-00000008"]


def test_gradient_accumulation_is_one_batch(tmp_path):
    """Gradients of micro-batches add up to those of the whole batch: one mean, whatever the parts."""
    for micro in (8, 2, 1):
        train(small_run(tmp_path / str(micro), steps=3, compute_precision="float64", compute_micro_batch_size=micro))
    for micro in (2, 1):
        torch.testing.assert_close(
            torch.tensor(losses(tmp_path / str(micro))),
            torch.tensor(losses(tmp_path / "8")),
            atol=SAME_FUNCTION,
            rtol=0,
        )


@pytest.mark.parametrize("form", [{}, {"model_fork_layers": (1,), "model_fork_reach": 0, "model_feedback": True}])
def test_activation_checkpointing_changes_nothing(tmp_path, form):
    train(small_run(tmp_path / "kept", steps=3, **form))
    train(small_run(tmp_path / "checkpointed", steps=3, compute_activation_checkpointing=True, **form))
    assert losses(tmp_path / "kept") == losses(tmp_path / "checkpointed")
    assert_same_bits(tmp_path / "kept" / "step-00000003", tmp_path / "checkpointed" / "step-00000003")


@pytest.mark.slow
def test_bf16_learns(tmp_path):
    result = train(small_run(tmp_path / "run", steps=4, compute_precision="bf16"))
    exact = train(small_run(tmp_path / "exact", steps=4))
    assert result.validation_loss["corpus"] == pytest.approx(exact.validation_loss["corpus"], rel=1e-2)
    weights = thoughtbubbles.load(tmp_path / "run").state_dict().values()
    assert all(weight.dtype == torch.float32 for weight in weights)


def test_a_step_that_is_not_finite_is_skipped(tmp_path):
    """The gradient of one tensor is NaN at step 2, as after an overflow: weights stay, the run continues."""
    trainer = Trainer(small_run(tmp_path / "run", steps=5), CPU)
    weight = trainer.model.blocks[0].mlp.up.weight
    weight.register_hook(lambda grad: grad * math.nan if trainer.done == 2 else grad)
    result = trainer.run()
    skipped = [line["step"] for line in metrics(tmp_path / "run") if line.get("skipped")]
    assert skipped == [3]
    assert result.finished
    assert trainer.optimizer.updates == 4
    assert all(weight.isfinite().all() for weight in thoughtbubbles.load(tmp_path / "run").state_dict().values())


def test_too_many_skipped_steps_stop_the_run(tmp_path):
    trainer = Trainer(small_run(tmp_path / "run", steps=9, optim_max_skipped=2, save_every=2), CPU)
    weight = trainer.model.blocks[0].mlp.up.weight
    hook = weight.register_hook(lambda grad: grad * math.nan if trainer.done >= 3 else grad)
    with pytest.raises(
        ValueError, match=r"3 steps in a row were not finite, so the run stops after step 6.*step-00000006"
    ):
        trainer.run()
    good = thoughtbubbles.load(tmp_path / "run" / "step-00000006").state_dict()
    assert all(weight.isfinite().all() for weight in good.values())
    hook.remove()
    assert train(small_run(tmp_path / "run", steps=9, optim_max_skipped=2), resume=True).finished
    assert [line["step"] for line in metrics(tmp_path / "run") if line.get("skipped")] == [4, 5, 6]


def test_one_seed_one_run(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(small_run(tmp_path / name, steps=2, seed=seed))
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_init_from_a_model_without_feedback(tmp_path):
    forms = {"model_fork_layers": (1,), "model_fork_reach": 0, "model_merge": "forks"}
    save_model(tmp_path / "state", Thoughtbubbles(small_run(tmp_path, **forms).model))
    said: list[str] = []
    build_model(small_run(tmp_path / "run", init_from=tmp_path / "state", **forms, model_feedback=True), said.append)
    new = ", ".join(f"forks.1.feedback{name}" for name in ("_norm.weight", "_norm.bias", ".weight", ".bias"))
    assert said == [f"weights from {tmp_path / 'state'}; it has no {new}, which are newly initialized"]


def test_init_from_a_plain_model_adds_fork_layers(tmp_path):
    plain = replace(small_run(tmp_path).model, fork_layers=(), merge="original")
    source = Thoughtbubbles(plain)
    save_model(tmp_path / "plain", source)
    config = small_run(tmp_path / "run", init_from=tmp_path / "plain")
    said: list[str] = []
    model = build_model(config, said.append)
    assert said == [f"weights from {tmp_path / 'plain'}; it has no fork layers 1, 3, which are newly initialized"]
    for name, weight in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    assert {name.split(".")[1] for name in model.state_dict() if name.startswith("forks.")} == {"1", "3"}
    assert train(config).finished

    for change, message in (({"width": 64}, "has shape"), ({"n_layer": 3}, "blocks.3"), ({"n_layer": 5}, "is missing")):
        wrong = replace(config, out=tmp_path / "wrong", model=replace(config.model, **{"fork_layers": (1,), **change}))
        with pytest.raises(ValueError, match=f"does not fit the model.*{message}"):
            build_model(wrong, said.append)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        build_model(replace(config, init_from=tmp_path / "nowhere"), said.append)


def test_init_from_a_model_of_other_tokens_is_rejected(tmp_path):
    """Its vocabulary may be large enough all the same."""
    config = small_run(tmp_path / "run", init_from=tmp_path / "start")
    save_model(tmp_path / "start", Thoughtbubbles(config.model), tokenizer=tokenizer("gpt2"))
    message = "start was trained with tokenizer 'gpt2', the data is made with 'bytes': prepare the data with .* gpt2"
    with pytest.raises(ValueError, match=message):
        check_run(config, resume=False, made_in=tmp_path / "made")
    with pytest.raises(ValueError, match=message):
        train(config)
    save_model(tmp_path / "start", Thoughtbubbles(config.model), tokenizer=Bytes())
    assert train(config).finished


def test_init_from_a_run_of_other_tokens_names_a_tokenizer_that_prepare_takes(tmp_path):
    """The one of the model in the package is trained, so it has no name, only a folder."""
    run = tmp_path / "earlier"
    model = save_model(run / "step-00000001" / "model", thoughtbubbles.load(), tokenizer=load_tokenizer())
    with pytest.raises(ValueError, match="prepare the data with --tokenizer") as error:
        check_tokenizer(run, "bytes")
    told = str(error.value).rsplit(" ", 1)[1]
    assert Path(told) == model
    (tmp_path / "a.txt").write_text("one two three")
    prepare((str(tmp_path / "a.txt"),), out=tmp_path / "data", tokenizer=told, processes=1)


def test_a_resumed_run_does_not_need_its_initial_weights(tmp_path):
    save_model(tmp_path / "start", build_model(small_run(tmp_path / "run", seed=5), print))
    config = small_run(tmp_path / "run", steps=4, init_from=tmp_path / "start")
    whole = train(config)
    shutil.rmtree(whole.checkpoint)
    shutil.rmtree(tmp_path / "start")
    before = losses(tmp_path / "run")
    assert train(config, resume=True).finished
    assert losses(tmp_path / "run") == before


def test_sources_of_one_name_keep_their_losses(tmp_path):
    for parent in ("a", "b"):
        small_corpus(tmp_path / parent / "run")
    mixture = (f"{tmp_path}/a/corpus=0.5", f"{tmp_path}/b/corpus=0.5")
    result = train(small_run(tmp_path / "run", steps=1, data_mixture=mixture))
    assert result.validation_loss.keys() == {f"{tmp_path}/a/corpus", f"{tmp_path}/b/corpus", "mixture"}


def test_one_process_per_folder(tmp_path):
    trainer = Trainer(small_run(tmp_path / "run", steps=1), CPU)
    with own_folder(tmp_path / "run", CPU), pytest.raises(ValueError, match="another process is training in"):
        train(small_run(tmp_path / "run", steps=1))
    assert trainer.run().finished


def test_a_dry_run_sees_that_another_process_trains_there(tmp_path):
    config = small_run(tmp_path / "run", steps=1)
    with own_folder(tmp_path / "run", CPU), pytest.raises(ValueError, match="another process is training in"):
        check_run(config, resume=False, made_in=tmp_path / "made")
    assert check_run(config, resume=False, made_in=tmp_path / "made")


def test_a_step_draws_from_its_own_seed(tmp_path):
    seeds = []
    for name in ("a", "b"):
        trainer = Trainer(small_run(tmp_path / name, steps=3), CPU)
        for trainer.done in range(2):
            trainer.launch()
            seeds.append(torch.initial_seed())
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_the_data_may_be_moved_while_a_run_works_on_it(tmp_path):
    config = small_run(tmp_path / "run", steps=4)
    trainer = Trainer(config, CPU)
    (tmp_path / "corpus").rename(tmp_path / "elsewhere")
    assert trainer.run().finished
    assert any("sample" in line for line in metrics(tmp_path / "run"))


class Slow(Bytes):
    """A tokenizer that is slow to write, so that a checkpoint is too."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    @property
    def size(self) -> int:
        time.sleep(0.3)
        self.meanwhile()
        return 257

    @size.setter
    def size(self, _: int) -> None:
        pass


class Failing(Trainer):
    def evaluate(self) -> None:
        raise ValueError("something is wrong")


def test_a_checkpoint_that_was_begun_is_written_whatever_happens_then(tmp_path):
    trainer = Failing(small_run(tmp_path / "run", save_every=4, eval_every=4), CPU)
    trainer.checkpoints.tokenizer = Slow()
    with pytest.raises(ValueError, match="something is wrong"):
        trainer.run()
    assert checkpoint_damage(tmp_path / "run" / "step-00000004") is None


def test_a_signal_while_the_last_checkpoint_is_written(tmp_path):
    """It must not end the process, as it would with the signal handlers from before the run."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        trainer = Trainer(small_run(tmp_path / "run", steps=2, eval_tokens=32, eval_sample_tokens=0), CPU)
        trainer.checkpoints.tokenizer = slow = Slow()

        def ask_to_stop() -> None:
            while trainer.checkpoints._pending is not None:  # until nothing is left to do but to wait for this thread
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        slow.meanwhile = ask_to_stop
        result = trainer.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.finished
    assert checkpoint_damage(result.checkpoint) is None
    assert not came


def test_padded_examples_weigh_by_their_targets(tmp_path):
    """Micro-batches with very different numbers of targets: their gradients are shares of one mean."""
    folder = uneven_examples(tmp_path / "examples")
    for micro in (8, 1):
        options = {"compute_precision": "float64", "compute_micro_batch_size": micro, "data_mixture": (str(folder),)}
        train(small_run(tmp_path / str(micro), steps=3, **options))
    ours, theirs = (metrics(tmp_path / str(micro)) for micro in (8, 1))
    assert len({line["targets"] for line in ours if "targets" in line}) > 1
    for a, b in zip(ours, theirs, strict=True):
        assert a.get("loss") == pytest.approx(b.get("loss"), abs=SAME_FUNCTION)


def test_columns_that_are_padding_in_every_row_are_left_out(tmp_path, monkeypatch):
    """Where every batch may have its own shape: not if compiled."""
    folder = uneven_examples(tmp_path / "examples")
    options = {"compute_precision": "float64", "compute_micro_batch_size": 2, "data_mixture": (str(folder),)}
    for is_compiled in (False, True):
        data = RunData(small_run(tmp_path / "a", steps=3, compute_compile=is_compiled, **options), CPU)
        batches = [*data.micro_batches(0), *data.validation_batches()]
        widths = [32 if is_compiled else int(batch.lengths.max()) for batch in batches]
        assert [batch.ids.shape[1] for batch in batches] == widths
        assert [batch.targets.shape[1] for batch in batches] == widths
    train(small_run(tmp_path / "trimmed", steps=3, **options))
    monkeypatch.setattr(Batch, "trimmed", lambda batch: batch)
    train(small_run(tmp_path / "padded", steps=3, **options))
    for a, b in zip(metrics(tmp_path / "trimmed"), metrics(tmp_path / "padded"), strict=True):
        assert a.get("loss") == pytest.approx(b.get("loss"), abs=SAME_FUNCTION)
        assert a.get("validation_loss") == pytest.approx(b.get("validation_loss"), abs=SAME_FUNCTION)


def test_speed_is_counted_as_everywhere(tmp_path):
    out = tmp_path / "run"
    train(small_run(out, steps=4, log_peak_tflops=1.0))
    line = next(json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines() if "mfu" in x)
    flops = cost(small_run(out).model).flops / 32
    assert line["tflops_per_device"] == pytest.approx(line["tokens_per_second"] * flops / 1e12)
    assert line["mfu"] == pytest.approx(line["tflops_per_device"])


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(small_run(tmp_path / "run", steps=4, log_tensorboard=True))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [round(event.value, 4) for event in events.Scalars("loss")] == [
        round(x, 4) for x in losses(tmp_path / "run")
    ]
    assert events.Scalars("validation_loss/corpus")
    forks = {tag for tag in events.Tags()["scalars"] if tag.startswith("forks")}
    parts = ("streams", "dropped", "alive", "scores/p10", "scores/p50", "scores/p90")
    assert forks == {f"forks/layer-{layer}/{part}" for layer in (1, 3) for part in parts}  # names, not indices
    logged = next(line["forks"] for line in metrics(tmp_path / "run") if "forks" in line)
    for fork in logged:
        found = events.Scalars(f"forks/layer-{fork['layer']}/scores/p90")[0]
        assert found.value == pytest.approx(fork["scores"][2])


def test_wandb_without_the_package_says_what_to_do(tmp_path):
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"pip install 'thoughtbubbles\[wandb\]'"):
            train(small_run(tmp_path / "run", log_wandb="project"))
    else:
        pytest.skip("wandb is installed")


def test_a_service_that_cannot_be_reached_is_not_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    def init(**_: object) -> None:
        raise ConnectionError("name resolution failed")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(ConnectionError, match=r"^name resolution failed$"):
        train(small_run(tmp_path / "run", log_wandb="project"))


def test_tiny_is_a_size_with_room_for_bytes():
    for name in ("tiny", "tiny-causal", "tiny-plain", "tiny-gate"):
        assert recipe(name).model == named(name, vocab_size=384)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks there in passing
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("no_shape_checks")  # torch.compile cannot read them
def test_launching_a_step_does_not_wait_for_the_device(form, tmp_path):
    """The host queues steps, logged or not, and the next batches, without reading anything from the device."""
    model = replace(tiny(form).model, n_layer=4, width=32, block_size=32)
    trainer = Trainer(small_run(tmp_path / "run", model=model, compute_micro_batch_size=4), World(torch.device("cuda")))
    trainer.read(trainer.launch())  # compiles
    for trainer.done in (1, 2):
        with no_waiting_for_the_gpu():
            launched = trainer.launch()
        assert trainer.read(launched)["loss"] > 0
