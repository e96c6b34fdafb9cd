"""Files of the authors' JAX code: every form of a tree is read, and mistakes are named."""

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import thoughtbubbles
from interop.authors_reference import random_tree
from interop.authors_trees import HEADS, PLAN, TOKENS, imported, rows_of_ids, settings, tree_of
from thoughtbubbles.checkpoint import load_tokenizer, save_model
from thoughtbubbles.cli import main
from thoughtbubbles.interop.authors import budget_for, import_model
from thoughtbubbles.model.budget import Budget

# ---- files ----------------------------------------------------------------------------------------------------------


def nested(tree, *, boxed=("wte", "kernel", "fork_embedding")):
    """As flax has it, with the boxes in which it keeps what may be split over devices."""
    found = {}
    for name, array in tree.items():
        *path, last = name.split("/")
        inside = found
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = {"value": array.numpy()} if last in boxed else array.numpy()
    return found


def test_every_form_of_a_tree_is_read(tmp_path):
    tree = tree_of()
    state = {"params": nested(tree), "opt_state": {"0": {"mu": nested(tree)}}, "step": np.zeros((), np.int32)}
    np.savez(tmp_path / "slashes.npz", **{name: array.numpy() for name, array in tree.items()})
    np.savez(tmp_path / "boxes.npz", **{f"params/{name}/value": array.numpy() for name, array in tree.items()})
    save_file({name.replace("/", "."): array for name, array in tree.items()}, tmp_path / "dots.safetensors")
    expected = imported(tree).state_dict()
    for source in (nested(tree), {"params": nested(tree)}, state, *tmp_path.iterdir()):
        found = imported(source).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_folder_with_its_settings(tmp_path):
    tree = tree_of()
    np.savez(tmp_path / "params.npz", **{name: array.float().numpy() for name, array in tree.items()})
    (tmp_path / "config.json").write_text(settings(max_block_size=13, averaging_method="rightmost"))
    model = import_model(tmp_path)
    assert model.embedding.weight.dtype == torch.float32
    config = model.config
    assert (config.n_head, config.block_size, config.budget, config.merge) == (HEADS, TOKENS, 1.625, "original")
    assert import_model(tmp_path / "params.npz").config == config
    assert import_model(tmp_path, heads=HEADS, budget=1.625, budget_mode="fixed").config.budget_mode == "fixed"


def test_a_budget_is_never_a_stream_too_large():
    for block_size in range(1, 60):
        for streams in range(block_size, 3 * block_size):
            budget = Budget.of(budget_for(streams, block_size=block_size))
            assert budget.largest_ceil(block_size) == streams


def test_the_command_writes_a_model_folder(tmp_path, capsys):
    tree, ids = tree_of(seed=3), rows_of_ids(2)
    np.savez(tmp_path / "params.npz", **{name: array.numpy() for name, array in tree.items()})
    out = tmp_path / "model"
    main(
        [
            "import",
            str(tmp_path / "params.npz"),
            "--out",
            str(out),
            "--heads",
            "3",
            "--block-size",
            "8",
            "--budget",
            "2",
        ]
    )
    assert f"written: {out}" in capsys.readouterr().out
    model = thoughtbubbles.load(out)
    assert torch.equal(model(ids, want=("logits",)).logits, imported(tree)(ids, want=("logits",)).logits)
    assert load_tokenizer(out) is None
    with pytest.raises(SystemExit, match="is not empty: give a new folder"):
        main(["import", str(tmp_path / "params.npz"), "--out", str(tmp_path)])


def test_gpt2s_tokenizer_comes_with_a_vocabulary_that_has_room(tmp_path):
    tree = random_tree(["fork"], width=4, vocab_size=50304)
    np.savez(tmp_path / "params.npz", **{name: array.float().numpy() for name, array in tree.items()})
    (tmp_path / "config.json").write_text(settings(n_embd=4, n_head=2, vocab_size=50304, plan=["fork"]))
    main(["import", str(tmp_path), "--out", str(tmp_path / "model")])
    assert load_tokenizer(tmp_path / "model").name == "gpt2"


def test_an_orbax_folder(tmp_path):
    """Their trainer's own form, where Orbax is installed."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")
    tree = tree_of()
    state = {"params": nested(tree), "opt_state": {"mu": nested(tree)}, "step": np.int32(3)}
    with ocp.StandardCheckpointer() as writer:
        writer.save((tmp_path / "checkpoint").resolve(), state)
    (tmp_path / "config.json").write_text(settings())
    expected, found = imported(tree).state_dict(), import_model(tmp_path).state_dict()
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in expected)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_a_missing_an_unknown_and_a_misshapen_array_are_named():
    tree = tree_of()
    kernel = tree.pop("blocks_5/mlp/c_fc/kernel")
    with pytest.raises(ValueError, match=r"the tree does not have the layout.*: blocks_5/mlp/c_fc/kernel is missing\."):
        imported(tree)
    tree["blocks_5/mlp/c_fc/kernel"] = kernel.T
    with pytest.raises(ValueError, match=r"blocks_5/mlp/c_fc/kernel has shape \(48, 12\), not \(12, 48\)"):
        imported(tree)
    tree["blocks_5/mlp/c_fc/kernel"] = kernel
    tree["blocks_5/mlp/c_gate/kernel"] = kernel
    with pytest.raises(ValueError, match=r"blocks_5/mlp/c_gate/kernel is not part of this model"):
        imported(tree)


def test_a_missing_fork_part_is_named_too():
    tree = tree_of()
    del tree["blocks_8/fork_embedding"]
    with pytest.raises(ValueError, match=r"blocks_8/fork_embedding is missing"):
        imported(tree)


def test_many_mistakes_are_counted():
    tree = {name: array for name, array in tree_of().items() if "ln_1" not in name}
    with pytest.raises(ValueError, match=r"blocks_0/ln_1/bias is missing; .*; and 17 more"):
        imported(tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 16}, r"config.json says n_embd = 16, but wte has 12"),
        ({"vocab_size": 50304}, r"config.json says vocab_size = 50304, but wte has 23"),
        ({"plan": ["regular", *PLAN[1:5], "regular", *PLAN[6:]]}, r"blocks_5/fork_embedding is not part of this"),
        ({"plan": [*PLAN, "regular"]}, r"has a plan of 11 blocks, but there are arrays of 10"),
        ({"averaging_method": "logit"}, r'averaging_method = "logit" is not in the authors. JAX code'),
        ({"n_head": 5}, r"width = 12: make it a multiple of n_head = 5"),
        ({"max_block_size": 4}, r"budget = 0.5 is below 1"),
        ({"bias": False}, r"bias is not part of this model"),
    ],
)
def test_settings_that_do_not_fit_the_arrays(changes, message, tmp_path):
    np.savez(tmp_path / "params.npz", **{name: array.numpy() for name, array in tree_of().items()})
    (tmp_path / "config.json").write_text(settings(**changes))
    with pytest.raises(ValueError, match=message):
        import_model(tmp_path)


def test_missing_settings_are_requested(tmp_path):
    tree = tree_of()
    for left_out, option in (("heads", "--heads"), ("block_size", "--block-size"), ("budget", "--budget")):
        with pytest.raises(ValueError, match=f"neither the arrays nor a config.json have it; give {option}"):
            imported(tree, **{left_out: None})
    np.savez(tmp_path / "params.npz", **{name: array.numpy() for name, array in tree.items()})
    (tmp_path / "config.json").write_text(settings())
    with pytest.raises(ValueError, match=r"--heads 6, but config.json says 3; leave the option out"):
        import_model(tmp_path, heads=6)


def test_what_is_not_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        import_model(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"is not a checkpoint of the authors' code: it has no Orbax folder"):
        import_model(tmp_path)
    (tmp_path / "notes.txt").write_text("to do")
    with pytest.raises(ValueError, match=r"notes.txt is not an \.npz or \.safetensors file"):
        import_model(tmp_path / "notes.txt")
    for name in ("params.npz", "params.safetensors"):
        (tmp_path / name).write_bytes(b"not what the name says")
        with pytest.raises(ValueError, match=f"{name} cannot be read .*: it is damaged"):
            import_model(tmp_path / name)
    with pytest.raises(ValueError, match=r"has no array wte .*, but embedding: see"):
        imported({"embedding": np.zeros((3, 4))})
    with pytest.raises(ValueError, match="wte has dtype int64: a parameter has floating-point numbers"):
        imported({"wte": np.zeros((3, 4), np.int64)})
    with pytest.raises(ValueError, match="has wte twice"):
        imported({"wte": np.zeros((3, 4)), "wte/value": np.zeros((3, 4))})


def test_a_folder_of_ours_is_not_theirs(tmp_path):
    folder = save_model(tmp_path / "model", imported(tree_of()))
    with pytest.raises(ValueError, match=r"config.json does not describe a run of the authors' code"):
        import_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON .*: fix it, or remove it"):
        import_model(folder)


def test_an_orbax_folder_without_orbax(tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "_METADATA").write_text("{}")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ValueError, match=r"Orbax is not installed: pip install orbax-checkpoint, or write params.npz"):
        import_model(tmp_path)
