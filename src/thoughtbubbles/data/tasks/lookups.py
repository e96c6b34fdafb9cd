"""Several look-ups at once: an answer that depends on m places, all of which a single token has to find.

    c+a-f+b-e+d+:3bD2eD…

Each letter of a stretch of the alphabet (which may run from z on to a) has a sign, in random order. "3b" asks for the
signs of three letters from b on, b c d, as one number in binary with + as 1, written as one of 32 symbols: - + + is 3,
the symbol D. There is nothing to compute but the look-ups, so their number m is the work; m beyond the number of heads
is more than one block can fetch for one stream.
"""

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase, ascii_uppercase

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some

SYMBOLS = ascii_uppercase + "!#$%&*"  # of 0 … 31; no symbol is used for anything else
MOST = 5  # signs in a symbol


@dataclass(frozen=True, kw_only=True)
class Lookups(Variant):
    pairs: tuple[int, int] = (8, 14)
    questions: int = 8
    places: tuple[int, int] = (1, MOST)

    def make(self, random: Random) -> Example:
        n, first = some(random, self.pairs), random.randrange(26)
        letters = [ascii_lowercase[(first + i) % 26] for i in range(n)]
        bits = {letter: random.randrange(2) for letter in letters}
        shown = random.sample(letters, n)
        writer = Writer()
        writer.say("".join(f"{letter}{'-+'[bits[letter]]}" for letter in shown) + ":")
        asked: set[tuple[int, int]] = set()
        while len(asked) < self.questions:
            m = some(random, self.places)
            at = random.randrange(n - m + 1)
            if (m, at) in asked:  # its answer could be copied
                continue
            asked.add((m, at))
            number = 0
            for letter in letters[at : at + m]:
                number = 2 * number + bits[letter]
            writer.say(f"{m}{letters[at]}")
            writer.answer(SYMBOLS[number], work=m)
        return writer.example()

    @property
    def work(self) -> range:
        return range(self.places[0], self.places[1] + 1)


LOOKUPS = Task(
    name="lookups",
    what="the signs of up to 5 letters, asked for by one token",
    splits={"train": Lookups(), "longer": Lookups(pairs=(18, 26))},
    block_size=80,
)
