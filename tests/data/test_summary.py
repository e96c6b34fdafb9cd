"""The command that `prepare` suggests at its end."""

import shlex

from data.prepared import write_lines
from thoughtbubbles.cli import main
from thoughtbubbles.data import summary
from thoughtbubbles.data.loader import Loader, Source
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.summary import NEXT, VOCAB_SIZE
from thoughtbubbles.data.tokenizer import TRAINED, tokenizer


def test_the_next_command_fits_little_text_and_odd_names(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("0123456789")
    out = tmp_path / "a folder=2"
    prepare((str(tmp_path / "a.txt"),), out=out, tokenizer="bytes", processes=1)
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == f"next: thoughtbubbles train tiny --data.mixture '{out}=1' --model.block-size 8"
    loader = Loader([Source.parse(shlex.split(command)[5])], rows=2, n_tokens=8, seed=0)
    assert loader.batch(0).ids.tolist() == [list(b"01234567")] * 2


def test_the_next_command_names_recipes_as_they_are():
    from thoughtbubbles.recipes import recipe

    for name, choices in NEXT.items():
        for recipe_name, block_size, _ in choices:
            config = recipe(recipe_name)
            assert config.model.block_size == block_size
            assert config.model.vocab_size >= (VOCAB_SIZE if name == TRAINED else tokenizer(name).size)
            assert config.tokens_per_step & -config.tokens_per_step >= block_size  # so a shorter power of two fits too


def test_what_to_do_next_with_tokens_of_the_model_in_the_package(tmp_path, capsys, monkeypatch):
    """Fine-tuning it: rows as long as the examples need, and enough steps to learn something from a few."""
    begin = "next: thoughtbubbles train bubbles-7m --init-from bubbles-7m --data.mixture"
    lines = [{"question": f"How long is {'very ' * 20}long?", "answer": str(i)} for i in range(4)]
    prepare((str(write_lines(tmp_path / "a.jsonl", lines)),), out=tmp_path / "a", tokenizer="bubbles-7m", processes=1)
    (longest,) = {len(shard.tokens) // 4 for shard in open_dataset(tmp_path / "a", split="train").shards}
    assert 16 < longest <= 32
    rows = "--model.block-size 32 --tokens-per-step 1024 --tokens 102400 --optim.lr 1e-3"
    assert capsys.readouterr().out.endswith(f"{begin} {tmp_path / 'a'} {rows}\n")
    more = write_lines(tmp_path / "val.jsonl", [{"question": "How long is it? " + "very " * 60, "answer": "long"}])
    settings = {"tokenizer": "bubbles-7m", "processes": 1}
    index = prepare((str(tmp_path / "a.jsonl"),), out=tmp_path / "c", val=(str(more),), **settings)
    shown = capsys.readouterr().out
    assert "--model.block-size 128 --tokens-per-step 4096 " in shown  # as long as validation needs
    monkeypatch.chdir(tmp_path)
    main([*shown.rsplit("next: thoughtbubbles ", 1)[1].split(), "--dry-run"])
    text = write_lines(tmp_path / "b.jsonl", [{"text": "one two three four five " * 60}])
    prepare((str(text),), out=tmp_path / "b", tokenizer="bubbles-7m", processes=1)
    rows = "--model.block-size 256 --tokens-per-step 2048 --tokens 204800 --optim.lr 1e-3"
    assert capsys.readouterr().out.endswith(f"{begin} {tmp_path / 'b'} {rows}\n")
    monkeypatch.setattr(summary, "MUCH", 1)  # however many examples: they are for fine-tuning
    summary.summarize(tmp_path / "c", index)
    assert f"{begin} {tmp_path / 'c'} --model" in capsys.readouterr().out
