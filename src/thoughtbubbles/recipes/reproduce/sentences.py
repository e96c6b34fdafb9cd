"""Sentences about the difference of two rows: who is ahead, by how much, over how many seeds.

If the interval of 95 % confidence has 0 in it, a sentence says "no difference that we can measure"; where rows are
missing it names them.
"""

from collections.abc import Sequence

from thoughtbubbles.recipes.reproduce.compare_rows import Difference, difference
from thoughtbubbles.recipes.reproduce.records import Results
from thoughtbubbles.written import signed

PRESET = "feedback-3-reach64-gate"  # the row whose form the presets of ModelConfig have


def needs(results: Results, rows: Sequence[str]) -> str:
    missing = results.missing(rows)
    if not missing:
        return f"Not measured yet: needs a common seed of {', '.join(f'`{row}`' for row in rows)} in `{results.name}`."
    named = ", ".join(f"`{row}`" for row in missing)
    return f"Not measured yet: needs row{'s' * (len(missing) > 1)} {named} of `{results.name}`."


def sentence(gap: Difference, row: str, other: str) -> str:
    """Without the full stop."""
    if gap.error is None:
        return f"{ahead(gap, row, other)} ({len(gap.seeds)} seed, without an error)"
    if not gap.is_measurable:
        return (
            f"between `{row}` and `{other}` there is no difference that we can measure "
            f"({signed(gap.mean)} ± {gap.error:.4f} nats per token, {gap.seeds_in_words})"
        )
    return f"{ahead(gap, row, other)} ({gap.seeds_in_words})"


def ahead(gap: Difference, row: str, other: str) -> str:
    return f"`{row}` ends {gap.size} nats per token {'below' if gap.mean < 0 else 'above'} `{other}`"


def compared(results: Results, row: str, other: str) -> str:
    gap = difference(results, row, other)
    return needs(results, (row, other)) if gap is None else f"{sentence(gap, row, other)}."


def verdict(gap: Difference) -> str:
    """The answer in a word or two, if a loss below 0 is what was asked for."""
    if gap.error is not None and not gap.is_measurable:
        return "no difference that we can measure"
    so_far = {1: ", in the only seed so far", 2: ", in the two seeds so far"}.get(len(gap.seeds), "")
    return f"{'yes' if gap.mean < 0 else 'no'}{so_far}"


def lead(gap: Difference | None) -> str:
    """That, to begin a paragraph with."""
    if gap is None:
        return ""
    word = verdict(gap)
    return f"**{word[0].upper()}{word[1:]}.** "
