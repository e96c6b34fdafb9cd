"""Sentences about the difference of two rows: who is ahead, by how much, over how many seeds.

If the interval of 95 % confidence has 0 in it, a sentence says "no difference that we can measure"; where rows are
missing it names them.
"""

from collections.abc import Sequence

from thoughtbubbles.recipes.reproduce.compare_rows import Difference, difference, signed
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Results, gpu_seconds, parameters, tokens

PAGE = "docs/results/index.md"  # as seen from the README
PRESET = "feedback-3-reach64-gate"  # the row whose form the presets of ModelConfig have
LONGER = "longer"  # the row of `long` with the GPU time of `r2` and no forks


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


def lead(gap: Difference | None) -> str:
    """The answer in a word or two, if a loss below 0 is what was asked for."""
    if gap is None:
        return ""
    if gap.error is not None and not gap.is_measurable:
        return "**No difference that we can measure.** "
    word, n = "Yes" if gap.mean < 0 else "No", len(gap.seeds)
    so_far = {1: ", in the only seed so far", 2: ", in the two seeds so far"}.get(n, "")
    return f"**{word}{so_far}.** "


def evidence_line(results: Results) -> str:
    """For the README, from the records of `long`."""
    r2, r1 = difference(results, "r2", PLAIN), difference(results, "r1", PLAIN)
    page = f"[results]({PAGE})"
    if r1 is None:
        return f"Experiments on what bubbles bring, and which part of it the forks bring, are running: {page}."
    size = f"{results.mean(PLAIN, parameters) / 1e6:.1f}M parameters"
    length = f"{results.mean(PLAIN, tokens) / 1e6:,.0f}M training tokens"
    without = f"with scores and attenuation but no forks, {sentence(r1, 'r1', PLAIN)}"
    forks, time = "with forks: still to be run", ""
    if r2 is not None:
        forks = f"with forks, {sentence(r2, 'r2', PLAIN)}"
        time = gpu_time_sentence(results) if results.same_device else ""
    learned = f"At {size} and {length}, against plain GPT: {without}; {forks}.{time}"
    return f"{learned}{preset_sentence(results)} All rows, seeds and plots: {page}."


def preset_sentence(results: Results) -> str:
    """The form of the presets, against plain GPT with its gate."""
    gap, control = (difference(results, PRESET, row) for row in (PLAIN, "head-gate"))
    if gap is None:
        return ""
    parts = [sentence(gap, PRESET, PLAIN)]
    if results.same_device:
        parts[0] += f", at {results.ratio(PRESET, gpu_seconds):.2f} × its GPU time"
    if control is not None:
        parts.append(f"against a plain GPT with the same gate, {sentence(control, PRESET, 'head-gate')}")
    return f" The form of our presets, every token forked once and with feedback: {'; '.join(parts)}."


def gpu_time_sentence(results: Results) -> str:
    """What the forks cost, and what a plain model does with as much."""
    rival = difference(results, "r2", LONGER)
    against = ""
    if rival is not None:
        more = results.ratio(LONGER, tokens)
        what = f"`{LONGER}`, a plain GPT that spends as much on {more:.1f} × the tokens"
        against = f"; against {what}: {sentence(rival, 'r2', LONGER)}"
    return f" `r2` takes {results.ratio('r2', gpu_seconds):.2f} × the GPU time of `{PLAIN}`{against}."
