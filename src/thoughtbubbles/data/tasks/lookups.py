"""Several look-ups at once: an answer that depends on m places, all of which a single token has to find.

    c+a-f+b-e+d+:3bD2eD…

Each letter of a stretch of the alphabet (which may run from z on to a) has a sign, in random order. "3b" asks for the
signs of three letters from b on, b c d, as one number in binary with + as 1, written as one of 32 symbols: - + + is 3,
the symbol D. Every letter is asked for once, so no answer helps with another. There is nothing to compute but the
look-ups, so their number m is the work. A head that looks at one place at a time fetches one of them per block.
"""

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase, ascii_uppercase

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some

SYMBOLS = ascii_uppercase + "!#$%&*"  # of 0 … 31; no symbol is used for anything else
MOST = 5  # signs in a symbol


@dataclass(frozen=True, kw_only=True)
class Lookups(Variant):
    letters: tuple[int, int] = (8, 16)
    places: tuple[int, int] = (1, MOST)
    """That a question asks for."""

    def make(self, random: Random) -> Example:
        n, first = some(random, self.letters), random.randrange(26)
        letters = [ascii_lowercase[(first + i) % 26] for i in range(n)]
        signs = {letter: random.randrange(2) for letter in letters}
        writer = Writer()
        writer.say("".join(f"{letter}{'-+'[signs[letter]]}" for letter in random.sample(letters, n)) + ":")
        pieces = _cut(random, letters, self.places)
        for piece in random.sample(pieces, len(pieces)):
            number = 0
            for letter in piece:
                number = 2 * number + signs[letter]
            writer.say(f"{len(piece)}{piece[0]}")
            writer.answer(SYMBOLS[number], work=len(piece))
        return writer.example()

    @property
    def work(self) -> range:
        return range(self.places[0], self.places[1] + 1)


def _cut(random: Random, letters: list[str], sizes: tuple[int, int]) -> list[list[str]]:
    """Into pieces of random sizes; the last one is what is left."""
    pieces = []
    while letters:
        size = some(random, sizes)
        pieces.append(letters[:size])
        letters = letters[size:]
    return pieces


LOOKUPS = Task(
    name="lookups",
    what="the signs of up to 5 letters, asked for by one token",
    splits={"train": Lookups(), "longer": Lookups(letters=(20, 26))},
    block_size=136,
    is_forced=True,
    chance=lambda work: 0.5**work,
)
