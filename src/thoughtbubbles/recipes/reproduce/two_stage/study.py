"""Runs the rows of `reproduce two-stage`: both stages of a model, one after the other, in one process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thoughtbubbles.data.tokenizer import saved_tokenizer
from thoughtbubbles.evals.documents import data_folder, open_benchmark
from thoughtbubbles.evals.evaluate import check_lengths
from thoughtbubbles.evals.tasks import TASKS as BENCHMARKS
from thoughtbubbles.recipes.reproduce.corpus import Corpus, open_corpus
from thoughtbubbles.recipes.reproduce.row import check_text
from thoughtbubbles.recipes.reproduce.study import Place, Record, Study
from thoughtbubbles.recipes.reproduce.two_stage.mixture import mixture_of
from thoughtbubbles.recipes.reproduce.two_stage.protocol import ROWS, SUBSTITUTION, MixturePart, TwoStage, text_part
from thoughtbubbles.recipes.reproduce.two_stage.records import NAME, STAGES, percent, read_two_stage
from thoughtbubbles.recipes.reproduce.two_stage.stage import TASKS, Measured, Start, run_stage

VERSION = 1


class TwoStageStudy(Study):
    name = NAME
    what = "the paper's two stages in small: constant learning rate on text, then decay on a mixture with instructions"
    result = "GSM8K exact match"
    has_own_data = False
    trains_on_benchmarks = True

    def __init__(self, protocol: TwoStage | None = None) -> None:
        self.protocol = protocol or TwoStage()
        self.rows = ROWS

    def check(self, chosen: Sequence[tuple[str, int]], place: Place) -> None:
        """The corpus, the questions of the mixture and the benchmarks are opened, and fit the model."""
        if place.sources:
            names = " ".join(f"{name}={folder}" for name, folder in place.sources.items())
            raise ValueError(f"--val {names}: {NAME} measures the corpus's own validation text; leave --val out")
        corpus = self._corpus(place)
        questions = data_folder(place.data_dir)
        words = saved_tokenizer(corpus.tokenizer, corpus.folder)
        for task in TASKS:
            benchmark = open_benchmark(BENCHMARKS[task], questions, limit=self.protocol.limit)
            check_lengths(benchmark, words, block_size=self.protocol.model.block_size)
        check_text(place, corpus)
        self._check_questions(place, mixture_of(corpus, questions, place.runs / NAME))

    def make_record(self, row: str, seed: int, place: Place) -> Record:
        corpus, questions = self._corpus(place), data_folder(place.data_dir)
        mixture = mixture_of(corpus, questions, place.runs / NAME)
        on = Measured(corpus=corpus, questions=questions, limit=self.protocol.limit)
        home, text = place.run(row, seed), (text_part(corpus, 1.0),)
        first = self.protocol.config("one", row, seed, corpus=corpus, mixture=text, out=home / "one")
        one = run_stage(first, text, on)
        second = self.protocol.config("two", row, seed, corpus=corpus, mixture=mixture, out=home / "two")
        two = run_stage(second, mixture, on, start=Start(home / "one", one["weights"]))
        return {
            "version": VERSION,
            "protocol": NAME,
            "row": row,
            "seed": seed,
            "what": ROWS[row].what,
            **{name: one[name] + two[name] for name in ("steps", "tokens", "flops", "wall_seconds")},
            "skipped_steps": sum(stage.get("skipped_steps", 0) for stage in (one, two)),
            **{name: two[name] for name in ("parameters", "device", "commit", "versions", "time")},
            "resumed_at": one["resumed_at"] if two["resumed_at"] is None else two["resumed_at"],
            "command": f"thoughtbubbles reproduce {NAME} --data CORPUS --data-dir DIR --only {row} --seed {seed}",
            "text": {"tokens": corpus.n_tokens, "tokenizer": corpus.tokenizer, "checksum": corpus.checksum},
            "substitution": SUBSTITUTION,
            "one": one,
            "two": two,
        }

    def done(self, out: Path) -> Mapping[str, Mapping[int, str]]:
        return {
            row: {seed: f"{percent(record['two'], 'gsm8k')} %" for seed, record in seeds.items()}
            for row, seeds in read_two_stage(out).items()
        }

    def compare(self, before: Record, again: Record) -> tuple[bool, str]:
        name = f"{before['row']}, seed {before['seed']}"
        if all(_numbers(before[stage]) == _numbers(again[stage]) for stage in STAGES):
            return True, f"{name}: the same training losses, validation losses and accuracies again, to the bit"
        old, new = (record["two"]["validation"]["nats"] for record in (before, again))
        return False, f"{name}: validation loss {new!r} after stage two, was {old!r} (then on {before['device']})"

    def _corpus(self, place: Place) -> Corpus:
        assert place.data is not None, "the command asks for it"
        return open_corpus(place.data)

    def _check_questions(self, place: Place, mixture: Sequence[MixturePart]) -> None:
        """Records of other questions in the same folder could never be compared with this one."""
        ours = {part.name: part.as_dict() for part in mixture}
        for row, seeds in read_two_stage(place.out).items():
            for seed, record in seeds.items():
                if record["two"]["data"] != ours:
                    raise ValueError(
                        f"--out {place.out}: {NAME}/{row}-seed{seed}.json is a record of another mixture than that of "
                        f"--data-dir {place.data_dir}; give another --out"
                    )


def _numbers(stage: Record) -> dict[str, Any]:
    return {name: stage[name] for name in ("training_loss", "validation", "forks", "benchmarks")}
