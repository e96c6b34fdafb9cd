"""Chains of modular arithmetic: the value of a variable that is defined by another, which is defined by another, …

    a=3,k=8,d=a+4,f=d*3,c=k-9;f1,c9.

Values are digits, all arithmetic is modulo 10. The definitions of several chains are mixed, each after what it needs;
then the last variable of each chain is asked for. The work is the number of operations.
"""

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some

OPERATIONS = "+-*"


def apply(value: int, operation: str, digit: int) -> int:
    found = {"+": value + digit, "-": value - digit, "*": value * digit}[operation]
    return found % 10


@dataclass(frozen=True, kw_only=True)
class Chains(Variant):
    chains: tuple[int, int] = (1, 3)
    operations: tuple[int, int] = (1, 5)

    def make(self, random: Random) -> Example:
        depths = [some(random, self.operations) for _ in range(some(random, self.chains))]
        names = iter(random.sample(ascii_lowercase, sum(depths) + len(depths)))
        waiting, last, values = [], [], []
        for depth in depths:
            name, value = next(names), random.randrange(10)
            lines = [f"{name}={value}"]
            for _ in range(depth):
                # A product with 0, 2, 4, 5, 6 or 8 would make what came before partly or wholly irrelevant.
                operation = random.choice(OPERATIONS)
                digit = random.choice((3, 7, 9)) if operation == "*" else random.randrange(1, 10)
                before, name, value = name, next(names), apply(value, operation, digit)
                lines.append(f"{name}={before}{operation}{digit}")
            waiting.append(lines)
            last.append(name)
            values.append(value)
        writer = Writer()
        writer.say(",".join(_mixed(random, waiting)) + ";")
        order = random.sample(range(len(depths)), len(depths))
        for place, chain in enumerate(order):
            writer.say(last[chain])
            writer.answer(str(values[chain]), work=depths[chain])
            writer.say("." if place == len(order) - 1 else ",")
        return writer.example()

    @property
    def work(self) -> range:
        return range(self.operations[0], self.operations[1] + 1)


def _mixed(random: Random, lists: list[list[str]]) -> list[str]:
    """All lines, those of each list in order."""
    turns = [number for number, lines in enumerate(lists) for _ in lines]
    random.shuffle(turns)
    rest = [iter(lines) for lines in lists]
    return [next(rest[number]) for number in turns]


CHAIN = Task(
    name="chain",
    what="variables defined by others, modulo 10",
    splits={
        "train": Chains(),
        "deeper": Chains(chains=(1, 2), operations=(6, 8)),
        "longer": Chains(chains=(4, 4)),
    },
    block_size=152,
    is_forced=False,
    chance=lambda work: 1 / 10,
)
