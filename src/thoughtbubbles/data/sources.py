"""Text sources: files, folders of files, and public datasets by name.

A source is read in order as chunks of about a megabyte, each with its position, so that reading can resume in the
middle. Nothing is parsed here: a chunk holds raw bytes, and the tokenizing processes extract the records.

    .txt .md                               the whole file is one document
    .jsonl .jsonl.gz .jsonl.xz .jsonl.zst  one record per line; .json.gz, .json.xz and .json.zst likewise
    .parquet                               one record per row
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from thoughtbubbles.data.compressed import DAMAGE, SUFFIXES, decompressed, extra
from thoughtbubbles.data.records import FIELDS
from thoughtbubbles.files import named, short_name

CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 256
LONGEST_LINE = 1 << 27  # bytes: a longer line is not a record, and would fill the memory

TEXT = (".txt", ".md")
LINES = (".jsonl", *(kind + suffix for suffix in SUFFIXES for kind in (".jsonl", ".json")))
PARQUET = (".parquet",)


class Chunk(NamedTuple):
    """Some raw records of one input."""

    input: int  # index of the input
    name: str  # for messages
    start: int  # number of the first record, from 0; in a file of lines, blank lines count
    stop: int  # start of the next chunk
    form: Literal["text", "lines", "rows", "records", "broken"]
    payload: Any
    read: int  # bytes of the input read so far, for the progress bar


class Named(NamedTuple):
    """A public dataset: its Hugging Face repository, and the files of its training split."""

    repository: str
    files: str | None = None  # None: as the repository defines its training split
    examples: bool = False


# Files are given if the repository has several variants, or a loading script, which `datasets` no longer supports.
NAMED = {
    "openwebtext": Named("Skylion007/openwebtext", "plain_text/train-*.parquet"),
    "pes2o": Named("allenai/peS2o", "data/v2/train-*.json.gz"),
    "fineweb": Named("HuggingFaceFW/fineweb", "sample/100BT/*.parquet"),
    "smoltalk": Named("HuggingFaceTB/smoltalk", "data/all/train-*.parquet", examples=True),
    "mmlu": Named("cais/mmlu", "auxiliary_train/train-*.parquet", examples=True),
    "gsm8k": Named("openai/gsm8k", "main/train-*.parquet", examples=True),
    "gsm8k-aug": Named("whynlp/gsm8k-aug", examples=True),
}


class Input(NamedTuple):
    """One file, or one named dataset."""

    name: str
    path: Path | None
    bytes: int


def find_inputs(sources: Sequence[str]) -> list[Input]:
    """The files and named datasets of the sources, in reading order."""
    if not sources:
        raise ValueError(f"no source: give files, folders or names ({', '.join(NAMED)})")
    return [found for source in sources for found in _find(source)]


def _find(source: str) -> list[Input]:
    path = Path(source)
    with named(path, "give a file or folder that can be read"):
        if path.is_dir():
            return _find_in_folder(path)
        if path.is_file():
            if not path.name.endswith((*TEXT, *LINES, *PARQUET)):
                raise ValueError(f"{short_name(path)}: unsupported file type; give {_kinds()}")
            return [Input(str(path), path, path.stat().st_size)]
    if source in NAMED:
        return [Input(source, None, 0)]
    raise ValueError(f"{short_name(source)} is not an existing file or folder, nor one of the names {', '.join(NAMED)}")


def _find_in_folder(folder: Path) -> list[Input]:
    """Data files, or text files if there are none: a README next to data files is not part of the data."""
    everything = [p for p in folder.rglob("*") if not any(part[0] == "." for part in p.relative_to(folder).parts)]
    for endings in ((*LINES, *PARQUET), TEXT):
        found = [p for p in everything if p.name.endswith(endings) and not p.is_dir()]
        if missing := next((p for p in found if not p.is_file()), None):
            raise ValueError(f"{short_name(missing)} is a broken link or not a file: fix or remove it")
        if found:
            found.sort(key=lambda p: p.relative_to(folder).parts)
            return [Input(str(p), p, p.stat().st_size) for p in found]
    raise ValueError(f"{short_name(folder)} has no file to read: give a folder with {_kinds()}")


def _kinds() -> str:
    return f"{', '.join((*TEXT, *LINES))} or {PARQUET[0]}"


def fingerprint(inputs: Iterable[Input]) -> str:
    """Changes when files are added, removed, or change their size."""
    listing = "\n".join(f"{found.name}\t{found.bytes}" for found in inputs)
    return hashlib.blake2b(listing.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def read_chunks(inputs: Sequence[Input], *, at: int = 0, start: int = 0) -> Iterator[Chunk]:
    """Everything from record `start` of input number `at` on. If reading fails, the last chunk has the error."""
    for number in range(at, len(inputs)):
        place = start if number == at else 0
        try:
            for chunk in _read(inputs[number], number, place):
                yield chunk
                place = chunk.stop
        except ValueError as error:
            yield Chunk(number, inputs[number].name, place, place, "broken", str(error), 0)
            return


def _read(found: Input, number: int, start: int) -> Iterator[Chunk]:
    path = found.path
    if path is None:
        yield from _read_named(found.name, number, start)
        return
    try:
        if path.name.endswith(TEXT):
            if not start:
                yield Chunk(number, found.name, 0, 1, "text", path.read_bytes(), found.bytes)
        elif path.name.endswith(LINES):
            yield from _read_lines(found, path, number, start)
        else:
            yield from _read_parquet(found, path, number, start)
    except EOFError:
        raise ValueError(
            f"{short_name(path)} ends in the middle of its compressed data: copy or download it again"
        ) from None
    except DAMAGE as error:
        raise ValueError(
            f"{short_name(path)} cannot be read ({one_line(error)}): check the file, or copy it again"
        ) from None


def _read_lines(found: Input, path: Path, number: int, start: int) -> Iterator[Chunk]:
    line = 0
    with path.open("rb") as raw:
        stream = decompressed(raw, path.suffix)
        while block := stream.read(CHUNK_BYTES):
            block += (rest := stream.readline(LONGEST_LINE))
            stop = line + block.count(b"\n") + (not block.endswith(b"\n"))
            if len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
                raise ValueError(
                    f"{short_name(path)}, line {stop}: longer than {LONGEST_LINE:,} bytes; give one record per line"
                )
            if stop > start:
                lines = block if line >= start else block.split(b"\n", start - line)[-1]
                yield Chunk(number, found.name, max(line, start), stop, "lines", lines, raw.tell())
            line = stop


def _read_parquet(found: Input, path: Path, number: int, start: int) -> Iterator[Chunk]:
    arrow = extra("pyarrow", "to read .parquet files")
    parquet = extra("pyarrow.parquet", "to read .parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in FIELDS] or names
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            row, first = 0, 0
            while first < len(groups) and row + groups[first] <= start:
                row, first = row + groups[first], first + 1
            whole = file.iter_batches(CHUNK_ROWS, row_groups=list(range(first, len(groups))), columns=columns)
            for rows in whole:
                stop = row + len(rows)
                if stop > start:
                    rows, row = rows.slice(max(start - row, 0)), max(start, row)
                    read = found.bytes * stop // max(sum(groups), 1)
                    yield Chunk(number, found.name, row, stop, "rows", _arrow_bytes(arrow, rows), read)
                row = stop
            if row != file.metadata.num_rows:
                raise OSError(f"it has {row} rows instead of {file.metadata.num_rows}")
    except Exception as error:  # a damaged file can make the package raise anything
        raise OSError(one_line(error)) from None


def _arrow_bytes(arrow: Any, rows: Any) -> bytes:
    """The rows with their schema, without the rest of the buffers that they are slices of."""
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return cast(bytes, sink.getvalue().to_pybytes())


def _read_named(name: str, number: int, start: int) -> Iterator[Chunk]:
    load = extra("datasets", f"to stream {name} from Hugging Face").load_dataset
    named = NAMED[name]
    try:
        if named.files is None:
            records = load(named.repository, split="train", streaming=True)
        else:
            builder = "parquet" if named.files.endswith(PARQUET) else "json"
            where = f"hf://datasets/{named.repository}/{named.files}"
            records = load(builder, data_files=where, split="train", streaming=True)
        kept: list[dict[str, Any]] = []
        stop = start
        for record in records.skip(start):
            kept.append({field: record[field] for field in record if field in FIELDS} or dict(record))
            stop += 1
            if len(kept) == CHUNK_ROWS:
                yield Chunk(number, name, stop - len(kept), stop, "records", kept, 0)
                kept = []
        if kept:
            yield Chunk(number, name, stop - len(kept), stop, "records", kept, 0)
    except Exception as error:  # the network and the libraries under `datasets` can raise anything
        raise ValueError(
            f"{name} cannot be read from Hugging Face ({type(error).__name__}: {one_line(error)}): run the same "
            f"command again to resume, or, for a machine without network, run `{download_command(name)}` elsewhere and "
            "give the folder instead of the name"
        ) from error


def download_command(name: str) -> str:
    """The command that downloads a named dataset into a folder of that name."""
    named = NAMED[name]
    include = f" --include '{named.files}'" if named.files else " --include '*train*'"
    return f"hf download {named.repository} --repo-type dataset{include} --local-dir {name}"


def one_line(error: Exception) -> str:
    """The message of an error, shortened and without the file name, which the caller adds."""
    strerror = error.strerror if isinstance(error, OSError) else None
    text = " ".join(str(strerror or error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:159] + "…"
