"""The questions of docs/results, each with its answer, generated from the records."""

import math
from collections.abc import Callable, Sequence

from thoughtbubbles.files import read_object
from thoughtbubbles.recipes.reproduce.compare_rows import (
    Difference,
    autoregressive_gap,
    curve_differences,
    curve_of,
    difference,
    gap_of,
)
from thoughtbubbles.recipes.reproduce.equal_cost import ROWS, equal_cost, equal_latency
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Evidence, Results, flops, gpu_seconds, nats, tokens
from thoughtbubbles.recipes.reproduce.sentences import PRESET, compared, lead, needs
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.recipes.reproduce.tables import PAPER
from thoughtbubbles.written import plus_minus, signed

QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of the training
GATED, LONGER_GATED, WIDER_GATED = "head-gate", "longer-gate", "wider-gate"
HALF, LATE = "feedback-3-reach64-half-gate", "feedback-3-reach64-late-gate"
NO_WINDOW = "feedback-3-gate"
GATE = "a sigmoid per head (Qiu et al., arXiv 2505.06708)"


def as_items(parts: Sequence[str]) -> str:
    return "\n".join(f"- {part}" for part in parts)


def answers(evidence: Evidence) -> str:
    return "\n\n".join(f"### {question}\n\n{answer(evidence)}" for question, answer in QUESTIONS.items())


def equal_tokens(evidence: Evidence) -> str:
    gain, source = paper_gain()
    low, high = paper_range()
    large, where = paper_gain(-1)
    long = evidence.results["long"]
    lines = [
        f"- In `{name}`: {verdict_and_numbers(results, row, PLAIN)}"
        for row in ROWS
        for name in ("long", "short", "scarce")
        if row in (results := evidence.results[name]).protocol.rows
    ]
    paper = (
        f"The paper's gain at r = 2 is {gain:.3f} nats per token ({source}), and from {low:.3f} to {high:.3f} over the "
        "six settings of that table; it is scored blockwise, with block selection. Its "
        f"largest is {large:.3f} ({where})."
    )
    gap = difference(long, "r2", PLAIN)
    if gap is not None and gap.is_measurable and gap.mean < 0:
        paper += f" The gain of `r2` in `long` is {-gap.mean / gain:.0%} of that, per token of a smaller vocabulary."
    return "\n\n".join(["\n".join(lines), paper])


def verdict_and_numbers(results: Results, row: str, other: str) -> str:
    gap = difference(results, row, other)
    known = gap is not None and (gap.error is None or gap.is_measurable)
    return f"{lead(gap) if known else ''}{compared(results, row, other)}"


def paper_gain(setting: int = 0) -> tuple[float, str]:
    """Nats that r = 2 gains in a setting of the paper, by default the smallest, and where they come from."""
    part = read_object(PAPER)["zero_shot"][setting]
    plain, forked = (float(part["rows"][row]["perplexity"]) for row in (PLAIN, "block, r = 2"))
    source = f"the paper, table {part['table']}: {part['model']}, perplexity {plain:.2f} against {forked:.2f}"
    return math.log(plain / forked), source


def paper_range() -> tuple[float, float]:
    """The smallest and the largest gain of r = 2 in the paper's table of sizes and corpora."""
    gains = [math.log(plain / forked) for plain, forked in read_object(PAPER)["perplexities"]["plain, r = 2"].values()]
    return min(gains), max(gains)


def which_part(evidence: Evidence) -> str:
    results = evidence.results["long"]
    both, gate = difference(results, "r2", PLAIN), difference(results, "r1", PLAIN)
    share = ""
    if both and gate and both.is_measurable and both.mean < 0 and len(both.seeds) > 1 and both.seeds == gate.seeds:
        losses = {row: [nats(results.rows[row][seed]) for seed in both.seeds] for row in (PLAIN, "r1", "r2")}
        each = [(r1 - plain) / (r2 - plain) for plain, r1, r2 in zip(*losses.values(), strict=True)]
        share = f" That is {gate.mean / both.mean:.0%} of the gain of `r2`, by seed {min(each):.0%} to {max(each):.0%}."
    pairs = {
        "Attenuation alone": ("r1", PLAIN),
        "Forks in addition to it": ("r2", "r1"),
        "Forks without choosing and without scores": ("all-forked", PLAIN),
        "Choosing and scores, with as many streams": ("r2", "all-forked"),
        f"A plain model's own gate, {GATE}": ("head-gate", PLAIN),
        "The attenuation against that gate": ("r1", "head-gate"),
        "Forks against that gate": ("r2", "head-gate"),
        "Forks in the last quarter of the training only": ("r2-late", "r1"),
        "The same, 4 streams per token": ("r4-late", "r1"),
    }
    lines = [f"- {what}: {compared(results, *pair)}{share * (pair == ('r1', PLAIN))}" for what, pair in pairs.items()]
    return "\n".join(lines)


def better_forks(evidence: Evidence) -> str:
    """Forks that come after originals, against plain models with the same gate."""
    results, screen = evidence.results["long"], evidence.results["screen"]
    best = difference(results, PRESET, GATED)
    pairs = {
        "Against the gate alone": (PRESET, GATED),
        "Against the paper's forks with causal selection": (PRESET, "r2"),
        "In models of 2.1 × the parameters, against the gate alone": (f"wider-{PRESET}", WIDER_GATED),
        "Without seeing other forks, against the gate alone": (NO_WINDOW, GATED),
        "In the last half of the training only, against the gate alone": (HALF, GATED),
        "In the last half, against the gate alone with 1.4 × the tokens": (HALF, f"{LONGER_GATED}-1.4"),
        "In the last quarter, against the gate alone": (LATE, GATED),
        "In the last quarter, against the gate alone with 1.2 × the tokens": (LATE, f"{LONGER_GATED}-1.2"),
        "Against the gate alone with more tokens": (PRESET, LONGER_GATED),
    }
    lines = [f"- {what}: {compared(results, *pair)}" for what, pair in pairs.items()]
    if difference(results, PRESET, LONGER_GATED) and results.same_device:
        time, text = (results.ratio(LONGER_GATED, value, over=PRESET) for value in (gpu_seconds, tokens))
        lines[-1] += f" `{LONGER_GATED}` takes {time:.2f} × its GPU time, and reads {text:.2f} × as many tokens."
    lines += [
        f"- In `screen`, with a third of the tokens: {compared(screen, row, GATED)}" for row in (PRESET, NO_WINDOW)
    ]
    about = (
        f"`{PRESET}` has a gate per head. Its forks begin after all originals, from the last state of the previous "
        "token too; originals see none of them, and forks those of the 64 tokens before."
    )
    return "\n\n".join([lead(best) + about, "\n".join(lines)])


def causal_or_block(evidence: Evidence) -> str:
    both = {name: evidence.results[name] for name in ("long", "short")}
    parts = [f"In `{name}`, scored blockwise: {compared(results, 'r2', 'block')}" for name, results in both.items()]
    parts += [leak(name, autoregressive_gap(results, "block")) for name, results in both.items()]
    paper = read_object(PAPER)["autoregression"]
    blockwise, stepwise = (float(paper["perplexity"][way]) for way in ("blockwise", "autoregressive"))
    parts.append(
        f"The paper's own difference is {signed(math.log(stepwise / blockwise))} nats per token (figure "
        f"{paper['figure']}: perplexity {blockwise:.2f} blockwise, {stepwise:.2f} token by token; {paper['model']})."
    )
    others = [
        abs(gap.mean)
        for results in both.values()
        for row in results.rows
        if row != "block" and (gap := autoregressive_gap(results, row)) is not None
    ]
    if others:
        parts.append(f"Rows without block selection differ by {max(others):.0e} nats per token at most.")
    return as_items(parts)


def leak(name: str, gap: Difference | None) -> str:
    if gap is None:
        return f"The leak in `{name}`: not measured yet, needs row `block`."
    seeds = f"{len(gap.seeds)} seeds" if len(gap.seeds) > 1 else "one seed, ± over windows"
    shown = f"({signed(gap.mean)}{plus_minus(gap.error)} nats per token, {seeds})"
    if gap.is_measurable and gap.mean > 0:
        return (
            f"In `{name}` the blockwise number of `block` is too low: scored token by token, the same weights have a "
            f"higher loss {shown}. That has two causes, which are not told apart here: the leak, and that a prefix "
            "alone keeps other streams than the whole block does."
        )
    return f"In `{name}`, `block` has no leak that we can measure: token by token against blockwise {shown}."


def growth(evidence: Evidence) -> str:
    results, parts = evidence.results["long"], []
    if PLAIN not in results:
        return needs(results, (PLAIN, "r1", "r2"))
    for row, other in (("r2", PLAIN), ("r1", PLAIN), (PRESET, PLAIN), (PRESET, GATED)):
        points = curve_differences(results, row, other)
        if not points:
            parts.append(needs(results, (other, row)))
            continue
        at = [closest(points, share) for share in QUARTERS]
        shown = ", ".join(
            f"{signed(gap.mean)}{plus_minus(gap.error)} at {share:.0%}"
            for share, (_, gap) in zip(QUARTERS, at, strict=True)
        )
        n = len(at[-1][1].seeds)
        seeds = f"{n} seed{'s' * (n > 1)}"
        parts.append(f"`{row}` − `{other}`: {shown} ({seeds}). {trend(results, row, other, at[1][0], at[-1][0])}")
    text = f"{results.records[0]['config']['eval']['tokens']:,} validation tokens"
    about = "± is the variation between seeds, without that of the text, and one in twenty trends is found by chance"
    return f"Nats per token by share of the training, on {text}; {about}:\n\n{as_items(parts)}"


def closest(points: Sequence[tuple[int, Difference]], share: float) -> tuple[int, Difference]:
    return min(points, key=lambda point: abs(point[0] - share * points[-1][0]))


def trend(results: Results, row: str, other: str, middle: int, end: int) -> str:
    """Whether the difference at the end is not that of the middle of the training."""

    def moved(record: Record) -> float | None:
        points = curve_of(record)
        return points[end] - points[middle] if {middle, end} <= points.keys() else None

    change = gap_of(results, row, other, moved)
    if change.error is None:
        return "With one seed we cannot say whether that is a trend."
    shown = f"({signed(change.mean)}{plus_minus(change.error)} nats per token)"
    if not change.is_measurable:
        return f"From half of the training to its end there is no change that we can measure {shown}."
    direction = "moves in favour of" if change.mean < 0 else "moves against"
    return f"From half of the training to its end the difference {direction} `{row}` {shown}."


QUESTIONS: dict[str, Callable[[Evidence], str]] = {
    "Does it help at equal tokens?": equal_tokens,
    "Does it help at equal FLOPs?": lambda evidence: equal_cost(evidence, flops, "training FLOPs"),
    "Does it help at equal GPU time?": lambda evidence: equal_cost(evidence, gpu_seconds, "GPU time of training"),
    "Does it help at equal decoding latency?": equal_latency,
    "Is it the forks, the choosing or the attenuation?": which_part,
    "Do forks pay if they come after originals?": better_forks,
    "Is causal selection as good as the paper's, and does the paper's blockwise number leak?": causal_or_block,
    "Does the gain grow or shrink with training?": growth,
}
