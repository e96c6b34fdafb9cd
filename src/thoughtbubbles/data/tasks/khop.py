"""k hops: how are two people related, if only the relations along a chain of others are known?

    Mi is To's ral. Ka is Wu's sek. To is Se's tov. Mi is Se's sek.

Relations are made up. They are the ways to arrange three things (the permutations of three), and combine as those do:
if A is B's x and B is C's y, then A is C's "x, then y". Facts have five of them; the sixth, min, changes nothing, and
is only an answer. Facts come in random order, between facts about other people. The work of an answer is the number of
relations to combine. Their order matters, but not always: who knows which relations are on the way, but not in which
order, can get 64 %, 58 % and 48 % of the answers with 2, 3 and 4 hops right.
"""

from dataclasses import dataclass
from itertools import pairwise, permutations, product
from random import Random

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some

WORDS = dict(zip(permutations(range(3)), ("min", "ral", "tov", "sek", "pul", "dar"), strict=True))
GIVEN = [relation for relation, word in WORDS.items() if word != "min"]
SYLLABLES = [first + second for first, second in product("BDFGHJKLMNPRSTVWZ", "aeiou")]
UNSEEN = SYLLABLES[2::6]  # every sixth name, so all letters are known from other names
SEEN = [name for name in SYLLABLES if name not in UNSEEN]

Relation = tuple[int, ...]


def combine(first: Relation, second: Relation) -> Relation:
    """What A is to C, if A is `first` to B and B is `second` to C."""
    return tuple(second[place] for place in first)


@dataclass(frozen=True, kw_only=True)
class Hops(Variant):
    hops: tuple[int, int] = (1, 4)
    others: tuple[int, int] = (1, 3)
    """Facts that are not on the way."""
    names: tuple[str, ...] = tuple(SEEN)

    def make(self, random: Random) -> Example:
        hops, others = some(random, self.hops), some(random, self.others)
        people = random.sample(self.names, hops + 1 + 2 * others)
        chain, rest = people[: hops + 1], people[hops + 1 :]
        pairs = [*pairwise(chain), *zip(rest[::2], rest[1::2], strict=True)]
        facts = [(a, b, random.choice(GIVEN)) for a, b in pairs]
        answer = facts[0][2]
        for _, _, relation in facts[1:hops]:
            answer = combine(answer, relation)
        random.shuffle(facts)
        writer = Writer()
        for a, b, relation in facts:
            writer.say(f"{a} is {b}'s {WORDS[relation]}. ")
        writer.say(f"{chain[0]} is {chain[-1]}'s ")
        writer.answer(f"{WORDS[answer]}.", work=hops)
        return writer.example()

    @property
    def work(self) -> range:
        return range(self.hops[0], self.hops[1] + 1)


KHOP = Task(
    name="khop",
    what="relations along a chain of people, to be combined",
    splits={
        "train": Hops(),
        "deeper": Hops(hops=(5, 7)),
        "longer": Hops(others=(6, 9)),
        "names": Hops(names=tuple(UNSEEN)),
    },
    block_size=232,
    is_forced=True,
    chance=lambda work: 1 / len(WORDS),
)
