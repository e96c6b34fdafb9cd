"""Preparation with a vocabulary of its own, or with the tokenizer of a folder: what is written, resumed and refused."""

import json
import re
import shutil
import signal

import numpy as np
import pytest

import thoughtbubbles
from data.prepared import contents, random_texts, run, write_lines
from thoughtbubbles.cli import main
from thoughtbubbles.data.loader import Loader, Source
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.shards import open_dataset, read_index
from thoughtbubbles.data.tokenizer import read_tokenizer, save_tokenizer, tokenizer, trained
from thoughtbubbles.data.vocabulary import train_vocabulary

BPE = {"tokenizer": "bpe", "vocab_size": 300, "processes": 1}
FILES = ("tokenizer.json", "tokenizer_config.json")
CHOOSE = "choose from gpt2, bytes, bubbles-7m and bpe (trains one), or give a folder that has a tokenizer"
COPY = "copy it again from its source, or prepare the dataset again"


def jsonl(path, texts):
    return write_lines(path, [{"text": text} for text in texts])


def texts_of(folder, split):
    tok = read_tokenizer(folder)
    tokens = np.concatenate([shard.tokens for shard in open_dataset(folder, split=split).shards])
    return tok.decode(tokens.tolist()).split("<|endoftext|>")[:-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", random_texts(80))


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """Prepared without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare((str(source),), out=out, val_fraction=0.1, **BPE)
    return out


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def test_the_folder_has_a_tokenizer_next_to_its_shards(source, whole, tmp_path, capsys):
    assert {name.split("-")[0] for name in contents(whole)} == {"index.json", "train", "val", *FILES}
    tok, index = read_tokenizer(whole), read_index(whole)
    assert (index.tokenizer, index.vocab_size, index.end_of_text) == (tok.name, 300, 299)
    train, val = texts_of(whole, "train"), texts_of(whole, "val")
    assert len(val) > 2
    assert sorted(train + val) == sorted(random_texts(80))

    loader = Loader([Source(whole)], rows=4, n_tokens=32, seed=0)
    assert loader.tokenizer == tok.name
    loader.check_vocab(300)
    with pytest.raises(ValueError, match="300"):
        loader.check_vocab(299)
    assert prepare((str(source),), out=whole, val_fraction=0.1, **BPE) == index
    shown = capsys.readouterr().out
    assert f"{whole} is already prepared; nothing to do" in shown
    assert shown.endswith(f"next: thoughtbubbles train small-gpt2 --data.mixture {whole} --model.vocab-size 320\n")
    with pytest.raises(ValueError, match=r"a prepared dataset with other settings \(vocab_size = 300\)"):
        prepare((str(source),), out=whole, val_fraction=0.1, **{**BPE, "vocab_size": 301})


def test_a_second_folder_with_the_tokenizer_of_the_first(whole, tmp_path):
    texts = [*random_texts(30, seed=1), "Ünseen 😀"]
    second = tmp_path / "second"
    prepare((str(jsonl(tmp_path / "b.jsonl", texts)),), out=second, tokenizer=str(whole), processes=1, val_fraction=0.0)
    assert read_index(second).tokenizer == read_index(whole).tokenizer
    assert [(second / name).read_bytes() for name in FILES] == [(whole / name).read_bytes() for name in FILES]
    assert texts_of(second, "train") == texts
    mixed = Loader([Source(whole), Source(second)], rows=4, n_tokens=32, seed=0)
    assert mixed.tokenizer == read_tokenizer(whole).name

    other = tmp_path / "other"
    prepare((str(tmp_path / "b.jsonl"),), out=other, val_fraction=0.0, **BPE)
    with pytest.raises(ValueError, match="tokenizer") as error:
        Loader([Source(whole), Source(other)], rows=4, n_tokens=32, seed=0)
    assert read_tokenizer(whole).name in str(error.value)
    assert read_tokenizer(other).name in str(error.value)


def test_the_tokenizer_of_a_folder_whose_tokenizer_has_a_name(source, tmp_path):
    prepare((str(source),), out=tmp_path / "bytes", tokenizer="bytes", processes=1)
    assert not any((tmp_path / "bytes" / name).exists() for name in FILES)
    index = prepare((str(source),), out=tmp_path / "out", tokenizer=str(tmp_path / "bytes"), processes=1)
    assert index.tokenizer == "bytes"


def test_the_tokenizer_of_the_model_in_the_package(source, tmp_path, monkeypatch, whole):
    index = prepare((str(source),), out=tmp_path / "out", tokenizer="bubbles-7m", processes=1)
    assert index.tokenizer == read_tokenizer(tmp_path / "out").name == thoughtbubbles.load_tokenizer().name
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "bubbles-7m")  # a folder of that name comes first, as for a model
    index = prepare((str(source),), out=tmp_path / "own", tokenizer="bubbles-7m", processes=1)
    assert index.tokenizer == read_tokenizer(whole).name


def test_the_next_command_has_room_for_a_large_vocabulary(source, tmp_path, capsys):
    save_tokenizer(trained(tokenizer("gpt2").merges[:9000]), tmp_path / "tokenizer")
    prepare((str(source),), out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), processes=1)
    assert capsys.readouterr().out.endswith(f"--data.mixture {tmp_path / 'out'} --model.vocab-size 9280\n")


# What the merges depend on


def test_validation_documents_do_not_take_part(tmp_path):
    """Neither those that the hash selects, nor the second document, which is always validation data."""
    texts = random_texts(60)
    file = jsonl(tmp_path / "a.jsonl", texts)
    for fraction in (0.3, 1e-9, 0.0):
        out = tmp_path / f"{fraction}"
        index = prepare((str(file),), out=out, val_fraction=fraction, **BPE)
        train = texts_of(out, "train")
        assert index.tokenizer == train_vocabulary(iter(train), size=300).name
        assert (index.tokenizer == train_vocabulary(iter(texts), size=300).name) == (fraction == 0)
        assert (train[0], texts[1] in train) == (texts[0], fraction == 0)


def test_a_validation_set_does_not_take_part(tmp_path):
    train, val = random_texts(40), ["zq" * 50, *random_texts(40, seed=1)]
    files = jsonl(tmp_path / "train.jsonl", train), jsonl(tmp_path / "val.jsonl", val)
    index = prepare((str(files[0]),), out=tmp_path / "out", val=(str(files[1]),), **BPE)
    assert texts_of(tmp_path / "out", "val") == val
    assert index.tokenizer == train_vocabulary(iter(train), size=300).name
    assert index.tokenizer != train_vocabulary(iter(val + train), size=300).name


def test_documents_after_the_limit_do_not_take_part(tmp_path):
    """They are not even read: a broken line there is no error."""
    texts = random_texts(40)
    file = jsonl(tmp_path / "a.jsonl", texts)
    with file.open("a") as end:
        end.write("broken\n")
    for limit in (7, 40):
        index = prepare((str(file),), out=tmp_path / str(limit), limit=limit, val_fraction=0.0, **BPE)
        assert texts_of(tmp_path / str(limit), "train") == texts[:limit]
        assert index.tokenizer == train_vocabulary(iter(texts[:limit]), size=300).name
    with pytest.raises(ValueError, match=r"a.jsonl, line 41: not JSON"):
        prepare((str(file),), out=tmp_path / "41", limit=41, val_fraction=0.0, **BPE)


def test_questions_and_answers(tmp_path):
    """Each part on its own, as it is encoded; records with nothing to learn do not take part."""
    records = [{"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}."} for i in range(50)]
    skipped = {"messages": [{"role": "user", "content": "zqzqzqzq" * 50}]}
    file = write_lines(tmp_path / "a.jsonl", [skipped, *records])
    index = prepare((str(file),), out=tmp_path / "out", val_fraction=0.0, **BPE)
    assert (index.kind, index.notes["documents"]["train"], index.notes["skipped"]) == ("examples", 50, 1)
    parts = [text for record in records for text in (record["question"] + "\n", record["answer"])]
    assert index.tokenizer == train_vocabulary(iter(parts), size=300).name
    said = [f"{record['question']}\n{record['answer']}" for record in records]
    assert texts_of(tmp_path / "out", "train") == said


def test_little_text_gives_fewer_ids_than_requested(tmp_path):
    index = prepare((str(jsonl(tmp_path / "a.jsonl", ["ab ab", "ab"])),), out=tmp_path / "out", **BPE)
    assert index.vocab_size == 259  # ab and " ab", from the first document alone


def test_nothing_is_left_of_sources_without_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"sources = .*a.jsonl: contains no documents"):
        prepare((str(tmp_path / "a.jsonl"),), out=tmp_path / "out", **BPE)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_same_bytes_with_two_processes(source, whole, tmp_path):
    done = run(source, tmp_path / "out", chunk_bytes=2000, val_fraction=0.1, **{**BPE, "processes": 2})
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(whole)


# Interruptions

WITHOUT_LIBRARY = "sys.modules['tokenizers'] = None"  # importing it fails, so nothing can be trained
STOP = (
    "import os; sys.addaudithook(lambda event, about: event == {event!r} and "
    "any(str(name).endswith({name!r}) for name in about) and {do})"
)
KILL, INTERRUPT = "os.kill(os.getpid(), 9)", "(_ for _ in ()).throw(KeyboardInterrupt)"


def test_killed_after_the_vocabulary_was_trained(source, whole, tmp_path):
    """It is not trained again."""
    out = tmp_path / "out"
    kill = STOP.format(event="open", name="train-00000.tail", do=KILL)
    assert run(source, out, before=kill, val_fraction=0.1, **BPE).returncode == -signal.SIGKILL
    assert {"prepare.json", *FILES} <= contents(out).keys()
    done = run(source, out, before=WITHOUT_LIBRARY, val_fraction=0.1, **BPE)
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(whole)


def test_interrupted_before_the_vocabulary_was_saved(source, whole, tmp_path):
    """It is trained again."""
    out = tmp_path / "out"
    stop = STOP.format(event="os.rename", name="tokenizer.json", do=INTERRUPT)
    assert "KeyboardInterrupt" in run(source, out, before=stop, val_fraction=0.1, **BPE).stderr
    assert not contents(out).keys() & set(FILES)
    done = run(source, out, before=WITHOUT_LIBRARY, val_fraction=0.1, **BPE)
    assert done.stderr == (
        "prepare: the package tokenizers is needed to train a vocabulary: install it with pip install "
        "'thoughtbubbles[data]', or give another --tokenizer\n"
    )
    done = run(source, out, val_fraction=0.1, **BPE)
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(whole)


@pytest.fixture
def halfway(whole, tmp_path, monkeypatch):
    """A folder in which some documents are prepared, of a source that ends in a broken line; and how to continue."""
    monkeypatch.setattr("thoughtbubbles.data.sources.CHUNK_BYTES", 1)  # a line is a chunk
    file = jsonl(tmp_path / "a.jsonl", random_texts(9))
    with file.open("a") as end:
        end.write("broken\n")
    out, given = tmp_path / "out", {"tokenizer": str(whole), "processes": 1}

    def go_on():
        prepare((str(file),), out=out, **given)

    with pytest.raises(ValueError, match=r"a.jsonl, line 10: not JSON"):
        go_on()
    assert json.loads((out / "prepare.json").read_text())["state"]["kind"] == "text"
    return out, go_on


@pytest.mark.parametrize("name", FILES)
def test_a_half_prepared_folder_without_its_tokenizer(name, halfway):
    out, go_on = halfway
    (out / name).unlink()
    with pytest.raises(ValueError, match=rf"out/{name} .*: delete the folder .*out and prepare it again$"):
        go_on()


def test_a_half_prepared_folder_without_the_vocabulary_it_was_encoded_with(source, tmp_path):
    out = tmp_path / "out"
    kill = STOP.format(event="os.rename", name="index.json", do=KILL)
    before = f"prepare.SAVE_SECONDS = 0; {kill}"
    assert run(source, out, before=before, chunk_bytes=2000, **BPE).returncode == -signal.SIGKILL
    (out / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config.json is missing: delete the folder .*out and prepare it"):
        prepare((str(source),), out=out, **BPE)


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 256}, "vocab_size = 256: give a whole number from 257 to 65,536"),
        ({"vocab_size": 65537}, "vocab_size = 65537: give a whole number from 257"),
        ({"vocab_size": 300.0}, "vocab_size = 300.0: give a whole number"),
        ({"vocab_size": True}, "vocab_size = True: give a whole number"),
        ({"tokenizer": "gpt2"}, "vocab_size = 300: only for a vocabulary that is trained here (--tokenizer bpe)"),
        ({"tokenizer": "."}, "vocab_size = 300: only for a vocabulary that is trained here (--tokenizer bpe)"),
        *(
            ({"tokenizer": name, "vocab_size": None}, f"tokenizer = {name!r}: {CHOOSE}")
            for name in ("gpt5", "", None, 7, ["bpe"], "no\0name", "nowhere/at/all", __file__)
        ),
        ({"tokenizer": "x" * 5000, "vocab_size": None}, "x' cannot be used (File name too long): give a folder that"),
    ],
)
def test_wrong_arguments(options, message, source, tmp_path, no_shape_checks):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        prepare((str(source),), out=tmp_path / "out", **{**BPE, **options})
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_tokenizer(source, tmp_path):
    (tmp_path / "empty").mkdir()
    message = r"empty/tokenizer_config.json is missing: give a folder with a tokenizer that Thoughtbubbles saved"
    with pytest.raises(ValueError, match=message):
        prepare((str(source),), out=tmp_path / "out", tokenizer=str(tmp_path / "empty"), processes=1)
    assert not (tmp_path / "out").exists()


def test_mistakes_on_the_command_line(source, tmp_path, capsys):
    for words, message in [
        (["--tokenizer", "bpe", "--vocab-size", "100"], "vocab_size = 100: give a whole number from 257 to 65,536"),
        (["--tokenizer", "bpe", "--vocab-size", "many"], "--vocab-size"),
        (["--vocab-size", "300"], "vocab_size = 300: only for a vocabulary that is trained here"),
        (["--tokenizer", str(tmp_path)], "tokenizer_config.json is missing: give a folder with a tokenizer"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(["prepare", str(source), "--out", str(tmp_path / "out"), *words])
        assert stopped.value.code not in (0, None)
        assert message in f"{stopped.value} {capsys.readouterr().err}"


DAMAGE = {
    "no list": (lambda model: model.update(merges={"a": "b"}), "has no list of merges"),
    "none": (lambda model: model.pop("merges"), "has no list of merges"),
    "one fewer": (lambda model: model["merges"].pop(), "is not the tokenizer 'bpe-300-.*(its merges make 'bpe-299-"),
    "other order": (
        lambda model: model["merges"].reverse(),
        "is not the tokenizer 'bpe-300-.*(its merges make 'bpe-300-",
    ),
    "no pair": (lambda model: model["merges"].append("abc"), "has the merge 'abc', which is not a pair"),
    "three": (lambda model: model["merges"].append("a b c"), "has the merge 'a b c', which is not a pair"),
    "number": (lambda model: model["merges"].append(7), "has the merge 7, which is not a pair"),
    "half": (lambda model: model["merges"].append(["", "a"]), "has the merge ['', 'a'], which is not a pair"),
    "letter": (lambda model: model["merges"].append("a 中"), "has the merge 'a 中', which is not bytes"),
    "newline": (lambda model: model["merges"].append("a \n"), r"has the merge 'a \n', which is not bytes"),
    "space": (lambda model: model["merges"].append(["a b", "c"]), "has the merge ['a b', 'c'], which is not bytes"),
    "twice": (lambda model: model["merges"].append(model["merges"][0]), "but another merge makes the same token"),
    "huge": (lambda model: model["merges"].extend(["a b"] * 70_000), "merges, more than 65,279"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_list_of_merges(what, copy, source, tmp_path):
    """In a folder to train on, and in one that a second folder takes its tokenizer from."""
    change, words = DAMAGE[what]
    path = copy / "tokenizer.json"
    definition = json.loads(path.read_text())
    change(definition["model"])
    path.write_text(json.dumps(definition))
    words = ".*".join(map(re.escape, words.split(".*")))
    with pytest.raises(ValueError, match=rf"^\S*copy/tokenizer.json .*{words}.*: {COPY}$"):
        read_index(copy)
    (copy / "index.json").unlink()  # now it is the folder of a tokenizer only
    with pytest.raises(ValueError, match=rf"^\S*copy/tokenizer.json .*{words}.*: give a folder with a tokenizer that"):
        prepare((str(source),), out=tmp_path / "out", tokenizer=str(copy), processes=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"{}", None])
@pytest.mark.parametrize("name", FILES)
def test_files_of_a_tokenizer_that_are_something_else(name, content, copy):
    """None: the file is missing."""
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^\S*copy/{name}.*: {COPY}$") as error:
        Loader([Source(copy)], rows=4, n_tokens=32, seed=0)
    assert len(str(error.value).splitlines()) == 1


def test_the_tokenizer_of_another_folder(copy, tmp_path):
    """Its files are in order, but the index names another one."""
    for tok in (tokenizer("bytes"), trained(["a b"])):
        save_tokenizer(tok, copy)
        message = rf"tokenizer_config.json names the tokenizer '{tok.name}' instead of 'bpe-300-.*': {COPY}"
        with pytest.raises(ValueError, match=message):
            read_index(copy)


# Training


def test_a_run_keeps_the_vocabulary_with_its_model(whole, tmp_path, capsys):
    run_folder = tmp_path / "run"
    words = ["train", "tiny", "--data.mixture", str(whole), "--out", str(run_folder), "--device", "cpu"]
    small = ["--tokens", "64", "--tokens-per-step", "64", "--model.block-size", "32", "--eval.tokens", "64"]
    with pytest.raises(SystemExit) as stopped:
        main([*words, *small, "--model.vocab-size", "299"])
    assert "--model.vocab-size 299 is too small" in str(stopped.value)
    main([*words, *small, "--model.vocab-size", "320", "--eval.sample-tokens", "2"])
    tok = thoughtbubbles.load_tokenizer(run_folder)
    assert tok.name == read_tokenizer(whole).name
    assert tok.encode(random_texts(1)[0]) == read_tokenizer(whole).encode(random_texts(1)[0])
