"""Ancestors: who is a person's grandparent, great-grandparent, …, if each was only introduced as somebody's child?

    K.CkX.McAm;1Mc1Am1Ck1Am1Ck1Mc3Ak2Mk

"Ck" introduces C, a child of K; who has a dot for a parent begins a family. There are two families, one child per
parent, and children of both mixed. First everybody is asked for their parent, twice ("1M" is c): one look-up, which is
easy, and which small models only learn if there is much of it. Then "3A" asks for the third ancestor of A: m, c, k. The
work is the number of steps from child to parent, from two on. Where a step leads is only known when the one before is
done, and the order of the introductions tells little.

A child is uppercase and a parent lowercase, so that no token is both.
"""

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some

FAMILIES = 2
ROUNDS = 2  # of questions for parents


@dataclass(frozen=True, kw_only=True)
class Ancestors(Variant):
    people: tuple[int, int] = (9, 13)
    generations: tuple[int, int] = (2, 5)
    """That a question goes back. Everybody with so many ancestors is asked for once."""

    def make(self, random: Random) -> Example:
        ancestors: dict[str, str] = {}  # of each person: parent, grandparent, …
        while max(map(len, ancestors.values()), default=0) < self.generations[0]:
            ancestors = _families(random, some(random, self.people))
        writer = Writer()
        writer.say("".join(name.upper() + (line[:1] or ".") for name, line in ancestors.items()) + ";")
        for least, most in [(1, 1)] * ROUNDS + [self.generations]:
            asked = [name for name, line in ancestors.items() if len(line) >= least]
            for name in random.sample(asked, len(asked)):
                back = some(random, (least, min(most, len(ancestors[name]))))
                writer.say(f"{back}{name.upper()}")
                writer.answer(ancestors[name][back - 1], work=back if back > 1 else 0)
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
        "deeper": Ancestors(people=(16, 18), generations=(6, 8)),
        "longer": Ancestors(people=(15, 17)),
    },
    block_size=168,
    is_forced=False,
    chance=lambda work: 0.33,  # of the likeliest place; a test measures it
)
