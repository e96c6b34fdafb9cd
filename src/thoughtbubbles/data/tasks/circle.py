"""A circle of people: who sits so many places further on, if each was only introduced with the next one?

    CxXkByYcKsSb;C>xksbyc;5X=c5C=y5B=s3Y=k4S=x2K=b

"Cx": the next one after C is x. The introductions are in no order. Then the whole circle is gone round once, from
anywhere: one look-up after another, each of which starts from the letter before it, so that none is hard. "5X=" asks
who sits five places on from X. Everybody is asked about once. The work is the number of places.

There are two ways to an answer: to follow the introductions, place by place, or to find the name in the round and
count on, back to its beginning where it ends. Both are look-ups of which each needs the one before, so they take depth;
the second takes no more of it for more places. "=" comes between the question and its answer, so the token that answers
starts when the one before it already knows who and how far.

Who introduces is uppercase and who is introduced lowercase, so that no token is both.
"""

from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from thoughtbubbles.data.tasks.task import Example, Task, Variant, Writer, some


@dataclass(frozen=True, kw_only=True)
class Circle(Variant):
    people: tuple[int, int] = (6, 9)
    """More than there are places to go on: nobody is the answer to a question about themselves."""
    places: tuple[int, int] = (1, 5)

    def make(self, random: Random) -> Example:
        n = some(random, self.people)
        names = random.sample(ascii_lowercase, n)

        def after(person: int, places: int) -> str:
            return names[(person + places) % n]

        def in_any_order() -> list[int]:
            return random.sample(range(n), n)

        writer, first = Writer(), random.randrange(n)
        writer.say("".join(f"{names[person].upper()}{after(person, 1)}" for person in in_any_order()))
        writer.say(f";{names[first].upper()}>")
        writer.answer("".join(after(first, 1 + i) for i in range(n)), work=0)
        writer.say(";")
        for person in in_any_order():
            places = some(random, self.places)
            writer.say(f"{places}{names[person].upper()}=")
            writer.answer(after(person, places), work=places)
        return writer.example()

    @property
    def work(self) -> range:
        return range(self.places[0], self.places[1] + 1)


CIRCLE = Task(
    name="circle",
    what="who sits so many places further on, if only everybody's next one is known?",
    # Nothing deeper: no training text would have the digits to ask for more places.
    splits={"train": Circle(), "longer": Circle(people=(10, 11))},
    block_size=88,
    is_forced=False,
    # Anybody else: one of n − 1 for each of n questions, with n from 6 to 9, or 10 and 11.
    chance=lambda work: 0.154,
    other_chance={"longer": 0.105},
)
