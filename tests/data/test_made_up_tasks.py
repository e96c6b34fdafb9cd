"""Made-up tasks: every answer is worked out again from the text alone, by another method than the generator's."""

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from thoughtbubbles.data.loader import IGNORED, Loader, Source, ValidationSet
from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.tasks import TASKS, task_named
from thoughtbubbles.data.tasks import task as task_module
from thoughtbubbles.data.tasks.khop import SEEN, UNSEEN
from thoughtbubbles.data.tasks.task import VERSION, Example, Variant, Writer, is_validation, write_task

END = 256
SPLITS = [(name, split) for name, task in TASKS.items() for split in (*task.splits, "val")]
GOLDEN = (
    3,
    {
        "khop": 1293746771,
        "lookups": 428486216,
        "parity": 1146552745,
        "permute": 1135319217,
        "chain": 743629042,
        "circle": 700068372,
        "copy": 1380330398,
    },
)
Solved = list[tuple[int, str, int]]  # where an answer begins, the answer, its work


def some_of(name: str, split: str, *, n: int = 300, seed: int = 5) -> list[Example]:
    return list(islice(TASKS[name].examples(split, seed=seed), n))


def khop(text: str) -> Solved:
    """Relations as permutation matrices, people as a graph that is searched from the second person backwards."""
    orders = {"min": "abc", "ral": "acb", "tov": "bac", "sek": "bca", "pul": "cab", "dar": "cba"}
    matrix = {word: np.array([[x == y for y in "abc"] for x in order], dtype=int) for word, order in orders.items()}
    sentences = re.findall(r"(\w+) is (\w+)'s (\w+)\.", text)
    (first, last, _), facts = sentences[-1], sentences[:-1]
    known = {last: (np.eye(3, dtype=int), 0)}
    while first not in known:
        before = len(known)
        for a, b, word in facts:
            if b in known and a not in known:
                known[a] = (matrix[word] @ known[b][0], known[b][1] + 1)
        assert len(known) > before, f"no way from {first} to {last}: {text}"
    found, hops = known[first]
    (word,) = [word for word in matrix if np.array_equal(matrix[word], found)]
    return [(len(text) - 4, f"{word}.", hops)]


def lookups(text: str) -> Solved:
    symbols = "!#$%&()*+-/;<=>?@[]^_{}~,.'06789"
    memory, questions = text.split(":")
    bit = {letter.lower(): "1" if letter.isupper() else "0" for letter in memory}
    found = []
    for at in range(0, len(questions), 3):
        m, letter = int(questions[at]), questions[at + 1]
        letters = [chr(97 + (ord(letter) - 97 + i) % 26) for i in range(m)]
        found.append((len(memory) + 1 + at + 2, symbols[int("".join(bit[each] for each in letters), 2)], m))
    return found


def parity(text: str) -> Solved:
    found, bits = [], ""
    for part in re.finditer(r"([01]+)\?([eo])", text):
        bits += part[1]
        found.append((part.start(2), "o" if len(bits.replace("0", "")) % 2 else "e", len(part[1])))
    return found


def permute(text: str) -> Solved:
    """Backwards: where did the thing in this cup come from?"""
    given, _, held = text.partition("=")
    moves = re.findall(r">(\d)(\d)", given)
    found = []
    for place in range(len(held)):
        cup = str(place + 1)
        for a, b in reversed(moves):
            cup = {a: b, b: a}.get(cup, cup)
        found.append((len(given) + 1 + place, "abcde"[int(cup) - 1], len(moves) if place < 3 else 0))
    return found


def chain(text: str) -> Solved:
    """Definitions are put into each other until only digits are left, and Python computes without remainders."""
    given, questions = text.split(";")
    defined = dict(line.split("=") for line in given.split(","))

    def whole(name: str) -> str:
        rest = defined[name]
        return f"({whole(rest[0])}{rest[1:]})" if rest[0].isalpha() else rest

    return [
        (len(given) + 1 + at, str(eval(whole(name)) % 10), whole(name).count("("))
        for at, name in [(match.start(2), match[1]) for match in re.finditer(r"([a-z])(\d)", questions)]
    ]


def circle(text: str) -> Solved:
    """From the introductions alone, place by place; the round has to agree with them."""
    given, walk, questions = text.split(";")
    after = dict(zip(given[::2].lower(), given[1::2], strict=True))
    start, _, seen = walk.partition(">")
    at = len(given) + 1 + len(start) + 1
    found: Solved = [(at, seen, 0)]
    for before, letter in zip(start.lower() + seen, seen, strict=False):
        assert after[before] == letter, text
    assert sorted(seen) == sorted(after)
    for question in re.finditer(r"(\d)(.)=(.)", questions):
        person = question[2].lower()
        for _ in range(int(question[1])):
            person = after[person]
        found.append((at + len(seen) + 1 + question.start(3), person, int(question[1])))
    return found


def copy(text: str) -> Solved:
    first, bar, _ = text.partition("|")
    return [(len(first + bar), first, 0)]


SOLVERS: dict[str, Callable[[str], Solved]] = {
    "khop": khop,
    "lookups": lookups,
    "parity": parity,
    "permute": permute,
    "chain": chain,
    "circle": circle,
    "copy": copy,
}


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_answers_and_work_are_right(name: str, split: str):
    for example in some_of(name, split):
        counts, work = [False] * len(example.text), [0] * len(example.text)
        for at, answer, steps in SOLVERS[name](example.text):
            assert example.text[at : at + len(answer)] == answer, example.text
            counts[at : at + len(answer)] = [True] * len(answer)
            work[at] = steps
        assert example.counts == tuple(counts)
        assert example.work == tuple(work)
        assert example.hard == {at - 1: steps for at, steps in enumerate(work) if steps}


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_work_is_as_stated_and_all_of_it_occurs(name: str, split: str):
    stated = TASKS[name].variant(split).work
    found = {steps for example in some_of(name, split) for steps in example.hard.values()}
    assert found == set(stated)


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_the_longest_example_fits(name: str, split: str):
    """With every limit at its upper end."""
    variant: Variant = TASKS[name].variant(split)
    ends: dict[str, Any] = {field.name: getattr(variant, field.name) for field in fields(variant)}  # type: ignore[arg-type]
    ends = {k: (v[1], v[1]) if isinstance(v, tuple) and isinstance(v[0], int) else v for k, v in ends.items()}
    longest: Variant = replace(variant, **ends)  # type: ignore[type-var]
    sizes = [len(longest.make(Random(i)).tokens) for i in range(200)]
    assert max(sizes) - 1 <= TASKS[name].block_size  # end-of-text is only a target


def test_splits_are_disjoint():
    for name, task in TASKS.items():
        texts = {split: {example.text for example in some_of(name, split)} for split in (*task.splits, "val")}
        for split in texts.keys() - {"train"}:
            assert not texts["train"] & texts[split], (name, split)
        assert all(map(is_validation, texts["val"]))
        assert not any(map(is_validation, texts["train"]))


def test_held_out_splits_differ_in_structure():
    for name, task in TASKS.items():
        train = some_of(name, "train")
        if "deeper" in task.splits:
            hardest = max(max(example.work) for example in train)
            assert min(min(filter(None, example.work)) for example in some_of(name, "deeper")) > hardest
        if "longer" in task.splits:
            sizes = [[len(example.text) for example in each] for each in (train, some_of(name, "longer"))]
            assert np.median(sizes[1]) > np.quantile(sizes[0], 0.95)
    assert not set(SEEN) & set(UNSEEN)
    assert {letter for name in UNSEEN for letter in name} <= {letter for name in SEEN for letter in name}
    for split, names in (("train", SEEN), ("names", UNSEEN)):
        text = " ".join(example.text for example in some_of("khop", split))
        assert set(re.findall(r"[A-Z]\w", text)) == set(names)


def test_khop_needs_every_fact_of_the_way():
    """Without any one of them, the two people are not connected."""
    for example in some_of("khop", "train", n=100):
        *facts, question = re.findall(r"\w+ is \w+'s \w+\.", example.text)
        needed = 0
        for left_out in range(len(facts)):
            try:
                khop(" ".join([*facts[:left_out], *facts[left_out + 1 :], question]))
            except AssertionError:
                needed += 1
        assert needed == max(example.work)


def test_every_letter_is_asked_for_once():
    """So no answer helps with another."""
    for split in ("train", "longer"):
        for example in some_of("lookups", split):
            memory, _, questions = example.text.partition(":")
            asked = [
                chr(97 + (ord(letter) - 97 + i) % 26)
                for m, letter, _ in re.findall(r"(.)(.)(.)", questions)
                for i in range(int(m))
            ]
            assert sorted(asked) == sorted(memory.lower())


def test_nobody_in_the_circle_is_likelier_than_another():
    """Whatever the places to go on: counted from the beginning of the round, and from that of the introductions."""
    for split, sizes in (("train", range(6, 10)), ("longer", range(10, 12))):
        found: dict[tuple[int, str, str], Counter[int]] = {}
        right, n_asked = 0.0, 0
        for example in some_of("circle", split, n=1500):
            given, walk, questions = example.text.split(";")
            n, asked = len(given) // 2, re.findall(r"(.)(.)=(.)", questions)
            assert sorted(name for _, name, _ in asked) == sorted(given[::2])  # each once
            right, n_asked = right + n / (n - 1), n_asked + n
            for places, name, answer in asked:
                assert answer != name.lower()
                found.setdefault((n, places, "round"), Counter())[walk.index(answer) - 2] += 1
                found.setdefault((n, places, "introduced"), Counter())[given[1::2].index(answer)] += 1
        assert {n for n, _, _ in found} == set(sizes)
        for (n, _, _), counts in found.items():
            total = counts.total()
            assert counts.most_common(1)[0][1] < total / n + 4 * (total / n) ** 0.5
        assert TASKS["circle"].guess(split, 1) == pytest.approx(right / n_asked, abs=1e-3)


def test_examples_are_the_same_however_many_processes_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(task_module, "PART", 64)
    task, n = TASKS["circle"], 200
    for processes in (1, 2):
        write_task(tmp_path / str(processes), task, n_examples=n, seed=3, processes=processes)
    alone, together = (open_dataset(tmp_path / str(n), split="train").shards for n in (1, 2))
    assert [shard.tokens.tobytes() for shard in alone] == [shard.tokens.tobytes() for shard in together]
    assert alone[0].tokens.size == sum(len(example.tokens) for example in islice(task.examples("train", seed=3), n))


@dataclass(frozen=True)
class Fatal(Variant):
    """Ends any process that makes an example of it, but the one that it was made in."""

    safe: int

    def make(self, random: Random) -> Example:
        if os.getpid() != self.safe:
            os._exit(1)
        return Example(random.choice("abcdef"), (True,), (1,))

    @property
    def work(self) -> range:
        return range(1, 2)


def test_a_process_that_dies_is_reported_and_leaves_nothing(tmp_path: Path):
    task = replace(TASKS["copy"], splits={"train": Fatal(os.getpid())})
    with pytest.raises(ValueError, match=r"data: a process that makes examples died, .*: run it again"):
        write_task(tmp_path / "data", task, n_examples=10, seed=3, processes=2)
    assert list(tmp_path.iterdir()) == []
    write_task(tmp_path / "data", task, n_examples=10, seed=3)


def test_the_last_two_cups_follow_from_the_others():
    """From what is left over, and from whether the number of moves is odd."""
    for example in some_of("permute", "train"):
        given, _, held = example.text.partition("=")
        rest = sorted(set("abcde") - set(held[:3]))
        is_odd = given.count(">") % 2
        for last in (rest, rest[::-1]):
            order = [*held[:3], *last]
            inversions = sum(order[i] > order[j] for i in range(5) for j in range(i + 1, 5))
            if inversions % 2 == is_odd:
                assert "".join(last) == held[3:]


def test_what_is_given_in_khop_changes_something():
    text = " ".join(example.text for example in some_of("khop", "train"))
    facts = re.findall(r"'s (\w+)\. (?=\w+ is \w+'s \w+\.)", text)
    assert set(facts) >= {"ral", "tov", "sek", "pul", "dar"}
    for example in some_of("khop", "train"):
        *facts, _ = re.findall(r"'s (\w+)\.", example.text)
        assert "min" not in facts


def test_nothing_beats_chance_without_the_text():
    """For each amount of work, the most frequent answer is about as frequent as `chance` says."""
    for name, task in TASKS.items():
        firsts: dict[int, list[str]] = {}
        for example in some_of(name, "train", n=1000):
            for at, work in (example.hard or {example.text.index("|"): 0}).items():
                firsts.setdefault(work, []).append(example.text[at + 1])
        for work, found in firsts.items():
            if name == "permute":  # the first of three cups, after enough moves to forget what was in it
                if work < 8:
                    continue
                found = found[::3]
            share = max(found.count(each) for each in set(found)) / len(found)
            chance = 0.2 if name == "permute" else task.guess("train", work)
            assert share < chance + 4 * (chance / len(found)) ** 0.5, (name, work)


def test_the_same_texts_on_every_machine():
    found = {
        name: zlib.crc32("\n".join(e.text for s in (*task.splits, "val") for e in some_of(name, s, n=20)).encode())
        for name, task in TASKS.items()
    }
    assert (VERSION, found) == GOLDEN  # other texts need another VERSION, or old folders would be used for new tasks


def test_seeds_differ_and_repeat():
    assert some_of("khop", "train", seed=1) == some_of("khop", "train", seed=1)
    assert not {e.text for e in some_of("lookups", "train", seed=1)} & {
        e.text for e in some_of("lookups", "train", seed=2)
    }


def test_a_writer_marks_the_first_character_of_an_answer():
    writer = Writer()
    writer.say("ab")
    writer.answer("cd", work=3)
    assert writer.example() == Example("abcd", (False, False, True, True), (0, 0, 3, 0))
    assert writer.example().hard == {1: 3}
    assert writer.example().tokens.tolist() == [97, 98, 99, 100, END]
    assert writer.example().mask.tolist() == [False, False, True, True, True]


def test_a_written_folder_is_what_training_reads(tmp_path: Path):
    task = TASKS["chain"]
    write_task(tmp_path / "data", task, n_examples=50, seed=3)
    expected = list(islice(task.examples("train", seed=3), 50))
    loader = Loader([Source(tmp_path / "data")], rows=50, n_tokens=task.block_size, seed=0)
    batch = loader.batch(0)
    read = sorted(bytes(ids[:n].tolist()).decode() for ids, n in zip(batch.ids, batch.lengths.tolist(), strict=True))
    assert read == sorted(example.text for example in expected)  # each once
    by_text = {example.text: example for example in expected}
    for ids, targets, n in zip(batch.ids, batch.targets, batch.lengths.tolist(), strict=True):
        example = by_text[bytes(ids[:n].tolist()).decode()]
        wanted = [ord(c) if counts else IGNORED for c, counts in zip(example.text, example.counts, strict=True)]
        assert targets[:n].tolist() == [*wanted[1:], END]
        assert (targets[n:] == IGNORED).all()
    assert len(open_dataset(tmp_path / "data", split="val").shards[0].offsets) - 1 == 512
    ValidationSet([Source(tmp_path / "data")], rows=4, n_tokens=task.block_size, max_tokens=100)


def test_a_folder_is_written_once_and_never_replaced(tmp_path: Path):
    task = TASKS["copy"]
    write_task(tmp_path / "data", task, n_examples=10, seed=3)
    before = (tmp_path / "data" / "train-00000.bin").stat().st_mtime_ns
    write_task(tmp_path / "data", task, n_examples=10, seed=3)
    assert (tmp_path / "data" / "train-00000.bin").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="Remove this folder, or give another"):
        write_task(tmp_path / "data", task, n_examples=10, seed=4)


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match="task:khopp: no task has this name; did you mean khop"):
        task_named("khopp")
