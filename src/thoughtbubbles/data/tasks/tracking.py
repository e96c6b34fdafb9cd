"""State tracking: what is the state after these moves?

    parity    011?e100?o    after each "?": is the number of ones so far even or odd? The answer before is known, so the
                            work is the number of bits since then
    permute   >13>25=ceadb  five cups hold a b c d e; ">13" exchanges cups 1 and 3; after "=" comes what they hold. The
                            work is the number of moves, of which about two in five touch what a cup holds in the end.
                            What the last two cups hold follows from the others, and from whether the number of moves
                            is odd: these are easy

Both can be solved one move at a time by a recurrent state, which a transformer does not have: it has to combine the
moves within its layers.
"""

from dataclasses import dataclass
from random import Random

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some

CUPS, HARD_CUPS = "abcde", 3


@dataclass(frozen=True, kw_only=True)
class Parity(Variant):
    bits: tuple[int, int] = (1, 8)
    """Between two questions."""
    questions: int = 8

    def make(self, random: Random) -> Example:
        writer, ones = Writer(), 0
        for _ in range(self.questions):
            bits = [random.randrange(2) for _ in range(some(random, self.bits))]
            ones += sum(bits)
            writer.say("".join(map(str, bits)) + "?")
            writer.answer("eo"[ones % 2], work=len(bits))
        return writer.example()

    @property
    def work(self) -> range:
        return range(self.bits[0], self.bits[1] + 1)


@dataclass(frozen=True, kw_only=True)
class Permute(Variant):
    moves: tuple[int, int] = (3, 12)

    def make(self, random: Random) -> Example:
        writer, cups = Writer(), list(CUPS)
        moves = some(random, self.moves)
        for _ in range(moves):
            i, j = sorted(random.sample(range(len(cups)), 2))
            cups[i], cups[j] = cups[j], cups[i]
            writer.say(f">{i + 1}{j + 1}")
        writer.say("=")
        for held in cups[:HARD_CUPS]:
            writer.answer(held, work=moves)
        writer.answer("".join(cups[HARD_CUPS:]), work=0)
        return writer.example()

    @property
    def work(self) -> range:
        return range(self.moves[0], self.moves[1] + 1)


PARITY = Task(
    name="parity",
    what="is the number of ones so far even or odd?",
    splits={"train": Parity(), "deeper": Parity(bits=(9, 12)), "longer": Parity(questions=12)},
    block_size=128,
    is_forced=False,
    chance=lambda work: 1 / 2,
)
PERMUTE = Task(
    name="permute",
    what="what is in five cups after several exchanges?",
    splits={"train": Permute(), "deeper": Permute(moves=(13, 18))},
    block_size=64,
    is_forced=False,
    chance=lambda work: (1 / 5 + 1 / 4 + 1 / 3) / HARD_CUPS,
)
