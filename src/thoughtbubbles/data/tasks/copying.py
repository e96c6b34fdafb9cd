"""The control, in which nothing is hard: a string of letters, and the same string again.

kqzvba|kqzvba
"""

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some


@dataclass(frozen=True, kw_only=True)
class Copying(Variant):
    letters: tuple[int, int] = (8, 40)

    def make(self, random: Random) -> Example:
        text = "".join(random.choices(ascii_lowercase, k=some(random, self.letters)))
        writer = Writer()
        writer.say(text + "|")
        writer.answer(text, work=0)
        return writer.example()

    @property
    def work(self) -> range:
        return range(0)


COPY = Task(
    name="copy",
    what="a string, repeated: nothing is hard",
    splits={"train": Copying(), "longer": Copying(letters=(41, 60))},
    block_size=128,
    is_forced=False,
    chance=lambda work: 1 / 26,
)
