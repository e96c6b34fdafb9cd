"""Ancestors: who is a person's parent, grandparent, …, if each was only introduced as somebody's child?

    .KkC.McXmA.RxZ;1Am3Zk2Xk1Ck

"kC" introduces C, a child of K; who has a dot for a parent begins a family. There are three families, one child per
parent, and children of all of them mixed. "3Z" asks for the third ancestor of Z: x, c, k. The work is the number of
steps from child to parent. Where a step leads is only known when the one before is done, and the order of the
introductions tells little: who knows that alone is right about a quarter of the time.

A child is uppercase and a parent lowercase, so that no token is both.
"""

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some

FAMILIES = 3


@dataclass(frozen=True, kw_only=True)
class Ancestors(Variant):
    people: tuple[int, int] = (12, 18)
    generations: tuple[int, int] = (1, 6)
    """That a question goes back. Everybody with so many ancestors is asked for once."""

    def make(self, random: Random) -> Example:
        least, most = self.generations
        ancestors: dict[str, str] = {}  # of each person: parent, grandparent, …
        while max(map(len, ancestors.values()), default=0) < least:
            ancestors = _families(random, some(random, self.people))
        writer = Writer()
        writer.say("".join((line[:1] or ".") + name.upper() for name, line in ancestors.items()) + ";")
        asked = [name for name, line in ancestors.items() if len(line) >= least]
        for name in random.sample(asked, len(asked)):
            back = some(random, (least, min(most, len(ancestors[name]))))
            writer.say(f"{back}{name.upper()}")
            writer.answer(ancestors[name][back - 1], work=back)
        return writer.example()

    @property
    def work(self) -> range:
        return range(self.generations[0], self.generations[1] + 1)


def _families(random: Random, people: int) -> dict[str, str]:
    ancestors: dict[str, str] = {}
    youngest = [""] * FAMILIES
    for name in random.sample(ascii_lowercase, people):
        family = random.randrange(FAMILIES)
        parent = youngest[family]
        ancestors[name] = parent + ancestors.get(parent, "")
        youngest[family] = name
    return ancestors


ANCESTORS = Task(
    name="ancestors",
    what="who is the k-th ancestor, if everybody's parent is known?",
    splits={
        "train": Ancestors(),
        "deeper": Ancestors(people=(23, 26), generations=(7, 9)),
        "longer": Ancestors(people=(20, 22)),
    },
    block_size=112,
    is_forced=False,
    chance=lambda work: 0.35 if work == 1 else 0.25,  # of the likeliest place; a test measures it
)
