"""The studies on a corpus: each wraps a text protocol."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from thoughtbubbles.data.shards import read_index
from thoughtbubbles.evals.documents import data_folder, find_files
from thoughtbubbles.evals.settings import ZERO_SHOT
from thoughtbubbles.evals.tasks import TASKS
from thoughtbubbles.recipes.reproduce.parts import Protocol
from thoughtbubbles.recipes.reproduce.records import nats, read_protocol
from thoughtbubbles.recipes.reproduce.row import check_text, compare, make_record, text_of
from thoughtbubbles.recipes.reproduce.study import Place, Record, Study


class TextStudy(Study):
    result = "validation loss"
    has_own_data = False

    def __init__(self, name: str, protocol: Protocol):
        self.name, self.protocol = name, protocol
        self.what, self.rows = protocol.what, protocol.rows

    def check(self, chosen: Sequence[tuple[str, int]], place: Place) -> None:
        """The texts and benchmarks are opened, and fit each other."""
        corpus = text_of(self.protocol, place)
        check_text(place, corpus)
        for name, folder in place.sources.items():
            index = read_index(folder)
            if index.tokenizer != corpus.tokenizer:
                raise ValueError(
                    f"--val {name}={folder}: made with tokenizer {index.tokenizer!r}, --data with "
                    f"{corpus.tokenizer!r}; prepare both with the same one"
                )
        evaluated = sorted({row for row, _ in chosen if self.protocol.rows[row].zero_shot})
        if evaluated and place.data_dir is not None:
            for task in ZERO_SHOT:
                find_files(TASKS[task], data_folder(place.data_dir))
        elif evaluated:
            print(f"no --data-dir: {', '.join(evaluated)} will not be evaluated on the benchmarks", file=sys.stderr)

    def is_built_on_others(self, row: str) -> bool:
        return self.protocol.rows[row].ensemble > 1

    def make_record(self, row: str, seed: int, place: Place) -> Record:
        return make_record(self.protocol, row, seed, place)

    def done(self, out: Path) -> Mapping[str, Mapping[int, str]]:
        found = read_protocol(out, self.name).rows
        return {row: {seed: f"{nats(record):.4f}" for seed, record in seeds.items()} for row, seeds in found.items()}

    def compare(self, before: Record, again: Record) -> tuple[bool, str]:
        return compare(before, again)
