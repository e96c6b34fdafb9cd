"""Every recipe builds, is what the paper says, and takes a step at reduced size."""

import json
from dataclasses import replace

import pytest
import torch

from thoughtbubbles.data.synthetic import write_synthetic
from thoughtbubbles.data.tasks import TASKS
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.cost import cost
from thoughtbubbles.recipes import RECIPES, recipe
from thoughtbubbles.recipes.command import train_command
from thoughtbubbles.recipes.table import expected_flops, reduced
from thoughtbubbles.train.config import DataConfig
from thoughtbubbles.train.loop import train

# The paper's topology table: size, approach, layers, heads, width, batch × accumulation, expanded size.
FORMS = (
    *(("plain", 512), ("copy-3", 1536), ("copy-5", 2560)),
    *((f"{rule}{more}", streams) for rule in ("causal", "paper") for more, streams in (("", 1024), ("-r4", 2048))),
)
SHAPES = (("150m", 16, 12, 768, 8 * 8), ("319m", 24, 16, 1024, 4 * 16), ("772m", 36, 20, 1280, 2 * 32))
TOPOLOGY = [(f"{size}-{form}", *shape, streams) for size, *shape in SHAPES for form, streams in FORMS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "corpus"
    write_synthetic(folder, n_tokens=20_000, seed=0)
    return folder


# One of each kind; the others differ from them in numbers that are reduced here anyway.
KINDS = ("tiny", "small-gpt2", "150m-copy-3", "150m-causal-r4", "1.9b-causal-midtrain", "150m-all-gates-off")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name not in KINDS]


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_every_recipe_takes_a_step(name, corpus, tmp_path):
    config = reduced(recipe(name), tmp_path / "run")
    result = train(replace(config, data=DataConfig(mixture=(str(corpus),))))
    assert result.finished
    assert torch.isfinite(torch.tensor(result.validation_loss["corpus"]))


def test_a_recipe_of_the_paper_begins_with_the_name_of_its_model():
    named = [name for name, recipe in RECIPES.items() if any(word in recipe.group for word in ("suite", "scale-up"))]
    assert len(named) == 3 * 7 + 2 * 2
    for name in named:
        assert recipe(name).model == ModelConfig.named(name.removesuffix("-midtrain")), name


@pytest.mark.parametrize(("name", "layers", "heads", "width", "rows", "streams"), TOPOLOGY)
def test_the_topology_table(name, layers, heads, width, rows, streams):
    config = recipe(name)
    model = config.model
    assert (model.n_layer, model.n_head, model.width, config.rows) == (layers, heads, width, rows)
    assert cost(model).streams[-1] == streams
    assert model.selection == ("block" if "paper" in name else "causal")
    assert config.data.mixture == ("data/openwebtext",)
    assert (config.tokens, config.optim.lr, config.optim.warmup) == (2_500_000_000, 2.5e-4, 0.01)
    assert (config.optim.schedule, config.optim.floor) == ("cosine", 0.1)


def test_the_corpus_and_the_rule_are_options(corpus, capsys, tmp_path):
    """As `train --list` says: they change that and nothing else."""
    options = ["--data.mixture", str(corpus), "--model.selection", "block", "--out", str(tmp_path / "run")]
    train_command(["150m-causal-r4", "--dry-run", *options])
    shown = capsys.readouterr().out
    found = json.JSONDecoder().raw_decode(shown, shown.index("{\n"))[0]
    expected = recipe("150m-causal-r4").as_dict()
    expected["model"]["selection"] = "block"
    expected["data"]["mixture"] = [str(corpus)]
    expected["out"] = str(tmp_path / "run")
    assert found == json.loads(json.dumps(expected))


def test_small_gpt2_is_tiny_with_a_longer_context():
    small, tiny = (recipe(name).model for name in ("small-gpt2", "tiny"))
    assert small.fork_reach == small.block_size // 8
    assert small == replace(tiny, vocab_size=50304, block_size=256, fork_reach=32)


def test_about_40_names_and_three_for_each_task():
    assert 35 <= len(RECIPES) - 3 * len(TASKS) <= 45
    assert len({recipe.group for recipe in RECIPES.values()}) == 7
    for name in TASKS:
        fed, chosen, plain = (recipe(f"task:{name}{form}") for form in ("", "-causal", "-plain"))
        assert fed.model.feedback
        assert not fed.model.scores
        assert chosen.model.chooses_forks
        assert chosen.model.selection == "causal"
        for run in (fed, chosen):
            assert plain == replace(run, name=plain.name, model=run.model.without_forks())
        assert fed.model.block_size == TASKS[name].block_size


@pytest.mark.parametrize("form", ["plain", "causal"])
def test_the_scale_up(form):
    first, second = recipe(f"1.9b-{form}"), recipe(f"1.9b-{form}-midtrain")
    assert (first.model.n_layer, first.model.n_head, first.model.width, first.rows) == (36, 16, 2048, 480)
    assert first.model == second.model
    assert (first.tokens, second.tokens) == (40_000_000_000, 2_000_000_000)
    assert first.milestone_steps == {round(first.steps / 2)}
    assert (first.optim.schedule, first.optim.warmup) == ("constant", 0.1)
    assert (second.optim.schedule, second.optim.floor) == ("cosine", 0.1)
    shares = {entry.split("=")[0]: float(entry.split("=")[1]) for entry in second.data.mixture}
    assert shares == {
        "data/mmlu": 0.05,
        "data/smoltalk": 0.30,
        "data/fineweb": 0.25 * 0.7,
        "data/pes2o": 0.25 * 0.3,
        "data/gsm8k-aug": 0.40,
    }
    assert sum(shares.values()) == pytest.approx(1)


def test_ablations_change_one_thing():
    for name, change in {
        "150m-original-merge": {"merge": "original"},
        "150m-attention-gates-off": {"gate_qk": False, "gate_v": False},
        "150m-all-gates-off": {"gate_qk": False, "gate_v": False, "gate_residual": False},
        "772m-extended-forking": {"fork_layers": tuple(range(3, 36, 4))},
    }.items():
        size = name.split("-")[0]
        assert recipe(name).model == replace(recipe(f"{size}-causal").model, **change)
    assert recipe("772m-extended-forking").steps == 25_000


def test_the_small_recipe_has_room_for_the_tokens_of_gpt2():
    config = recipe("small-gpt2")
    assert config.model.vocab_size >= tokenizer("gpt2").size
    assert cost(config.model).parameters < 10_000_000
    assert config.eval.prompts == ()


def test_flops_as_counted_everywhere():
    config = recipe("150m-plain")
    assert expected_flops(config) == pytest.approx(31.1e12 * 76_294, rel=2e-3)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_dry_run_has_rows_for_every_rank(ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    small = reduced(recipe("tiny-causal"), tmp_path)
    assert small.rows % (ranks * small.compute.micro_batch_size) == 0
    assert small.steps == 1


def test_a_dry_run_of_a_run_whose_forks_begin_late_tries_a_step_with_forks(tmp_path):
    late = replace(recipe("tiny"), forks_from=0.75, budgets=(1.0, 2.0))
    assert late.budget_of(0) == 1
    assert reduced(late, tmp_path).budget_of(0) is None


def test_an_unknown_recipe():
    with pytest.raises(ValueError, match=r"did you mean .*150m-causal"):
        recipe("150m-casual")
