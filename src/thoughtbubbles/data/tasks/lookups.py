"""Several look-ups at once: an answer that depends on m places, all of which a single token has to find.

    cAfBeD:3b(2e!1a#

Each letter of a stretch of the alphabet (which may run from z on to a) is there once, lowercase or uppercase, in random
order. "3b" asks which of three letters from b on, b c d, are uppercase, as one number in binary, written as one of 32
symbols: B c D is 5, the symbol (. Every letter is asked for once, so no answer helps with another. There is nothing to
compute but the look-ups, so their number m is the work. A head that looks at one place at a time fetches one of them
per block.

A letter and its case are one token: with a sign after each letter, models only learned to count signs (docs/log.md).
"""

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some

SYMBOLS = "!#$%&()*+-/;<=>?@[]^_{}~,.'06789"  # of 0 … 31; no symbol is used for anything else
MOST = 5  # letters that a symbol stands for


@dataclass(frozen=True, kw_only=True)
class Lookups(Variant):
    letters: tuple[int, int] = (8, 16)
    places: tuple[int, int] = (1, MOST)
    """That a question asks for."""

    def make(self, random: Random) -> Example:
        n, first = some(random, self.letters), random.randrange(26)
        letters = [ascii_lowercase[(first + i) % 26] for i in range(n)]
        is_upper = {letter: random.randrange(2) for letter in letters}
        writer = Writer()
        writer.say("".join(x.upper() if is_upper[x] else x for x in random.sample(letters, n)) + ":")
        pieces = _cut(random, letters, self.places)
        for piece in random.sample(pieces, len(pieces)):
            number = 0
            for letter in piece:
                number = 2 * number + is_upper[letter]
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
    what="which of up to 5 letters are uppercase, asked for by one token",
    splits={"train": Lookups(), "longer": Lookups(letters=(20, 26))},
    block_size=112,
    is_forced=True,
    chance=lambda work: 0.5**work,
)
