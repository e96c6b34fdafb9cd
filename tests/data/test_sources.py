"""Sources: every file format gives the same records, from any position on; every form of record is parsed correctly."""

import gzip
import json
import lzma
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from thoughtbubbles.data import sources
from thoughtbubbles.data.encode import encode_chunk, encode_parts
from thoughtbubbles.data.records import (
    CHAT_TEMPLATE,
    Document,
    Example,
    Part,
    chat_parts,
    choice_answers,
    choices_prompt,
    question_prompt,
    read_record,
)
from thoughtbubbles.data.sources import NAMED, download_command, find_inputs, read_chunks
from thoughtbubbles.data.tokenizer import save_tokenizer, tokenizer
from thoughtbubbles.files import short_name

TEXTS = [f"Document {i}: " + "ab c\n" * (i % 7) for i in range(600)]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def write(folder, ending):
    path = folder / f"texts{ending}"
    half = len(LINES) // 2
    if ending == ".jsonl":
        path.write_bytes(LINES)
    elif ending.endswith(".gz"):
        path.write_bytes(gzip.compress(LINES[:half]) + gzip.compress(LINES[half:]))
    elif ending.endswith(".xz"):
        path.write_bytes(lzma.compress(LINES[:half]) + bytes(8) + lzma.compress(LINES[half:]) + bytes(4))  # padding
    elif ending.endswith(".zst"):
        path.write_bytes(zstandard.compress(LINES[:half]) + zstandard.compress(LINES[half:]))
    else:
        pq.write_table(pa.table({"id": range(600), "text": TEXTS}), path, row_group_size=100)
    return path


def texts(path, start=0):
    """The documents from record `start` on, and the positions of their chunks."""
    found, stops = [], [start]
    for chunk in read_chunks(find_inputs([str(path)]), start=start):
        assert chunk.start == (0 if chunk.input else stops[-1])
        stops.append(chunk.stop)
        encoded = encode_chunk(chunk, tokenizer("bytes"))
        assert encoded.error is None, encoded.error
        tokens = np.split(encoded.tokens, np.cumsum(encoded.n_tokens))[:-1]
        assert all(document[-1] == 256 for document in tokens)
        found += [document[:-1].astype(np.uint8).tobytes().decode() for document in tokens]
    return found, stops


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.xz", ".jsonl.zst", ".parquet"])
def test_every_format_from_any_place(ending, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(sources, "CHUNK_ROWS", 64)
    path = write(tmp_path, ending)
    whole, stops = texts(path)
    assert whole == TEXTS
    assert len(stops) > 5
    for start in (1, stops[1], stops[2], 99, 100, 357, 599, 600):
        assert texts(path, start)[0] == TEXTS[start:]


def test_blank_lines_and_a_missing_newline_at_the_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}')
    assert texts(path) == (["one", "two"], [0, 4])
    assert texts(path, 3)[0] == ["two"]


def test_text_files_and_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"zwei\r\n")
    (tmp_path / "b" / "1.txt").write_bytes("\ufeffeins".encode())
    (tmp_path / "a.md").write_text("# null\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_text("no")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert texts(tmp_path)[0] == ["# null\n", "eins", "zwei\r\n"]
    (tmp_path / "data.jsonl").write_text('{"text": "data"}')
    assert texts(tmp_path)[0] == ["data"]  # the other files describe it


@pytest.mark.parametrize("kind", ["link", "loop", "pipe"])
def test_what_cannot_be_read_in_a_folder_is_named(kind, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    odd = tmp_path / "b.jsonl"
    os.mkfifo(odd) if kind == "pipe" else odd.symlink_to("gone" if kind == "link" else odd.name)
    with pytest.raises(ValueError, match=r"b\.jsonl is a broken link or not a file: fix or remove it"):
        find_inputs([str(tmp_path)])


def error_of(*found):
    *_, last = read_chunks(find_inputs([str(path) for path in found]))
    return encode_chunk(last, tokenizer("bytes")).error


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.xz", ".jsonl.zst"])
def test_damage_after_the_first_member_is_named(ending, tmp_path):
    path = write(tmp_path, ending)
    first = {".jsonl.gz": gzip.compress, ".jsonl.xz": lzma.compress, ".jsonl.zst": zstandard.compress}[ending](LINES)
    path.write_bytes(first + b"neither this nor that")
    assert error_of(path).startswith(f"{path} cannot be read (")


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.xz", ".jsonl.zst"])
def test_truncated_files_are_named(ending, tmp_path):
    path = write(tmp_path, ending)
    path.write_bytes(path.read_bytes()[:-24])
    assert error_of(path) == f"{path} ends in the middle of its compressed data: copy or download it again"


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet"])
def test_files_of_another_kind_are_named(ending, tmp_path):
    path = tmp_path / f"a{ending}"
    path.write_bytes(b"neither this nor that" * 10)
    assert error_of(path).startswith(f"{path} cannot be read (")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 3: not JSON (Expecting ',' delimiter at column 13): fix or remove the line"),
        (b'{"text": "\xff"}', "line 3: byte 11 is not UTF-8: convert the file"),
        (b'["a"]', "line 3: a JSON list is not a record"),
        (b'{"txt": "a", "id": 1}', "line 3: the record has the fields txt, id: give {text}, {question, answer}"),
        (b'{"text": null}', "line 3: text is NoneType, not text"),
        (b'{"messages": [{"role": "owl", "content": "hu"}]}', "line 3: role = 'owl': give one of system, user, tool"),
        (b'{"messages": "hello"}', "line 3: messages is not a list of {role, content}"),
        (b'{"messages": ""}', "line 3: messages is not a list of {role, content}"),
        (b'{"messages": {}}', "line 3: messages is not a list of {role, content}"),
        (b'{"messages": [["user", "hi"]]}', "line 3: messages is not a list of {role, content}"),
        (b'{"messages": [{"role": {"a": 1}, "content": "hi"}]}', "line 3: role = {'a': 1}: give one of system"),
        (b'{"messages": [{"role": ["user"], "content": "hi"}]}', "line 3: role = ['user']: give one of system"),
        (b'{"messages": [{"content": "hi"}]}', "line 3: role = None: give one of system"),
        (b'{"messages": [{"role": "user", "content": [{"text": "hi"}]}]}', "line 3: content is list, not text"),
        (b'{"messages": [{"role": "assistant", "content": null}]}', "line 3: content is NoneType, not text"),
        (b'{"messages": [{"role": "user", "content": true}]}', "line 3: content is bool, not text"),
        (b'{"text": {"text": {}}}', "line 3: text is dict, not text"),
        (b'{"train": {"question": "q", "answer": []}}', "line 3: answer is list, not text"),
        (b'{"question": "q", "steps": [{}], "answer": "1"}', "line 3: an entry of steps is dict, not text"),
        (
            b'{"question": "q", "choices": ["a", null], "answer": 0}',
            "line 3: an entry of choices is NoneType, not text",
        ),
        (b'{"question": "q", "choices": ["a", "b"], "answer": [0]}', "line 3: answer = [0]: give a number from 0 to 1"),
        (b'{"question": "q", "choices": "ab", "answer": 0}', "line 3: choices is str, not a list"),
        (b'{"a\\nb": 1}', "line 3: the record has the fields a b: give"),
        (b'{"text": ' + b"7" * 5000 + b"}", "line 3: a number has too many digits: fix or remove the line"),
        (b'{"question": "q", "choices": ["a", "b"], "answer": "C"}', "line 3: answer = 'C': give a number from 0 to 1"),
        (b'{"question": "q", "choices": ["a"], "answer": 0}', "line 3: choices has 1 entries: give from 2 to 26"),
        (b'{"question": "q", "answer": "a"}', "line 3: found questions or chats with answers after"),
        (b"[" * 100_000, "line 3: the JSON is nested too deeply"),
    ],
)
def test_broken_records_are_named_and_those_before_kept(line, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "never reached"}\n')
    (chunk,) = read_chunks(find_inputs([str(path)]))
    encoded = encode_chunk(chunk, tokenizer("bytes"))
    assert encoded.error.startswith(f"{path}, {message}"), encoded.error
    assert tokenizer("bytes").decode(encoded.tokens[:-1].tolist()) == "fine"


@pytest.mark.parametrize("field", ["role", "answer"])
def test_a_broken_record_is_reported_in_one_short_line(field, tmp_path):
    value = {"a\n": ["b" * 10_000]}
    record = {"messages": [{"role": value}]} if field == "role" else {"question": "q", "choices": ["a", "b"]}
    (tmp_path / "a.jsonl").write_text(json.dumps({**record, "answer": value, "x" * 10_000: 0}))
    error = error_of(tmp_path / "a.jsonl")
    assert f"a.jsonl, line 1: {field} = " in error
    assert "\n" not in error
    assert len(error) < 1000


def test_every_flipped_byte_of_a_parquet_file_is_read_or_named(tmp_path):
    """Its reader can raise anything: every message has the name of the file, and no record is silently lost."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(9), "text": TEXTS[:9]}), path, row_group_size=3)
    good, errors = path.read_bytes(), set()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        found, error = 0, None
        for chunk in read_chunks(find_inputs([str(path)])):
            encoded = encode_chunk(chunk, tokenizer("bytes"))
            found, error = found + len(encoded.key) + encoded.skipped, error or encoded.error
        assert found == 9 or error is not None
        if error is not None:
            assert error.startswith(f"{path}"), error
            assert "\n" not in error
            errors.add(error)
    assert len(errors) > 10


@pytest.mark.parametrize("column", ["not UTF-8", "beyond every calendar"])
def test_values_that_python_cannot_have(column, tmp_path):
    path = tmp_path / "a.parquet"
    values = pa.array([b"\xff"]).view(pa.string()) if column == "not UTF-8" else pa.array([2**62], pa.timestamp("ms"))
    pq.write_table(pa.table({"text": values}), path)
    assert error_of(path).startswith(f"{path} cannot be read (")


def test_a_column_whose_name_is_not_text(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"text", b"t\xffxt"))
    assert error_of(path).startswith(f"{path} cannot be read (")


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst"])
def test_a_line_without_end_is_refused(ending, tmp_path, monkeypatch):
    """Small compressed files can expand to more than fits in memory."""
    monkeypatch.setattr(sources, "CHUNK_BYTES", 100)
    monkeypatch.setattr(sources, "LONGEST_LINE", 1000)
    path, lines = tmp_path / f"a{ending}", b'{"text": "a"}\n' * 10
    pack = {"l": bytes, "z": gzip.compress if ending.endswith(".gz") else lzma.compress, "t": zstandard.compress}
    path.write_bytes(pack[ending[-1]](lines + b" " * 2000))
    assert error_of(path) == f"{path}, line 11: longer than 1,000 bytes; give one record per line"
    path.write_bytes(pack[ending[-1]](lines + b" " * 999 + b"\n"))
    assert error_of(path) is None


def test_a_small_file_that_unpacks_into_much_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE", 1 << 20)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(bytes(512 << 20)))
    tracemalloc.start()
    assert "line 1: longer than" in error_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


def test_sources_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "file.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.txt")
    for name in ("loop.txt", "file.txt/a.txt", "pipe.txt", "x" * 5000, "y/" * 5000, "nul\0.txt"):
        with pytest.raises(ValueError, match=r"is not an existing file or folder|cannot be used") as error:
            find_inputs([str(tmp_path / name)])
        assert short_name(name[:20]) in str(error.value)
        assert len(str(error.value)) < 1000
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "sub" / "up").symlink_to("..")
    (tmp_path / "folder" / "a.txt").write_text("only this")
    assert texts(tmp_path / "folder")[0] == ["only this"]
    found = find_inputs([str(tmp_path / "file.txt")])
    (tmp_path / "file.txt").unlink()  # between looking and reading
    (chunk,) = read_chunks(found)
    message = f"{tmp_path / 'file.txt'} cannot be read (No such file or directory): check the file, or copy it again"
    assert encode_chunk(chunk, tokenizer("bytes")).error == message


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin1"))
    assert "a.txt: byte 3 is not UTF-8: convert the file, e.g. with iconv" in error_of(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "nowhere.txt is not an existing file or folder, nor one of the names openwebtext, pes2o"),
        ("picture.png", r"picture.png: unsupported file type; give .txt, .md, .jsonl"),
        ("empty", "empty has no file to read: give a folder with .txt"),
    ],
)
def test_sources_that_do_not_exist(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        find_inputs([source])
    with pytest.raises(ValueError, match="no source: give files, folders or names"):
        find_inputs([])


GSM8K = {
    "question": "Ann has 48 clips and sells half. How many?",
    "answer": "She sells 48/2 = <<48/2=24>>24.\nSo $<<48-24=24>>24.\n#### 24",
}
MMLU = {"question": "2 + 2?", "choices": ["3", "4", "5"], "answer": 1, "subject": "arithmetic"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye!"},
    {"role": "user", "content": "…"},
]


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (GSM8K, [GSM8K["question"] + "\n", "She sells 48/2 = 24.\nSo $24.\n#### 24"]),
        ({"question": " q ", "steps": ["<<1+1=2>>", "<<2*3=6>>"], "answer": "6"}, ["q\n", "1+1=2\n2*3=6\n#### 6"]),
        ({"question": "q", "steps": "<<1+1=2>> <<2*3=6>>", "answer": 6}, ["q\n", "1+1=2\n2*3=6\n#### 6"]),
        ({"question": "q", "steps": [], "answer": "6"}, ["q\n", "#### 6"]),
        (MMLU, ["2 + 2?\nA. 3\nB. 4\nC. 5\nAnswer:", " B. 4"]),
        ({**MMLU, "answer": "b"}, ["2 + 2?\nA. 3\nB. 4\nC. 5\nAnswer:", " B. 4"]),
        ({"train": MMLU}, ["2 + 2?\nA. 3\nB. 4\nC. 5\nAnswer:", " B. 4"]),
        (
            {"messages": CHAT, "source": "x"},
            ["System: Be brief.\nUser: Hi\nAssistant:", " Hello.", "User: Bye\nAssistant:", " Bye!"],
        ),
    ],
)
def test_examples(record, parts):
    found = read_record(record)
    assert found == Example(tuple(Part(text, i % 2 == 1) for i, text in enumerate(parts)))
    assert found.key == parts[0]
    tok = tokenizer("gpt2")
    tokens, mask = encode_parts(tok, found.parts)
    assert mask.dtype == np.bool_
    said = "".join(text + "<|endoftext|>" for text in parts[1::2])
    assert tok.decode(tokens[mask].tolist()) == said
    assert tok.decode(tokens[~mask].tolist()) == "".join(parts[::2])


def test_documents_and_records_without_anything_to_learn():
    assert read_record({"text": " a\n", "url": "x"}) == Document(" a\n")
    assert read_record({"text": ""}) is None
    assert read_record({"messages": []}) is None
    assert read_record({"messages": [{"role": "user", "content": "Hello?"}]}) is None


def test_prompts_in_use_are_those_of_training():
    (prompt, _) = read_record(GSM8K).parts
    assert question_prompt(GSM8K["question"]) == prompt.text
    (prompt, answer) = read_record(MMLU).parts
    assert choices_prompt(MMLU["question"], MMLU["choices"]) == prompt.text
    assert choice_answers(MMLU["choices"])[1] == answer.text
    parts = read_record({"messages": CHAT}).parts
    assert chat_parts(CHAT[:4]) == list(parts[:3])  # up to the assistant's second turn
    assert chat_parts(CHAT)[:4] == list(parts)


@pytest.mark.parametrize("n", range(len(CHAT) + 1))
def test_the_chat_template_has_the_format_of_training(n):
    render = pytest.importorskip("jinja2").Template(CHAT_TEMPLATE).render
    parts = chat_parts(CHAT[:n])
    asks = bool(parts) and not parts[-1].said
    expected = "".join(part.text + "<|endoftext|>" * part.said for part in parts)
    assert render(messages=CHAT[:n], eos_token="<|endoftext|>", add_generation_prompt=asks) == expected


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_hugging_face_reads_a_chat_as_training_does(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    own = tokenizer(name)
    save_tokenizer(own, tmp_path, chat_template=CHAT_TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = theirs.apply_chat_template(CHAT[:4], add_generation_prompt=True, tokenize=True, return_dict=False)
    ids, _ = encode_parts(own, chat_parts(CHAT[:4]))
    assert found == ids.tolist()
    assert own.end_of_text in found


def test_parquet_as_the_named_datasets_have_it(tmp_path):
    """Nested columns: SmolTalk's messages, MMLU's wrapped records with lists, GSM8K-aug's steps."""
    for records, parts in [
        ([{"messages": CHAT, "source": "smol"}], 4),
        ([{"train": MMLU}], 2),
        ([{"question": "q", "steps": ["<<1+1=2>>"], "answer": "2"}], 2),
        ([GSM8K], 2),
    ]:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(records), path)
        (chunk,) = read_chunks(find_inputs([str(path)]))
        encoded = encode_chunk(chunk, tokenizer("bytes"))
        tokens, mask = encode_parts(tokenizer("bytes"), read_record(records[0]).parts[:parts])
        assert encoded.kind == "examples"
        assert encoded.tokens.tolist() == tokens.tolist()
        assert encoded.mask.tolist() == mask.tolist()


def script(code, **environment):
    """In a separate process, which may have other packages and settings."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    ).stdout


def test_named_datasets_are_streamed_from_any_place(tmp_path):
    """With `datasets`, from a local repository instead of a public one."""
    rows = [{"question": f"q{i}", "steps": ["<<1+1=2>>"], "answer": str(i)} for i in range(700)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = f"""
from thoughtbubbles.data.encode import encode_chunk
from thoughtbubbles.data.sources import NAMED, Named, find_inputs, read_chunks
from thoughtbubbles.data.tokenizer import tokenizer
NAMED["gsm8k-aug"] = Named({str(tmp_path)!r})
for chunk in read_chunks(find_inputs(["gsm8k-aug"]), start=300):
    encoded = encode_chunk(chunk, tokenizer("bytes"))
    print(chunk.start, chunk.stop, encoded.kind, encoded.error, len(encoded.key))
"""
    shown = script(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    assert shown == "300 556 examples None 256\n556 700 examples None 144\n"


def test_named_datasets_without_network_say_what_to_do(tmp_path):
    code = """
from thoughtbubbles.data.sources import NAMED, find_inputs, read_chunks
for name in NAMED:
    (chunk,) = read_chunks(find_inputs([name]))
    print(chunk.form, chunk.payload)
"""
    shown = script(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)).splitlines()
    assert len(shown) == len(NAMED) == 7
    for name, line in zip(NAMED, shown, strict=True):
        assert line.startswith(f"broken {name} cannot be read from Hugging Face (")
        assert f"`{download_command(name)}` elsewhere and give the folder instead of the name" in line
    assert download_command("pes2o") == (
        "hf download allenai/peS2o --repo-type dataset --include 'data/v2/train-*.json.gz' --local-dir pes2o"
    )


@pytest.mark.parametrize(
    ("package", "source"), [("datasets", "gsm8k"), ("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst")]
)
def test_packages_that_are_not_installed_say_what_to_do(package, source, tmp_path):
    for file in ("a.parquet", "a.jsonl.zst"):
        (tmp_path / file).write_bytes(b"x")
    source = source if package == "datasets" else str(tmp_path / source)
    code = f"""
import sys
sys.modules[{package!r}] = None  # as if it were not there
from thoughtbubbles.data.sources import find_inputs, read_chunks
(chunk,) = read_chunks(find_inputs([{source!r}]))
print(chunk.form, chunk.payload)
"""
    shown = script(code)
    assert shown.startswith(f"broken the package {package} is needed to ")
    assert "pip install 'thoughtbubbles[data]'" in shown
